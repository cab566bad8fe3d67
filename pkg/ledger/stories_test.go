package ledger_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// TestB1: e0 is on b2 only. The fence round reaches b1 and b2; then b0 and b1 deny e0, and the ledger is closed empty. The
// old owner's adds reach b0 and b1 at last: both must refuse, or an acknowledged entry is lost. So reads fence too.
// TestB2: the same, with a crash of both bookies before the adds reach them: the fence must have been durable.
func TestB1B2NegativeReadsFence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, crash := range []bool{false, true} {
			w := newWorld(t, 3)
			l := w.open(1, 3, 3, 2)
			release := w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[0], w.ids[1])
			wr := w.writer(l)
			c := appendAll(wr, 1, ledger.AckQuorum)[0]
			_, err := w.fake.AwaitHeld(w.ctx(), 2)
			noError(t, err)
			w.fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
				switch {
				case c.Op == bookieclient.OpFence && c.To == w.ids[0]:
					return bookieclient.Lose
				case c.Op == bookieclient.OpRead && c.To == w.ids[2]:
					return bookieclient.Lose
				}
				return bookieclient.Deliver
			})
			closed, _ := w.recover(1)
			equal(t, entry.NoEntry, closed.Last)
			if crash {
				for _, b := range w.ids[:2] {
					w.fake.Crash(b)
					w.fake.Restart(b)
				}
			}
			release()
			equal(t, "unknown", w.await(c).outcome())
			equal(t, entry.NoEntry, wr.Confirmed())
		}
	})
}

// B3: a bookie that hangs for ever does not block the recovery, neither its fence nor its negatives.
func TestB3HangingBookie(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 10)
		for _, op := range []bookieclient.Op{bookieclient.OpFence, bookieclient.OpRead, bookieclient.OpAdd} {
			w.fake.Hold(bookieclient.AtRequest, op, w.ids[0])
		}
		closed, _ := w.recover(1)
		equal(t, entry.EntryID(9), closed.Last)
		equal(t, 10, w.readAll(closed))
	})
}

// B3, the other half: that it hangs is no denial. e0 was acknowledged by b0 and b1. b0 hangs, b1 cannot tell, b2 denies: nothing is
// decided until b1 can.
func TestB3HangingBookieDeniesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		missed := w.fake.Fail(w.ids[2], bookieclient.OpAdd, bookiewire.Disconnected, -1)
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 1)
		wr.Shutdown()
		for _, op := range []bookieclient.Op{bookieclient.OpFence, bookieclient.OpRead, bookieclient.OpAdd} {
			w.fake.Hold(bookieclient.AtRequest, op, w.ids[0])
		}
		remove := w.fake.Fail(w.ids[1], bookieclient.OpRead, bookiewire.Unknown, -1)
		env := w.env
		env.Config.RecoveryAttempts = 1
		env.Config.RequestTimeout = 100 * time.Millisecond
		_, _, err := ledger.Recover(w.ctx(), env, 1, ledger.RecoverOptions{Finish: w.meta.close5})
		errorIs(t, err, ledger.ErrUndecided)
		equal(t, meta.LedgerInRecovery, w.meta.record(1).State)
		remove()
		missed()
		closed, _ := w.recover(1)
		equal(t, entry.EntryID(0), closed.Last)
		equal(t, 1, w.readAll(closed))
	})
}

// B8: a recovery with too few bookies decides nothing, a bookie that was never in the ensemble does not help, and once the
// others are back the entry is there.
func TestB8TooFewBookies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 1)
		wr.Shutdown()
		w.fake.Crash(w.ids[0])
		w.fake.Crash(w.ids[1])
		env := w.env
		env.Config.RecoveryAttempts = 2
		_, stats, err := ledger.Recover(w.ctx(), env, 1, ledger.RecoverOptions{Finish: w.meta.close5})
		errorIs(t, err, ledger.ErrUndecided)
		equal(t, 2, stats.Attempts)
		equal(t, meta.LedgerInRecovery, w.meta.record(1).State)
		w.fake.Restart(w.ids[1])
		closed, _ := w.recover(1)
		equal(t, entry.EntryID(0), closed.Last)
		equal(t, 1, w.readAll(closed))
	})
}

