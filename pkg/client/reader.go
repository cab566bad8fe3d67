package client

import (
	"context"
	"iter"
	"time"
)

// Reader reads a topic from a position on, without a subscription: nothing is acknowledged, nothing is stored
// about it, and retention does not wait for it. After a reconnect it goes on behind the last message it handed
// out. It is safe for concurrent use.
type Reader struct {
	s *Consumer
}

// Reader opens a reader. An offset or a position needs a topic without partitions, or one partition's name. Of
// the options, those about prefetch and the name count.
func (c *Client) Reader(ctx context.Context, topic string, from Position, opts ...SubscribeOption) (*Reader, error) {
	cfg := defaultConsumerConfig()
	for _, o := range opts {
		o(&cfg)
	}
	cfg.reader, cfg.start, cfg.subscription, cfg.kind = true, from, "", Exclusive
	s, err := c.consume(ctx, "read", topic, cfg)
	if err != nil {
		return nil, err
	}
	return &Reader{s: s}, nil
}

// Topic returns the topic's full name.
func (r *Reader) Topic() string { return r.s.topic }

// Receive returns the next message, as [Consumer.Receive] does.
func (r *Reader) Receive(ctx context.Context) (*Delivery, error) { return r.s.Receive(ctx) }

// ReceiveBatch returns up to limit messages, as [Consumer.ReceiveBatch] does.
func (r *Reader) ReceiveBatch(ctx context.Context, limit int, wait time.Duration) ([]*Delivery, error) {
	return r.s.ReceiveBatch(ctx, limit, wait)
}

// Messages yields messages, as [Consumer.Messages] does.
func (r *Reader) Messages(ctx context.Context) iter.Seq2[*Delivery, error] { return r.s.Messages(ctx) }

// Close closes the reader.
func (r *Reader) Close(ctx context.Context) error { return r.s.Close(ctx) }
