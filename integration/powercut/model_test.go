//go:build linux && !noroot

package powercut

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
)

// ledgerState is what is known of one ledger.
type ledgerState struct {
	stored []bool // by entry: acknowledged, or served to a reader
	asked  int64  // entries below may be there
	before int64  // entries below were looked for after an earlier cut

	term, askedTerm int64
	lac, askedLAC   int64
	limbo, unsure   bool // unsure: a change of limbo was asked for
	deleting, gone  bool
}

// model is what the store has promised.
type model struct {
	mu      sync.Mutex
	ledgers map[entry.LedgerID]*ledgerState
	dark    bool // the power is off: answers do not count
	opened  bool
	answers int // since the last start
	wrong   error
	changed chan struct{} // closed at the next note
	*tally
}

// tally counts for the results.
type tally struct {
	Cuts, DuringStart                        int
	Entries, Fences, LACs, Limbos, Deletions int // acknowledged
	Compactions                              int
	Read                                     int // entries read and compared, after cuts
	UnansweredGone, UnansweredThere          int // entries on their way
}

func newModel() *model {
	return &model{ledgers: map[entry.LedgerID]*ledgerState{}, changed: make(chan struct{})}
}

func (m *model) ledger(id entry.LedgerID) *ledgerState {
	l := m.ledgers[id]
	if l == nil {
		l = &ledgerState{lac: int64(entry.NoEntry), askedLAC: int64(entry.NoEntry)}
		m.ledgers[id] = l
	}
	return l
}

func (l *ledgerState) store(e int64) {
	for int64(len(l.stored)) <= e {
		l.stored = append(l.stored, false)
	}
	l.stored[e] = true
}

// hear takes a note in.
func (m *model) hear(n note) {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.changed)
	m.changed = make(chan struct{})
	l := m.ledger(n.ledger)
	switch n.event { //nolint:exhaustive // answers come below
	case askAdd:
		l.asked = max(l.asked, n.b)
		l.askedLAC = max(l.askedLAC, n.b-2)
	case askFence:
		l.askedTerm = max(l.askedTerm, n.a)
	case askLAC:
		l.askedLAC = max(l.askedLAC, n.a)
	case askLimbo, askClear:
		l.unsure = true
		l.askedTerm = max(l.askedTerm, 1)
	case askDelete:
		l.deleting = true
	}
	if m.dark {
		return
	}
	m.answers++
	switch n.event { //nolint:exhaustive // the rest is above
	case opened:
		m.opened = true
		m.answers = 0
	case addDone:
		if n.b == 0 && l.term > 0 {
			m.wrong = errors.Join(m.wrong, fmt.Errorf("a writer's entry %d:%d was acknowledged after a fence", n.ledger, n.a))
		}
		l.store(n.a)
		l.lac = max(l.lac, n.a-1)
		m.Entries++
	case fenceDone:
		l.term = max(l.term, n.a)
		m.Fences++
	case lacDone:
		l.lac = max(l.lac, n.a)
		m.LACs++
	case limboDone, clearDone:
		l.limbo, l.unsure = n.event == limboDone, false
		l.term = max(l.term, 1)
		m.Limbos++
	case deleteDone:
		l.gone = true
		m.Deletions++
	case compacted:
		m.Compactions++
		m.answers--
	case refused:
		m.wrong = errors.Join(m.wrong, fmt.Errorf("request %d for ledger %d was refused", n.a, n.ledger))
	}
}

// begin is called before a process starts.
func (m *model) begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dark, m.opened, m.answers = false, false, 0
}

