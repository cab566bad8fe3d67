package meta_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Many brokers want one bundle: one gets it, and the others are told who.
func TestOneTakerWins(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	const unowned = meta.BundleID("public/default/7")
	race := func(expect meta.Expectation, want entry.Epoch) meta.Owner {
		t.Helper()
		var mu sync.Mutex
		var winners []meta.Owner
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				o, err := f.TakeBundle(ctx, unowned, broker(fmt.Sprintf("b%d", i)), f.lease, expect)
				var conflict *meta.OwnerConflictError
				switch {
				case err == nil:
					mu.Lock()
					winners = append(winners, o)
					mu.Unlock()
				case !errors.As(err, &conflict) || !errors.Is(err, meta.ErrConflict) || conflict.Owner.Epoch != want:
					t.Errorf("a loser got %v", err)
				}
			})
		}
		wg.Wait()
		if len(winners) != 1 || winners[0].Epoch != want {
			t.Fatalf("winners: %+v, want one with epoch %d", winners, want)
		}
		return winners[0]
	}
	first := race(meta.ExpectNone(), 1)
	// All suspect the winner at once: one takeover, not sixteen in a row.
	second := race(meta.ExpectOwner(first), 2)
	stored, err := f.GetOwner(ctx, unowned)
	check(t, err)
	if stored != second {
		t.Fatalf("stored %+v, the winner has %+v", stored, second)
	}
	// The same suspicion, late.
	if _, err := f.TakeBundle(ctx, unowned, broker("late"), f.lease, meta.ExpectOwner(first)); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("a suspicion was used twice: %v", err)
	}
}

// The epoch grows with each takeover and survives releases, ended leases and re-acquisition.
func TestEpochNeverFalls(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	last := f.guard.Epoch
	grow := func(o meta.Owner, err error) meta.Owner {
		t.Helper()
		check(t, err)
		if o.Epoch != last+1 {
			t.Fatalf("epoch %d after %d", o.Epoch, last)
		}
		last = o.Epoch
		return o
	}
	check(t, f.ReleaseBundle(ctx, f.guard, "b1"))
	check(t, f.ReleaseBundle(ctx, f.guard, "b1")) // again is no error
	if now, err := f.GetOwner(ctx, bundle); err != nil || now.Broker != "" || now.Epoch != last {
		t.Fatalf("after a release: %+v, %v", now, err)
	}
	doomed := newLease(t)
	o := grow(f.TakeBundle(ctx, bundle, broker("b2"), doomed, meta.ExpectNone()))
	_, err := etcd.Client().Revoke(ctx, doomed)
	check(t, err)
	if now, err := f.GetOwner(ctx, bundle); err != nil || now.Broker != "" || now.Epoch != last {
		t.Fatalf("after the lease ended: %+v, %v", now, err)
	}
	// The old owner comes back before anybody took the bundle, and keeps its epoch.
	back, err := f.ReacquireBundle(ctx, bundle, broker("b2"), f.lease, o.Epoch)
	check(t, err)
	if back.Epoch != last || back.Rev == o.Rev {
		t.Fatalf("reacquired %+v", back)
	}
	// Somebody suspected it: the expectation still holds by its epoch.
	grow(f.TakeBundle(ctx, bundle, broker("b3"), f.lease, meta.ExpectOwner(o)))
	if _, err := f.ReacquireBundle(ctx, bundle, broker("b2"), f.lease, o.Epoch); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("the old owner came back after a takeover: %v", err)
	}
	if _, err := f.TakeBundle(ctx, bundle, broker("b4"), f.lease, meta.ExpectNone()); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("took an owned bundle, expecting none: %v", err)
	}
	if _, err := f.ReacquireBundle(ctx, bundle, broker("b3"), doomed, last); !errors.Is(err, meta.ErrLease) {
		t.Fatalf("an ended lease: got %v, want %v", err, meta.ErrLease)
	}
	// A suspicion of b3's ownership says nothing of the next one of the same broker.
	suspect, err := f.GetOwner(ctx, bundle)
	check(t, err)
	check(t, f.ReleaseBundle(ctx, meta.Guard{Bundle: bundle, Epoch: last}, "b3"))
	grow(f.TakeBundle(ctx, bundle, broker("b3"), f.lease, meta.ExpectNone()))
	if _, err := f.TakeBundle(ctx, bundle, broker("b4"), f.lease, meta.ExpectOwner(suspect)); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("a suspicion of an earlier epoch: %v", err)
	}
	if _, err := f.TakeBundle(ctx, "public/default/99", broker("b3"), f.lease, meta.ExpectNone()); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("no such bundle: got %v", err)
	}
	if _, err := f.TakeBundle(ctx, "public/default/x", broker("b3"), f.lease, meta.ExpectNone()); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("no bundle's name: got %v", err)
	}
}

