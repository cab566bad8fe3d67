package chain_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

func upTo(n uint64) []uint64 {
	var out []uint64
	for i := uint64(1); i <= n; i++ {
		out = append(out, i)
	}
	return out
}

func TestRollUnderLoad(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollBytes: 2000})
	const n = 1000
	for i := range n {
		l.append(ledger.AckQuorum)
		if i%50 == 49 { // let rolls happen between
			want := i - 20
			l.await("acks", func() bool { return len(l.acked) > want })
			eventually(t, "the roll", func() bool { return !l.Rolling() })
		}
	}
	l.wg.Wait()
	if got := l.ackedNumbers(); !slices.Equal(got, upTo(n)) {
		t.Fatalf("acknowledged out of order or not at all: %d of them, failed %v", len(got), l.failed)
	}
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(n)) {
		t.Fatalf("read %d entries back: %v", len(got), got)
	}
	runs := l.Runs()
	if len(runs) < 5 {
		t.Fatalf("%d runs, want several", len(runs))
	}
	var next entry.Offset
	for _, r := range runs {
		if !r.Closed || r.First != next {
			t.Fatalf("run %+v after offset %d", r, next)
		}
		next = r.End
	}
	if next != 2*n {
		t.Fatalf("runs end at %d", next)
	}
	l.accounted()
	if !slices.Equal(l.confirmed, upTo(n)) {
		t.Fatal("confirmed in another order")
	}
}

// A new owner takes over while the old one still appends: the old one is fenced, nothing is acknowledged that the new
// one does not have, and offsets go on without a gap.
func TestTakeoverWhileTheOldOwnerAppends(t *testing.T) {
	t.Parallel()
	for _, openNow := range []bool{false, true} {
		f := newCluster(t, 3)
		old := f.open(f.Takeover(), chain.Config{RollBytes: 3000})
		stop := make(chan struct{})
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
				}
				old.append(ledger.AckQuorum)
				old.mu.Lock()
				far := int(old.number)-len(old.acked)-len(old.failed) > 20
				changed := old.changed
				old.mu.Unlock()
				if far {
					<-changed
				}
			}
		}()
		old.await("some acks", func() bool { return len(old.acked) > 200 })
		eventually(t, "a roll", func() bool { return len(old.Runs()) > 2 })
		fresh := f.open(f.Takeover(), chain.Config{OpenNow: openNow})
		first := fresh.NextOffset()
		fresh.number = 1_000_000
		for range 20 {
			fresh.append(ledger.AckQuorum)
		}
		fresh.wg.Wait()
		select {
		case <-old.Lost():
		case <-time.After(2 * time.Minute):
			t.Fatal("the old owner goes on")
		}
		close(stop)
		<-stopped
		old.wg.Wait()
		got := fresh.readAll()
		kept := got[:len(got)-20]
		if entry.Offset(2*len(kept)) != first {
			t.Fatalf("%d old entries, but the new owner began at %d", len(kept), first)
		}
		acked := old.ackedNumbers()
		if !slices.Equal(kept, upTo(uint64(len(kept)))) {
			t.Fatal("old entries are not what was appended, in order")
		}
		if len(acked) > len(kept) || !slices.Equal(acked, kept[:len(acked)]) {
			t.Fatalf("%d acknowledged, %d kept", len(acked), len(kept))
		}
		if !fresh.Opening().Recovered {
			t.Fatal("nothing was recovered")
		}
		// The stale owner deletes nothing.
		if _, err := old.Trim(t.Context(), func(meta.Run) bool { return true }); !errors.Is(err, meta.ErrEpoch) && !errors.Is(err, meta.ErrConflict) {
			t.Fatalf("a stale owner's trim: %v", err)
		}
		var failed *ledger.AppendError
		for n, err := range old.failed {
			if !errors.As(err, &failed) {
				t.Fatalf("append %d failed with %v", n, err)
			}
			if failed.Outcome == ledger.NotWritten && slices.Contains(kept, n) {
				t.Fatalf("append %d was told not to be written, and is there", n)
			}
		}
	}
}

