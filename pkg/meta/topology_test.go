package meta_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Many processes bootstrap one cluster at once: all see one identity, and what short names need is there.
func TestBootstrapIsIdempotent(t *testing.T) {
	t.Parallel()
	s := meta.New(etcd.Client(), uniqueCluster(), nil)
	infos := make([]meta.ClusterInfo, 16)
	var wg sync.WaitGroup
	for i := range infos {
		wg.Go(func() {
			var err error
			if infos[i], err = s.EnsureCluster(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, info := range infos {
		if info != infos[0] || info.UUID.IsZero() || info.FeatureLevel != meta.FeatureLevel {
			t.Fatalf("got %+v and %+v", infos[0], info)
		}
	}
	ns, err := s.GetNamespace(t.Context(), "public/default")
	check(t, err)
	if len(ns.Bundles) != 16 || ns.Bundles[0].ID != "public/default/0" {
		t.Fatalf("namespace %+v", ns)
	}
}

// A cluster that a newer version has moved on is refused with a message that says so.
func TestNewerClusterIsRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	u := meta.NewUUID()
	value, err := proto.Marshal(&metav1.Cluster{Uuid: u[:], FeatureLevel: meta.FeatureLevel + 1})
	check(t, err)
	_, err = etcd.Client().Put(t.Context(), "/penstock/"+f.cluster+"/cluster", string(value))
	check(t, err)
	var level *meta.FeatureLevelError
	if _, err := f.EnsureCluster(t.Context()); !errors.As(err, &level) || level.Cluster != meta.FeatureLevel+1 {
		t.Fatalf("got %v", err)
	}
}

// Bundles cover every hash without a gap, whatever their number, and names spread over them.
func TestBundlesCoverEveryHash(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	check(t, f.CreateTenant(t.Context(), "acme"))
	for _, n := range []int{1, 3, 16, 1000} {
		name := fmt.Sprintf("acme/n%d", n)
		ns, err := f.CreateNamespace(t.Context(), name, meta.Policies{}, n)
		check(t, err)
		next := uint64(0)
		for _, b := range ns.Bundles {
			if uint64(b.First) != next {
				t.Fatalf("%d bundles: %s begins at %d, want %d", n, b.ID, b.First, next)
			}
			next = uint64(b.Last) + 1
		}
		if len(ns.Bundles) != n || next != 1<<32 {
			t.Fatalf("%d bundles: got %d up to %d", n, len(ns.Bundles), next)
		}
	}
	ns, err := f.GetNamespace(t.Context(), "acme/n16")
	check(t, err)
	seen := make(map[meta.BundleID]int)
	for i := range 1000 {
		seen[meta.BundleOf(ns, fmt.Sprintf("acme/n16/orders-partition-%d", i)).ID]++
	}
	if len(seen) != 16 {
		t.Fatalf("1,000 partitions fell on %d bundles of 16: %v", len(seen), seen)
	}
}

// A namespace that is deleted and created again has new bundles: an old owner's guard fits nothing.
func TestBundleIDsAreNeverReused(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	check(t, f.CreateTenant(ctx, "acme"))
	first, err := f.CreateNamespace(ctx, "acme/eu", meta.Policies{}, 4)
	check(t, err)
	o, err := f.TakeBundle(ctx, first.Bundles[0].ID, broker("b1"), f.lease, meta.ExpectNone())
	check(t, err)
	if got, err := f.GetNamespace(ctx, "acme/eu"); err != nil || got.Bundles[0].Epoch != 1 || got.Bundles[1].Epoch != 0 {
		t.Fatalf("epochs of %+v, %v", got, err)
	}
	if err := f.DeleteTenant(ctx, "acme"); !errors.Is(err, meta.ErrNotEmpty) {
		t.Fatalf("deleted a tenant with a namespace: %v", err)
	}
	f.deleteNamespace("acme/eu")
	second, err := f.CreateNamespace(ctx, "acme/eu", meta.Policies{}, 4)
	check(t, err)
	for _, b := range second.Bundles {
		if slices.ContainsFunc(first.Bundles, func(old meta.Bundle) bool { return old.ID == b.ID }) {
			t.Fatalf("bundle %s is back", b.ID)
		}
	}
	stale := meta.Guard{Bundle: o.Bundle, Epoch: o.Epoch}
	if _, _, err := f.OpenLedger(ctx, stale, meta.Chain{ID: meta.StateChain(o.Bundle)}, f.newLedger(), nil); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("an owner of a bundle that is gone: %v", err)
	}
	f.deleteNamespace("acme/eu")
	check(t, f.DeleteTenant(ctx, "acme"))
	tenants, err := f.ListTenants(ctx)
	check(t, err)
	if !slices.Equal(tenants, []string{"public"}) {
		t.Fatalf("tenants %v", tenants)
	}
}

func TestNamespaces(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	check(t, f.CreateTenant(ctx, "acme"))
	if err := f.CreateTenant(ctx, "acme"); !errors.Is(err, meta.ErrExists) {
		t.Fatalf("got %v", err)
	}
	if _, err := f.CreateNamespace(ctx, "nobody/eu", meta.Policies{}, 0); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	three, week, yes := 3, 7*24*time.Hour, true
	size := int64(1 << 30)
	p := meta.Policies{
		Ensemble: &three, RetentionTime: &week, BacklogBytes: &size, AutoCreateTopics: &yes, BacklogAction: meta.BacklogEvict,
	}
	_, err := f.CreateNamespace(ctx, "acme/eu", p, 0)
	check(t, err)
	if _, err := f.CreateNamespace(ctx, "acme/eu", p, 0); !errors.Is(err, meta.ErrExists) {
		t.Fatalf("got %v", err)
	}
	ns, err := f.GetNamespace(ctx, "acme/eu")
	check(t, err)
	got := ns.Policies
	if *got.Ensemble != 3 || *got.RetentionTime != week || *got.BacklogBytes != size || !*got.AutoCreateTopics ||
		got.BacklogAction != meta.BacklogEvict || got.WriteQuorum != nil || got.MessageTTL != nil {
		t.Fatalf("policies %+v", got)
	}
	if r, err := got.Replication(meta.Replication{Ensemble: 5, WriteQuorum: 3, AckQuorum: 2}); err != nil || r.Ensemble != 3 || r.AckQuorum != 2 {
		t.Fatalf("replication %+v, %v", r, err)
	}
	five := 5
	if _, err := (meta.Policies{AckQuorum: &five}).Replication(meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	if _, err := f.UpdateNamespace(ctx, "acme/eu", meta.Policies{WriteQuorum: &three, AckQuorum: &five}); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("quorums that can't be: %v", err)
	}
	updated, err := f.UpdateNamespace(ctx, "acme/eu", meta.Policies{MessageTTL: &week})
	check(t, err)
	if updated.Policies.Ensemble != nil || *updated.Policies.MessageTTL != week || len(updated.Bundles) != 16 {
		t.Fatalf("updated %+v", updated)
	}
	all, err := f.ListNamespaces(ctx, "")
	check(t, err)
	if len(all) != 2 || all[0].Name != "acme/eu" || all[1].Name != "public/default" {
		t.Fatalf("namespaces %+v", all)
	}
	if of, err := f.ListNamespaces(ctx, "acm"); err != nil || len(of) != 0 {
		t.Fatalf("namespaces of a tenant's prefix: %+v, %v", of, err)
	}
	_, err = f.MarkNamespaceDeleting(ctx, "acme/eu")
	check(t, err)
	if _, err := f.CreateTopic(ctx, "acme/eu/late", 0); !errors.Is(err, meta.ErrDeleting) {
		t.Fatalf("got %v", err)
	}
	for _, bad := range []string{"", "acme", "acme/e u", "acme/eu/x"} {
		if _, err := f.CreateNamespace(ctx, bad, p, 0); !errors.Is(err, meta.ErrInvalid) {
			t.Errorf("namespace %q: got %v", bad, err)
		}
	}
}

// deleteNamespace deletes an empty namespace.
func (f *fixture) deleteNamespace(name string) {
	f.t.Helper()
	_, err := f.MarkNamespaceDeleting(f.t.Context(), name)
	check(f.t, err)
	check(f.t, f.DeleteNamespace(f.t.Context(), name))
}

// What is deleted is what was there when the deletion began: not what was created in its place since, though the reply to an
// earlier attempt may have been lost, or its end not been heard of.
func TestWhatIsCreatedAnewIsNotDeleted(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	meanwhile := func(do func()) *meta.Store {
		return meta.NewOver(&between{KVClient: clientv3.RetryKVClient(etcd.Client()), f: do}, sched.Real, f.cluster, nil)
	}
	var fresh meta.Topic
	s := meanwhile(func() {
		marked, err := f.MarkTopicDeleting(ctx, f.topic.Name)
		check(t, err)
		check(t, f.DeleteTopic(ctx, marked))
		fresh, err = f.CreateTopic(ctx, f.topic.Name, 0)
		check(t, err)
	})
	if _, err := s.MarkTopicDeleting(ctx, f.topic.Name); !errors.Is(err, meta.ErrNotFound) {
		t.Errorf("mark a topic that is gone: %v", err)
	}
	if _, err := f.MarkThisTopicDeleting(ctx, f.topic); !errors.Is(err, meta.ErrNotFound) {
		t.Errorf("mark a topic that was read before it went: %v", err)
	}
	if got, err := f.GetTopic(ctx, f.topic.Name); err != nil || got != fresh {
		t.Errorf("the topic that was created anew is %+v, %v", got, err)
	}

	check(t, f.CreateTenant(ctx, "acme"))
	_, err := f.CreateNamespace(ctx, "acme/eu", meta.Policies{}, 2)
	check(t, err)
	s = meanwhile(func() {
		f.deleteNamespace("acme/eu")
		_, err := f.CreateNamespace(ctx, "acme/eu", meta.Policies{}, 2)
		check(t, err)
	})
	if _, err := s.MarkNamespaceDeleting(ctx, "acme/eu"); !errors.Is(err, meta.ErrNotFound) {
		t.Errorf("mark a namespace that is gone: %v", err)
	}
	if err := f.DeleteNamespace(ctx, "acme/eu"); !errors.Is(err, meta.ErrConflict) {
		t.Errorf("delete a namespace that was created anew: %v", err)
	}
	if got, err := f.GetNamespace(ctx, "acme/eu"); err != nil || got.Deleting {
		t.Errorf("the namespace that was created anew is %+v, %v", got, err)
	}
	_, err = f.CreateTopic(ctx, "acme/eu/t", 0)
	check(t, err)
	_, err = f.MarkNamespaceDeleting(ctx, "acme/eu")
	check(t, err)
	if err := f.DeleteNamespace(ctx, "acme/eu"); !errors.Is(err, meta.ErrNotEmpty) {
		t.Errorf("delete a namespace with topics: %v", err)
	}
}

func TestTopics(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	again, err := f.CreateTopic(ctx, "public/default/orders", 4)
	if !errors.Is(err, meta.ErrExists) || again != f.topic {
		t.Fatalf("got %+v, %v; want the topic that is there", again, err)
	}
	parts, err := f.CreateTopic(ctx, "public/default/parts", 3)
	check(t, err)
	if chains := parts.Chains(); len(chains) != 3 || chains[2] != meta.DataChain(parts.UUID, 2) {
		t.Fatalf("chains %v", chains)
	}
	all, err := f.ListTopics(ctx, "public/default")
	check(t, err)
	if !slices.Equal(all, []meta.Topic{f.topic, parts}) {
		t.Fatalf("listed %+v", all)
	}
	if _, err := f.CreateTopic(ctx, "acme/eu/x", 0); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	for _, bad := range []string{"", "orders", "public/default/a b", "public/default/orders-partition-1"} {
		if _, err := f.CreateTopic(ctx, bad, 0); !errors.Is(err, meta.ErrInvalid) {
			t.Errorf("topic %q: got %v", bad, err)
		}
	}
	// Deleting: final once marked, and only when no partition has a chain.
	c, l := f.open()
	if err := f.DeleteTopic(ctx, f.topic); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("deleted without a mark: %v", err)
	}
	marked, err := f.MarkTopicDeleting(ctx, f.topic.Name)
	check(t, err)
	if err := f.DeleteTopic(ctx, marked); !errors.Is(err, meta.ErrNotEmpty) {
		t.Fatalf("deleted with a ledger: %v", err)
	}
	c, _, err = f.CloseLedger(ctx, f.guard, c, closing(c, l, 1))
	check(t, err)
	c, err = f.DeleteLedger(ctx, f.guard, c, l.ID)
	check(t, err)
	check(t, f.DeleteChain(ctx, f.guard, c))
	check(t, f.DeleteTopic(ctx, marked))
	check(t, f.DeleteTopic(ctx, marked))
	if _, err := f.GetTopic(ctx, f.topic.Name); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	fresh, err := f.CreateTopic(ctx, f.topic.Name, 0)
	check(t, err)
	if fresh.UUID == f.topic.UUID {
		t.Fatal("a new topic has the old one's identity")
	}
	if err := f.DeleteTopic(ctx, marked); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("the old record's deletion met the new topic: %v", err)
	}
}

