package topic_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/topic"
)

func TestDuplicates(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), topic.NewCache(1<<20), topic.Config{Snapshots: newMemStore()})
	p := producer(t, tp, "p", true)
	if p.LastSequence() != -1 || p.Epoch() == 0 {
		t.Fatalf("a new producer has last sequence %d, epoch %d", p.LastSequence(), p.Epoch())
	}
	check(t, send(t, p, batch(t, "p", 0, 3)).wait(t).err)

	// A duplicate of what is stored.
	if s := send(t, p, batch(t, "p", 0, 3)).wait(t); s.err != nil || !s.Duplicate {
		t.Fatalf("%+v", s)
	}
	// A duplicate of what is under way is done with the first.
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	first, again := send(t, p, batch(t, "p", 3, 2)), send(t, p, batch(t, "p", 3, 2))
	select {
	case <-again.done:
		t.Fatal("a duplicate of what is not stored was acknowledged")
	default:
	}
	release()
	if first.wait(t).err != nil || again.wait(t).err != nil || first.Duplicate || !again.Duplicate || again.Offset != first.Offset {
		t.Fatalf("%+v and %+v", first, again)
	}
	// Batches must be cut as they were.
	if _, err := trySend(t, p, batch(t, "p", 4, 2)); !errors.Is(err, topic.ErrSequenceOverlap) {
		t.Fatal(err)
	}
	// What was new in one that was not must not be taken for a duplicate when it comes again.
	if _, err := trySend(t, p, batch(t, "p", 10, 1)); !errors.Is(err, topic.ErrSequenceGap) {
		t.Fatal(err)
	}
	check(t, send(t, p, batch(t, "p", 5, 1)).wait(t).err)
	// Sequences may have gaps.
	check(t, send(t, p, batch(t, "p", 10, 1)).wait(t).err)
	// Another producer's sequences are its own; one without deduplication may repeat itself.
	q := producer(t, tp, "q", false)
	check(t, send(t, q, batch(t, "q", 0, 1)).wait(t).err)
	check(t, send(t, q, batch(t, "q", 0, 1)).wait(t).err)
	want := append(sequence("p", 0, 5), "p/10", "q/0", "q/0")
	if got := values(t, tp, 0); !slices.Equal(got, want) {
		t.Fatalf("stored %v", got)
	}
}

func TestANewerIncarnationFencesOlderOnes(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	old := producer(t, tp, "p", true)
	check(t, send(t, old, batch(t, "p", 0, 1)).wait(t).err)
	fresh, err := tp.OpenProducer(t.Context(), "p", 0, true)
	check(t, err)
	if fresh.Epoch() <= old.Epoch() || fresh.LastSequence() != 0 {
		t.Fatalf("epoch %d after %d, last sequence %d", fresh.Epoch(), old.Epoch(), fresh.LastSequence())
	}
	if _, err := trySend(t, old, batch(t, "p", 1, 1)); !errors.Is(err, topic.ErrProducerFenced) {
		t.Fatalf("the old incarnation: %v", err)
	}
	check(t, send(t, fresh, batch(t, "p", 1, 1)).wait(t).err)
	if _, err := tp.OpenProducer(t.Context(), "p", old.Epoch(), true); !errors.Is(err, topic.ErrProducerFenced) {
		t.Fatalf("the old incarnation comes back: %v", err)
	}
	// The next owner knows the epoch from the log.
	tp.Shutdown()
	tp = f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	if _, err := tp.OpenProducer(t.Context(), "p", old.Epoch(), true); !errors.Is(err, topic.ErrProducerFenced) {
		t.Fatalf("the old incarnation comes back elsewhere: %v", err)
	}
	fresh, err = tp.OpenProducer(t.Context(), "p", fresh.Epoch(), true)
	check(t, err)
	if fresh.LastSequence() != 1 {
		t.Fatalf("last sequence %d", fresh.LastSequence())
	}
}

