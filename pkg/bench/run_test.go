package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// brief is a scenario that is over soon.
func brief() Scenario { return Scenario{WarmUp: -1, Duration: 300 * time.Millisecond, InFlight: 100} }

// mustRun runs a scenario, for longer and longer until enough has happened: a machine may be too busy to get anywhere at first.
func mustRun(t *testing.T, d *memoryDriver, s Scenario, o Options, enough func(*Result) bool) *Result {
	t.Helper()
	for {
		r, err := Run(t.Context(), d, s, o)
		if err != nil {
			t.Fatal(err)
		}
		if len(d.topics) > 0 {
			t.Errorf("topics were left: %v", d.topics)
		}
		if enough(r) || s.Duration > time.Minute {
			return r
		}
		s.Duration *= 4
	}
}

// measured tells whether messages were due in the first phase.
func measured(r *Result) bool { return r.Phases[0].Publish != nil }

func TestEverythingThatWasAcknowledgedIsReceived(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]Scenario{
		"as fast as possible": {},
		"at a rate":           {Rate: 20_000},
		"many":                {Topics: 3, Producers: 2, Subscriptions: 2, Consumers: 3, Keys: KeysZipf, Rate: 5_000},
		"synchronous":         {InFlight: 1, Producers: 8},
		"nobody listens":      {Subscriptions: -1},
		"warmed up":           {WarmUp: 50 * time.Millisecond},
		"backlog":             {Backlog: 20_000, Subscriptions: 2},
		"live backlog":        {Backlog: 20_000, Live: true, Rate: 100_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := brief()
			s.Duration = base.Duration
			if s.WarmUp == 0 {
				s.WarmUp = base.WarmUp
			}
			if s.InFlight == 0 {
				s.InFlight = base.InFlight
			}
			r := mustRun(t, newMemoryDriver(), s, Options{}, measured)
			if err := r.Err(); err != nil {
				t.Fatal(err)
			}
			s = r.Scenario
			v := r.Verified
			if v.Sent != v.Acknowledged || v.Expected != v.Acknowledged*uint64(max(s.Subscriptions, 0)) || v.Received != v.Expected || v.Missing != 0 {
				t.Fatalf("verified %+v", v)
			}
			phases := []string{PhaseSteady}
			if s.Backlog > 0 {
				phases = []string{PhaseBuild, PhaseCatchUp}
			}
			for i, name := range phases {
				p := r.Phases[i]
				if p.Name != name || p.Seconds <= 0 || len(p.Processes) != 1 {
					t.Fatalf("phase %d is %+v, want %s", i, p, name)
				}
				if s.Live && name == PhaseCatchUp {
					continue // it may be over before a message was due
				}
				if published := name != PhaseCatchUp; published != (p.Publish != nil) || published && p.Publish.Count == 0 {
					t.Errorf("%s: publish latencies %+v", name, p.Publish)
				}
				if both := s.Subscriptions > 0 && name == PhaseSteady; both != (p.EndToEnd != nil) {
					t.Errorf("%s: end-to-end latencies %+v", name, p.EndToEnd)
				}
			}
			if catchUp := r.Phase(PhaseCatchUp); catchUp != nil && catchUp.Received.Messages < uint64(s.Backlog)*uint64(s.Subscriptions) {
				t.Errorf("caught up with %d messages of %d", catchUp.Received.Messages, s.Backlog)
			}
		})
	}
}

// Messages that were due while the broker stood still count with all the time that they waited, although a synchronous
// publisher had only one of them under way.
func TestAStallDelaysEveryMessageThatWasDue(t *testing.T) {
	t.Parallel()
	const stall = 400 * time.Millisecond
	d := newMemoryDriver()
	var once sync.Once
	d.fate = func(number uint64) error {
		if number == 100 {
			once.Do(func() { <-time.After(stall) })
		}
		return nil
	}
	s := Scenario{Rate: 1000, InFlight: 1, WarmUp: -1, Duration: time.Second}
	r := mustRun(t, d, s, Options{}, measured)
	// 400 messages were due in the stall, and half of them waited for more than half of it. Those that were never sent on a
	// machine that is too slow would have waited, too.
	late := uint64(0)
	for _, p := range r.Phases[0].Publish.Distribution {
		if p.Ms < 200 {
			late = uint64(float64(r.Phases[0].Publish.Count) * (100 - p.Percent) / 100)
		}
	}
	if late += r.Verified.Unsent; late < 150 {
		t.Fatalf("%d messages waited for half of the stall or longer; %+v", late, r.Phases[0].Publish)
	}
}

