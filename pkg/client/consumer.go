package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// Consumer receives the messages of a subscription, from all partitions of its topic. It is safe for concurrent
// use.
//
// What happens to a message: a goroutine per partition (substream.go) receives entries, verifies and unpacks
// them, asks the partition's inbox (inbox.go, a pure state machine) what of them goes to the application, and
// appends that to the one buffer that Receive takes from. Taking frees prefetch, which becomes permits for the
// broker. Acknowledgements are grouped (acks.go), sent, and sent again after a reconnect until the broker has
// them durable. A channel per partition instead of one buffer would hide from a reconnect what must be thrown
// away, and tell an application with many partitions to wait on all of them.
type Consumer struct {
	c          *Client
	topic      string
	cfg        consumerConfig
	partitions []*subStream
	filled     chan struct{} // capacity 1: the buffer is not empty, or the consumer ended

	mu     sync.Mutex
	buffer []item
	err    error // why the consumer ended
	// leaving: streams are being ended in good order, and what still comes is for nobody.
	leaving bool

	closeOnce sync.Once
	closeErr  error
}

// item is something for the application: a message, or the news that one cannot be read.
type item struct {
	delivery *Delivery
	err      error
}

// Subscribe opens a consumer of a subscription, which is created if it does not exist. It returns once every
// partition has accepted the consumer, or with the reason why that cannot be: a [CodeTimeout] when ctx ended
// first, a [CodeConflict] when an Exclusive subscription has its consumer.
func (c *Client) Subscribe(ctx context.Context, topic, subscription string, opts ...SubscribeOption) (*Consumer, error) {
	cfg := defaultConsumerConfig()
	for _, o := range opts {
		o(&cfg)
	}
	cfg.subscription = subscription
	if subscription == "" {
		return nil, invalidError("subscribe", topic, "the subscription has no name")
	}
	return c.consume(ctx, "subscribe", topic, cfg)
}

func (c *Client) consume(ctx context.Context, op, topic string, cfg consumerConfig) (*Consumer, error) {
	names, err := c.partitionsOf(ctx, op, topic)
	if err != nil {
		return nil, err
	}
	if len(names) > 1 && cfg.start.onePartition() {
		return nil, invalidError(op, topic, "an offset or a position means something in one partition only: name that")
	}
	s := &Consumer{c: c, topic: names[0].Base().String(), cfg: cfg, filled: make(chan struct{}, 1)}
	for _, n := range names {
		s.partitions = append(s.partitions, newSubStream(s, n))
	}
	runs := make([]func(), len(s.partitions))
	for i, p := range s.partitions {
		runs[i] = p.run
	}
	if !c.register(s, runs) {
		return nil, closedError(op, topic)
	}
	for _, p := range s.partitions {
		if err := s.waitReady(ctx, op, p); err != nil {
			ended, cancel := context.WithCancel(ctx)
			cancel() // nothing was acknowledged: there is nothing to wait for
			_ = s.Close(ended)
			return nil, err
		}
	}
	return s, nil
}

func (s *Consumer) waitReady(ctx context.Context, op string, p *subStream) error {
	select {
	case <-p.ready:
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.err == nil && p.life.Err() != nil {
			return closedError(op, p.topic)
		}
		return s.err
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		return gaveUp(op, p.topic, causeOf(ctx), p.last)
	}
}

// Topic returns the topic's full name.
func (s *Consumer) Topic() string { return s.topic }

// fail ends the consumer: what is buffered is still handed out, then err.
func (s *Consumer) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	for _, p := range s.partitions {
		p.cancel()
	}
	nudge(s.filled)
}

// reset forgets everything of a partition whose subscription was moved.
func (s *Consumer) reset(p *subStream) {
	s.mu.Lock()
	waiters := p.in.moved()
	p.nacks = nil
	s.mu.Unlock()
	p.tell(waiters, p.movedError())
}

func (s *Consumer) isLeaving() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaving
}

// take returns the next item of the buffer, or the reason why none will come.
func (s *Consumer) take() (item, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.buffer) > 0 {
		it := s.buffer[0]
		s.buffer[0] = item{}
		s.buffer = s.buffer[1:]
		if len(s.buffer) > 0 {
			nudge(s.filled) // for whoever else waits
		}
		if it.err != nil {
			return it, true
		}
		p := it.delivery.from
		if !p.in.current(it.delivery) {
			continue // of a stream that is gone: it comes again
		}
		p.in.taken(it.delivery)
		nudge(p.wake)
		nudge(p.drain)
		return it, true
	}
	s.buffer = nil
	if s.err != nil {
		nudge(s.filled)
		return item{err: s.err}, true
	}
	return item{}, false
}

// Receive returns the next message, waiting until ctx ends. A message that cannot be decoded is an error of
// CodeInvalid; the next call goes on behind it. After an error that ends the consumer, each call returns it.
func (s *Consumer) Receive(ctx context.Context) (*Delivery, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, timeoutError("receive", s.topic, causeOf(ctx))
		}
		if it, ok := s.take(); ok {
			return it.delivery, it.err
		}
		select {
		case <-s.filled:
		case <-ctx.Done():
		}
	}
}

// ReceiveBatch returns up to limit messages: as soon as it has that many, or when wait has passed since the call,
// whatever it has then, which may be none. An error that comes after messages is left for the next call.
func (s *Consumer) ReceiveBatch(ctx context.Context, limit int, wait time.Duration) ([]*Delivery, error) {
	short, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var out []*Delivery
	for len(out) < limit {
		d, err := s.Receive(short)
		if err == nil {
			out = append(out, d)
			continue
		}
		if len(out) > 0 || ctx.Err() == nil && short.Err() != nil && asError(err).Code == CodeTimeout {
			if asError(err).Code == CodeInvalid {
				s.putBack(err)
			}
			return out, nil
		}
		return nil, err
	}
	return out, nil
}

