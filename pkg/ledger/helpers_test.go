package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memMeta is a metadata store in memory with the guards of T1 … T6. Hooks make it slow, or lose replies.
type memMeta struct {
	mu      sync.Mutex
	rev     int64
	ledgers map[entry.LedgerID]meta.Ledger
	retired map[entry.StorageUUID]bool
	// before runs before a transaction of the given kind is applied, without locks; after, when it was.
	before func(op string)
	after  func(op string) error
}

func newMemMeta() *memMeta {
	return &memMeta{ledgers: map[entry.LedgerID]meta.Ledger{}, retired: map[entry.StorageUUID]bool{}}
}

func clone(l meta.Ledger) meta.Ledger {
	l.Fragments = slices.Clone(l.Fragments)
	for i := range l.Fragments {
		l.Fragments[i].Slots = slices.Clone(l.Fragments[i].Slots)
	}
	return l
}

func (m *memMeta) txn(ctx context.Context, op string, id entry.LedgerID, f func(l *meta.Ledger) error) (meta.Ledger, error) {
	m.mu.Lock()
	before, after := m.before, m.after
	m.mu.Unlock()
	if before != nil {
		before(op)
	}
	if ctx.Err() != nil {
		return meta.Ledger{}, fmt.Errorf("%s: %w", op, meta.ErrUnavailable)
	}
	m.mu.Lock()
	l, ok := m.ledgers[id]
	if !ok {
		m.mu.Unlock()
		return l, meta.ErrNotFound
	}
	l = clone(l)
	if err := f(&l); err != nil {
		m.mu.Unlock()
		return meta.Ledger{}, err
	}
	if op != "get" {
		m.rev++
		l.Rev = m.rev
		m.ledgers[id] = l
	}
	m.mu.Unlock()
	if after != nil {
		if err := after(op); err != nil {
			return meta.Ledger{}, err
		}
	}
	return clone(l), nil
}

func (m *memMeta) hooks(before func(string), after func(string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before, m.after = before, after
}

func (m *memMeta) record(id entry.LedgerID) meta.Ledger {
	m.mu.Lock()
	defer m.mu.Unlock()
	return clone(m.ledgers[id])
}

func (m *memMeta) GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
	return m.txn(ctx, "get", id, func(*meta.Ledger) error { return nil })
}

func stateError(op string, l *meta.Ledger) error {
	return &meta.LedgerStateError{Op: op, Current: clone(*l)}
}

func (m *memMeta) ChangeEnsemble(ctx context.Context, seen meta.Ledger, fragments []meta.Fragment) (meta.Ledger, error) {
	return m.txn(ctx, "T2", seen.ID, func(l *meta.Ledger) error {
		if l.State != meta.LedgerOpen || l.Nonce != seen.Nonce {
			return stateError("T2", l)
		}
		n := len(seen.Fragments) - 1
		if len(l.Fragments) != len(seen.Fragments) || !sameFragment(l.Fragments[n], seen.Fragments[n]) {
			return meta.ErrConflict
		}
		for _, s := range fragments[len(fragments)-1].Slots {
			if m.retired[s.UUID] {
				return meta.ErrRetired
			}
		}
		l.Fragments = append(l.Fragments[:n:n], clone(meta.Ledger{Fragments: fragments[n:]}).Fragments...)
		return nil
	})
}

func sameFragment(a, b meta.Fragment) bool {
	return a.First == b.First && slices.Equal(a.Slots, b.Slots)
}

func (m *memMeta) StartRecovery(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
	return m.txn(ctx, "T4", id, func(l *meta.Ledger) error {
		if l.State >= meta.LedgerClosed {
			return nil
		}
		l.State = meta.LedgerInRecovery
		l.Term++
		return nil
	})
}

// close3 is T3: what a writer's CloseFunc runs.
func (m *memMeta) close3(seen meta.Ledger) ledger.CloseFunc {
	return func(ctx context.Context, last entry.EntryID, length int64) (meta.Ledger, error) {
		return m.txn(ctx, "T3", seen.ID, func(l *meta.Ledger) error {
			if l.State != meta.LedgerOpen || l.Nonce != seen.Nonce {
				return stateError("T3", l)
			}
			l.State, l.Last, l.Length = meta.LedgerClosed, last, length
			return nil
		})
	}
}

// close5 is T5: a recovery's FinishFunc.
func (m *memMeta) close5(ctx context.Context, seen meta.Ledger, last entry.EntryID, length int64, tail []meta.Fragment) (meta.Ledger, error) {
	return m.txn(ctx, "T5", seen.ID, func(l *meta.Ledger) error {
		n := len(l.Fragments)
		if l.State != meta.LedgerInRecovery || l.Term != seen.Term || !sameFragment(l.Fragments[n-1], seen.Fragments[len(seen.Fragments)-1]) {
			return stateError("T5", l)
		}
		if len(tail) > 0 {
			if tail[0].First == l.Fragments[n-1].First {
				n--
			}
			l.Fragments = append(l.Fragments[:n:n], clone(meta.Ledger{Fragments: tail}).Fragments...)
		}
		l.State, l.Last, l.Length = meta.LedgerClosed, last, length
		return nil
	})
}

// world is some fake bookies, a metadata store, and what a broker has.
type world struct {
	t    testing.TB
	fake *bookieclient.Fake
	meta *memMeta
	env  ledger.Env
	tick *ledger.Ticker
	ids  []entry.StorageUUID

	mu         sync.Mutex
	candidates []ledger.Candidate
	released   atomic.Int64
	hints      []ledger.Hint
}

