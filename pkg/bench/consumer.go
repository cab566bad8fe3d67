package bench

import (
	"context"
	"fmt"
	"sync/atomic"
)

// consumer receives a share of what a subscription is to get.
type consumer struct {
	run          *run
	topic        int
	subscription int
	driver       Consumer
	latency      *recorderShard
}

// counts of deliveries that are not the first of a message of this run.
type strays struct {
	duplicates atomic.Uint64 // of a message that the subscription had received
	foreign    atomic.Uint64 // not of this run and topic
}

// consume runs until ctx ends or the driver cannot go on.
func (c *consumer) consume(ctx context.Context) error {
	err := c.driver.Consume(ctx, c.received)
	switch {
	case err != nil && ctx.Err() == nil:
		return fmt.Errorf("consume from %s: %w", c.run.topics[c.topic], err)
	case err == nil && ctx.Err() == nil:
		return fmt.Errorf("consume from %s: driver %s ended without being told to", c.run.topics[c.topic], c.run.driver.Name())
	}
	return nil
}

func (c *consumer) received(value []byte) {
	r := c.run
	now := r.clock.now()
	h, ok := readHeader(value)
	if !ok || h.run != r.id || int(h.producer)/r.scenario.Producers != c.topic || len(value) != r.scenario.Size ||
		h.number >= r.producers[h.producer].sent.Load() {
		r.strays.foreign.Add(1)
		return
	}
	if !r.delivered[c.subscription][h.producer].add(h.number) {
		r.strays.duplicates.Add(1)
		return
	}
	c.latency.record(now, h.due)
	if h.number < r.backlog[h.producer] {
		r.backlogAt.Store(now)
	}
}
