package ledgerstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Store is a bookie's log store. All methods may be called concurrently.
//
// One goroutine, run, owns the [Core] and writes; three sync; one calls the Dones; one watches the space; one
// compacts; segments are prepared and sealed, and doubtful duplicates looked up, by goroutines of their own. Close
// waits for all of them. Reads run on their callers' goroutines, over the table and the segments' files.
//
// One log for all ledgers is what makes a group commit serve all of them with one sync. A log apart from the store,
// with entries copied over later, was rejected: it writes every byte twice, and needs marks that say what was copied.
type Store struct {
	cfg     Config
	fs      vfs.FS
	log     *slog.Logger
	metrics *metrics
	table   *table
	cache   *tailCache
	footers *footerCache
	lock    io.Closer

	core *Core     // run's own
	lazy *lazySync // nil: each group is synced before it is answered

	inbox   inbox
	outbox  outbox
	syncs   chan *Batch
	checks  checkQueue
	jobs    sync.WaitGroup // what run has started and waits for
	workers sync.WaitGroup // everything else
	ctx     context.Context
	cancel  context.CancelFunc
	loopEnd chan struct{}
	closing sync.Once

	segments segments
	compact  sync.Mutex // one compaction at a time
	kick     chan struct{}
	limiter  *rate.Limiter

	writes  atomic.Int64            // groups written
	next    atomic.Pointer[Segment] // the newest segment, to be written ahead
	state   atomic.Uint32
	changed notifier
	usage   atomic.Pointer[Usage]
	fatal   chan error
	failed  atomic.Pointer[error]
	loss    Loss
}

// Add stores an entry. It returns at once; a.Done tells the outcome. Errors: BadChecksum, BadRequest (over a limit,
// or the entry is stored with other bytes), NotAdmitted (the ledger is unknown and Generation outdated, or it was
// deleted), Fenced, ReadOnly, Overloaded, and Unknown once the store has stopped. A copy of an entry that is stored,
// or on its way, is answered when the first copy is durable.
//
// An add passes a fence only with Recovery set and a Term not below the stored one; a higher Term is stored.
func (s *Store) Add(a *Add) {
	switch {
	case badLedger(a.Ledger) || a.Entry < 0 || len(a.Body) > maxBody:
		s.outbox.push(Reply{item: a.asItem(), err: errBad})
	case entry.Checksum(a.Ledger, a.Entry, a.Body) != a.Checksum:
		s.outbox.push(Reply{item: a.asItem(), err: errChecksum})
	default:
		s.submit(a)
	}
}

// Admission reports whether the ledger is known here, and the generation to put into an Add. If it is unknown, its
// metadata must be read after this call and before the Add. The generation changes when the ledger is fenced or
// deleted here (or, rarely, one that shares its counter): then the Add is refused, and admission begins anew.
func (s *Store) Admission(ledger entry.LedgerID) (known bool, generation uint64) {
	sh := s.table.shard(ledger)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	l := sh.ledgers[ledger]
	return l != nil && !l.deleting, s.table.generation(ledger).Load()
}

// Fence raises the ledger's term, and answers once that is durable and every add accepted before it is durable too.
// A term below the stored one is refused with it (Fenced). An unknown ledger becomes known, and fenced.
func (s *Store) Fence(f bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
	if badLedger(f.Ledger) || f.Term == 0 {
		s.outbox.push(Reply{item: &item{fenced: done}, err: errBad})
		return
	}
	s.submit(&Fence{Fence: f, Done: done})
}

// WriteLAC stores a LAC. An unknown ledger is answered NoLedger. A lower LAC than the stored one changes nothing.
func (s *Store) WriteLAC(w bookiewire.WriteLAC, done func(error)) {
	if badLedger(w.Ledger) || w.LAC < entry.NoEntry {
		s.outbox.push(Reply{item: &item{done: done}, err: errBad})
		return
	}
	s.submit(&LAC{WriteLAC: w, Done: done})
}

