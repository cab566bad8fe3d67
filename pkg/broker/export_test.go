package broker

import (
	"context"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/subscription"
)

// quiet is a consumer's stream that is delivered nothing.
type quiet struct{}

func (quiet) Send([]dispatch.Delivery) {}
func (quiet) Active(bool)              {}
func (quiet) Stop(error)               {}

// Record returns a topic's record, and FinishDeletion does what a broker does that knows it to be deleted.
func (n *Node) Record(ctx context.Context, topic string) (meta.Topic, error) {
	return n.broker.deps.Meta.GetTopic(ctx, topic)
}

func (n *Node) FinishDeletion(ctx context.Context, record meta.Topic) error {
	return n.broker.finishDeletion(ctx, record)
}

// Replace deletes a topic without ledgers, as another broker may, and creates one of its name, of which this broker then knows.
func (n *Node) Replace(ctx context.Context, topic string) error {
	m := n.broker.deps.Meta
	marked, err := m.MarkTopicDeleting(ctx, topic)
	if err == nil {
		err = m.DeleteTopic(ctx, marked)
	}
	if err == nil {
		marked, err = m.CreateTopic(ctx, topic, 0)
	}
	if err == nil {
		err = n.broker.deps.Cache.WaitRevision(ctx, marked.Rev)
	}
	return err
}

// Acker returns a function that acknowledges one offset in the subscription as it is open now, as a consumer's stream
// does, and waits until that is durable; and one that ends that stream.
func (n *Node) Acker(ctx context.Context, topic, name string) (ack func(context.Context, entry.Offset) error, leave func(), _ error) {
	t, err := n.broker.topicFor(ctx, topic, false, false)
	if err != nil {
		return nil, nil, err
	}
	s, err := t.subs.Get(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	c, err := s.Attach(quiet{}, subscription.Exclusive, dispatch.Consumer{})
	if err != nil {
		return nil, nil, err
	}
	return func(ctx context.Context, o entry.Offset) error {
		done := make(chan error, 1)
		if err := c.Ack([]cursor.Range{{First: o, End: o + 1}}, 0, func(err error) { done <- err }); err != nil {
			return err
		}
		return <-done
	}, c.Close, nil
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

// Tidy looks after a topic of whose namespace no policies are set, or known.
func (n *Node) Tidy(ctx context.Context, topic string, known bool) error {
	t, err := n.broker.topicFor(ctx, topic, false, false)
	if err != nil {
		return err
	}
	t.tidy(ctx, meta.Policies{}, known, true)
	return nil
}

// SnapshotDue reports whether a snapshot of a topic's producers is.
func (n *Node) SnapshotDue(ctx context.Context, topic string) (bool, error) {
	t, err := n.broker.topicFor(ctx, topic, false, false)
	if err != nil {
		return false, err
	}
	return t.log.SnapshotDue(), nil
}
