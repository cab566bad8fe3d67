package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/subscription"
	product "github.com/penstock-mq/penstock/pkg/topic"
)

// messaging is the kind of bundles that producers and consumers use: a state log, topics with deduplication, and their
// subscriptions.
type messaging struct {
	w      *world
	tp     *topic
	names  []string                  // of topics
	topics []*dataTopic              // the newest of each name
	all    []*dataTopic              // that ever were
	at     map[*broker]*servedBundle // the newest of each broker

	producers   []*producer
	lets        int                  // incarnations that were let in
	attempts    map[string]*attempts // of new incarnations to be let in, by name
	subscribers []*subscriber
	conns       []*conn

	cacheBytes, memory, reads int64
	retainTime                time.Duration
	retainBytes               int64
	ttl                       time.Duration
	stateFloor                int64
	snapshotEntries           int64
	tidyEvery                 time.Duration
	deletes                   bool // topics are deleted, and made again

	healing bool // no new work; consumers acknowledge all there is
	done    func()
}

// dataTopic is a topic, until it is deleted.
type dataTopic struct {
	m        *messaging
	name     string
	uuid     entry.UUID
	chain    meta.ChainID
	owner    string // in the state log
	deleting bool   // marked: from now on nothing of it is sure to be there
	gone     bool
	truth
}

func newMessaging(w *world) {
	m := &messaging{
		w: w, at: map[*broker]*servedBundle{}, attempts: map[string]*attempts{},
		cacheBytes: int64(1) << w.rng.IntN(16), memory: int64(2<<10) << w.rng.IntN(10), reads: int64(256) << w.rng.IntN(10),
		stateFloor: int64(1<<10) << w.rng.IntN(8), snapshotEntries: int64(5 + w.rng.IntN(100)),
		tidyEvery: w.between(100*time.Millisecond, 3*time.Second),
	}
	if w.chance(3) {
		m.retainTime = w.between(0, 10*time.Second)
	}
	if w.chance(3) {
		m.retainBytes = int64(w.rng.IntN(16 << 10))
	}
	if w.chance(6) {
		m.ttl = w.between(5*time.Second, 20*time.Second)
	}
	if w.overload.rng != nil {
		m.memory = w.overload.memory
	}
	w.messagings = append(w.messagings, m)
	n := len(w.topics)
	w.addTopic(m, meta.StateChain(w.bundleOf(n)))
	m.tp = w.topics[n]
	m.tp.more = map[meta.ChainID]bool{}
	m.deletes = w.chance(3)
	for i := range 1 + w.rng.IntN(2) {
		m.names, m.topics = append(m.names, fmt.Sprintf("public/default/t%d-%d", n, i)), append(m.topics, nil)
		record, err := w.checker.CreateTopic(context.Background(), m.names[i], 0)
		if err != nil {
			panic(err)
		}
		m.newTopic(i, record)
		m.newClients(i)
	}
	w.after(w.between(0, 4*time.Second), m.administer)
}

// newTopic notes a topic that was made.
func (m *messaging) newTopic(i int, record meta.Topic) {
	u := record.UUID
	t := &dataTopic{m: m, name: fmt.Sprintf("t%d.%d", m.tp.index, len(m.all)), uuid: u, chain: meta.DataChain(u, 0), owner: string(u[:]) + "0"}
	t.init()
	m.tp.more[t.chain] = true
	m.topics[i], m.all = t, append(m.all, t)
	m.w.trace("etcd", t.subject(), "%s is made as %s", record.Name, t.name)
}

// newClients makes those who use a topic.
func (m *messaging) newClients(i int) {
	w := m.w
	for n := range 1 + w.rng.IntN(3) {
		p := &producer{
			m: m, topic: i, name: fmt.Sprintf("p%d.%d.%d", m.tp.index, i, n), dedup: w.chance(2), level: pick(w.kernel, w.levels),
			pace: w.between(w.pace, 8*w.pace), most: 1 + w.rng.IntN(8),
		}
		m.producers = append(m.producers, p)
		w.after(w.between(0, time.Second), p.tick)
	}
	for n := range 1 + w.rng.IntN(3) {
		kind := subscription.Type(1 + w.rng.IntN(3))
		name := fmt.Sprintf("s%d", n)
		consumers := 1 + w.rng.IntN(3)
		if w.chance(5) {
			name, consumers = "", 1 // a reader
		}
		for j := range consumers {
			s := &subscriber{m: m, topic: i, sub: name, kind: kind, name: fmt.Sprintf("c%d.%d.%s.%d", m.tp.index, i, name, j), priority: int32(w.rng.IntN(2))}
			s.style()
			m.subscribers = append(m.subscribers, s)
			w.after(w.between(0, 2*time.Second), s.tick)
		}
	}
}

