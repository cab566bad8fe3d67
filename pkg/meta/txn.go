package meta

import (
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// txn collects a transaction: each compare also reads its key when the transaction fails, so that the failure
// explains itself without a second, later read.
type txn struct {
	guard *Guard
	cmps  []clientv3.Cmp
	thens []clientv3.Op
	elses []clientv3.Op
	named []entry.StorageUUID // compared as not retired
}

// compareRev guards that key is at the revision the caller saw; 0 means absent.
func (t *txn) compareRev(key string, rev int64) {
	t.cmps = append(t.cmps, clientv3.Compare(clientv3.ModRevision(key), "=", rev))
	t.elses = append(t.elses, clientv3.OpGet(key))
}

// compareExists guards that key is there.
func (t *txn) compareExists(key string) {
	t.cmps = append(t.cmps, clientv3.Compare(clientv3.CreateRevision(key), ">", 0))
	t.elses = append(t.elses, clientv3.OpGet(key))
}

// compareEmpty guards that no key begins with prefix.
func (t *txn) compareEmpty(prefix string) {
	t.cmps = append(t.cmps, clientv3.Compare(clientv3.CreateRevision(prefix), "=", 0).WithPrefix())
	t.elses = append(t.elses, clientv3.OpGet(prefix, clientv3.WithPrefix(), clientv3.WithLimit(1), clientv3.WithKeysOnly()))
}

// compareEpoch guards that bundle's epoch is e; 0 means that it never had an owner.
func (t *txn) compareEpoch(s *Store, b BundleID, e entry.Epoch) {
	key := s.epochKey(b)
	if e == 0 {
		t.compareRev(key, 0)
		return
	}
	t.cmps = append(t.cmps, clientv3.Compare(clientv3.Value(key), "=", encodeEpoch(e)))
	t.elses = append(t.elses, clientv3.OpGet(key))
}

// compareUnretired guards that u is not retired.
func (t *txn) compareUnretired(s *Store, u entry.StorageUUID) {
	t.named = append(t.named, u)
	t.compareRev(s.retiredKey(u), 0)
}

func (t *txn) put(key, value string, opts ...clientv3.OpOption) {
	t.thens = append(t.thens, clientv3.OpPut(key, value, opts...))
}

func (t *txn) del(key string, opts ...clientv3.OpOption) {
	t.thens = append(t.thens, clientv3.OpDelete(key, opts...))
}

// commitTxn sends t, with the guard's epoch compared when there is one.
func (s *Store) commitTxn(ctx context.Context, op string, t *txn) (*clientv3.TxnResponse, error) {
	if t.guard != nil {
		if t.guard.Epoch == 0 {
			return nil, fmt.Errorf("%s: %w: epoch 0 is nobody's", op, ErrEpoch)
		}
		t.compareEpoch(s, t.guard.Bundle, t.guard.Epoch)
	}
	return s.commit(ctx, op, t.cmps, t.thens, t.elses)
}

// results returns what a failed transaction read, by key.
func (t *txn) results(resp *clientv3.TxnResponse) map[string]*mvccpb.KeyValue {
	found := make(map[string]*mvccpb.KeyValue)
	for _, r := range resp.Responses {
		for _, kv := range r.GetResponseRange().GetKvs() {
			found[string(kv.Key)] = kv
		}
	}
	return found
}

// ownership explains a failed transaction by the guard: ErrEpoch when its epoch is not the bundle's.
func (t *txn) ownership(s *Store, now map[string]*mvccpb.KeyValue) error {
	if t.guard == nil {
		return nil
	}
	kv := now[s.epochKey(t.guard.Bundle)]
	if kv == nil || string(kv.Value) != encodeEpoch(t.guard.Epoch) {
		return fmt.Errorf("%w: bundle %s is past epoch %d", ErrEpoch, t.guard.Bundle, t.guard.Epoch)
	}
	return nil
}

// retirement explains a failed transaction by an identity that is retired.
func (t *txn) retirement(s *Store, now map[string]*mvccpb.KeyValue) error {
	for _, u := range t.named {
		if now[s.retiredKey(u)] != nil {
			return fmt.Errorf("%w: %s", ErrRetired, u)
		}
	}
	return nil
}
