package bench

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// memoryDriver is a broker in a few lines, which can be told to misbehave. Its messages are acknowledged one after the
// other by a goroutine for each producer.
type memoryDriver struct {
	// fate decides about each message of a producer, by its number: an error fails it, and it may take its time.
	fate func(number uint64) error
	// pass decides what becomes of a message on its way to a subscription.
	pass func(number uint64) delivery
	// consumed ends a Consume.
	consumed func(number uint64) error
	// closing is called when a producer is being closed.
	closing func()

	mu     sync.Mutex
	topics map[string]*memoryTopic
	closed bool
}

type delivery int

const (
	deliver delivery = iota
	lose
	repeat
	spoil
)

type memoryTopic struct {
	subscriptions map[string]chan []byte
}

func newMemoryDriver() *memoryDriver {
	return &memoryDriver{
		fate: func(uint64) error { return nil }, pass: func(uint64) delivery { return deliver },
		consumed: func(uint64) error { return nil }, closing: func() {}, topics: map[string]*memoryTopic{},
	}
}

func (d *memoryDriver) Name() string { return "memory" }

func (d *memoryDriver) CreateTopic(_ context.Context, topic string, _ int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.topics[topic] = &memoryTopic{subscriptions: map[string]chan []byte{}}
	return nil
}

func (d *memoryDriver) DeleteTopic(_ context.Context, topic string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.topics, topic)
	return nil
}

func (d *memoryDriver) Close(context.Context) error {
	d.closed = true
	return nil
}

func (d *memoryDriver) Subscribe(_ context.Context, topic string, cfg ConsumerConfig) (Consumer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	subscriptions := d.topics[topic].subscriptions
	if subscriptions[cfg.Subscription] == nil {
		subscriptions[cfg.Subscription] = make(chan []byte, 1<<20)
	} else if !cfg.Shared {
		return nil, errors.New("it has its consumer")
	}
	return &memoryConsumer{d, subscriptions[cfg.Subscription]}, nil
}

type memoryConsumer struct {
	driver   *memoryDriver
	messages chan []byte
}

func (c *memoryConsumer) Consume(ctx context.Context, received func([]byte)) error {
	for {
		select {
		case value := <-c.messages:
			h, _ := readHeader(value)
			if err := c.driver.consumed(h.number); err != nil {
				return err
			}
			received(value)
		case <-ctx.Done():
			return nil
		}
	}
}

func (c *memoryConsumer) Close(context.Context) error { return nil }

func (d *memoryDriver) OpenProducer(_ context.Context, topic string, cfg ProducerConfig) (Producer, error) {
	if cfg.Ack == AckOne {
		return nil, ErrUnsupported
	}
	p := &memoryProducer{driver: d, cfg: cfg, queue: make(chan memoryMessage, cfg.InFlight), done: make(chan struct{})}
	d.mu.Lock()
	for _, s := range d.topics[topic].subscriptions {
		p.to = append(p.to, s)
	}
	d.mu.Unlock()
	go p.run()
	return p, nil
}

type memoryProducer struct {
	driver *memoryDriver
	cfg    ProducerConfig
	to     []chan []byte
	queue  chan memoryMessage
	done   chan struct{}
}

type memoryMessage struct {
	ctx     context.Context
	message *Message
}

func (p *memoryProducer) Publish(ctx context.Context, m *Message) { p.queue <- memoryMessage{ctx, m} }

func (p *memoryProducer) run() {
	defer close(p.done)
	for m := range p.queue {
		err := m.ctx.Err()
		if err == nil {
			err = p.driver.fate(m.message.number)
		}
		if err == nil {
			p.forward(m.message)
		}
		p.cfg.Done(m.message, err)
	}
}

func (p *memoryProducer) forward(m *Message) {
	for _, s := range p.to {
		value := slices.Clone(m.Value)
		switch p.driver.pass(m.number) {
		case deliver:
			s <- value
		case repeat:
			s <- value
			s <- slices.Clone(value)
		case spoil:
			s <- value[1:]
		case lose:
		}
	}
}

func (p *memoryProducer) Close(context.Context) error {
	p.driver.closing()
	close(p.queue)
	<-p.done
	return nil
}
