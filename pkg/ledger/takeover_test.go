package ledger_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// recoveryEnd is what a recovery came to.
type recoveryEnd struct {
	ledger meta.Ledger
	err    error
}

// broker returns the environment of another broker: its requests carry a name, and it waits long for answers.
func (w *world) broker(name string, attempts int) ledger.Env {
	env := w.env
	env.Bookies = w.fake.From(name)
	env.Config.RequestTimeout = 10 * time.Second
	env.Config.RecoveryAttempts = attempts
	return env
}

func (w *world) recoverAs(name string, attempts int, finish ledger.FinishFunc) chan recoveryEnd {
	ended := make(chan recoveryEnd, 1)
	ctx, env := w.ctx(), w.broker(name, attempts)
	go func() {
		l, _, err := ledger.Recover(ctx, env, 1, ledger.RecoverOptions{Finish: finish})
		ended <- recoveryEnd{l, err}
	}()
	return ended
}

// orphan leaves a ledger whose writer is gone, with n entries that one bookie has, b0.
func (w *world) orphan(n int) meta.Ledger {
	w.t.Helper()
	l := w.open(1, 3, 3, 2)
	release := w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[1], w.ids[2])
	wr := w.writer(l)
	appendAll(wr, n, ledger.AckQuorum)
	w.eventually("b0 has them", func() bool { return len(w.fake.Entries(w.ids[0], 1)) == n })
	wr.Shutdown()
	for _, h := range w.fake.Held() {
		h.Fail(bookiewire.Disconnected)
	}
	release()
	return l
}

// letGo releases the held requests that match.
func (w *world) letGo(match func(*bookieclient.HeldCall) bool) {
	for _, h := range w.fake.Held() {
		if match(h) {
			h.Release()
		}
	}
}

// answered waits until a request of the given client has its answer on the way.
func (w *world) answered(from string, op bookieclient.Op, to entry.StorageUUID, e entry.EntryID) {
	w.t.Helper()
	w.eventually("an answer to "+from, func() bool {
		for _, c := range w.fake.Calls() {
			if c.From == from && c.Op == op && c.To == to && c.Entry == e && c.Stage == bookieclient.AtReply {
				return true
			}
		}
		return false
	})
}

// seesNothing checks that a reader finds no entry, whomever it asks.
func (w *world) seesNothing(r *ledger.Reader) {
	w.t.Helper()
	got, err := r.Read(w.ctx(), 0, ledger.AskLAC, 1<<20)
	noError(w.t, err)
	equal(w.t, 0, len(got))
	equal(w.t, entry.NoEntry, r.LAC())
}

// B9: e0 and e1 are on b0 only. R1 gets b1's denial of e0. R0 then writes e0 back to b0 and b1, and e1. Had e1 told that e0 is
// confirmed, a reader would see e0 now. R1 gets b2's denial and closes the ledger empty.
//
// Here R0 is the older of the two: b1 refuses its write, since R1's denial has raised the term there. b0, where R1 has not been
// yet, takes what R0 writes; with it goes the LAC from which R0 started.
func TestB9OlderRecoveryShowsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		reader := ledger.NewReader(w.broker("reader", 0), w.orphan(2))
		b0, b1, b2 := w.ids[0], w.ids[1], w.ids[2]
		w.fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
			switch {
			case c.From == "r0" && c.To == b2:
				return bookieclient.Lose
			case c.From == "r0" && c.Op == bookieclient.OpRead && c.Stage == bookieclient.AtReply,
				c.From == "r0" && c.Op == bookieclient.OpAdd && c.To == b1 && c.Stage == bookieclient.AtRequest,
				c.From == "r1" && c.To == b0,
				c.From == "r1" && c.To == b2 && c.Op == bookieclient.OpRead && c.Stage == bookieclient.AtRequest:
				return bookieclient.Hold
			}
			return bookieclient.Deliver
		})
		r0 := w.recoverAs("r0", 1, w.meta.close5)
		w.answered("r0", bookieclient.OpRead, b0, 0)
		w.answered("r0", bookieclient.OpRead, b0, 1)
		r1 := w.recoverAs("r1", 1, w.meta.close5)
		w.answered("r1", bookieclient.OpRead, b1, 0)

		w.letGo(func(h *bookieclient.HeldCall) bool { return h.From == "r0" && h.Op == bookieclient.OpRead })
		w.answered("r0", bookieclient.OpAdd, b0, 1)
		w.seesNothing(reader)
		w.letGo(func(h *bookieclient.HeldCall) bool { return h.From == "r0" })
		errorIs(t, (<-r0).err, ledger.ErrHigherTerm)
		equal(t, 0, len(w.fake.Entries(b1, 1)))

		w.letGo(func(h *bookieclient.HeldCall) bool { return h.From == "r1" && h.To == b2 })
		end := <-r1
		noError(t, end.err)
		equal(t, entry.NoEntry, end.ledger.Last)
		w.seesNothing(reader)
	})
}