func TestAStaleOwnersTrimIsRefused(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	old := f.open(f.Takeover(), chain.Config{RollEntries: 2})
	for range 10 {
		old.one()
	}
	fresh := f.open(f.Takeover(), chain.Config{})
	want := fresh.readAll()
	freed, err := old.Trim(t.Context(), func(meta.Run) bool { return true })
	if !errors.Is(err, meta.ErrEpoch) || len(freed) != 0 {
		t.Fatalf("freed %v, %v", freed, err)
	}
	<-old.Lost()
	if got := fresh.readAll(); !slices.Equal(got, want) || len(got) != 10 {
		t.Fatalf("%d entries left of %d", len(got), len(want))
	}
}

func TestTrimmedRunsStayReadableElsewhere(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 5})
	for range 50 {
		l.one()
	}
	before := l.Runs()
	freed, err := l.Trim(t.Context(), func(r meta.Run) bool { return r.End <= 40 })
	check(t, err)
	if len(freed) == 0 || freed[len(freed)-1].End > 40 {
		t.Fatalf("freed %v", freed)
	}
	got := l.readAll()
	if want := upTo(50)[freed[len(freed)-1].End/2:]; !slices.Equal(got, want) {
		t.Fatalf("left %v", got)
	}
	if len(l.Runs()) != len(before)-len(freed) {
		t.Fatal("runs left do not match")
	}
	// A new owner goes on at the same offset.
	check(t, l.Close(t.Context()))
	fresh := f.open(f.Takeover(), chain.Config{})
	if fresh.NextOffset() != 100 || fresh.Opening().Recovered {
		t.Fatalf("next offset %d, recovered %v", fresh.NextOffset(), fresh.Opening().Recovered)
	}
}

// The reply to a deletion is lost: the record is read again, and the chain goes on rolling and trimming.
func TestTrimWithALostReply(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 3})
	for range 20 {
		l.one()
	}
	f.meta.hooks(nil, func(op string) error {
		if op == "delete" {
			return meta.ErrUnknownOutcome
		}
		return nil
	})
	if _, err := l.Trim(t.Context(), func(meta.Run) bool { return true }); !errors.Is(err, meta.ErrUnknownOutcome) {
		t.Fatal(err)
	}
	f.meta.hooks(nil, nil)
	for range 10 {
		l.one()
	}
	_, err := l.Trim(t.Context(), func(r meta.Run) bool { return r.End <= 40 })
	check(t, err)
	check(t, l.Close(t.Context()))
	runs := l.Runs()
	if runs[0].First < 30 {
		t.Fatalf("left from offset %d on", runs[0].First)
	}
	if got := l.readAll(); !slices.Equal(got, upTo(30)[runs[0].First/2:]) {
		t.Fatalf("read %v", got)
	}
}

func TestEtcdAwayPutsRollsOffAndPublishingGoesOn(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 5})
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	f.meta.set(meta.ErrUnavailable)
	for range 40 {
		l.append(ledger.AckQuorum)
		l.wg.Wait()
	}
	if runs := l.Runs(); len(runs) != 1 {
		t.Fatalf("%d runs without metadata", len(runs))
	}
	rolled := make(chan struct{}, 1)
	f.meta.hooks(func(op string) error {
		if op == "open" {
			select {
			case rolled <- struct{}{}:
			default:
			}
		}
		return nil
	}, nil)
	f.meta.set(nil)
	<-rolled
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(42)) || len(l.Runs()) < 2 {
		t.Fatalf("read %d entries of %d runs", len(got), len(l.Runs()))
	}
}

