package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Not parallel: it counts goroutines.
func TestIdleWritersCostNoGoroutine(t *testing.T) {
	w := newWorld(t, 3)
	before := runtime.NumGoroutine()
	const n = 500
	writers := make([]*ledger.Writer, n)
	for i := range writers {
		writers[i] = w.writer(w.open(entry.LedgerID(i+1), 3, 3, 2))
		w.mustWrite(writers[i], 1)
	}
	w.eventually("no goroutine is left but the fake's", func() bool { return runtime.NumGoroutine() <= before })
	for _, wr := range writers {
		equal(t, entry.EntryID(0), wr.Confirmed())
		w.mustWrite(wr, 1) // they wake up
	}
}

// A bookie is killed under load: no append fails, the spare takes over, and every copy is accounted for.
func TestBookieKilledUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		first := appendAll(wr, 100, ledger.AckQuorum)
		noError(t, w.await(first[0]).err)
		w.fake.Crash(w.ids[1])
		for _, c := range append(first[1:], appendAll(wr, 100, ledger.AckQuorum)...) {
			noError(t, w.await(c).err)
		}
		w.eventually("the spare has taken over", func() bool { return len(wr.Ledger().Fragments) >= 2 })
		w.mustWrite(wr, 10)
		w.eventually("no bookie is suspect", func() bool { return !wr.Degraded() }) // a slow machine is suspicious
		w.eventually("every byte is released", func() bool { return w.released.Load() == wr.Length() })
		closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
		noError(t, err)
		equal(t, entry.EntryID(209), closed.Last)
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, h := range w.hints {
			equal(t, w.ids[1], h.UUID)
		}
	})
}

// Two of three are killed, and there is no spare: nothing is acknowledged, the writer wants to roll, and what it closes leaves the
// rest to be appended elsewhere, bodies included.
func TestTwoBookiesKilled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		var dropped []entry.EntryID
		w.env.OnDropped = func(id entry.EntryID, b []byte) {
			if len(b) > 0 {
				dropped = append(dropped, id)
			}
		}
		wr := w.writer(l)
		w.mustWrite(wr, 1)
		w.fake.Crash(w.ids[0])
		w.fake.Crash(w.ids[1])
		c := appendAll(wr, 2, ledger.AckQuorum)
		one := appendAll(wr, 1, ledger.AckOne)[0]
		equal(t, "ok", w.await(one).outcome())
		<-wr.RollWanted()
		closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
		noError(t, err)
		equal(t, entry.EntryID(0), closed.Last)
		equal(t, "not written", w.await(c[0]).outcome())
		equal(t, "not written", w.await(c[1]).outcome())
		equal(t, fmt.Sprint([]entry.EntryID{3}), fmt.Sprint(dropped))
	})
}

// What the closing transaction says decides what the writer does next.
func TestCloseOutcomes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			err    error
			broken bool
		}{
			{meta.ErrConflict, false},
			{meta.ErrUnavailable, false},
			{meta.ErrLedgerOrder, false},
			{meta.ErrUnknownOutcome, true},
			{meta.ErrEpoch, true},
			{errors.New("who knows"), true},
		} {
			w := newWorld(t, 3)
			l := w.open(1, 3, 3, 2)
			wr := w.writer(l)
			w.mustWrite(wr, 3)
			var late chan result
			_, err := wr.CloseWith(w.ctx(), func(context.Context, entry.EntryID, int64) (meta.Ledger, error) {
				late = appendAll(wr, 1, ledger.AckQuorum)[0]
				return meta.Ledger{}, fmt.Errorf("close: %w", c.err)
			})
			errorIs(t, err, c.err)
			if c.broken {
				<-wr.Broken()
				equal(t, "not written", w.await(late).outcome()) // it was never sent
				continue
			}
			equal(t, "ok", w.await(late).outcome())
			closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
			noError(t, err)
			equal(t, entry.EntryID(3), closed.Last)
		}
	})
}

// The writer's own earlier try closed the ledger: found out by the record's term and nonce, not taken for a takeover.
func TestCloseFindsItsOwnEarlierTry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 3)
		closed, err := wr.CloseWith(w.ctx(), func(ctx context.Context, last entry.EntryID, length int64) (meta.Ledger, error) {
			_, err := w.meta.close3(l)(ctx, last, length)
			noError(t, err)
			return w.meta.close3(l)(ctx, last, length)
		})
		noError(t, err)
		equal(t, meta.LedgerClosed, closed.State)
		noError(t, wr.Err())
	})
}

