package client

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/hash"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// Producer publishes to one topic, on all its partitions. It is safe for concurrent use.
//
// What happens to a message: PublishAsync takes credit, chooses the partition and adds the message to that
// partition's window (window.go, a pure state machine). The partition's own goroutine (pubstream.go) holds a
// stream to the topic's owner, takes batches out of the window in order, encodes and sends them; answers go back
// into the window and settle receipts. When the stream breaks, the goroutine finds the owner again and sends
// what is unanswered once more, same order, same sequence ids. There is no retry queue beside the window: it
// would be a second place where order is decided.
type Producer struct {
	c          *Client
	topic      string
	cfg        producerConfig
	partitions []*pubStream
	turn       roundRobin

	messages *budget.Budget
	bytes    *budget.Budget

	closing   atomic.Bool
	closeOnce sync.Once
	closeErr  error
}

// Producer opens a producer: topic is a short name, tenant/namespace/topic, or one partition's name. It returns
// once every partition has an owner that accepts the producer, or with the reason why that cannot be: a
// [CodeTimeout] when ctx ended first.
func (c *Client) Producer(ctx context.Context, topic string, opts ...ProducerOption) (*Producer, error) {
	cfg := defaultProducerConfig()
	for _, o := range opts {
		o(&cfg)
	}
	switch {
	case cfg.dedup && cfg.name == "":
		return nil, invalidError("open producer", topic, "deduplication needs a producer name")
	case len(cfg.name) > frame.MaxProducerName:
		return nil, invalidError("open producer", topic, "producer name of %d bytes, the limit is %d", len(cfg.name), frame.MaxProducerName)
	case cfg.pendingMessages < 1 || cfg.pendingBytes < 1:
		return nil, invalidError("open producer", topic, "the limits of pending messages and bytes must be positive")
	}
	names, err := c.partitionsOf(ctx, "open producer", topic)
	if err != nil {
		return nil, err
	}
	p := &Producer{
		c: c, topic: names[0].Base().String(), cfg: cfg,
		messages: budget.New(cfg.pendingMessages), bytes: budget.New(cfg.pendingBytes),
	}
	p.turn.every = cfg.batching
	for _, n := range names {
		p.partitions = append(p.partitions, newPubStream(p, n))
	}
	runs := make([]func(), len(p.partitions))
	for i, s := range p.partitions {
		runs[i] = s.run
	}
	if !c.register(p, runs) {
		return nil, closedError("open producer", topic)
	}
	for _, s := range p.partitions {
		if err := s.waitReady(ctx); err != nil {
			ended, cancel := context.WithCancel(ctx)
			cancel() // nothing was published: there is nothing to wait for
			_ = p.Close(ended)
			return nil, err
		}
	}
	return p, nil
}

// partitionsOf returns the names of the partitions of a topic; the topic itself when it has none.
func (c *Client) partitionsOf(ctx context.Context, op, topic string) ([]topicname.Name, error) {
	name, err := topicname.Parse(topic)
	if err != nil {
		return nil, &Error{Code: CodeInvalid, Op: op, Topic: topic, Err: err}
	}
	if name.Partition != topicname.NoPartition {
		return []topicname.Name{name}, nil
	}
	r, err := c.resolve(ctx, op, name.String())
	if err != nil {
		return nil, err
	}
	if r.GetPartitions() == 0 {
		return []topicname.Name{name}, nil
	}
	names := make([]topicname.Name, r.GetPartitions())
	for i := range names {
		names[i] = name.WithPartition(i)
	}
	return names, nil
}

// Topic returns the topic's full name.
func (p *Producer) Topic() string { return p.topic }

// Publish publishes m and waits for its outcome. ctx bounds the message's whole life: when it ends, the message
// is either certainly not sent (CodeTimeout) or its outcome is unknown (see [OutcomeUnknown]).
func (p *Producer) Publish(ctx context.Context, m *Message) (MessageID, error) {
	r := p.PublishAsync(ctx, m)
	<-r.done // the window settles it when ctx ends
	return r.result()
}