// A new owner need not know of the incarnations before, of which nothing may be stored. The one that it lets in anew is above
// them all the same.
func TestAnOldIncarnationDoesNotFenceANewOneAtTheNextOwner(t *testing.T) {
	t.Parallel()
	for _, dedup := range []bool{true, false} {
		f := newCluster(t, 3)
		tp := f.open(f.Takeover(), nil, topic.Config{})
		producer(t, tp, "p", dedup)
		old := producer(t, tp, "p", dedup)
		tp.Shutdown()
		tp = f.open(f.Takeover(), nil, topic.Config{})
		fresh := producer(t, tp, "p", dedup)
		if p, err := tp.OpenProducer(t.Context(), "p", old.Epoch(), dedup); !errors.Is(err, topic.ErrProducerFenced) {
			t.Fatalf("the old incarnation comes back as %d, the new one is %d: %v", p.Epoch(), fresh.Epoch(), err)
		}
		check(t, send(t, fresh, batch(t, "p", 0, 1)).wait(t).err)
	}
}

// What an incarnation has under way when a new one comes is stored, or not, before that is told where to go on: else it
// would give a message of its own a sequence that the old one's gets, and be told that it is stored.
func TestANewIncarnationWaitsForWhatTheOldOneHasUnderWay(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), nil, topic.Config{})
	old := producer(t, tp, "p", true)
	check(t, send(t, old, batch(t, "p", 0, 1)).wait(t).err)
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	underWay := send(t, old, batch(t, "p", 1, 2))
	_, err := f.Fake.AwaitHeld(t.Context(), 3)
	check(t, err)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if p, err := tp.OpenProducer(short, "p", 0, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a new incarnation is let in: %v, last sequence %d", err, p.LastSequence())
	}
	type opened struct {
		p   *topic.Producer
		err error
	}
	let := make(chan opened, 1)
	go func() {
		p, err := tp.OpenProducer(t.Context(), "p", 0, true)
		let <- opened{p, err}
	}()
	eventually(t, "the old incarnation to be fenced", func() bool {
		_, err := trySend(t, old, batch(t, "p", 1, 2))
		return errors.Is(err, topic.ErrProducerFenced)
	})
	release()
	check(t, underWay.wait(t).err)
	fresh := <-let
	check(t, fresh.err)
	if last := fresh.p.LastSequence(); last != 2 {
		t.Fatalf("it is to go on after %d", last)
	}
	s := send(t, fresh.p, batch(t, "p", 3, 1)).wait(t)
	if check(t, s.err); s.Duplicate {
		t.Fatal("its message is taken for the old one's")
	}
}

// A producer whose broker's answer got lost comes back with the epoch it knows, which is not the newest. It must not be
// fenced by itself.
func TestAProducerThatMissedAnAnswerComesBack(t *testing.T) {
	t.Parallel()
	for _, dedup := range []bool{true, false} {
		f := newCluster(t, 3)
		store := newMemStore()
		tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
		first := producer(t, tp, "p", dedup)
		check(t, send(t, first, batch(t, "p", 0, 1)).wait(t).err)
		missed, err := tp.OpenProducer(t.Context(), "p", first.Epoch(), dedup)
		check(t, err)
		if _, err := trySend(t, first, batch(t, "p", 1, 1)); !errors.Is(err, topic.ErrProducerReplaced) {
			t.Fatalf("the first stream: %v", err)
		}
		again, err := tp.OpenProducer(t.Context(), "p", first.Epoch(), dedup)
		check(t, err)
		if again.Epoch() <= missed.Epoch() {
			t.Fatalf("epoch %d after %d", again.Epoch(), missed.Epoch())
		}
		check(t, send(t, again, batch(t, "p", 1, 1)).wait(t).err)
		if dedup {
			check(t, tp.Snapshot(t.Context()))
		}
		tp.Shutdown()
		tp = f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
		elsewhere, err := tp.OpenProducer(t.Context(), "p", first.Epoch(), dedup)
		check(t, err)
		check(t, send(t, elsewhere, batch(t, "p", 2, 1)).wait(t).err)
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := tp.OpenProducer(gone, "p", elsewhere.Epoch(), dedup); !errors.Is(err, context.Canceled) {
			t.Fatalf("a producer that has gone: %v", err)
		}
		check(t, send(t, elsewhere, batch(t, "p", 3, 1)).wait(t).err)
	}
}

