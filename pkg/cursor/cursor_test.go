package cursor

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"reflect"
	"runtime"
	"testing"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/statelog"
)

var testUUID = entry.UUID{0xa1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

func newCursor(tb testing.TB, initial entry.Offset) *Cursor {
	tb.Helper()
	c, err := New(Meta{UUID: testUUID, Name: "orders", Initial: initial, Created: 1_700_000_000_000})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// log is a state log as far as a cursor sees it: the last record under a key counts, in an order of its own.
type log struct {
	live map[string]Record
}

func (l *log) write(records []Record) {
	if l.live == nil {
		l.live = map[string]Record{}
	}
	for _, r := range records {
		key := fmt.Sprintf("%d/%s", r.Kind, r.Key)
		if r.Delete {
			delete(l.live, key)
		} else {
			l.live[key] = r
		}
	}
}

func (l *log) records() []Record {
	var out []Record
	for _, r := range l.live { // any order will do
		out = append(out, r)
	}
	return out
}

func (l *log) bytes() int {
	n := 0
	for _, r := range l.live {
		n += r.Size()
	}
	return n
}

// store takes what is pending, writes it and confirms it.
func (l *log) store(c *Cursor) {
	if b, ok := c.Take(0); ok {
		l.write(b.Records)
		c.Confirm(b.Seq)
	}
}

func ack(tb testing.TB, c *Cursor, first, end entry.Offset) Ticket {
	tb.Helper()
	ticket, err := c.Ack(c.Generation(), maxOffset, Range{first, end})
	if err != nil {
		tb.Fatal(err)
	}
	return ticket
}

func TestFloorRisesOverHolesThatCloseUp(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 10)
	ack(t, c, 12, 14)
	ack(t, c, 16, 17)
	if c.Floor() != 10 || c.Holes() != 2 || c.Backlog(20) != 7 {
		t.Fatalf("floor %d, holes %d, backlog %d; want 10, 2, 7", c.Floor(), c.Holes(), c.Backlog(20))
	}
	if got := c.Missing(nil, Range{0, 20}); !reflect.DeepEqual(got, []Range{{10, 12}, {14, 16}, {17, 20}}) {
		t.Fatalf("missing %v", got)
	}
	ack(t, c, 10, 12)
	if c.Floor() != 14 {
		t.Fatalf("floor %d, want 14", c.Floor())
	}
	if _, err := c.AckCumulative(c.Generation(), 20, 16); err != nil {
		t.Fatal(err)
	}
	if c.Floor() != 17 || c.Holes() != 0 || c.Backlog(20) != 3 {
		t.Fatalf("floor %d, holes %d, backlog %d; want 17, 0, 3", c.Floor(), c.Holes(), c.Backlog(20))
	}
}

func TestAcksOfWhatDoesNotExistAreRefused(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	before := *c
	_, err := c.Ack(0, 100, Range{1, 2}, Range{0, 1 << 60})
	if !errors.Is(err, ErrBeyondEnd) {
		t.Fatalf("got %v, want ErrBeyondEnd", err)
	}
	if c.above != before.above || c.Acked(1) {
		t.Fatal("a refused acknowledgement was applied in part")
	}
	if _, err := c.SetRetry(0, 100, Range{99, 101}, Retry{}); !errors.Is(err, ErrBeyondEnd) {
		t.Fatalf("got %v, want ErrBeyondEnd", err)
	}
}

func TestTicketOfAnAckedButNotDurableMessageWaitsForItsBatch(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	first := ack(t, c, 5, 6)
	b, _ := c.Take(0)
	again := ack(t, c, 5, 6) // applied already, on its way
	if again != first || c.Durable() >= again {
		t.Fatalf("ticket %d for what ticket %d covers, durable %d", again, first, c.Durable())
	}
	if c.Pending() {
		t.Fatal("an ack of what is acked left something to write")
	}
	later := ack(t, c, 7, 8)
	c.Confirm(b.Seq)
	if c.Durable() < again || c.Durable() >= later {
		t.Fatalf("durable %d, want ≥ %d and < %d", c.Durable(), again, later)
	}
}

func TestTrimFloorFollowsWhatIsDurableAndFallsAtOnceOnSeekBack(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 100)
	var l log
	l.store(c)
	ack(t, c, 100, 200)
	if c.Floor() != 200 || c.TrimFloor() != 100 {
		t.Fatalf("floor %d trim %d; want 200, 100", c.Floor(), c.TrimFloor())
	}
	b1, _ := c.Take(0)
	ack(t, c, 200, 300)
	b2, _ := c.Take(0)
	if c.Confirm(b1.Seq); c.TrimFloor() != 200 {
		t.Fatalf("trim floor %d, want 200", c.TrimFloor())
	}
	c.Seek(50)
	if c.TrimFloor() != 50 {
		t.Fatalf("trim floor %d after a seek to 50", c.TrimFloor())
	}
	b3, _ := c.Take(0)
	if c.Confirm(b2.Seq); c.TrimFloor() != 50 {
		t.Fatalf("trim floor %d while the seek to 50 is under way", c.TrimFloor())
	}
	c.Seek(1000)
	if c.TrimFloor() != 50 { // the log may have b3 already
		t.Fatalf("trim floor %d after a seek to 1000, with the one to 50 still under way", c.TrimFloor())
	}
	if c.Confirm(b3.Seq); c.TrimFloor() != 50 {
		t.Fatalf("trim floor %d before the seek to 1000 is durable", c.TrimFloor())
	}
	l.store(c)
	if c.TrimFloor() != 1000 {
		t.Fatalf("trim floor %d, want 1000", c.TrimFloor())
	}
}