func newWorld(tb testing.TB, bookies int) *world {
	tb.Helper()
	w := &world{t: tb, meta: newMemMeta(), ids: bookieclient.FakeUUIDs(bookies)}
	w.fake = bookieclient.NewFake(w.ids)
	w.tick = ledger.NewTicker(5 * time.Millisecond)
	tb.Cleanup(func() {
		w.fake.Close()
		w.tick.Close()
	})
	for i, u := range w.ids {
		w.candidates = append(w.candidates, ledger.Candidate{UUID: u, Host: fmt.Sprint("h", i), FreeBytes: 1 << 30, Writable: true})
	}
	w.env = ledger.Env{
		Bookies: w.fake, Metadata: w.meta, Ticker: w.tick,
		Candidates: func() []ledger.Candidate {
			w.mu.Lock()
			defer w.mu.Unlock()
			return slices.Clone(w.candidates)
		},
		OnHint: func(h ledger.Hint) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.hints = append(w.hints, h)
		},
		Config: ledger.Config{
			SuspectAfter: 100 * time.Millisecond, DelayedChange: 50 * time.Millisecond, RetryAfter: 10 * time.Millisecond,
			StallTimeout: 150 * time.Millisecond, IdleLAC: 20 * time.Millisecond, RequestTimeout: 300 * time.Millisecond,
			NegativeWait: 20 * time.Millisecond, SpeculateAfter: 10 * time.Millisecond, Seed: 1,
			Released: func(n int) { w.released.Add(int64(n)) },
		},
	}
	return w
}

// open is T1 for a ledger on the first e bookies.
func (w *world) open(id entry.LedgerID, e, qw, qa int) meta.Ledger {
	l := meta.Ledger{
		ID: id, Nonce: uint64(id)*7 + 1, Last: entry.NoEntry,
		Replication: meta.Replication{Ensemble: e, WriteQuorum: qw, AckQuorum: qa},
		Fragments:   []meta.Fragment{{First: 0}},
	}
	for i := range e {
		l.Fragments[0].Slots = append(l.Fragments[0].Slots, meta.Slot{UUID: w.ids[i]})
	}
	w.meta.mu.Lock()
	defer w.meta.mu.Unlock()
	w.meta.rev++
	l.Rev = w.meta.rev
	w.meta.ledgers[id] = clone(l)
	return l
}

func (w *world) writer(l meta.Ledger) *ledger.Writer {
	wr := ledger.NewWriter(w.env, l)
	w.t.Cleanup(wr.Shutdown)
	return wr
}

func (w *world) recover(id entry.LedgerID) (meta.Ledger, ledger.Stats) {
	w.t.Helper()
	l, s, err := ledger.Recover(w.ctx(), w.env, id, ledger.RecoverOptions{Finish: w.meta.close5})
	noError(w.t, err)
	return l, s
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	w.t.Cleanup(cancel)
	return ctx
}

// result is one finished append.
type result struct {
	id  entry.EntryID
	err error
}

func (r result) outcome() string {
	var e *ledger.AppendError
	switch {
	case r.err == nil:
		return "ok"
	case errors.As(r.err, &e):
		return e.Outcome.String()
	}
	return r.err.Error()
}

// appendAll appends bodies "0", "1" … of which result i tells on the i-th channel.
func appendAll(wr *ledger.Writer, n int, level ledger.AckLevel) []chan result {
	var all []chan result
	for i := range n {
		c := make(chan result, 1)
		wr.Append(body(i), level, func(id entry.EntryID, err error) { c <- result{id, err} })
		all = append(all, c)
	}
	return all
}

func body(i int) []byte { return fmt.Appendf(nil, "entry %d", i) }

func (w *world) await(c chan result) result {
	w.t.Helper()
	select {
	case r := <-c:
		return r
	case <-w.ctx().Done():
		w.t.Fatal("append is not done")
		return result{}
	}
}

func (w *world) mustWrite(wr *ledger.Writer, n int) {
	w.t.Helper()
	for _, c := range appendAll(wr, n, ledger.AckQuorum) {
		noError(w.t, w.await(c).err)
	}
}

func (w *world) setCandidate(i int, f func(*ledger.Candidate)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.candidates[i])
}

func (w *world) eventually(what string, f func() bool) {
	w.t.Helper()
	for ctx := w.ctx(); !f(); {
		select {
		case <-ctx.Done():
			w.t.Fatalf("did not happen: %s", what)
		case <-time.After(time.Millisecond):
		}
	}
}

// readAll reads the closed ledger from its start and checks the bodies.
func (w *world) readAll(l meta.Ledger) int {
	w.t.Helper()
	r := ledger.NewReader(w.env, l)
	next := entry.EntryID(0)
	for next <= l.Last {
		got, err := r.Read(w.ctx(), next, l.Last, 1<<20)
		noError(w.t, err)
		for _, e := range got {
			equal(w.t, next, e.ID)
			equal(w.t, string(body(int(next))), string(e.Body))
			next++
		}
	}
	return int(next)
}

func noError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func errorIs(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("error %v is not %v", err, want)
	}
}

func equal[T any](tb testing.TB, want, got T) {
	tb.Helper()
	if !reflect.DeepEqual(want, got) {
		tb.Fatalf("want %v, got %v", want, got)
	}
}
