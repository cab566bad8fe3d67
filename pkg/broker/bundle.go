package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/subscription"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// Pauses between attempts to open a state log or a topic.
const (
	openPauseMin = 20 * time.Millisecond
	openPauseMax = 2 * time.Second
)

// bundle is one bundle while it is served here: its guard, its state log, and the topics that somebody uses. Its life
// ends before or with its ownership; everything under it ends first.
type bundle struct {
	b     *Broker
	guard meta.Guard
	taken time.Time // when it was

	life context.Context //nolint:containedctx // the time that the bundle is served here
	end  context.CancelFunc
	run  sync.WaitGroup

	// opening ends before life: once the bundle is about to go, what is not open yet is the next owner's to open.
	opening     context.Context //nolint:containedctx // likewise
	stopOpening context.CancelFunc

	stateReady chan struct{} // closed once state is set
	state      *statelog.Log

	subs *subscription.Bundle

	mu      sync.Mutex
	closing bool // no topic is opened any more
	next    string
	topics  map[string]*slot // by full name of topic or partition
	// setbacks are of topics that were lost while the bundle was not.
	setbacks map[string]setback
}

// setback is how often in a row a topic was lost soon after it had been opened.
type setback struct {
	n    int
	last time.Time
}

// Whoever uses a topic that is lost has it opened again, at once the first time. What refuses its owner as often as it is opened, as
// bookies do after a restore of etcd from an older copy, is not asked as fast as etcd answers. A topic that was served for settledAfter
// is as good as new.
const (
	reopenPauseMin = 50 * time.Millisecond
	reopenPauseMax = 5 * time.Second
	settledAfter   = 10 * time.Second
)

// next is the setback after this one of a topic that was served for so long.
func (s setback) next(served time.Duration, now time.Time) setback {
	if served >= settledAfter {
		s.n = 0
	}
	return setback{n: s.n + 1, last: now}
}

// pause lies before the next opening.
func (s setback) pause() time.Duration {
	if s.n < 2 {
		return 0
	}
	return sched.Doubled(reopenPauseMin, s.n-2, reopenPauseMax)
}

// slot is a topic that is being opened, or is open.
type slot struct {
	ready chan struct{} // closed once t or err is set
	t     *servedTopic
	err   error

	// Guarded by the bundle's lock, until it is ready.
	producing bool     // a producer waits for it
	opening   *opening // its place among those that are opened; nil before it has one
}

func newBundle(b *Broker, g meta.Guard) *bundle {
	u := &bundle{b: b, guard: g, taken: time.Now(), stateReady: make(chan struct{}), topics: map[string]*slot{}, setbacks: map[string]setback{}}
	u.life, u.end = context.WithCancel(b.life)
	u.opening, u.stopOpening = context.WithCancel(u.life)
	u.subs = subscription.NewBundle(subscription.Env{
		State: u.stateLog, Life: u.life, Go: b.spawn, Reads: b.reads, Dispatch: b.dispatch, Log: b.log,
	})
	u.run.Go(u.keepState)
	return u
}

// keepState opens the state log, which ends what the former owner may confirm, and gives the bundle up when it is
// lost.
func (u *bundle) keepState() {
	pause := openPauseMin
	for {
		log, err := statelog.Open(u.opening, u.b.stateEnv, u.guard, u.guard.Bundle, statelog.Config{Replication: u.b.stateReplication(u.guard.Bundle)})
		if err == nil {
			u.state = log
			close(u.stateReady)
			u.b.metrics.takeovers.Inc()
			took := time.Since(u.taken)
			u.b.metrics.takeoverSeconds.Observe(took.Seconds())
			u.b.log.Info("state log of bundle is open", "bundle", u.guard.Bundle, "epoch", u.guard.Epoch, "took", took)
			break
		}
		switch {
		case u.opening.Err() != nil:
			return
		case lostOwnership(err):
			u.b.owner.Fenced(u.guard)
			return
		}
		u.b.metrics.openFailures.Inc()
		u.b.log.Warn("state log of bundle could not be opened; trying again", "bundle", u.guard.Bundle, "epoch", u.guard.Epoch, "pause", pause, "error", err)
		if !sleep(u.opening, pause) {
			return
		}
		pause = min(2*pause, openPauseMax)
	}
	select {
	case <-u.life.Done():
	case <-u.state.Lost():
		u.b.log.Warn("state log of bundle is lost", "bundle", u.guard.Bundle, "epoch", u.guard.Epoch, "error", u.state.Err())
		u.b.owner.Fenced(u.guard)
	}
}

// lostOwnership reports whether err proves that another broker has the bundle.
func lostOwnership(err error) bool { return errors.Is(err, meta.ErrEpoch) }

// stateLog returns the bundle's state log, waiting until it is open.
func (u *bundle) stateLog(ctx context.Context) (*statelog.Log, error) {
	select {
	case <-u.stateReady:
		return u.state, nil
	default:
	}
	select {
	case <-u.stateReady:
		return u.state, nil
	case <-u.opening.Done():
		return nil, u.moved(string(u.guard.Bundle))
	case <-ctx.Done():
		return nil, unavailable("open state log of bundle", string(u.guard.Bundle), ctx.Err())
	}
}

