package dispatch

import (
	"context"
	"errors"
	"math/rand"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// topic is a source of single messages, which can hang, and an acknowledgement state.
type topic struct {
	mu     sync.Mutex
	end    entry.Offset
	cursor *cursor.Cursor
	hang   chan struct{} // not nil: reads wait for it
	reads  int
	ended  int // reads that ended with their context
}

func newTopic(tb testing.TB, end entry.Offset) *topic {
	tb.Helper()
	c, err := cursor.New(cursor.Meta{UUID: entry.UUID{1}, Name: "s"})
	if err != nil {
		tb.Fatal(err)
	}
	return &topic{end: end, cursor: c}
}

func (p *topic) Read(ctx context.Context, from, until entry.Offset, maxBytes int) ([]Entry, entry.Offset, error) {
	p.mu.Lock()
	hang, end := p.hang, p.end
	p.reads++
	p.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			p.mu.Lock()
			p.ended++
			p.mu.Unlock()
			return nil, 0, ctx.Err()
		}
	}
	var entries []Entry
	for o := from; o < min(until, end) && maxBytes > 0; o++ {
		entries = append(entries, Entry{Offset: o, Span: 1, Frame: make([]byte, 10)})
		maxBytes -= 10
		from = o + 1
	}
	return entries, from, nil
}

func (p *topic) NextUnacked(o entry.Offset) entry.Offset {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cursor.NextUnacked(o)
}

func (p *topic) Missing(dst []cursor.Range, r cursor.Range) []cursor.Range {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cursor.Missing(dst, r)
}

func (p *topic) ack(tb testing.TB, r *Runner, id ConsumerID, o entry.Offset) {
	tb.Helper()
	p.mu.Lock()
	_, err := p.cursor.Ack(p.cursor.Generation(), p.end, cursor.Range{First: o, End: o + 1})
	p.mu.Unlock()
	if err != nil {
		tb.Error(err)
	}
	r.Acked(0, id, cursor.Range{First: o, End: o + 1})
}

func (p *topic) publish(r *Runner, end entry.Offset) {
	p.mu.Lock()
	p.end = end
	p.mu.Unlock()
	r.Notify(end)
}

func (p *topic) setHang(hang chan struct{}) {
	p.mu.Lock()
	p.hang = hang
	p.mu.Unlock()
}

// sink takes notes, and does more if asked.
type sink struct {
	mu     sync.Mutex
	got    []entry.Offset
	active []bool
	also   func(*Delivery)
}

func (s *sink) Send(deliveries []Delivery) {
	for i := range deliveries {
		s.mu.Lock()
		s.got = append(s.got, deliveries[i].Offset)
		s.mu.Unlock()
		if s.also != nil {
			s.also(&deliveries[i])
		}
	}
}

func (s *sink) Active(active bool) {
	s.mu.Lock()
	s.active = append(s.active, active)
	s.mu.Unlock()
}

func (s *sink) take() []entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.got
	s.got = nil
	return got
}

func mustAdd(tb testing.TB, r *Runner, c Consumer, s Sink) ConsumerID {
	tb.Helper()
	id, err := r.AddConsumer(c, s)
	if err != nil {
		tb.Fatal(err)
	}
	return id
}

func expect(tb testing.TB, s *sink, want ...entry.Offset) {
	tb.Helper()
	synctest.Wait()
	if got := s.take(); !slices.Equal(got, want) {
		tb.Fatalf("got %v, want %v", got, want)
	}
}

func expectReason(tb testing.TB, r *Runner, want Reason) {
	tb.Helper()
	synctest.Wait()
	if s := r.Why(); s.Reason != want {
		tb.Fatalf("it waits for %s (%s), want %s", s.Reason, s.Detail, want)
	}
}

