package topic_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topic"
)

func sequence(producer string, from, to int) []string {
	var out []string
	for i := from; i <= to; i++ {
		out = append(out, fmt.Sprintf("%s/%d", producer, i))
	}
	return out
}

func TestPublishAndRead(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), topic.NewCache(1<<20), topic.Config{RollEntries: 7})
	p := producer(t, tp, "p", false)
	next := 0
	for i := range 60 {
		n := 1 + i%3
		s := send(t, p, batch(t, "p", uint64(next), n)).wait(t)
		check(t, s.err)
		if s.Offset != entry.Offset(next) || s.FirstSeq != uint64(next) || s.LastSeq != uint64(next+n-1) || s.Duplicate {
			t.Fatalf("receipt %+v for sequence %d", s.Receipt, next)
		}
		next += n
	}
	want := sequence("p", 0, next-1)
	if got := values(t, tp, 0); !slices.Equal(got, want) {
		t.Fatalf("read %v", got)
	}
	if got := values(t, tp, 50); !slices.Equal(got, want[50:]) {
		t.Fatalf("from 50: %v", got)
	}
	check(t, tp.Close(t.Context()))
	if used := f.budget.Used(); used != 0 {
		t.Fatalf("%d bytes of the budget are never given back", used)
	}
	// A new owner, without a cache, reads the same from bookies.
	tp = f.open(f.Takeover(), nil, topic.Config{})
	if got := values(t, tp, 0); !slices.Equal(got, want) || tp.Next() != entry.Offset(next) {
		t.Fatalf("read %d messages, next %d", len(got), tp.Next())
	}
}

func TestNextWaitsForData(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), topic.NewCache(1<<20), topic.Config{})
	r := tp.NewReader(0)
	if _, status, err := r.TryNext(100); status != topic.AtEnd || err != nil {
		t.Fatalf("status %v, %v on an empty topic", status, err)
	}
	got := make(chan []topic.Entry)
	go func() {
		for range 3 {
			es, err := r.Next(t.Context(), 1)
			if err != nil {
				t.Error(err)
			}
			got <- es
		}
	}()
	p := producer(t, tp, "p", false)
	for i := range 3 {
		check(t, send(t, p, batch(t, "p", uint64(i), 1)).wait(t).err)
		if es := <-got; len(es) != 1 || es[0].Envelope.Base != entry.Offset(i) {
			t.Fatalf("read %+v", es)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Next(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	lost := make(chan error)
	go func() {
		_, err := r.Next(t.Context(), 1)
		lost <- err
	}()
	tp.Shutdown()
	if err := <-lost; !errors.Is(err, topic.ErrClosed) {
		t.Fatalf("reading a topic that was shut down: %v", err)
	}
}

// The cache is shared: what was cached first goes first, whichever topic it is of; readers do not notice.
func TestTheCacheEvictsTheOldestOfAllTopics(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	guard := f.Takeover()
	cache := topic.NewCache(3000)
	a := f.open(guard, cache, topic.Config{})
	b, err := topic.Open(t.Context(), topic.Env{Chain: f.Env(), Cache: cache}, guard, "topic/00000000-0000-0000-0000-000000000001/1/data", topic.Config{})
	check(t, err)
	t.Cleanup(b.Shutdown)
	pa, pb := producer(t, a, "a", false), producer(t, b, "b", false)
	for i := range 5 {
		check(t, send(t, pa, batch(t, "a", uint64(i), 1)).wait(t).err)
	}
	if _, status, err := a.NewReader(0).TryNext(1); status != topic.Ready || err != nil {
		t.Fatalf("status %v, %v while cached", status, err)
	}
	for i := range 50 {
		check(t, send(t, pb, batch(t, "b", uint64(i), 1)).wait(t).err)
	}
	if cache.Used() > 3000 {
		t.Fatalf("%d bytes cached", cache.Used())
	}
	if _, status, _ := a.NewReader(0).TryNext(1); status != topic.NeedsRead {
		t.Fatalf("status %v after eviction", status)
	}
	if _, status, _ := b.NewReader(49).TryNext(1); status != topic.Ready {
		t.Fatalf("status %v of the newest", status)
	}
	if got := values(t, a, 0); !slices.Equal(got, sequence("a", 0, 4)) {
		t.Fatalf("read %v", got)
	}
	if got := values(t, b, 0); !slices.Equal(got, sequence("b", 0, 49)) {
		t.Fatalf("read %v", got)
	}
}

func TestReadersShareOneCopy(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), topic.NewCache(1<<20), topic.Config{})
	p := producer(t, tp, "p", false)
	check(t, send(t, p, batch(t, "p", 0, 1)).wait(t).err)
	x, _, err := tp.NewReader(0).TryNext(1)
	check(t, err)
	y, _, err := tp.NewReader(0).TryNext(1)
	check(t, err)
	if &x[0].Frame[0] != &y[0].Frame[0] {
		t.Fatal("two readers, two copies")
	}
}

