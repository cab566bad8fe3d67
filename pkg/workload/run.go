package workload

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Config says what load to put on. Only Topic is required.
type Config struct {
	// Topic may be partitioned. It should hold nothing but this run's messages: others count as phantoms.
	Topic string
	// Producers publish side by side, each its own numbers; 0 means 1.
	Producers int
	// Messages is how many each producer publishes; 0 means until [Run.StopProducing].
	Messages uint64
	// Rate bounds the messages a second of all producers together; 0 is as fast as it goes.
	Rate float64
	// Size of a message in bytes; at least, and by default, [MinSize].
	Size int
	// Dedup makes the topic keep each message once.
	Dedup bool
	// Timeout is a message's whole life, retries included; 0 means a minute.
	Timeout time.Duration
	// Attempt, when not 0, has each producer do what an application does that cannot know the outcome of what it
	// published: after a message was not acknowledged for so long, and now and then without a reason, it is replaced by
	// one of the same name, which publishes again what is in doubt and some of what is not, under the same sequence ids.
	// It wants Dedup, and a topic without partitions.
	Attempt time.Duration
	// ProducerOptions are the SDK's, beside what the above needs.
	ProducerOptions []client.ProducerOption

	// Subscription is read along, each message acknowledged; empty: nothing is read until [Run.Reread].
	Subscription string
	// Type of the subscription.
	Type client.SubscriptionType
	// Consumers of the subscription; 0 means 1.
	Consumers int
}

func (c Config) withDefaults() Config {
	c.Producers = max(c.Producers, 1)
	c.Consumers = max(c.Consumers, 1)
	c.Size = max(c.Size, MinSize)
	if c.Timeout == 0 {
		c.Timeout = time.Minute
	}
	return c
}

// Run is a load in progress. Its methods are safe for concurrent use.
//
// The book, the reading and the clock of acknowledgements are pure; one lock guards them, held for single events. The
// goroutines, of producers, of their receipts, and of consumers, end before Wait returns.
type Run struct {
	client *client.Client
	cfg    Config

	cancel    context.CancelFunc
	producing context.Context //nolint:containedctx // ends with StopProducing
	stop      context.CancelFunc
	published sync.WaitGroup // producers and their receipts
	reading   sync.WaitGroup // consumers
	producers []*client.Producer
	names     []string // of producers that are replaced, in place of the former
	consumers []*client.Consumer

	mu        sync.Mutex
	book      *Book
	read      *Reading
	stretches Stretches // without an acknowledgement
	silences  Stretches // without the delivery of something new
	delays    *Delays
	acked     uint64
	received  uint64
	failures  []error
	failedAt  time.Time            // when a message failed last
	lastWords map[int]entry.Offset // once the run has ended
	ended     chan struct{}        // closed when the last words are said, or never will be
	complete  chan struct{}        // closed when the reading is
	waiters   []waiter
}

// waiter waits until a count is reached.
type waiter struct {
	count *uint64
	n     uint64
	done  chan struct{}
}

// receiptWindow bounds the receipts that a producer's settler has yet to look at; the SDK bounds what is pending.
const receiptWindow = 10_000

// Start opens producers and consumers, within ctx, and begins. The run ends early when ctx does. The caller waits with
// [Run.Wait], also after a failure.
func Start(ctx context.Context, c *client.Client, cfg Config) (*Run, error) {
	cfg = cfg.withDefaults()
	r := &Run{
		client: c, cfg: cfg, complete: make(chan struct{}), ended: make(chan struct{}), delays: NewDelays(cfg.Producers),
		book: NewBook(rand.Uint64(), cfg.Producers), //nolint:gosec // tells runs apart, guards nothing
	}
	r.read = r.book.NewReading(cfg.Type != client.Shared)
	living, cancel := context.WithCancel(ctx)
	r.cancel = cancel
	r.producing, r.stop = context.WithCancel(living)
	if err := r.open(ctx); err != nil {
		r.close(ctx)
		cancel()
		return nil, err
	}
	for _, s := range r.consumers {
		r.reading.Go(func() { r.consume(living, s) })
	}
	limit := rate.Inf
	if cfg.Rate > 0 {
		limit = rate.Limit(cfg.Rate)
	}
	limiter := rate.NewLimiter(limit, max(1, int(cfg.Rate/200))) // a burst is what falls due within 5 ms
	for i := range r.names {
		r.published.Go(func() { r.attempts(living, uint32(i), limiter) })
	}
	for i, p := range r.producers {
		receipts := make(chan sentMessage, receiptWindow)
		r.published.Go(func() {
			defer close(receipts)
			r.publish(living, uint32(i), p, limiter, receipts)
		})
		r.published.Go(func() {
			for s := range receipts {
				r.settle(s)
			}
		})
	}
	return r, nil
}

