package broker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// tidyAtOnce is how many topics are looked after at a time: one that hangs must not hold up the others.
const tidyAtOnce = 16

// snapshotsEvery is how often topics are asked whether a snapshot of their producers is due: whoever takes one over reads all that
// was appended since the last, before the first publish is answered.
const snapshotsEvery = time.Second

// keepHouse applies retention, expiry, eviction and snapshots to the open topics, again and again. A topic that nobody
// uses is not open, costs nothing, and is looked at when it is used again.
func (b *Broker) keepHouse(ctx context.Context) {
	ticker := time.NewTicker(b.cfg.HousekeepingEvery)
	defer ticker.Stop()
	snapshots := time.NewTicker(min(snapshotsEvery, b.cfg.HousekeepingEvery))
	defer snapshots.Stop()
	var work sync.WaitGroup
	defer work.Wait()
	room := make(chan struct{}, tidyAtOnce)
	for {
		all := false
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			all = true
		case <-snapshots.C:
		}
		for _, u := range b.all() {
			for _, t := range u.opened() {
				if !all && !t.log.SnapshotDue() {
					continue
				}
				if t.inTidy.Swap(true) {
					continue // still, since an earlier look
				}
				select {
				case room <- struct{}{}:
				case <-ctx.Done():
					return
				}
				work.Go(func() {
					ns, known := b.deps.Cache.Namespace(t.name.NamespaceName())
					t.tidy(ctx, ns.Policies, known, all)
					t.inTidy.Store(false)
					<-room
				})
			}
		}
	}
}

// tidy looks after one topic, unless it is no longer served, and until then. What fails is tried again next time. Without its
// policies, because the namespace's record is damaged or of a newer version, nothing is trimmed: they may ask for it. Not all of
// it is only a snapshot.
func (t *servedTopic) tidy(ctx context.Context, policies meta.Policies, known, all bool) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	t.tidying.Lock()
	defer t.tidying.Unlock()
	defer context.AfterFunc(t.inUse, cancel)() //nolint:contextcheck // ends with either
	if t.inUse.Err() != nil {
		return
	}
	trim := t.trim
	if !known {
		trim = func(context.Context, meta.Policies) error { return errPoliciesUnknown }
	}
	for _, step := range []struct {
		what   string
		do     func(context.Context, meta.Policies) error
		always bool
	}{
		{"expire messages", t.applyTTL, false},
		{"apply the backlog quota", t.evict, false},
		{"snapshot producers' sequences", t.snapshotProducers, true},
		{"trim", trim, false},
	} {
		if !all && !step.always {
			continue
		}
		if err := step.do(ctx, policies); err != nil && ctx.Err() == nil {
			t.u.b.log.Warn("housekeeping failed; trying again", "what", step.what, "topic", t.name, "error", err)
		}
	}
}

var errPoliciesUnknown = errors.New("the namespace's record cannot be read, and so nobody knows what is to be retained")

// applyTTL acknowledges unread what is older than the namespace allows.
func (t *servedTopic) applyTTL(ctx context.Context, p meta.Policies) error {
	if p.MessageTTL == nil || *p.MessageTTL == 0 {
		return nil
	}
	subs, err := t.subs.List(ctx)
	if err != nil || len(subs) == 0 {
		return err
	}
	at, err := t.log.OffsetAt(ctx, sched.Real.Now().Add(-*p.MessageTTL).UnixMilli())
	if err != nil {
		return err //nolint:wrapcheck // it says what was looked for
	}
	var errs []error
	for _, s := range subs {
		errs = append(errs, s.Expire(at)) // one that is being deleted refuses, which is nothing to the others
	}
	return errors.Join(errs...)
}

func (t *servedTopic) snapshotProducers(ctx context.Context, _ meta.Policies) error {
	if !t.log.SnapshotDue() {
		return nil
	}
	return t.log.Snapshot(ctx) //nolint:wrapcheck // it says what was saved
}

// trim deletes ledgers that retention no longer asks for. It goes by durable acknowledgements only, and does nothing
// while any subscription cannot be read.
func (t *servedTopic) trim(ctx context.Context, p meta.Policies) error {
	var policy topic.TrimPolicy
	if p.RetentionTime != nil {
		policy.RetainTime = *p.RetentionTime
	}
	if p.RetentionBytes != nil {
		policy.RetainBytes = *p.RetentionBytes
	}
	floor, freed, err := t.subs.Trim(ctx, policy)
	if freed > 0 {
		t.u.b.log.Info("topic is trimmed", "topic", t.name, "bytes", freed, "below", floor)
	}
	return err //nolint:wrapcheck // it says what was trimmed
}
