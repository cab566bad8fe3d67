package ownership_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
)

const bundle meta.BundleID = "public/default/0"

func newCore(brokers ...string) *ownership.Core {
	c := ownership.NewCore("self")
	for _, id := range append(brokers, "self") {
		c.Step(ownership.BrokerSeen{ID: id})
	}
	return c
}

// step feeds events and returns the actions of the last one.
func step(c *ownership.Core, events ...ownership.Event) []ownership.Action {
	var actions []ownership.Action
	for _, e := range events {
		actions = c.Step(e)
	}
	return append([]ownership.Action(nil), actions...)
}

func expect(t *testing.T, got []ownership.Action, want ...ownership.Action) {
	t.Helper()
	if len(got) == 0 && len(want) == 0 {
		return
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("actions %+v, want %+v", got, want)
	}
}

func holding(t *testing.T, brokers ...string) *ownership.Core {
	t.Helper()
	c := newCore(brokers...)
	for _, id := range brokers { // whoever hashing prefers, only self is free to take it
		c.Step(ownership.Suspected{ID: id})
	}
	expect(t, step(c, ownership.Wanted{Bundle: bundle}), ownership.Take{Bundle: bundle})
	expect(t, step(c, ownership.Taken{Bundle: bundle, OK: true, Epoch: 7, Rev: 10}), ownership.Serve{Bundle: bundle, Epoch: 7})
	for _, id := range brokers {
		c.Step(ownership.Trusted{ID: id})
	}
	return c
}

func TestABundleNobodyAskedForIsLeftAlone(t *testing.T) {
	t.Parallel()
	c := newCore()
	expect(t, step(c, ownership.Tick{Now: time.Minute}))
	expect(t, step(c, ownership.Wanted{Bundle: bundle}), ownership.Take{Bundle: bundle})
}

func TestADeadOwnerIsReplacedByThePreferredBrokerAlone(t *testing.T) {
	t.Parallel()
	brokers := []string{"a", "b", "c", "dead"}
	takers := 0
	for _, self := range brokers[:3] {
		c := ownership.NewCore(self)
		for _, id := range brokers {
			c.Step(ownership.BrokerSeen{ID: id})
		}
		c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "dead", Epoch: 3, Rev: 5})
		takers += len(c.Step(ownership.Suspected{ID: "dead"}))
	}
	if takers != 1 {
		t.Fatalf("%d brokers take the bundle of the dead one, want 1", takers)
	}
}

func TestATakeoverNamesTheOwnerItReplaces(t *testing.T) {
	t.Parallel()
	c := newCore("dead")
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "dead", Epoch: 3, Rev: 5})
	expect(t, step(c, ownership.Suspected{ID: "dead"}), ownership.Take{Bundle: bundle, Owner: "dead", Epoch: 3})
}

func TestTakeoversOnSuspicionAreRateLimitedPerBundle(t *testing.T) {
	t.Parallel()
	c := newCore("other")
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5})
	expect(t, step(c, ownership.Suspected{ID: "other"}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 3})
	c.Step(ownership.Taken{Bundle: bundle, OK: true, Epoch: 4, Rev: 6})
	// The other one is alive after all, cannot see us either, and takes it back.
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 5, Rev: 7}),
		ownership.Stop{Bundle: bundle, Epoch: 4, Reason: ownership.ReasonReplaced, Next: ""})
	expect(t, step(c, ownership.Stopped{Bundle: bundle}))
	expect(t, step(c, ownership.Tick{Now: time.Second}))
	expect(t, step(c, ownership.Tick{Now: time.Minute}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 5})
}

func TestAnEndedLeaseNeedsNoPause(t *testing.T) {
	t.Parallel()
	c := newCore("other")
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5})
	c.Step(ownership.Suspected{ID: "other"})
	c.Step(ownership.Taken{Bundle: bundle, OK: false})
	c.Step(ownership.BrokerGone{ID: "other"})
	expect(t, step(c, ownership.Tick{Now: time.Second}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 3})
}