func TestRunnerDeliversAndRedelivers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 5)
		var retries []Retry
		r := New(NewShared(DefaultConfig(true)), Env{
			Source: p, Acks: p, Metrics: NewMetrics(prometheus.NewRegistry()),
			OnRetries: func(_ cursor.Generation, rs []Retry) { retries = append(retries, rs...) },
		})
		defer r.Close()
		expectReason(t, r, ReasonNoConsumers)
		var a, b sink
		idA := mustAdd(t, r, Consumer{Name: "a"}, &a)
		expectReason(t, r, ReasonAckStateLoading)
		r.Loaded(0, 0, 5, nil)
		expectReason(t, r, ReasonNoPermits)
		r.Permits(idA, 100)
		expect(t, &a, 0, 1, 2, 3, 4)
		p.publish(r, 6)
		expect(t, &a, 5)
		p.ack(t, r, idA, 0)
		r.Nacked(idA, time.Minute, cursor.Range{First: 2, End: 4})
		expectReason(t, r, ReasonRedeliveryDelay)
		time.Sleep(time.Minute) // of the fake clock: the timer is the runner's
		expect(t, &a, 2, 3)
		r.RemoveConsumer(idA) // the last one: what it held is told, then the goroutine ends
		expectReason(t, r, ReasonNoConsumers)
		r.mu.Lock()
		running := r.running
		r.mu.Unlock()
		if running {
			t.Fatal("a goroutine runs without consumers")
		}
		if n := len(retries); n != 4 || retries[0].Range != (cursor.Range{First: 2, End: 4}) {
			t.Fatalf("told %+v", retries)
		}
		idB := mustAdd(t, r, Consumer{Name: "b"}, &b)
		r.Permits(idB, 100)
		expect(t, &b, 1, 2, 3, 4, 5)
		expect(t, &a)
	})
}

func TestRunnerTellsFailoverConsumers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 2)
		r := New(NewFailover(DefaultConfig(false)), Env{Source: p, Acks: p})
		defer r.Close()
		r.Loaded(0, 0, 2, nil)
		var a, b sink
		idB := mustAdd(t, r, Consumer{Name: "b", Priority: 1}, &b)
		r.Permits(idB, 10)
		expect(t, &b, 0, 1)
		idA := mustAdd(t, r, Consumer{Name: "a"}, &a)
		r.Permits(idA, 10)
		expect(t, &a, 0, 1)
		if !slices.Equal(b.active, []bool{true, false}) || !slices.Equal(a.active, []bool{true}) {
			t.Fatalf("a was told %v, b %v", a.active, b.active)
		}
	})
}

func TestRunnerAnswersWhileStorageHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 5)
		hang := make(chan struct{})
		p.setHang(hang)
		r := New(NewExclusive(DefaultConfig(false)), Env{Source: p, Acks: p})
		r.Loaded(0, 0, 5, nil)
		var a sink
		id := mustAdd(t, r, Consumer{Name: "a"}, &a)
		r.Permits(id, 100)
		expectReason(t, r, ReasonReading)
		_, err := r.AddConsumer(Consumer{Name: "b"}, &sink{})
		var busy *BusyError
		if !errors.As(err, &busy) || busy.Current != "a" {
			t.Fatalf("a second consumer: %v", err)
		}
		// A seek does not wait for the old read either.
		p.setHang(nil)
		p.mu.Lock()
		p.cursor.Seek(3)
		p.mu.Unlock()
		r.Seek(1, 3)
		expect(t, &a, 3, 4)
		if p.ended != 1 {
			t.Fatalf("%d reads were cancelled, want 1", p.ended)
		}
		// Nor does closing.
		p.setHang(hang)
		p.publish(r, 6)
		expectReason(t, r, ReasonReading)
		r.Close()
		if p.ended != 2 {
			t.Fatalf("%d reads were cancelled, want 2", p.ended)
		}
		if _, err := r.AddConsumer(Consumer{Name: "late"}, &sink{}); !errors.Is(err, ErrClosed) {
			t.Fatalf("a closed runner says %v", err)
		}
		r.Close() // again does no harm
	})
}

func TestReadsStayWithinTheBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 20)
		b := budget.New(100)
		if !b.TryAcquire(100) {
			t.Fatal("an empty budget is full")
		}
		cfg := DefaultConfig(true)
		cfg.ReadBytes = 60
		r := New(NewShared(cfg), Env{Source: p, Acks: p, Budget: b})
		r.Loaded(0, 0, 20, nil)
		var a sink
		most := int64(0)
		a.also = func(*Delivery) { most = max(most, b.Used()) }
		id := mustAdd(t, r, Consumer{Name: "a"}, &a)
		r.Permits(id, 1000)
		expectReason(t, r, ReasonReadMemory)
		b.Release(100)
		synctest.Wait()
		if n := len(a.take()); n != 20 || most > 60 {
			t.Fatalf("%d messages, up to %d bytes held; want 20, at most 60", n, most)
		}
		if b.Used() != 0 {
			t.Fatalf("%d bytes stay held while waiting", b.Used())
		}
		b.TryAcquire(100)
		p.publish(r, 30)
		expectReason(t, r, ReasonReadMemory)
		r.Close() // gives up waiting
		if b.Used() != 100 {
			t.Fatalf("%d bytes held after closing, want the test's own 100", b.Used())
		}
		b.Release(100)
	})
}

// generous reads more than it is asked for, as a source does whose entries are large.
type generous struct{ *topic }

func (g generous) Read(ctx context.Context, from, until entry.Offset, _ int) ([]Entry, entry.Offset, error) {
	return g.topic.Read(ctx, from, until, 30)
}

// What is read counts for what it is, also where that is more than was asked for.
func TestLargeEntriesCountForWhatTheyAre(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 3)
		b := budget.New(20)
		cfg := DefaultConfig(true)
		cfg.ReadBytes = 3
		r := New(NewShared(cfg), Env{Source: generous{p}, Acks: p, Budget: b})
		defer r.Close()
		var held []int64
		for range 3 {
			a := &sink{also: func(*Delivery) { held = append(held, b.Used()) }}
			r.Permits(mustAdd(t, r, Consumer{}, a), 10)
		}
		r.Loaded(0, 0, 3, nil)
		synctest.Wait()
		if !slices.Equal(held, []int64{20, 10, 0}) {
			t.Fatalf("%v bytes counted", held)
		}
	})
}

func TestReadsThatAreGivenUpLeaveTheBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 20)
		p.setHang(make(chan struct{}))
		b := budget.New(100)
		r := New(NewShared(DefaultConfig(true)), Env{Source: p, Acks: p, Budget: b})
		r.Loaded(0, 0, 20, nil)
		for _, giveUp := range []func(ConsumerID){r.RemoveConsumer, func(ConsumerID) { r.Close() }} {
			id := mustAdd(t, r, Consumer{Name: "a"}, &sink{})
			r.Permits(id, 10)
			expectReason(t, r, ReasonReading)
			if b.Used() == 0 {
				t.Fatal("a read in flight holds nothing")
			}
			giveUp(id)
			if synctest.Wait(); b.Used() != 0 {
				t.Fatalf("%d bytes stay held", b.Used())
			}
		}
	})
}

func TestWhatIsAcknowledgedIsNotRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 1_000_000)
		if _, err := p.cursor.Ack(0, p.end, cursor.Range{First: 1, End: 999_999}); err != nil {
			t.Fatal(err)
		}
		cfg := DefaultConfig(true)
		cfg.ReadBytes = 100
		r := New(NewShared(cfg), Env{Source: p, Acks: p})
		defer r.Close()
		r.Loaded(0, 0, p.end, nil)
		var a sink
		id := mustAdd(t, r, Consumer{Name: "a"}, &a)
		r.Permits(id, 1000)
		expect(t, &a, 0, 999_999)
		if p.reads > 2 {
			t.Fatalf("%d reads for two messages", p.reads)
		}
	})
}

