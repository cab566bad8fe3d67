package ownership_test

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
)

// A simulated cluster: brokers that crash, stand still, lose etcd or each other; one etcd with leases, transactions and
// watches; messages with delays; all from one seed. Time is a queue of events.

const (
	simTTL     = 5 * time.Second
	simPing    = 150 * time.Millisecond
	simSilence = 600 * time.Millisecond
)

type sim struct {
	t     *testing.T
	seed  uint64
	rng   *rand.Rand
	now   time.Duration
	order uint64
	queue simQueue
	trace []string

	etcd    simEtcd
	brokers []*simBroker
	bundles []meta.BundleID

	served map[string]string // "bundle epoch" → broker: who ever served what
	moves  []simMove
}

type simMove struct {
	at       time.Duration
	bundle   meta.BundleID
	from, to string
	life     ownership.Life // of to
	victim   ownership.Life // of from
	seized   bool           // from an owner whose lease was alive
}

type simEtcd struct {
	rev     int64
	lease   int64
	expires map[int64]time.Duration
	regs    map[string]simReg
	owners  map[meta.BundleID]simOwner
	epochs  map[meta.BundleID]entry.Epoch
}

type simReg struct {
	life  ownership.Life
	lease int64
}

type simOwner struct {
	broker string
	epoch  entry.Epoch
	lease  int64
	rev    int64
	life   ownership.Life
}

type simBroker struct {
	id       string
	core     *ownership.Core
	life     ownership.Life
	up       bool
	paused   bool
	noEtcd   bool // cut off from etcd
	lazy     bool // its takes fail
	held     []func()
	lease    int64
	draining bool
	serving  map[meta.BundleID]entry.Epoch
	stopping map[meta.BundleID]bool
	seen     map[meta.BundleID]entry.Epoch
	watch    time.Duration     // when the last of news arrives
	news     []ownership.Event // of its watch, in order, on their way
	heard    map[string]time.Duration
	silent   map[string]bool // peers that this one does not reach
	rejects  map[string]bool // peers whose port refuses this one
}

type simEvent struct {
	at    time.Duration
	order uint64
	do    func()
}

type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].order < q[j].order
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any     { e := (*q)[len(*q)-1]; *q = (*q)[:len(*q)-1]; return e }

func newSim(t *testing.T, seed uint64, brokers, bundles int) *sim {
	t.Helper()
	s := &sim{
		t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 7)), served: map[string]string{},
		etcd: simEtcd{
			expires: map[int64]time.Duration{}, regs: map[string]simReg{},
			owners: map[meta.BundleID]simOwner{}, epochs: map[meta.BundleID]entry.Epoch{},
		},
	}
	for i := range bundles {
		s.bundles = append(s.bundles, meta.BundleID(fmt.Sprintf("public/default/%d", i)))
	}
	for i := range brokers {
		s.start(fmt.Sprintf("b%d", i))
	}
	s.after(simTTL/50, s.expire)
	return s
}

func (s *sim) fail(format string, args ...any) {
	s.t.Helper()
	for _, l := range s.trace[max(0, len(s.trace)-60):] {
		s.t.Log(l)
	}
	s.t.Fatalf("seed %d at %v: %s", s.seed, s.now, fmt.Sprintf(format, args...))
}

func (s *sim) note(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf("%8.3fs ", s.now.Seconds())+fmt.Sprintf(format, args...))
}

func (s *sim) after(d time.Duration, do func()) {
	s.order++
	heap.Push(&s.queue, simEvent{s.now + d, s.order, do})
}

// delay is how long a message takes.
func (s *sim) delay() time.Duration { return time.Duration(1+s.rng.IntN(20)) * time.Millisecond / 2 }

func (s *sim) run(d time.Duration) {
	for end := s.now + d; len(s.queue) > 0 && s.queue[0].at <= end; {
		e := heap.Pop(&s.queue).(simEvent)
		s.now = e.at
		e.do()
	}
}