func TestCloseGivesUpWhileDraining(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		w.env.Config.DrainTimeout = time.Hour
		w.env.Config.SuspectAfter = time.Hour
		release := w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
		wr := w.writer(l)
		c := appendAll(wr, 1, ledger.AckQuorum)[0]
		ctx, cancel := context.WithCancel(w.ctx())
		go func() {
			_, _ = w.fake.AwaitHeld(ctx, 3)
			cancel()
		}()
		_, err := wr.CloseWith(ctx, w.meta.close3(l))
		errorIs(t, err, context.Canceled)
		release()
		equal(t, "ok", w.await(c).outcome())
		w.mustWrite(wr, 1)
	})
}

// Shutdown ends every append, also while bookies and the metadata store hang.
func TestShutdownWithHangingPeers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		hang := make(chan struct{})
		w.meta.hooks(func(op string) {
			if op == "T2" {
				<-hang
			}
		}, nil)
		release := w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[2])
		w.fake.Fail(w.ids[0], bookieclient.OpAdd, bookiewire.Disconnected, -1)
		w.fake.Fail(w.ids[1], bookieclient.OpAdd, bookiewire.Disconnected, -1)
		wr := w.writer(w.open(1, 3, 3, 2))
		c := appendAll(wr, 3, ledger.AckAll)
		w.eventually("a change is under way", func() bool { return wr.Degraded() })
		done := make(chan struct{})
		go func() {
			wr.Shutdown()
			close(done)
		}()
		for _, c := range c {
			equal(t, "unknown", w.await(c).outcome())
		}
		close(hang)
		<-done
		errorIs(t, wr.Err(), ledger.ErrShutdown)
		equal(t, "not written", w.await(appendAll(wr, 1, ledger.AckQuorum)[0]).outcome())
		release()
	})
}

// Callbacks come in order, LAC first, and may append.
func TestCallbacksMayAppend(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		lac := entry.NoEntry
		w.env.OnConfirmed = func(l entry.EntryID) { lac = l }
		wr := w.writer(w.open(1, 3, 3, 2))
		done := make(chan error, 1)
		var next func(entry.EntryID, error)
		next = func(id entry.EntryID, err error) {
			switch {
			case err != nil || lac < id:
				done <- fmt.Errorf("e%d with LAC %d: %w", id, lac, err)
			case id == 99:
				done <- nil
			default:
				wr.Append(body(int(id)+1), ledger.AckQuorum, next)
			}
		}
		wr.Append(body(0), ledger.AckQuorum, next)
		noError(t, <-done)
	})
}

// A draining bookie is left by an idle ledger, once its owner says that the candidates changed.
func TestDrainingBookieIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 2)
		w.setCandidate(2, func(c *ledger.Candidate) { c.Draining = true })
		wr.CandidatesChanged()
		w.eventually("another bookie has its place", func() bool {
			f := wr.Ledger().Fragments
			return len(f) == 2 && f[1].Slots[2].UUID == w.ids[3]
		})
		w.mustWrite(wr, 2)
	})
}

// The last confirmation is written when the ledger idles, and a reader elsewhere sees the last entry.
func TestIdleLACIsWritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 1)
		lac, closed, err := ledger.NewReader(w.env, l).WaitLAC(w.ctx(), entry.NoEntry)
		noError(t, err)
		equal(t, entry.EntryID(0), lac)
		equal(t, false, closed)
	})
}

func TestRecoveryLength(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 199)
		w.mustWrite(wr, 1) // carries the LAC of those before
		closed, stats := w.recover(1)
		exact := wr.Length()
		equal(t, false, stats.LengthExact)
		if closed.Length < exact*9/10 || closed.Length > exact*11/10 {
			t.Errorf("length %d, want about %d", closed.Length, exact)
		}
		wr = w.writer(w.open(2, 3, 3, 2))
		w.mustWrite(wr, 1)
		closed, stats = w.recover(2)
		equal(t, true, stats.LengthExact || closed.Length == wr.Length())
	})
}
