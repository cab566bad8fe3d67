package broker

import (
	"context"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Acker returns a function that acknowledges one offset in the subscription as it is open now, as a consumer's stream
// does, and waits until that is durable.
func (n *Node) Acker(ctx context.Context, topic, name string) (func(context.Context, entry.Offset) error, error) {
	t, err := n.broker.topicFor(ctx, topic, false, false)
	if err != nil {
		return nil, err
	}
	s, err := t.subs.get(ctx, name)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, o entry.Offset) error {
		return s.wait(ctx, func(c *cursor.Cursor) (cursor.Ticket, error) {
			return c.Ack(c.Generation(), t.log.Next(), cursor.Range{First: o, End: o + 1})
		})
	}, nil
}

// Opener finds a topic, as a request does, and returns a function that opens what was found.
func (n *Node) Opener(ctx context.Context, topic string) (func(context.Context) error, error) {
	r, err := n.broker.resolve(ctx, topic, false)
	if err != nil {
		return nil, err
	}
	u, err := n.broker.bundleFor(ctx, r.name)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		_, err := u.open(ctx, r, true)
		return err
	}, nil
}

// LoadSlowly has whoever needs the topic's subscriptions wait, until release, as a state log that is slow does. ensure
// is what a consumer that comes does.
func (n *Node) LoadSlowly(ctx context.Context, topic string) (ensure func(context.Context, string) error, release func(), _ error) {
	t, err := n.broker.topicFor(ctx, topic, false, false)
	if err != nil {
		return nil, nil, err
	}
	loading := make(chan struct{})
	t.subs.mu.Lock()
	t.subs.loading = loading
	t.subs.mu.Unlock()
	ensure = func(ctx context.Context, name string) error {
		_, _, err := t.subs.ensure(ctx, name, nil)
		return err
	}
	return ensure, func() {
		t.subs.mu.Lock()
		defer t.subs.mu.Unlock()
		t.subs.loading = nil
		close(loading)
	}, nil
}