// putBack returns an error to the head of the buffer.
func (s *Consumer) putBack(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buffer = append([]item{{err: err}}, s.buffer...)
	nudge(s.filled)
}

// Messages yields messages until ctx ends or the consumer cannot go on, and then that as an error, last. A
// message that cannot be decoded is yielded as an error, and the iteration goes on. Reconnects do not end it.
func (s *Consumer) Messages(ctx context.Context) iter.Seq2[*Delivery, error] {
	return func(yield func(*Delivery, error) bool) {
		for {
			d, err := s.Receive(ctx)
			if !yield(d, err) || err != nil && asError(err).Code != CodeInvalid {
				return
			}
		}
	}
}

// Seek moves the subscription, in every partition: messages from there on are delivered next, acknowledged
// before or not. What was received before can no longer be acknowledged. A position that means something in one
// partition only, such as [At], moves that partition.
func (s *Consumer) Seek(ctx context.Context, to Position) error {
	moving := s.partitions
	if to.onePartition() && len(s.partitions) > 1 {
		if to.partition < 0 || to.partition >= len(s.partitions) {
			return invalidError("seek", s.topic, "an offset or a position means something in one partition only")
		}
		moving = s.partitions[to.partition : to.partition+1]
	}
	var errs []error
	for _, p := range moving {
		errs = append(errs, s.seek(ctx, p, to))
	}
	return errors.Join(errs...)
}

func (s *Consumer) seek(ctx context.Context, p *subStream, to Position) error {
	// The stream is taken down first: nothing of before the seek may come in after it.
	resume := make(chan struct{})
	s.mu.Lock()
	if p.paused != nil || s.err != nil {
		defer s.mu.Unlock()
		if s.err != nil {
			return s.err
		}
		return &Error{Code: CodeConflict, Op: "seek", Topic: p.topic, Retryable: true, Err: errors.New("another seek is under way")}
	}
	p.paused = resume
	if p.breakOff != nil {
		p.breakOff()
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		p.paused = nil
		s.mu.Unlock()
		close(resume)
	}()
	_, err := s.c.Admin().SeekSubscription(ctx, &brokerv1.SeekSubscriptionRequest{
		Topic: p.topic, Subscription: s.cfg.subscription, To: to.Start(),
	})
	if err != nil {
		return err
	}
	s.reset(p)
	return nil
}

// Unsubscribe deletes the subscription, which must have no other consumer, and closes this consumer.
func (s *Consumer) Unsubscribe(ctx context.Context) error {
	err := s.Close(ctx)
	for _, p := range s.partitions {
		if err != nil {
			return err
		}
		_, err = s.c.Admin().DeleteSubscription(ctx, &brokerv1.DeleteSubscriptionRequest{
			Topic: p.topic, Subscription: s.cfg.subscription,
		})
	}
	return err
}

// Close waits until what was acknowledged is durable, closes the streams, and waits until the brokers have let the
// consumer go, all bounded by ctx, or by 10 s where that has no deadline. What was not confirmed before the consumer ended by
// itself is an error too. Messages that were received and not
// acknowledged are delivered again to another consumer, or the next.
func (s *Consumer) Close(ctx context.Context) error {
	s.closeOnce.Do(func() {
		ctx, cancel := patient(ctx, func() int64 { return 0 })
		defer cancel()
		for _, p := range s.partitions {
			err := s.settle(ctx, p)
			switch {
			case s.closeErr == nil:
				s.closeErr = err
			case err != nil:
				s.closeErr = fmt.Errorf("%w; %w", s.closeErr, err)
			}
		}
		s.leave(ctx)
		s.fail(closedError("receive", s.topic))
		for _, p := range s.partitions {
			<-p.done
		}
		s.mu.Lock()
		s.buffer = nil // nothing of it could be acknowledged
		s.mu.Unlock()
		s.c.forget(s)
	})
	return s.closeErr
}

// leave ends the streams in good order, as long as ctx lasts.
func (s *Consumer) leave(ctx context.Context) {
	s.mu.Lock()
	s.leaving = true
	for _, p := range s.partitions {
		if !p.serving {
			p.cancel()
		}
	}
	s.mu.Unlock()
	for _, p := range s.partitions {
		nudge(p.wake)
		nudge(p.drain)
	}
	for _, p := range s.partitions {
		select {
		case <-p.done:
		case <-ctx.Done():
			return
		}
	}
}

// settle waits until the acknowledgements of a partition are answered.
func (s *Consumer) settle(ctx context.Context, p *subStream) error {
	var waiters []chan error
	s.mu.Lock()
	if s.err != nil { // it ended by itself, and nobody answers any more
		defer s.mu.Unlock()
		left := p.in.acks.outstanding()
		left.note(&p.left)
		if left.empty() {
			return nil
		}
		return unknownOutcome("acknowledge", p.topic, fmt.Errorf("not confirmed: offsets %s: %w", left.offsets(), s.err))
	}
	if !p.in.acks.pending.empty() {
		w := make(chan error, 1)
		p.in.acks.pending.waiters = append(p.in.acks.pending.waiters, w)
		p.in.acks.flushNow(time.Now())
		waiters = append(waiters, w)
	}
	for _, g := range p.in.acks.inFlight {
		w := make(chan error, 1)
		g.waiters = append(g.waiters, w)
		waiters = append(waiters, w)
	}
	s.mu.Unlock()
	nudge(p.wake)
	nudge(p.drain)
	for _, w := range waiters {
		select {
		case err := <-w:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return p.unconfirmed(causeOf(ctx))
		}
	}
	return nil
}
