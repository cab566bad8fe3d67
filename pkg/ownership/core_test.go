package ownership_test

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
)

const bundle meta.BundleID = "public/default/0"

func newCore(brokers ...string) *ownership.Core {
	c := ownership.NewCore("self", 0)
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
		c := ownership.NewCore(self, 0)
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
	refused := ownership.Suspected{ID: "other", Refused: true}
	rev, epoch := int64(5), entry.Epoch(3)
	now := time.Duration(0)
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: epoch, Rev: rev})
	got := step(c, refused)
	for _, pause := range []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute, time.Minute} {
		expect(t, got, ownership.Take{Bundle: bundle, Owner: "other", Epoch: epoch})
		c.Step(ownership.Taken{Bundle: bundle, OK: true, Epoch: epoch + 1, Rev: rev + 1})
		// The other one is alive after all, cannot see us either, and takes it back.
		expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: epoch + 2, Rev: rev + 2}),
			ownership.Stop{Bundle: bundle, Epoch: epoch + 1, Reason: ownership.ReasonReplaced, Next: ""})
		expect(t, step(c, ownership.Stopped{Bundle: bundle}))
		epoch, rev = epoch+2, rev+2
		expect(t, step(c, refused, ownership.Tick{Now: now + pause - 1}, refused))
		now += pause
		got = step(c, ownership.Tick{Now: now})
	}
}

func TestAnOwnerThatTookTheBundleWhileSuspectIsLeftInPlace(t *testing.T) {
	t.Parallel()
	c := newCore("other")
	c.Step(ownership.Suspected{ID: "other"})
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5},
		ownership.Suspected{ID: "other"}, ownership.Tick{Now: time.Minute}))
	if who, epoch := c.Route(bundle); who != "other" || epoch != 3 {
		t.Fatalf("routes to %q at epoch %d, want the owner", who, epoch)
	}
	c.Step(ownership.Trusted{ID: "other"})
	expect(t, step(c, ownership.Suspected{ID: "other"}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 3})
}

// Two brokers stop hearing each other, and reach etcd: the one that takes the bundle keeps it, whichever of them
// notices first.
func TestABundleIsNotTakenBackFromWhoDoesNotHearUs(t *testing.T) {
	t.Parallel()
	c := holding(t, "other")
	replaced := ownership.Stop{Bundle: bundle, Epoch: 7, Reason: ownership.ReasonReplaced, Next: "other"}
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 8, Rev: 11}), replaced)
	c.Step(ownership.Stopped{Bundle: bundle})
	c.At(300 * time.Millisecond)
	expect(t, step(c, ownership.Suspected{ID: "other"}, ownership.Tick{Now: time.Minute}))
	// A refused connection says that it is gone, and so does silence that began later.
	expect(t, step(c, ownership.Suspected{ID: "other", Refused: true}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 8})

	c = holding(t, "other")
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 8, Rev: 11}), replaced)
	c.Step(ownership.Stopped{Bundle: bundle})
	c.Step(ownership.Tick{Now: 2 * time.Second})
	expect(t, step(c, ownership.Suspected{ID: "other"}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 8})
}

func TestWhatIsSaidOfAnEarlierLifeDoesNotCount(t *testing.T) {
	t.Parallel()
	c := newCore()
	c.Step(ownership.BrokerSeen{ID: "other", Life: 1})
	c.Step(ownership.Suspected{ID: "other", Life: 1})
	c.Step(ownership.Draining{ID: "other", Life: 1})
	c.Step(ownership.BrokerSeen{ID: "other", Life: 2}) // restarted before its lease ended
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5})
	expect(t, step(c, ownership.Suspected{ID: "other", Life: 1}, ownership.Draining{ID: "other", Life: 1}, ownership.Tick{Now: time.Minute}))
	expect(t, step(c, ownership.Suspected{ID: "other", Life: 2}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 3})
}

// Who took over from a crashed process takes over from its successor as fast when that one crashes too.
func TestASecondCrashIsNotHeldUpByTheFirst(t *testing.T) {
	t.Parallel()
	c := newCore()
	c.Step(ownership.BrokerSeen{ID: "other", Life: 1})
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5})
	c.Step(ownership.Suspected{ID: "other", Life: 1, Refused: true})
	c.Step(ownership.Taken{Bundle: bundle, OK: true, Epoch: 4, Rev: 6})
	c.Step(ownership.BrokerSeen{ID: "other", Life: 2})
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 5, Rev: 7}) // this one stood still for a while
	c.Step(ownership.Stopped{Bundle: bundle})
	c.Step(ownership.Tick{Now: time.Second})
	expect(t, step(c, ownership.Suspected{ID: "other", Life: 2, Refused: true}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 5})
}

func TestTwoProcessesOfOneNameDoNotFight(t *testing.T) {
	t.Parallel()
	c := holding(t)
	c.Step(ownership.BrokerSeen{ID: "self", Life: 9}) // another process, by mistake
	expect(t, step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "self", Epoch: 8, Rev: 11}),
		ownership.Stop{Bundle: bundle, Epoch: 7, Reason: ownership.ReasonReplaced, Next: ""})
	expect(t, step(c, ownership.Stopped{Bundle: bundle}, ownership.Tick{Now: time.Minute}))
	c.Step(ownership.BrokerGone{ID: "self"})
	expect(t, step(c, ownership.Tick{Now: 2 * time.Minute}))
	expect(t, step(c, ownership.BrokerSeen{ID: "self"}), ownership.Take{Bundle: bundle, Owner: "self", Epoch: 8})
}