func (s *sim) broker(id string) *simBroker {
	i := slices.IndexFunc(s.brokers, func(b *simBroker) bool { return b.id == id })
	if i < 0 {
		return nil
	}
	return s.brokers[i]
}

// start starts a process, the first or another of its name.
func (s *sim) start(id string) *simBroker {
	s.order++
	b := &simBroker{
		id: id, core: ownership.NewCore(id, ownership.Life(s.order)), life: ownership.Life(s.order), up: true,
		serving: map[meta.BundleID]entry.Epoch{}, stopping: map[meta.BundleID]bool{}, seen: map[meta.BundleID]entry.Epoch{},
		heard: map[string]time.Duration{}, silent: map[string]bool{}, rejects: map[string]bool{},
	}
	if i := slices.IndexFunc(s.brokers, func(o *simBroker) bool { return o.id == id }); i >= 0 {
		s.brokers[i] = b
	} else {
		s.brokers = append(s.brokers, b)
	}
	s.note("%s starts", id)
	for other, r := range s.etcd.regs { // its cache's first read
		s.watchEvent(b, ownership.BrokerSeen{ID: other, Life: r.life})
	}
	for id, o := range s.etcd.owners {
		s.watchEvent(b, ownership.OwnerSeen{Bundle: id, Owner: o.broker, Epoch: o.epoch, Rev: o.rev})
	}
	s.after(s.delay(), func() { s.renew(b) })
	s.after(simPing, func() { s.ping(b) })
	s.after(100*time.Millisecond, func() { s.tick(b) })
	return b
}

func (s *sim) kill(b *simBroker) {
	s.note("%s is killed", b.id)
	b.up = false
	for _, other := range s.brokers { // its streams are reset
		if other != b && other.up && !other.silent[b.id] {
			s.on(other, s.delay(), func() { s.step(other, ownership.Suspected{ID: b.id, Life: b.life, Refused: true}) })
		}
	}
}

// on runs do in a broker's process after d, later if it stands still, never if it has ended.
func (s *sim) on(b *simBroker, d time.Duration, do func()) {
	s.after(d, func() {
		switch {
		case !b.up:
		case b.paused:
			b.held = append(b.held, do)
		default:
			do()
		}
	})
}

func (s *sim) pause(b *simBroker) { s.note("%s stands still", b.id); b.paused = true }

func (s *sim) resume(b *simBroker) {
	s.note("%s goes on", b.id)
	b.paused = false
	held := b.held
	b.held = nil
	for _, do := range held {
		if b.up {
			do()
		}
	}
	for other := range b.heard { // its own standstill proves nothing
		b.heard[other] = s.now
	}
}

func (s *sim) tick(b *simBroker) {
	if !b.up {
		return
	}
	s.on(b, 0, func() { s.step(b, ownership.Tick{Now: s.now}) })
	s.after(100*time.Millisecond, func() { s.tick(b) })
}

// ping lets b judge its peers.
func (s *sim) ping(b *simBroker) {
	if !b.up {
		return
	}
	s.after(simPing, func() { s.ping(b) })
	if b.paused {
		return
	}
	for _, o := range s.brokers {
		if o == b {
			continue
		}
		cut := b.silent[o.id]
		if _, met := b.heard[o.id]; !met {
			b.heard[o.id] = s.now
		}
		switch {
		case !o.up && !cut, b.rejects[o.id]:
			s.step(b, ownership.Suspected{ID: o.id, Life: o.life, Refused: true})
		case cut || o.paused:
			if s.now-b.heard[o.id] > simSilence {
				s.step(b, ownership.Suspected{ID: o.id, Life: o.life})
			}
		default:
			b.heard[o.id] = s.now
			s.step(b, ownership.Trusted{ID: o.id, Life: o.life})
			if o.draining {
				s.step(b, ownership.Draining{ID: o.id, Life: o.life})
			}
		}
	}
}

