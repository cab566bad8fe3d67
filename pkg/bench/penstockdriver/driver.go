package penstockdriver

import (
	"context"
	"errors"
	"fmt"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/client"
)

const namespace = "public/default/"

// Driver is a [bench.Driver] for a cluster.
type Driver struct {
	client *client.Client
}

// Open makes a client of the cluster at url.
func Open(ctx context.Context, url string, options ...client.Option) (*Driver, error) {
	c, err := client.Connect(ctx, url, append([]client.Option{client.WithClientInfo("penstock-bench")}, options...)...)
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what was tried
	}
	return New(c), nil
}

// New makes a driver of a client, which is the driver's from now on.
func New(c *client.Client) *Driver { return &Driver{client: c} }

// Name is "penstock".
func (d *Driver) Name() string { return "penstock" }

// CreateTopic makes a topic, without partitions if that is 1.
func (d *Driver) CreateTopic(ctx context.Context, topic string, partitions int) error {
	request := &brokerv1.CreateTopicRequest{Topic: namespace + topic}
	if partitions > 1 {
		request.Partitions = uint32(partitions)
	}
	_, err := d.client.Admin().CreateTopic(ctx, request)
	return err //nolint:wrapcheck // it says what failed on which topic
}

// DeleteTopic deletes a topic, as long as ctx lasts.
func (d *Driver) DeleteTopic(ctx context.Context, topic string) error {
	for {
		_, err := d.client.Admin().DeleteTopic(ctx, &brokerv1.DeleteTopicRequest{Topic: namespace + topic, Force: true})
		var failed *client.Error
		switch {
		case err == nil, errors.As(err, &failed) && failed.Code == client.CodeNotFound:
			return nil
		case ctx.Err() == nil && (client.OutcomeUnknown(err) || failed != nil && failed.Retryable):
			continue // the client has paused
		}
		return err //nolint:wrapcheck // it says what failed on which topic
	}
}

// Subscribe opens a consumer: Exclusive if it is the subscription's only one.
func (d *Driver) Subscribe(ctx context.Context, topic string, cfg bench.ConsumerConfig) (bench.Consumer, error) {
	kind := client.Exclusive
	if cfg.Shared {
		kind = client.Shared
	}
	c, err := d.client.Subscribe(ctx, namespace+topic, cfg.Subscription, client.WithType(kind), client.WithStart(client.Earliest()))
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what failed on which topic
	}
	return &consumer{c}, nil
}

// Close closes the client.
func (d *Driver) Close(ctx context.Context) error { return d.client.Close(ctx) } //nolint:wrapcheck // it says what it closed

type consumer struct{ *client.Consumer }

func (c *consumer) Consume(ctx context.Context, received func(value []byte)) error {
	for {
		m, err := c.Receive(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // that is how it ends
			}
			return err //nolint:wrapcheck // it says what failed on which topic
		}
		received(m.Value)
		m.AckAsync()
	}
}

var ackLevels = map[bench.AckLevel]client.AckLevel{
	bench.AckNone: client.AckNone, bench.AckOne: client.AckOne, bench.AckQuorum: client.AckQuorum, bench.AckAll: client.AckAll,
}

// OpenProducer opens a producer.
func (d *Driver) OpenProducer(ctx context.Context, topic string, cfg bench.ProducerConfig) (bench.Producer, error) {
	p := &producer{done: cfg.Done, alone: cfg.InFlight == 1}
	options := []client.ProducerOption{
		client.WithRouter(p.route),
		client.WithBatching(client.Batching{MaxMessages: cfg.Batching.Messages, MaxBytes: cfg.Batching.Bytes, MaxDelay: cfg.Batching.Delay}),
		client.WithMaxPending(cfg.InFlight, int64(cfg.InFlight)*int64(cfg.Size+metadataBytes)),
	}
	if cfg.Ack != "" {
		level, ok := ackLevels[cfg.Ack]
		if !ok {
			return nil, fmt.Errorf("open producer: acknowledgement level %q: %w", cfg.Ack, bench.ErrUnsupported)
		}
		options = append(options, client.WithAckLevel(level))
	}
	var err error
	if p.producer, err = d.client.Producer(ctx, namespace+topic, options...); err != nil {
		return nil, err //nolint:wrapcheck // it says what failed on which topic
	}
	p.batch = cfg.Batching
	return p, nil
}

// metadataBytes is more than the client counts for a message's key and metadata.
const metadataBytes = 1 << 10