func TestAReplacedOwnerStopsAtOnceAndSaysWhereToGo(t *testing.T) {
	t.Parallel()
	c := holding(t, "other")
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 8, Rev: 11}),
		ownership.Stop{Bundle: bundle, Epoch: 7, Reason: ownership.ReasonReplaced, Next: "other"})
	if _, ok := c.Holds(bundle); ok {
		t.Fatal("still holds the bundle")
	}
}

func TestOldNewsOfAWatchChangesNothing(t *testing.T) {
	t.Parallel()
	c := holding(t, "other")
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 6, Rev: 9}))
	expect(t, step(c, ownership.OwnerGone{Bundle: bundle, Rev: 9}, ownership.Tick{Now: time.Second}))
	if e, ok := c.Holds(bundle); !ok || e != 7 {
		t.Fatalf("holds epoch %d, %v; want 7", e, ok)
	}
}

func TestALostLeaseKeepsTheEpoch(t *testing.T) {
	t.Parallel()
	c := holding(t)
	expect(t, step(c, ownership.LeaseLost{}, ownership.OwnerGone{Bundle: bundle, Rev: 12}, ownership.Tick{Now: time.Second}))
	if _, ok := c.Holds(bundle); !ok {
		t.Fatal("stopped serving although nobody replaced it")
	}
	expect(t, step(c, ownership.LeaseRenewed{}), ownership.Reacquire{Bundle: bundle, Epoch: 7})
	expect(t, step(c, ownership.Reacquired{Bundle: bundle, Outcome: ownership.ReacquireOK, Rev: 13}, ownership.Tick{Now: 9 * time.Second}))
	if e, _ := c.Holds(bundle); e != 7 {
		t.Fatalf("epoch %d after re-acquiring, want 7", e)
	}
}

func TestALostLeaseThatAnotherUsedStopsServing(t *testing.T) {
	t.Parallel()
	c := holding(t, "other")
	c.Step(ownership.LeaseLost{})
	c.Step(ownership.OwnerGone{Bundle: bundle, Rev: 12})
	c.Step(ownership.Tick{Now: time.Second})
	c.Step(ownership.LeaseRenewed{})
	got := step(c, ownership.Reacquired{Bundle: bundle, Outcome: ownership.ReacquireLost})
	if len(got) != 1 {
		t.Fatalf("actions %+v, want one Stop", got)
	}
	if s, ok := got[0].(ownership.Stop); !ok || s.Reason != ownership.ReasonReplaced {
		t.Fatalf("action %+v, want a Stop", got[0])
	}
}

func TestEtcdAwayDoesNotStopAnOwner(t *testing.T) {
	t.Parallel()
	c := holding(t)
	c.Step(ownership.LeaseLost{})
	c.Step(ownership.OwnerGone{Bundle: bundle, Rev: 12})
	c.Step(ownership.Tick{Now: time.Second})
	c.Step(ownership.LeaseRenewed{})
	expect(t, step(c, ownership.Reacquired{Bundle: bundle, Outcome: ownership.ReacquireUnavailable}))
	if _, ok := c.Holds(bundle); !ok {
		t.Fatal("stopped serving because etcd did not answer")
	}
	expect(t, step(c, ownership.Tick{Now: 2 * time.Second}), ownership.Reacquire{Bundle: bundle, Epoch: 7})
}

func TestADrainStopsThenReleasesAndTakesNothingMore(t *testing.T) {
	t.Parallel()
	c := holding(t, "other")
	expect(t, step(c, ownership.Drain{}),
		ownership.Stop{Bundle: bundle, Epoch: 7, Reason: ownership.ReasonHandOver, Next: "other"})
	if c.Drained() {
		t.Fatal("drained while a bundle is still being stopped")
	}
	expect(t, step(c, ownership.Stopped{Bundle: bundle}), ownership.Release{Bundle: bundle, Epoch: 7})
	expect(t, step(c, ownership.Released{Bundle: bundle}, ownership.OwnerGone{Bundle: bundle, Rev: 12},
		ownership.Wanted{Bundle: bundle}, ownership.Tick{Now: time.Minute}))
	if !c.Drained() {
		t.Fatal("not drained")
	}
	if who, _ := c.Route(bundle); who != "other" {
		t.Fatalf("routes to %q, want other", who)
	}
}

