package jetstreamdriver

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/penstock-mq/penstock/pkg/bench"
)

// Driver is a [bench.Driver].
type Driver struct {
	name     string
	replicas int
	conns    map[string]*connection // by the name of the server
	any      *connection
}

type connection struct {
	*nats.Conn
	js jetstream.JetStream
}

// Open connects to each of the servers, which URLs name. Streams get as many replicas. setup says in results what
// the servers do that no client can see, like "sync=always".
func Open(_ context.Context, urls []string, replicas int, setup string) (*Driver, error) {
	d := &Driver{name: fmt.Sprintf("jetstream R%d %s", replicas, setup), replicas: replicas, conns: make(map[string]*connection)}
	for _, url := range urls {
		nc, err := nats.Connect(url, nats.IgnoreDiscoveredServers()) // this server, or none
		if err != nil {
			d.close()
			return nil, fmt.Errorf("connect to %s: %w", url, err)
		}
		js, err := jetstream.New(nc)
		if err != nil {
			nc.Close()
			d.close()
			return nil, fmt.Errorf("connect to %s: %w", url, err)
		}
		d.any = &connection{nc, js}
		d.conns[nc.ConnectedServerName()] = d.any
	}
	if d.any == nil {
		return nil, errors.New("connect to JetStream: no server is named")
	}
	return d, nil
}

// Name implements [bench.Driver].
func (d *Driver) Name() string { return d.name }

// Close implements [bench.Driver].
func (d *Driver) Close(context.Context) error {
	d.close()
	return nil
}

func (d *Driver) close() {
	for _, c := range d.conns {
		c.Close()
	}
}

// CreateTopic implements [bench.Driver].
func (d *Driver) CreateTopic(ctx context.Context, topic string, partitions int) error {
	if partitions > 1 {
		return fmt.Errorf("create %s with %d partitions: %w", topic, partitions, bench.ErrUnsupported)
	}
	_, err := d.any.js.CreateStream(ctx, jetstream.StreamConfig{
		Name: topic, Subjects: []string{topic}, Storage: jetstream.FileStorage, Replicas: d.replicas, AllowBatchPublish: true,
	})
	if err != nil {
		return fmt.Errorf("create stream %s: %w", topic, err)
	}
	return nil
}

// DeleteTopic implements [bench.Driver].
func (d *Driver) DeleteTopic(ctx context.Context, topic string) error {
	if err := d.any.js.DeleteStream(ctx, topic); err != nil {
		return fmt.Errorf("delete stream %s: %w", topic, err)
	}
	return nil
}

// to returns the connection to a leader, or any if it is not known.
func (d *Driver) to(cluster *jetstream.ClusterInfo) *connection {
	if cluster != nil {
		if c := d.conns[cluster.Leader]; c != nil {
			return c
		}
	}
	return d.any
}

// OpenProducer implements [bench.Driver].
func (d *Driver) OpenProducer(ctx context.Context, topic string, cfg bench.ProducerConfig) (bench.Producer, error) {
	if cfg.Ack != "" && cfg.Ack != bench.AckQuorum {
		return nil, fmt.Errorf("publish to %s with acknowledgement level %s: %w", topic, cfg.Ack, bench.ErrUnsupported)
	}
	s, err := d.any.js.Stream(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("publish to stream %s: %w", topic, err)
	}
	c := d.to(s.CachedInfo().Cluster)
	if cfg.Batching.Messages > 1 {
		return openIngest(c, topic, cfg)
	}
	return openAsync(c, topic, cfg)
}