// The metadata store goes away in the very transaction of a roll, which was not applied: the old ledger goes on.
func TestRollTransactionNotAppliedLeavesTheLedgerOpen(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 5})
	var tries atomic.Int32
	f.meta.hooks(func(op string) error {
		if op == "open" {
			if n := tries.Add(1); n == 2 || n == 3 {
				return meta.ErrUnavailable
			}
		}
		return nil
	}, nil)
	for range 25 {
		l.one()
	}
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(25)) || len(l.Runs()) < 2 || tries.Load() < 4 {
		t.Fatalf("read %v of %d runs after %d transactions", got, len(l.Runs()), tries.Load())
	}
}

// The reply to a roll's transaction is lost: it is found applied, and nothing is written twice.
func TestRollWithALostReply(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 5})
	lost := 0
	f.meta.hooks(nil, func(string) error {
		if lost++; lost%2 == 0 {
			return meta.ErrUnknownOutcome
		}
		return nil
	})
	for range 60 {
		l.one()
	}
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(60)) || lost < 4 {
		t.Fatalf("read %v after %d transactions", got, lost)
	}
}

// The reply to the transaction that opened a ledger is lost, and before it is found applied a new owner has begun to recover
// the ledger: the old owner gives up.
func TestOpenedWithALostReplyAndTakenOver(t *testing.T) {
	t.Parallel()
	for _, rolls := range []bool{false, true} {
		f := newCluster(t, 3)
		l := f.open(f.Takeover(), chain.Config{})
		if rolls {
			l.one()
		}
		f.meta.hooks(nil, func(string) error {
			fresh := f.Takeover()
			rec, err := f.Store.GetChain(t.Context(), l.ID())
			check(t, err)
			_, err = f.Store.Owned(fresh).StartRecovery(t.Context(), rec.LastLedger)
			check(t, err)
			return meta.ErrUnknownOutcome
		})
		if rolls {
			l.Roll()
		} else {
			l.append(ledger.AckQuorum)
		}
		<-l.Lost()
		l.Shutdown()
	}
}

// The outcome of a roll's transaction is unknown, and it is applied only when it is sent again.
func TestRollAppliedLate(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.meta.late = true
	l := f.open(f.Takeover(), chain.Config{RollEntries: 5})
	for range 60 {
		l.one()
	}
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(60)) || len(l.Runs()) < 5 {
		t.Fatalf("read %v of %d runs", got, len(l.Runs()))
	}
}

// An open ledger on bookies that are all full is retired, so that it can be trimmed; one that can be appended to, or
// followed by another, is not. With room again appends go on.
func TestRetire(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 4)
	l := f.open(f.Takeover(), chain.Config{})
	l.one()
	closed := func() bool { return l.Runs()[0].Closed }
	l.Retire()
	if phase, _ := l.Phase(); phase != chain.PhaseOpen || closed() {
		t.Fatal("a ledger on writable bookies is retired")
	}
	for n := range 4 {
		f.SetWritable(n, false) // below the high watermark
	}
	l.Retire()
	l.one()
	if phase, _ := l.Phase(); phase != chain.PhaseOpen || closed() {
		t.Fatal("a ledger that takes appends is retired")
	}
	for n := range 4 {
		f.SetFull(n, true)
	}
	l.Retire()
	eventually(t, "the ledger to be closed", closed)
	if gone, err := l.Trim(t.Context(), func(meta.Run) bool { return true }); err != nil || len(gone) != 1 {
		t.Fatalf("trimmed %v: %v", gone, err)
	}
	for n := range 4 {
		f.SetFull(n, false)
	}
	l.one()
}

func TestTooFewBookiesIsATypedErrorAndPasses(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.SetWritable(0, false)
	l := f.open(f.Takeover(), chain.Config{})
	l.append(ledger.AckQuorum)
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	var few *chain.NotEnoughBookiesError
	var failed *ledger.AppendError
	if err := l.failed[2]; !errors.As(err, &few) || !errors.As(err, &failed) || failed.Outcome != ledger.NotWritten {
		t.Fatalf("failed with %v", l.failed)
	}
	if few.Known != 3 || few.Writable != 2 {
		t.Fatalf("%+v", few)
	}
	f.SetWritable(0, true)
	next, ok := l.Resume()
	if !ok || next != 0 {
		t.Fatalf("resumed at %d, %v", next, ok)
	}
	l.next = next
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	if got := l.readAll(); !slices.Equal(got, []uint64{3}) {
		t.Fatalf("read %v", got)
	}
	l.accounted()
}

