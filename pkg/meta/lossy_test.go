package meta_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

// lossyStore is a store of f's cluster that loses the reply to the next changing transaction when it is armed.
func (f *fixture) lossyStore() (s *meta.Store, armed *atomic.Bool) {
	f.t.Helper()
	armed = new(atomic.Bool)
	lose := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		err := invoke(ctx, method, req, reply, cc, opts...)
		if txn, ok := req.(*pb.TxnRequest); ok && err == nil && changes(txn) && armed.CompareAndSwap(true, false) {
			return status.Error(codes.Unavailable, "the reply was lost")
		}
		return err
	}
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: etcd.Endpoints(), Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(lose)},
	})
	check(f.t, err)
	f.t.Cleanup(func() { _ = cli.Close() })
	return meta.New(cli, f.cluster, nil), armed
}

func changes(txn *pb.TxnRequest) bool {
	for _, op := range txn.Success {
		if op.GetRequestPut() != nil || op.GetRequestDeleteRange() != nil {
			return true
		}
	}
	return false
}

// refusing loses the reply to the first transaction that changes anything, and has the next one refused.
type refusing struct {
	pb.KVClient
	changes atomic.Int32
}

func (r *refusing) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	n := int32(0)
	if changes(in) {
		n = r.changes.Add(1)
	}
	if n == 2 {
		return nil, status.Error(codes.ResourceExhausted, "no space")
	}
	resp, err := r.KVClient.Txn(ctx, in, opts...)
	if n == 1 && err == nil {
		return nil, status.Error(codes.Unavailable, "the reply was lost")
	}
	return resp, err
}

// What is refused at last may have been applied before.
func TestARefusalAfterALostReplyIsNoOutcome(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s := meta.NewOver(&refusing{KVClient: clientv3.RetryKVClient(etcd.Client())}, sched.Real, f.cluster, nil)
	c, err := f.GetChain(t.Context(), f.chain)
	check(t, err)
	l := f.newLedger()
	if _, _, err := s.OpenLedger(t.Context(), f.guard, c, l, nil); !errors.Is(err, meta.ErrUnknownOutcome) {
		t.Errorf("got %v", err)
	}
	if _, err := f.GetLedger(t.Context(), l.ID); err != nil {
		t.Errorf("the ledger that was opened: %v", err)
	}
}