func (w *world) tidy(m *messaging) time.Duration {
	return calmer(w, w.between(m.tidyEvery/2, m.tidyEvery*2), 5)
}

// servedBundle is the bundle at a broker that serves it.
type servedBundle struct {
	m      *messaging
	b      *broker
	life   int
	guard  meta.Guard
	ctx    context.Context //nolint:containedctx // as long as it is served
	cancel context.CancelFunc
	run    *sched.Group
	state  *statelog.Log
	subs   *subscription.Bundle
	env    product.Env
	topics map[*dataTopic]*servedTopic
	held   bytesHeld
	closed bool
	over   bool          // all of it has ended
	gone   chan struct{} // closed when it is of no use any more
	down   chan struct{} // closed when all of it has ended
}

// servedTopic is a topic while it is open at a broker.
type servedTopic struct {
	s *servedBundle
	t *dataTopic
	// record is the topic's, as it was found.
	record meta.Topic
	log    *product.Topic
	set    *subscription.Set
	views  map[string]*view
	// trimming is when the trim under way was begun; 0: none is.
	trimming time.Duration
	tidying  sched.Turn
	ended    bool
	newest   map[string]rank       // the incarnations that it let in, as far as it remembers them
	present  map[string]*publisher // those that have not left
}

var errMoved = errors.New("sim: the topic is not served here")

func (m *messaging) open(ctx context.Context, b *broker, _ *topic, guard meta.Guard) (service, error) {
	if old := m.at[b]; old != nil && old.life == b.life {
		if _, err := b.sched.Wait(ctx, sched.Channels{old.down}); err != nil {
			return nil, err //nolint:wrapcheck // as a context says it
		}
	}
	s := &servedBundle{
		m: m, b: b, life: b.life, guard: guard, run: sched.NewGroup(b.sched), topics: map[*dataTopic]*servedTopic{},
		gone: make(chan struct{}), down: make(chan struct{}),
	}
	gone := m.gone()
	state, err := statelog.Open(ctx, statelog.Env{Chain: b.chainEnv(guard)}, guard, guard.Bundle, statelog.Config{Replication: m.w.replication, FloorBytes: m.stateFloor})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what failed
	}
	s.state = state
	s.ctx, s.cancel = context.WithCancel(context.Background())
	waiting := func(ctx context.Context, ready <-chan struct{}) error {
		_, err := b.sched.Wait(ctx, sched.Channels{ready})
		return err //nolint:wrapcheck // as a context says it
	}
	s.held.publish, s.held.reads, s.held.cache = budget.NewWaiting(m.memory, waiting), budget.NewWaiting(m.reads, waiting), product.NewCache(m.cacheBytes)
	s.env = product.Env{Cache: s.held.cache, Budget: s.held.publish, Sched: b.sched}
	s.subs = subscription.NewBundle(subscription.Env{
		State: func(context.Context) (*statelog.Log, error) { return s.state, nil },
		Life:  s.ctx,
		Go: func(f func()) bool {
			if s.ctx.Err() != nil {
				return false
			}
			s.run.Go(f)
			return true
		},
		Reads: s.held.reads, Sched: b.sched,
	})
	m.at[b] = s
	s.checkGone(gone)
	for i := range m.names {
		s.run.Go(func() { s.keep(i) })
	}
	s.run.Go(func() {
		if i, _ := b.sched.Wait(s.ctx, sched.Channels{s.state.Lost()}); i == 0 {
			s.lose()
		}
	})
	return s, nil
}

// outdated reports whether another broker has the bundle by etcd's word.
func (s *servedBundle) outdated() bool {
	o, err := s.m.w.checker.GetOwner(context.Background(), s.m.tp.bundle)
	return err != nil || o.Epoch != s.guard.Epoch
}

func (s *servedBundle) lost() <-chan struct{} { return s.gone }

func (s *servedBundle) lose() {
	if !s.closed {
		s.closed = true
		close(s.gone)
	}
}

// keep serves a topic, and again whenever it is lost.
func (s *servedBundle) keep(i int) {
	b := s.b
	for s.ctx.Err() == nil && !s.closed {
		st, err := s.openTopic(i)
		if err == nil {
			err = st.await()
		}
		if errors.Is(err, meta.ErrEpoch) {
			s.lose()
		}
		_ = sched.Sleep(s.ctx, b.sched, b.w.between(20*time.Millisecond, 500*time.Millisecond))
	}
}