// renew keeps a broker's lease and registration.
func (s *sim) renew(b *simBroker) {
	if !b.up {
		return
	}
	s.after(simTTL/3, func() { s.renew(b) })
	if b.paused || b.noEtcd {
		return
	}
	if _, alive := s.etcd.expires[b.lease]; b.lease != 0 && alive {
		s.etcd.expires[b.lease] = s.now + simTTL
		return
	}
	if b.lease != 0 {
		s.step(b, ownership.LeaseLost{})
	}
	s.etcd.lease++
	b.lease = s.etcd.lease
	s.etcd.expires[b.lease] = s.now + simTTL
	s.etcd.regs[b.id] = simReg{b.life, b.lease}
	s.broadcast(ownership.BrokerSeen{ID: b.id, Life: b.life})
	s.on(b, s.delay(), func() { s.step(b, ownership.LeaseRenewed{}) })
}

// expire ends leases: their keys go in one revision.
func (s *sim) expire() {
	s.after(simTTL/50, s.expire)
	for lease, at := range s.etcd.expires {
		if at <= s.now {
			s.revoke(lease)
		}
	}
}

func (s *sim) revoke(lease int64) {
	delete(s.etcd.expires, lease)
	s.etcd.rev++
	for id, r := range s.etcd.regs {
		if r.lease == lease {
			delete(s.etcd.regs, id)
			s.broadcast(ownership.BrokerGone{ID: id})
		}
	}
	for _, id := range s.bundles {
		if s.etcd.owners[id].lease == lease {
			delete(s.etcd.owners, id)
			s.broadcast(ownership.OwnerGone{Bundle: id, Rev: s.etcd.rev})
		}
	}
}

func (s *sim) broadcast(e ownership.Event) {
	for _, b := range s.brokers {
		s.watchEvent(b, e)
	}
}

// watchEvent brings news of etcd to one broker, in order; while it is cut off they wait.
func (s *sim) watchEvent(b *simBroker, e ownership.Event) {
	b.news = append(b.news, e)
	b.watch = max(b.watch, s.now+s.delay())
	s.on(b, b.watch-s.now, func() { s.readNews(b) })
}

func (s *sim) readNews(b *simBroker) {
	if b.noEtcd || len(b.news) == 0 {
		return
	}
	e := b.news[0]
	b.news = b.news[1:]
	if o, ok := e.(ownership.OwnerSeen); ok {
		b.seen[o.Bundle] = max(b.seen[o.Bundle], o.Epoch)
	}
	s.step(b, e)
}

// reconnect brings etcd back to a broker.
func (s *sim) reconnect(b *simBroker) {
	s.note("%s has etcd again", b.id)
	b.noEtcd = false
	for range b.news {
		s.on(b, s.delay(), func() { s.readNews(b) })
	}
}

// step feeds a core, carries its actions out and checks what must hold after each event.
func (s *sim) step(b *simBroker, e ownership.Event) {
	switch e.(type) {
	case ownership.Tick, ownership.Trusted:
	default:
		s.note("%s: %T%+v", b.id, e, e)
	}
	b.core.At(s.now)
	for _, a := range slices.Clone(b.core.Step(e)) {
		s.note("%s → %T%+v", b.id, a, a)
		s.carryOut(b, a)
	}
	for _, id := range s.bundles {
		held, ok := b.core.Holds(id)
		if ok && held < b.seen[id] {
			s.fail("%s holds %s at epoch %d and has seen %d", b.id, id, held, b.seen[id])
		}
		if at, serving := b.serving[id]; ok && (!serving || at != held) {
			s.fail("%s holds %s at epoch %d, and serves %d", b.id, id, held, at)
		}
	}
}