// PublishAsync publishes m and returns at once, unless too much is pending: then it waits for credit, bounded
// by ctx. ctx bounds the message's whole life, also after the return. The client reads m until the receipt is
// done. Messages published by one goroutine to one partition keep their order.
func (p *Producer) PublishAsync(ctx context.Context, m *Message) *Receipt {
	if p.closing.Load() {
		return failedReceipt(closedError("publish", p.topic))
	}
	if n := m.overhead(); n > frame.DefaultMaxMetadata-frame.MaxProducerName-64 {
		return failedReceipt(invalidError("publish", p.topic, "key and properties take %d bytes, the limit is about %d: what is large belongs into the value",
			n, frame.DefaultMaxMetadata-frame.MaxProducerName))
	}
	r := &Receipt{msg: m, ctx: ctx, size: m.size(), done: make(chan struct{})}
	if err := ctx.Err(); err != nil {
		return failedReceipt(timeoutError("publish", p.topic, causeOf(ctx)))
	}
	if err := p.messages.Acquire(ctx, 1); err != nil {
		return failedReceipt(timeoutError("publish", p.topic, fmt.Errorf("too many messages are pending: %w", err)))
	}
	if err := p.bytes.Acquire(ctx, int64(r.size)); err != nil {
		p.messages.Release(1)
		return failedReceipt(timeoutError("publish", p.topic, fmt.Errorf("too many bytes are pending: %w", err)))
	}
	s := p.partitions[0]
	if len(p.partitions) > 1 {
		i := p.route(m)
		if i < 0 || i >= len(p.partitions) {
			p.release(1, int64(r.size))
			return failedReceipt(invalidError("publish", p.topic, "the router chose partition %d of %d", i, len(p.partitions)))
		}
		s = p.partitions[i]
	}
	r.partition = s.partition
	if err := s.add(r); err != nil { //nolint:contextcheck // the receipt carries it
		p.release(1, int64(r.size))
		return failedReceipt(err)
	}
	return r
}

func (p *Producer) release(messages, bytes int64) {
	if messages > 0 {
		p.messages.Release(messages)
		p.bytes.Release(bytes)
	}
}

func (p *Producer) route(m *Message) int {
	switch {
	case p.cfg.router != nil:
		return p.cfg.router(m, len(p.partitions))
	case m.Key != "":
		return hash.Partition([]byte(m.Key), len(p.partitions))
	}
	return p.turn.next(len(p.partitions), time.Now())
}

// Flush sends what waits for company, and waits until everything published before has its outcome. It returns
// the first failure among those, or CodeTimeout when ctx ended first.
func (p *Producer) Flush(ctx context.Context) error {
	waits := make([]*flushWait, 0, len(p.partitions))
	for _, s := range p.partitions {
		if f := s.flush(); f != nil {
			waits = append(waits, f)
		}
	}
	var first error
	for _, f := range waits {
		select {
		case <-f.done:
			if first == nil {
				first = f.err
			}
		case <-ctx.Done():
			return timeoutError("flush", p.topic, causeOf(ctx))
		}
	}
	return first
}

// Close refuses new messages, flushes, and closes the streams, waiting until the brokers have let the producer go. ctx
// bounds that; where it has no deadline, Close gives up when nothing was answered for 10 s. Messages without an outcome
// by then get CodeClosed if they were never sent, an unknown outcome otherwise; and Close returns CodeOutcomeUnknown if
// there are any of the latter, CodeTimeout if there are only former. Otherwise it returns what Flush does.
func (p *Producer) Close(ctx context.Context) error {
	p.closeOnce.Do(func() {
		p.closing.Store(true)
		ctx, cancel := patient(ctx, func() int64 {
			var answers int64
			for _, s := range p.partitions {
				answers += s.answered()
			}
			return answers
		})
		defer cancel()
		p.closeErr = p.Flush(ctx)
		if ctx.Err() != nil {
			p.closeErr = p.unfinished(causeOf(ctx), p.closeErr)
		}
		for _, s := range p.partitions {
			s.leave()
		}
		for _, s := range p.partitions {
			select {
			case <-s.done:
			case <-ctx.Done():
			}
		}
		for _, s := range p.partitions {
			s.cancel()
		}
		for _, s := range p.partitions {
			<-s.done
		}
		p.c.forget(p)
	})
	return p.closeErr
}

// unfinished says what a Close leaves without an outcome; otherwise, which is returned when that is nothing.
func (p *Producer) unfinished(cause, otherwise error) error {
	sent, unsent := 0, 0
	for _, s := range p.partitions {
		a, b := s.unsettled()
		sent, unsent = sent+a, unsent+b
	}
	switch {
	case sent > 0:
		return unknownOutcome("close producer", p.topic, fmt.Errorf("%d messages were sent and are not confirmed, %d were not sent: %w", sent, unsent, cause))
	case unsent > 0:
		return timeoutError("close producer", p.topic, fmt.Errorf("%d messages were not sent: %w", unsent, cause))
	}
	return otherwise
}

// roundRobin gives messages without a key to the partitions in turn. It stays with one for about a batch: to
// change with each message would make batches of one.
type roundRobin struct {
	every Batching

	mu      sync.Mutex
	current int
	count   int
	since   time.Time
}

func (r *roundRobin) next(partitions int, now time.Time) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count >= r.every.MaxMessages || now.Sub(r.since) >= r.every.MaxDelay {
		if !r.since.IsZero() {
			r.current = (r.current + 1) % partitions
		}
		r.count, r.since = 0, now
	}
	r.count++
	return r.current
}