// TestSinksMayCallBack would hang if a sink were called under the lock.
func TestSinksMayCallBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 50)
		r := New(NewShared(DefaultConfig(true)), Env{Source: p, Acks: p})
		defer r.Close()
		r.Loaded(0, 0, 50, nil)
		var a sink
		var id ConsumerID
		a.also = func(d *Delivery) {
			if r.Why().Unacked == 0 {
				t.Error("it is being delivered, but not outstanding")
			}
			p.ack(t, r, id, d.Offset)
			r.Permits(id, 1)
		}
		id = mustAdd(t, r, Consumer{Name: "a"}, &a)
		r.Permits(id, 1)
		expectReason(t, r, ReasonNoData)
		if n := len(a.take()); n != 50 {
			t.Fatalf("%d messages, want 50", n)
		}
	})
}

// TestManyConsumersAtOnce is for the race detector: every message is acknowledged, whoever comes and goes.
func TestManyConsumersAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const messages = 2000
		p := newTopic(t, 0)
		r := New(NewShared(DefaultConfig(true)), Env{Source: p, Acks: p})
		r.Loaded(0, 0, 0, nil)
		done := func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.cursor.Floor() == messages
		}
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				for round := 0; !done(); round++ {
					var s sink
					id := mustAdd(t, r, Consumer{Name: "c"}, &s)
					r.Permits(id, 50)
					time.Sleep(time.Duration(worker+1) * time.Millisecond)
					for i, o := range s.take() {
						switch {
						case i%7 == worker:
							r.Nacked(id, time.Millisecond, cursor.Range{First: o, End: o + 1})
						case i%11 != worker: // the rest comes back when the consumer leaves
							p.ack(t, r, id, o)
						}
					}
					r.RemoveConsumer(id)
				}
			})
		}
		for end := entry.Offset(0); end <= messages; end += 100 {
			p.publish(r, end)
			time.Sleep(time.Millisecond)
		}
		wg.Wait()
		r.Close()
	})
}

func TestDelayQueueIsBoundedByWhatCounts(t *testing.T) {
	t.Parallel()
	var q delayQueue
	now := epoch
	q.push(now.Add(time.Hour), cursor.Range{First: 0, End: 1}) // keeps the head
	for o := entry.Offset(1); o < 10_000; o++ {
		q.push(now.Add(2*time.Hour+time.Duration(o)), cursor.Range{First: o, End: o + 1})
		q.remove(cursor.Range{First: o, End: o + 1})
		if q.len() > 4 {
			t.Fatalf("%d ranges are kept for one that counts", q.len())
		}
	}
	q.push(now.Add(30*time.Minute), cursor.Range{First: 20_000, End: 20_001})
	var due []cursor.Range
	q.popDue(now.Add(3*time.Hour), func(r cursor.Range) { due = append(due, r) })
	if !slices.Equal(due, []cursor.Range{{First: 20_000, End: 20_001}, {First: 0, End: 1}}) || q.len() != 0 {
		t.Fatalf("due %v, %d left", due, q.len())
	}
}

// endless is a topic without end or acknowledgements, for benchmarks.
type endless struct {
	buffer []Entry
	frame  []byte
	span   uint32
}

func (e *endless) fill(from, until entry.Offset, maxBytes int) ([]Entry, entry.Offset) {
	e.buffer = e.buffer[:0]
	from -= from % entry.Offset(e.span)
	for ; from < until && maxBytes > 0; from += entry.Offset(e.span) {
		e.buffer = append(e.buffer, Entry{Offset: from, Span: e.span, Frame: e.frame})
		maxBytes -= len(e.frame)
	}
	return e.buffer, from
}

func (e *endless) Read(_ context.Context, from, until entry.Offset, maxBytes int) ([]Entry, entry.Offset, error) {
	entries, next := e.fill(from, until, maxBytes)
	return entries, next, nil
}