// Retry across a takeover: the client never saw receipts of the last batches, and sends them again to the new owner.
// Each is stored once, whether the old owner had stored it or not.
func TestRetryAcrossATakeoverIsStoredOnce(t *testing.T) {
	t.Parallel()
	for _, snapshot := range []bool{false, true} {
		f := newCluster(t, 3)
		store := newMemStore()
		tp := f.open(f.Takeover(), topic.NewCache(1<<20), topic.Config{Snapshots: store, RollEntries: 6})
		p := producer(t, tp, "p", true)
		for i := range 20 {
			check(t, send(t, p, batch(t, "p", uint64(2*i), 2)).wait(t).err)
			if snapshot && i == 10 {
				check(t, tp.Snapshot(t.Context()))
			}
		}
		runs := tp.Chain().Runs()
		check(t, tp.Chain().RollAndWait(t.Context(), runs[len(runs)-1].Ledger)) // no roll is under way then
		// Of the next two one reaches the bookies, the other does not; neither is answered.
		hold := func(at bookieclient.Stage) {
			f.Fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
				if c.From == "owner-1" && c.Op == bookieclient.OpAdd && c.Stage == at {
					return bookieclient.Hold
				}
				return bookieclient.Deliver
			})
		}
		hold(bookieclient.AtReply)
		unsure := send(t, p, batch(t, "p", 40, 2))
		_, err := f.Fake.AwaitHeld(t.Context(), 3)
		check(t, err)
		hold(bookieclient.AtRequest)
		lost := send(t, p, batch(t, "p", 42, 2))
		_, err = f.Fake.AwaitHeld(t.Context(), 6)
		check(t, err)

		fresh := f.openFresh(store)
		q, err := fresh.OpenProducer(t.Context(), "p", p.Epoch(), true)
		check(t, err)
		if q.LastSequence() != 41 {
			t.Fatalf("the new owner knows sequences up to %d", q.LastSequence())
		}
		a := send(t, q, batch(t, "p", 40, 2))
		b := send(t, q, batch(t, "p", 42, 2))
		if a.wait(t).err != nil || !a.Duplicate || b.wait(t).err != nil || b.Duplicate {
			t.Fatalf("%+v, %+v", a, b)
		}
		if got := values(t, fresh, 0); !slices.Equal(got, sequence("p", 0, 43)) {
			t.Fatalf("stored %v", got)
		}
		tp.Shutdown()
		var failed *ledger.AppendError
		for _, s := range []*sent{unsure, lost} {
			if !errors.As(s.wait(t).err, &failed) || failed.Outcome != ledger.Unknown {
				t.Fatalf("the old owner told %v", s.err)
			}
		}
	}
}

// B25 of the field: a persist fails, its retry must be stored and not be taken for a duplicate.
func TestTheRetryOfAFailedPersistIsStored(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.SetWritable(0, false)
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: newMemStore()})
	p := producer(t, tp, "p", true)
	for range 3 {
		if s, err := trySend(t, p, batch(t, "p", 5, 1)); err == nil && s.wait(t).err == nil {
			t.Fatal("stored without bookies")
		}
		eventually(t, "the topic to take up again", func() bool { return tp.Err() == nil })
	}
	f.SetWritable(0, true)
	if s := send(t, p, batch(t, "p", 5, 1)).wait(t); s.err != nil || s.Duplicate || s.Offset != 0 {
		t.Fatalf("%+v", s)
	}
	if got := values(t, tp, 0); !slices.Equal(got, []string{"p/5"}) {
		t.Fatalf("stored %v", got)
	}
}

// Trimming forgets nothing: before entries go, a snapshot covers them.
func TestTrimKeepsWhatDeduplicationNeeds(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: store, RollEntries: 3})
	for i := range 9 {
		p := producer(t, tp, fmt.Sprint("p", i), true)
		for s := range 3 {
			check(t, send(t, p, batch(t, fmt.Sprint("p", i), uint64(s), 1)).wait(t).err)
		}
		p.Close()
		eventually(t, "a roll", func() bool { return len(tp.Chain().Runs()) > i })
	}
	// The store fails: then nothing is trimmed, whatever was saved of it.
	store.fail, store.cut = errors.New("away"), 3
	if _, freed, err := tp.Trim(t.Context(), topic.TrimPolicy{Floor: tp.Next()}); err == nil || freed > 0 {
		t.Fatalf("freed %d, %v without a snapshot", freed, err)
	}
	store.fail = nil
	_, freed, err := tp.Trim(t.Context(), topic.TrimPolicy{Floor: tp.Next()})
	check(t, err)
	if freed == 0 || tp.Earliest() < 20 {
		t.Fatalf("freed %d, earliest %d", freed, tp.Earliest())
	}
	saves := store.saves
	_, _, err = tp.Trim(t.Context(), topic.TrimPolicy{Floor: tp.Next()})
	check(t, err)
	if store.saves != saves {
		t.Fatal("a snapshot for nothing")
	}
	tp.Shutdown()
	tp = f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	for i := range 9 {
		p := producer(t, tp, fmt.Sprint("p", i), true)
		if p.LastSequence() != 2 {
			t.Fatalf("producer %d: last sequence %d", i, p.LastSequence())
		}
		if s := send(t, p, batch(t, fmt.Sprint("p", i), 2, 1)).wait(t); !s.Duplicate {
			t.Fatalf("producer %d: %+v", i, s)
		}
	}
}

