package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// deletionEvery bounds how often the topics are looked through for such that are to be deleted.
const deletionEvery = 200 * time.Millisecond

// deleteAtOnce is how many topics and namespaces are being deleted at a time, and deletionPatience how long one attempt
// may take: one that hangs must not hold up the others.
const (
	deleteAtOnce     = 16
	deletionPatience = time.Minute
)

// followDeletions finishes the deletion of topics and namespaces: their records are marked by an administrator, and
// whoever owns a bundle deletes what it holds of them. What a crash interrupts, the next owner goes on with.
func (b *Broker) followDeletions(ctx context.Context) {
	ticker := time.NewTicker(deletionEvery)
	defer ticker.Stop()
	d := deletions{b: b, room: make(chan struct{}, deleteAtOnce), ended: make(chan struct{}, 1), underWay: map[string]bool{}}
	defer d.work.Wait()
	for {
		topics, owners, namespaces := b.deps.Cache.Changed(meta.KindTopics), b.deps.Cache.Changed(meta.KindOwners), b.deps.Cache.Changed(meta.KindNamespaces)
		for _, t := range b.deps.Cache.DeletingTopics() {
			d.try(ctx, "topic "+t.Name, func(ctx context.Context) error { return b.finishDeletion(ctx, t) })
		}
		for _, ns := range b.deps.Cache.Namespaces() {
			if ns.Deleting {
				d.try(ctx, "namespace "+ns.Name, func(ctx context.Context) error { return b.finishNamespace(ctx, ns) })
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-topics:
		case <-owners:
		case <-namespaces:
		case <-d.ended: // and failed, or something changed meanwhile
		}
		select { // many changes, one look
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// deletions are those under way.
type deletions struct {
	b     *Broker
	room  chan struct{}
	ended chan struct{} // capacity 1: look again
	work  sync.WaitGroup

	mu       sync.Mutex
	underWay map[string]bool // true: a look in between found it still under way
}

// try has something deleted, unless that is under way, and waits for room only.
func (d *deletions) try(ctx context.Context, what string, do func(context.Context) error) {
	d.mu.Lock()
	_, busy := d.underWay[what]
	d.underWay[what] = busy
	d.mu.Unlock()
	if busy {
		return
	}
	select {
	case d.room <- struct{}{}:
	case <-ctx.Done():
		return
	}
	d.work.Go(func() {
		attempt, cancel := context.WithTimeout(ctx, deletionPatience)
		defer cancel()
		err := do(attempt)
		if err != nil && ctx.Err() == nil {
			d.b.log.Warn("deletion is not finished yet; trying again", "what", what, "error", err)
		}
		d.mu.Lock()
		passedOver := d.underWay[what]
		delete(d.underWay, what)
		d.mu.Unlock()
		<-d.room
		if err != nil || passedOver {
			nudge(d.ended)
		}
	})
}

func nudge(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
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
		if t.record.UUID != record.UUID {
			continue // what is known of the deletion is late: that one is gone, and another has its name
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

// delete ends serving for good.
func (t *servedTopic) delete(ctx context.Context) error {
	if !t.begin(true) {
		return t.movedError()
	}
	err := t.u.subs.Delete(ctx, t.subs)
	t.finish("")
	return err //nolint:wrapcheck // it says what failed
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
	if errors.Is(err, meta.ErrNotEmpty) || errors.Is(err, meta.ErrNotFound) || errors.Is(err, meta.ErrConflict) {
		return nil // other owners have bundles left, or were faster, and it may have been created anew since
	}
	return err //nolint:wrapcheck // it names the namespace
}
