package ownership_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

var clusters atomic.Int64

// leaseTTL is far longer than a busy machine may keep a renewal waiting: no lease here ends by itself.
const leaseTTL = time.Minute

// host records what is served, and refuses to serve a bundle twice.
type host struct {
	mu      sync.Mutex
	serving map[meta.BundleID]meta.Guard
	next    map[meta.BundleID]string // where Stop sent the clients
	reasons map[meta.BundleID]ownership.Reason
}

func newHost() *host {
	return &host{serving: map[meta.BundleID]meta.Guard{}, next: map[meta.BundleID]string{}, reasons: map[meta.BundleID]ownership.Reason{}}
}

func (h *host) Serve(g meta.Guard) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, twice := h.serving[g.Bundle]; twice {
		panic("served twice")
	}
	h.serving[g.Bundle] = g
}

func (h *host) Stop(_ context.Context, g meta.Guard, why ownership.Reason, next string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.serving[g.Bundle] != g {
		panic("stopped what is not served")
	}
	delete(h.serving, g.Bundle)
	h.next[g.Bundle], h.reasons[g.Bundle] = next, why
}

type node struct {
	*ownership.Runner
	info    meta.BrokerInfo
	host    *host
	session *lease.Session
	warned  *atomic.Int64
	stop    func() // ends the process as kill -9 would, but for the connection to etcd
}

// startBrokers runs brokers a, b, … on one cluster.
func startBrokers(t *testing.T, n int) (*meta.Store, []*node) {
	t.Helper()
	store := meta.New(etcd.Client(), fmt.Sprintf("ownership-%d", clusters.Add(1)), nil)
	if _, err := store.EnsureCluster(t.Context()); err != nil {
		t.Fatal(err)
	}
	var nodes []*node
	for i := range n {
		nodes = append(nodes, startBroker(t, store, string(rune('a'+i)), nil))
	}
	for _, nd := range nodes { // everyone sees everyone
		for want := range n {
			await(t, func() bool {
				route := nd.Locate(canceled(), meta.BundleID(fmt.Sprintf("public/default/%d", want)))
				return route.Broker != ""
			})
		}
	}
	return store, nodes
}

func startBroker(t *testing.T, store *meta.Store, id string, probe func(context.Context, meta.BrokerInfo) ownership.Presence) *node {
	t.Helper()
	cache := meta.NewCache(t.Context(), store)
	t.Cleanup(cache.Close)
	if err := cache.Synced(t.Context()); err != nil {
		t.Fatal(err)
	}
	session, err := lease.NewSession(t.Context(), etcd.Client(), leaseTTL, nil)
	if err != nil {
		t.Fatal(err)
	}
	h, warned := newHost(), new(atomic.Int64)
	info := meta.BrokerInfo{ID: id, URL: "penstock://" + id, Started: time.Now()}
	r := ownership.New(ownership.Config{
		Self: info,
		Meta: store, View: cache, Session: session, Host: h, Probe: probe, Log: slog.New(warnings{count: warned}),
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	stop := func() { cancel(); <-done }
	t.Cleanup(func() {
		stop()
		_ = session.Close(context.WithoutCancel(t.Context()))
	})
	return &node{r, info, h, session, warned, stop}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// await polls a condition that other goroutines bring about, until the test's deadline at the latest.
func await(t *testing.T, ok func() bool) {
	t.Helper()
	for !ok() {
		select {
		case <-t.Context().Done():
			t.Fatal("the test ended first")
		case <-time.After(time.Millisecond):
		}
	}
}

func firstBundle(t *testing.T, store *meta.Store) meta.BundleID {
	t.Helper()
	ns, err := store.GetNamespace(t.Context(), "public/default")
	if err != nil {
		t.Fatal(err)
	}
	return ns.Bundles[0].ID
}

// place has the bundle taken and returns the owner's index.
func place(t *testing.T, nodes []*node, id meta.BundleID) int {
	t.Helper()
	owner := -1
	await(t, func() bool {
		for i, n := range nodes {
			n.Locate(canceled(), id)
			if _, ok := n.Guard(id); ok {
				owner = i
			}
		}
		return owner >= 0
	})
	return owner
}

func TestSuspicionReplacesAnOwnerLongBeforeItsLeaseEnds(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 3)
	id := firstBundle(t, store)
	old := place(t, nodes, id)
	before, _ := nodes[old].Guard(id)
	for i, n := range nodes {
		if i != old {
			// A suspicion is one of an owner that is known: what a broker takes afterwards shows that it lives.
			await(t, func() bool { return n.Locate(canceled(), id).Epoch == before.Epoch })
			n.PeerSuspected(nodes[old].info, false)
		}
	}
	await(t, func() bool {
		_, still := nodes[old].Guard(id)
		return !still
	})
	now, err := store.GetOwner(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if now.Epoch != before.Epoch+1 || now.Broker == string(rune('a'+old)) {
		t.Fatalf("owner %+v after the takeover of epoch %d", now, before.Epoch)
	}
	await(t, func() bool {
		nodes[old].host.mu.Lock()
		defer nodes[old].host.mu.Unlock()
		return nodes[old].host.reasons[id] == ownership.ReasonReplaced
	})
}

func TestADrainedBrokerNamesWhoTakesOver(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 2)
	id := firstBundle(t, store)
	old := place(t, nodes, id)
	other := nodes[1-old]
	await(t, func() bool { return other.Locate(canceled(), id).Epoch != 0 }) // it knows the owner
	other.PeerDraining(meta.BrokerInfo{ID: "nobody"})                        // a stranger changes nothing
	other.PeerDraining(nodes[old].info)
	if err := nodes[old].Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	nodes[old].host.mu.Lock()
	next := nodes[old].host.next[id]
	nodes[old].host.mu.Unlock()
	if want := "penstock://" + string(rune('a'+1-old)); next != want {
		t.Fatalf("clients are sent to %q, want %q", next, want)
	}
	await(t, func() bool { return other.Locate(t.Context(), id).Mine })
}

func TestWhoHearsNothingOfAnOwnerWaitsForTheNext(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 3)
	id := firstBundle(t, store)
	old := place(t, nodes, id)
	before, _ := nodes[old].Guard(id)
	others := []*node{nodes[(old+1)%3], nodes[(old+2)%3]}
	answers := make(chan ownership.Route, 2)
	for _, other := range others {
		await(t, func() bool { return other.Locate(canceled(), id).Epoch == before.Epoch })
		if route := other.LocateBeyond(canceled(), id, before.Epoch); route.Epoch != before.Epoch {
			t.Fatalf("without a later owner, %+v is known", route)
		}
		go func() { answers <- other.LocateBeyond(t.Context(), id, before.Epoch) }()
	}
	if err := nodes[old].Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range others {
		if route := <-answers; route.Epoch <= before.Epoch {
			t.Fatalf("%+v comes after epoch %d", route, before.Epoch)
		}
	}
}

func TestALostLeaseIsReplacedAndTheEpochKept(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 1)
	id := firstBundle(t, store)
	place(t, nodes, id)
	before, _ := nodes[0].Guard(id)
	grant, err := nodes[0].session.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Client().Revoke(t.Context(), grant.ID); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool {
		owner, err := store.GetOwner(t.Context(), id)
		return err == nil && owner.Broker == "a" && nodes[0].session.ID() != grant.ID
	})
	if now, ok := nodes[0].Guard(id); !ok || now != before {
		t.Fatalf("guard %v, %v after the lease was replaced; want %v", now, ok, before)
	}
}

