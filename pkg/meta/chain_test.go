package meta_test

import (
	"slices"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// A chain of more than 1,000 runs spills its oldest to pages; runs go from anywhere, and what is read back is
// what was believed at each step.
func TestPagedChain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	const rolls = 1101
	first, err := f.ReserveLedgerIDs(ctx, rolls)
	check(t, err)
	for i := range entry.LedgerID(rolls) {
		cl := closing(c, l, 2)
		next := meta.Ledger{ID: first + i, Replication: meta.Replication{Ensemble: 1, WriteQuorum: 1, AckQuorum: 1}, Fragments: []meta.Fragment{fragment(0, 1)}}
		c, l, err = f.OpenLedger(ctx, f.guard, c, next, &cl)
		check(t, err)
	}
	same := func(want int) {
		t.Helper()
		stored, err := f.GetChain(ctx, f.chain)
		check(t, err)
		if len(stored.Runs) != want || !slices.Equal(stored.Runs, c.Runs) || stored.NextOffset != 2*rolls || stored.LastLedger != l.ID {
			t.Fatalf("stored %d runs up to %d and floor %d, believed %d, want %d", len(stored.Runs), stored.LastLedger, stored.NextOffset, len(c.Runs), want)
		}
		c = stored // later steps go on from what was read
	}
	same(rolls + 1)
	pages := func() int64 {
		got, err := etcd.Client().Get(ctx, "/penstock/"+f.cluster+"/chain-pages/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		check(t, err)
		return got.Count
	}
	if n := pages(); n != 1 {
		t.Fatalf("%d pages, want 1", n)
	}
	// From the page's middle, from the head, and the oldest.
	for _, i := range []int{250, 700, 0, 498, 496} {
		c, err = f.DeleteLedger(ctx, f.guard, c, c.Runs[i].Ledger)
		check(t, err)
	}
	same(rolls + 1 - 5)
	// The page goes with its last run.
	for range 497 {
		c, err = f.DeleteLedger(ctx, f.guard, c, c.Runs[0].Ledger)
		check(t, err)
	}
	if n := pages(); n != 0 {
		t.Fatalf("%d pages after trimming, want 0", n)
	}
	same(rolls + 1 - 5 - 497)
}

// All keys of an idle topic with one ledger together are small.
func TestBytesPerIdleTopic(t *testing.T) {
	t.Parallel()
	f := &fixture{t: t, cluster: "prod-" + uniqueCluster()}
	f.Store = meta.New(etcd.Client(), f.cluster, nil)
	ctx := t.Context()
	_, err := f.EnsureCluster(ctx)
	check(t, err)
	owner, err := f.TakeBundle(ctx, bundle, broker("b1"), newLease(t), meta.ExpectNone())
	check(t, err)
	// A cluster that has been busy: large ids, offsets and epochs.
	_, err = f.ReserveLedgerIDs(ctx, 1<<20)
	check(t, err)
	f.guard = meta.Guard{Bundle: bundle, Epoch: owner.Epoch}
	size := func() int {
		got, err := etcd.Client().Get(ctx, "/penstock/"+f.cluster+"/", clientv3.WithPrefix())
		check(t, err)
		n := 0
		for _, kv := range got.Kvs {
			n += len(kv.Key) + len(kv.Value)
		}
		return n
	}
	before := size()
	topic, err := f.CreateTopic(ctx, "public/default/orders-00042", 0)
	check(t, err)
	c, err := f.GetChain(ctx, meta.DataChain(topic.UUID, 0))
	check(t, err)
	l := f.newLedger()
	for i := range l.Fragments[0].Slots {
		l.Fragments[0].Slots[i] = meta.Slot{UUID: meta.NewUUID(), Zone: "eu-1" + string(rune('a'+i)), Host: meta.HostHash("node-" + string(rune('a'+i)))}
	}
	_, _, err = f.OpenLedger(ctx, f.guard, c, l, nil)
	check(t, err)
	used := size() - before
	t.Logf("%d bytes per idle topic", used)
	if used > 600 {
		t.Fatalf("an idle topic with one ledger takes %d bytes in etcd, at most 600 are allowed", used)
	}
}