func TestIdleProducersAreForgotten(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	clock := newClock(1 << 40)
	cfg := topic.Config{Snapshots: store, Dedup: topic.DedupConfig{IdleAfter: time.Hour, MaxProducers: 3}}
	tp, err := topic.Open(t.Context(), topic.Env{Chain: f.Env(), Sched: clock}, f.Takeover(), logID, cfg)
	check(t, err)
	t.Cleanup(tp.Shutdown)
	for i := range 6 {
		p := producer(t, tp, fmt.Sprint("p", i), true)
		check(t, send(t, p, batch(t, fmt.Sprint("p", i), 7, 1)).wait(t).err)
		if i > 0 {
			p.Close()
		}
		clock.Add(time.Second)
		if i == 2 {
			check(t, tp.Snapshot(t.Context()))
			if len(store.records) != 4 {
				t.Fatalf("%d records for 3 producers", len(store.records))
			}
		}
	}
	check(t, tp.Snapshot(t.Context()))
	// p0 is open; of the others the newest two stay.
	if len(store.records) != 4 {
		t.Fatalf("%d records: %v", len(store.records), store.records)
	}
	clock.Add(2 * time.Hour)
	check(t, tp.Snapshot(t.Context()))
	if len(store.records) != 2 {
		t.Fatalf("%d records after all but one were idle", len(store.records))
	}
	if p := producer(t, tp, "p5", true); p.LastSequence() != -1 {
		t.Fatalf("a forgotten producer has last sequence %d", p.LastSequence())
	}
}

// A producer that comes back before it could be forgotten is not forgotten afterwards: an older incarnation stays out.
func TestAProducerComesBackWhileItIsForgotten(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	clock := newClock(1 << 40)
	cfg := topic.Config{Snapshots: store, Dedup: topic.DedupConfig{IdleAfter: time.Hour}}
	open := func() *topic.Topic {
		tp, err := topic.Open(t.Context(), topic.Env{Chain: f.Env(), Sched: clock}, f.Takeover(), logID, cfg)
		check(t, err)
		t.Cleanup(tp.Shutdown)
		return tp
	}
	tp := open()
	old := producer(t, tp, "p", true)
	check(t, send(t, old, batch(t, "p", 7, 1)).wait(t).err)
	check(t, tp.Snapshot(t.Context()))
	tp.Shutdown()
	tp = open()
	producer(t, tp, "other", true)
	clock.Add(2 * time.Hour)
	away := errors.New("away")
	store.set(away, 0)
	if err := tp.Snapshot(t.Context()); !errors.Is(err, away) {
		t.Fatal(err)
	}
	store.set(nil, 0)
	fresh := producer(t, tp, "p", true)
	if fresh.LastSequence() != -1 {
		t.Fatalf("last sequence %d of a producer that was forgotten", fresh.LastSequence())
	}
	check(t, tp.Snapshot(t.Context()))
	tp.Shutdown()
	tp = open()
	if _, err := tp.OpenProducer(t.Context(), "p", old.Epoch(), true); !errors.Is(err, topic.ErrProducerFenced) {
		t.Fatalf("the older incarnation at the next owner: %v", err)
	}
	again, err := tp.OpenProducer(t.Context(), "p", fresh.Epoch(), true)
	check(t, err)
	check(t, send(t, again, batch(t, "p", 0, 1)).wait(t).err)
}