// Ids are unique under concurrency, and grow over a restore.
func TestLedgerIDs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	var mu sync.Mutex
	seen := make(map[entry.LedgerID]bool)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5 {
				first, err := f.ReserveLedgerIDs(ctx, 3)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for i := range entry.LedgerID(3) {
					if seen[first+i] || first+i == 0 {
						t.Errorf("id %d twice, or 0", first+i)
					}
					seen[first+i] = true
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	before, err := f.ReserveLedgerIDs(ctx, 1)
	check(t, err)
	check(t, f.RaiseRestoreGeneration(ctx))
	after, err := f.ReserveLedgerIDs(ctx, 1)
	check(t, err)
	if after <= before || after.Generation() != 1 || before.Generation() != 0 {
		t.Fatalf("id %d after %d", after, before)
	}
	if _, err := f.ReserveLedgerIDs(ctx, 0); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
}

// A bookie's identity: made once, registered only with the disk it names, retired for good.
func TestIdentities(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	cookie := meta.Cookie{ID: "bookie-1", UUID: storage(1), Created: time.UnixMilli(1000)}
	if err := f.RegisterBookie(ctx, meta.BookieInfo{ID: "bookie-1", UUID: storage(1)}, f.lease, 0); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("registered without a cookie: %v", err)
	}
	check(t, f.CreateCookie(ctx, cookie))
	check(t, f.CreateCookie(ctx, cookie))
	if err := f.UpdateBookie(ctx, meta.BookieInfo{ID: "bookie-1", UUID: storage(1)}, clientv3.NoLease); !errors.Is(err, meta.ErrLease) {
		t.Fatalf("registered for good, by an update without a lease: %v", err)
	}
	if err := f.CreateCookie(ctx, meta.Cookie{ID: "bookie-1", UUID: storage(2)}); !errors.Is(err, meta.ErrExists) {
		t.Fatalf("a second identity: %v", err)
	}
	got, err := f.GetCookie(ctx, "bookie-1")
	if err != nil || got != cookie {
		t.Fatalf("got %+v, %v", got, err)
	}
	check(t, f.CountStart(ctx, "bookie-1", storage(1), 1))
	check(t, f.CountStart(ctx, "bookie-1", storage(1), 4)) // some were missed
	for n, u := range map[uint64]entry.StorageUUID{4: storage(1), 3: storage(1), 9: storage(2)} {
		if err := f.CountStart(ctx, "bookie-1", u, n); !errors.Is(err, meta.ErrConflict) {
			t.Errorf("start %d of %s: %v", n, u, err)
		}
	}
	if err := f.CountStart(ctx, "bookie-2", storage(1), 1); !errors.Is(err, meta.ErrNotFound) {
		t.Errorf("start without a cookie: %v", err)
	}
	cookie.Starts = 4
	if got, err := f.GetCookie(ctx, "bookie-1"); err != nil || got != cookie {
		t.Fatalf("got %+v, %v", got, err)
	}
	info := meta.BookieInfo{ID: "bookie-1", UUID: storage(2)}
	if err := f.RegisterBookie(ctx, info, f.lease, 0); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("registered a wiped disk: %v", err)
	}
	info.UUID = storage(1)
	check(t, f.RegisterBookie(ctx, info, f.lease, 0))
	info.FreeBytes = 5
	check(t, f.UpdateBookie(ctx, info, f.lease))
	if err := f.UpdateBookie(ctx, info, newLease(t)); !errors.Is(err, meta.ErrLease) {
		t.Fatalf("updated under another lease: %v", err)
	}
	if held, err := f.BookieLease(ctx, storage(1)); err != nil || held != f.lease {
		t.Fatalf("registered under %x, %v", held, err)
	}
	second := newLease(t)
	var registered *meta.BookieRegisteredError
	if err := f.RegisterBookie(ctx, info, second, 0); !errors.As(err, &registered) || registered.Lease != f.lease || registered.Info.FreeBytes != 5 {
		t.Fatalf("registered beside a live one: %v", err)
	}
	if err := f.RegisterBookie(ctx, info, second, newLease(t)); !errors.As(err, &registered) {
		t.Fatalf("registered over another one than meant: %v", err)
	}
	check(t, f.RegisterBookie(ctx, info, f.lease, 0))
	check(t, f.RegisterBookie(ctx, info, second, f.lease))
	if held, err := f.BookieLease(ctx, storage(1)); err != nil || held != second {
		t.Fatalf("registered under %x, %v", held, err)
	}
	if _, err := f.BookieLease(ctx, storage(7)); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	check(t, f.RetireStorage(ctx, "bookie-1", storage(1)))
	check(t, f.RetireStorage(ctx, "bookie-1", storage(1)))
	if err := f.CreateCookie(ctx, cookie); !errors.Is(err, meta.ErrRetired) {
		t.Fatalf("a retired identity came back: %v", err)
	}
	check(t, f.CreateCookie(ctx, meta.Cookie{ID: "bookie-1", UUID: storage(2)}))
	all, err := f.ListCookies(ctx)
	check(t, err)
	if len(all) != 2 || all[0].UUID != storage(2) || all[1].UUID != storage(1) || !all[1].Retired {
		t.Fatalf("cookies %+v", all)
	}
	if err := f.RegisterBroker(ctx, meta.BrokerInfo{ID: "a/b"}, f.lease, 0); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	if err := f.RegisterBroker(ctx, broker("b1"), 12345, 0); !errors.Is(err, meta.ErrLease) {
		t.Fatalf("registered under no lease: %v", err)
	}
}