func TestABrokerThatJoinsMovesNothing(t *testing.T) {
	t.Parallel()
	c := holding(t)
	for i := range 20 {
		expect(t, step(c, ownership.BrokerSeen{ID: fmt.Sprint("new-", i)}, ownership.Tick{Now: time.Duration(i) * time.Second}))
	}
}

func TestABundleOfAnEarlierLifeIsTakenAgain(t *testing.T) {
	t.Parallel()
	c := newCore()
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "self", Epoch: 7, Rev: 3}),
		ownership.Take{Bundle: bundle, Owner: "self", Epoch: 7})
}

func TestRendezvousSpreadsBundlesEvenly(t *testing.T) {
	t.Parallel()
	const brokers, bundles = 5, 2000
	got := map[string]int{}
	c := newCore("b-1", "b-2", "b-3", "b-4")
	for i := range bundles {
		who, _ := c.Route(meta.BundleID(fmt.Sprintf("public/default/%d", i)))
		got[who]++
	}
	for who, n := range got {
		if n < bundles/brokers*7/10 || n > bundles/brokers*13/10 {
			t.Errorf("%s is preferred for %d of %d bundles", who, n, bundles)
		}
	}
}

// cluster runs some cores against one etcd in memory, with delays, lost watches' news, false suspicions, deaths and
// lost leases, all from one seed.
type cluster struct {
	t       *testing.T
	rng     *rand.Rand
	rev     int64
	owners  map[meta.BundleID]ownership.OwnerSeen
	epochs  map[meta.BundleID]entry.Epoch
	cores   map[string]*ownership.Core
	serving map[string]map[meta.BundleID]entry.Epoch
	inbox   map[string][]ownership.Event
	now     time.Duration
}

func (s *cluster) names() []string { return []string{"a", "b", "c"} }

func (s *cluster) broadcast(e ownership.Event) {
	for _, n := range s.names() {
		s.inbox[n] = append(s.inbox[n], e)
	}
}

func (s *cluster) carryOut(who string, actions []ownership.Action) {
	for _, a := range append([]ownership.Action(nil), actions...) {
		switch a := a.(type) {
		case ownership.Take:
			current := s.owners[a.Bundle]
			if current.Owner != a.Owner || (a.Owner != "" && current.Epoch != a.Epoch) {
				s.inbox[who] = append(s.inbox[who], ownership.Taken{Bundle: a.Bundle})
				continue
			}
			s.rev++
			s.epochs[a.Bundle]++
			seen := ownership.OwnerSeen{Bundle: a.Bundle, Owner: who, Epoch: s.epochs[a.Bundle], Rev: s.rev}
			s.owners[a.Bundle] = seen
			s.broadcast(seen)
			s.inbox[who] = append(s.inbox[who], ownership.Taken{Bundle: a.Bundle, OK: true, Epoch: seen.Epoch, Rev: seen.Rev})
		case ownership.Reacquire:
			done := ownership.Reacquired{Bundle: a.Bundle, Outcome: ownership.ReacquireLost}
			if s.epochs[a.Bundle] == a.Epoch {
				s.rev++
				seen := ownership.OwnerSeen{Bundle: a.Bundle, Owner: who, Epoch: a.Epoch, Rev: s.rev}
				s.owners[a.Bundle] = seen
				s.broadcast(seen)
				done = ownership.Reacquired{Bundle: a.Bundle, Rev: s.rev}
			}
			s.inbox[who] = append(s.inbox[who], done)
		case ownership.Serve:
			for other, held := range s.serving {
				if held[a.Bundle] == a.Epoch {
					s.t.Fatalf("%s and %s serve %s under one epoch %d", other, who, a.Bundle, a.Epoch)
				}
			}
			s.serving[who][a.Bundle] = a.Epoch
		case ownership.Stop:
			delete(s.serving[who], a.Bundle)
			s.inbox[who] = append(s.inbox[who], ownership.Stopped{Bundle: a.Bundle})
		case ownership.Release:
			if o := s.owners[a.Bundle]; o.Owner == who && o.Epoch == a.Epoch {
				s.dropOwner(a.Bundle)
			}
			s.inbox[who] = append(s.inbox[who], ownership.Released{Bundle: a.Bundle})
		}
	}
}