func (s *sim) carryOut(b *simBroker, a ownership.Action) {
	switch a := a.(type) {
	case ownership.Take:
		s.txn(b, func() ownership.Event { return s.take(b, a) }, ownership.Taken{Bundle: a.Bundle})
	case ownership.Reacquire:
		s.txn(b, func() ownership.Event { return s.reacquire(b, a) },
			ownership.Reacquired{Bundle: a.Bundle, Outcome: ownership.ReacquireUnavailable})
	case ownership.Release:
		s.txn(b, func() ownership.Event {
			if o := s.etcd.owners[a.Bundle]; o.broker == b.id && o.epoch == a.Epoch {
				s.etcd.rev++
				delete(s.etcd.owners, a.Bundle)
				s.broadcast(ownership.OwnerGone{Bundle: a.Bundle, Rev: s.etcd.rev})
			}
			return ownership.Released{Bundle: a.Bundle}
		}, ownership.Released{Bundle: a.Bundle})
	case ownership.Serve:
		key := fmt.Sprint(a.Bundle, " ", a.Epoch)
		if who, ok := s.served[key]; ok {
			s.fail("%s serves %s, which %s did", b.id, key, who)
		}
		s.served[key] = b.id
		if _, still := b.serving[a.Bundle]; still || b.stopping[a.Bundle] {
			s.fail("%s serves %s before it has stopped", b.id, a.Bundle)
		}
		b.serving[a.Bundle] = a.Epoch
	case ownership.Stop:
		// What was taken while everything is handed over, or lost again meanwhile, is stopped without having been served.
		if at, ok := b.serving[a.Bundle]; ok && at != a.Epoch {
			s.fail("%s stops %s at %d, serves %d", b.id, a.Bundle, a.Epoch, b.serving[a.Bundle])
		}
		delete(b.serving, a.Bundle)
		b.stopping[a.Bundle] = true
		s.on(b, time.Duration(s.rng.IntN(50))*time.Millisecond, func() {
			b.stopping[a.Bundle] = false
			s.step(b, ownership.Stopped{Bundle: a.Bundle})
		})
	}
}

// txn runs a transaction: sent, applied, answered, any of which etcd's absence prevents.
func (s *sim) txn(b *simBroker, apply func() ownership.Event, failed ownership.Event) {
	s.on(b, s.delay(), func() {
		var answer ownership.Event
		if !b.noEtcd {
			answer = apply()
		}
		s.on(b, s.delay(), func() {
			if answer == nil || b.noEtcd {
				s.on(b, 2*time.Second, func() { s.step(b, failed) })
				return
			}
			s.step(b, answer)
		})
	})
}

func (s *sim) put(b *simBroker, id meta.BundleID, epoch entry.Epoch) {
	s.etcd.rev++
	s.etcd.owners[id] = simOwner{b.id, epoch, b.lease, s.etcd.rev, b.life}
	s.broadcast(ownership.OwnerSeen{Bundle: id, Owner: b.id, Epoch: epoch, Rev: s.etcd.rev})
}

func (s *sim) take(b *simBroker, a ownership.Take) ownership.Event {
	o := s.etcd.owners[a.Bundle]
	expected := o.broker == "" && (a.Owner == "" || s.etcd.epochs[a.Bundle] == a.Epoch) || o.broker == a.Owner && o.epoch == a.Epoch
	if _, leased := s.etcd.expires[b.lease]; !leased || !expected || b.lazy {
		return ownership.Taken{Bundle: a.Bundle}
	}
	_, alive := s.etcd.expires[o.lease]
	move := simMove{s.now, a.Bundle, o.broker, b.id, b.life, o.life, alive && o.broker != b.id && o.broker != ""}
	if move.seized {
		for _, m := range s.moves {
			if m.seized && m.bundle == a.Bundle && m.to == b.id && s.now-m.at < simTTL-200*time.Millisecond && m.life == b.life && m.victim == move.victim {
				s.fail("%s seizes %s again %v after it did", b.id, a.Bundle, s.now-m.at)
			}
		}
	}
	s.moves = append(s.moves, move)
	s.etcd.epochs[a.Bundle]++
	s.put(b, a.Bundle, s.etcd.epochs[a.Bundle])
	return ownership.Taken{Bundle: a.Bundle, OK: true, Epoch: s.etcd.epochs[a.Bundle], Rev: s.etcd.rev}
}