// WaitLAC returns the highest LAC stored, once it is above w.After, or after w.Timeout, or with ctx's error. For an
// unknown ledger it waits as well: its first entry may be on its way.
func (s *Store) WaitLAC(ctx context.Context, w bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	var timeout <-chan time.Time
	for {
		if err := s.stopped(); err != nil {
			return bookiewire.WaitLACReply{}, err
		}
		lac, grown := s.table.lacOrWait(w.Ledger, w.After)
		if grown == nil {
			return bookiewire.WaitLACReply{LAC: lac}, nil
		}
		if timeout == nil {
			t := time.NewTimer(w.Timeout)
			defer t.Stop()
			timeout = t.C
		}
		select {
		case <-grown:
			continue
		case <-timeout:
			s.table.leave(w.Ledger, grown)
			return bookiewire.WaitLACReply{LAC: lac}, nil
		case <-ctx.Done():
			s.table.leave(w.Ledger, grown)
			return bookiewire.WaitLACReply{}, ctx.Err()
		case <-s.ctx.Done():
			s.table.leave(w.Ledger, grown)
			return bookiewire.WaitLACReply{}, errClosed
		}
	}
}

// Mark changes with each add that has Recovery set and is accepted, one of an entry that is here already included, and before
// it is answered. It is what DeleteLedger compares. No mark comes again while the store is open; 0 is that of a ledger that
// is not here.
func (s *Store) Mark(ledger entry.LedgerID) uint64 {
	return s.table.mark(ledger)
}

// ErrMarked refuses a deletion: what is here of the ledger may be counted on by now.
var ErrMarked = errors.New("ledger was added to since its mark was read")

// DeleteLedger buries a ledger: durably when it returns nil. Its space comes back by compaction, after Config.Trash or when
// the disk needs it. The caller has seen a positive statement in the metadata that the ledger may go from here, and mark is
// what Mark returned before it looked; if that has changed, nothing is deleted, and the error is ErrMarked: an add since
// may belong to a repair that the metadata named later. Adds behind the deletion are refused (NotAdmitted). A ledger that
// is not here is fine. If ctx ends first the outcome is open.
func (s *Store) DeleteLedger(ctx context.Context, ledger entry.LedgerID, mark uint64) error {
	if badLedger(ledger) {
		return errBad
	}
	err := s.wait(ctx, func(done func(error)) Event {
		return &Delete{Ledger: ledger, Mark: mark, At: s.deletionTime(), Done: done}
	})
	if err != nil {
		return fmt.Errorf("delete ledger %d: %w", ledger, err)
	}
	s.kickCompaction()
	return nil
}

func (s *Store) kickCompaction() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Tombstoned reports whether the ledger was deleted here and that is still remembered. It is remembered, across
// restarts, as long as a segment holds records of the ledger; afterwards the ledger is unknown.
func (s *Store) Tombstoned(ledger entry.LedgerID) bool {
	sh := s.table.shard(ledger)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	_, buried := sh.tombs[ledger]
	l := sh.ledgers[ledger]
	return l != nil && l.deleting || l == nil && buried
}

// Ledgers calls yield for each ledger stored, in no order, until it returns false. Ledgers that come or go
// meanwhile may be missed.
func (s *Store) Ledgers(yield func(LedgerInfo) bool) {
	for _, l := range s.table.snapshot() {
		if in, ok := s.Ledger(l.id); ok && !yield(in) {
			return
		}
	}
}

// Ledger tells what is stored of one ledger.
func (s *Store) Ledger(ledger entry.LedgerID) (LedgerInfo, bool) {
	sh := s.table.shard(ledger)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	l := sh.ledgers[ledger]
	if l == nil || !l.durable || ledger == everyLedger {
		return LedgerInfo{}, false
	}
	return l.info(), true
}

// SetLimbo says that entries of the ledgers may have been lost here: a miss becomes Unknown, and writers without
// the recovery flag are shut out for good. Durable when it returns nil.
func (s *Store) SetLimbo(ctx context.Context, ledgers ...entry.LedgerID) error {
	return s.limbo(ctx, false, ledgers)
}

