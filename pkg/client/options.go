package client

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// Option changes a [Client].
type Option func(*clientConfig)

type clientConfig struct {
	log    *slog.Logger
	tls    *tls.Config
	dial   func(ctx context.Context, addr string) (net.Conn, error)
	info   string
	probe  time.Duration // silence after which a connection is probed
	answer time.Duration // how long a probe's answer may take
}

func defaultClientConfig() clientConfig {
	return clientConfig{
		log: slog.New(slog.DiscardHandler), info: "penstock-go", probe: 500 * time.Millisecond, answer: 2 * time.Second,
	}
}

// WithLogger sets where the client says what happens to its connections. Default: nowhere.
func WithLogger(log *slog.Logger) Option { return func(c *clientConfig) { c.log = log } }

// WithTLS makes the client speak TLS to brokers. Default: plain TCP.
func WithTLS(cfg *tls.Config) Option { return func(c *clientConfig) { c.tls = cfg.Clone() } }

// WithDialer replaces how connections to "host:port" are opened.
func WithDialer(dial func(ctx context.Context, addr string) (net.Conn, error)) Option {
	return func(c *clientConfig) { c.dial = dial }
}

// WithClientInfo sets what brokers show about this client's producers and consumers.
func WithClientInfo(info string) Option { return func(c *clientConfig) { c.info = info } }

// WithLiveness sets after how much silence of a used connection the client asks the broker for a sign of life,
// and how long that may take before the connection is given up. Default: 500 ms and 2 s.
func WithLiveness(silence, answer time.Duration) Option {
	return func(c *clientConfig) { c.probe, c.answer = silence, answer }
}

// AckLevel says what must be true before a message counts as published.
type AckLevel int32

// The levels.
const (
	// AckQuorum: durable on the ack quorum, with all before it. The default.
	AckQuorum AckLevel = AckLevel(brokerv1.AckLevel_ACK_LEVEL_QUORUM)
	// AckNone: the broker has queued it.
	AckNone AckLevel = AckLevel(brokerv1.AckLevel_ACK_LEVEL_NONE)
	// AckOne: one durable copy, and one of each before it.
	AckOne AckLevel = AckLevel(brokerv1.AckLevel_ACK_LEVEL_ONE)
	// AckAll: durable on the whole write quorum.
	AckAll AckLevel = AckLevel(brokerv1.AckLevel_ACK_LEVEL_ALL)
)

// Batching says when a batch is full. A batch is sent as soon as nothing is in flight; while something is, it
// waits for company until it is full or MaxDelay has passed. So a lone message never waits, and under load the
// answers set the pace.
type Batching struct {
	// MaxMessages and MaxBytes fill a batch. Defaults: 1,000 and 128 KiB.
	MaxMessages, MaxBytes int
	// MaxDelay bounds the wait for company. Default: 1 ms.
	MaxDelay time.Duration
}

const maxBatchBytes = 4 << 20

// ProducerOption changes a [Producer].
type ProducerOption func(*producerConfig)

type producerConfig struct {
	name            string
	ack             AckLevel
	dedup           bool
	batching        Batching
	compression     Compression
	pendingMessages int64
	pendingBytes    int64
	router          Router
}

func defaultProducerConfig() producerConfig {
	return producerConfig{
		ack:             AckQuorum,
		batching:        Batching{MaxMessages: 1000, MaxBytes: 128 << 10, MaxDelay: time.Millisecond},
		pendingMessages: 10_000, pendingBytes: 32 << 20,
	}
}

// WithProducerName names the producer. A newer producer of the same name on the same topic fences this one, for as long as it is
// connected; with [WithDedup] for good.
func WithProducerName(name string) ProducerOption { return func(c *producerConfig) { c.name = name } }

// WithDedup makes the topic keep each (producer name, sequence id) at most once. It needs [WithProducerName].
func WithDedup() ProducerOption { return func(c *producerConfig) { c.dedup = true } }

// WithAckLevel says what must be true before a message counts as published. Default: [AckQuorum].
func WithAckLevel(l AckLevel) ProducerOption { return func(c *producerConfig) { c.ack = l } }