// B6: b1 is down, a recovery writes to a replacement and cannot close; b1 is back, b2 down, and the second recovery still finds the
// entry, since nothing was published. It is closed with the copies where the record says.
func TestB6SecondRecoveryReadsTheOldEnsemble(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 5)
		l := w.open(1, 3, 3, 2)
		hold := w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[1], w.ids[2])
		wr := w.writer(l)
		appendAll(wr, 1, ledger.AckQuorum)
		w.eventually("e0 is on b0", func() bool { return len(w.fake.Entries(w.ids[0], 1)) == 1 })
		wr.Shutdown()
		for _, h := range w.fake.Held() {
			h.Fail(bookiewire.Disconnected)
		}
		hold()
		// b1 and b2 answer reads, but take no write-back; the close does not get through.
		w.fake.Fail(w.ids[1], bookieclient.OpAdd, bookiewire.ReadOnly, -1)
		noClose := errors.New("etcd is away")
		env := w.env
		env.Config.RecoveryAttempts = 1
		remove := w.fake.Fail(w.ids[2], bookieclient.OpAdd, bookiewire.ReadOnly, -1)
		_, _, err := ledger.Recover(w.ctx(), env, 1, ledger.RecoverOptions{
			Finish: func(context.Context, meta.Ledger, entry.EntryID, int64, []meta.Fragment) (meta.Ledger, error) {
				return meta.Ledger{}, noClose
			},
		})
		errorIs(t, err, noClose)
		equal(t, 1, len(w.meta.record(1).Fragments))
		remove()
		w.fake.Crash(w.ids[1])
		closed, stats := w.recover(1)
		equal(t, entry.EntryID(0), closed.Last)
		equal(t, 1, stats.EntriesRewritten)
		equal(t, 1, w.readAll(closed))
	})
}

// B16: a second close waits for the first one's transaction; an entry of the closed ledger never grows it.
func TestB16SecondCloseWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 5)
		entered, proceed := make(chan struct{}), make(chan struct{})
		fn := func(ctx context.Context, last entry.EntryID, length int64) (meta.Ledger, error) {
			close(entered)
			<-proceed
			return w.meta.close3(l)(ctx, last, length)
		}
		results := make(chan error, 2)
		go func() {
			_, err := wr.CloseWith(w.ctx(), fn)
			results <- err
		}()
		<-entered
		go func() {
			closed, err := wr.CloseWith(w.ctx(), func(context.Context, entry.EntryID, int64) (meta.Ledger, error) {
				return meta.Ledger{}, errors.New("a second close ran its own transaction")
			})
			if err == nil && closed.Last != 4 {
				err = errors.New("another end")
			}
			results <- err
		}()
		c := appendAll(wr, 1, ledger.AckQuorum)[0]
		close(proceed)
		noError(t, <-results)
		noError(t, <-results)
		equal(t, "not written", w.await(c).outcome())
	})
}

// revMeta is a metadata store that compares nothing but the record's revision, and takes the fragments as they are proposed.
type revMeta struct{ *memMeta }

func (m revMeta) ChangeEnsemble(ctx context.Context, seen meta.Ledger, fragments []meta.Fragment) (meta.Ledger, error) {
	return m.txn(ctx, "T2", seen.ID, func(l *meta.Ledger) error {
		switch {
		case l.State != meta.LedgerOpen || l.Nonce != seen.Nonce:
			return stateError("T2", l)
		case l.Rev != seen.Rev:
			return meta.ErrConflict
		}
		l.Fragments = clone(meta.Ledger{Fragments: fragments}).Fragments
		return nil
	})
}

// B18: a slot is changed twice, and each time repair has changed the record just before: once it adds an intent, once it moves a
// copy of an older fragment. Both changes start over from the record as it is; nothing of repair's is undone, and nothing is lost.
func TestB18DoubleChangeWithConflicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 6)
		w.env.Metadata = revMeta{w.meta}
		w.setCandidate(5, func(c *ledger.Candidate) { c.Writable = false })
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 3)
		attempts := 0
		repair := func(f func(l *meta.Ledger)) {
			_, err := w.meta.txn(t.Context(), "T6", 1, func(l *meta.Ledger) error { f(l); return nil })
			noError(t, err)
		}
		w.meta.hooks(func(op string) {
			if op != "T2" {
				return
			}
			switch attempts++; attempts {
			case 1:
				repair(func(l *meta.Ledger) { l.Pending = []meta.ReplicaIntent{{Target: w.ids[5]}} })
			case 3:
				repair(func(l *meta.Ledger) { l.Fragments[0].Slots[1].UUID, l.Pending = w.ids[5], nil })
			}
		}, nil)
		written := 3
		for change := range 2 {
			l := w.meta.record(1)
			w.fake.Crash(l.Fragments[change].Slots[0].UUID)
			for _, c := range []int{0, 1} {
				r := make(chan result, 1)
				wr.Append(body(written+c), ledger.AckQuorum, func(id entry.EntryID, err error) { r <- result{id, err} })
				equal(t, "ok", w.await(r).outcome())
			}
			written += 2
			w.eventually("the slot is changed", func() bool { return len(w.meta.record(1).Fragments) == change+2 })
			equal(t, 2*change+2, attempts)
		}
		l := w.meta.record(1)
		equal(t, w.ids[5], l.Fragments[0].Slots[1].UUID)
		equal(t, 0, len(l.Pending))
		var first []entry.StorageUUID
		for _, f := range l.Fragments {
			first = append(first, f.Slots[0].UUID)
		}
		slices.SortFunc(first, func(a, b entry.StorageUUID) int { return bytes.Compare(a[:], b[:]) })
		equal(t, []entry.StorageUUID{w.ids[0], w.ids[3], w.ids[4]}, first)
		closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
		noError(t, err)
		equal(t, written, w.readAll(closed))
	})
}