func (r *Run) open(ctx context.Context) error {
	if r.cfg.Subscription != "" {
		for range r.cfg.Consumers {
			s, err := r.client.Subscribe(ctx, r.cfg.Topic, r.cfg.Subscription, client.WithType(r.cfg.Type), client.WithStart(client.Earliest()))
			if err != nil {
				return fmt.Errorf("start workload: %w", err)
			}
			r.consumers = append(r.consumers, s)
		}
	}
	for i := range r.cfg.Producers {
		name := fmt.Sprintf("load-%x-%d", r.book.run, i)
		if r.cfg.Attempt > 0 {
			r.names = append(r.names, name)
			continue
		}
		p, err := r.producer(ctx, name)
		if err != nil {
			return fmt.Errorf("start workload: %w", err)
		}
		r.producers = append(r.producers, p)
	}
	return nil
}

func (r *Run) producer(ctx context.Context, name string) (*client.Producer, error) {
	options := []client.ProducerOption{client.WithProducerName(name)}
	if r.cfg.Dedup {
		options = append(options, client.WithDedup())
	}
	return r.client.Producer(ctx, r.cfg.Topic, append(options, r.cfg.ProducerOptions...)...)
}

type sentMessage struct {
	tag     Tag
	receipt *client.Receipt
	end     context.CancelFunc
}

func (r *Run) publish(ctx context.Context, number uint32, p *client.Producer, limiter *rate.Limiter, receipts chan<- sentMessage) {
	for n := uint64(0); r.cfg.Messages == 0 || n < r.cfg.Messages; n++ {
		if limiter.Wait(r.producing) != nil { //nolint:contextcheck // it is ctx's child
			return
		}
		r.mu.Lock()
		tag := r.book.Send(number)
		r.mu.Unlock()
		life, end := context.WithTimeout(ctx, r.cfg.Timeout)
		receipt := p.PublishAsync(life, &client.Message{Value: AppendBody(nil, tag, r.cfg.Size)})
		receipts <- sentMessage{tag, receipt, end}
	}
}

func (r *Run) settle(s sentMessage) {
	<-s.receipt.Done() // within its life
	id, err := s.receipt.Wait(context.Background())
	s.end()
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil:
		r.acknowledged(s.tag, Receipt{Partition: id.Partition, Offset: id.Offset, Known: !s.receipt.Duplicate()})
	case client.OutcomeUnknown(err):
		r.book.Settle(s.tag, Unknown, Receipt{})
		r.failedAt = time.Now()
		r.failed(err)
	default:
		r.book.Settle(s.tag, Refused, Receipt{})
		r.failedAt = time.Now()
		r.failed(err)
	}
}

// acknowledged notes an acknowledgement. The lock is held.
func (r *Run) acknowledged(t Tag, where Receipt) {
	now := time.Now()
	r.book.Settle(t, Acknowledged, where)
	r.stretches.Event(now)
	r.delays.Acknowledged(t, now)
	r.acked++
	r.wake()
}

// failed keeps the first few errors, for people. The lock is held.
func (r *Run) failed(err error) {
	if len(r.failures) < maxExamples {
		r.failures = append(r.failures, err)
	}
	var e *client.Error
	if errors.As(err, &e) && !e.Retryable && e.Code != client.CodeInvalid && e.Code != client.CodeOutcomeUnknown {
		r.stop() // the producer is at its end: the rest would only fail too
	}
}

