package ledgerstore

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/segment"
)

// Config says where a store lives and what it may use. The zero value of each field but Dir, Cluster and Storage
// takes the default named beside it.
type Config struct {
	// Dir is the data directory; it is made if missing. One store per directory, one directory per disk.
	Dir string
	// Cluster and Storage are whose data this is; a segment or manifest of another is refused.
	Cluster entry.UUID
	Storage entry.StorageUUID
	// Fresh says that nothing can have been acknowledged from this directory yet, so that it may be empty. Otherwise
	// a directory without a manifest has lost everything (see [Loss]).
	Fresh bool

	// Sync says when entries are synced; by default before they are acknowledged.
	Sync SyncPolicy

	// SegmentSize is the size of a segment file in bytes; 256 MiB.
	SegmentSize int64
	// Spares is how many allocated files are kept beside the log, for reuse and as the reserve from which a full
	// disk still takes fences, recovery's and urgent writes, and compaction; 2. Watermarks count them as free.
	Spares int
	// LowRatio of the disk in use makes the store read-only for new ledgers; 0.90.
	LowRatio float64
	// HighRatio of the disk in use makes it take only recovery's and urgent writes, and control records; 0.95.
	HighRatio float64

	// CacheBytes bounds the newest entries kept in memory; 64 MiB.
	CacheBytes int64
	// IndexBytes bounds the parts of sealed segments' footers kept in memory; 64 MiB.
	IndexBytes int64
	// PendingBytes bounds what is accepted and not yet durable; 64 MiB. Above it adds are answered Overloaded.
	// Recovery's writes and control records are not refused.
	PendingBytes int64

	// Trash is how long what a deleted ledger had on the disk stays there, if there is room; 1 h. Negative: not at all.
	Trash time.Duration
	// CompactBelow is the share of their space on the disk that sealed segments are rewritten into at most; 0.5.
	CompactBelow float64
	// CompactBytesPerSecond throttles reading for compaction; 32 MiB. Negative switches background compaction off:
	// only CompactOnce compacts then, unthrottled.
	CompactBytesPerSecond int64

	// Sched has the clock that the trash goes by; nil is the real one.
	Sched sched.Scheduler
}

const mib = 1 << 20

func (c Config) withDefaults() (Config, error) {
	setDefault(&c.SegmentSize, 256*mib)
	setDefault(&c.Spares, 2)
	setDefault(&c.LowRatio, 0.90)
	setDefault(&c.HighRatio, 0.95)
	setDefault(&c.CacheBytes, 64*mib)
	setDefault(&c.IndexBytes, 64*mib)
	setDefault(&c.PendingBytes, 64*mib)
	setDefault(&c.Trash, time.Hour)
	setDefault(&c.CompactBelow, 0.5)
	setDefault(&c.CompactBytesPerSecond, 32*mib)
	c.Sched = sched.OrReal(c.Sched)
	switch {
	case c.Dir == "":
		return c, errors.New("data directory is not set")
	case c.Storage.IsZero() || c.Cluster.IsZero():
		return c, errors.New("cluster or storage identity is not set")
	case c.SegmentSize < minSegmentSize || c.SegmentSize > segment.MaxSegmentBytes:
		return c, fmt.Errorf("segment size %d is outside [%d, %d]", c.SegmentSize, minSegmentSize, segment.MaxSegmentBytes)
	case c.Sync.Interval < 0 || c.Sync.Messages < 0 || c.Sync.Messages > 0 && c.Sync.Interval == 0:
		return c, fmt.Errorf("sync policy %+v: messages need an interval, and neither is negative", c.Sync)
	case c.Spares < 0:
		return c, fmt.Errorf("spares %d is negative", c.Spares)
	case c.LowRatio <= 0 || c.LowRatio > c.HighRatio || c.HighRatio > 1:
		return c, fmt.Errorf("watermarks %.2f and %.2f: want 0 < low ≤ high ≤ 1", c.LowRatio, c.HighRatio)
	case c.CompactBelow <= 0 || c.CompactBelow > 1:
		return c, fmt.Errorf("compaction threshold %.2f is outside (0, 1]", c.CompactBelow)
	}
	return c, nil
}

// minSegmentSize keeps tests small; what is larger than a segment's room gets a larger file of its own.
const minSegmentSize = 16 << 10

func setDefault[T comparable](v *T, to T) {
	var zero T
	if *v == zero {
		*v = to
	}
}

// State is what a store takes. It is derived from the disk, never stored, and ends by itself.
type State uint8

const (
	// Writable takes everything.
	Writable State = iota
	// ReadOnly takes no new ledgers.
	ReadOnly
	// Full takes only recovery's, repair's and urgent writes, fences and other control records, deletion and compaction.
	Full
)

// String names the state as registrations and logs do.
func (s State) String() string {
	switch s {
	case Writable:
		return "writable"
	case ReadOnly:
		return "read-only"
	case Full:
		return "full"
	}
	return fmt.Sprintf("state-%d", uint8(s))
}

// Usage is the space of the store's disk, in bytes.
type Usage struct {
	// Total is the size of the disk.
	Total uint64
	// Free is what is left, spare segments included.
	Free uint64
	// Live are bytes of entries of ledgers that exist here; Dead are bytes that compaction or unlinking will free.
	Live, Dead uint64
	// Segments is the number of segment files, spares excluded.
	Segments int
}

// LedgerInfo is what the store knows of a ledger.
type LedgerInfo struct {
	Ledger entry.LedgerID
	// Term is the highest term stored, 0 if the ledger was never fenced here.
	Term entry.Term
	// LAC is the highest seen.
	LAC entry.EntryID
	// First and Last are the lowest and highest entries stored, NoEntry without any. Not each entry between is here.
	First, Last entry.EntryID
	// Entries and Bytes count what is stored.
	Entries, Bytes int64
	// Limbo: entries may have been lost here; a miss is Unknown.
	Limbo bool
}

// Loss tells what Open found to be damaged or missing although it had been acknowledged.
type Loss struct {
	// All is set, durably, when it cannot be told which ledgers are affected. Until EndLoss, unknown ledgers are
	// answered Unknown and take no writer's adds.
	All bool
	// Ledgers were put in limbo, and fenced, by this Open.
	Ledgers []entry.LedgerID
}