func TestPassedAndAbandonedPagesLeaveTheLog(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	var l log
	holes := func() {
		for page := range entry.Offset(5) {
			for i := range entry.Offset(3000) {
				ack(t, c, c.Floor()+page*pageSize+2*i+1, c.Floor()+page*pageSize+2*i+2)
			}
			l.store(c) // a snapshot
			ack(t, c, c.Floor()+page*pageSize+10_000, c.Floor()+page*pageSize+10_001)
			l.store(c) // a change
		}
		if len(l.live) != 2+2*5 {
			t.Fatalf("%d records for 5 pages", len(l.live))
		}
	}
	holes()
	ack(t, c, 0, 10*pageSize)
	if l.store(c); len(l.live) != 2 {
		t.Fatalf("%d records stay of what the floor has passed", len(l.live)-2)
	}
	holes()
	c.Seek(0)
	if l.store(c); len(l.live) != 2 {
		t.Fatalf("%d records stay of before the seek", len(l.live)-2)
	}
}

func TestLateAckOfAnOlderGenerationChangesNothing(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	old := c.Generation()
	ack(t, c, 5, 6)
	c.Seek(0)
	for _, err := range []error{
		second(c.Ack(old, 100, Range{3, 4})),
		second(c.AckCumulative(old, 100, 50)),
		second(c.SetRetry(old, 100, Range{3, 4}, Retry{Count: 1})),
	} {
		if !errors.Is(err, ErrStaleGeneration) {
			t.Fatalf("got %v, want ErrStaleGeneration", err)
		}
	}
	if got := c.Missing(nil, Range{0, 10}); !reflect.DeepEqual(got, []Range{{0, 10}}) {
		t.Fatalf("missing %v, want everything", got)
	}
}

func second[T any](_ T, err error) error { return err }

func TestRetryLivesUntilTheMessageIsAcked(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	var l log
	want := Retry{Count: 3, NotBefore: 1_700_000_000_123, KeyHash: 0xdeadbeef, Reason: RetryNacked}
	ack(t, c, 12, 13)
	if _, err := c.SetRetry(0, 100, Range{10, 15}, want); err != nil {
		t.Fatal(err)
	}
	l.store(c)
	ack(t, c, 10, 11)
	l.store(c)
	c, err := Load(l.records(), 0)
	if err != nil {
		t.Fatal(err)
	}
	for o := entry.Offset(9); o < 16; o++ {
		got, ok := c.Retry(o)
		if expect := o == 11 || o == 13 || o == 14; ok != expect || ok && got != want {
			t.Errorf("retry of %d is %+v, %v", o, got, ok)
		}
	}
}