// An owner whose clock is ahead does not take producers for idle.
func TestAClockAheadForgetsNoProducer(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	cfg := topic.Config{Snapshots: store, Dedup: topic.DedupConfig{IdleAfter: time.Hour}}
	for _, now := range []int64{1 << 40, 1<<40 + 86_400_000} {
		tp, err := topic.Open(t.Context(), topic.Env{Chain: f.Env(), Sched: newClock(now)}, f.Takeover(), logID, cfg)
		check(t, err)
		t.Cleanup(tp.Shutdown)
		q := producer(t, tp, "q", true)
		check(t, send(t, q, batch(t, "q", uint64(now), 1)).wait(t).err) // so that a snapshot is of something
		check(t, tp.Snapshot(t.Context()))
		p := producer(t, tp, "p", true)
		if s := send(t, p, batch(t, "p", 7, 1)).wait(t); s.err != nil || s.Duplicate != (now > 1<<40) {
			t.Fatalf("at %d: %+v", now, s)
		}
		p.Close()
		check(t, tp.Snapshot(t.Context()))
	}
}

func TestSnapshotsAreDueAndSpareTheNextOwner(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	cfg := topic.Config{Snapshots: store, Dedup: topic.DedupConfig{SnapshotEntries: 10}}
	tp := f.open(f.Takeover(), nil, cfg)
	p := producer(t, tp, "p", true)
	for i := range 10 {
		if tp.SnapshotDue() {
			t.Fatalf("due after %d messages", i)
		}
		check(t, send(t, p, batch(t, "p", uint64(i), 1)).wait(t).err)
	}
	if !tp.SnapshotDue() {
		t.Fatal("not due")
	}
	check(t, tp.Snapshot(t.Context()))
	if tp.SnapshotDue() {
		t.Fatal("due again")
	}
	check(t, send(t, p, batch(t, "p", 10, 1)).wait(t).err)
	check(t, tp.Close(t.Context()))
	if store.saves != 3 {
		t.Fatalf("%d saves, one of the incarnation, one at the end", store.saves)
	}
	before := len(f.Fake.Calls())
	tp = f.open(f.Takeover(), nil, cfg)
	if q := producer(t, tp, "p", true); q.LastSequence() != 10 {
		t.Fatalf("last sequence %d", q.LastSequence())
	}
	for _, c := range f.Fake.Calls()[before:] {
		if c.Op == bookieclient.OpRead {
			t.Fatal("entries were read although the snapshot covers all")
		}
	}
}

func TestADamagedSnapshotIsRefusedForDeduplicationAlone(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	p := producer(t, tp, "p", false)
	check(t, send(t, p, batch(t, "p", 0, 1)).wait(t).err)
	tp.Shutdown()
	store.records["\x01p"] = []byte{99, 1, 2}
	tp = f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	var damaged *topic.SnapshotError
	if _, err := tp.OpenProducer(t.Context(), "p", 0, true); !errors.As(err, &damaged) {
		t.Fatal(err)
	}
	p = producer(t, tp, "p", false)
	check(t, send(t, p, batch(t, "p", 1, 1)).wait(t).err)
}

// A producer comes back while its batch is under way, sends it again, and that batch then fails. What it sends next must
// not be stored before the one that failed: its retry would be taken for a duplicate of what is behind it.
func TestADuplicateThatFailsHoldsItsSuccessorsBack(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.SetWritable(0, false)
	f.Hold = make(chan struct{})
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: newMemStore()})
	p := producer(t, tp, "p", true)
	first := send(t, p, batch(t, "p", 5, 1)) // waits for a ledger
	q, err := tp.OpenProducer(t.Context(), "p", p.Epoch(), true)
	check(t, err)
	again := send(t, q, batch(t, "p", 5, 1))
	close(f.Hold)
	for _, s := range []*sent{first, again} {
		if s.wait(t).err == nil {
			t.Fatal("stored without bookies")
		}
	}
	eventually(t, "the topic to take up again", func() bool { return tp.Err() == nil })
	f.SetWritable(0, true)
	if _, err := trySend(t, q, batch(t, "p", 6, 1)); !errors.Is(err, topic.ErrSequenceGap) {
		t.Fatalf("the batch after the one that failed: %v", err)
	}
	for seq := range uint64(2) {
		if s := send(t, q, batch(t, "p", 5+seq, 1)).wait(t); s.err != nil || s.Duplicate {
			t.Fatalf("%+v", s)
		}
	}
	if got := values(t, tp, 0); !slices.Equal(got, []string{"p/5", "p/6"}) {
		t.Fatalf("stored %v", got)
	}
}