func (s *sim) reacquire(b *simBroker, a ownership.Reacquire) ownership.Event {
	_, leased := s.etcd.expires[b.lease]
	switch o := s.etcd.owners[a.Bundle]; {
	case s.etcd.epochs[a.Bundle] != a.Epoch, o.broker != "" && o.broker != b.id:
		return ownership.Reacquired{Bundle: a.Bundle, Outcome: ownership.ReacquireLost}
	case !leased:
		return ownership.Reacquired{Bundle: a.Bundle, Outcome: ownership.ReacquireUnavailable}
	}
	s.put(b, a.Bundle, a.Epoch)
	return ownership.Reacquired{Bundle: a.Bundle, Rev: s.etcd.rev}
}

// want has a client ask for every bundle.
func (s *sim) want() {
	for _, id := range s.bundles {
		for _, b := range s.brokers {
			if b.up && !b.paused {
				s.step(b, ownership.Wanted{Bundle: id})
			}
		}
	}
}

// settled checks that every bundle is served by its owner alone, and that everybody knows.
func (s *sim) settled() {
	s.t.Helper()
	for _, id := range s.bundles {
		o := s.etcd.owners[id]
		if o.broker == "" {
			s.fail("nobody owns %s", id)
		}
		for _, b := range s.brokers {
			if !b.up {
				continue
			}
			if e, ok := b.serving[id]; ok != (b.id == o.broker) || ok && e != o.epoch {
				s.fail("%s serves %s: %v at %d; its owner is %+v", b.id, id, ok, e, o)
			}
			if to, _ := b.core.Route(id); to != o.broker {
				s.fail("%s sends clients of %s to %q, its owner is %q", b.id, id, to, o.broker)
			}
		}
	}
}

func (s *sim) cut(a, b *simBroker, silent bool) {
	a.silent[b.id], b.silent[a.id] = silent, silent
	if !silent {
		a.heard[b.id], b.heard[a.id] = s.now, s.now
	}
}

// mishap does, or undoes, something at random.
func (s *sim) mishap() {
	b := s.brokers[s.rng.IntN(len(s.brokers))]
	o := s.brokers[s.rng.IntN(len(s.brokers))]
	switch s.rng.IntN(9) {
	case 0:
		if b.up {
			s.kill(b)
		}
	case 1, 2:
		if !b.up {
			s.start(b.id)
		}
	case 3:
		if b.up && !b.paused {
			s.pause(b)
			s.after(time.Duration(s.rng.IntN(9000))*time.Millisecond, func() { s.resume(b) })
		}
	case 4:
		if b.up && !b.noEtcd {
			s.note("%s loses etcd", b.id)
			b.noEtcd = true
			s.after(time.Duration(s.rng.IntN(9000))*time.Millisecond, func() { s.reconnect(b) })
		}
	case 5:
		if b != o {
			s.note("%s and %s lose each other", b.id, o.id)
			s.cut(b, o, true)
			s.after(time.Duration(s.rng.IntN(9000))*time.Millisecond, func() { s.cut(b, o, false) })
		}
	case 6:
		if b.up && b.lease != 0 {
			s.note("lease of %s is revoked", b.id)
			s.revoke(b.lease)
		}
	case 7:
		if b.up && !b.paused && !b.draining {
			s.note("%s drains", b.id)
			b.draining = true
			s.step(b, ownership.Drain{})
			s.on(b, 3*time.Second, func() {
				if b.core.Drained() {
					s.revoke(b.lease)
					s.kill(b)
				}
			})
		}
	case 8:
		s.want()
	}
}

