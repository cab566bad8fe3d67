package chain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Errors that callers decide by. All are returned wrapped.
var (
	// ErrClosed: the chain was closed, or shut down, by its own process.
	ErrClosed = errors.New("chain is closed")
	// ErrLost: another owner took over, or the open ledger was fenced. Drop the chain. The cause is wrapped too.
	ErrLost = errors.New("ownership of the chain is lost")
	// ErrTrimmed: what was asked for is no longer in the chain.
	ErrTrimmed = errors.New("trimmed")
)

// NotEnoughBookiesError says that no ledger can be opened: fewer bookies than copies. It is worth retrying.
type NotEnoughBookiesError struct {
	Replication meta.Replication
	// Known and Writable count the registered bookies, and those that take new ledgers.
	Known, Writable int
	Err             error
}

// Error says what is missing.
func (e *NotEnoughBookiesError) Error() string {
	return fmt.Sprintf("open ledger with %d copies, %d of them to be acknowledged: %d bookies known, %d writable: %v",
		e.Replication.WriteQuorum, e.Replication.AckQuorum, e.Known, e.Writable, e.Err)
}

// Unwrap returns the placement's error.
func (e *NotEnoughBookiesError) Unwrap() error { return e.Err }

// Metadata is what chains need of the metadata store; *meta.Store is one.
type Metadata interface {
	ledger.Metadata
	// GetChain reads a chain's record linearizably; one with Rev 0 when there is none yet.
	GetChain(ctx context.Context, id meta.ChainID) (meta.Chain, error)
	// ReserveLedgerIDs returns the first of n ledger ids that are the caller's alone.
	ReserveLedgerIDs(ctx context.Context, n int) (entry.LedgerID, error)
	// OpenLedger is T1, and closes the previous ledger in the same transaction if closing is given.
	OpenLedger(ctx context.Context, g meta.Guard, c meta.Chain, l meta.Ledger, closing *meta.Closing) (meta.Chain, meta.Ledger, error)
	// CloseLedger is T3 or T5 alone.
	CloseLedger(ctx context.Context, g meta.Guard, c meta.Chain, closing meta.Closing) (meta.Chain, meta.Ledger, error)
	// DeleteLedger is T7.
	DeleteLedger(ctx context.Context, g meta.Guard, c meta.Chain, id entry.LedgerID) (meta.Chain, error)
	// DeleteChain removes the record of a chain without ledgers.
	DeleteChain(ctx context.Context, g meta.Guard, c meta.Chain) error
}

// Env is what the chains of a process share. Copy it freely.
type Env struct {
	// Ledger is the ledgers' environment. Its hooks and Config.Released are the chain's, and must be unset; its
	// Metadata may be left out.
	Ledger ledger.Env
	Meta   Metadata
	// IDs hands out ledger ids, from blocks reserved in the metadata store.
	IDs *IDs
	// Log and Metrics may be nil.
	Log     *slog.Logger
	Metrics *Metrics
	// Sched runs what chains start, and their ledgers unless those have one; nil means on goroutines.
	Sched sched.Scheduler
	// Now is the clock; nil means Sched's.
	Now func() time.Time
}

// Config says how one chain behaves. Zero fields mean the defaults.
type Config struct {
	// Replication of new ledgers. Where fewer bookies than Ensemble can be had, a smaller ensemble of at least
	// WriteQuorum is opened; AckQuorum is never lowered.
	Replication meta.Replication
	// A ledger rolls once it holds RollBytes (256 MiB) or RollEntries (2³¹-1), or is RollAge (4 h) old when
	// something is appended.
	RollBytes   int64
	RollEntries int64
	RollAge     time.Duration
	// OpenNow opens the first ledger in Open, in one transaction with the closing of a recovered one, instead of
	// on the first append. A recovered one that holds anything has the next one opened in any case.
	OpenNow bool
	// OpenPatience is how long appends wait for a ledger to be opened while etcd is away, before they fail as not
	// written; 10 s. ClosePatience is how long a ledger that rolls is frozen while etcd is away; 2 s.
	OpenPatience  time.Duration
	ClosePatience time.Duration

	// Urgent opens ledgers on bookies with full disks where there are not enough others, and those take what is appended:
	// see [ledger.Config]. It is for what frees space in the end.
	Urgent bool

	// Describe reads the offset after an entry's last message and its broker time, Unix milliseconds, from its
	// body: a takeover asks for those of the last entry of the ledger that it recovered. Required.
	Describe func(body []byte) (end entry.Offset, time int64, err error)
	// OnConfirmed, when set, is told what readers may see from now on, in order, before those appends are done.
	// The slice is reused after the call, the bodies are not. It must not block.
	OnConfirmed func([]ConfirmedEntry)
	// OnLost, when set, is told once why the ownership was lost, or ErrClosed at Shutdown, after everything that was
	// confirmed and before anything that fails of it is done.
	OnLost func(error)
	// Released, when set, is told of the bytes of bodies that are no longer held, each byte once: all copies are
	// acknowledged, or handed to repair, or the append failed. It must not block.
	Released func(n int)
}

