package ledger_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// written returns a closed ledger of n entries.
func (w *world) written(e, qw, qa, n int) meta.Ledger {
	w.t.Helper()
	l := w.open(1, e, qw, qa)
	wr := w.writer(l)
	w.mustWrite(wr, n)
	closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
	noError(w.t, err)
	wr.Shutdown()
	return closed
}

func TestReadRunsAroundBadBookies(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(w *world, b entry.StorageUUID){
		"crashed":  func(w *world, b entry.StorageUUID) { w.fake.Crash(b) },
		"hanging":  func(w *world, b entry.StorageUUID) { w.fake.Hold(bookieclient.AtRequest, bookieclient.OpRead, b) },
		"in doubt": func(w *world, b entry.StorageUUID) { w.fake.Fail(b, bookieclient.OpRead, bookiewire.Unknown, -1) },
		"wiped":    func(w *world, b entry.StorageUUID) { w.fake.Wipe(b) },
		"damaged": func(w *world, b entry.StorageUUID) {
			for e := range entry.EntryID(50) {
				w.fake.Corrupt(b, 1, e)
			}
		},
	} {
		for _, shape := range [][3]int{{3, 3, 2}, {4, 2, 2}} {
			for at := range shape[0] {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					w := newWorld(t, 5)
					l := w.written(shape[0], shape[1], shape[2], 50)
					spoil(w, w.ids[at])
					equal(t, 50, w.readAll(l))
				})
			}
		}
	}
}

func TestReadIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, shape := range [][3]int{{3, 3, 2}, {5, 2, 2}, {4, 3, 2}} {
			w := newWorld(t, 5)
			l := w.written(shape[0], shape[1], shape[2], 50)
			r := ledger.NewReader(w.env, l)
			got, err := r.Read(w.ctx(), 10, 19, 1<<20)
			noError(t, err)
			equal(t, 10, len(got))
			got, err = r.Read(w.ctx(), 10, 49, 1)
			noError(t, err)
			equal(t, true, len(got) >= 1 && len(got) <= shape[0])
			got, err = r.Read(w.ctx(), 50, 60, 1<<20)
			noError(t, err)
			equal(t, 0, len(got))
			got, err = r.Read(w.ctx(), 3, ledger.AskLAC, 1<<20)
			noError(t, err)
			equal(t, 47, len(got))
		}
	})
}

// An entry that must exist and does not is an error that says who denied it, never an end.
func TestMissingEntryIsNoEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.written(3, 3, 2, 5)
		for _, b := range w.ids {
			w.fake.Wipe(b)
		}
		r := ledger.NewReader(w.env, l)
		_, err := r.Read(w.ctx(), 2, 4, 1<<20)
		var missing *ledger.MissingError
		equal(t, true, errors.As(err, &missing))
		equal(t, entry.EntryID(2), missing.Entry)
		equal(t, 3, missing.Negative)
		equal(t, 0, missing.Unknown)

		w.fake.Crash(w.ids[0])
		_, err = r.Read(w.ctx(), 2, 4, 1<<20)
		equal(t, true, errors.As(err, &missing))
		equal(t, 2, missing.Negative)
		equal(t, 1, missing.Unknown)
	})
}

// A reader with an old record finds entries of a fragment that it does not know, and copies that repair has moved.
func TestReaderFollowsTheRecord(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 1, 1, 1)
		wr := w.writer(l)
		w.mustWrite(wr, 1)
		w.fake.Fail(w.ids[0], bookieclient.OpAdd, bookiewire.ReadOnly, -1)
		w.mustWrite(wr, 1)
		equal(t, 2, len(w.meta.record(1).Fragments))
		r := ledger.NewReader(w.env, l)
		got, err := r.Read(w.ctx(), 1, 1, 1<<20)
		noError(t, err)
		equal(t, 1, len(got))
		equal(t, 2, len(r.Ledger().Fragments))
	})
}

