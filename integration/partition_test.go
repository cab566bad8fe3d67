//go:build linux && !noroot

package integration

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// network gives each process a host of its own: a network namespace on a bridge, where this program has an address too.
// Between any two of them one direction can be made to swallow what is sent.
type network struct {
	*testing.T
	name  string // prefix of all there is of it
	net   string // the first three bytes of its addresses
	hosts map[string]int
}

// here is this program's number on the network.
const here = 1

func newNetwork(t *testing.T) *network {
	t.Helper()
	id := rand.IntN(1 << 16) // tells networks apart
	n := &network{T: t, name: fmt.Sprintf("ps%04x", id), net: fmt.Sprintf("10.%d.%d.", 64+id>>8%64, id&0xff), hosts: make(map[string]int)}
	n.ip("link", "add", n.name, "type", "bridge")
	t.Cleanup(func() { n.ip("link", "del", n.name) })
	n.ip("addr", "add", n.addr(here)+"/24", "dev", n.name)
	n.ip("link", "set", n.name, "up")
	return n
}

func (n *network) ip(args ...string) {
	n.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.Fatalf("ip %s: %v: %s: this test needs root; `go test -tags noroot` leaves it out", strings.Join(args, " "), err, out)
	}
}

func (n *network) addr(host int) string { return fmt.Sprintf("%s%d", n.net, host) }

func (n *network) space(name string) string { return n.name + "-" + name }

// place makes the host of a process, the first time it is asked for.
func (n *network) place(name string) (host string, command []string) {
	n.Helper()
	space := n.space(name)
	// Not with `ip netns exec`, whose mount namespace would keep other tests' volumes alive.
	command = []string{"nsenter", "--net=/run/netns/" + space}
	if i, ok := n.hosts[name]; ok {
		return n.addr(i), command
	}
	i := here + 1 + len(n.hosts)
	n.hosts[name] = i
	port := fmt.Sprintf("%s.%d", n.name, i)
	n.ip("netns", "add", space)
	n.Cleanup(func() { n.ip("netns", "del", space) })
	n.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
	n.ip("link", "set", port, "master", n.name, "up")
	n.ip("-n", space, "addr", "add", n.addr(i)+"/24", "dev", "eth0")
	n.ip("-n", space, "link", "set", "eth0", "up")
	n.ip("-n", space, "link", "set", "lo", "up")
	return n.addr(i), command
}

// cut swallows what one host sends to another; to is "" for this program.
func (n *network) cut(from, to string) {
	n.Helper()
	n.ip("-n", n.space(from), "neigh", "replace", n.of(to), "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
}

func (n *network) heal(from, to string) {
	n.Helper()
	n.ip("-n", n.space(from), "neigh", "del", n.of(to), "dev", "eth0")
}

func (n *network) of(name string) string {
	if name == "" {
		return n.addr(here)
	}
	return n.addr(n.hosts[name])
}

// Hosts that cannot reach one another, one direction or both, while everything else goes on.
func TestPartitions(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	w := settle(t, process.Config{Place: n.place})
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
	n.cut(mute.Name, owner.Name)
	w.more(run, 3000)
	w.Logf("publish gap while a bookie's answers get lost: %v", watch.Stop())
	n.heal(mute.Name, owner.Name)
	w.more(run, 500)

	// The owner reaches no bookie, and everyone else. Nobody takes its place; nothing is acknowledged, and all goes on
	// when it reaches them again.
	for _, p := range w.c.Bookies {
		n.cut(owner.Name, p.Name)
		n.cut(p.Name, owner.Name)
	}
	w.stalls(run, 2*time.Second)
	for _, p := range w.c.Bookies {
		n.heal(owner.Name, p.Name)
		n.heal(p.Name, owner.Name)
	}
	healed := time.Now()
	w.more(run, 500)
	w.Logf("publishing goes on %v after the owner reaches bookies again", time.Since(healed))

	// The owner reaches neither clients nor brokers, but etcd and bookies: another takes its place, and what the owner
	// still has is refused.
	owner = w.owner()
	if other == owner {
		t.Fatal("the topic moved to a broker for no reason")
	}
	watch = run.Watch()
	for _, to := range []string{"", other.Name} {
		n.cut(owner.Name, to)
	}
	n.cut(other.Name, owner.Name)
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
		n.heal(owner.Name, to)
	}
	n.heal(other.Name, owner.Name)
	w.check(owner.WaitReady(w.ctx))
	w.more(run, 500)
	w.unharmed(run)
	w.finish(run)
}

// An owner that only its clients cannot reach keeps its topics: others see it alive, and clients wait.
func TestClientsCutOff(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	w := settle(t, process.Config{Place: n.place})
	run := w.load(func(c *workload.Config) {
		c.ProducerOptions = []client.ProducerOption{client.WithMaxPending(1000, 1<<20)}
	})
	w.more(run, 500)
	owner := w.owner()
	n.cut(owner.Name, "")
	w.stalls(run, 3*time.Second)
	n.heal(owner.Name, "")
	healed := time.Now()
	w.more(run, 1500)
	w.Logf("publishing goes on %v after clients are heard again", time.Since(healed))
	if w.owner() != owner {
		t.Error("the topic moved")
	}
	w.unharmed(run)
	w.finish(run)
}