func TestADeadBrokersBundlesMoveWhenItsLeaseEnds(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 2)
	id := firstBundle(t, store)
	old := place(t, nodes, id)
	grant, err := nodes[old].session.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	nodes[old].stop()
	if err := nodes[old].session.Close(t.Context()); err != nil { // what etcd does when the TTL has passed
		t.Fatal(err)
	}
	<-grant.Lost()
	await(t, func() bool {
		_, ok := nodes[1-old].Guard(id)
		return ok
	})
}

// warnings counts what a log is told at level warn and above.
type warnings struct {
	slog.Handler
	count *atomic.Int64
}

func (w warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

func (w warnings) Handle(context.Context, slog.Record) error {
	w.count.Add(1)
	return nil
}

func TestBundlesOfADeletedNamespaceAreLetGo(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 2)
	const namespace = "public/gone"
	ns, err := store.CreateNamespace(t.Context(), namespace, meta.Policies{}, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, bundle := range ns.Bundles {
		place(t, nodes, bundle.ID)
	}
	if _, err := store.MarkNamespaceDeleting(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	if err := store.DeleteNamespace(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	for _, bundle := range ns.Bundles {
		for _, n := range nodes {
			await(t, func() bool { return n.Forgot(bundle.ID) })
		}
	}
	for _, n := range nodes {
		if got := n.warned.Load(); got != 0 {
			t.Errorf("broker %s logged %d warnings", n.info.ID, got)
		}
	}
}

func (n *node) failure(t *testing.T) *ownership.IDTakenError {
	t.Helper()
	select {
	case <-n.Failed():
		var taken *ownership.IDTakenError
		if !errors.As(n.Err(), &taken) {
			t.Fatalf("failed with %v", n.Err())
		}
		return taken
	case <-t.Context().Done():
		t.Fatal("the broker did not fail")
	}
	return nil
}

func TestASecondProcessOfALiveBrokersNameIsRefused(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 1)
	id := firstBundle(t, store)
	place(t, nodes, id)
	second := startBroker(t, store, "a", func(context.Context, meta.BrokerInfo) ownership.Presence { return ownership.PresenceAlive })
	if got := second.failure(t).Error(); !strings.Contains(got, "stop one of the two") {
		t.Error(got)
	}
	if _, ok := nodes[0].Guard(id); !ok {
		t.Error("the first one lost its bundle")
	}
}

// The lease of a process that is gone delays nobody; and if it was not gone, it learns of its successor, and ends.
func TestAProcessThatIsGoneIsReplacedAtOnce(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 1)
	id := firstBundle(t, store)
	place(t, nodes, id)
	second := startBroker(t, store, "a", func(context.Context, meta.BrokerInfo) ownership.Presence { return ownership.PresenceGone })
	place(t, []*node{second}, id)
	_ = nodes[0].failure(t)
	if !nodes[0].session.Alive() {
		t.Error("the second one waited for the lease of the first")
	}
}

// A process that does not answer may be back: its lease decides.
func TestAProcessThatIsSilentIsWaitedFor(t *testing.T) {
	t.Parallel()
	store, nodes := startBrokers(t, 1)
	asked := make(chan struct{}, 100)
	second := startBroker(t, store, "a", func(context.Context, meta.BrokerInfo) ownership.Presence {
		select {
		case asked <- struct{}{}:
		default:
		}
		return ownership.PresenceUnknown
	})
	for range 3 {
		<-asked
	}
	if _, ok := second.Guard(firstBundle(t, store)); ok {
		t.Error("it did not wait")
	}
	nodes[0].stop()
	if err := nodes[0].session.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	place(t, []*node{second}, firstBundle(t, store))
}
