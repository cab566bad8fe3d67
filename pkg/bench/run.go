package bench

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Options say how a run is watched. None changes the load.
type Options struct {
	// Processes are those whose cost is measured beside this one's.
	Processes []Process
	// Self is what this process is called. Default: "bench".
	Self string
	// Metrics are URLs of bookies' /metrics, whose syncs are counted.
	Metrics []string
	// ProbeDir, when not empty, is a directory in which 4 KiB are written and synced every few milliseconds meanwhile.
	ProbeDir string
	// Progress, when not nil, is given each point of the series at once.
	Progress func(Point)
	// Say, when not nil, is told what the run is about to do: "create 3 topics".
	Say func(string)
	// Patience bounds each call that sets up or takes down, and how long nothing may move while an end is waited for.
	// Default: 30 s.
	Patience time.Duration
	// Keep leaves the topics.
	Keep bool
}

// run is one, from creating topics to deleting them.
//
// Three kinds of goroutines do the work: a producer each (producer.go), woken by one pacer at a given rate; a consumer each
// (consumer.go); and an observer, who takes a point each second (observe.go). Run itself goes from phase to phase and only
// waits. Everything that they share is atomic, sharded, or a tally with a lock of its own.
type run struct {
	driver   Driver
	scenario Scenario
	options  Options
	id       uint64
	clock    clock
	schedule schedule
	keys     []string

	topics    []string
	created   []bool
	producers []*producer
	consumers []*consumer

	published, received *recorder
	delivered           [][]tally // by subscription and producer
	backlog             []uint64  // how many of each producer's messages are the backlog; set before consumers start
	backlogAt           atomic.Int64
	strays              strays
	failures            failures
	lateness            *recorderShard

	die       context.CancelCauseFunc // gives up messages that have no outcome
	stopAt    atomic.Int64            // when publishing ended; 0: it goes on
	stopped   chan struct{}
	working   sync.WaitGroup // producers and pacer
	reading   sync.WaitGroup // consumers
	endPacing context.CancelFunc
	endReads  context.CancelFunc // nil: nobody reads
	deaf      atomic.Bool        // a consumer could not go on
	broken    chan error         // capacity 1: why the run cannot go on
	observer  *observer
	result    Result
}

// Run puts a scenario on a broker and measures. It returns a result also with an error, as far as it got: when ctx ended, it
// stops publishing, waits for what is under way, and tells what was measured until then. What the result itself shows, such as
// messages that failed or are missing, is [Result.Err]. There is no result if nothing was tried.
func Run(ctx context.Context, driver Driver, scenario Scenario, options Options) (*Result, error) {
	scenario = scenario.WithDefaults()
	if err := scenario.Validate(); err != nil {
		return nil, fmt.Errorf("run scenario: %w", err)
	}
	if options.Patience <= 0 {
		options.Patience = 30 * time.Second
	}
	if options.Self == "" {
		options.Self = "bench"
	}
	if options.Say == nil {
		options.Say = func(string) {}
	}
	r := newRun(driver, scenario, options)
	defer func() { r.die(nil) }()
	var err error
	if r.observer, err = newObserver(ctx, r); err != nil {
		return nil, err
	}
	if err = r.setUp(ctx); err == nil {
		err = r.measure(ctx)
	}
	r.observer.close(&r.result)
	down := r.takeDown(ctx)
	if err == nil {
		return &r.result, down
	}
	r.result.Interrupted = strings.ReplaceAll(err.Error(), "\n", "; ")
	if down != nil { // it failed for the same reason, most likely
		r.say("not everything was closed and deleted: %s", strings.ReplaceAll(down.Error(), "\n", "; "))
	}
	return &r.result, err
}

func newRun(driver Driver, scenario Scenario, options Options) *run {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	producers := scenario.Topics * scenario.Producers
	r := &run{
		driver: driver, scenario: scenario, options: options, id: binary.LittleEndian.Uint64(id[:]),
		clock: clock{time.Now()}, keys: keyTable(scenario),
		published: newRecorder(producers), received: newRecorder(scenario.Topics * max(scenario.Subscriptions, 0) * scenario.Consumers),
		delivered: make([][]tally, max(scenario.Subscriptions, 0)), backlog: make([]uint64, producers),
		lateness: &recorderShard{interval: newHistogram()},
		die:      func(error) {}, stopped: make(chan struct{}), broken: make(chan error, 1),
	}
	for i := range r.delivered {
		r.delivered[i] = make([]tally, producers)
	}
	for i := range scenario.Topics {
		r.topics = append(r.topics, "bench-"+hex.EncodeToString(id[:4])+"-"+strconv.Itoa(i))
	}
	r.result = Result{Driver: driver.Name(), Scenario: scenario, Started: time.Now(), Machine: thisMachine()}
	return r
}

