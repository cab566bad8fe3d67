package meta

import (
	"context"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// ClaimRole gives a role of the cluster to one process at a time: by a key under its lease, so that another can have it when
// that ends. It reports false while another has it. Claiming it again under one lease is keeping it. [ErrLease] says that the
// lease is gone.
//
// A role is no safety: whoever had it may believe so for longer. What is done in a role compares what it changes.
func (s *Store) ClaimRole(ctx context.Context, role, holder string, lease clientv3.LeaseID) (bool, error) {
	const op = "claim role"
	if lease == clientv3.NoLease {
		return false, fmt.Errorf("%s %s: %w", op, role, ErrLease)
	}
	key := s.ElectionKey(role)
	var t txn
	t.compareRev(key, 0)
	t.put(key, holder, clientv3.WithLease(lease))
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil || resp.Succeeded {
		return err == nil, err
	}
	return clientv3.LeaseID(t.results(resp)[key].GetLease()) == lease, nil
}

// ReleaseRole gives a role back that was claimed under that lease. One that is gone, or another's, is no error.
func (s *Store) ReleaseRole(ctx context.Context, role string, lease clientv3.LeaseID) error {
	return s.deregister(ctx, "release role", s.ElectionKey(role), lease)
}