func (s *servedBundle) openTopic(i int) (*servedTopic, error) {
	m, b := s.m, s.b
	record, err := b.record(s.ctx, m.names[i])
	if err == nil {
		err = b.meta.TopicStillThere(s.ctx, record)
	}
	if err != nil {
		return nil, err
	}
	t := m.all[slices.IndexFunc(m.all, func(t *dataTopic) bool { return t.uuid == record.UUID })]
	guard := s.guard
	guard.Topic = &record
	env := s.env
	env.Chain = b.chainEnv(guard)
	log, err := product.Open(s.ctx, env, guard, t.chain, product.Config{
		Replication: m.w.replication, RollBytes: m.w.limits.Bytes, RollEntries: m.w.limits.Entries, RollAge: m.w.limits.Age,
		OpenNow: !record.Deleting && m.w.chance(2), Snapshots: s.subs.Snapshots(t.owner),
		Dedup: product.DedupConfig{SnapshotEntries: m.snapshotEntries},
	})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what failed
	}
	st := &servedTopic{s: s, t: t, record: record, log: log, views: map[string]*view{}, newest: map[string]rank{}, present: map[string]*publisher{}}
	st.set = s.subs.NewSet(subscription.Config{
		Name: t.name, Owner: t.owner, Topic: log, Gone: func() error { return errMoved },
		Core: func(k subscription.Type) dispatch.Core {
			cfg := dispatch.DefaultConfig(k == subscription.Shared)
			cfg.ReadBytes = 1 + int(m.reads)
			if m.reads < 1<<12 {
				cfg.MaxUnackedPerConsumer, cfg.MaxUnackedPerSubscription, cfg.MaxDelayed = 20, 30, 5
			}
			switch k {
			case subscription.Failover:
				return dispatch.NewFailover(cfg)
			case subscription.Shared:
				return dispatch.NewShared(cfg)
			case subscription.Exclusive:
			}
			return dispatch.NewExclusive(cfg)
		},
	})
	m.w.trace(b.name, t.subject(), "opened %s with epoch %d at offset %d", t.name, s.guard.Epoch, log.Next())
	subs, err := st.set.List(s.ctx)
	if err != nil {
		if m.w.restored { // a broker keeps a topic whose subscriptions cannot be read; this one opens it again for whoever asks
			_ = sched.Sleep(s.ctx, s.b.sched, 2*time.Second)
		}
		s.drop(st)
		return nil, err //nolint:wrapcheck // it says what failed
	}
	if s.ctx.Err() != nil || s.closed {
		s.drop(st)
		return nil, errMoved
	}
	if !t.deleting {
		st.loaded(subs)
	}
	s.topics[t] = st
	if !record.Deleting {
		s.run.Go(st.housekeeping)
	}
	return st, nil
}

// drop ends a topic at once.
func (s *servedBundle) drop(st *servedTopic) {
	if st.ended { // by a deletion, maybe
		_ = st.tidying.Take(context.Background(), s.b.sched)
		st.tidying.Give()
		return
	}
	st.ended = true
	if s.topics[st.t] == st {
		delete(s.topics, st.t)
	}
	_ = st.tidying.Take(context.Background(), s.b.sched)
	st.set.Drop()
	st.log.Shutdown()
	s.subs.Forget(st.set)
	st.disconnect()
}

// disconnect lets go of all who use the topic.
func (st *servedTopic) disconnect() {
	for _, c := range st.s.m.conns {
		if c.st == st {
			c.serverEnds()
		}
	}
}

func (s *servedBundle) close(ctx context.Context) error {
	s.closed = true
	var failure error
	for _, t := range s.m.all {
		st := s.topics[t]
		if st == nil {
			continue
		}
		if st.ended { // it is being deleted
			if err := st.tidying.Take(ctx, s.b.sched); err == nil {
				st.tidying.Give()
			}
			continue
		}
		st.ended = true
		delete(s.topics, t)
		_ = st.tidying.Take(ctx, s.b.sched)
		st.set.Close(ctx)
		if err := st.log.Close(ctx); err != nil {
			failure = err
			st.log.Shutdown()
		}
		s.subs.Forget(st.set)
	}
	if err := s.state.Close(ctx); err != nil {
		failure = err
	}
	s.end()
	return failure
}

func (s *servedBundle) shutdown() {
	if s.ctx.Err() != nil {
		_, _ = s.b.sched.Wait(context.Background(), sched.Channels{s.down})
		return
	}
	s.closed = true
	s.cancel()
	for _, t := range s.m.all {
		if st := s.topics[t]; st != nil {
			s.drop(st)
		}
	}
	s.state.Shutdown()
	s.end()
}

// end lets go of all who are connected.
func (s *servedBundle) end() {
	s.cancel()
	for _, c := range s.m.conns {
		if c.b == s.b && c.life == s.life && c.s == s {
			c.serverEnds()
		}
	}
	s.run.Wait()
	s.over = true
	s.ended()
	close(s.down)
}

// topic returns an open topic, whichever of that name it is.
func (s *servedBundle) topic(i int) *servedTopic {
	for _, t := range s.m.all {
		if st := s.topics[t]; st != nil && !st.ended && st.record.Name == s.m.names[i] && !st.record.Deleting {
			return st
		}
	}
	return nil
}

