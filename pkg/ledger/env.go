package ledger

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Bookies carries requests to bookies, named by storage identity. Errors are *[bookiewire.Error].
type Bookies interface {
	// Add stores one entry. It never blocks, and calls done exactly once, never before Add has returned. a is
	// shared between bookies and read-only until done.
	Add(to entry.StorageUUID, a *bookiewire.Add, done func(error))
	// Read reads entries; like Add, it never blocks and calls done exactly once, never inline.
	Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error))
	// Fence raises the ledger's term; like Read.
	Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error))
	// WriteLAC makes a LAC known. It blocks.
	WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error
	// WaitLAC waits for a LAC above r.After, at most r.Timeout. It blocks.
	WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error)
}

// Metadata is what a ledger needs of the metadata store: linearizable reads, and transactions that are applied
// or not, with [meta.ErrUnknownOutcome] for those that cannot tell. *meta.Store is one.
type Metadata interface {
	// GetLedger reads the record linearizably. meta.ErrNotFound when there is none.
	GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error)
	// ChangeEnsemble is T2: it replaces the record's fragments while it is OPEN and the nonce is l's.
	// *meta.LedgerStateError when it is not.
	ChangeEnsemble(ctx context.Context, l meta.Ledger, fragments []meta.Fragment) (meta.Ledger, error)
	// StartRecovery is T4: IN_RECOVERY with the next term; a CLOSED record is returned as it is.
	StartRecovery(ctx context.Context, id entry.LedgerID) (meta.Ledger, error)
}

// Candidate is a bookie that may be placed into an ensemble.
type Candidate struct {
	UUID entry.StorageUUID
	// Host is the failure domain of one machine; no two replicas share one. Empty: a host of its own.
	Host string
	// Zone is the failure domain above it; empty: unknown.
	Zone      string
	FreeBytes uint64
	// Writable is false while the bookie takes no new ledgers; Draining, when it is to be emptied.
	Writable, Draining bool
	// Full says of one that is not writable that open ledgers get no room either, but for urgent adds.
	Full bool
	// Absent says of one that is draining that it is not registered now: where it is, and on which host, is not known.
	Absent bool
}

// Candidates lists the registered bookies, from a watch cache. It must not block; the result is read only.
type Candidates func() []Candidate

// Env is what a ledger's writer, reader and recovery need from outside, with the hooks that report back. It is
// passed by value: every writer may have hooks of its own.
type Env struct {
	Bookies    Bookies
	Metadata   Metadata
	Candidates Candidates
	// Ticker drives the deadlines of all writers of the process; see [NewTicker].
	Ticker *Ticker
	// Sched runs what goes on beside the caller, and waits; nil: goroutines and the clock.
	Sched sched.Scheduler
	// Log may be nil: nothing is logged.
	Log *slog.Logger
	// Metrics may be nil: nothing is counted.
	Metrics *Metrics
	Config  Config

	// OnConfirmed, when set, is told the LAC as it grows, from the writer's completion goroutine, before the
	// done of the entries that it confirms.
	OnConfirmed func(lac entry.EntryID)
	// OnHint, when set, is told of copies that this writer no longer tries to complete, so that repair can.
	OnHint func(Hint)
	// OnDropped, when set, is told, in entry order among the dones with NotWritten, of an entry that was reported
	// early (AckNone, AckOne) and then turned out not to be part of the closed ledger. Its body is the caller's again.
	OnDropped func(id entry.EntryID, body []byte)
	// MayAckEarly, when set, is asked before an entry is reported below its quorum (AckNone, AckOne). While it
	// says false, such entries are reported once confirmed. The owner's lease deadline belongs here: a fence
	// cannot stop these receipts.
	MayAckEarly func() bool
}

// withDefaults returns env with what may be left out filled in.
func (env Env) withDefaults() Env {
	env.Config = env.Config.withDefaults()
	env.Sched = sched.OrReal(env.Sched)
	return env
}