// A delay goes on where it was when it was written, whatever the clock of whoever loads it shows.
func TestADelayNeedsNoCommonClock(t *testing.T) {
	t.Parallel()
	const day, noon = 86_400_000, int64(1_700_000_000_000)
	c := newCursor(t, 0)
	var l log
	for i, notBefore := range []int64{noon + 5000, noon + 500, 0, math.MaxInt64} {
		if _, err := c.SetRetry(0, 100, Range{entry.Offset(i), entry.Offset(i) + 1}, Retry{Count: 1, NotBefore: notBefore, Reason: RetryNacked}); err != nil {
			t.Fatal(err)
		}
	}
	write := func(now int64) {
		b, _ := c.Take(now)
		l.write(b.Records)
	}
	for _, whole := range []bool{false, true} { // as a change, and in a page
		if whole {
			c.pages[0].whole = true
			c.changed(c.pages[0])
		}
		write(noon + 1000)
		for _, now := range []int64{noon - day, noon, noon + day, 0} {
			heir, err := Load(l.records(), now)
			if err != nil {
				t.Fatal(err)
			}
			for o, want := range []int64{now + 4000, 0, 0, now + math.MaxInt64 - noon - 1000} {
				if want < 0 {
					want = math.MaxInt64
				}
				if got, ok := heir.Retry(entry.Offset(o)); !ok || got.NotBefore != want {
					t.Errorf("loaded at %d: offset %d waits until %d, want %d", now, o, got.NotBefore, want)
				}
			}
		}
	}
}

func TestDamageRefusesAndNeverResets(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	var l log
	l.store(c)
	for i := range entry.Offset(3) {
		ack(t, c, 10+2*i, 11+2*i)
		l.store(c) // three deltas of page 0
	}
	for i := range entry.Offset(5000) {
		ack(t, c, pageSize+2*i, pageSize+2*i+1)
	}
	l.store(c) // a snapshot of page 1
	records := l.records()
	if _, err := Load(records, 0); err != nil {
		t.Fatal(err)
	}
	for i, r := range records {
		for bit := range 8 * len(r.Value) {
			if bit > 200 && bit%97 != 0 {
				continue
			}
			broken := append([]Record{}, records...)
			broken[i].Value = append([]byte{}, r.Value...)
			broken[i].Value[bit/8] ^= 1 << (bit % 8)
			var corrupt *CorruptError
			if _, err := Load(broken, 0); !errors.As(err, &corrupt) || corrupt.Kind != r.Kind {
				t.Fatalf("kind %d with bit %d flipped: %v", r.Kind, bit, err)
			}
		}
		for _, lost := range []uint8{KindSubscription, KindState} {
			if r.Kind == lost {
				if _, err := Load(append(append([]Record{}, records[:i]...), records[i+1:]...), 0); err == nil {
					t.Fatalf("loaded without its record of kind %d", lost)
				}
			}
		}
	}
	gap := append([]Record{}, records...)
	for i, r := range gap {
		if r.Kind == KindDelta && r.Key[len(r.Key)-1] == 2 {
			gap = append(gap[:i], gap[i+1:]...)
			break
		}
	}
	var corrupt *CorruptError
	if _, err := Load(gap, 0); !errors.As(err, &corrupt) || corrupt.Kind != KindDelta {
		t.Fatalf("a lost change was not noticed: %v", err)
	}
}