// The namespace is deleted, and its owners' keys with it: whoever held a bundle finds that out once, and forgets it.
func TestABundleThatIsGoneIsForgotten(t *testing.T) {
	t.Parallel()
	c := holding(t)
	expect(t, step(c, ownership.OwnerGone{Bundle: bundle, Rev: 20}), ownership.Reacquire{Bundle: bundle, Epoch: 7})
	c.Step(ownership.Reacquired{Bundle: bundle, Outcome: ownership.ReacquireLost})
	expect(t, step(c, ownership.Stopped{Bundle: bundle}, ownership.Tick{Now: time.Minute}), ownership.Take{Bundle: bundle, Epoch: 7})
	expect(t, step(c, ownership.Taken{Bundle: bundle, NoSuch: true}, ownership.Tick{Now: 2 * time.Minute},
		ownership.OwnerGone{Bundle: bundle, Rev: 30}, ownership.Tick{Now: 3 * time.Minute}))
	expect(t, step(c, ownership.Wanted{Bundle: bundle}), ownership.Take{Bundle: bundle, Epoch: 7})
}

func TestAFailedTakeIsTriedAgainSoon(t *testing.T) {
	t.Parallel()
	c := newCore("other")
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5})
	c.Step(ownership.Suspected{ID: "other"})
	expect(t, step(c, ownership.Taken{Bundle: bundle, OK: false}))
	expect(t, step(c, ownership.Tick{Now: 100 * time.Millisecond}), ownership.Take{Bundle: bundle, Owner: "other", Epoch: 3})
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

// A watch that starts again tells again who owned a bundle before: taken for true, nobody would take what nobody owns.
func TestOldNewsOfAnOwnerThatIsGoneKeepsNobodyFromTaking(t *testing.T) {
	t.Parallel()
	c := newCore("other")
	c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 3, Rev: 5})
	c.Step(ownership.Draining{ID: "other"})
	take := ownership.Take{Bundle: bundle, Epoch: 3}
	expect(t, step(c, ownership.OwnerGone{Bundle: bundle, Rev: 6}), take)
	for rev := int64(4); rev <= 6; rev++ {
		c.Step(ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: entry.Epoch(rev - 2), Rev: rev})
	}
	expect(t, step(c, ownership.Taken{Bundle: bundle, OK: false}))
	expect(t, step(c, ownership.Tick{Now: time.Second}), take)
	if who, _ := c.Route(bundle); who != "self" {
		t.Fatalf("routes to %q, whose ownership is over", who)
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

// A bundle whose state is refused to whoever owns it is not taken again and again as fast as etcd answers.
func TestABundleThatIsGivenUpAgainAndAgainIsTakenEverMoreSeldom(t *testing.T) {
	t.Parallel()
	c := holding(t)
	epoch, rev, now := entry.Epoch(7), int64(10), time.Minute
	c.Step(ownership.Tick{Now: now}) // it was held for long
	giveUp := func(pause time.Duration) {
		t.Helper()
		expect(t, step(c, ownership.Fenced{Bundle: bundle, Epoch: epoch}),
			ownership.Stop{Bundle: bundle, Epoch: epoch, Reason: ownership.ReasonFenced, Next: ""})
		expect(t, step(c, ownership.Stopped{Bundle: bundle}))
		expect(t, step(c, ownership.Tick{Now: now + pause - 1}))
		now += pause
		expect(t, step(c, ownership.Tick{Now: now}), ownership.Take{Bundle: bundle, Owner: "self", Epoch: epoch})
		epoch, rev = epoch+1, rev+1
		expect(t, step(c, ownership.Taken{Bundle: bundle, OK: true, Epoch: epoch, Rev: rev}), ownership.Serve{Bundle: bundle, Epoch: epoch})
	}
	for _, ms := range []time.Duration{100, 200, 400, 800, 1600, 3200, 5000, 5000} {
		giveUp(ms * time.Millisecond)
	}
	now += 10 * time.Second // served for a while
	c.Step(ownership.Tick{Now: now})
	giveUp(100 * time.Millisecond)
	giveUp(200 * time.Millisecond)
}

func TestBundlesThatNobodyOwnsAreCounted(t *testing.T) {
	t.Parallel()
	c := ownership.NewCore("self", 0) // not registered: it may not take any itself
	count := func(want int, why string) {
		t.Helper()
		if got := c.Missing(); got != want {
			t.Errorf("%d bundles are missing, want %d: %s", got, want, why)
		}
	}
	step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "other", Epoch: 1, Rev: 1})
	count(0, "it has an owner")
	step(c, ownership.OwnerGone{Bundle: bundle, Rev: 2})
	count(1, "its owner is gone")
	step(c, ownership.Wanted{Bundle: "public/default/1"})
	count(2, "another one is wanted that never had an owner")
	step(c, ownership.OwnerSeen{Bundle: bundle, Owner: "third", Epoch: 2, Rev: 3})
	count(1, "somebody took it")
}