// B19: the change is applied, the reply is lost, the second attempt meets its own work. It is success, once.
func TestB19ReplyLost(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, armed := f.lossyStore()
	ctx := t.Context()
	step := func(name string, f func() error) {
		t.Helper()
		armed.Store(true)
		if err := f(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if armed.Load() {
			t.Fatalf("%s: no reply was lost, the test proves nothing", name)
		}
	}

	step("tenant", func() error { return s.CreateTenant(ctx, "acme") })
	step("namespace", func() error { _, err := s.CreateNamespace(ctx, "acme/eu", meta.Policies{}, 2); return err })
	step("policies", func() error { _, err := s.UpdateNamespace(ctx, "acme/eu", meta.Policies{}); return err })
	var topic meta.Topic
	step("topic", func() (err error) { topic, err = s.CreateTopic(ctx, "acme/eu/t", 2); return err })
	if got, err := f.GetTopic(ctx, "acme/eu/t"); err != nil || got != topic {
		t.Fatalf("created %+v, stored %+v, %v", topic, got, err)
	}
	step("mark topic", func() (err error) { topic, err = s.MarkTopicDeleting(ctx, "acme/eu/t"); return err })
	step("delete topic", func() error { return s.DeleteTopic(ctx, topic) })
	step("cookie", func() error { return s.CreateCookie(ctx, meta.Cookie{ID: "k1", UUID: storage(9)}) })
	step("start", func() error { return s.CountStart(ctx, "k1", storage(9), 1) })
	step("register", func() error { return s.RegisterBookie(ctx, meta.BookieInfo{ID: "k1", UUID: storage(9)}, f.lease, 0) })
	step("mark", func() error { _, err := s.MarkMaintenance(ctx, "k1", noon); return err })
	step("lift", func() error { return s.LiftMaintenance(ctx, "k1") })
	var op meta.Operation
	step("start operation", func() (err error) {
		op, err = s.StartOperation(ctx, meta.Operation{Kind: meta.OperationDecommission, Bookie: "k1", Created: noon})
		return err
	})
	step("update operation", func() (err error) {
		op.State = meta.OperationDraining
		op, err = s.UpdateOperation(ctx, op)
		return err
	})
	step("cancel operation", func() error { op.State = meta.OperationCancelled; _, err := s.EndOperation(ctx, op); return err })
	step("start another", func() (err error) {
		op, err = s.StartOperation(ctx, meta.Operation{Kind: meta.OperationDecommission, Bookie: "k1", Created: noon})
		return err
	})
	step("finish operation", func() (err error) { op, err = s.FinishOperation(ctx, op); return err })
	step("forget operation", func() error { return s.ForgetOperation(ctx, op) })
	if all, err := f.ListOperations(ctx); err != nil || len(all) != 1 || all[0].State != meta.OperationCancelled {
		t.Fatalf("operations %+v, %v", all, err)
	}
	step("cookie of another disk", func() error { return s.CreateCookie(ctx, meta.Cookie{ID: "k1", UUID: storage(8)}) })
	step("retire", func() error { return s.RetireStorage(ctx, "k1", storage(8)) })
	var owner meta.Owner
	step("take", func() (err error) {
		owner, err = s.TakeBundle(ctx, "acme/eu/0", broker("b1"), f.lease, meta.ExpectNone())
		return err
	})
	if owner.Epoch != 1 {
		t.Fatalf("taken once with epoch %d", owner.Epoch)
	}
	step("reacquire", func() (err error) {
		owner, err = s.ReacquireBundle(ctx, "acme/eu/0", broker("b1"), f.lease, 1)
		return err
	})
	step("release", func() error { return s.ReleaseBundle(ctx, meta.Guard{Bundle: "acme/eu/0", Epoch: 1}, "b1") })

	var a, b entry.LedgerID
	step("ids", func() (err error) { a, err = s.ReserveLedgerIDs(ctx, 10); return err })
	step("ids again", func() (err error) { b, err = s.ReserveLedgerIDs(ctx, 10); return err })
	if b < a+10 {
		t.Fatalf("block %d overlaps block %d", b, a)
	}
	c, err := s.GetChain(ctx, f.chain)
	check(t, err)
	l := f.newLedger()
	step("T1", func() (err error) { c, l, err = s.OpenLedger(ctx, f.guard, c, l, nil); return err })
	step("T2", func() (err error) {
		l, err = s.ChangeEnsemble(ctx, l, []meta.Fragment{fragment(0, 1, 2, 4)})
		return err
	})
	cl := closing(c, l, 5)
	step("T3+T1", func() (err error) { c, l, err = s.OpenLedger(ctx, f.guard, c, f.newLedger(), &cl); return err })
	step("T4", func() (err error) { l, err = s.StartRecovery(ctx, l.ID); return err })
	if l.Term != 1 {
		t.Fatalf("one recovery has term %d", l.Term)
	}
	cl = closing(c, l, 0)
	cl.Recovery, cl.Term = true, l.Term
	step("T5", func() (err error) { c, l, err = s.CloseLedger(ctx, f.guard, c, cl); return err })
	step("T6 intent", func() (err error) {
		l, err = s.AddIntent(ctx, l.ID, meta.ReplicaIntent{Target: storage(7), Deadline: time.UnixMilli(5)})
		return err
	})
	step("T6 swap", func() (err error) {
		l, err = s.SwapReplica(ctx, l.ID, l.Fragments[0], storage(1), meta.Slot{UUID: storage(7)}, time.UnixMilli(5))
		return err
	})
	step("T7", func() (err error) { c, err = s.DeleteLedger(ctx, f.guard, c, l.ID); return err })
	step("T8", func() error { return s.PurgeTombstone(ctx, l.ID) })

	// What the lossy store believes is what is stored.
	stored, err := f.GetChain(ctx, f.chain)
	check(t, err)
	if stored.Rev != c.Rev || len(stored.Runs) != 1 || len(c.Runs) != 1 || stored.Runs[0] != c.Runs[0] || stored.NextOffset != 5 {
		t.Fatalf("believed %+v, stored %+v", c, stored)
	}
}

// The same over a real network: the request passes, the reply does not come back, the connection breaks.
func TestReplyLostOnTheWire(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	p := newProxy(t, etcd.Endpoints()[0])
	s := meta.New(p.client(), f.cluster, nil)
	c, err := s.GetChain(t.Context(), f.chain)
	check(t, err)
	var l meta.Ledger
	fresh := f.newLedger()
	check(t, p.loseReply("/penstock/"+f.cluster+"/chains/", func() (err error) {
		c, l, err = s.OpenLedger(t.Context(), f.guard, c, fresh, nil)
		return err
	}))
	stored, err := f.GetLedger(t.Context(), l.ID)
	check(t, err)
	if stored.Rev != l.Rev || stored.LastOp != l.LastOp || c.Rev != l.Rev {
		t.Fatalf("opened %+v, stored %+v", l, stored)
	}
}

// A call that ends without a reply says what is known: nothing was applied, or it may have been.
func TestUnavailableOrUnknown(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	p := newProxy(t, etcd.Endpoints()[0])

	// A client that never had a connection can't have sent anything.
	p.setRefuse(true)
	cli, err := embedetcd.NewClient([]string{p.listen.Addr().String()})
	check(t, err)
	t.Cleanup(func() { _ = cli.Close() })
	s := meta.New(cli, f.cluster, nil)
	_, err = s.CreateTopic(short(t), "public/default/refused", 0)
	if !errors.Is(err, meta.ErrUnavailable) || errors.Is(err, meta.ErrUnknownOutcome) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("nobody listens: got %v, want unavailable and the context's error", err)
	}
	if _, err := s.GetTopic(short(t), "public/default/refused"); !errors.Is(err, meta.ErrUnavailable) {
		t.Fatalf("a read without a listener: got %v, want unavailable", err)
	}
	p.setRefuse(false)

	// The store comes back by itself.
	if _, err := s.GetTopic(t.Context(), "public/default/refused"); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v, want not found: nothing was applied", err)
	}
	p.mute.Store(true)
	_, err = s.CreateTopic(short(t), "public/default/muted", 0)
	if !errors.Is(err, meta.ErrUnknownOutcome) || errors.Is(err, meta.ErrUnavailable) {
		t.Fatalf("no reply: got %v, want an unknown outcome", err)
	}
	if _, err := f.GetTopic(t.Context(), "public/default/muted"); err != nil {
		t.Fatalf("it was applied indeed, but: %v", err)
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.CreateTopic(ended, "public/default/never", 0); !errors.Is(err, meta.ErrUnavailable) {
		t.Fatalf("a context that had ended: got %v, want unavailable", err)
	}
}

// A change waits for an etcd that comes back within its context.
func TestWaitsForEtcd(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	p := newProxy(t, etcd.Endpoints()[0])
	s := meta.New(p.client(), f.cluster, nil)
	p.setRefuse(true)
	result := make(chan error, 1)
	go func() {
		_, err := s.CreateTopic(t.Context(), "public/default/patient", 0)
		result <- err
	}()
	if _, err := s.GetTopic(short(t), "public/default/patient"); !errors.Is(err, meta.ErrUnavailable) {
		t.Fatalf("got %v, want unavailable", err)
	}
	p.setRefuse(false)
	check(t, <-result)
}
