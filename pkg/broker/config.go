package broker

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// Config says who a broker is and how it behaves. Zero fields mean the defaults.
type Config struct {
	// Self is how the broker announces itself; ID, URL and Peer are required.
	Self meta.BrokerInfo
	// Replication of new ledgers where a namespace's policies are silent; 3/3/2.
	Replication meta.Replication
	// AutoCreateTopics is what holds where a namespace's policies are silent; DisableAutoCreate turns it off.
	DisableAutoCreate bool
	// MaxMessageSize is the largest message in bytes; 5 MiB.
	MaxMessageSize int
	// PublishBytes bounds batches that are on their way to bookies, CacheBytes the newest entries kept for readers,
	// ReadBytes what was read for consumers and not sent; 256 MiB, 128 MiB and 64 MiB.
	PublishBytes, CacheBytes, ReadBytes int64
	// A ledger rolls at RollBytes (256 MiB), or when it is RollAge (4 h) old and something is appended.
	RollBytes int64
	RollAge   time.Duration
	// HousekeepingEvery is the time between two looks at retention, quotas and snapshots of the open topics; 10 s.
	HousekeepingEvery time.Duration
	// LookEvery is the time between two looks at what the open topics and their subscriptions do, for metrics by namespace and
	// topic, and for penstock top; 5 s.
	LookEvery time.Duration
	// Ledger holds the limits and times of replication.
	Ledger ledger.Config
	// Repair says how copies that are missing are made; its Worker is filled in.
	Repair repair.Config
}

func (c Config) withDefaults() Config {
	def := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.PublishBytes, 256<<20)
	def(&c.CacheBytes, 128<<20)
	def(&c.ReadBytes, 64<<20)
	def((*int64)(&c.HousekeepingEvery), int64(10*time.Second))
	def((*int64)(&c.LookEvery), int64(5*time.Second))
	if c.MaxMessageSize == 0 {
		c.MaxMessageSize = 5 << 20
	}
	if c.Replication == (meta.Replication{}) {
		c.Replication = meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}
	}
	return c
}

// Deps is what a broker works with. It closes none of it.
type Deps struct {
	Meta *meta.Store
	// Cache must be synced.
	Cache   *meta.Cache
	Session *lease.Session
	Bookies ledger.Bookies
	// Log and Registerer may be nil.
	Log        *slog.Logger
	Registerer prometheus.Registerer
}