func (*endless) NextUnacked(o entry.Offset) entry.Offset { return o }

func (*endless) Missing(dst []cursor.Range, r cursor.Range) []cursor.Range { return append(dst, r) }

// benchmarkCore has consumers take entries and acknowledge them one by one.
func benchmarkCore(b *testing.B, core Core, consumers int, span uint32) {
	b.Helper()
	src := &endless{frame: make([]byte, 1024), span: span}
	core.Loaded(0, 0, 1<<60, nil, epoch)
	for i := range consumers {
		_ = core.ConsumerAdded(Consumer{ID: ConsumerID(i + 1), Name: "c"}, epoch)
		core.Permits(ConsumerID(i+1), 1000)
	}
	var result []ReadEntry
	var acked []cursor.Range
	b.ReportAllocs()
	b.ResetTimer()
	for n := 0; n < b.N; {
		switch a := core.Next(epoch); a.Kind {
		case ActionRead:
			entries, next := src.fill(a.Read.From, a.Read.Until, a.Read.MaxBytes)
			result = result[:0]
			for _, e := range entries {
				result = append(result, ReadEntry{Entry: e})
			}
			core.EntriesRead(ReadResult{ID: a.Read.ID, Entries: result, Next: next}, epoch)
		case ActionSend:
			for i := range a.Deliveries {
				acked = append(acked[:0], a.Deliveries[i].Range())
				core.Acked(0, a.Consumer, acked...)
			}
			core.Permits(a.Consumer, uint32(len(a.Deliveries))*span)
			n += len(a.Deliveries)
		default:
			b.Fatalf("it waits for %s", a.Reason)
		}
	}
}

func BenchmarkExclusive(b *testing.B) { benchmarkCore(b, NewExclusive(DefaultConfig(false)), 1, 1) }

func BenchmarkShared(b *testing.B) { benchmarkCore(b, NewShared(DefaultConfig(true)), 10, 1) }

func BenchmarkSharedBatches(b *testing.B) { benchmarkCore(b, NewShared(DefaultConfig(true)), 10, 64) }

// BenchmarkConsumersLeave has ten consumers leave one after the other that hold 20,000 messages each, all mixed
// up, and the last one take them all again.
func BenchmarkConsumersLeave(b *testing.B) {
	const consumers, each = 10, 20_000
	src := &endless{frame: make([]byte, 10), span: 1}
	for b.Loop() {
		cfg := DefaultConfig(true)
		cfg.MaxUnackedPerConsumer, cfg.MaxUnackedPerSubscription = 0, 0
		core := NewShared(cfg)
		core.Loaded(0, 0, consumers*each, nil, epoch)
		rng := rand.New(rand.NewSource(1))
		for i := range consumers {
			_ = core.ConsumerAdded(Consumer{ID: ConsumerID(i + 1), Name: "c"}, epoch)
		}
		var result []ReadEntry
		settle := func() {
			for {
				a := core.Next(epoch)
				if a.Kind == ActionWait {
					return
				}
				if a.Kind == ActionRead {
					entries, next := src.fill(a.Read.From, a.Read.Until, a.Read.MaxBytes)
					result = result[:0]
					for _, e := range entries {
						result = append(result, ReadEntry{Entry: e})
					}
					core.EntriesRead(ReadResult{ID: a.Read.ID, Entries: result, Next: next}, epoch)
				}
			}
		}
		for range consumers * each {
			core.Permits(ConsumerID(1+rng.Intn(consumers)), 1) // so that each message goes to anyone
			settle()
		}
		for id := ConsumerID(2); id <= consumers; id++ {
			core.ConsumerRemoved(id, epoch)
		}
		core.Permits(1, consumers*each)
		settle()
		if s := core.Status(epoch); s.Reason != ReasonNoData || s.Unacked != consumers*each {
			b.Fatalf("%+v", s)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*consumers*each), "ns/message")
}

