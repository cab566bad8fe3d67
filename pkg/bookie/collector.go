package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Collection is what garbage collection asks of a store; [*ledgerstore.Store] is one.
type Collection interface {
	Ledgers(yield func(ledgerstore.LedgerInfo) bool)
	Ledger(id entry.LedgerID) (ledgerstore.LedgerInfo, bool)
	DeleteLedger(ctx context.Context, id entry.LedgerID) error
}

// Records is what garbage collection asks of the metadata; [*meta.Store] is one. All reads are linearizable.
type Records interface {
	Ledgers
	GetCluster(ctx context.Context) (meta.ClusterInfo, error)
	LedgersOn(ctx context.Context, u entry.StorageUUID) ([]entry.LedgerID, error)
	ConfirmDeleted(ctx context.Context, id entry.LedgerID, u entry.StorageUUID) error
}

// GCConfig configures garbage collection. Zero values become the defaults.
type GCConfig struct {
	// Interval is the pause between passes. Default 1 min.
	Interval time.Duration
	// Grace is how long a closed ledger must have been seen not to be this bookie's. Default 10 min.
	Grace time.Duration
	// MaxFraction of the ledgers here is the most that a pass deletes (but always up to 16). Default 0.25.
	MaxFraction float64
	// ReadsPerSecond limits the metadata reads of a pass. Default 1000.
	ReadsPerSecond float64
}

// WithDefaults fills in what is zero.
func (c GCConfig) WithDefaults() GCConfig {
	setDefault(&c.Interval, time.Minute)
	setDefault(&c.Grace, 10*time.Minute)
	setDefault(&c.MaxFraction, 0.25)
	setDefault(&c.ReadsPerSecond, 1000)
	return c
}

// Pass is the outcome of one pass.
type Pass struct {
	// Deleted ledgers are buried here; Quarantined ones have no record; Skipped ones could not be decided;
	// Postponed ones may go and exceed the cap.
	Deleted, Quarantined, Skipped, Postponed int
}

// Collector carries out what [Judge] decides, over all ledgers stored here and all that the metadata place here.
type Collector struct {
	cfg     GCConfig
	me      Identity
	store   Collection
	records Records
	log     *slog.Logger
	metrics *gcMetrics
	limiter *rate.Limiter
	now     func() time.Time

	mu          sync.Mutex // one pass at a time
	seen        map[entry.LedgerID]Sighting
	quarantined map[entry.LedgerID]bool
	// revisions are the highest that each ledger's record was read at. One that falls means that etcd was restored
	// from an older copy: nothing that it says of deletions is to be trusted then.
	revisions map[entry.LedgerID]int64
}

// NewCollector makes a collector. registerer may be nil.
func NewCollector(cfg GCConfig, me Identity, store Collection, records Records, log *slog.Logger, registerer prometheus.Registerer) *Collector {
	cfg = cfg.WithDefaults()
	return &Collector{
		cfg: cfg, me: me, store: store, records: records, log: log, metrics: newGCMetrics(registerer),
		limiter: rate.NewLimiter(rate.Limit(cfg.ReadsPerSecond), 100), now: time.Now,
		seen: make(map[entry.LedgerID]Sighting), quarantined: make(map[entry.LedgerID]bool),
		revisions: make(map[entry.LedgerID]int64),
	}
}

// Run makes a pass per interval until ctx ends.
func (c *Collector) Run(ctx context.Context) {
	timer := time.NewTimer(c.cfg.Interval)
	defer timer.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		_, err := c.Pass(ctx)
		if failed := err != nil && ctx.Err() == nil; failed != failing {
			failing = failed
			if failed {
				c.log.Warn("garbage collection cannot go on, nothing is deleted", slog.Any("error", err))
			} else {
				c.log.Info("garbage collection goes on")
			}
		}
		timer.Reset(c.cfg.Interval)
	}
}