// B19: transactions are applied and their replies lost. The record tells: the change, the close by the writer's recovery.
func TestB19RepliesLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 3)
		w.meta.hooks(nil, func(op string) error {
			if op == "T2" || op == "T5" {
				return meta.ErrUnknownOutcome
			}
			return nil
		})
		w.fake.Crash(w.ids[0])
		w.fake.Crash(w.ids[1])
		c := appendAll(wr, 1, ledger.AckQuorum)[0]
		w.setCandidate(0, func(c *ledger.Candidate) { c.Writable = false })
		equal(t, "ok", w.await(c).outcome())
		w.fake.Restart(w.ids[0])
		w.fake.Restart(w.ids[1])
		closed, stats := w.recover(1)
		equal(t, true, stats.Adopted)
		equal(t, entry.EntryID(3), closed.Last)
	})
}

// Many recoveries of one ledger, at once, with its writer alive: all find the same end, and nothing acknowledged is beyond it.
func TestConcurrentRecoveriesAgree(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		wr := w.writer(w.open(1, 3, 3, 2))
		dones := appendAll(wr, 200, ledger.AckQuorum)
		type end struct {
			l   meta.Ledger
			err error
		}
		ends := make(chan end, 4)
		ctx := w.ctx()
		for range 4 {
			go func() {
				l, _, err := ledger.Recover(ctx, w.env, 1, ledger.RecoverOptions{Finish: w.meta.close5})
				ends <- end{l, err}
			}()
		}
		var first *meta.Ledger
		for range 4 {
			e := <-ends
			noError(t, e.err)
			if first == nil {
				first = &e.l
			}
			equal(t, first.Last, e.l.Last)
		}
		for _, c := range dones {
			if r := w.await(c); r.err == nil && r.id > first.Last {
				t.Fatalf("e%d was acknowledged, the end is %d", r.id, first.Last)
			}
		}
		equal(t, int(first.Last)+1, w.readAll(*first))
	})
}

// An entry that one bookie has, acknowledged at level one, survives a clean crash of its writer: the recovery hears all
// bookies before it decides that an entry is absent, even though two denials would do.
func TestOneSurvivesACleanCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
			if c.Op == bookieclient.OpAdd && !c.Recovery && c.To != w.ids[2] {
				return bookieclient.Hold
			}
			return bookieclient.Deliver
		})
		wr := w.writer(w.open(1, 3, 3, 2))
		c := appendAll(wr, 1, ledger.AckOne)[0]
		equal(t, "ok", w.await(c).outcome())
		wr.Shutdown()
		// The holder is the last to answer.
		denied := make(chan struct{}, 10)
		w.fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
			if c.Op != bookieclient.OpRead || c.Stage != bookieclient.AtReply || c.Entry != 0 {
				return bookieclient.Deliver
			}
			if c.To == w.ids[2] {
				return bookieclient.Hold
			}
			denied <- struct{}{}
			return bookieclient.Deliver
		})
		env := w.env
		env.Config.NegativeWait = 10 * time.Second
		env.Config.RequestTimeout = 20 * time.Second
		ctx := w.ctx()
		done := make(chan entry.EntryID, 1)
		go func() {
			l, _, err := ledger.Recover(ctx, env, 1, ledger.RecoverOptions{Finish: w.meta.close5})
			if err != nil {
				l.Last = -5
			}
			done <- l.Last
		}()
		<-denied
		<-denied
		w.eventually("the holder's answer is on its way", func() bool {
			for _, h := range w.fake.Held() {
				if h.Op == bookieclient.OpRead {
					h.Release()
					return true
				}
			}
			return false
		})
		equal(t, entry.EntryID(0), <-done)
	})
}

// B36: waiting on a ledger that is fenced and not closed does not spin, and ends when it is closed. The last entry's own
// confirmation travels with no add: the end comes from the record.
func TestB36FencedIsNotClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 3)
		time.Sleep(time.Second) // the explicit LAC goes out
		r := ledger.NewReader(w.env, l)
		lac, closed, err := r.WaitLAC(t.Context(), 1)
		noError(t, err)
		equal(t, entry.EntryID(2), lac)
		equal(t, false, closed)
		wr.Shutdown()
		_, err = w.meta.StartRecovery(t.Context(), 1)
		noError(t, err)
		done := make(chan entry.EntryID)
		go func() {
			lac, closed, err := r.WaitLAC(t.Context(), 2)
			if err != nil || !closed {
				lac = -5
			}
			done <- lac
		}()
		before := len(w.fake.Calls())
		time.Sleep(10 * time.Minute)
		if n := len(w.fake.Calls()) - before; n > 3000 {
			t.Errorf("%d requests in ten minutes of waiting", n)
		}
		select {
		case <-done:
			t.Error("the wait ended, though the ledger is not closed")
		default:
		}
		_, _, err = ledger.Recover(t.Context(), w.env, 1, ledger.RecoverOptions{Finish: w.meta.close5})
		noError(t, err)
		equal(t, entry.EntryID(2), <-done)
	})
}