// A bookie that hangs does not hold up a reader that asks how far the ledger is, once another one knows enough.
func TestAskLACDoesNotWaitForAHangingBookie(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 3)
		time.Sleep(time.Second) // the explicit LAC goes out
		w.fake.Hold(bookieclient.AtRequest, bookieclient.OpWaitLAC, w.ids[1])
		r := ledger.NewReader(w.env, l)
		begin := time.Now()
		got, err := r.Read(t.Context(), 0, ledger.AskLAC, 1<<20)
		noError(t, err)
		equal(t, 3, len(got))
		if took := time.Since(begin); took >= w.env.Config.RequestTimeout {
			t.Errorf("it took %v", took)
		}
		wr.Shutdown()
	})
}

// A ledger that is deleted while somebody reads it is gone, and no loss: what its bookies deny, they deny rightly. Its
// tombstone has no fragments.
func TestReadOfADeletedLedger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, tombstone := range []bool{false, true} {
			w := newWorld(t, 3)
			l := w.written(3, 3, 2, 5)
			r := ledger.NewReader(w.env, l)
			open := l
			open.State, open.Last, open.Rev = meta.LedgerOpen, entry.NoEntry, 0
			tail := ledger.NewReader(w.env, open)
			w.meta.mu.Lock()
			w.meta.rev++
			l.State, l.Rev = meta.LedgerDeleting, w.meta.rev
			if tombstone {
				l.Fragments, l.Replication, l.Nonce = nil, meta.Replication{}, 0
			}
			w.meta.ledgers[1] = l
			w.meta.mu.Unlock()
			for _, b := range w.ids {
				w.fake.Wipe(b)
			}
			for range 2 {
				_, err := r.Read(w.ctx(), 2, 4, 1<<20)
				errorIs(t, err, meta.ErrNotFound)
			}
			_, _, err := r.WaitLAC(w.ctx(), 9)
			errorIs(t, err, meta.ErrNotFound)
			_, _, err = tail.WaitLAC(w.ctx(), 9)
			errorIs(t, err, meta.ErrNotFound)
		}
	})
}

// Readers of an open ledger see what bookies know to be confirmed, and no more.
func TestTailReadStopsAtTheLAC(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		w.env.Config.IdleLAC = 1 << 40
		wr := w.writer(l)
		w.mustWrite(wr, 1)
		w.mustWrite(wr, 1)
		r := ledger.NewReader(w.env, l)
		got, err := r.Read(w.ctx(), 0, ledger.AskLAC, 1<<20)
		noError(t, err)
		equal(t, 1, len(got)) // e1's confirmation was not told to any bookie yet
		got, err = r.Read(w.ctx(), 1, ledger.AskLAC, 1<<20)
		noError(t, err)
		equal(t, 0, len(got))
		equal(t, entry.EntryID(0), r.LAC())
		// Nor when it knows the LAC already, though the bookies have more: e1, and e2, which only one of them has.
		w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[1], w.ids[2])
		appendAll(wr, 1, ledger.AckQuorum)
		w.eventually("b0 has e2", func() bool { return len(w.fake.Entries(w.ids[0], 1)) == 3 })
		knows := ledger.NewReader(w.env, l)
		for want := range []int{0, 1} { // e2 came with word of e1's confirmation
			_, err = knows.Read(w.ctx(), entry.EntryID(want), ledger.AskLAC, 1<<20)
			noError(t, err)
		}
		for _, r := range []*ledger.Reader{r, knows} {
			lac := r.LAC()
			got, err = r.Read(w.ctx(), 0, ledger.AskLAC, 1<<20)
			noError(t, err)
			equal(t, int(lac)+1, len(got))
			got, err = r.Read(w.ctx(), 2, ledger.AskLAC, 1<<20)
			noError(t, err)
			equal(t, 0, len(got))
			equal(t, entry.EntryID(1), r.LAC())
		}
	})
}