// countingSink acknowledges at once and says when it has had enough.
type countingSink struct {
	r     *Runner
	id    chan ConsumerID
	self  ConsumerID
	left  int
	done  chan struct{}
	acked []cursor.Range
}

func (s *countingSink) Active(bool) {}

func (s *countingSink) Send(deliveries []Delivery) {
	if s.self == 0 {
		s.self = <-s.id
	}
	for i := range deliveries {
		s.acked = append(s.acked[:0], deliveries[i].Range())
		s.r.Acked(0, s.self, s.acked...)
	}
	s.r.Permits(s.self, uint32(len(deliveries)))
	if s.left > 0 {
		if s.left -= len(deliveries); s.left <= 0 {
			close(s.done)
		}
	}
}

func BenchmarkRunner(b *testing.B) {
	src := &endless{frame: make([]byte, 1024), span: 1}
	r := New(NewExclusive(DefaultConfig(false)), Env{Source: src, Acks: src})
	r.Loaded(0, 0, 1<<60, nil)
	s := &countingSink{r: r, id: make(chan ConsumerID, 1), left: b.N, done: make(chan struct{})}
	b.ReportAllocs()
	b.ResetTimer()
	id, err := r.AddConsumer(Consumer{Name: "c"}, s)
	if err != nil {
		b.Fatal(err)
	}
	s.id <- id
	r.Permits(id, 1000)
	<-s.done
	r.Close()
}

// What was acknowledged before a move, and a move that was overtaken by a later one, come late: neither counts. What is
// given back before a move is not remembered as of after it.
func TestWhatIsOfAnotherGenerationDoesNotCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newTopic(t, 6)
		var remembered []cursor.Generation
		r := New(NewShared(DefaultConfig(true)), Env{
			Source: p, Acks: p, OnRetries: func(g cursor.Generation, _ []Retry) { remembered = append(remembered, g) },
		})
		defer r.Close()
		r.Loaded(p.cursor.Generation(), 0, 6, nil)
		var a sink
		id := mustAdd(t, r, Consumer{Name: "a"}, &a)
		r.Permits(id, 6)
		expect(t, &a, 0, 1, 2, 3, 4, 5)
		r.Nacked(id, time.Hour, cursor.Range{First: 5, End: 6})
		synctest.Wait()
		p.mu.Lock()
		_, _ = p.cursor.Ack(0, 6, cursor.Range{First: 0, End: 4})
		p.cursor.Seek(2)
		p.cursor.Seek(0)
		p.mu.Unlock()
		r.Seek(2, 0)
		r.Seek(1, 2)
		r.Acked(0, id, cursor.Range{First: 0, End: 4})
		r.Permits(id, 6)
		expect(t, &a, 0, 1, 2, 3, 4, 5)
		r.Nacked(id, 0, cursor.Range{First: 5, End: 6})
		synctest.Wait()
		if !slices.Equal(remembered, []cursor.Generation{0, 2}) {
			t.Fatalf("remembered under %v", remembered)
		}
	})
}

// What was given back just before the end is told of: another type of subscription goes on with it.
func TestWhatIsGivenBackIsToldOfBeforeTheEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for range 100 {
			p := newTopic(t, 6)
			told := 0
			r := New(NewExclusive(DefaultConfig(false)), Env{
				Source: p, Acks: p, OnRetries: func(_ cursor.Generation, rs []Retry) { told += len(rs) },
			})
			r.Loaded(0, 0, 6, nil)
			var a sink
			id := mustAdd(t, r, Consumer{Name: "a"}, &a)
			r.Permits(id, 6)
			expect(t, &a, 0, 1, 2, 3, 4, 5)
			r.RemoveConsumer(id)
			r.Close()
			if told != 1 {
				t.Fatalf("told of %d ranges", told)
			}
		}
	})
}
