package ledger_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// However big the entries of a ledger's tail are, a recovery holds and reads ahead no more than a bounded number of bytes; and
// of small ones it reads as many ahead as its window has.
func TestRecoveryBoundsItsBytes(t *testing.T) {
	t.Parallel()
	for _, size := range []int{100, 5 << 20} {
		l := meta.Ledger{
			ID: simLedger, State: meta.LedgerInRecovery, Term: 1, Last: entry.NoEntry,
			Replication: meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}, Fragments: []meta.Fragment{{}},
		}
		for _, u := range bookieclient.FakeUUIDs(3) {
			l.Fragments[0].Slots = append(l.Fragments[0].Slots, meta.Slot{UUID: u})
		}
		c := ledger.NewRecoveryCore(ledger.Config{RecoveryWindow: 64}, l, time.Now())
		c.Done()
		for i := range 3 {
			c.FenceDone(i, entry.NoEntry, bookiewire.OK)
		}
		big := make([]byte, size)
		var unread, unwritten []entry.EntryID
		most := 0
		const entries = 500
		for step := range 10_000 {
			rd := *c.Ready()
			for _, r := range rd.Reads {
				unread = append(unread, r.Entry)
			}
			for _, w := range rd.Writes {
				unwritten = append(unwritten, w.Entry)
			}
			c.Done()
			most = max(most, len(unread))
			if held := 3*len(unread)*size + len(unwritten)*size; step > 0 && held > 48<<20 {
				t.Fatalf("%d entries of %d bytes are read ahead, %d not written back", len(unread), size, len(unwritten))
			}
			switch {
			case rd.Finish != nil:
				equal(t, entry.EntryID(entries-1), rd.Finish.Last)
				if size == 100 {
					equal(t, 64, most)
				}
				goto next
			case len(unread) > 0 && unread[0] < entries && step%3 != 0:
				c.ReadDone(unread[0], 0, bookiewire.OK, entry.Checksum(simLedger, unread[0], big), big)
				unread = unread[1:]
			case len(unwritten) > 0:
				for i := range 2 {
					c.AddDone(unwritten[0], i, l.Fragments[0].Slots[i].UUID, bookiewire.OK)
				}
				unwritten = unwritten[1:]
			case len(unread) > 0 && unread[0] == entries:
				for i := range 3 {
					c.ReadDone(entries, i, bookiewire.NoEntry, 0, nil)
				}
			}
		}
		t.Fatal("the recovery does not end")
	next:
	}
}

// The length of what a recovery has no need to read is estimated, and the estimate stays within what a ledger can have:
// it decides what a quota by size evicts.
func TestRecoveredLength(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sizes []int
		bound int64
		want  int64
	}{
		"all alike":      {[]int{100, 100, 100, 100, 100, 100, 100, 100, 100, 100}, 0, 1000},
		"a big one":      {[]int{1, 1, 1, 1, 1, 9000, 1, 1, 1, 1}, 2000, 2000},
		"bound not near": {[]int{100, 100, 100, 100, 100, 100, 100, 100, 100, 100}, 2000, 1000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 3)
			wr := w.writer(w.open(1, 3, 3, 2))
			for i, n := range c.sizes {
				done := make(chan result, 1)
				wr.Append(make([]byte, n), ledger.AckQuorum, func(id entry.EntryID, err error) { done <- result{id, err} })
				equal(t, entry.EntryID(i), w.await(done).id)
			}
			w.eventually("the LAC is told", func() bool {
				reply, err := w.fake.WaitLAC(t.Context(), w.ids[0], bookiewire.WaitLAC{Ledger: 1, After: entry.NoEntry})
				return err == nil && reply.LAC == 9
			})
			wr.Shutdown()
			l, stats, err := ledger.Recover(w.ctx(), w.env, 1, ledger.RecoverOptions{Finish: w.meta.close5, MaxLength: c.bound})
			noError(t, err)
			equal(t, false, stats.LengthExact)
			equal(t, c.want, l.Length)
		})
	}
}

// A recovery that is undecided says why, bookie by bookie: what a frozen one, one that is gone and one that answers did.
func TestUndecidedRecoveryExplainsItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		wr := w.writer(w.open(1, 3, 3, 2))
		w.mustWrite(wr, 3)
		wr.Shutdown()
		w.fake.Crash(w.ids[0])
		defer w.fake.Hold(bookieclient.AtRequest, bookieclient.OpFence, w.ids[1])()
		w.env.Config.RecoveryAttempts, w.env.Config.RequestTimeout = 1, 50*time.Millisecond
		_, _, err := ledger.Recover(w.ctx(), w.env, 1, ledger.RecoverOptions{Finish: w.meta.close5})
		errorIs(t, err, ledger.ErrUndecided)
		for i, why := range []string{": fence: bookie answered Disconnected", ": ", ": answered"} {
			if want := w.ids[i].String() + why; !strings.Contains(err.Error(), want) {
				t.Errorf("%v\nshould say %q", err, want)
			}
		}
		if n := strings.Count(err.Error(), "Disconnected") + strings.Count(err.Error(), "no answer in time"); n != 2 {
			t.Errorf("%v", err)
		}
	})
}