// moved says where a topic of the bundle is to be looked for: here again, unless the bundle is not served here any more.
func (u *bundle) moved(name string) *movedError {
	u.mu.Lock()
	defer u.mu.Unlock()
	m := &movedError{topic: name, bundle: u.guard.Bundle, url: u.next, epoch: u.guard.Epoch}
	if u.closing {
		m.epoch++ // the next owner's at the least: a takeover raises it
	}
	return m
}

// open returns a topic of the bundle, opening it on first use. The opening goes on when ctx ends.
func (u *bundle) open(ctx context.Context, r resolved, producing bool) (*servedTopic, error) {
	name := r.name.String()
	u.mu.Lock()
	if u.closing {
		u.mu.Unlock()
		return nil, u.moved(name)
	}
	s, ok := u.topics[name]
	switch {
	case !ok:
		s = &slot{ready: make(chan struct{}), producing: producing}
		u.topics[name] = s
		u.run.Go(func() { u.fill(s, r) })
	case producing && !s.producing:
		s.producing = true
		if s.opening != nil {
			u.b.openings.hasten(s.opening)
		}
	}
	u.mu.Unlock()
	select {
	case <-s.ready:
	case <-ctx.Done():
		return nil, unavailable("open topic", name, ctx.Err())
	}
	if s.err == nil && s.t.record.UUID != r.record.UUID {
		return u.either(ctx, s.t)
	}
	return s.t, s.err
}

// either returns a topic that is open under the name of one that was asked for, if that is the older of the two. If it is gone,
// it is dropped: where it has no ledgers, its deletion waits for nobody who has it open.
func (u *bundle) either(ctx context.Context, t *servedTopic) (*servedTopic, error) {
	switch err := u.b.deps.Meta.TopicStillThere(ctx, t.record); {
	case errors.Is(err, meta.ErrNotFound):
		t.drop("")
		return nil, refuse(brokerv1.Code_CODE_UNAVAILABLE, "topic %s was deleted a moment ago; try again", t.name)
	case err != nil && !errors.Is(err, meta.ErrDeleting):
		return nil, fmt.Errorf("open topic %s: %w", t.name, err)
	}
	return t, nil
}

// fill opens the topic of a slot. A slot that failed is removed, so that the next use tries again.
func (u *bundle) fill(s *slot, r resolved) {
	u.mu.Lock()
	pause := u.setbacks[r.name.String()].pause()
	u.mu.Unlock()
	if pause > 0 {
		sleep(u.opening, pause/2+sched.N(sched.Real, pause/2+1)) // if that ends first, so does what follows
	}
	producing, end := u.awaitTurn(s)
	t, err := u.openTopic(r, producing)
	end()
	if err != nil {
		u.b.metrics.openFailures.Inc()
		if lostOwnership(err) {
			u.b.owner.Fenced(u.guard)
		}
	}
	u.mu.Lock()
	if err != nil {
		delete(u.topics, r.name.String())
	}
	s.t, s.err = t, err
	u.mu.Unlock()
	close(s.ready)
}

// awaitTurn waits until a slot's topic may be opened, or not at all any more, which is found out by opening it. It returns
// whether a producer waits for it by then; end must be called.
func (u *bundle) awaitTurn(s *slot) (producing bool, end func()) {
	all := &u.b.openings
	u.mu.Lock()
	s.opening = all.ask(s.producing)
	u.mu.Unlock()
	select {
	case <-s.opening.turn:
	case <-u.opening.Done():
	}
	hold := time.AfterFunc(openingHold, func() { all.end(s.opening) })
	u.mu.Lock()
	defer u.mu.Unlock()
	return s.producing, func() {
		hold.Stop()
		all.end(s.opening)
	}
}

func (u *bundle) openTopic(r resolved, producing bool) (*servedTopic, error) {
	// The record was found before the slot was taken. If the topic was deleted in between, opening it would store what
	// nobody finds again; if it is deleted from now on, the slot is found.
	if err := u.b.stillThere(u.opening, r); err != nil {
		return nil, err
	}
	replication, err := u.b.policies(r.name.NamespaceName()).Replication(u.b.cfg.Replication)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the policy
	}
	began := time.Now()
	t := &servedTopic{u: u, resolved: r, metrics: u.b.metrics.of(r.name.NamespaceName()), producers: map[*publisher]struct{}{}, done: make(chan struct{})}
	t.inUse, t.retire = context.WithCancel(u.life)
	// What was looked at may come from a late cache: opening a ledger looks again, in its own transaction.
	guard := u.guard
	guard.Topic = &t.record
	t.log, err = topic.Open(u.opening, u.b.topicEnv, guard, r.chain(), topic.Config{
		Replication: replication, RollBytes: u.b.cfg.RollBytes, RollAge: u.b.cfg.RollAge, OpenNow: producing,
		Snapshots: u.subs.Snapshots(t.stateOwner()),
	})
	if err != nil {
		t.retire()
		return nil, err //nolint:wrapcheck // chain.Open says what failed
	}
	t.opened = time.Now()
	u.b.metrics.topicOpenSeconds.Observe(t.opened.Sub(began).Seconds())
	t.subs = u.subs.NewSet(subscription.Config{
		Name: t.name.String(), Owner: t.stateOwner(), Topic: t.log, Core: t.core, Gone: t.movedError,
	})
	return t, nil
}