func TestLookups(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	clock := newClock(1_000_000)
	env := topic.Env{Chain: f.Env(), Sched: clock}
	tp, err := topic.Open(t.Context(), env, f.Takeover(), logID, topic.Config{RollEntries: 5})
	check(t, err)
	t.Cleanup(tp.Shutdown)
	if o, err := tp.OffsetAt(t.Context(), 1); err != nil || o != 0 {
		t.Fatalf("%d, %v in an empty topic", o, err)
	}
	p := producer(t, tp, "p", false)
	var receipts []topic.Receipt
	for i := range 30 { // two messages each, 1 s apart; the clock steps back once, times do not
		clock.Add(time.Second)
		if i == 12 {
			clock.Add(-time.Minute)
		}
		if i == 13 {
			clock.Add(time.Minute)
		}
		s := send(t, p, batch(t, "p", uint64(2*i), 2)).wait(t)
		check(t, s.err)
		receipts = append(receipts, s.Receipt)
	}
	eventually(t, "a roll", func() bool { return len(tp.Chain().Runs()) > 1 })
	for i, r := range receipts {
		at := r.Position
		at.Batch = 1
		if o, err := tp.OffsetOf(t.Context(), at); err != nil || o != entry.Offset(2*i+1) {
			t.Fatalf("offset of %v is %d, %v", at, o, err)
		}
		if got, err := tp.PositionOf(t.Context(), entry.Offset(2*i+1)); err != nil || got != at {
			t.Fatalf("position of %d is %v, not %v; %v", 2*i+1, got, at, err)
		}
		if i == 11 || i == 12 {
			continue
		}
		if o, err := tp.OffsetAt(t.Context(), 1_000_000+int64(i+1)*1000); err != nil || o != entry.Offset(2*i) {
			t.Fatalf("offset at second %d is %d, %v", i+1, o, err)
		}
	}
	for _, c := range []struct {
		at   entry.Position
		want entry.Offset
	}{
		{entry.Position{Ledger: 0, Entry: -1}, 0},
		{entry.Position{Ledger: receipts[29].Position.Ledger, Entry: 999}, 60},
		{entry.Position{Ledger: 1 << 40}, 60},
		{entry.Position{Ledger: receipts[0].Position.Ledger, Entry: 0, Batch: 99}, 1},
	} {
		if o, err := tp.OffsetOf(t.Context(), c.at); err != nil || o != c.want {
			t.Fatalf("offset of %v is %d, %v", c.at, o, err)
		}
	}
	if o, err := tp.OffsetAt(t.Context(), 1<<50); err != nil || o != 60 {
		t.Fatalf("%d, %v after the end", o, err)
	}
	total := tp.Bytes()
	if got := tp.BytesFrom(0); got != total {
		t.Fatalf("%d bytes from 0, %d in all", got, total)
	}
	if got := tp.BytesFrom(30); got < total*4/10 || got > total*6/10 {
		t.Fatalf("%d bytes from the middle of %d", got, total)
	}
	if o := tp.OffsetKeeping(total / 2); o < 26 || o > 34 {
		t.Fatalf("half of the bytes lie after offset %d", o)
	}
	if o := tp.OffsetKeeping(2 * total); o != 0 {
		t.Fatalf("everything lies after offset %d", o)
	}
	if o := tp.OffsetKeeping(0); o != 60 {
		t.Fatalf("nothing lies after offset %d", o)
	}
}

// The end of a topic is where the next entry is expected, also if the last one is cached.
func TestThePositionOfTheEnd(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), topic.NewCache(1<<20), topic.Config{})
	p := producer(t, tp, "p", false)
	for i := range uint64(3) {
		last := send(t, p, batch(t, "p", i, 1)).wait(t)
		check(t, last.err)
		want := entry.Position{Ledger: last.Position.Ledger, Entry: last.Position.Entry + 1}
		if at, err := tp.PositionOf(t.Context(), tp.Next()); err != nil || at != want {
			t.Fatalf("the end is at %v, not %v; %v", at, want, err)
		}
	}
}

func TestTrimNeverDeletesWhatIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), topic.NewCache(1000), topic.Config{RollEntries: 4, Snapshots: newMemStore()})
	p := producer(t, tp, "p", true)
	for i := range 60 {
		check(t, send(t, p, batch(t, "p", uint64(i), 1)).wait(t).err)
		if i%10 == 0 {
			eventually(t, "a roll", func() bool { return len(tp.Chain().Runs()) > i/10 })
		}
	}
	for floor := entry.Offset(0); floor <= 60; floor += 7 {
		earliest, _, err := tp.Trim(t.Context(), topic.TrimPolicy{Floor: floor})
		check(t, err)
		if earliest > floor {
			t.Fatalf("trimmed to %d, beyond the floor %d", earliest, floor)
		}
		if got := values(t, tp, floor); !slices.Equal(got, sequence("p", int(floor), 59)) {
			t.Fatalf("from %d: %v", floor, got)
		}
	}
	if tp.Earliest() == 0 {
		t.Fatal("nothing was trimmed")
	}
	// A reader that was left behind goes on with the earliest.
	es, err := tp.NewReader(0).Next(t.Context(), 1)
	check(t, err)
	if es[0].Envelope.Base != tp.Earliest() {
		t.Fatalf("reader goes on at %d, earliest is %d", es[0].Envelope.Base, tp.Earliest())
	}
	// Limits of time and size do not ask for acknowledgements.
	if _, _, err := tp.Trim(t.Context(), topic.TrimPolicy{LimitBytes: 1}); err != nil || tp.Earliest() < 56 {
		t.Fatalf("earliest %d, %v", tp.Earliest(), err)
	}
	check(t, tp.Delete(t.Context()))
	if rec, err := f.Store.GetChain(t.Context(), logID); err == nil && rec.Rev != 0 {
		t.Fatalf("left after deletion: %+v", rec)
	}
}

func TestTrimPolicies(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(100_000)
	run := func(first, end entry.Offset, age time.Duration, bytes int64) meta.Run {
		return meta.Run{First: first, End: end, Closed: true, MaxTime: now.Add(-age).UnixMilli(), Bytes: bytes}
	}
	runs := []meta.Run{
		run(0, 10, 50*time.Second, 100), run(10, 10, 0, 0), run(10, 20, 30*time.Second, 100),
		run(20, 30, 10*time.Second, 100),
		{First: 30, End: 40, Bytes: 100},
	}
	for _, c := range []struct {
		name   string
		policy topic.TrimPolicy
		want   int
	}{
		{"nothing acknowledged", topic.TrimPolicy{}, 0},
		{"acknowledged within a run", topic.TrimPolicy{Floor: 19}, 2},
		{"all acknowledged", topic.TrimPolicy{Floor: 40}, 4},
		{"kept for a time", topic.TrimPolicy{Floor: 40, RetainTime: 20 * time.Second}, 3},
		{"kept up to a size", topic.TrimPolicy{Floor: 40, RetainBytes: 300}, 2},
		{"kept up to a size or a time", topic.TrimPolicy{Floor: 40, RetainBytes: 300, RetainTime: 20 * time.Second}, 3},
		{"kept for ever", topic.TrimPolicy{Floor: 40, RetainTime: -1}, 0},
		{"limit of time", topic.TrimPolicy{LimitTime: 20 * time.Second}, 3},
		{"limit of size", topic.TrimPolicy{LimitBytes: 250}, 3},
		{"limit of size beside acknowledgements", topic.TrimPolicy{LimitBytes: 350, Floor: 20}, 3},
	} {
		if got := c.policy.Victims(runs, now); got != c.want {
			t.Errorf("%s: %d runs go, want %d", c.name, got, c.want)
		}
	}
}

