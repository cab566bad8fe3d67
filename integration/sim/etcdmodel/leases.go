package etcdmodel

import (
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// Grant makes a lease that runs out ttl seconds after now unless it is renewed. An id of 0 leaves the choice to the
// model.
func (m *Model) Grant(now time.Time, id, ttl int64) (int64, error) {
	if id == 0 {
		for m.leases[m.nextLease] != nil {
			m.nextLease++
		}
		id = m.nextLease
		m.nextLease++
	}
	if m.leases[id] != nil {
		return 0, rpctypes.ErrGRPCLeaseExist
	}
	m.leases[id] = &lease{id: id, ttl: ttl, until: now.Add(time.Duration(ttl) * time.Second), keys: map[string]bool{}}
	return id, nil
}

// KeepAlive renews a lease, and returns its TTL in seconds.
func (m *Model) KeepAlive(now time.Time, id int64) (int64, error) {
	l := m.leases[id]
	if l == nil || !now.Before(l.until) { // one that has run out stays so until it goes
		return 0, rpctypes.ErrGRPCLeaseNotFound
	}
	l.until = now.Add(time.Duration(l.ttl) * time.Second)
	return l.ttl, nil
}

// Revoke ends a lease; its keys go in one change.
func (m *Model) Revoke(id int64) error {
	l := m.leases[id]
	if l == nil {
		return rpctypes.ErrGRPCLeaseNotFound
	}
	w := m.begin()
	for _, key := range slices.Sorted(maps.Keys(l.keys)) {
		w.set(key, nil)
	}
	w.end()
	delete(m.leases, id)
	return nil
}

// Keys returns the keys under a lease, sorted; false if there is no such lease.
func (m *Model) Keys(id int64) ([]string, bool) {
	l := m.leases[id]
	if l == nil {
		return nil, false
	}
	return slices.Sorted(maps.Keys(l.keys)), true
}

// Leased reports whether there is a lease that has not run out.
func (m *Model) Leased(now time.Time, id int64) bool {
	l := m.leases[id]
	return l != nil && now.Before(l.until)
}

// Advance ends the leases that have run out by now, oldest id first, and returns them.
func (m *Model) Advance(now time.Time) []int64 {
	var gone []int64
	for _, id := range slices.Sorted(maps.Keys(m.leases)) {
		if !now.Before(m.leases[id].until) {
			gone = append(gone, id)
		}
	}
	for _, id := range gone {
		if err := m.Revoke(id); err != nil {
			panic("etcdmodel: a lease is gone that was there")
		}
	}
	return gone
}

// ExtendAll renews every lease, as a new leader does.
func (m *Model) ExtendAll(now time.Time) {
	for _, l := range m.leases {
		l.until = now.Add(time.Duration(l.ttl) * time.Second)
	}
}
