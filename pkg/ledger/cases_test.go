package ledger_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// The tests named after cases replay what happened to systems of this kind in public; docs/testing.md has the list.

// appendFrom appends n entries whose bodies are those of entries first, first+1 … .
func appendFrom(wr *ledger.Writer, first, n int) []chan result {
	var all []chan result
	for i := range n {
		c := make(chan result, 1)
		wr.Append(body(first+i), ledger.AckQuorum, func(id entry.EntryID, err error) { c <- result{id, err} })
		all = append(all, c)
	}
	return all
}

// told returns the outcomes that are known.
func told(all []chan result) (acked []entry.EntryID, failed, waiting int) {
	for _, c := range all {
		select {
		case r := <-c:
			c <- r
			if r.err == nil {
				acked = append(acked, r.id)
			} else {
				failed++
			}
		default:
			waiting++
		}
	}
	return acked, failed, waiting
}

// Case 1: etcd takes no change while bookies fail one after the other. A writer that counts what the ensemble holds which it
// would like to have acknowledges what nobody finds again. Here nothing is sent there, and nothing is acknowledged, before
// etcd names it; another broker's recovery finds all that was.
func TestCase1AcksUnderEnsemblesNeverStored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 7)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 3)
		stall := make(chan struct{})
		w.meta.hooks(func(op string) {
			if op == "T2" {
				<-stall
			}
		}, nil)
		var all []chan result
		for i := range 3 {
			all = append(all, appendFrom(wr, 3+2*i, 2)...)
			w.fake.Crash(w.ids[i])
			time.Sleep(5 * time.Second)
		}
		for _, c := range w.fake.Calls() {
			if c.Op == bookieclient.OpAdd && c.To != w.ids[0] && c.To != w.ids[1] && c.To != w.ids[2] {
				t.Errorf("entry %d was sent to %v, which etcd does not name", c.Entry, c.To)
			}
		}
		acked, _, waiting := told(all)
		if waiting == 0 {
			t.Error("nothing waits, with no bookie left")
		}
		w.fake.Restart(w.ids[1])
		w.fake.Restart(w.ids[2])
		closed, _ := w.recover(1)
		for _, id := range acked {
			if id > closed.Last {
				t.Errorf("entry %d was acknowledged, and the ledger ends with %d", id, closed.Last)
			}
		}
		equal(t, int(closed.Last)+1, w.readAll(closed))
		close(stall)
		for _, c := range all {
			if r := w.await(c); r.err == nil && r.id > closed.Last {
				t.Errorf("entry %d is acknowledged behind the end, %d", r.id, closed.Last)
			}
		}
		equal(t, 1, len(w.meta.record(1).Fragments))
	})
}

// Case 2: a bookie that is being replaced acknowledges entries, late, while the change is on its way to etcd. Were they
// counted, the record would name another bookie for them. They count for nothing: the entries are acknowledged once the bookies
// have them that the record names.
func TestCase2SlowAcksDuringAnEnsembleChange(t *testing.T) {
	t.Parallel()
	for name, applied := range map[string]bool{"before it is applied": false, "when it is applied and not answered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { slowAcks(t, applied) })
		})
	}
}