// ClearLimbo ends limbo, once what was lost has been repaired. The ledgers stay fenced. Durable when it returns nil.
func (s *Store) ClearLimbo(ctx context.Context, ledgers ...entry.LedgerID) error {
	return s.limbo(ctx, true, ledgers)
}

// EndLoss ends Loss.All, once SetLimbo was called for every ledger that this disk may have held and that is not
// closed.
func (s *Store) EndLoss(ctx context.Context) error {
	return s.limbo(ctx, true, []entry.LedgerID{everyLedger})
}

func (s *Store) limbo(ctx context.Context, end bool, ledgers []entry.LedgerID) error {
	if slices.ContainsFunc(ledgers, func(id entry.LedgerID) bool { return id>>63 != 0 }) {
		return errBad
	}
	outcomes := make(chan error, len(ledgers)) // they share syncs
	for _, id := range ledgers {
		s.submit(&Limbo{Ledger: id, Clear: end, Done: func(err error) {
			if err != nil {
				err = fmt.Errorf("change limbo of ledger %d: %w", id, err)
			}
			outcomes <- err
		}})
	}
	for range ledgers {
		if s.inbox.drive != nil && len(outcomes) == 0 {
			return errByHand
		}
		select {
		case err := <-outcomes:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Loss tells what Open found lost, and whether an earlier loss was never ended.
func (s *Store) Loss() Loss {
	l := s.loss
	l.All = s.table.lossAll.Load()
	return l
}

// State is what the store takes now.
func (s *Store) State() State { return State(s.state.Load()) }

// StateChanged returns a channel that is closed at the next change of State.
func (s *Store) StateChanged() <-chan struct{} { return s.changed.channel() }

// Usage is the space as of the last look, at most a second ago.
func (s *Store) Usage() Usage {
	if u := s.usage.Load(); u != nil {
		return *u
	}
	return Usage{}
}

// Fatal delivers the one error that stopped the store: a write or sync failed, and what is on disk is not known.
// The process should end; every request is answered Unknown.
func (s *Store) Fatal() <-chan error { return s.fatal }

// Close answers what was accepted, stops and waits for all goroutines, and unlocks the directory. Requests after it
// are answered Unknown.
func (s *Store) Close() error {
	var err error
	s.closing.Do(func() { err = s.shutdown() })
	return err
}

// stopped returns the answer to everything, once the store has failed.
func (s *Store) stopped() error {
	if err := s.failed.Load(); err != nil {
		return &bookiewire.Error{Code: bookiewire.Unknown, Detail: "the store has stopped: " + (*err).Error()}
	}
	return nil
}

// errByHand: what is not done when all tasks are done waits for space, and nothing goes on beside a store that is driven by
// hand.
var errByHand = errors.New("the store waits for space")

// wait submits an event and waits for its Done.
func (s *Store) wait(ctx context.Context, event func(done func(error)) Event) error {
	outcome := make(chan error, 1)
	s.submit(event(func(err error) { outcome <- err }))
	if s.inbox.drive != nil {
		select {
		case err := <-outcome:
			return err
		default:
			return errByHand
		}
	}
	select {
	case err := <-outcome:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// badLedger reports ids that no ledger has.
func badLedger(id entry.LedgerID) bool { return id >= everyLedger }

// maxBody limits one entry: the largest message, its frame and envelope, with a margin.
const maxBody = 16 << 20

var (
	errBad      = &bookiewire.Error{Code: bookiewire.BadRequest, Detail: "ledger, entry, term or size is out of range"}
	errChecksum = &bookiewire.Error{Code: bookiewire.BadChecksum}
	errClosed   = &bookiewire.Error{Code: bookiewire.Unknown, Detail: "the store is closed"}
)

// notifier hands out a channel that is closed at the next change.
type notifier struct {
	mu sync.Mutex
	ch chan struct{}
}

func (n *notifier) channel() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}
