package meta

import (
	"context"
	"errors"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// CreateTopic creates a topic with a new UUID. name is its full name; partitions is 0 for a topic that is not
// partitioned. When there is one already it returns that one and [ErrExists]; further [ErrNotFound] for the
// namespace, or [ErrDeleting].
func (s *Store) CreateTopic(ctx context.Context, name string, partitions int) (Topic, error) {
	const op = "create topic"
	fail := func(err error) (Topic, error) { return Topic{}, fmt.Errorf("%s %q: %w", op, name, err) }
	n, err := checkTopic(name)
	if err != nil {
		return fail(err)
	}
	if partitions < 0 || partitions > topicname.MaxPartitions {
		return fail(fmt.Errorf("%w: %d partitions, at most %d are allowed", ErrInvalid, partitions, topicname.MaxPartitions))
	}
	topic := Topic{Name: name, UUID: s.newUUID(), Partitions: partitions}
	value, err := encodeTopic(topic)
	if err != nil {
		return fail(err)
	}
	key, ns := s.topicKey(name), n.NamespaceName()
	var t txn
	t.compareRev(key, 0)
	t.compareExists(s.namespaceKey(ns))
	t.compareRev(s.namespaceDeletingKey(ns), 0)
	t.put(key, value)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return Topic{}, err
	}
	if resp.Succeeded {
		topic.Rev = resp.Header.Revision
		return topic, nil
	}
	now := t.results(resp)
	switch {
	case now[key] != nil:
		found, err := decodeTopic(key, name, now[key].Value, now[key].ModRevision)
		if err != nil {
			return fail(err)
		}
		if found.UUID == topic.UUID {
			return found, nil // an earlier attempt of this call, whose reply was lost
		}
		return found, fmt.Errorf("%s %q: %w", op, name, ErrExists)
	case now[s.namespaceKey(ns)] == nil:
		return fail(fmt.Errorf("namespace %q: %w", ns, ErrNotFound))
	}
	return fail(fmt.Errorf("namespace %q: %w", ns, ErrDeleting))
}

// GetTopic reads a topic's record, linearizably, or returns [ErrNotFound].
func (s *Store) GetTopic(ctx context.Context, name string) (Topic, error) {
	const op = "get topic"
	if _, err := checkTopic(name); err != nil {
		return Topic{}, fmt.Errorf("%s: %w", op, err)
	}
	key := s.topicKey(name)
	resp, err := s.read(ctx, op, clientv3.OpGet(key))
	if err != nil {
		return Topic{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Topic{}, fmt.Errorf("%s %q: %w", op, name, ErrNotFound)
	}
	return decodeTopic(key, name, kvs[0].Value, kvs[0].ModRevision)
}

// ListTopics lists a namespace's topics by name.
func (s *Store) ListTopics(ctx context.Context, namespace string) ([]Topic, error) {
	const op = "list topics"
	if err := checkNamespace(namespace); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	resp, err := s.read(ctx, op, clientv3.OpGet(s.topicsPrefix(namespace), clientv3.WithPrefix()))
	if err != nil {
		return nil, err
	}
	var all []Topic
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		t, err := decodeTopic(string(kv.Key), string(kv.Key[len(s.topicKey("")):]), kv.Value, kv.ModRevision)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, nil
}

// MarkTopicDeleting makes a topic's deletion final: its owners stop serving it and delete its ledgers, and
// whoever finds it so may go on with that. It returns [ErrNotFound] when there is none, or the topic goes meanwhile; one
// that is created in its place is left alone.
func (s *Store) MarkTopicDeleting(ctx context.Context, name string) (Topic, error) {
	topic, err := s.GetTopic(ctx, name)
	if err != nil {
		return Topic{}, err
	}
	return s.MarkThisTopicDeleting(ctx, topic)
}

// MarkThisTopicDeleting is [Store.MarkTopicDeleting] of a topic whose record was read before.
func (s *Store) MarkThisTopicDeleting(ctx context.Context, topic Topic) (Topic, error) {
	const op = "mark topic deleting"
	name := topic.Name
	for !topic.Deleting {
		next := topic
		next.Deleting = true
		value, err := encodeTopic(next)
		if err != nil {
			return Topic{}, fmt.Errorf("%s %q: %w", op, name, err)
		}
		key := s.topicKey(name)
		var t txn
		t.compareRev(key, topic.Rev)
		t.put(key, value)
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return Topic{}, err
		}
		if resp.Succeeded {
			next.Rev = resp.Header.Revision
			return next, nil
		}
		kv := t.results(resp)[key]
		if kv == nil {
			return Topic{}, fmt.Errorf("%s %q: %w", op, name, ErrNotFound)
		}
		found, err := decodeTopic(key, name, kv.Value, kv.ModRevision)
		switch {
		case err != nil:
			return Topic{}, err
		case found.UUID != topic.UUID: // an earlier attempt may have marked the other one, which is gone since
			return Topic{}, fmt.Errorf("%s %q: it was deleted and created anew: %w", op, name, ErrNotFound)
		}
		topic = found
	}
	return topic, nil
}

// DeleteTopic removes the record of t, which is marked deleting. It returns [ErrNotEmpty] while a partition
// has a chain, and [ErrConflict] when the record is not t any more. A record that is gone is no error.
func (s *Store) DeleteTopic(ctx context.Context, t Topic) error {
	const op = "delete topic"
	if !t.Deleting {
		return fmt.Errorf("%s %q: %w: it is not marked deleting", op, t.Name, ErrInvalid)
	}
	key := s.topicKey(t.Name)
	var x txn
	x.compareRev(key, t.Rev)
	x.compareEmpty(s.topicChainsPrefix(t.UUID))
	x.del(key)
	resp, err := s.commitTxn(ctx, op, &x)
	if err != nil {
		return err
	}
	if resp.Succeeded {
		return nil
	}
	kv := x.results(resp)[key]
	switch {
	case kv == nil:
		return nil
	case kv.ModRevision != t.Rev:
		return fmt.Errorf("%s %q: %w", op, t.Name, ErrConflict)
	}
	return fmt.Errorf("%s %q: it has ledgers: %w", op, t.Name, ErrNotEmpty)
}

// TopicGone waits until the record of t is gone. A topic of the same name may be there by then: it is another one.
func (c *Cache) TopicGone(ctx context.Context, t Topic) error {
	for {
		changed := c.Changed(KindTopics)
		now, err := c.store.GetTopic(ctx, t.Name)
		switch {
		case errors.Is(err, ErrNotFound), err == nil && now.UUID != t.UUID:
			return nil
		case err != nil:
			return err
		}
		if _, err := c.sched.Wait(ctx, sched.Channels{changed}); err != nil {
			return err //nolint:wrapcheck // the caller's own
		}
	}
}

// TopicStillThere reads the record of t again, linearizably. It returns [ErrNotFound] when that is gone, though another topic may have
// its name, and [ErrDeleting] when it was marked since. Whoever opens a topic asks here: a watch may be late, and what is stored
// for a topic that is gone is never found again.
func (s *Store) TopicStillThere(ctx context.Context, t Topic) error {
	now, err := s.GetTopic(ctx, t.Name)
	switch {
	case err != nil:
		return err
	case now.UUID != t.UUID:
		return fmt.Errorf("topic %q: %w: another one has its name", t.Name, ErrNotFound)
	case now.Deleting && !t.Deleting:
		return fmt.Errorf("topic %q: %w", t.Name, ErrDeleting)
	}
	return nil
}