func TestSimulatedClustersHealWhateverHappened(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		s := newSim(t, seed, 3+int(seed%3), 4)
		s.run(time.Second)
		s.want()
		for range 25 {
			s.run(time.Duration(s.rng.IntN(2500)) * time.Millisecond)
			s.mishap()
		}
		s.note("heal")
		for range 3 { // restarts, until what is timed has passed
			for _, b := range s.brokers {
				for _, o := range s.brokers {
					if b != o && b.silent[o.id] {
						s.cut(b, o, false)
					}
				}
				if b.draining && b.up {
					s.kill(b)
				}
				if !b.up {
					s.start(b.id)
				}
			}
			s.run(10 * time.Second)
			s.want()
		}
		s.run(10 * time.Second)
		s.settled()
		calm := len(s.moves)
		s.start("newcomer")
		s.run(time.Minute)
		s.settled()
		if len(s.moves) != calm {
			s.fail("in calm, and with a broker that joins, bundles move: %+v", s.moves[calm:])
		}
	}
}

// calm is a cluster whose bundles are all served.
func calm(t *testing.T, seed uint64, brokers int) *sim {
	t.Helper()
	s := newSim(t, seed, brokers, 16)
	s.run(time.Second)
	s.want()
	s.run(time.Second)
	s.settled()
	return s
}

func TestAKilledOwnerIsReplacedAtOnceAndSoIsItsHeir(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		s := calm(t, seed, 4)
		for range 2 {
			i := s.rng.IntN(len(s.brokers))
			for !s.brokers[i].up {
				i = s.rng.IntN(len(s.brokers))
			}
			s.kill(s.brokers[i])
			s.run(60 * time.Millisecond)
			s.settled()
		}
	}
}

// A broker that has just come back, and has not met its peers yet, takes over from one that dies right then.
func TestAnOwnerThatDiesAsItsPeerReturnsIsReplacedAtOnce(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		s := calm(t, seed, 2)
		s.kill(s.broker("b0"))
		s.run(time.Duration(100+s.rng.IntN(2000)) * time.Millisecond)
		s.start("b0")
		s.run(time.Duration(5+s.rng.IntN(60)) * time.Millisecond)
		s.kill(s.broker("b1"))
		s.run(simPing + 100*time.Millisecond)
		s.settled()
	}
}

func TestAPreferredBrokerThatDoesNotTakeIsPassedOver(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		s := newSim(t, seed, 3, 16)
		s.brokers[1].lazy = true
		s.run(time.Second)
		s.want()
		s.run(3 * time.Second)
		s.settled()
	}
}

// Two brokers that cannot see each other, and both reach etcd, pass no bundle to and fro.
func TestBrokersThatCannotSeeEachOtherDoNotFight(t *testing.T) {
	t.Parallel()
	for seed := range uint64(5) {
		for _, rejects := range []bool{false, true} {
			s := calm(t, seed, 2)
			before := len(s.moves)
			a, b := s.brokers[0], s.brokers[1]
			s.cut(a, b, !rejects)
			a.rejects[b.id], b.rejects[a.id] = rejects, rejects
			s.run(2 * time.Minute)
			moves := map[meta.BundleID]int{}
			for _, m := range s.moves[before:] {
				moves[m.bundle]++
			}
			most := 1
			if rejects {
				most = 10
			}
			for id, n := range moves {
				if n > most {
					s.fail("%s moved %d times, at most %d are expected (rejects: %v)", id, n, most, rejects)
				}
			}
		}
	}
}

// A restarted broker is trusted again although it was suspect, and drained, under its name before.
func TestASuccessorOfTheSameNameStartsAfresh(t *testing.T) {
	t.Parallel()
	s := calm(t, 1, 2)
	old := s.broker("b0")
	old.draining = true
	s.step(old, ownership.Drain{})
	s.run(simPing + 10*time.Millisecond)
	s.kill(old) // its lease lives on
	s.start("b0")
	s.run(500 * time.Millisecond)
	s.kill(s.broker("b1"))
	s.run(500 * time.Millisecond)
	s.settled()
}