// What was due and could not be sent is told.
func TestARateThatIsTooHighIsTold(t *testing.T) {
	t.Parallel()
	d := newMemoryDriver()
	d.fate = func(uint64) error { <-time.After(time.Millisecond); return nil }
	s := brief()
	s.Rate = 1_000_000
	r := mustRun(t, d, s, Options{}, measured)
	if v := r.Verified; v.Unsent < 50_000 || r.Err() != nil {
		t.Fatalf("verified %+v: %v", v, r.Err())
	}
}

func TestWhatIsWrongIsTold(t *testing.T) {
	t.Parallel()
	refused := errors.New("the disk is full")
	few := func(number uint64) bool { return number%10 == 3 }
	for want, spoilIt := range map[string]func(*memoryDriver){
		"messages failed: the disk is full": func(d *memoryDriver) {
			d.fate = func(n uint64) error {
				if few(n) {
					return refused
				}
				return nil
			}
		},
		"acknowledged messages were not received": func(d *memoryDriver) {
			d.pass = func(n uint64) delivery {
				if few(n) {
					return lose
				}
				return deliver
			}
		},
		"that were not published to their topic": func(d *memoryDriver) {
			d.pass = func(n uint64) delivery {
				if few(n) {
					return spoil
				}
				return deliver
			}
		},
		"nothing was acknowledged": func(d *memoryDriver) { d.fate = func(uint64) error { return refused } },
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			d := newMemoryDriver()
			spoilIt(d)
			s := brief()
			s.Rate = 1000
			r := mustRun(t, d, s, Options{Patience: time.Second}, func(r *Result) bool { return r.Verified.Sent > 10 })
			if err := r.Err(); err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("error %v, want %q; %+v", err, want, r.Verified)
			}
		})
	}
}

func TestWhatComesTwiceIsCountedOnce(t *testing.T) {
	t.Parallel()
	d := newMemoryDriver()
	d.pass = func(uint64) delivery { return repeat }
	r := mustRun(t, d, brief(), Options{}, measured)
	if v := r.Verified; v.Received != v.Expected || v.Duplicates == 0 || r.Err() != nil {
		t.Fatalf("verified %+v: %v", v, r.Err())
	}
}

func TestAConsumerThatFailsEndsTheRun(t *testing.T) {
	t.Parallel()
	d := newMemoryDriver()
	gone := errors.New("the topic is gone")
	d.consumed = func(uint64) error { return gone }
	s := brief()
	s.Duration = time.Hour
	r, err := Run(t.Context(), d, s, Options{Patience: time.Hour}) // what it does not receive any more is not waited for
	if !errors.Is(err, gone) || r.Interrupted == "" || r.Verified.Missing == 0 || len(d.topics) > 0 {
		t.Fatalf("error %v; %+v", err, r)
	}
}

// What is not of the run, of the topic, whole, or was never sent is nobody's.
func TestForeignMessages(t *testing.T) {
	t.Parallel()
	r := newRun(newMemoryDriver(), Scenario{Topics: 2, Producers: 2, Size: 100}.WithDefaults(), Options{})
	for i := range 4 {
		r.producers = append(r.producers, newProducer(r, i))
	}
	r.producers[2].sent.Store(6)
	c := &consumer{run: r, topic: 1, latency: r.received.shard(0)}
	good := header{run: r.id, producer: 2, number: 5}
	value := func(size int, h header) []byte {
		b := make([]byte, size)
		h.put(b)
		return b
	}
	for name, b := range map[string][]byte{
		"of another run":    value(100, header{run: r.id + 1, producer: 2, number: 5}),
		"of another topic":  value(100, header{run: r.id, producer: 1, number: 5}),
		"of nobody":         value(100, header{run: r.id, producer: 9, number: 5}),
		"not sent yet":      value(100, header{run: r.id, producer: 2, number: 6}),
		"far ahead":         value(100, header{run: r.id, producer: 2, number: 1 << 60}),
		"too long":          value(101, good),
		"too short":         value(99, good),
		"without a header":  make([]byte, 3),
		"without a content": nil,
	} {
		before := r.strays.foreign.Load()
		c.received(b)
		if r.strays.foreign.Load() != before+1 || r.received.events() != 0 {
			t.Errorf("a message %s was received", name)
		}
	}
	c.received(value(100, good))
	c.received(value(100, good))
	if r.received.events() != 1 || r.strays.duplicates.Load() != 1 {
		t.Errorf("received %d, %d twice", r.received.events(), r.strays.duplicates.Load())
	}
}