// TestMatchesNaiveMap drives a cursor and a map of offsets with the same steps, over page borders, with
// restarts from every kind of prefix of what was written.
func TestMatchesNaiveMap(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const end = 4 * pageSize
		type model struct {
			acked   []bool
			retries map[entry.Offset]Retry
			gen     Generation
		}
		// Interesting offsets lie around page borders; a base makes most of the rest acknowledged.
		const width = 40
		start := entry.Offset(pageSize - width/2)
		c, _ := New(Meta{UUID: testUUID, Name: "s", Initial: start})
		m := model{make([]bool, end+1), map[entry.Offset]Retry{}, 0}
		floor := start
		var l log
		offset := rapid.Custom(func(t *rapid.T) entry.Offset {
			page := rapid.IntRange(1, 3).Draw(t, "page")
			return entry.Offset(page*pageSize - width/2 + rapid.IntRange(0, width).Draw(t, "index"))
		})
		steps := 0
		check := func() {
			for ; m.acked[floor]; floor++ {
			}
			if c.Floor() != floor {
				t.Fatalf("floor %d, want %d", c.Floor(), floor)
			}
			if steps++; steps%8 != 0 {
				return // what follows looks at every offset
			}
			var missing []Range
			above, holes, inHole := 0, 0, false
			for o := floor; o < end; o++ {
				if m.acked[o] {
					if !inHole {
						holes++
					}
					inHole = true
					above++
					continue
				}
				inHole = false
				if n := len(missing); n > 0 && missing[n-1].End == o {
					missing[n-1].End++
				} else {
					missing = append(missing, Range{o, o + 1})
				}
			}
			if got := c.Missing(nil, Range{0, end}); !reflect.DeepEqual(got, missing) {
				t.Fatalf("missing %v, want %v", got, missing)
			}
			if c.above != uint64(above) {
				t.Fatalf("%d acknowledged above the floor, want %d", c.above, above)
			}
			if c.Holes() != uint64(holes) {
				t.Fatalf("holes %d, want %d", c.Holes(), holes)
			}
			if c.retries.Offsets() != uint64(len(m.retries)) {
				t.Fatalf("retries of %d, want %d", c.retries.Offsets(), len(m.retries))
			}
			for o, want := range m.retries {
				if got, ok := c.Retry(o); !ok || got != want {
					t.Fatalf("retry of %d is %+v, want %+v", o, got, want)
				}
			}
		}
		ackModel := func(r Range) {
			for o := max(r.First, floor); o < r.End; o++ {
				m.acked[o] = true
			}
			for o := range m.retries {
				if r.Contains(o) {
					delete(m.retries, o)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"ack": func(t *rapid.T) {
				r := Range{First: offset.Draw(t, "first")}
				r.End = r.First + entry.Offset(rapid.IntRange(1, 8).Draw(t, "n"))
				if _, err := c.Ack(c.Generation(), end, r); err != nil {
					t.Fatal(err)
				}
				ackModel(r)
			},
			"bridge": func(t *rapid.T) { // from one border to the next, so that the floor can get there
				r := Range{pageSize + 5, 2*pageSize - 15}
				if rapid.Bool().Draw(t, "second") {
					r = Range{2*pageSize + 15, 3*pageSize - 5}
				}
				if _, err := c.Ack(c.Generation(), end, r); err != nil {
					t.Fatal(err)
				}
				ackModel(r)
			},
			"cumulative": func(t *rapid.T) {
				to := offset.Draw(t, "to")
				if _, err := c.AckCumulative(c.Generation(), end, to); err != nil {
					t.Fatal(err)
				}
				ackModel(Range{0, to})
			},
			"retry": func(t *rapid.T) {
				r := Range{First: offset.Draw(t, "first")}
				r.End = r.First + entry.Offset(rapid.IntRange(1, 8).Draw(t, "n"))
				retry := Retry{Count: uint32(rapid.IntRange(1, 3).Draw(t, "count")), Reason: RetryNacked}
				if _, err := c.SetRetry(c.Generation(), end, r, retry); err != nil {
					t.Fatal(err)
				}
				for o := max(r.First, floor); o < r.End; o++ {
					if !m.acked[o] {
						m.retries[o] = retry
					}
				}
			},
			"seek": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "rare") > 0 {
					t.Skip()
				}
				floor = offset.Draw(t, "to")
				c.Seek(floor)
				m = model{make([]bool, end+1), map[entry.Offset]Retry{}, m.gen + 1}
			},
			"store": func(*rapid.T) { l.store(c) },
			"whole": func(*rapid.T) { // as if a page had changed much
				for _, p := range c.pages {
					p.whole = true
					c.changed(p)
				}
			},
			"reload": func(t *rapid.T) {
				l.store(c)
				before := c
				var err error
				if c, err = Load(l.records(), 0); err != nil {
					t.Fatal(err)
				}
				if c.Meta() != before.Meta() || c.Generation() != before.Generation() || c.TrimFloor() != before.TrimFloor() {
					t.Fatalf("reloaded as %+v", c)
				}
			},
			"torn": func(t *rapid.T) { // only a prefix of the last batch got there: all old acks are kept, none invented
				b, ok := c.Take(0)
				if !ok {
					t.Skip()
				}
				defer c.Confirm(b.Seq)
				defer l.write(b.Records)
				var part log
				part.write(l.records())
				part.write(b.Records[:rapid.IntRange(0, len(b.Records)).Draw(t, "prefix")])
				if len(part.live) == 0 {
					return
				}
				old, oldErr := Load(l.records(), 0)
				got, err := Load(part.records(), 0)
				if err != nil {
					t.Fatal(err)
				}
				if oldErr == nil && got.generation == old.generation {
					for o := old.Floor(); o < end; o++ {
						if old.Acked(o) && !got.Acked(o) {
							t.Fatalf("ack of %d was lost by a torn batch", o)
						}
					}
				}
				if got.generation == m.gen {
					for o := got.Floor(); o < end; o++ {
						if got.Acked(o) && !c.Acked(o) {
							t.Fatalf("ack of %d was invented by a torn batch", o)
						}
					}
				}
			},
		})
	})
}

