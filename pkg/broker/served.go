package broker

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/subscription"
	"github.com/penstock-mq/penstock/pkg/topic"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// resolved is a topic's name with its record: an existing topic without partitions, or one partition of one.
type resolved struct {
	name   topicname.Name
	record meta.Topic
}

func (r resolved) index() int { return max(r.name.Partition, 0) }

func (r resolved) chain() meta.ChainID { return meta.DataChain(r.record.UUID, r.index()) }

// stateOwner names the topic or partition in its bundle's state log: its UUID and index, which no later topic has.
func (r resolved) stateOwner() string {
	return string(r.record.UUID[:]) + strconv.Itoa(r.index())
}

// servedTopic is a topic or partition while it is open here.
type servedTopic struct {
	resolved
	u   *bundle
	log *topic.Topic
	// opened is when log was.
	opened time.Time
	subs   *subscription.Set

	// done is closed when the topic is not served here any more, with next set before.
	done chan struct{}
	next string

	// inUse ends when the end of serving begins. Housekeeping holds tidying, and nothing of it is under way afterwards:
	// the topic may be open again soon, under the same epoch.
	inUse   context.Context //nolint:containedctx // a part of the topic's life
	retire  context.CancelFunc
	tidying sync.Mutex

	traffic traffic
	metrics *namespaceMetrics
	looked  looked

	quota  backlogQuota
	inTidy atomic.Bool // housekeeping has it in hand

	mu        sync.Mutex
	stopped   bool
	deleted   bool // stopped, and why
	producers map[*publisher]struct{}
}

// attach adds a producer's stream, unless the topic is no longer served.
func (t *servedTopic) attach(p *publisher) error {
	t.mu.Lock()
	stopped := t.stopped
	if !stopped {
		t.producers[p] = struct{}{}
	}
	t.mu.Unlock()
	if stopped {
		return t.movedError()
	}
	return nil
}

func (t *servedTopic) detach(p *publisher) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.producers, p)
}

// connected counts the producers.
func (t *servedTopic) connected() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.producers)
}

// producerNames lists connected producers by name.
func (t *servedTopic) producerNames() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := make([]string, 0, len(t.producers))
	for p := range t.producers {
		names = append(names, p.name)
	}
	slices.Sort(names)
	return names
}

// begin starts the end of serving; it reports false when that was begun before.
func (t *servedTopic) begin(deleted bool) bool {
	t.mu.Lock()
	first := !t.stopped
	if first {
		t.stopped, t.deleted = true, deleted
	}
	t.mu.Unlock()
	if first {
		t.retire()
		t.tidying.Lock()   // until housekeeping has left
		t.tidying.Unlock() //nolint:staticcheck // likewise
	}
	return first
}

// finish tells every stream where to go.
func (t *servedTopic) finish(next string) {
	t.next = next
	close(t.done)
	t.u.forget(t)
}

// close ends serving in good order: what was taken in is stored and answered, acknowledgements are durable, the ledger
// is closed. Whoever closes second waits for the first.
func (t *servedTopic) close(ctx context.Context, next string) {
	if !t.begin(false) {
		<-t.done
		return
	}
	t.subs.Close(ctx)
	if err := t.log.Close(ctx); err != nil {
		t.u.b.log.Warn("topic could not be closed; the next owner recovers it", "topic", t.name, "error", err)
		t.log.Shutdown()
	}
	t.finish(next)
}

// drop ends serving at once. Batches in flight have an unknown outcome, and their producers find out elsewhere.
func (t *servedTopic) drop(next string) {
	if !t.begin(false) {
		<-t.done
		return
	}
	t.subs.Drop()
	t.log.Shutdown()
	t.finish(next)
}

// movedError says where the topic went, or that it was deleted: whoever is told that it moved would look it up and, where
// topics are created by themselves, create it again. It may be called before done is closed, when that is not known yet. Only a
// bundle that goes to another broker gets a higher epoch: a client takes every answer with a lower one than it was
// told for an old one, so that a topic which is merely closed, or deleted, must not promise one.
func (t *servedTopic) movedError() error {
	t.mu.Lock()
	deleted := t.deleted
	t.mu.Unlock()
	if deleted {
		return refuse(brokerv1.Code_CODE_NOT_FOUND, "topic %s was deleted", t.name)
	}
	m := t.u.moved(t.name.String())
	select {
	case <-t.done:
		m.url = t.next
	default:
	}
	return m
}