// A broker that stops answering is given up, and its messages have an outcome by that.
func TestSilenceIsGivenUp(t *testing.T) {
	t.Parallel()
	d := newMemoryDriver()
	silent, answered := make(chan struct{}), make(chan struct{})
	var once sync.Once
	d.fate = func(n uint64) error {
		if n == 50 {
			once.Do(func() { close(silent) })
			<-answered
		}
		return nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-silent
		cancel()
	}()
	s := brief()
	s.Duration = time.Hour
	d.closing = sync.OnceFunc(func() { close(answered) })
	r, err := Run(ctx, d, s, Options{Patience: 50 * time.Millisecond})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nothing was acknowledged or received for 50ms") {
		t.Fatalf("error %v", err)
	}
	if v := r.Verified; v.Unsettled == 0 || r.Err() == nil {
		t.Fatalf("verified %+v", v)
	}
}

// Ctrl-C ends publishing; what is under way comes to its end, and what was measured is told.
func TestAnInterruptedRunTellsWhatItMeasured(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	d := newMemoryDriver()
	s := brief()
	s.Duration = time.Hour
	points := 0
	r, err := Run(ctx, d, s, Options{Progress: func(p Point) {
		if p.Phase == PhaseSteady && p.PublishedPerSecond > 0 {
			points++
		}
		if points == 2 { // the first may be of before the phase
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
	if v := r.Verified; r.Err() != nil || v.Missing != 0 || v.Sent == 0 || r.Phases[0].Published.Messages == 0 || len(r.Series) == 0 {
		t.Fatalf("%+v: %v", r.Verified, r.Err())
	}
	if len(d.topics) > 0 {
		t.Fatal("topics were left")
	}
	// While a backlog is built, nobody receives yet: that is no loss.
	ctx, cancel = context.WithCancel(t.Context())
	s.Backlog, s.Rate = math.MaxInt64, 1000
	r, err = Run(ctx, newMemoryDriver(), s, Options{Progress: func(Point) { cancel() }})
	if !errors.Is(err, context.Canceled) || r.Err() != nil || r.Verified.Expected != 0 {
		t.Fatalf("%v, %v; %+v", err, r.Err(), r.Verified)
	}
}

func TestWhatCannotBeSetUp(t *testing.T) {
	t.Parallel()
	d := newMemoryDriver()
	s := brief()
	s.Ack = AckOne
	if _, err := Run(t.Context(), d, s, Options{}); !errors.Is(err, ErrUnsupported) || len(d.topics) > 0 {
		t.Fatalf("%v; topics %v", err, d.topics)
	}
	s.Ack = "two"
	if _, err := Run(t.Context(), d, s, Options{}); err == nil {
		t.Fatal("a scenario that is wrong was run")
	}
	for _, o := range []Options{
		{Processes: []Process{{Name: "ghost", PID: 1 << 30}}},
		{Metrics: []string{"http://127.0.0.1:1/metrics"}},
		{ProbeDir: t.TempDir() + "/none"},
	} {
		if _, err := Run(t.Context(), d, brief(), o); err == nil || len(d.topics) > 0 {
			t.Errorf("%+v: %v; topics %v", o, err, d.topics)
		}
	}
}

func TestDiskProbeRunsBesideTheLoad(t *testing.T) {
	t.Parallel()
	r := mustRun(t, newMemoryDriver(), brief(), Options{ProbeDir: t.TempDir()}, func(r *Result) bool { return r.Phases[0].DiskProbe != nil })
	if p := r.Phases[0].DiskProbe; p == nil || p.Count == 0 {
		t.Fatalf("probe %+v", p)
	}
}

func TestScheduleIsEven(t *testing.T) {
	t.Parallel()
	s := schedule{start: 1000, interval: 1e9 / 3_000_000.0, producers: 7}
	for k := range uint64(10_000) {
		due := s.dueOf(k)
		if s.upTo(due) < k+1 || s.upTo(due-1) > k {
			t.Fatalf("message %d is due at %d: %d up to then, %d before", k, due, s.upTo(due), s.upTo(due-1))
		}
		if i, n := k%7, k/7; s.due(i, n) != due {
			t.Fatalf("message %d of producer %d is due at %d, want %d", n, i, s.due(i, n), due)
		}
	}
	for _, then := range []int64{0, 1000, 1001, 5000, 1_000_000} {
		sum := uint64(0)
		for i := range s.producers {
			n := s.dueBefore(i, then)
			sum += n
			if n > 0 && s.due(i, n-1) >= then || s.due(i, n) < then {
				t.Fatalf("%d messages of producer %d are due before %d", n, i, then)
			}
		}
		if want := s.upTo(then - 1); sum != want {
			t.Fatalf("%d are due before %d, want %d", sum, then, want)
		}
	}
}

func TestSleeperIsClosed(t *testing.T) {
	t.Parallel()
	s, err := newSleeper()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.sleep(time.Microsecond); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- s.sleep(time.Hour) }()
	s.close()
	if err := <-ended; err == nil {
		t.Fatal("an hour has passed")
	}
}

// Publishing and receiving allocate nothing for a message, so that what is measured is not this package.
func BenchmarkEngine(b *testing.B) {
	for _, producers := range []int{1, 8} {
		b.Run(fmt.Sprintf("producers=%d", producers), func(b *testing.B) {
			b.ReportAllocs()
			d := &nullDriver{left: make(chan struct{}), want: int64(b.N)}
			ctx, cancel := context.WithCancel(b.Context())
			go func() {
				<-d.left
				cancel()
			}()
			r, err := Run(ctx, d, Scenario{Producers: producers, WarmUp: -1, Duration: time.Hour}, Options{})
			if !errors.Is(err, context.Canceled) || r.Err() != nil {
				b.Fatal(err, r.Err())
			}
			b.ReportMetric(float64(r.Verified.Sent)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}

// nullDriver acknowledges and delivers at once, by the goroutine that publishes.
type nullDriver struct {
	mu       sync.Mutex
	received func([]byte)
	count    atomic.Int64
	want     int64
	left     chan struct{}
}

func (d *nullDriver) Name() string                                   { return "null" }
func (d *nullDriver) CreateTopic(context.Context, string, int) error { return nil }
func (d *nullDriver) DeleteTopic(context.Context, string) error      { return nil }
func (d *nullDriver) Close(context.Context) error                    { return nil }

func (d *nullDriver) Subscribe(context.Context, string, ConsumerConfig) (Consumer, error) {
	return nullConsumer{d}, nil
}

func (d *nullDriver) OpenProducer(_ context.Context, _ string, cfg ProducerConfig) (Producer, error) {
	return nullProducer{d, cfg.Done}, nil
}

type nullConsumer struct{ d *nullDriver }

func (c nullConsumer) Consume(ctx context.Context, received func([]byte)) error {
	c.d.mu.Lock()
	c.d.received = received
	c.d.mu.Unlock()
	<-ctx.Done()
	return nil
}

func (c nullConsumer) Close(context.Context) error { return nil }

type nullProducer struct {
	d    *nullDriver
	done func(*Message, error)
}

func (p nullProducer) Publish(_ context.Context, m *Message) {
	for {
		p.d.mu.Lock()
		if p.d.received != nil {
			p.d.received(m.Value)
			p.d.mu.Unlock()
			break
		}
		p.d.mu.Unlock()
	}
	p.done(m, nil)
	if p.d.count.Add(1) == p.d.want {
		close(p.d.left)
	}
}

func (p nullProducer) Close(context.Context) error { return nil }
