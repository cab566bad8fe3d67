package meta

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// NewUUID returns a random (version 4) UUID.
func NewUUID() entry.UUID {
	var u entry.UUID
	_, _ = rand.Read(u[:]) // never fails
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// newUUID is NewUUID, but for a store whose process has a chance of its own.
func (s *Store) newUUID() entry.UUID {
	if s.cli != nil {
		return NewUUID()
	}
	var u entry.UUID
	binary.BigEndian.PutUint64(u[:8], s.sched.Uint64())
	binary.BigEndian.PutUint64(u[8:], s.sched.Uint64())
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// EnsureCluster returns the cluster's record, and creates it when there is none, with the tenant and namespace
// that short names mean. Any number of processes may call it at once; all get the same answer. It returns a
// [*FeatureLevelError] for a cluster that this program is too old for.
func (s *Store) EnsureCluster(ctx context.Context) (ClusterInfo, error) {
	const op = "bootstrap cluster"
	fail := func(err error) (ClusterInfo, error) { return ClusterInfo{}, fmt.Errorf("%s: %w", op, err) }
	info, found, err := s.cluster(ctx)
	if err != nil {
		return fail(err)
	}
	if found {
		return info, nil
	}
	created := time.Now()
	u := s.newUUID()
	record, err := encode(&metav1.Cluster{Uuid: u[:], FeatureLevel: FeatureLevel, CreatedMs: millis(created)})
	if err != nil {
		return fail(err)
	}
	var t txn
	t.compareRev(s.clusterKey(), 0)
	t.put(s.clusterKey(), record)
	tenant, err := encode(&metav1.Tenant{CreatedMs: millis(created)})
	if err != nil {
		return fail(err)
	}
	t.compareRev(s.tenantKey(topicname.DefaultTenant), 0)
	t.put(s.tenantKey(topicname.DefaultTenant), tenant)
	ns := newNamespace(topicname.DefaultTenant+"/"+topicname.DefaultNamespace, Policies{}, 0, DefaultBundles, created)
	if err := s.putNewNamespace(&t, ns, 0, 0); err != nil {
		return fail(err)
	}
	if _, err := s.commitTxn(ctx, op, &t); err != nil {
		return fail(err)
	}
	// Whether it was this call's transaction or another's, the record is there now.
	info, found, err = s.cluster(ctx)
	switch {
	case err != nil:
		return fail(err)
	case !found:
		return fail(ErrConflict)
	}
	return info, nil
}

// GetCluster reads the cluster's record, linearizably, and creates nothing. It returns [ErrNotFound] when there is
// none, and a [*FeatureLevelError] for a cluster that this program is too old for.
func (s *Store) GetCluster(ctx context.Context) (ClusterInfo, error) {
	info, found, err := s.cluster(ctx)
	if err != nil {
		return ClusterInfo{}, err
	}
	if !found {
		return ClusterInfo{}, fmt.Errorf("get cluster: %w", ErrNotFound)
	}
	return info, nil
}

func (s *Store) cluster(ctx context.Context) (ClusterInfo, bool, error) {
	key := s.clusterKey()
	resp, err := s.read(ctx, "get cluster", clientv3.OpGet(key))
	if err != nil {
		return ClusterInfo{}, false, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return ClusterInfo{}, false, nil
	}
	info, err := decodeCluster(key, kvs[0].Value)
	if err != nil {
		return ClusterInfo{}, false, err
	}
	if info.FeatureLevel > FeatureLevel {
		return ClusterInfo{}, false, &FeatureLevelError{Cluster: info.FeatureLevel, Program: FeatureLevel}
	}
	return info, true, nil
}

func decodeCluster(key string, value []byte) (ClusterInfo, error) {
	var m metav1.Cluster
	if err := decode(key, value, &m); err != nil {
		return ClusterInfo{}, err
	}
	u, err := decodeUUID(m.Uuid)
	if err != nil {
		return ClusterInfo{}, &CorruptRecordError{Key: key, Err: err}
	}
	if m.FeatureLevel == 0 {
		return ClusterInfo{}, corrupt(key, "no feature level")
	}
	return ClusterInfo{UUID: u, FeatureLevel: m.FeatureLevel, Created: fromMillis(m.CreatedMs)}, nil
}

// maxLedgerSequence is the last number that fits in an id below its restore generation.
const maxLedgerSequence = 1<<entry.LedgerSequenceBits - 1

// ReserveLedgerIDs reserves n ids that nobody ever had, and returns the first; the others follow it. Blocks
// whose reply was lost are lost with it.
func (s *Store) ReserveLedgerIDs(ctx context.Context, n int) (entry.LedgerID, error) {
	const op = "reserve ledger ids"
	if n < 1 || n > 1<<20 {
		return 0, fmt.Errorf("%s: %w: %d of them", op, ErrInvalid, n)
	}
	var first entry.LedgerID
	err := s.changeLedgerIDs(ctx, op, func(m *metav1.LedgerIds) error {
		if m.Next+uint64(n) > maxLedgerSequence {
			return fmt.Errorf("%s: the sequence is used up", op)
		}
		first = entry.MakeLedgerID(uint16(m.Generation), m.Next)
		m.Next += uint64(n)
		return nil
	})
	return first, err
}

// RaiseRestoreGeneration makes every later ledger id larger than any that can have been reserved before, also
// those that a restored etcd has forgotten. It is called once after each restore, before the cluster serves.
func (s *Store) RaiseRestoreGeneration(ctx context.Context) error {
	const op = "raise restore generation"
	return s.changeLedgerIDs(ctx, op, func(m *metav1.LedgerIds) error {
		if m.Generation == 1<<15-1 {
			return fmt.Errorf("%s: the generations are used up", op)
		}
		m.Generation++
		return nil
	})
}

func (s *Store) changeLedgerIDs(ctx context.Context, op string, change func(*metav1.LedgerIds) error) error {
	key := s.ledgerIDsKey()
	resp, err := s.read(ctx, op, clientv3.OpGet(key))
	if err != nil {
		return err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	for {
		m := &metav1.LedgerIds{Next: 1} // 0 stands for "no ledger"
		var rev int64
		if len(kvs) > 0 {
			if m, err = decodeLedgerIDs(key, kvs[0].Value); err != nil {
				return err
			}
			rev = kvs[0].ModRevision
		}
		if err := change(m); err != nil {
			return err
		}
		value, err := encode(m)
		if err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		var t txn
		t.compareRev(key, rev)
		t.put(key, value)
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return err
		}
		if resp.Succeeded {
			return nil
		}
		// Another's block, or this call's own whose reply was lost: either way the next one is free.
		kvs = resp.Responses[0].GetResponseRange().Kvs
	}
}

func decodeLedgerIDs(key string, value []byte) (*metav1.LedgerIds, error) {
	var m metav1.LedgerIds
	if err := decode(key, value, &m); err != nil {
		return nil, err
	}
	if m.Next == 0 || m.Next > maxLedgerSequence || m.Generation >= 1<<15 {
		return nil, corrupt(key, "generation %d, next %d", m.Generation, m.Next)
	}
	return &m, nil
}
