//go:build linux && !noroot

package integration

import (
	"testing"
	"time"

	"github.com/penstock-mq/penstock/integration/hosts"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Hosts that cannot reach one another, one direction or both, while everything else goes on.
func TestPartitions(t *testing.T) {
	t.Parallel()
	n := hosts.New(t)
	w := settle(t, process.Config{Place: n.Place})
	run := w.load(nil)
	w.more(run, 1000)
	owner := w.owner()
	other := w.c.Brokers[0]
	if other == owner {
		other = w.c.Brokers[1]
	}

	// A bookie hears the owner, and its answers get lost: the other two are enough.
	mute := w.c.Bookies[0]
	watch := run.Watch()
	n.Cut(mute.Name, owner.Name)
	w.more(run, 3000)
	w.Logf("publish gap while a bookie's answers get lost: %v", watch.Stop())
	n.Heal(mute.Name, owner.Name)
	w.more(run, 500)

	// The owner reaches no bookie, and everyone else. Nobody takes its place; nothing is acknowledged, and all goes on
	// when it reaches them again.
	for _, p := range w.c.Bookies {
		n.Cut(owner.Name, p.Name)
		n.Cut(p.Name, owner.Name)
	}
	w.stalls(run, 2*time.Second)
	for _, p := range w.c.Bookies {
		n.Heal(owner.Name, p.Name)
		n.Heal(p.Name, owner.Name)
	}
	healed := time.Now()
	w.more(run, 500)
	w.Logf("publishing goes on %v after the owner reaches bookies again", time.Since(healed))

	// The owner reaches neither clients nor brokers, but etcd and bookies: another takes its place, and what the owner
	// still has is refused.
	if now := w.owner(); now != owner {
		if !w.suspected(owner) {
			t.Fatal("the topic moved to a broker for no reason")
		}
		owner, other = now, owner
	}
	watch = run.Watch()
	for _, to := range []string{"", other.Name} {
		n.Cut(owner.Name, to)
	}
	n.Cut(other.Name, owner.Name)
	w.more(run, 1000)
	w.Logf("publish gap of an owner cut off from clients and brokers: %v", watch.Stop())
	heir, epoch := w.served(topic)
	if heir != other {
		t.Error("an owner that nobody reaches was not replaced")
	}
	w.throughout(2*time.Second, "the topic stays with the broker that took it", func() bool {
		now, e := w.served(topic)
		return now == heir && e == epoch
	})
	for _, to := range []string{"", other.Name} {
		n.Heal(owner.Name, to)
	}
	n.Heal(other.Name, owner.Name)
	w.check(owner.WaitReady(w.ctx))
	w.more(run, 500)
	w.unharmed(run)
	w.finish(run)
}

// An owner that only its clients cannot reach keeps its topics: others see it alive, and clients wait.
func TestClientsCutOff(t *testing.T) {
	t.Parallel()
	n := hosts.New(t)
	w := settle(t, process.Config{Place: n.Place})
	run := w.load(func(c *workload.Config) {
		c.ProducerOptions = []client.ProducerOption{client.WithMaxPending(1000, 1<<20)}
	})
	w.more(run, 500)
	owner := w.owner()
	n.Cut(owner.Name, "")
	w.stalls(run, 3*time.Second)
	n.Heal(owner.Name, "")
	healed := time.Now()
	w.more(run, 1500)
	w.Logf("publishing goes on %v after clients are heard again", time.Since(healed))
	if w.owner() != owner && !w.suspected(owner) {
		t.Error("the topic moved")
	}
	w.unharmed(run)
	w.finish(run)
}
