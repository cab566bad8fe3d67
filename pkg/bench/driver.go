package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// ErrUnsupported is wrapped by errors of drivers whose broker has no such thing: an acknowledgement level, partitions.
var ErrUnsupported = errors.New("not supported by this broker")

// Driver puts a workload on one kind of broker. Its methods are safe for concurrent use. A connection per call or one for
// all is the driver's business; what its users commonly do is right.
type Driver interface {
	// Name says which broker this is, and how it is set up where that matters: "penstock", "jetstream R3 sync=always".
	Name() string
	// CreateTopic makes a topic that does not exist yet. Names are of [a-z0-9-]. partitions is at least 1, and 1 means
	// a plain topic where brokers tell those apart.
	CreateTopic(ctx context.Context, topic string, partitions int) error
	// DeleteTopic removes a topic with its subscriptions and its data. Its producers and consumers are closed.
	DeleteTopic(ctx context.Context, topic string) error
	// OpenProducer opens a producer and returns once it may be used.
	OpenProducer(ctx context.Context, topic string, cfg ProducerConfig) (Producer, error)
	// Subscribe opens one consumer of a subscription, which the first of them creates, at the earliest message of the
	// topic. What is published from the return on is kept for the subscription until it is acknowledged. Nothing needs
	// to be fetched before [Consumer.Consume].
	Subscribe(ctx context.Context, topic string, cfg ConsumerConfig) (Consumer, error)
	// Close closes what is shared. Producers and consumers are closed before.
	Close(ctx context.Context) error
}

// ProducerConfig says how a producer behaves.
type ProducerConfig struct {
	// Batching is how messages share a request; its zero fields are the driver's defaults.
	Batching Batching
	// Ack is what must be true before a message counts as published; empty is the driver's default. A level that the
	// broker has not is an error that wraps [ErrUnsupported].
	Ack AckLevel
	// InFlight is how many messages the engine has unanswered at a time, at most, and Size how large each is: a driver
	// sets its own limits of pending messages and bytes so that Publish does not wait for less.
	InFlight, Size int
	// Done is called exactly once for every message, with nil once it is acknowledged, with why not otherwise, by any
	// goroutine, also before Publish returns. It does not block. The message is the engine's again from then on.
	Done func(m *Message, err error)
}

// Producer publishes to one topic. Publish is called by one goroutine at a time.
type Producer interface {
	// Publish hands a message over, in order, and does not wait for its outcome: cfg.Done tells that. The driver reads
	// m until then. It may wait for room; and for the outcome, where only one may be in flight, if that spares a hand-over
	// between goroutines. When ctx ends, every message without an outcome fails soon.
	Publish(ctx context.Context, m *Message)
	// Close waits, bounded by ctx, until every message has had its outcome, and closes the producer. The engine closes
	// each producer once, and publishes nothing after.
	Close(ctx context.Context) error
}

// Message is what the engine publishes. There are [ProducerConfig.InFlight] of them for each producer, used again and
// again.
type Message struct {
	// Key chooses the partition, where there are several; empty: the driver's way of spreading messages.
	Key string
	// Value is the body.
	Value []byte
	// Scratch is the driver's, and stays what it is from use to use: its own form of the message, say.
	Scratch any

	header
	away atomic.Bool // the driver has it
}

// ConsumerConfig says how a consumer behaves.
type ConsumerConfig struct {
	// Subscription is its name, of [a-z0-9-].
	Subscription string
	// Shared: the subscription has other consumers, too, and messages are shared out among them. Otherwise this is its
	// only one.
	Shared bool
}

// Consumer receives a share of a subscription's messages.
type Consumer interface {
	// Consume receives until ctx ends, and then returns nil; an error says why it cannot go on before. It calls
	// received with each message's value, which is the driver's again when that returns, and then acknowledges the
	// message, without waiting until that is durable. It is called once, and received by one goroutine at a time.
	Consume(ctx context.Context, received func(value []byte)) error
	// Close waits, bounded by ctx, until what was acknowledged is durable, and closes the consumer. It is called after
	// Consume has returned, or was never called.
	Close(ctx context.Context) error
}

// Batching says when messages that share a request are sent. A zero field is the driver's default.
type Batching struct {
	// Messages and Bytes fill a batch. Messages 1 is no batching.
	Messages int `yaml:"messages" json:"messages,omitempty"`
	Bytes    int `yaml:"bytes" json:"bytes,omitempty"`
	// Delay bounds the wait for company.
	Delay time.Duration `yaml:"delay" json:"-"`
}

// MarshalJSON writes the delay as text, as it stands in YAML.
func (b Batching) MarshalJSON() ([]byte, error) {
	type plain Batching
	delay := ""
	if b.Delay > 0 {
		delay = b.Delay.String()
	}
	text, err := json.Marshal(struct {
		plain
		Delay string `json:"delay,omitempty"`
	}{plain(b), delay})
	if err != nil {
		return nil, fmt.Errorf("write batching: %w", err)
	}
	return text, nil
}

// AckLevel says what must be true before a message counts as published.
type AckLevel string

// The levels. The empty level is the driver's default.
const (
	AckNone   AckLevel = "none"   // nothing, or: the broker has it in memory
	AckOne    AckLevel = "one"    // one copy
	AckQuorum AckLevel = "quorum" // as many copies as survive a failure
	AckAll    AckLevel = "all"    // all copies
)
