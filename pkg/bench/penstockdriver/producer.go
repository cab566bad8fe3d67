package penstockdriver

import (
	"context"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/hash"
)

// producer hands messages to the client's, and waits for their receipts.
type producer struct {
	producer *client.Producer
	done     func(*bench.Message, error)
	alone    bool // one message in flight: no goroutine needs to wait for it
	batch    bench.Batching

	// Of the goroutine that publishes:
	partition int // of the message that is being published
	count     int // messages without a key since partition changed
	since     time.Time
	waiters   []*waiter // by partition; nil where nothing was published to

	waiting sync.WaitGroup
}

// Publish hands a message over.
func (p *producer) Publish(ctx context.Context, m *bench.Message) {
	message, ok := m.Scratch.(*client.Message)
	if !ok {
		message = new(client.Message)
		m.Scratch = message
	}
	message.Key, message.Value = m.Key, m.Value
	if p.alone {
		_, err := p.producer.Publish(ctx, message)
		p.done(m, err)
		return
	}
	receipt := p.producer.PublishAsync(ctx, message)
	p.waiter().put(awaited{m, receipt})
}

// route tells which partition a message goes to, as the client does by itself: by its key; without one in turn, a batch at a
// time. It is called by PublishAsync.
func (p *producer) route(m *client.Message, partitions int) int {
	if m.Key != "" {
		p.partition = hash.Partition([]byte(m.Key), partitions)
		return p.partition
	}
	limit, delay := p.batch.Messages, p.batch.Delay
	if limit == 0 {
		limit = defaultBatch
	}
	if delay == 0 {
		delay = defaultDelay
	}
	if now := time.Now(); p.count >= limit || now.Sub(p.since) >= delay {
		p.partition = (p.partition + 1) % partitions
		p.count, p.since = 0, now
	}
	p.count++
	return p.partition
}

// The client's defaults.
const (
	defaultBatch = 1000
	defaultDelay = time.Millisecond
)

// waiter returns the one of the current partition.
func (p *producer) waiter() *waiter {
	for len(p.waiters) <= p.partition {
		p.waiters = append(p.waiters, nil)
	}
	w := p.waiters[p.partition]
	if w == nil {
		w = &waiter{filled: make(chan struct{}, 1)}
		p.waiters[p.partition] = w
		p.waiting.Go(func() { w.run(p.done) })
	}
	return w
}

// Close waits for every receipt, and closes the client's producer.
func (p *producer) Close(ctx context.Context) error {
	err := p.producer.Close(ctx) // settles every receipt
	for _, w := range p.waiters {
		if w != nil {
			w.close()
		}
	}
	p.waiting.Wait()
	return err //nolint:wrapcheck // it says what failed on which topic
}

// awaited is a message and what tells its outcome.
type awaited struct {
	message *bench.Message
	receipt *client.Receipt
}

// waiter waits for the receipts of one partition, in order.
type waiter struct {
	mu     sync.Mutex
	queue  []awaited
	closed bool
	filled chan struct{} // capacity 1: the queue is not empty any more, or closed
}

func (w *waiter) put(a awaited) {
	w.mu.Lock()
	w.queue = append(w.queue, a)
	first := len(w.queue) == 1
	w.mu.Unlock()
	if first {
		w.nudge()
	}
}

func (w *waiter) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.nudge()
}

func (w *waiter) nudge() {
	select {
	case w.filled <- struct{}{}:
	default:
	}
}

// take returns what is queued, waiting for it; nothing once the queue is closed and empty. It keeps spare for the queue.
func (w *waiter) take(spare []awaited) []awaited {
	for {
		w.mu.Lock()
		if all := w.queue; len(all) > 0 {
			w.queue = spare[:0]
			w.mu.Unlock()
			return all
		}
		closed := w.closed
		w.mu.Unlock()
		if closed {
			return nil
		}
		<-w.filled
	}
}

func (w *waiter) run(done func(*bench.Message, error)) {
	for all := w.take(nil); len(all) > 0; all = w.take(all) {
		for i, a := range all {
			_, err := a.receipt.Wait(context.Background()) // the message's own context bounds it
			all[i] = awaited{}
			done(a.message, err)
		}
	}
}
