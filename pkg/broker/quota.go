package broker

import (
	"context"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// reckonEvery bounds how often backlogs are reckoned up while batches are refused, to find out whether that still holds.
const reckonEvery = 20 * time.Millisecond

// backlogQuota refuses batches while a backlog is over what the namespace allows. Each batch counts against what was left
// when the backlogs were last reckoned up; that is done again when nothing is left. So a batch costs a comparison, and the
// quota bites within a batch or two, and lets go as soon as somebody consumes.
type backlogQuota struct {
	mu       sync.Mutex
	limit    int64 // by which left was reckoned; 0 before the first time
	left     int64
	refusing error
	at       time.Time // of the latest reckoning
}

// admit says whether a batch is taken: nil, or why not.
func (t *servedTopic) admit(bytes int) error {
	policies := t.u.b.policies(t.name.NamespaceName())
	if policies.BacklogBytes == nil || policies.BacklogAction == meta.BacklogEvict {
		return nil
	}
	limit := *policies.BacklogBytes
	q := &t.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	q.left -= int64(bytes)
	recent := time.Since(q.at) < reckonEvery
	if q.limit == limit && (q.refusing == nil && q.left >= 0 || q.refusing != nil && recent) {
		return q.refusing
	}
	subs, known := t.subs.Known()
	if !known { // what the state log has of them is not waited for here
		if recent {
			return nil
		}
		q.at = time.Now()
		t.u.b.spawn(func() {
			ctx, cancel := context.WithTimeout(t.inUse, time.Minute)
			defer cancel()
			_ = t.subs.Load(ctx) // the next batch, or housekeeping, tries again
		})
		return nil
	}
	q.limit, q.left, q.refusing, q.at = limit, limit, nil, time.Now()
	for _, s := range subs {
		backlog := t.log.BytesFrom(s.Floor())
		q.left = min(q.left, limit-backlog)
		if backlog > limit {
			q.refusing = refuse(brokerv1.Code_CODE_BACKLOG_EXCEEDED,
				"publish to %s: subscription %s has a backlog of %d bytes, namespace %s allows %d: consume, delete the subscription, or raise backlog-bytes",
				t.name, s.Name(), backlog, t.name.NamespaceName(), limit)
		}
	}
	return q.refusing
}

// evict acknowledges unread what is over a backlog quota, where the namespace asks for that.
func (t *servedTopic) evict(ctx context.Context, p meta.Policies) error {
	if p.BacklogBytes == nil || p.BacklogAction != meta.BacklogEvict {
		return nil
	}
	subs, err := t.subs.List(ctx)
	if err != nil {
		return err
	}
	for _, s := range subs {
		if t.log.BytesFrom(s.Floor()) <= *p.BacklogBytes {
			continue
		}
		if err := s.Expire(t.log.OffsetKeeping(*p.BacklogBytes)); err != nil {
			return err
		}
	}
	return nil
}
