package model

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

const (
	theLedger = entry.LedgerID(1)
	theBundle = meta.BundleID("public/default/0")
	theNonce  = 77
)

var theChain = meta.DataChain(entry.UUID{7}, 0)

// uuidOf names bookie b's disk; bookieOf is the way back.
func uuidOf(b int) entry.StorageUUID { return entry.StorageUUID{0: byte(b + 1), 15: 0xee} }

func bookieOf(u entry.StorageUUID) int { return int(u[0]) - 1 }

// direct carries requests to the model of etcd; none of them fails.
type direct struct {
	pb.KVClient
	model *etcdmodel.Model
}

// Txn implements pb.KVClient.
func (d direct) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	for _, o := range opts {
		if o, ok := o.(grpc.PeerCallOption); ok {
			*o.PeerAddr = peer.Peer{Addr: &net.TCPAddr{}}
		}
	}
	return d.model.Txn(ctx, in, opts...)
}

// records is etcd with the one ledger in it: a machine whose events are transactions.
type records struct {
	cfg   *Config
	store *meta.Store
	guard meta.Guard
	// l is the record; retired are the identities that are gone for good.
	l       meta.Ledger
	retired [maxBookies]bool
}

// txn is one transaction: run, of what kind.
type txn func(r *records) outcome

// outcome is a transaction's.
type outcome struct {
	result ledger.TxnResult
	l      meta.Ledger
	err    error
	// broken is the rule that the change of the record broke.
	broken string
}

func must[T any](v T, err error) T {
	if err != nil {
		panic("model: " + err.Error())
	}
	return v
}

// newRecords opens the ledger, which is T1.
func newRecords(cfg *Config) *records {
	ctx := context.Background()
	kv := etcdmodel.New()
	r := &records{cfg: cfg}
	r.store = meta.NewOver(direct{model: kv}, sched.Real, "model", nil)
	must(r.store.EnsureCluster(ctx))
	lease := must(kv.Grant(time.Unix(0, 0), 1, 1<<30))
	owner := must(r.store.TakeBundle(ctx, theBundle, meta.BrokerInfo{ID: "w"}, clientv3.LeaseID(lease), meta.Expectation{}))
	r.guard = meta.Guard{Bundle: theBundle, Epoch: owner.Epoch}
	for b := range cfg.Bookies {
		if err := r.store.CreateCookie(ctx, meta.Cookie{ID: fmt.Sprintf("b%d", b), UUID: uuidOf(b)}); err != nil {
			panic(err)
		}
	}
	var slots []meta.Slot
	for b := range cfg.Replication.Ensemble {
		slots = append(slots, meta.Slot{UUID: uuidOf(b), Zone: cfg.zone(b)})
	}
	_, l, err := r.store.OpenLedger(ctx, r.guard, must(r.store.GetChain(ctx, theChain)), meta.Ledger{
		ID: theLedger, Nonce: theNonce, Replication: cfg.Replication, Fragments: []meta.Fragment{{First: 0, Slots: slots}},
	}, nil)
	r.l = canonical(must(l, err))
	return r
}

// canonical leaves out of a record what differs without meaning anything.
func canonical(l meta.Ledger) meta.Ledger {
	l.Rev, l.LastOp, l.Length = 0, 0, 0
	return l
}

func (r *records) step(t txn) outcome {
	before := r.l
	o := t(r)
	r.l = canonical(must(r.store.GetLedger(context.Background(), theLedger)))
	o.l = canonical(o.l)
	o.broken = r.judge(before, r.l)
	return o
}

func (r *records) print(f *fingerprint) {
	f.deep(reflect.ValueOf(r.l), nil)
	for _, gone := range r.retired {
		f.deep(reflect.ValueOf(gone), nil)
	}
}