func TestASmallerEnsembleIsOpenedWhenBookiesLack(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{Replication: meta.Replication{Ensemble: 5, WriteQuorum: 3, AckQuorum: 2}})
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	rec, err := f.Store.GetLedger(t.Context(), l.Runs()[0].Ledger)
	check(t, err)
	if rec.Ensemble != 3 || rec.WriteQuorum != 3 || rec.AckQuorum != 2 {
		t.Fatalf("opened with %+v", rec.Replication)
	}
}

// Two of three bookies are gone: appends wait, nothing is acknowledged, and goes on by itself once they are back.
func TestTwoOfThreeBookiesGone(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{})
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	f.Fake.Crash(bookieclient.FakeUUID(0))
	f.Fake.Crash(bookieclient.FakeUUID(1))
	l.append(ledger.AckQuorum)
	l.append(ledger.AckQuorum)
	check(t, f.Fake.Idle(t.Context()))
	if got := l.ackedNumbers(); len(got) != 1 {
		t.Fatalf("acknowledged %v", got)
	}
	f.Fake.Restart(bookieclient.FakeUUID(0))
	f.Fake.Restart(bookieclient.FakeUUID(1))
	l.wg.Wait()
	if got := l.ackedNumbers(); !slices.Equal(got, upTo(3)) {
		t.Fatalf("acknowledged %v, failed %v", got, l.failed)
	}
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(3)) {
		t.Fatalf("read %v", got)
	}
}

// AckNone is told at once; when the roll closes the ledger below, the entry goes to the next one all the same.
func TestEarlyReceiptsSurviveARoll(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{})
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	for range 5 {
		l.append(ledger.AckNone)
	}
	l.wg.Wait()
	l.append(ledger.AckQuorum)
	l.Roll()
	opened := make(chan struct{})
	go func() {
		defer close(opened)
		for len(l.Runs()) < 2 {
			time.Sleep(time.Millisecond)
		}
	}()
	<-opened
	release()
	l.wg.Wait()
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(7)) {
		t.Fatalf("read %v", got)
	}
	runs := l.Runs()
	if runs[0].End != 2 || runs[len(runs)-1].End != 14 {
		t.Fatalf("runs %+v", runs)
	}
}

func TestAMixOfLevelsIsDone(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 7})
	for i := range 200 {
		l.append([]ledger.AckLevel{ledger.AckQuorum, ledger.AckNone, ledger.AckOne, ledger.AckAll}[i%4])
		if i%10 == 9 {
			l.wg.Wait()
		}
	}
	l.wg.Wait()
	check(t, l.Close(t.Context()))
	if got := l.readAll(); !slices.Equal(got, upTo(200)) {
		t.Fatalf("read %v, failed %v", got, l.failed)
	}
}

