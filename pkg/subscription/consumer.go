package subscription

import (
	"context"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// Stream is a consumer's or reader's way out.
type Stream interface {
	dispatch.Sink
	// Stop ends it with a last word. It must not block.
	Stop(why error)
}

// Consumer is a consumer of a subscription, or a reader, as long as it is connected. Its methods return at once.
type Consumer struct {
	set         *Set
	sub         *Subscription // nil for a reader
	stream      Stream
	runner      *dispatch.Runner
	id          dispatch.ConsumerID
	generation  cursor.Generation // of the cursor when it came
	incarnation []byte
}

// Subscription returns what it consumes, nil for a reader.
func (c *Consumer) Subscription() *Subscription { return c.sub }

// Incarnation differs once the subscription was moved, or deleted and created again: a client can tell by it whether it
// meets the same one as before. It is nil for a reader.
func (c *Consumer) Incarnation() []byte { return c.incarnation }

// Permits allows n more messages.
func (c *Consumer) Permits(n uint32) { c.runner.Permits(c.id, n) }

// Withdraw takes back what was not used of the permits, and returns how many those are.
func (c *Consumer) Withdraw() uint64 { return c.runner.Withdraw(c.id) }

// Ack acknowledges ranges, and everything below upTo. done, if not nil, is called once with nil when that is durable, or
// with the error that prevents it, unless Ack returns an error: cursor.ErrStaleGeneration when the subscription was moved,
// cursor.ErrBeyondEnd, NotFound, and why the state log takes nothing. A reader must not call it.
func (c *Consumer) Ack(ranges []cursor.Range, upTo entry.Offset, done func(error)) error {
	if upTo > 0 {
		ranges = append(ranges, cursor.Range{First: c.sub.Floor(), End: upTo})
	}
	end := c.set.cfg.Topic.Next()
	err := c.sub.change(func(cur *cursor.Cursor) (cursor.Ticket, error) { return cur.Ack(c.generation, end, ranges...) }, done)
	if err != nil {
		return err
	}
	c.runner.Acked(c.generation, c.id, ranges...)
	return nil
}

// Nack gives back what of ranges it holds, to be delivered again after delay. A reader must not call it.
func (c *Consumer) Nack(delay time.Duration, ranges []cursor.Range) {
	c.runner.Nacked(c.id, delay, ranges...)
}

// Close takes it out; what it did not acknowledge is delivered again.
func (c *Consumer) Close() {
	if c.sub != nil {
		c.sub.detach(c)
	} else {
		c.set.removeReader(c)
		c.runner.Close()
	}
	c.set.detached()
}

// source reads a topic for one dispatch.
type source struct {
	t *topic.Topic
	r *topic.Reader
}

// Read returns entries from the one that holds from on.
func (s *source) Read(ctx context.Context, from, until entry.Offset, maxBytes int) ([]dispatch.Entry, entry.Offset, error) {
	if s.r == nil {
		s.r = s.t.NewReader(from)
	} else if s.r.Offset() != from {
		s.r.Seek(from)
	}
	read, err := s.r.Read(ctx, until, maxBytes)
	if err != nil {
		return nil, from, err //nolint:wrapcheck // it says what was read
	}
	out := make([]dispatch.Entry, len(read))
	for i := range read {
		e := &read[i]
		out[i] = dispatch.Entry{
			Offset: e.Envelope.Base, Span: e.Envelope.Span, Position: e.Position, BrokerTime: e.Envelope.BrokerTime, Frame: e.Frame,
		}
	}
	return out, s.r.Offset(), nil
}