// WithBatching changes when batches are sent; zero fields keep their defaults.
func WithBatching(b Batching) ProducerOption {
	return func(c *producerConfig) {
		if b.MaxMessages > 0 {
			c.batching.MaxMessages = b.MaxMessages
		}
		if b.MaxBytes > 0 {
			c.batching.MaxBytes = min(b.MaxBytes, maxBatchBytes)
		}
		if b.MaxDelay > 0 {
			c.batching.MaxDelay = b.MaxDelay
		}
	}
}

// WithoutBatching sends each message as an entry of its own.
func WithoutBatching() ProducerOption { return func(c *producerConfig) { c.batching.MaxMessages = 1 } }

// WithCompression compresses each batch's payload. Default: [NoCompression].
func WithCompression(k Compression) ProducerOption {
	return func(c *producerConfig) { c.compression = k }
}

// WithMaxPending bounds what may be published and not answered yet, over all partitions; more waits.
// Defaults: 10,000 messages and 32 MiB.
func WithMaxPending(messages int, bytes int64) ProducerOption {
	return func(c *producerConfig) { c.pendingMessages, c.pendingBytes = int64(messages), bytes }
}

// Router chooses the partition of a message, in [0, partitions).
type Router func(m *Message, partitions int) int

// WithRouter replaces how partitions are chosen. Default: by murmur3 of the key, as Pulsar's clients do; without
// a key in turn, a batch at a time.
func WithRouter(r Router) ProducerOption { return func(c *producerConfig) { c.router = r } }

// SubscriptionType says how a subscription's messages are shared out.
type SubscriptionType int32

// The types.
const (
	// Exclusive: one consumer; a second is refused. The default.
	Exclusive SubscriptionType = SubscriptionType(brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_EXCLUSIVE)
	// Failover: one active consumer, others stand by.
	Failover SubscriptionType = SubscriptionType(brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_FAILOVER)
	// Shared: every consumer gets a share; order is not kept.
	Shared SubscriptionType = SubscriptionType(brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_SHARED)
)

// SubscribeOption changes a [Consumer] or a [Reader].
type SubscribeOption func(*consumerConfig)

type consumerConfig struct {
	subscription     string
	name             string
	kind             SubscriptionType
	start            Position
	priority         int32
	prefetchMessages int // 0: by type
	prefetchBytes    int64
	ackMax           int
	ackDelay         time.Duration
	reader           bool
}

func defaultConsumerConfig() consumerConfig {
	return consumerConfig{
		kind: Exclusive, prefetchBytes: 16 << 20, ackMax: 1000, ackDelay: 10 * time.Millisecond,
	}
}

// WithType says how the subscription's messages are shared out. Default: [Exclusive].
func WithType(t SubscriptionType) SubscribeOption { return func(c *consumerConfig) { c.kind = t } }

// WithStart says where the subscription starts if this call creates it. Default: [Latest].
func WithStart(p Position) SubscribeOption { return func(c *consumerConfig) { c.start = p } }

// WithConsumerName names the consumer; Failover breaks ties of priority by name.
func WithConsumerName(name string) SubscribeOption { return func(c *consumerConfig) { c.name = name } }

// WithPriority orders Failover consumers: the lowest becomes active first.
func WithPriority(p int32) SubscribeOption { return func(c *consumerConfig) { c.priority = p } }

// prefetch returns how many messages are fetched ahead. What one consumer of a Shared subscription holds, another one waits for.
func (c *consumerConfig) prefetch() int {
	switch {
	case c.prefetchMessages > 0:
		return c.prefetchMessages
	case c.kind == Shared:
		return 1000
	}
	return 10_000
}

// WithPrefetch bounds what is fetched ahead of the application, per partition. Defaults: 10,000 messages, 1,000 for [Shared],
// and 16 MiB.
func WithPrefetch(messages int, bytes int64) SubscribeOption {
	return func(c *consumerConfig) { c.prefetchMessages, c.prefetchBytes = max(1, messages), max(1, bytes) }
}

// WithAckGrouping says when acknowledgements made by [Delivery.AckAsync] are sent: after delay, or at max of
// them. Defaults: 10 ms and 1,000.
func WithAckGrouping(maxAcks int, delay time.Duration) SubscribeOption {
	return func(c *consumerConfig) { c.ackMax, c.ackDelay = max(1, maxAcks), max(0, delay) }
}