// judge checks how a record changed.
func (r *records) judge(a, b meta.Ledger) string {
	for _, f := range b.Fragments {
		for _, s := range f.Slots {
			if k := bookieOf(s.UUID); r.retired[k] {
				return fmt.Sprintf("6: a fragment names b%d, which is retired", k)
			}
		}
	}
	switch {
	case b.State < a.State || b.Term < a.Term:
		return "6: a ledger's state or term goes back"
	case a.State >= meta.LedgerClosed && a.Last != b.Last:
		return fmt.Sprintf("6: the end of a closed ledger moves from %d to %d", a.Last, b.Last)
	}
	for i := 1; i < len(b.Fragments); i++ {
		if b.Fragments[i].First <= b.Fragments[i-1].First {
			return "7: fragments do not start one after the other"
		}
	}
	for i := range min(len(a.Fragments)-1, len(b.Fragments)) {
		moved := 0
		for k, s := range a.Fragments[i].Slots {
			if b.Fragments[i].Slots[k] != s {
				moved++
			}
		}
		if a.Fragments[i].First != b.Fragments[i].First || moved > 1 || moved == 1 && len(a.Fragments) != len(b.Fragments) {
			return "7: a fragment that was settled changes"
		}
	}
	return ""
}

// change is T2.
func change(c ledger.Change) txn {
	return func(r *records) outcome {
		var o outcome
		o.result, o.l, o.err = ledger.ResolveChange(context.Background(), r.store, c, func(time.Duration) bool { return false })
		return o
	}
}

// closing is T3 and T5.
func closing(c meta.Closing) txn {
	return func(r *records) outcome {
		ctx := context.Background()
		var state *meta.LedgerStateError
		_, l, err := r.store.CloseLedger(ctx, r.guard, must(r.store.GetChain(ctx, theChain)), c)
		o := outcome{result: ledger.CloseResult(err), l: l, err: err}
		if errors.As(err, &state) {
			o.l = state.Current
		}
		return o
	}
}

// plain is a transaction of which only the success matters.
func plain(f func(ctx context.Context, r *records) error) txn {
	return func(r *records) outcome {
		err := f(context.Background(), r)
		o := outcome{err: err}
		if err != nil {
			o.result = ledger.NotApplied
		}
		return o
	}
}

// startRecovery is T4.
func startRecovery(r *records) outcome {
	l, err := r.store.StartRecovery(context.Background(), theLedger)
	o := outcome{l: l, err: err}
	if err != nil || l.State != meta.LedgerInRecovery {
		o.result = ledger.NotApplied
	}
	return o
}

// deleteLedger is T7.
var deleteLedger = plain(func(ctx context.Context, r *records) error {
	_, err := r.store.DeleteLedger(ctx, r.guard, must(r.store.GetChain(ctx, theChain)), theLedger)
	return err
})

// confirmDeleted is T8 by the last holder's confirmation.
func confirmDeleted(b int) txn {
	return plain(func(ctx context.Context, r *records) error { return r.store.ConfirmDeleted(ctx, theLedger, uuidOf(b)) })
}

// deadline tells the intents of different repairs apart.
func deadline(repair int) time.Time { return now.Add(time.Duration(1+repair) * time.Minute) }

func addIntent(repair, b int, fragment entry.EntryID) txn {
	return plain(func(ctx context.Context, r *records) error {
		_, err := r.store.AddIntent(ctx, theLedger, meta.ReplicaIntent{Target: uuidOf(b), Fragment: fragment, Deadline: deadline(repair)})
		return err
	})
}

func dropIntent(b int, fragment entry.EntryID) txn {
	return plain(func(ctx context.Context, r *records) error {
		_, err := r.store.DropIntent(ctx, theLedger, uuidOf(b), fragment)
		return err
	})
}

func swapReplica(repair int, seen meta.Fragment, old, target int, zone string) txn {
	return plain(func(ctx context.Context, r *records) error {
		_, err := r.store.SwapReplica(ctx, theLedger, seen, uuidOf(old), meta.Slot{UUID: uuidOf(target), Zone: zone}, deadline(repair))
		return err
	})
}

// retire ends an identity.
func retire(b int) txn {
	return func(r *records) outcome {
		err := r.store.RetireStorage(context.Background(), fmt.Sprintf("b%d", b), uuidOf(b))
		if err != nil {
			return outcome{result: ledger.NotApplied, err: err}
		}
		r.retired[b] = true
		return outcome{}
	}
}
