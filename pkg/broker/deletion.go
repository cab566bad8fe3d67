package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// deletionEvery bounds how often the topics are looked through for such that are to be deleted.
const deletionEvery = 200 * time.Millisecond

// followDeletions finishes the deletion of topics and namespaces: their records are marked by an administrator, and
// whoever owns a bundle deletes what it holds of them. What a crash interrupts, the next owner goes on with.
func (b *Broker) followDeletions(ctx context.Context) {
	ticker := time.NewTicker(deletionEvery)
	defer ticker.Stop()
	for {
		topics, owners, namespaces := b.deps.Cache.Changed(meta.KindTopics), b.deps.Cache.Changed(meta.KindOwners), b.deps.Cache.Changed(meta.KindNamespaces)
		unfinished := false
		for _, t := range b.deps.Cache.DeletingTopics() {
			if err := b.finishDeletion(ctx, t); err != nil && ctx.Err() == nil {
				unfinished = true
				b.log.Warn("topic could not be deleted yet; trying again", "topic", t.Name, "error", err)
			}
		}
		for _, ns := range b.deps.Cache.Namespaces() {
			if !ns.Deleting {
				continue
			}
			if err := b.finishNamespace(ctx, ns); err != nil && ctx.Err() == nil {
				unfinished = true
				b.log.Warn("namespace could not be deleted yet; trying again", "namespace", ns.Name, "error", err)
			}
		}
		var again <-chan time.Time
		if unfinished {
			again = ticker.C
		}
		select {
		case <-ctx.Done():
			return
		case <-topics:
		case <-owners:
		case <-namespaces:
		case <-again:
			continue
		}
		select { // many changes, one look
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// finishDeletion deletes the partitions of a topic that are served here, and the topic's record once all are gone.
func (b *Broker) finishDeletion(ctx context.Context, record meta.Topic) error {
	base, err := topicname.Parse(record.Name)
	if err != nil {
		return fmt.Errorf("parse the name of a stored topic: %w", err)
	}
	mine := false
	for _, name := range partitionsOf(base, record) {
		id, err := b.bundleOf(ctx, name)
		if err != nil {
			return err
		}
		b.owner.Want(id) // whoever should serve it, takes it
		u, _ := b.served(id)
		if u == nil {
			continue
		}
		mine = true
		t, err := u.open(ctx, resolved{name: name, record: record}, false)
		if err != nil {
			return err
		}
		if err := t.delete(ctx); err != nil {
			return err
		}
	}
	if !mine {
		return nil
	}
	err = b.deps.Meta.DeleteTopic(ctx, record)
	if errors.Is(err, meta.ErrNotEmpty) || errors.Is(err, meta.ErrNotFound) {
		return nil // other owners have partitions left, or were faster
	}
	return err //nolint:wrapcheck // it names the topic
}

// partitionsOf lists the names under which a topic is served.
func partitionsOf(base topicname.Name, record meta.Topic) []topicname.Name {
	if record.Partitions == 0 {
		return []topicname.Name{base}
	}
	names := make([]topicname.Name, record.Partitions)
	for i := range names {
		names[i] = base.WithPartition(i)
	}
	return names
}

// delete ends serving for good: what the state log has of the topic goes first, so that a deletion which is interrupted
// leaves nothing behind that nobody looks for.
func (t *servedTopic) delete(ctx context.Context) error {
	if !t.begin() {
		return t.movedError()
	}
	t.subs.close(ctx)
	err := t.forgetState(ctx)
	if err == nil {
		err = t.log.Delete(ctx)
	}
	if err != nil {
		t.log.Shutdown()
	}
	t.finish("")
	return err
}

// finishNamespace deletes the state logs of a namespace's bundles that are served here, and its record once all are
// gone. Topics it has none any more.
func (b *Broker) finishNamespace(ctx context.Context, ns meta.Namespace) error {
	for _, bundle := range ns.Bundles {
		b.owner.Want(bundle.ID)
		u, _ := b.served(bundle.ID)
		if u == nil {
			continue
		}
		log, err := u.stateLog(ctx)
		if err != nil {
			return err
		}
		if err := log.Chain().Delete(ctx); err != nil {
			return fmt.Errorf("delete state log of bundle %s: %w", bundle.ID, err)
		}
	}
	err := b.deps.Meta.DeleteNamespace(ctx, ns.Name)
	if errors.Is(err, meta.ErrNotEmpty) || errors.Is(err, meta.ErrNotFound) {
		return nil // other owners have bundles left, or were faster
	}
	return err //nolint:wrapcheck // it names the namespace
}