// Pass looks at every ledger once. An error means that the pass ended early; what it deleted before stays deleted.
func (c *Collector) Pass(ctx context.Context) (Pass, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var p Pass
	cluster, err := c.records.GetCluster(ctx)
	if err != nil {
		return p, fmt.Errorf("read cluster: %w", err)
	}
	if cluster.UUID != c.me.Cluster {
		return p, fmt.Errorf("etcd holds cluster %s, this bookie's is %s", cluster.UUID, c.me.Cluster)
	}
	// Placed here but not stored: their deletion waits for a word from here.
	ids, err := c.records.LedgersOn(ctx, c.me.Storage)
	if err != nil {
		return p, fmt.Errorf("list ledgers placed here: %w", err)
	}
	stored := 0
	c.store.Ledgers(func(l ledgerstore.LedgerInfo) bool {
		ids = append(ids, l.Ledger)
		stored++
		return true
	})
	slices.Sort(ids)
	ids = slices.Compact(ids)
	limit := maxDeletes(stored, c.cfg.MaxFraction)
	seen, revisions := make(map[entry.LedgerID]Sighting), make(map[entry.LedgerID]int64)
	for _, id := range ids {
		if err := c.limiter.Wait(ctx); err != nil {
			return p, fmt.Errorf("wait for a read: %w", err)
		}
		if err := c.one(ctx, id, &p, limit, seen, revisions); err != nil {
			return p, err
		}
	}
	c.seen, c.revisions = seen, revisions
	c.metrics.quarantined.Set(float64(p.Quarantined))
	c.metrics.passes.Inc()
	return p, nil
}

// one judges a ledger and acts.
func (c *Collector) one(ctx context.Context, id entry.LedgerID, p *Pass, limit int, seen map[entry.LedgerID]Sighting, revisions map[entry.LedgerID]int64) error {
	l, err := c.records.GetLedger(ctx, id)
	if err == nil {
		if before := c.revisions[id]; l.Rev < before {
			return fmt.Errorf("the record of ledger %d went back from revision %d to %d: etcd was restored from an older copy; audit before this bookie is restarted", id, before, l.Rev)
		}
		revisions[id] = l.Rev
	}
	info, stored := c.store.Ledger(id)
	here := Local{Stored: stored, Entries: info.Entries}
	verdict := Judge(c.me.Storage, here, l, err, c.seen[id], c.now(), c.cfg.Grace)
	if verdict != Quarantine {
		delete(c.quarantined, id)
	}
	switch verdict {
	case Keep:
	case Skip:
		if ctx.Err() != nil || errors.Is(err, meta.ErrUnavailable) {
			return fmt.Errorf("read ledger %d: %w", id, err)
		}
		p.Skipped++
		c.metrics.skipped.Inc()
		if s, ok := c.seen[id]; ok {
			seen[id] = s
		}
	case Watch:
		s := c.seen[id]
		if s.At.IsZero() || s.Entries != here.Entries {
			s = Sighting{At: c.now(), Entries: here.Entries}
		}
		seen[id] = s
	case Quarantine:
		p.Quarantined++
		if !c.quarantined[id] {
			c.quarantined[id] = true
			c.log.Warn("ledger has no record and no tombstone, kept in quarantine", slog.Uint64("ledger", uint64(id)))
		}
	case Delete:
		if p.Deleted >= limit {
			p.Postponed++
			if s, ok := c.seen[id]; ok {
				seen[id] = s
			}
			return nil
		}
		if err := c.store.DeleteLedger(ctx, id); err != nil {
			return err
		}
		p.Deleted++
		c.metrics.deleted.Inc()
		c.log.Info("ledger deleted", slog.Uint64("ledger", uint64(id)), slog.String("state", l.State.String()))
		if l.State == meta.LedgerDeleting && unconfirmed(l, c.me.Storage) {
			return c.confirm(ctx, id)
		}
	case Confirm:
		return c.confirm(ctx, id)
	}
	return nil
}

func (c *Collector) confirm(ctx context.Context, id entry.LedgerID) error {
	if err := c.records.ConfirmDeleted(ctx, id, c.me.Storage); err != nil {
		return fmt.Errorf("confirm deletion of ledger %d: %w", id, err)
	}
	return nil
}

// gcMetrics are a collector's.
type gcMetrics struct {
	passes      prometheus.Counter
	deleted     prometheus.Counter
	skipped     prometheus.Counter
	quarantined prometheus.Gauge
}

func newGCMetrics(registerer prometheus.Registerer) *gcMetrics {
	m := &gcMetrics{
		passes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookie_gc_passes_total", Help: "Passes of garbage collection that looked at every ledger.",
		}),
		deleted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookie_gc_deleted_ledgers_total", Help: "Ledgers that garbage collection deleted.",
		}),
		skipped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookie_gc_skipped_ledgers_total", Help: "Ledgers about which garbage collection could not decide.",
		}),
		quarantined: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "penstock_bookie_gc_quarantined_ledgers", Help: "Ledgers stored here of which the metadata have neither record nor tombstone.",
		}),
	}
	if registerer != nil {
		registerer.MustRegister(m.passes, m.deleted, m.skipped, m.quarantined)
	}
	return m
}