func TestDeletionCutShortIsFinishedByPurge(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	var l log
	l.store(c)
	for i := range entry.Offset(3) {
		ack(t, c, 10+2*i, 11+2*i)
		l.store(c)
	}
	records := c.Delete()
	for n := range len(records) + 1 {
		part := log{}
		part.write(l.records())
		part.write(records[:n])
		live := part.records()
		if n == 0 {
			continue
		}
		if len(live) > 0 {
			if _, err := Load(live, 0); !errors.Is(err, ErrDeleted) {
				t.Fatalf("after %d records: %v", n, err)
			}
			part.write(Purge(live))
		}
		if len(part.live) != 0 {
			t.Fatalf("%d records stay", len(part.live))
		}
	}
}

func TestGroupTellsSubscriptionsApart(t *testing.T) {
	t.Parallel()
	a := newCursor(t, 1)
	b, _ := New(Meta{UUID: entry.UUID{9}, Name: "b", Initial: 2})
	var l log
	l.store(a)
	l.store(b)
	l.write([]Record{{Kind: 40, Key: []byte("x"), Value: []byte("not a cursor's")}})
	groups, err := Group(l.records())
	if err != nil || len(groups) != 2 {
		t.Fatalf("%d groups, %v", len(groups), err)
	}
	got, err := Load(groups[entry.UUID{9}], 0)
	if err != nil || got.Meta().Name != "b" || got.Floor() != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := Group([]Record{{Kind: KindPage, Key: []byte{1}}}); err == nil {
		t.Fatal("a key without subscription was accepted")
	}
}