func (s *cluster) dropOwner(id meta.BundleID) {
	s.rev++
	delete(s.owners, id)
	s.broadcast(ownership.OwnerGone{Bundle: id, Rev: s.rev})
}

func (s *cluster) deliver(who string) {
	if len(s.inbox[who]) == 0 {
		return
	}
	e := s.inbox[who][0]
	s.inbox[who] = s.inbox[who][1:]
	s.carryOut(who, s.cores[who].Step(e))
}

func TestManySeedsEndWithOneServingOwnerPerBundle(t *testing.T) {
	t.Parallel()
	for seed := range uint64(500) {
		s := &cluster{
			t: t, rng: rand.New(rand.NewPCG(seed, 1)),
			owners: map[meta.BundleID]ownership.OwnerSeen{}, epochs: map[meta.BundleID]entry.Epoch{},
			cores: map[string]*ownership.Core{}, serving: map[string]map[meta.BundleID]entry.Epoch{},
			inbox: map[string][]ownership.Event{},
		}
		bundles := []meta.BundleID{"n/0", "n/1", "n/2"}
		for _, n := range s.names() {
			s.cores[n] = ownership.NewCore(n)
			s.serving[n] = map[meta.BundleID]entry.Epoch{}
		}
		for _, n := range s.names() {
			s.broadcast(ownership.BrokerSeen{ID: n})
		}
		for range 400 {
			who := s.names()[s.rng.IntN(3)]
			peer := s.names()[s.rng.IntN(3)]
			id := bundles[s.rng.IntN(len(bundles))]
			switch s.rng.IntN(12) {
			case 0:
				s.inbox[who] = append(s.inbox[who], ownership.Wanted{Bundle: id})
			case 1:
				if peer != who {
					s.inbox[who] = append(s.inbox[who], ownership.Suspected{ID: peer})
				}
			case 2:
				s.inbox[who] = append(s.inbox[who], ownership.Trusted{ID: peer})
			case 3: // who's lease ends: etcd drops its keys; who learns of it, and gets another
				for _, id := range bundles {
					if s.owners[id].Owner == who {
						s.dropOwner(id)
					}
				}
				s.broadcast(ownership.BrokerGone{ID: who})
				s.inbox[who] = append(s.inbox[who], ownership.LeaseLost{}, ownership.LeaseRenewed{})
				s.broadcast(ownership.BrokerSeen{ID: who})
			case 4:
				s.now += time.Duration(s.rng.IntN(3000)) * time.Millisecond
				s.inbox[who] = append(s.inbox[who], ownership.Tick{Now: s.now})
			default:
				s.deliver(who)
			}
		}
		// Heal, and let everything settle.
		for range 30 {
			s.now += time.Second
			for _, n := range s.names() {
				for _, peer := range s.names() {
					s.inbox[n] = append(s.inbox[n], ownership.Trusted{ID: peer})
				}
				s.inbox[n] = append(s.inbox[n], ownership.Tick{Now: s.now})
			}
			for _, n := range s.names() {
				for len(s.inbox[n]) > 0 {
					s.deliver(n)
				}
			}
		}
		for _, id := range bundles {
			if s.epochs[id] == 0 {
				continue // nobody ever asked
			}
			var servers []string
			for _, n := range s.names() {
				if e, ok := s.serving[n][id]; ok && e == s.epochs[id] {
					servers = append(servers, n)
				} else if ok {
					t.Fatalf("seed %d: %s serves %s under the old epoch %d of %d", seed, n, id, e, s.epochs[id])
				}
				if who, _ := s.cores[n].Route(id); who != s.owners[id].Owner {
					t.Fatalf("seed %d: %s routes %s to %q, owner is %q", seed, n, id, who, s.owners[id].Owner)
				}
			}
			if len(servers) != 1 {
				t.Fatalf("seed %d: %s is served by %v, want one broker", seed, id, servers)
			}
		}
	}
}
