package client

import (
	"context"
	"errors"
	"time"
)

// Delivery is a message handed to the application, which acknowledges it, or gives it back.
type Delivery struct {
	Message
	// ID tells where the message stands.
	ID MessageID
	// Topic is the full name of the topic or partition.
	Topic string
	// Producer is the name of the message's producer.
	Producer string
	// PublishTime is the producer's clock when it framed the message, BrokerTime the broker's when it stored it.
	PublishTime, BrokerTime time.Time
	// RedeliveryCount is how often the message's entry was delivered before on this subscription.
	RedeliveryCount int

	from      *subStream
	size      int64
	epoch     uint64
	streamGen uint64
}

// errReader refuses acknowledgements where there is no subscription.
var errReader = errors.New("a reader has no subscription to acknowledge on")

// Ack acknowledges the message and returns once the broker has that durable. When ctx ends first the outcome is
// unknown, and the client goes on trying; the error names every offset of the partition that is not confirmed, and why the
// last attempt failed.
func (d *Delivery) Ack(ctx context.Context) error { return d.from.ackAndWait(ctx, d, false) }

// AckCumulative acknowledges this message and every one before it in its partition, and returns once the broker
// has that durable. Not for Shared subscriptions.
func (d *Delivery) AckCumulative(ctx context.Context) error { return d.from.ackAndWait(ctx, d, true) }

// AckAsync acknowledges the message with others, soon. The client sends it again after a reconnect until the
// broker has it durable; closing the consumer waits for that.
func (d *Delivery) AckAsync() { d.from.ack(d, nil, false) }

// Nack gives the message back, to be delivered again after delay, to this consumer or another. If the connection
// breaks before the broker knows, the message comes again without the delay.
func (d *Delivery) Nack(delay time.Duration) { d.from.nack(d, delay) }