// forget removes a topic that is no longer served, if it is still the one in its slot.
func (u *bundle) forget(t *servedTopic) {
	u.subs.Forget(t.subs)
	u.mu.Lock()
	defer u.mu.Unlock()
	name := t.name.String()
	if s, ok := u.topics[name]; ok && s.t == t {
		delete(u.topics, name)
	}
}

// opened returns the topics that are open now.
func (u *bundle) opened() []*servedTopic {
	u.mu.Lock()
	defer u.mu.Unlock()
	out := make([]*servedTopic, 0, len(u.topics))
	for _, s := range u.topics {
		if s.t != nil {
			out = append(out, s.t)
		}
	}
	return out
}

// shut lets nothing new in, and stops what is being opened.
func (u *bundle) shut(next string) []*servedTopic {
	u.mu.Lock()
	u.closing, u.next = true, next
	slots := make([]*slot, 0, len(u.topics))
	for _, s := range u.topics {
		slots = append(slots, s)
	}
	u.mu.Unlock()
	u.stopOpening()
	topics := make([]*servedTopic, 0, len(slots))
	for _, s := range slots {
		<-s.ready
		if s.t != nil {
			topics = append(topics, s.t)
		}
	}
	return topics
}

// handOverPatience is how long a hand-over goes on without getting anywhere: what is closed needs etcd, and bookies for
// what is on its way to them. What is dropped instead is the next owner's to recover.
const handOverPatience = 2 * time.Second

var errHandOverStuck = errors.New("nothing could be closed for a while")

// handOver closes topics and state log in good order, then tells clients to go to next. When ctx ends first, or nothing
// could be closed for handOverPatience, what is left is dropped.
func (u *bundle) handOver(ctx context.Context, next string) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, u.end)()                                          // openings too end with it
	stuck := time.AfterFunc(handOverPatience, func() { cancel(errHandOverStuck) }) // it may run late: nothing is said there
	defer stuck.Stop()
	var closing sync.WaitGroup
	for _, t := range u.shut(next) {
		closing.Go(func() {
			t.close(ctx, next)
			if ctx.Err() == nil {
				stuck.Reset(handOverPatience)
			}
		})
	}
	closing.Wait()
	if errors.Is(context.Cause(ctx), errHandOverStuck) {
		u.b.log.Warn("bundle cannot be handed over in good order; the next owner recovers it", "bundle", u.guard.Bundle, "epoch", u.guard.Epoch)
	}
	select {
	case <-u.stateReady:
		if err := u.state.Close(ctx); err != nil {
			u.b.log.Warn("state log of bundle could not be closed; the next owner recovers it", "bundle", u.guard.Bundle, "error", err)
		}
	default:
	}
	u.end()
	u.run.Wait()
	u.dropState()
}

// drop lets go of everything at once: another broker has the bundle, or the process ends.
func (u *bundle) drop(next string) {
	u.mu.Lock()
	u.closing, u.next = true, next
	u.mu.Unlock()
	u.end() // first of all; openings fail with it
	for _, t := range u.shut(next) {
		t.drop(next)
	}
	u.run.Wait()
	u.dropState()
}

// dropState shuts the state log down, if it was opened; nobody opens it any more.
func (u *bundle) dropState() {
	select {
	case <-u.stateReady:
		u.state.Shutdown()
	default:
	}
}

// topicLost gives up a topic whose log is lost, or the whole bundle if that proves a newer owner.
func (u *bundle) topicLost(t *servedTopic) {
	if t.inUse.Err() != nil { // it is closed on purpose
		<-t.done
		return
	}
	err := t.log.Err()
	u.b.log.Warn("topic is lost", "topic", t.name, "bundle", u.guard.Bundle, "epoch", u.guard.Epoch, "error", err)
	if lostOwnership(err) {
		u.b.owner.Fenced(u.guard)
		return // Stop drops the topic
	}
	u.noteSetback(t.name.String(), t.opened, time.Now())
	t.drop(u.b.cfg.Self.URL)
}

// noteSetback counts the loss of a topic, and forgets what is long past.
func (u *bundle) noteSetback(topic string, opened, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.setbacks, func(_ string, s setback) bool { return now.Sub(s.last) >= 2*(settledAfter+reopenPauseMax) })
	u.setbacks[topic] = u.setbacks[topic].next(now.Sub(opened), now)
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