// Two owners in turn: what the first writes after the second came is refused, whichever way it goes.
func TestTakeoverEndsTheOldOwnersTransactions(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	next := f.takeover()
	// Each of its own, with what it knows.
	if _, _, err := f.CloseLedger(ctx, f.guard, c, closing(c, l, 1)); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("got %v", err)
	}
	if err := f.DeleteChain(ctx, f.guard, meta.Chain{ID: c.ID, Rev: c.Rev}); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("got %v", err)
	}
	// The new owner goes on where the old one was.
	in, err := f.Owned(next).StartRecovery(ctx, l.ID)
	check(t, err)
	cl := closing(c, in, 1)
	cl.Recovery, cl.Term = true, in.Term
	c, _, err = f.OpenLedger(ctx, next, c, f.newLedger(), &cl)
	check(t, err)
	if len(c.Runs) != 2 || !c.Runs[0].Closed || c.Runs[1].First != 1 {
		t.Fatalf("runs %+v", c.Runs)
	}
}

// between runs something before the first transaction that changes anything.
type between struct {
	pb.KVClient
	f func()
}

func (b *between) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	if f := b.f; f != nil && len(in.Compare) > 0 {
		b.f = nil
		f()
	}
	return b.KVClient.Txn(ctx, in, opts...)
}

// A bundle of a namespace that is deleted while it is taken leaves nothing behind.
func TestTakingABundleOfADeletedNamespace(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	check(t, f.CreateTenant(ctx, "acme"))
	ns, err := f.CreateNamespace(ctx, "acme/eu", meta.Policies{}, 1)
	check(t, err)
	kv := &between{KVClient: clientv3.RetryKVClient(etcd.Client()), f: func() { f.deleteNamespace(ns.Name) }}
	s := meta.NewOver(kv, sched.Real, f.cluster, nil)
	if o, err := s.TakeBundle(ctx, ns.Bundles[0].ID, broker("b1"), f.lease, meta.ExpectNone()); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("took %+v, %v", o, err)
	}
	left, err := etcd.Client().Get(ctx, "/penstock/"+f.cluster+"/view/epochs/acme/", clientv3.WithPrefix())
	check(t, err)
	if left.Count != 0 {
		t.Fatalf("%d epochs are left", left.Count)
	}
}

// Between the look at a bundle that nobody owns and the transaction, another broker takes it and lets it go: the owner's key is
// as it was, and its epoch is used up.
func TestAnEpochIsNotGivenTwice(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	between := func() {
		var last meta.Owner
		o, err := f.GetOwner(ctx, f.guard.Bundle)
		check(t, err)
		last, err = f.TakeBundle(ctx, f.guard.Bundle, broker("other"), f.lease, meta.ExpectNone())
		check(t, err)
		if last.Epoch != o.Epoch+1 {
			t.Fatalf("epoch %d after %d", last.Epoch, o.Epoch)
		}
		check(t, f.ReleaseBundle(ctx, meta.Guard{Bundle: f.guard.Bundle, Epoch: last.Epoch}, "other"))
	}
	mine, err := f.GetOwner(ctx, f.guard.Bundle)
	check(t, err)
	check(t, f.ReleaseBundle(ctx, f.guard, mine.Broker))
	if o, err := f.storeAfter(between).ReacquireBundle(ctx, f.guard.Bundle, broker(mine.Broker), f.lease, f.guard.Epoch); !errors.Is(err, meta.ErrEpoch) {
		t.Errorf("it was owned by another, and is kept: %+v, %v", o, err)
	}
	before, err := f.GetOwner(ctx, f.guard.Bundle)
	check(t, err)
	o, err := f.storeAfter(between).TakeBundle(ctx, f.guard.Bundle, broker("late"), f.lease, meta.ExpectNone())
	if err != nil || o.Epoch != before.Epoch+2 {
		t.Errorf("it was owned with epoch %d in between, and is taken with epoch %d, %v", before.Epoch+1, o.Epoch, err)
	}
}

// storeAfter is a store of f's cluster that calls between before its first changing transaction is sent.
func (f *fixture) storeAfter(between func()) *meta.Store {
	f.t.Helper()
	var once sync.Once
	delay := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if txn, ok := req.(*pb.TxnRequest); ok && changes(txn) {
			once.Do(between)
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: etcd.Endpoints(), Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(delay)},
	})
	check(f.t, err)
	f.t.Cleanup(func() { _ = cli.Close() })
	return meta.New(cli, f.cluster, nil)
}