// TestThirtyMillionHoles acknowledges every second of 60 million messages, persists, loads and compares.
func TestThirtyMillionHoles(t *testing.T) {
	const holes = 30_000_000 / volumeDivisor
	heap := func() uint64 {
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	before := heap()
	c := newCursor(t, 0)
	var l log
	for i := range entry.Offset(holes) {
		if _, err := c.Ack(0, 2*holes, Range{2*i + 1, 2*i + 2}); err != nil {
			t.Fatal(err)
		}
	}
	b, _ := c.Take(0)
	memory := heap() - before
	l.write(b.Records)
	c.Confirm(b.Seq)
	largest := 0
	for _, group := range b.Split(1 << 20) {
		size := 0
		for _, r := range group {
			size += r.Size()
		}
		largest = max(largest, size)
	}
	t.Logf("%d holes: %d pages, %.1f MiB of heap with all records taken, %.1f MiB in the log, largest append %d bytes",
		c.Holes(), c.Pages(), float64(memory)/(1<<20), float64(l.bytes())/(1<<20), largest)
	if c.Holes() != holes || memory > 64<<20 || l.bytes() > 16<<20 || largest > 1<<20 {
		t.Fatal("that is not within 64 MiB of memory and 16 MiB of log")
	}
	loaded, err := Load(l.records(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if loaded.Holes() != holes || loaded.Floor() != 0 || loaded.Backlog(2*holes) != holes {
		t.Fatalf("loaded holes %d, floor %d, backlog %d", loaded.Holes(), loaded.Floor(), loaded.Backlog(2*holes))
	}
	for number, p := range c.pages {
		if q := loaded.pages[number]; q == nil || p.acked.bits == nil || *q.acked.bits != *p.acked.bits {
			t.Fatalf("page %d differs", number)
		}
	}
}

// TestLogStaysInProportion acknowledges at random and watches what the log has to hold and what was written.
func TestLogStaysInProportion(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewSource(1))
	const end = 20 * pageSize / min(volumeDivisor, 4)
	c := newCursor(t, 0)
	var l log
	written := 0
	order := rng.Perm(end)
	for i, o := range order[:end/2] {
		ack(t, c, entry.Offset(o), entry.Offset(o)+1)
		if i%100 == 99 {
			b, _ := c.Take(0)
			for _, r := range b.Records {
				written += r.Size()
			}
			l.write(b.Records)
			c.Confirm(b.Seq)
		}
	}
	perAck := float64(written) / (end / 2)
	t.Logf("live %d bytes for %d pages, %.1f bytes written per acknowledgement", l.bytes(), c.Pages(), perAck)
	if l.bytes() > 2*c.Pages()*(bitmapBytes+256) {
		t.Fatalf("%d live bytes for %d pages", l.bytes(), c.Pages())
	}
	if perAck > 40 {
		t.Fatalf("%.1f bytes written per acknowledgement", perAck)
	}
}

func BenchmarkAckInOrder(b *testing.B) {
	c := newCursor(b, 0)
	b.ReportAllocs()
	for i := range b.N {
		_, _ = c.Ack(0, maxOffset, Range{entry.Offset(i), entry.Offset(i) + 1})
		if i%256 == 255 {
			batch, _ := c.Take(0)
			c.Confirm(batch.Seq)
		}
	}
}

func BenchmarkAckShuffled(b *testing.B) { // as Shared consumers do: nearly in order
	rng := rand.New(rand.NewSource(1))
	order := rng.Perm(1024)
	c := newCursor(b, 0)
	b.ReportAllocs()
	for i := range b.N {
		o := entry.Offset(i&^1023 + order[i&1023])
		_, _ = c.Ack(0, maxOffset, Range{o, o + 1})
		if i%256 == 255 {
			batch, _ := c.Take(0)
			c.Confirm(batch.Seq)
		}
	}
}

func BenchmarkAckRandom(b *testing.B) { // the floor stays, 64 pages fill up
	rng := rand.New(rand.NewSource(1))
	c := newCursor(b, 0)
	b.ReportAllocs()
	for i := range b.N {
		o := entry.Offset(1 + rng.Intn(64*pageSize))
		_, _ = c.Ack(0, maxOffset, Range{o, o + 1})
		if i%256 == 255 {
			if batch, ok := c.Take(0); ok {
				c.Confirm(batch.Seq)
			}
		}
	}
}

// A page in which each message is to be delivered again at another time, after ever so many deliveries, fits into a
// record of the state log, as does each change of it.
func TestTheLargestPageFitsIntoTheStateLog(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 1)
	var l log
	largest := 0
	for round := range 3 {
		for o := range entry.Offset(pageSize - 1) {
			retry := Retry{Count: ^uint32(0) - uint32(round), NotBefore: 1<<63 - 1 - int64(o), Reason: RetryNacked}
			if _, err := c.SetRetry(0, pageSize, Range{o + 1, o + 2}, retry); err != nil {
				t.Fatal(err)
			}
			if o%32768 == 1 {
				b, _ := c.Take(0)
				l.write(b.Records)
			}
		}
		b, _ := c.Take(0)
		l.write(b.Records)
	}
	for _, r := range l.records() {
		largest = max(largest, len(r.Value))
	}
	t.Logf("the largest record has %d bytes", largest)
	if largest > statelog.MaxValue || largest < 1<<20 {
		t.Fatalf("a record has %d bytes, the state log takes %d", largest, statelog.MaxValue)
	}
	again, err := Load(l.records(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if again.Retries().Len() != pageSize-1 {
		t.Fatalf("%d redeliveries are left", again.Retries().Len())
	}
}