// ConfirmedEntry is an append that became readable.
type ConfirmedEntry struct {
	Position entry.Position
	Offset   entry.Offset
	Span     uint32
	Time     int64
	// Body is shared and must not be changed.
	Body []byte
	// Tag is the append's.
	Tag any
}

// Append is one entry to append.
type Append struct {
	// Body must not be changed any more; the garbage collector takes it.
	Body []byte
	// Span is the number of offsets the entry takes, at least 1.
	Span uint32
	// Time is the broker time, Unix milliseconds. It must not fall within a chain.
	Time  int64
	Level ledger.AckLevel
	// Tag comes back with the ConfirmedEntry.
	Tag any
	// Done, when set, is called once, among appends of one level in their order, never inline and never under a lock;
	// it may append, and must not wait for the chain (Close, Shutdown). nil once the level is met, else a *[ledger.AppendError] whose outcome says whether the entry may be stored. It must not block.
	// The position of an append with AckNone or AckOne is provisional: a roll may move it.
	Done func(entry.Position, error)
}

// Entry is an entry as read.
type Entry struct {
	Position entry.Position
	Body     []byte
}

func (c Config) withDefaults() Config {
	def := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.RollBytes, 256<<20)
	def(&c.RollEntries, 1<<31-1)
	def((*int64)(&c.RollAge), int64(4*time.Hour))
	def((*int64)(&c.OpenPatience), int64(10*time.Second))
	def((*int64)(&c.ClosePatience), int64(2*time.Second))
	if c.Replication == (meta.Replication{}) {
		c.Replication = meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}
	}
	if c.Describe == nil {
		panic("chain: Config.Describe is required")
	}
	return c
}

// IDs hands out ledger ids one by one from blocks, so that opening a ledger costs one transaction, not two. It
// is safe for concurrent use.
type IDs struct {
	reserve func(ctx context.Context, n int) (entry.LedgerID, error)
	block   int

	turn sched.Turn // held while a block is reserved

	mu   sync.Mutex
	next entry.LedgerID
	left int
}

// NewIDs returns an allocator that reserves block ids at a time; 0 means 64.
func NewIDs(m Metadata, block int) *IDs {
	if block <= 0 {
		block = 64
	}
	return &IDs{reserve: m.ReserveLedgerIDs, block: block}
}

// Next returns an id above the given one, never handed out before.
func (i *IDs) Next(ctx context.Context, s sched.Scheduler, above entry.LedgerID) (entry.LedgerID, error) {
	for {
		if id, ok := i.take(above); ok {
			return id, nil
		}
		if err := i.Reserve(ctx, s, above); err != nil {
			return 0, err
		}
	}
}

// Reserve sees to it that there are ids above the given one at hand, which others may take.
func (i *IDs) Reserve(ctx context.Context, s sched.Scheduler, above entry.LedgerID) error {
	if i.has(above) {
		return nil
	}
	if err := i.turn.Take(ctx, s); err != nil {
		return fmt.Errorf("reserve ledger ids: %w", err)
	}
	defer i.turn.Give()
	if i.has(above) {
		return nil
	}
	first, err := i.reserve(ctx, i.block)
	if err != nil {
		return fmt.Errorf("reserve ledger ids: %w", err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.next, i.left = first, i.block
	return nil
}

func (i *IDs) has(above entry.LedgerID) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.left > 0 && i.next > above
}

// take returns an id of the block at hand, unless the block lies below: then it is of no use to this chain, and
// is dropped if it can't serve others better than a new one.
func (i *IDs) take(above entry.LedgerID) (entry.LedgerID, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.left == 0 || i.next <= above {
		return 0, false
	}
	id := i.next
	i.next++
	i.left--
	return id, true
}
