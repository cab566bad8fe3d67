package meta

import (
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// ownership is a bundle as one revision has it.
type ownership struct {
	epoch  entry.Epoch // 0: never owned
	owner  Owner       // zero Broker: nobody
	lastOp uint64
}

func (s *Store) decodeOwnership(b BundleID, epochKV, ownerKV *mvccpb.KeyValue) (ownership, error) {
	var o ownership
	var err error
	if epochKV != nil {
		if o.epoch, err = decodeEpoch(string(epochKV.Key), epochKV.Value); err != nil {
			return o, err
		}
	}
	if ownerKV != nil {
		if o.owner, o.lastOp, err = decodeOwner(string(ownerKV.Key), b, ownerKV.Value, ownerKV.ModRevision); err != nil {
			return o, err
		}
		if o.owner.Epoch != o.epoch {
			return o, corrupt(string(ownerKV.Key), "it has epoch %d, the bundle has %d", o.owner.Epoch, o.epoch)
		}
	}
	return o, nil
}

// readOwnership reads a bundle, and returns ErrNotFound for one that its namespace does not have.
func (s *Store) readOwnership(ctx context.Context, op string, b BundleID) (ownership, error) {
	namespace, _, err := b.Split()
	if err != nil {
		return ownership{}, err
	}
	nsKey := s.namespaceKey(namespace)
	resp, err := s.read(ctx, op, clientv3.OpGet(s.epochKey(b)), clientv3.OpGet(s.ownerKey(b)), clientv3.OpGet(nsKey))
	if err != nil {
		return ownership{}, err
	}
	found := make(map[string]*mvccpb.KeyValue)
	for _, r := range resp.Responses {
		for _, kv := range r.GetResponseRange().Kvs {
			found[string(kv.Key)] = kv
		}
	}
	nsKV := found[nsKey]
	if nsKV == nil {
		return ownership{}, fmt.Errorf("namespace %q: %w", namespace, ErrNotFound)
	}
	ns, _, err := decodeNamespace(nsKey, namespace, nsKV.Value, nsKV.ModRevision)
	if err != nil {
		return ownership{}, err
	}
	for _, bundle := range ns.Bundles {
		if bundle.ID == b {
			return s.decodeOwnership(b, found[s.epochKey(b)], found[s.ownerKey(b)])
		}
	}
	return ownership{}, ErrNotFound
}

// GetOwner reads who owns a bundle, linearizably; an Owner with an empty Broker and the last epoch when nobody
// does.
func (s *Store) GetOwner(ctx context.Context, b BundleID) (Owner, error) {
	o, err := s.readOwnership(ctx, "get owner", b)
	if err != nil {
		return Owner{}, fmt.Errorf("get owner of bundle %s: %w", b, err)
	}
	if o.owner.Broker == "" {
		return Owner{Bundle: b, Epoch: o.epoch}, nil
	}
	return o.owner, nil
}

// TakeBundle makes broker the owner of a bundle: its key, leased, and the epoch plus 1, in one transaction.
// The previous owner's transactions fail from then on. It returns an [*OwnerConflictError] when the bundle is
// not owned as expected, [ErrLease] when the lease is gone, [ErrNotFound] for no such bundle.
//
// An owner's lease protects nothing here: whoever suspects an owner may replace it at any time, and is safe by
// the epoch. What expect prevents is two brokers, or one twice, acting on the same suspicion.
func (s *Store) TakeBundle(ctx context.Context, b BundleID, broker BrokerInfo, lease clientv3.LeaseID, expect Expectation) (Owner, error) {
	const op = "take bundle"
	fail := func(err error) (Owner, error) { return Owner{}, fmt.Errorf("%s %s: %w", op, b, err) }
	if err := checkID("broker", broker.ID); err != nil {
		return fail(err)
	}
	mine := newOp()
	cur, err := s.readOwnership(ctx, op, b)
	if err != nil {
		return fail(err)
	}
	for {
		if !expect.holds(cur) {
			return Owner{}, &OwnerConflictError{Bundle: b, Owner: cur.owner, Epoch: cur.epoch}
		}
		next := Owner{Bundle: b, Broker: broker.ID, URL: broker.URL, Epoch: cur.epoch + 1}
		var t txn
		t.compareEpoch(s, b, cur.epoch)
		t.put(s.epochKey(b), encodeEpoch(next.Epoch))
		now, owner, err := s.putOwner(ctx, op, &t, cur, next, lease, mine)
		if err != nil {
			return fail(err)
		}
		if owner.Broker != "" {
			return owner, nil
		}
		cur = now
	}
}

// holds reports whether the bundle is owned as expected: by nobody, or by that owner at that epoch, or by
// nobody since that epoch.
func (e Expectation) holds(o ownership) bool {
	if e.owner == nil {
		return o.owner.Broker == ""
	}
	return o.epoch == e.owner.Epoch && (o.owner.Broker == "" || o.owner.Broker == e.owner.Broker)
}

// ReacquireBundle puts the owner's key under a new lease and keeps the epoch: for a broker whose lease was
// lost while nobody took the bundle. It returns [ErrEpoch] when somebody did.
func (s *Store) ReacquireBundle(ctx context.Context, b BundleID, broker BrokerInfo, lease clientv3.LeaseID, epoch entry.Epoch) (Owner, error) {
	const op = "reacquire bundle"
	fail := func(err error) (Owner, error) { return Owner{}, fmt.Errorf("%s %s: %w", op, b, err) }
	if err := checkID("broker", broker.ID); err != nil {
		return fail(err)
	}
	if epoch == 0 {
		return fail(fmt.Errorf("%w: epoch 0 is nobody's", ErrEpoch))
	}
	mine := newOp()
	cur, err := s.readOwnership(ctx, op, b)
	if err != nil {
		return fail(err)
	}
	for {
		if cur.epoch != epoch || cur.owner.Broker != "" && cur.owner.Broker != broker.ID {
			return fail(fmt.Errorf("%w: the bundle has epoch %d", ErrEpoch, cur.epoch))
		}
		next := Owner{Bundle: b, Broker: broker.ID, URL: broker.URL, Epoch: epoch}
		var t txn
		t.compareEpoch(s, b, epoch)
		now, owner, err := s.putOwner(ctx, op, &t, cur, next, lease, mine)
		if err != nil {
			return fail(err)
		}
		if owner.Broker != "" {
			return owner, nil
		}
		cur = now
	}
}

// putOwner commits t with the owner's key compared as in cur and put as next, in a namespace that exists: an epoch written
// after its deletion would stay for ever. It returns next once it is there, or the bundle as it is now.
func (s *Store) putOwner(ctx context.Context, op string, t *txn, cur ownership, next Owner, lease clientv3.LeaseID, mine uint64) (ownership, Owner, error) {
	value, err := encode(&metav1.Owner{Broker: next.Broker, Url: next.URL, Epoch: uint64(next.Epoch), LastOp: mine})
	if err != nil {
		return ownership{}, Owner{}, err
	}
	namespace, _, err := next.Bundle.Split()
	if err != nil {
		return ownership{}, Owner{}, err
	}
	key := s.ownerKey(next.Bundle)
	t.compareExists(s.namespaceKey(namespace))
	t.compareRev(key, cur.owner.Rev)
	t.put(key, value, clientv3.WithLease(lease))
	resp, err := s.commitTxn(ctx, op, t)
	if err != nil {
		return ownership{}, Owner{}, err
	}
	if resp.Succeeded {
		next.Rev = resp.Header.Revision
		return ownership{}, next, nil
	}
	now := t.results(resp)
	o, err := s.decodeOwnership(next.Bundle, now[s.epochKey(next.Bundle)], now[key])
	if err != nil {
		return ownership{}, Owner{}, err
	}
	if o.lastOp == mine {
		return ownership{}, o.owner, nil // an earlier attempt of this call, whose reply was lost
	}
	if now[s.namespaceKey(namespace)] == nil {
		return ownership{}, Owner{}, fmt.Errorf("namespace %q: %w", namespace, ErrNotFound)
	}
	return o, Owner{}, nil
}

// ReleaseBundle ends the ownership that g proves: the key goes, the epoch stays. It returns [ErrEpoch] when
// somebody took the bundle. An ownership that has ended already is no error.
func (s *Store) ReleaseBundle(ctx context.Context, g Guard, brokerID string) error {
	const op = "release bundle"
	fail := func(err error) error { return fmt.Errorf("%s %s: %w", op, g.Bundle, err) }
	cur, err := s.readOwnership(ctx, op, g.Bundle)
	if err != nil {
		return fail(err)
	}
	for {
		if cur.epoch != g.Epoch {
			return fail(fmt.Errorf("%w: the bundle has epoch %d", ErrEpoch, cur.epoch))
		}
		if cur.owner.Broker == "" {
			return nil
		}
		if cur.owner.Broker != brokerID {
			return fail(fmt.Errorf("%w: broker %s owns it", ErrEpoch, cur.owner.Broker))
		}
		t := txn{guard: &g}
		key := s.ownerKey(g.Bundle)
		t.compareRev(key, cur.owner.Rev)
		t.del(key)
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return fail(err)
		}
		if resp.Succeeded {
			return nil
		}
		now := t.results(resp)
		if cur, err = s.decodeOwnership(g.Bundle, now[s.epochKey(g.Bundle)], now[key]); err != nil {
			return fail(err)
		}
	}
}
