package topic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Errors that callers decide by. All are returned wrapped. Failures of a batch after it was taken in are
// *[ledger.AppendError], whose outcome says whether the batch may be stored.
var (
	// ErrClosed: the topic was closed, or shut down, by its own process.
	ErrClosed = errors.New("topic is closed")
	// ErrProducerFenced: a newer incarnation of the producer took over.
	ErrProducerFenced = errors.New("a newer incarnation of the producer took over")
	// ErrProducerReplaced: the producer came back by another way.
	ErrProducerReplaced = errors.New("the producer came back by another stream")
	// ErrSequenceGap: an earlier batch of the producer was refused or failed, and has not been sent again. Send it,
	// and everything after it, again.
	ErrSequenceGap = errors.New("an earlier batch of the producer is missing")
	// ErrSequenceOverlap: a batch contains both stored and new sequences; a retry must have the bounds of the first
	// attempt.
	ErrSequenceOverlap = errors.New("batch overlaps with stored sequences")
	// ErrCopiesUnknown: a duplicate at AckAll of a batch that is stored, on the ack quorum at least; whether it is on all
	// disks is not known any more.
	ErrCopiesUnknown = errors.New("the batch is stored already, and may not be on all disks")
	// ErrUnavailable: batches fail at the moment, because no ledger can be opened; try again.
	ErrUnavailable = errors.New("topic takes no messages at the moment")
)

// Env is what the topics of a process share. Copy it freely.
type Env struct {
	Chain chain.Env
	// Cache holds the newest entries of all topics; nil: readers go to bookies.
	Cache *Cache
	// Budget is charged for the bytes of batches from Append until no bookie needs them any more; nil: unbounded.
	Budget *budget.Budget
	// Log and Metrics may be nil.
	Log     *slog.Logger
	Metrics *Metrics
	// Sched is the clock, and how readers wait; nil means sched.Real.
	Sched sched.Scheduler
}

// Config says how one topic behaves. Zero fields mean the defaults.
type Config struct {
	Replication meta.Replication
	RollBytes   int64
	RollEntries int64
	RollAge     time.Duration
	// OpenNow opens a ledger in Open, in one transaction with the closing of a recovered one: set it when a
	// producer is waiting.
	OpenNow bool
	// MaxPendingBytes bounds the bytes of one topic that are charged to the budget; 64 MiB.
	MaxPendingBytes int64
	// Snapshots keeps deduplication snapshots; nil: there are none, everything is rebuilt from the stored entries,
	// trimming forgets, and so do owners which incarnations were let in before them and stored nothing.
	Snapshots SnapshotStore
	Dedup     DedupConfig
}

// DedupConfig bounds what is kept of producers. Zero fields mean the defaults.
type DedupConfig struct {
	// SnapshotEntries and SnapshotBytes say how much may be appended before a snapshot is due: 5,000 and 64 MiB.
	SnapshotEntries int64
	SnapshotBytes   int64
	// A producer that is not open, and was not opened and stored nothing for IdleAfter (7 days), all of which this owner has
	// seen pass, is forgotten at a snapshot: an owner whose clock is ahead forgets nobody for that. Above MaxProducers
	// (100,000), so are those of which that is true for longest.
	IdleAfter    time.Duration
	MaxProducers int
}

func (c Config) withDefaults() Config {
	def := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.MaxPendingBytes, 64<<20)
	def(&c.Dedup.SnapshotEntries, 5000)
	def(&c.Dedup.SnapshotBytes, 64<<20)
	def((*int64)(&c.Dedup.IdleAfter), int64(7*24*time.Hour))
	if c.Dedup.MaxProducers == 0 {
		c.Dedup.MaxProducers = 100_000
	}
	return c
}

// Record is one piece of a snapshot: the newest Value of a Key counts.
type Record struct {
	Key, Value []byte
	Delete     bool
}

// SnapshotStore keeps one topic's deduplication records.
type SnapshotStore interface {
	// Load returns the live records, in any order.
	Load(ctx context.Context) ([]Record, error)
	// Save makes records durable, in order: if it fails half-way, what is kept is a beginning. It returns once they
	// are.
	Save(ctx context.Context, records []Record) error
}

// Batch is one frame to store as one entry.
type Batch struct {
	// Frame is copied. Parsed is frame.Parse of it.
	Frame  []byte
	Parsed *frame.Frame
	Level  ledger.AckLevel
	// Done is called once if Append returned nil, in append order, without locks held; it must not block. The error
	// is a *[ledger.AppendError].
	Done func(Receipt, error)
}

// Receipt says where a batch is stored.
type Receipt struct {
	FirstSeq, LastSeq uint64
	// Position and Offset are of the first message; zero for a duplicate of a batch stored earlier. With AckNone and
	// AckOne the position is provisional.
	Position entry.Position
	Offset   entry.Offset
	// Duplicate: an earlier attempt stored the batch.
	Duplicate bool
}

// Entry is one stored batch.
type Entry struct {
	Position entry.Position
	// Envelope and Frame alias bytes that are shared with other readers: do not change them.
	Envelope frame.Envelope
	Frame    []byte
}

// describe is what a chain needs to know of an entry.
func describe(body []byte) (entry.Offset, int64, error) {
	e, _, err := frame.ParseEnvelope(body)
	if err != nil {
		return 0, 0, fmt.Errorf("parse envelope: %w", err)
	}
	return e.Base + entry.Offset(e.Span), e.BrokerTime, nil
}