func slowAcks(t *testing.T, applied bool) {
	t.Helper()
	w := newWorld(t, 3)
	l := w.open(1, 2, 2, 1)
	wr := w.writer(l)
	w.mustWrite(wr, 5)
	noError(t, w.fake.Idle(t.Context()))
	// b0 and the newcomer, b2, take nothing, b1 takes the entries and does not say so.
	var release []func()
	for _, b := range []int{0, 2} {
		release = append(release, w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[b]))
	}
	slow := w.fake.Hold(bookieclient.AtReply, bookieclient.OpAdd, w.ids[1])
	changing, proceed := make(chan struct{}), make(chan struct{})
	stop := func(op string) {
		if op == "T2" {
			close(changing)
			<-proceed
		}
	}
	if applied {
		w.meta.hooks(nil, func(op string) error { stop(op); return nil })
	} else {
		w.meta.hooks(stop, nil)
	}
	all := appendFrom(wr, 5, 2)
	w.eventually("b1 has them", func() bool { return len(w.fake.Entries(w.ids[1], 1)) == 7 })
	w.setCandidate(1, func(c *ledger.Candidate) { c.Draining = true })
	wr.CandidatesChanged()
	<-changing
	slow()
	time.Sleep(time.Second)
	nothing := func(when string) {
		t.Helper()
		if acked, failed, _ := told(all); len(acked)+failed > 0 || wr.Confirmed() != 4 {
			t.Fatalf("%s: acknowledged %v, %d failed, confirmed %d", when, acked, failed, wr.Confirmed())
		}
	}
	nothing("while the change is on its way")
	close(proceed)
	w.eventually("the change is known", func() bool { return len(wr.Ledger().Fragments) == 2 })
	w.meta.hooks(nil, nil)
	nothing("after the change, with the bookies that it names silent")
	equal(t, entry.EntryID(5), w.meta.record(1).Fragments[1].First)
	for _, r := range release {
		r()
	}
	for _, c := range all {
		noError(t, w.await(c).err)
		w.placed(wr.Confirmed())
	}
	closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
	noError(t, err)
	equal(t, 7, w.readAll(closed))
}

// Case 27: one bookie of three takes nothing, and somebody publishes as fast as it goes. What waits for the third copy is
// bounded: the caller's budget holds publishing back at first, and then copies are left to repair, so that publishing goes
// on within it.
func TestCase27ASlowBookieHoldsLittleMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const size, entries, most = 1 << 10, 3000, 64 << 10
		w := newWorld(t, 3)
		room := budget.New(most)
		w.env.Config.StragglerBytes, w.env.Config.HandOverAfter = most/4, time.Second
		w.env.Config.Released = func(n int) { room.Release(int64(n)) }
		defer w.fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, w.ids[2])()
		wr := w.writer(w.open(1, 3, 3, 2))
		began, acked := time.Now(), make(chan error, entries)
		for range entries {
			noError(t, room.Acquire(w.ctx(), size)) // within the test's time: it goes on
			wr.Append(make([]byte, size), ledger.AckQuorum, func(_ entry.EntryID, err error) { acked <- err })
		}
		for range entries {
			noError(t, <-acked)
		}
		if time.Since(began) < time.Second {
			t.Error("nothing held publishing back")
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		left := 0
		for _, h := range w.hints {
			equal(t, w.ids[2], h.UUID)
			left += int(h.Last-h.First) + 1
		}
		if left < entries-2*most/size {
			t.Errorf("%d copies of %d are left to repair: nobody knows of the others", left, entries)
		}
	})
}

// placed checks that entries up to last are where the record says, on as many bookies as an acknowledgement needs.
func (w *world) placed(last entry.EntryID) {
	w.t.Helper()
	l := w.meta.record(1)
	q, err := quorum.New(quorum.Config{Ensemble: l.Ensemble, WriteQuorum: l.WriteQuorum, AckQuorum: l.AckQuorum}, make([]string, l.Ensemble))
	noError(w.t, err)
	for e := entry.EntryID(0); e <= last; e++ {
		f := fragmentOf(l, e)
		var on quorum.Set
		q.WriteSet(e).Each(func(i int) {
			if w.fake.Body(f.Slots[i].UUID, 1, e) != nil {
				on |= quorum.Of(i)
			}
		})
		if !q.Valid(on) {
			w.t.Errorf("entry %d is confirmed, and of the bookies that the record names slots %b have it", e, on)
		}
	}
}

func fragmentOf(l meta.Ledger, e entry.EntryID) meta.Fragment {
	f := l.Fragments[0]
	for _, next := range l.Fragments {
		if next.First <= e {
			f = next
		}
	}
	return f
}