func (r *Run) consume(ctx context.Context, s *client.Consumer) {
	for d, err := range s.Messages(ctx) {
		if err != nil {
			var e *client.Error
			if closed := errors.As(err, &e) && e.Code == client.CodeClosed; ctx.Err() == nil && !closed {
				r.mu.Lock()
				r.failed(err)
				r.mu.Unlock()
			}
			continue // it ends by itself where it cannot go on
		}
		r.mu.Lock()
		if t := r.took(r.read, d); t.Run == r.book.run {
			if now := time.Now(); r.delays.Delivered(t, now) {
				r.silences.Event(now)
			}
		}
		r.received++
		r.wake()
		r.checkComplete()
		r.mu.Unlock()
		d.AckAsync()
	}
}

// took notes what was read. The lock is held.
func (r *Run) took(reading *Reading, d *client.Delivery) Tag {
	tag, err := ParseBody(d.Value)
	if err != nil {
		reading.Foreign(d.ID.Partition, d.ID.Offset, err)
		return Tag{}
	}
	reading.Read(tag, d.ID.Partition, d.ID.Offset)
	return tag
}

// checkComplete closes complete once everything was read. The lock is held.
func (r *Run) checkComplete() {
	if r.lastWords == nil || !r.read.Complete(r.lastWords) {
		return
	}
	select {
	case <-r.complete:
	default:
		close(r.complete)
	}
}

// wake wakes whoever waits for a count that is reached. The lock is held.
func (r *Run) wake() {
	kept := r.waiters[:0]
	for _, w := range r.waiters {
		if *w.count < w.n {
			kept = append(kept, w)
			continue
		}
		close(w.done)
	}
	r.waiters = kept
}

func (r *Run) await(ctx context.Context, count *uint64, n uint64) error {
	done := make(chan struct{})
	r.mu.Lock()
	r.waiters = append(r.waiters, waiter{count, n, done})
	r.wake()
	r.mu.Unlock()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for message %d: %w%s", n, ctx.Err(), r.trouble())
	}
}

// trouble tells the first errors met.
func (r *Run) trouble() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.failures) == 0 {
		return ""
	}
	return fmt.Sprintf(" (met: %v)", errors.Join(r.failures...))
}

// AwaitAcknowledged waits until so many messages are acknowledged.
func (r *Run) AwaitAcknowledged(ctx context.Context, n uint64) error {
	return r.await(ctx, &r.acked, n)
}

// AwaitReceived waits until so many messages were received, repetitions included.
func (r *Run) AwaitReceived(ctx context.Context, n uint64) error { return r.await(ctx, &r.received, n) }

// Counts tells how far the run is: messages sent, acknowledged, and received, repetitions included.
func (r *Run) Counts() (sent, acknowledged, received uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.book.Sent(), r.acked, r.received
}

// Failures returns the first few errors of messages that were not acknowledged, and of consumers.
func (r *Run) Failures() []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]error(nil), r.failures...)
}

// Watch begins to measure how long publishing stands still. It means something while a producer publishes.
func (r *Run) Watch() *Watch {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Watch{r, &r.stretches, r.stretches.Watch(time.Now())}
}

// WatchDeliveries begins to measure how long nothing new is delivered. It means something while a producer publishes and the
// subscription is read along.
func (r *Run) WatchDeliveries() *Watch {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Watch{r, &r.silences, r.silences.Watch(time.Now())}
}

// Watch measures the longest stretch without an acknowledgement, or without a delivery.
type Watch struct {
	run     *Run
	of      *Stretches
	stretch *Stretch
}

// Stop ends measuring and returns the longest stretch since the watch began. One that has not ended counts if some message
// waits for its acknowledgement, or until the last one that waited has failed.
func (w *Watch) Stop() time.Duration {
	w.run.mu.Lock()
	defer w.run.mu.Unlock()
	now := time.Now()
	if w.run.book.Unsettled() == 0 {
		now = w.stretch.from
		if w.run.failedAt.After(now) {
			now = w.run.failedAt
		}
	}
	return w.of.Stop(w.stretch, now)
}

// Longest returns when the longest stretch began, and how long it was. What has not ended does not count before Stop.
func (w *Watch) Longest() (began time.Time, d time.Duration) {
	w.run.mu.Lock()
	defer w.run.mu.Unlock()
	return w.stretch.Longest()
}

// Delay is the longest that an acknowledged message waited for its delivery, so far.
func (r *Run) Delay() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.delays.Longest()
}

// StopProducing ends publishing; what is under way gets its outcome.
func (r *Run) StopProducing() { r.stop() }