// Config holds the limits and times of ledgers. The zero value of a field means its default.
type Config struct {
	// SuspectAfter is how long a bookie may leave adds unanswered before it is suspect. Default 1 s.
	SuspectAfter time.Duration
	// DelayedChange is how long a suspect bookie that is not needed stays in the ensemble. Default 2 s.
	DelayedChange time.Duration
	// RetryAfter is the pause before adds are sent again to a bookie that failed them. Default 200 ms.
	RetryAfter time.Duration
	// StallTimeout is how long appends may be without a possible quorum before the writer wants to roll. Default 3 s.
	StallTimeout time.Duration
	// IdleLAC is how long after the last append the LAC is written explicitly. Default 300 ms.
	IdleLAC time.Duration
	// DrainTimeout bounds how long [Writer.CloseWith] waits for appends in flight before it freezes. Default 1 s.
	DrainTimeout time.Duration
	// StragglerBytes bounds the unacknowledged bytes of one bookie: beyond it the bookie is suspect. Default 16 MiB.
	StragglerBytes int64
	// HandOverAfter is how long a bookie must be suspect before confirmed entries beyond StragglerBytes are handed to
	// repair; after ten times as long all of them are, so that a bookie that is gone for good holds no memory.
	// Default 500 ms.
	HandOverAfter time.Duration
	// Urgent marks a writer's adds as urgent: bookies with full disks take them, from their reserve, and stand in where
	// there are not enough others. It is for what frees space in the end, and writes little.
	Urgent bool
	// MaxFragments caps a ledger's fragments; at the cap the writer wants to roll instead. Default 16.
	MaxFragments int
	// Released, when set, is told of bytes appended that the writer no longer holds: all copies are acknowledged,
	// or the missing ones were handed to repair. Bytes of entries that end NotWritten (or dropped) are not
	// released: they are the caller's again. It is accounting: a slow bookie's request may still refer to the
	// body, so leave it to the garbage collector and never write to it again.
	Released func(n int)

	// RequestTimeout bounds one read or fence of a reader or a recovery. Default 2 s.
	RequestTimeout time.Duration
	// NegativeWait is how long a recovery waits for further replies once absence is decided, so that an entry
	// with a single copy (AckOne) is found. Default 100 ms.
	NegativeWait time.Duration
	// SpeculateAfter is how long a read waits for one bookie before it asks the next as well. Default 50 ms.
	SpeculateAfter time.Duration
	// RecoveryWindow is how many entries a recovery reads ahead. Default 64.
	RecoveryWindow int
	// RecoveryAttempts bounds how often [Recover] starts over, with back-off. 0: until its context ends.
	RecoveryAttempts int
	// Seed makes placement deterministic. 0: a random one.
	Seed uint64
}

// withDefaults returns c with every zero field replaced by its default.
func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.SuspectAfter, time.Second)
	def(&c.DelayedChange, 2*time.Second)
	def(&c.RetryAfter, 200*time.Millisecond)
	def(&c.StallTimeout, 3*time.Second)
	def(&c.HandOverAfter, 500*time.Millisecond)
	def(&c.IdleLAC, 300*time.Millisecond)
	def(&c.DrainTimeout, time.Second)
	def(&c.RequestTimeout, 2*time.Second)
	def(&c.NegativeWait, 100*time.Millisecond)
	def(&c.SpeculateAfter, 50*time.Millisecond)
	if c.StragglerBytes == 0 {
		c.StragglerBytes = 16 << 20
	}
	if c.MaxFragments == 0 {
		c.MaxFragments = 16
	}
	if c.RecoveryWindow == 0 {
		c.RecoveryWindow = 64
	}
	return c
}

// AckLevel is how durable an entry must be before its append is done.
type AckLevel uint8

const (
	// AckQuorum (the default) is done when it is confirmed: Qa copies of it and of every predecessor are on disk.
	AckQuorum AckLevel = iota
	// AckNone is done on enqueue; it may be lost.
	AckNone
	// AckOne is done when one copy of it and of every predecessor is on disk; a broker's crash may lose it.
	AckOne
	// AckAll is done when it is confirmed and all Qw copies are on disk.
	AckAll
)

// String returns the level's name in configuration and in the CLI.
func (l AckLevel) String() string {
	switch l {
	case AckNone:
		return "none"
	case AckOne:
		return "one"
	case AckQuorum:
		return "quorum"
	case AckAll:
		return "all"
	}
	return fmt.Sprintf("AckLevel(%d)", uint8(l))
}

// Outcome is what is known of an append that did not succeed.
type Outcome uint8

const (
	// Unknown means that the entry may or may not be part of the ledger; only the ledger's recovery decides.
	Unknown Outcome = iota
	// NotWritten means that the entry is not and will never be part of the ledger. It may be appended elsewhere.
	NotWritten
)

// String returns "unknown" or "not written".
func (o Outcome) String() string {
	if o == NotWritten {
		return "not written"
	}
	return "unknown"
}

// AppendError is the error of an append.
type AppendError struct {
	Ledger entry.LedgerID
	// Entry is the id the entry had; [entry.NoEntry] when it never got one.
	Entry   entry.EntryID
	Outcome Outcome
	// Err is the cause.
	Err error
}

// Error says which append failed, and what is known of it.
func (e *AppendError) Error() string {
	if e.Ledger == 0 { // it got to none
		return fmt.Sprintf("append entry: outcome %s: %v", e.Outcome, e.Err)
	}
	return fmt.Sprintf("append entry %d to ledger %d: outcome %s: %v", e.Entry, e.Ledger, e.Outcome, e.Err)
}

// Unwrap returns the cause.
func (e *AppendError) Unwrap() error { return e.Err }

// Hint names copies that should exist and may not: entries First … Last in the slot of the fragment.
type Hint struct {
	Ledger   entry.LedgerID
	Fragment entry.EntryID // its First
	Slot     int
	UUID     entry.StorageUUID
	First    entry.EntryID
	Last     entry.EntryID
}

// Entry is an entry as read: its checksum was verified.
type Entry struct {
	ID   entry.EntryID
	Body []byte
}