func thisMachine() Machine {
	m := Machine{CPUs: runtime.NumCPU(), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version()}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		first, _, _ := strings.Cut(string(text), " ")
		m.Load, _ = strconv.ParseFloat(first, 64)
	}
	return m
}

// setUpAtOnce is how many topics, consumers or producers are made side by side.
const setUpAtOnce = 32

// each calls f for 0 to n-1, some at once, each bounded by patience. The first error ends it.
func (r *run) each(ctx context.Context, n int, f func(ctx context.Context, i int) error) (seconds float64, err error) {
	began := time.Now()
	group, together := errgroup.WithContext(ctx)
	group.SetLimit(setUpAtOnce)
	for i := range n {
		if together.Err() != nil {
			break
		}
		group.Go(func() error {
			bounded, cancel := context.WithTimeout(together, r.options.Patience)
			defer cancel()
			return f(bounded, i)
		})
	}
	err = group.Wait()
	if err == nil {
		err = ctx.Err()
	}
	return time.Since(began).Seconds(), err
}

// setUp makes topics, subscribes, and opens producers, in this order: what is published is kept for every subscription.
func (r *run) setUp(ctx context.Context) (err error) {
	s := r.scenario
	r.say("create %s", plural(len(r.topics), "topic"))
	r.created = make([]bool, len(r.topics))
	r.result.Setup.TopicsSeconds, err = r.each(ctx, len(r.topics), func(ctx context.Context, i int) error {
		if err := r.driver.CreateTopic(ctx, r.topics[i], s.Partitions); err != nil {
			return fmt.Errorf("create topic %s: %w", r.topics[i], err)
		}
		r.created[i] = true
		return nil
	})
	if err != nil {
		return err
	}
	consumers := len(r.topics) * max(s.Subscriptions, 0) * s.Consumers
	r.say("open %s and %s", plural(consumers, "consumer"), plural(len(r.topics)*s.Producers, "producer"))
	r.consumers = make([]*consumer, consumers)
	r.result.Setup.ConsumersSeconds, err = r.each(ctx, consumers, func(ctx context.Context, i int) error {
		c := &consumer{run: r, topic: i / s.Consumers / s.Subscriptions, subscription: i / s.Consumers % s.Subscriptions, latency: r.received.shard(i)}
		cfg := ConsumerConfig{Subscription: "sub-" + strconv.Itoa(c.subscription), Shared: s.Consumers > 1}
		var err error
		if c.driver, err = r.driver.Subscribe(ctx, r.topics[c.topic], cfg); err != nil {
			return fmt.Errorf("subscribe to %s: %w", r.topics[c.topic], err)
		}
		r.consumers[i] = c
		return nil
	})
	if err != nil {
		return err
	}
	r.producers = make([]*producer, len(r.topics)*s.Producers)
	r.result.Setup.ProducersSeconds, err = r.each(ctx, len(r.producers), func(ctx context.Context, i int) error {
		p := newProducer(r, i)
		topic, err := r.topics[i/s.Producers], error(nil)
		p.driver, err = r.driver.OpenProducer(ctx, topic, ProducerConfig{
			Batching: s.Batching, Ack: s.Ack, InFlight: s.InFlight, Size: s.Size, Done: p.done,
		})
		if err != nil {
			return fmt.Errorf("open producer on %s: %w", topic, err)
		}
		r.producers[i] = p
		return nil
	})
	return err
}

// takeDown closes and deletes what there is.
func (r *run) takeDown(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	_, err := r.each(ctx, len(r.producers), func(ctx context.Context, i int) error {
		if p := r.producers[i]; p != nil {
			if err := p.driver.Close(ctx); err != nil && p.failed.Load() == 0 { // those failures are told already
				return fmt.Errorf("close producer on %s: %w", r.topics[i/r.scenario.Producers], err)
			}
		}
		return nil
	})
	errs = append(errs, err)
	_, err = r.each(ctx, len(r.consumers), func(ctx context.Context, i int) error {
		if c := r.consumers[i]; c != nil {
			if err := c.driver.Close(ctx); err != nil {
				return fmt.Errorf("close consumer of %s: %w", r.topics[c.topic], err)
			}
		}
		return nil
	})
	errs = append(errs, err)
	if r.options.Keep {
		return errors.Join(errs...)
	}
	r.say("delete %s", plural(len(r.topics), "topic"))
	_, err = r.each(ctx, len(r.created), func(ctx context.Context, i int) error {
		if r.created[i] {
			if err := r.driver.DeleteTopic(ctx, r.topics[i]); err != nil {
				return fmt.Errorf("delete topic %s: %w", r.topics[i], err)
			}
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

func (r *run) say(format string, args ...any) { r.options.Say(fmt.Sprintf(format, args...)) }

func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return strconv.Itoa(n) + " " + thing + "s"
}