func TestABrokerIDIsOneProcesss(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	first, second := newLease(t), newLease(t)
	check(t, f.RegisterBroker(ctx, broker("b1"), first, 0))
	check(t, f.RegisterBroker(ctx, broker("b1"), first, 0))
	var registered *meta.BrokerRegisteredError
	if err := f.RegisterBroker(ctx, broker("b1"), second, 0); !errors.As(err, &registered) || registered.Lease != first || registered.Info.ID != "b1" {
		t.Fatalf("registered beside a live one: %v", err)
	}
	if err := f.RegisterBroker(ctx, broker("b1"), second, newLease(t)); !errors.As(err, &registered) {
		t.Fatalf("registered over another one than meant: %v", err)
	}
	check(t, f.RegisterBroker(ctx, broker("b1"), second, first))
	check(t, f.DeregisterBroker(ctx, "b1", second))
	check(t, f.RegisterBroker(ctx, broker("b1"), first, 0))
}

// A record that can't be understood is an error that names its key, whoever reads it; nothing is decided by it.
func TestDamagedRecords(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	prefix := "/penstock/" + f.cluster + "/"
	var keys []string
	got, err := etcd.Client().Get(ctx, prefix, clientv3.WithPrefix())
	check(t, err)
	for _, kv := range got.Kvs {
		if len(kv.Value) > 0 {
			keys = append(keys, string(kv.Key))
			_, err := etcd.Client().Put(ctx, string(kv.Key), "\xff\xff\xff")
			check(t, err)
		}
	}
	for name, read := range map[string]func(context.Context) error{
		"cluster":   func(ctx context.Context) error { _, err := f.EnsureCluster(ctx); return err },
		"ids":       func(ctx context.Context) error { _, err := f.ReserveLedgerIDs(ctx, 1); return err },
		"ledger":    func(ctx context.Context) error { _, err := f.GetLedger(ctx, l.ID); return err },
		"ledgers":   func(ctx context.Context) error { _, err := f.ListLedgers(ctx, 0, 10); return err },
		"chain":     func(ctx context.Context) error { _, err := f.GetChain(ctx, f.chain); return err },
		"topic":     func(ctx context.Context) error { _, err := f.GetTopic(ctx, f.topic.Name); return err },
		"topics":    func(ctx context.Context) error { _, err := f.ListTopics(ctx, "public/default"); return err },
		"namespace": func(ctx context.Context) error { _, err := f.GetNamespace(ctx, "public/default"); return err },
		"owner":     func(ctx context.Context) error { _, err := f.GetOwner(ctx, bundle); return err },
		"T3": func(ctx context.Context) error {
			_, _, err := f.CloseLedger(ctx, meta.Guard{Bundle: bundle, Epoch: f.guard.Epoch}, c, closing(c, l, 1))
			return err
		},
	} {
		err := read(ctx)
		var damaged *meta.CorruptRecordError
		// A guard compares bytes, so a damaged epoch is not its own.
		if name == "T3" && errors.Is(err, meta.ErrEpoch) {
			continue
		}
		if !errors.As(err, &damaged) || !slices.Contains(keys, damaged.Key) {
			t.Errorf("%s: got %v, want an error that names the damaged key", name, err)
		}
	}
}