// until waits for a condition of the model. The child may end before.
func (m *model) until(ctx context.Context, ended <-chan struct{}, ok func() bool) error {
	for {
		m.mu.Lock()
		done, changed := ok() || m.wrong != nil, m.changed
		m.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ended:
			return errors.New("the child has ended")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// darken is called before the power goes: no answer counts from here on.
func (m *model) darken() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dark = true
	return m.wrong
}

// check compares a store with what it has promised, and keeps what it says now as promised, too.
func (m *model) check(ctx context.Context, s *ledgerstore.Store) error {
	if loss := s.Loss(); loss.All || len(loss.Ledgers) > 0 {
		return fmt.Errorf("a power cut is taken for damage: %+v", loss)
	}
	var unknown error
	s.Ledgers(func(in ledgerstore.LedgerInfo) bool {
		if m.ledgers[in.Ledger] == nil {
			unknown = fmt.Errorf("ledger %d was never asked for", in.Ledger)
		}
		return unknown == nil
	})
	if unknown != nil {
		return unknown
	}
	for id, l := range m.ledgers {
		if id == 0 {
			continue // notes of no ledger
		}
		if err := m.checkLedger(ctx, s, id, l); err != nil {
			return fmt.Errorf("ledger %d: %w", id, err)
		}
	}
	return nil
}

func (m *model) checkLedger(ctx context.Context, s *ledgerstore.Store, id entry.LedgerID, l *ledgerState) error {
	in, there := s.Ledger(id)
	switch {
	case there && l.gone:
		return fmt.Errorf("it was deleted, and is there: %+v", in)
	case !there && l.deleting:
		delete(m.ledgers, id)
		_, err := s.Read(ctx, bookiewire.Read{Ledger: id, Stride: 1, MaxEntries: 1, MaxBytes: 1})
		if code := bookiewire.AsError(err).Code; err == nil || code != bookiewire.NoLedger {
			return fmt.Errorf("it was deleted, and a read is answered: %w", err)
		}
		return nil
	case !there:
		if l.term > 0 || l.lac > int64(entry.NoEntry) || len(l.stored) > 0 || l.limbo {
			return fmt.Errorf("it is gone: %+v", l)
		}
		return nil
	case int64(in.Term) < l.term || int64(in.Term) > l.askedTerm:
		return fmt.Errorf("term %d, acknowledged %d, asked %d", in.Term, l.term, l.askedTerm)
	case int64(in.LAC) < l.lac || int64(in.LAC) > l.askedLAC:
		return fmt.Errorf("LAC %d, acknowledged %d, asked %d", in.LAC, l.lac, l.askedLAC)
	case in.Limbo != l.limbo && !l.unsure:
		return fmt.Errorf("limbo %t, want %t", in.Limbo, l.limbo)
	case int64(in.Last) >= l.asked:
		return fmt.Errorf("entry %d was never asked for", in.Last)
	}
	l.term, l.lac, l.limbo, l.unsure = int64(in.Term), int64(in.LAC), in.Limbo, false
	defer func() { l.before = l.asked }()
	l.deleting = false // what was asked for before a crash is not going on
	if err := m.checkEntries(ctx, s, id, l, in.Limbo); err != nil {
		return err
	}
	if l.term == 0 {
		return nil
	}
	return refusesWriter(s, id, l.asked)
}

// refusesWriter tries to write as the fenced writer would.
func refusesWriter(s *ledgerstore.Store, id entry.LedgerID, e int64) error {
	outcome := make(chan error, 1)
	a := &ledgerstore.Add{Add: bookiewire.Add{Ledger: id, Entry: entry.EntryID(e), LAC: entry.NoEntry}, Done: func(err error) { outcome <- err }}
	a.Body = body(id, a.Entry)
	a.Checksum = entry.Checksum(id, a.Entry, a.Body)
	_, a.Generation = s.Admission(id)
	s.Add(a)
	if err := <-outcome; err == nil || bookiewire.AsError(err).Code != bookiewire.Fenced {
		return fmt.Errorf("it is fenced, and a writer's add is answered: %w", err)
	}
	return nil
}

// checkEntries reads all that may be there.
func (m *model) checkEntries(ctx context.Context, s *ledgerstore.Store, id entry.LedgerID, l *ledgerState, limbo bool) error {
	for e := int64(0); e < l.asked; {
		reply, err := s.Read(ctx, bookiewire.Read{Ledger: id, First: entry.EntryID(e), Stride: 1, MaxEntries: 1000, MaxBytes: 1 << 20})
		if err != nil {
			acknowledged := e < int64(len(l.stored)) && l.stored[e]
			code := bookiewire.AsError(err).Code
			if acknowledged || code != bookiewire.NoEntry && (!limbo || code != bookiewire.Unknown) {
				return fmt.Errorf("entry %d, acknowledged %t: %w", e, acknowledged, err)
			}
			if e >= l.before {
				m.UnansweredGone++
			}
			e++
			continue
		}
		for _, got := range reply.Entries {
			if int64(got.Entry) != e || !bytes.Equal(got.Body, body(id, got.Entry)) {
				return fmt.Errorf("entry %d has other bytes", e)
			}
			if e >= int64(len(l.stored)) || !l.stored[e] {
				m.UnansweredThere++
			}
			l.store(e)
			m.Read++
			e++
		}
	}
	return nil
}