// whole reports whether every topic of the bundle is open.
func (s *servedBundle) whole() bool {
	for i := range s.m.names {
		if s.topic(i) == nil {
			return false
		}
	}
	return true
}

// housekeeping looks after the topic until it is lost or dropped.
func (st *servedTopic) housekeeping() {
	s, w := st.s, st.s.m.w
	for !st.ended {
		_ = sched.Sleep(s.ctx, s.b.sched, w.tidy(s.m))
		if s.ctx.Err() != nil || st.ended {
			return
		}
		if st.tidying.Take(s.ctx, s.b.sched) != nil {
			return
		}
		if !st.ended {
			st.tidy()
		}
		st.tidying.Give()
	}
}

func (st *servedTopic) tidy() {
	s, m, w := st.s, st.s.m, st.s.m.w
	ctx, cancel := s.b.sched.WithTimeout(s.ctx, 20*time.Second)
	defer cancel()
	if m.ttl > 0 {
		if at, err := st.log.OffsetAt(ctx, w.clock().Add(-m.ttl).UnixMilli()); err == nil {
			subs, _ := st.set.List(ctx)
			for _, sub := range subs {
				_ = st.view(sub).expire(at) // one that is being deleted refuses
			}
		}
	}
	if st.log.SnapshotDue() {
		_ = st.log.Snapshot(ctx)
	}
	if w.trims {
		st.trimming = w.now
		floor, freed, err := st.set.Trim(ctx, product.TrimPolicy{RetainTime: m.retainTime, RetainBytes: m.retainBytes})
		st.trimming = 0
		if freed > 0 || err != nil {
			w.trace(s.b.name, st.t.subject(), "trims %s below %d: %d bytes, error %v", st.t.name, floor, freed, err != nil)
		}
	}
	if w.chance(3) {
		st.readAbout(ctx)
	}
}

// readAbout reads some of the topic, from anywhere in it, waiting for more if it is at the end.
func (st *servedTopic) readAbout(ctx context.Context) {
	w := st.s.m.w
	ctx, cancel := st.s.b.sched.WithTimeout(ctx, w.between(0, 2*time.Second))
	defer cancel()
	next := st.log.Next()
	r := st.log.NewReader(entry.Offset(w.rng.Uint64N(uint64(next) + 1)))
	for range 3 {
		got, err := r.Next(ctx, 1+w.rng.IntN(2000))
		if err != nil {
			return
		}
		for i := range got {
			e := &got[i]
			st.t.read(e.Envelope.Base, e.Frame, nil, st.s.b.name)
		}
	}
}

// work is done by those who use the topics.
func (s *servedBundle) work() {}

// probe has producers and consumers come to an end.
func (s *servedBundle) probe(done func()) {
	s.m.healing = true
	s.m.done = done
	s.m.finish()
}

// finish looks whether all have come to an end, until they have.
func (m *messaging) finish() {
	if m.done == nil {
		return
	}
	if m.settled() {
		m.done()
		m.done = nil
	}
}

// backlog returns how many messages consumers are still to be given, once that is all that is missing; 0 before.
func (m *messaging) backlog() int {
	if slices.ContainsFunc(m.producers, func(p *producer) bool { return !p.settled() }) {
		return 0
	}
	_, serving := m.w.serving(m.tp)
	s, ok := serving.(*servedBundle)
	if !ok {
		return 0
	}
	n := uint64(0)
	for i := range m.topics {
		st := s.topic(i)
		if st == nil {
			return 0
		}
		counted := map[string]bool{}
		for _, c := range m.subscribers {
			switch {
			case c.topic != i || c.sub != "" && counted[c.sub]:
			case c.sub == "":
				n += cursor.Range{First: max(c.next, st.log.Earliest()), End: st.log.Next()}.Len()
			case st.views[c.sub] == nil:
				return 0
			default:
				counted[c.sub] = true
				for _, r := range st.views[c.sub].sub.Missing(nil, cursor.Range{First: st.t.start, End: st.log.Next()}) {
					n += r.Len()
				}
			}
		}
	}
	return int(n)
}

// settled reports whether everything is stored that producers wanted to, and acknowledged by every subscription that has a
// consumer.
func (m *messaging) settled() bool {
	for _, p := range m.producers {
		if !p.settled() {
			return false
		}
	}
	_, serving := m.w.serving(m.tp)
	s, ok := serving.(*servedBundle)
	if !ok {
		return false
	}
	for i := range m.topics {
		st := s.topic(i)
		if st == nil || st.t != m.topics[i] || st.t.deleting {
			return false
		}
		for _, c := range m.subscribers {
			if c.topic == i && !c.settled(st) {
				return false
			}
		}
	}
	return true
}