// What a producer sends again from before a gap does not end the gap.
func TestAGapEndsWithTheBatchThatIsMissing(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: newMemStore()})
	p := producer(t, tp, "p", true)
	for seq := range uint64(3) {
		check(t, send(t, p, batch(t, "p", seq, 1)).wait(t).err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	b := batch(t, "p", 3, 1)
	b.Done = func(topic.Receipt, error) { t.Error("done was called") }
	check(t, f.budget.Acquire(t.Context(), 1<<20)) // nothing is left of it
	if err := p.Append(gone, b); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	f.budget.Release(1 << 20)
	if s := send(t, p, batch(t, "p", 1, 1)).wait(t); !s.Duplicate {
		t.Fatalf("%+v", s)
	}
	if _, err := trySend(t, p, batch(t, "p", 2, 2)); !errors.Is(err, topic.ErrSequenceOverlap) {
		t.Fatalf("cut otherwise: %v", err)
	}
	if _, err := trySend(t, p, batch(t, "p", 4, 1)); !errors.Is(err, topic.ErrSequenceGap) {
		t.Fatalf("over the gap: %v", err)
	}
	check(t, send(t, p, batch(t, "p", 3, 1)).wait(t).err)
	check(t, send(t, p, batch(t, "p", 4, 1)).wait(t).err)
	if got := values(t, tp, 0); !slices.Equal(got, sequence("p", 0, 4)) {
		t.Fatalf("stored %v", got)
	}
}

// A snapshot that fails while a later one is being saved takes its producers out of what that one says is complete.
func TestSnapshotsFollowOneAnother(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	p := producer(t, tp, "p", true)
	check(t, send(t, p, batch(t, "p", 0, 1)).wait(t).err)
	away := errors.New("away")
	entered, leave := make(chan struct{}), make(chan error)
	store.hook = func(n int) error {
		if n == 2 { // the first one notes the incarnation
			close(entered)
			return <-leave
		}
		return nil
	}
	results := make(chan error, 2)
	go func() { results <- tp.Snapshot(t.Context()) }()
	<-entered
	go func() { results <- tp.Snapshot(t.Context()) }()
	select {
	case err := <-results:
		t.Errorf("a snapshot overtook another: %v", err)
		leave <- away
		<-results //nolint:errcheck // it failed as told
	case <-time.After(20 * time.Millisecond):
		leave <- away
		if a, b := <-results, <-results; !errors.Is(a, away) || b != nil {
			t.Fatal(a, b)
		}
	}
	tp.Shutdown()
	tp = f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
	if q := producer(t, tp, "p", true); q.LastSequence() != 0 {
		t.Fatalf("last sequence %d", q.LastSequence())
	}
}

// Producers that come and go without sending anything leave nothing behind for longer than others do.
func TestProducersThatSendNothingAreForgotten(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	clock := newClock(1 << 40)
	cfg := topic.Config{Snapshots: store, Dedup: topic.DedupConfig{IdleAfter: time.Hour, MaxProducers: 20}}
	tp, err := topic.Open(t.Context(), topic.Env{Chain: f.Env(), Sched: clock}, f.Takeover(), logID, cfg)
	check(t, err)
	t.Cleanup(tp.Shutdown)
	p := producer(t, tp, "p", true)
	check(t, send(t, p, batch(t, "p", 0, 1)).wait(t).err)
	for i := range 100 {
		producer(t, tp, fmt.Sprint("q", i), true).Close()
	}
	replaced := producer(t, tp, "r", true)
	producer(t, tp, "r", true).Close()
	replaced.Close()
	check(t, tp.Snapshot(t.Context()))
	if n, records := tp.Known(), len(store.records); n != 20 || records != 21 {
		t.Fatalf("%d producers are known, and the store has %d records", n, records)
	}
	clock.Add(2 * time.Hour)
	check(t, tp.Snapshot(t.Context()))
	if n, records := tp.Known(), len(store.records); n != 1 || records != 2 {
		t.Fatalf("%d producers are known, and the store has %d records", n, records)
	}
}

// An incarnation that was let in is above older ones for every later owner, whatever was stored and whoever comes first:
// an older one would take the sequences at which the new one was told to go on, and that would be told that its own messages
// are stored.
func TestAnOldIncarnationStaysOutAtTheNextOwner(t *testing.T) {
	t.Parallel()
	for _, stored := range []int{0, 3} {
		f := newCluster(t, 3)
		store := newMemStore()
		tp := f.openFresh(store)
		old := producer(t, tp, "p", true)
		for i := range stored {
			check(t, send(t, old, batch(t, "p", uint64(i), 1)).wait(t).err)
		}
		fresh := producer(t, tp, "p", true)
		if last := fresh.LastSequence(); last != int64(stored-1) {
			t.Fatalf("it is to go on after %d", last)
		}
		for range 2 { // and at that one's next
			tp.Shutdown()
			tp = f.openFresh(store)
			if p, err := tp.OpenProducer(t.Context(), "p", old.Epoch(), true); !errors.Is(err, topic.ErrProducerFenced) {
				t.Fatalf("the old incarnation is let in as %x, the new one is %x: %v", p.Epoch(), fresh.Epoch(), err)
			}
		}
		back, err := tp.OpenProducer(t.Context(), "p", fresh.Epoch(), true)
		check(t, err)
		s := send(t, back, batch(t, "p", uint64(stored), 1)).wait(t)
		if check(t, s.err); s.Duplicate {
			t.Fatal("its message is taken for another's")
		}
	}
}

// A new incarnation whose request got no answer asks again. The first request may be let in after the second one, and does not
// fence it, or a newer incarnation.
func TestANewIncarnationThatAsksTwiceIsOne(t *testing.T) {
	t.Parallel()
	for _, dedup := range []bool{true, false} {
		f := newCluster(t, 3)
		tp := f.openFresh(newMemStore())
		open := func(asked uint64) (*topic.Producer, error) { return tp.OpenProducer(t.Context(), "p", asked, dedup) }
		a, b := topic.NewIncarnation(1), topic.NewIncarnation(2)
		first, err := open(a)
		check(t, err)
		check(t, send(t, first, batch(t, "p", 0, 1)).wait(t).err)
		late, err := open(a)
		check(t, err)
		if _, err := trySend(t, first, batch(t, "p", 1, 1)); !errors.Is(err, topic.ErrProducerReplaced) {
			t.Fatalf("after its own request came again: %v", err)
		}
		late.Close()
		back, err := open(first.Epoch())
		check(t, err)
		check(t, send(t, back, batch(t, "p", 1, 1)).wait(t).err)
		again, err := open(a) // and again, when it has an epoch
		check(t, err)
		again.Close()
		other, err := open(b)
		check(t, err)
		if _, err := open(back.Epoch()); !errors.Is(err, topic.ErrProducerFenced) {
			t.Fatalf("the older one comes back: %v", err)
		}
		if dedup {
			if _, err := open(a); !errors.Is(err, topic.ErrProducerFenced) {
				t.Fatalf("a request of the older one comes late: %v", err)
			}
		}
		check(t, send(t, other, batch(t, "p", 2, 1)).wait(t).err)
	}
}

// An incarnation that cannot be noted is not let in; one that comes back needs no note.
func TestAnIncarnationIsNotedBeforeItIsLetIn(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.openFresh(store)
	p := producer(t, tp, "p", true)
	away := errors.New("away")
	for _, kept := range []int{0, 1} {
		store.set(away, kept)
		if _, err := tp.OpenProducer(t.Context(), "p", 0, true); !errors.Is(err, away) || !errors.Is(err, topic.ErrUnavailable) {
			t.Fatalf("a new incarnation, noted nowhere: %v", err)
		}
	}
	store.set(nil, 0)
	fresh := producer(t, tp, "p", true)
	if _, err := tp.OpenProducer(t.Context(), "p", p.Epoch(), true); !errors.Is(err, topic.ErrProducerFenced) {
		t.Fatalf("the old incarnation: %v", err)
	}
	saves := store.saves
	again, err := tp.OpenProducer(t.Context(), "p", fresh.Epoch(), true)
	check(t, err)
	tp.Shutdown()
	tp = f.openFresh(store)
	_, err = tp.OpenProducer(t.Context(), "p", again.Epoch(), true)
	check(t, err)
	if store.saves != saves {
		t.Fatal("an incarnation that comes back is noted again")
	}
}

// Incarnations that come while others are being noted are noted together.
func TestIncarnationsAreNotedTogether(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.openFresh(store)
	entered, leave := make(chan struct{}), make(chan struct{})
	store.hook = func(n int) error {
		if n == 1 {
			close(entered)
			<-leave
		}
		return nil
	}
	results := make(chan error)
	open := func(name string) {
		_, err := tp.OpenProducer(t.Context(), name, 0, true)
		results <- err
	}
	go open("first")
	<-entered
	const others = 20
	for i := range others {
		go open(fmt.Sprint("p", i))
	}
	eventually(t, "all to be on their way", func() bool { return tp.Known() == 1+others })
	close(leave)
	for range 1 + others {
		check(t, <-results)
	}
	if store.saves != 2 || len(store.records) != 1+others {
		t.Fatalf("%d saves, %d records", store.saves, len(store.records))
	}
}

// Once a topic refuses producers, nothing is written of any: what the store has of it may be deleted.
func TestATopicThatRefusesProducersNotesNone(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.openFresh(store)
	entered, leave := make(chan struct{}), make(chan struct{})
	store.hook = func(n int) error {
		if n == 1 {
			close(entered)
			<-leave
		}
		return nil
	}
	results := make(chan error, 2)
	open := func(name string) {
		_, err := tp.OpenProducer(t.Context(), name, 0, true)
		results <- err
	}
	go open("a")
	<-entered
	go open("b")
	eventually(t, "both to be on their way", func() bool { return tp.Known() == 2 })
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := tp.Refuse(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("while something is being written: %v", err)
	}
	close(leave)
	check(t, tp.Refuse(t.Context()))
	saves := store.saves
	for range 2 {
		if err := <-results; !errors.Is(err, topic.ErrClosed) {
			t.Fatalf("a producer of a topic that refuses them: %v", err)
		}
	}
	if _, err := tp.OpenProducer(t.Context(), "c", 0, true); !errors.Is(err, topic.ErrClosed) {
		t.Fatalf("a producer that comes later: %v", err)
	}
	if store.saves != saves {
		t.Fatal("a producer was noted")
	}
}

// A duplicate at AckAll counts once every copy is there, like the first; where nobody knows that, nobody says so.
func TestADuplicateAtAckAllWaitsForEveryCopy(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	store := newMemStore()
	tp := f.openFresh(store)
	all := func(seq uint64, level ledger.AckLevel) topic.Batch {
		b := batch(t, "p", seq, 1)
		b.Level = level
		return b
	}
	unknown := func(s *sent) {
		t.Helper()
		var failed *ledger.AppendError
		if !errors.As(s.wait(t).err, &failed) || failed.Outcome != ledger.Unknown || !errors.Is(s.err, topic.ErrCopiesUnknown) {
			t.Fatalf("%+v", s)
		}
	}
	p := producer(t, tp, "p", true)
	check(t, send(t, p, all(0, ledger.AckQuorum)).wait(t).err)
	unknown(send(t, p, all(0, ledger.AckAll))) // it was not waited for
	check(t, send(t, p, all(1, ledger.AckAll)).wait(t).err)
	if s := send(t, p, all(1, ledger.AckAll)).wait(t); s.err != nil || !s.Duplicate {
		t.Fatalf("%+v", s)
	}

	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd, bookieclient.FakeUUID(2))
	first := send(t, p, all(2, ledger.AckAll))
	eventually(t, "the batch to be confirmed", func() bool { return tp.Next() == 3 })
	q, err := tp.OpenProducer(t.Context(), "p", p.Epoch(), true) // it comes back by another stream
	check(t, err)
	again := send(t, q, all(2, ledger.AckAll))
	for _, s := range []*sent{first, again} {
		select {
		case <-s.done:
			t.Fatalf("acknowledged with two copies: %+v", s)
		default:
		}
	}
	release()
	if first.wait(t).err != nil || again.wait(t).err != nil || !again.Duplicate {
		t.Fatalf("%+v and %+v", first, again)
	}

	// The next owner does not know how many copies there are.
	tp.Shutdown()
	tp = f.openFresh(store)
	r := producer(t, tp, "p", true)
	unknown(send(t, r, all(2, ledger.AckAll)))
	if s := send(t, r, all(2, ledger.AckQuorum)).wait(t); s.err != nil || !s.Duplicate {
		t.Fatalf("%+v", s)
	}
	check(t, send(t, r, all(3, ledger.AckAll)).wait(t).err)
	if got := values(t, tp, 0); !slices.Equal(got, sequence("p", 0, 3)) {
		t.Fatalf("stored %v", got)
	}
}
