//go:build linux

package hosts

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// Network is a bridge with hosts on it, for one test. What fails, fails the test; everything is gone after it.
type Network struct {
	testing.TB
	name  string // prefix of all there is of it
	net   string // the first three bytes of its addresses
	hosts map[string]int
	wires map[string]*Wire // of hosts that are on one
}

// here is this program's number on the network.
const here = 1

// prefix is what the names of all networks begin with; the process that made them follows.
const prefix = "ps"

var made atomic.Uint32

// New makes a network without hosts. It removes first what processes that died left behind.
func New(tb testing.TB) *Network {
	tb.Helper()
	id := rand.IntN(1 << 16) //nolint:gosec // tells networks apart
	n := &Network{
		TB: tb, name: fmt.Sprintf("%s%sx%x", prefix, strconv.FormatInt(int64(os.Getpid()), 36), made.Add(1)),
		net:   fmt.Sprintf("10.%d.%d.", 64+id>>8%64, id&0xff),
		hosts: make(map[string]int), wires: make(map[string]*Wire),
	}
	n.sweep()
	n.ip("link", "add", n.name, "type", "bridge")
	tb.Cleanup(func() { n.ip("link", "del", n.name) })
	n.ip("addr", "add", n.addr(here)+"/24", "dev", n.name)
	n.ip("link", "set", n.name, "up")
	return n
}

// sweep removes the networks of processes that are gone.
func (n *Network) sweep() {
	for dir, remove := range map[string][]string{"/run/netns": {"netns", "del"}, "/sys/class/net": {"link", "del"}} {
		all, err := os.ReadDir(dir)
		if err != nil {
			continue // there are none
		}
		for _, e := range all {
			rest, ours := strings.CutPrefix(e.Name(), prefix)
			maker, _, ok := strings.Cut(rest, "x")
			pid, err := strconv.ParseInt(maker, 36, 32)
			if !ours || !ok || err != nil || strings.Contains(e.Name(), ".") {
				continue
			}
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); os.IsNotExist(err) {
				_ = exec.Command("ip", append(remove, e.Name())...).Run() //nolint:gosec,noctx // another may be faster
			}
		}
	}
}

func (n *Network) ip(args ...string) {
	n.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil { //nolint:gosec,noctx // short
		n.Fatalf("ip %s: %v: %s: this test needs root; `go test -tags noroot` leaves it out", strings.Join(args, " "), err, out)
	}
}

func (n *Network) addr(host int) string { return fmt.Sprintf("%s%d", n.net, host) }

func (n *Network) space(name string) string { return n.name + "-" + name }

// Place makes the host of a process, the first time it is asked for.
func (n *Network) Place(name string) (host string, command []string) {
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
	if w := n.wires[name]; w != nil {
		n.lay(w, space, port)
	} else {
		n.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
	}
	n.ip("link", "set", port, "master", n.name, "up")
	n.ip("-n", space, "addr", "add", n.addr(i)+"/24", "dev", "eth0")
	n.ip("-n", space, "link", "set", "eth0", "up")
	n.ip("-n", space, "link", "set", "lo", "up")
	return n.addr(i), command
}

// Cut swallows what one host sends to another; to is "" for this program.
func (n *Network) Cut(from, to string) {
	n.Helper()
	n.ip("-n", n.space(from), "neigh", "replace", n.of(to), "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
}

// Heal ends a cut.
func (n *Network) Heal(from, to string) {
	n.Helper()
	n.ip("-n", n.space(from), "neigh", "del", n.of(to), "dev", "eth0")
}

func (n *Network) of(name string) string {
	if name == "" {
		return n.addr(here)
	}
	return n.addr(n.hosts[name])
}