// B9, the other way round: R0 is the newer one, and every write of it succeeds. It dies before it closes the ledger. R1 has b1's
// denial of old, gets b2's, and would close the ledger empty: its term is over. It starts over, and finds both entries.
func TestB9NewerRecoveryIsNotUndone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		reader := ledger.NewReader(w.broker("reader", 0), w.orphan(2))
		b0, b1, b2 := w.ids[0], w.ids[1], w.ids[2]
		w.fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
			switch {
			case c.From == "r0" && c.To == b2:
				return bookieclient.Lose
			case c.From == "r1" && c.To != b1 && c.Op == bookieclient.OpRead && c.Term == 1 && c.Stage == bookieclient.AtRequest:
				return bookieclient.Hold
			}
			return bookieclient.Deliver
		})
		var tried []entry.EntryID
		r1 := w.recoverAs("r1", 0, func(ctx context.Context, m meta.Ledger, last entry.EntryID, n int64, tail []meta.Fragment) (meta.Ledger, error) {
			tried = append(tried, last)
			return w.meta.close5(ctx, m, last, n, tail)
		})
		w.answered("r1", bookieclient.OpRead, b1, 0)
		died := errors.New("died")
		r0 := w.recoverAs("r0", 1, func(_ context.Context, _ meta.Ledger, last entry.EntryID, _ int64, _ []meta.Fragment) (meta.Ledger, error) {
			equal(t, entry.EntryID(1), last)
			return meta.Ledger{}, died
		})
		errorIs(t, (<-r0).err, died)
		equal(t, 2, len(w.fake.Entries(b1, 1)))
		w.seesNothing(reader)

		w.letGo(func(h *bookieclient.HeldCall) bool { return h.To == b2 })
		w.eventually("the old term's denials were acted upon", func() bool { return w.meta.record(1).Term > 2 })
		w.letGo(func(h *bookieclient.HeldCall) bool { return h.To == b0 })
		end := <-r1
		noError(t, end.err)
		equal(t, []entry.EntryID{entry.NoEntry, 1}, tried)
		equal(t, 2, w.readAll(end.ledger))
	})
}

// B10: the writer closes the ledger at its own LAC while a recovery is writing back what lies above it. Had the recovery's LAC gone
// up with its writes, a reader would see e3 now; had the close been tried until it got through, the ledger would end before it.
func TestB10WriterClosesDuringRecovery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 3)
		w.fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
			if c.Op == bookieclient.OpAdd && c.From == "" && c.To != w.ids[0] {
				return bookieclient.Hold
			}
			return bookieclient.Deliver
		})
		pending := appendAll(wr, 2, ledger.AckQuorum) // e3, e4
		w.eventually("b0 has them", func() bool { return len(w.fake.Entries(w.ids[0], 1)) == 5 })

		writtenBack, proceed := make(chan entry.EntryID, 1), make(chan struct{})
		finish := sync.OnceFunc(func() { close(proceed) })
		t.Cleanup(finish)
		recovery := w.recoverAs("recovery", 1, func(ctx context.Context, m meta.Ledger, last entry.EntryID, n int64, tail []meta.Fragment) (meta.Ledger, error) {
			writtenBack <- last
			<-proceed
			return w.meta.close5(ctx, m, last, n, tail)
		})
		equal(t, entry.EntryID(4), <-writtenBack)
		reader := ledger.NewReader(w.broker("reader", 0), l)
		got, err := reader.Read(w.ctx(), 0, ledger.AskLAC, 1<<20)
		noError(t, err)
		equal(t, 3, len(got))
		equal(t, entry.EntryID(2), reader.LAC())

		tries := 0
		_, err = wr.CloseWith(w.ctx(), func(ctx context.Context, last entry.EntryID, n int64) (meta.Ledger, error) {
			tries++
			equal(t, entry.EntryID(2), last)
			return w.meta.close3(l)(ctx, last, n)
		})
		var refused *meta.LedgerStateError
		equal(t, true, errors.As(err, &refused))
		equal(t, 1, tries)
		errorIs(t, wr.Err(), ledger.ErrTakenOver)
		for _, c := range pending {
			equal(t, "unknown", w.await(c).outcome())
		}
		equal(t, entry.EntryID(2), wr.Confirmed())
		equal(t, meta.LedgerInRecovery, w.meta.record(1).State)

		finish()
		end := <-recovery
		noError(t, end.err)
		equal(t, entry.EntryID(4), end.ledger.Last)
		_, closed, err := reader.WaitLAC(w.ctx(), 4)
		noError(t, err)
		equal(t, true, closed)
		got, err = reader.Read(w.ctx(), 0, ledger.AskLAC, 1<<20)
		noError(t, err)
		equal(t, 5, len(got))
	})
}