func TestAnIdleChainHasNoGoroutine(t *testing.T) {
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{})
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for l.Running() > 0 {
		select {
		case <-ctx.Done():
			t.Fatalf("%d goroutines remain", l.Running())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func TestShutdownTellsEverybody(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{})
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	for range 10 {
		l.append(ledger.AckQuorum)
	}
	l.Shutdown()
	l.wg.Wait()
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	l.accounted()
	if len(l.failed) != 11 {
		t.Fatalf("%d failed", len(l.failed))
	}
	var failed *ledger.AppendError
	if !errors.As(l.failed[12], &failed) || failed.Outcome != ledger.NotWritten || !errors.Is(failed, chain.ErrClosed) {
		t.Fatalf("after shutdown: %v", l.failed[12])
	}
}

func TestIDsAreDistinctAndAbove(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 0)
	ids := chain.NewIDs(f.Store, 4)
	seen := map[entry.LedgerID]bool{}
	var last entry.LedgerID
	for range 10 {
		id, err := ids.Next(t.Context(), sched.Real, last)
		check(t, err)
		if seen[id] || id <= last {
			t.Fatalf("id %d after %d", id, last)
		}
		seen[id], last = true, id
	}
	// A block that lies below is of no use.
	other := chain.NewIDs(f.Store, 4)
	high, err := other.Next(t.Context(), sched.Real, 0)
	check(t, err)
	id, err := ids.Next(t.Context(), sched.Real, high+1)
	check(t, err)
	if id <= high+1 {
		t.Fatalf("id %d is not above %d", id, high+1)
	}
}

// The reply to a deletion is lost and nothing else happens: the next trim finds it done, and goes on.
func TestTrimAgainAfterALostReply(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), chain.Config{RollEntries: 3})
	for range 20 {
		l.one()
	}
	f.meta.hooks(nil, func(op string) error {
		if op == "delete" {
			return meta.ErrUnknownOutcome
		}
		return nil
	})
	if _, err := l.Trim(t.Context(), func(meta.Run) bool { return true }); !errors.Is(err, meta.ErrUnknownOutcome) {
		t.Fatal(err)
	}
	f.meta.hooks(nil, nil)
	// A reader is not held up by what is gone.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, _, err := l.Read(ctx, entry.Position{}, 1); !errors.Is(err, chain.ErrTrimmed) {
		t.Fatalf("read what was deleted: %v", err)
	}
	if got := l.readAll(); len(got) == 0 || got[0] != 4 {
		t.Fatalf("read %v", got)
	}
	freed, err := l.Trim(t.Context(), func(r meta.Run) bool { return r.End <= 20 })
	check(t, err)
	if len(freed) == 0 || l.Runs()[0].First < 12 {
		t.Fatalf("freed %v, left from offset %d on", freed, l.Runs()[0].First)
	}
}

// A takeover has the next ledger open at once if there was anything in the last one, whoever asked: somebody was appending.
func TestATakeoverOfALedgerInUseOpensTheNext(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	ledgers := func(c *log) (open, closed int) {
		for _, r := range c.Runs() {
			if r.Closed {
				closed++
			} else {
				open++
			}
		}
		return open, closed
	}
	old := f.open(f.Takeover(), chain.Config{OpenNow: true}) // and appends nothing
	if open, closed := ledgers(old); open != 1 || closed != 0 {
		t.Fatalf("%d ledgers are open, %d closed", open, closed)
	}
	next := f.open(f.Takeover(), chain.Config{})
	if open, _ := ledgers(next); open != 0 {
		t.Fatalf("%d ledgers are open after one that was empty", open)
	}
	next.one()
	last := f.open(f.Takeover(), chain.Config{})
	if open, closed := ledgers(last); open != 1 || closed == 0 {
		t.Fatalf("%d ledgers are open, %d closed", open, closed)
	}
	last.one()
}

// An owner that is none any more reads what the next one deleted: it learns that it is lost, and does not look again
// and again.
func TestAStaleOwnersReadOfWhatIsDeleted(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	old := f.open(f.Takeover(), chain.Config{RollEntries: 3})
	for range 10 {
		old.one()
	}
	fresh := f.open(f.Takeover(), chain.Config{OpenNow: true})
	_, err := fresh.Trim(t.Context(), func(meta.Run) bool { return true })
	check(t, err)
	for range 3 {
		if _, _, err = old.Read(t.Context(), entry.Position{}, 1); !errors.Is(err, chain.ErrTrimmed) {
			break
		}
	}
	if !errors.Is(err, chain.ErrLost) || !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("read as an old owner: %v", err)
	}
	<-old.Lost()
}