// Publishing takes budget; a stalled ensemble makes producers wait, and a batch that gave up is not overtaken by its
// successors.
func TestBackPressure(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	tp := f.open(f.Takeover(), nil, topic.Config{MaxPendingBytes: 1000})
	p := producer(t, tp, "p", false)
	check(t, send(t, p, batch(t, "p", 0, 1)).wait(t).err)
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	ctx, cancel := context.WithCancel(t.Context())
	var all []*sent
	full := make(chan int)
	go func() {
		for i := 1; ; i++ {
			s := &sent{done: make(chan struct{})}
			b := batch(t, "p", uint64(i), 1)
			b.Done = func(r topic.Receipt, err error) {
				s.Receipt, s.err = r, err
				close(s.done)
			}
			if err := p.Append(ctx, b); err != nil {
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				full <- i
				return
			}
			all = append(all, s)
		}
	}()
	eventually(t, "the budget to be used up", func() bool { return tp.PendingBytes() > 800 })
	cancel()
	refused := <-full
	if f.budget.Used() > 1200 {
		t.Fatalf("%d bytes held", f.budget.Used())
	}
	release()
	for _, s := range all {
		check(t, s.wait(t).err)
	}
	if _, err := trySend(t, p, batch(t, "p", uint64(refused+1), 1)); !errors.Is(err, topic.ErrSequenceGap) {
		t.Fatalf("a successor of a refused batch: %v", err)
	}
	check(t, send(t, p, batch(t, "p", uint64(refused), 1)).wait(t).err)
	check(t, send(t, p, batch(t, "p", uint64(refused+1), 1)).wait(t).err)
	if got := values(t, tp, 0); !slices.Equal(got, sequence("p", 0, refused+1)) {
		t.Fatalf("read %v", got)
	}
}

// No ledger can be opened: batches fail as not written, give their offsets back, and the topic takes up again.
func TestNoLedgerCanBeOpened(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.SetWritable(0, false)
	tp := f.open(f.Takeover(), nil, topic.Config{})
	p := producer(t, tp, "p", true)
	s1, err := trySend(t, p, batch(t, "p", 0, 2))
	check(t, err)
	s2, err2 := trySend(t, p, batch(t, "p", 2, 1))
	var failed *ledger.AppendError
	var few *chain.NotEnoughBookiesError
	if !errors.As(s1.wait(t).err, &failed) || failed.Outcome != ledger.NotWritten || !errors.As(s1.err, &few) {
		t.Fatalf("failed with %v", s1.err)
	}
	if err2 == nil {
		if s2.wait(t).err == nil {
			t.Fatal("the second batch was stored")
		}
	} else if !errors.Is(err2, topic.ErrUnavailable) && !errors.Is(err2, topic.ErrSequenceGap) {
		t.Fatal(err2)
	}
	f.SetWritable(0, true)
	// The first must come first; both are stored, from offset 0 on.
	if _, err := trySend(t, p, batch(t, "p", 2, 1)); !errors.Is(err, topic.ErrSequenceGap) {
		t.Fatalf("out of order: %v", err)
	}
	eventually(t, "the topic to take up again", func() bool { return tp.Err() == nil })
	check(t, send(t, p, batch(t, "p", 0, 2)).wait(t).err)
	check(t, send(t, p, batch(t, "p", 2, 1)).wait(t).err)
	if got := values(t, tp, 0); !slices.Equal(got, sequence("p", 0, 2)) {
		t.Fatalf("read %v", got)
	}
	if used := tp.PendingBytes(); used != 0 {
		eventually(t, "bytes to be given back", func() bool { return tp.PendingBytes() == 0 })
	}
}

// When a message was stored is told without storage too, as far as that is known.
func TestWhenAMessageWasStored(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	clock := newClock(1_000_000)
	env := topic.Env{Chain: f.Env(), Sched: clock, Cache: topic.NewCache(1)}
	tp, err := topic.Open(t.Context(), env, f.Takeover(), logID, topic.Config{RollEntries: 4})
	check(t, err)
	t.Cleanup(tp.Shutdown)
	p := producer(t, tp, "p", false)
	for i := range 10 {
		clock.Add(time.Second)
		check(t, send(t, p, batch(t, "p", uint64(2*i), 2)).wait(t).err)
	}
	for o := range entry.Offset(20) {
		if at, exact, ok := tp.StoredAt(t.Context(), o); !ok || !exact || at != 1_001_000+int64(o/2)*1000 {
			t.Fatalf("offset %d was stored at %d, %v, %v", o, at, exact, ok)
		}
	}
	for _, b := range bookieclient.FakeUUIDs(3) {
		f.Fake.Crash(b)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, ctx := range []context.Context{t.Context(), gone} {
		at, exact, ok := tp.StoredAt(ctx, 3)
		if !ok || exact || at < 1_002_000 || at > 1_010_000 {
			t.Fatalf("without bookies, offset 3 was stored at %d, %v, %v", at, exact, ok)
		}
	}
	if _, _, ok := tp.StoredAt(t.Context(), 20); ok {
		t.Fatal("when a message was stored that is not")
	}
}
