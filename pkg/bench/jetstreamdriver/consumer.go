package jetstreamdriver

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/penstock-mq/penstock/pkg/bench"
)

const (
	pullMessages = 10_000 // asked for ahead
	ackEvery     = 500    // messages, where one acknowledgement stands for all before
)

type consumer struct {
	of         string
	js         jetstream.Consumer
	cumulative bool

	mu   sync.Mutex
	last jetstream.Msg // the newest that is not acknowledged; only if cumulative
	none int           // how many are not
}

// Subscribe implements [bench.Driver].
func (d *Driver) Subscribe(ctx context.Context, topic string, cfg bench.ConsumerConfig) (bench.Consumer, error) {
	policy := jetstream.AckAllPolicy
	if cfg.Shared {
		policy = jetstream.AckExplicitPolicy
	}
	js, err := d.any.js.CreateOrUpdateConsumer(ctx, topic, jetstream.ConsumerConfig{
		Durable: cfg.Subscription, DeliverPolicy: jetstream.DeliverAllPolicy, AckPolicy: policy, MaxAckPending: -1,
	})
	if err == nil {
		js, err = d.to(js.CachedInfo().Cluster).js.Consumer(ctx, topic, cfg.Subscription)
	}
	if err != nil {
		return nil, fmt.Errorf("subscribe to stream %s: %w", topic, err)
	}
	return &consumer{of: topic, js: js, cumulative: !cfg.Shared}, nil
}

// Consume implements [bench.Consumer].
func (c *consumer) Consume(ctx context.Context, received func(value []byte)) error {
	failed := make(chan error, 1)
	fail := func(err error) {
		select {
		case failed <- err:
		default: // one reason is enough
		}
	}
	consuming, err := c.js.Consume(func(msg jetstream.Msg) {
		received(msg.Data())
		if err := c.ack(msg); err != nil {
			fail(err)
		}
	}, jetstream.PullMaxMessages(pullMessages), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		if errors.Is(err, jetstream.ErrConsumerDeleted) || errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrConnectionClosed) {
			fail(err) // it goes on after others
		}
	}))
	if err != nil {
		return fmt.Errorf("consume stream %s: %w", c.of, err)
	}
	select {
	case <-ctx.Done():
		err = nil
	case err = <-failed:
		err = fmt.Errorf("consume stream %s: %w", c.of, err)
	}
	consuming.Stop()
	<-consuming.Closed()
	return err
}

func (c *consumer) ack(msg jetstream.Msg) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.cumulative {
		return msg.Ack()
	}
	c.last = msg
	if c.none++; c.none < ackEvery {
		return nil
	}
	c.last, c.none = nil, 0
	return msg.Ack()
}

// Close implements [bench.Consumer].
func (c *consumer) Close(ctx context.Context) error {
	c.mu.Lock()
	last := c.last
	c.mu.Unlock()
	if last == nil {
		return nil
	}
	if err := last.DoubleAck(ctx); err != nil {
		return fmt.Errorf("acknowledge to stream %s: %w", c.of, err)
	}
	return nil
}
