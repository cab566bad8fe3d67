// Package etcdmodel is etcd in a few hundred lines: one copy, in memory, in the caller's goroutine and time. It has what
// Penstock uses: keys with revisions, transactions, ranges (of the past too), leases, watches and compaction.
//
//	m := etcdmodel.New()
//	kv := clientv3.NewKVFromKVClient(m, nil) // as good as a connection that never breaks
//	lease, err := m.Grant(now, 0, ttl)
//	m.Advance(now)                           // leases that have run out go, with their keys
//	events, err := m.Since(revision)         // what a watch delivers
//
// It speaks etcd's wire types, so that whatever sits on a client runs over it unchanged, and answers as etcd does, errors
// included. A test gives the same random requests to it and to an etcd server and compares each answer. What it does
// not have: nested transactions, sorting by anything but keys, permissions, members, and the deviations that a real cluster shows while it has no leader;
// whoever drives it can refuse, delay and lose requests around it.
package etcdmodel

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// MaxTxnOps is etcd's limit of compares or operations in one transaction.
const MaxTxnOps = 128

// Event is a change of one key, as a watch delivers it.
type Event struct {
	// Delete tells a deletion, whose KV has the key and its revision alone.
	Delete bool
	KV     *mvccpb.KeyValue
}

// Model is an etcd. It is not safe for concurrent use; what it returns is the caller's.
type Model struct {
	rev       int64
	compacted int64
	keys      []string // of which anything is known, sorted
	history   map[string][]version
	events    []Event // from compacted on, by revision
	leases    map[int64]*lease
	nextLease int64
}

// version is a key from a revision on. A deletion has no value and kv.Version 0.
type version struct {
	rev int64
	kv  *mvccpb.KeyValue // nil: deleted
}

type lease struct {
	id    int64
	ttl   int64
	until time.Time
	keys  map[string]bool
}

// New returns an empty etcd, at revision 1 as a new server is.
func New() *Model {
	return &Model{rev: 1, history: map[string][]version{}, leases: map[int64]*lease{}, nextLease: 1}
}

// Clone returns a copy: what is restored from it has forgotten what comes now.
func (m *Model) Clone() *Model {
	c := *m
	c.keys, c.events = slices.Clone(m.keys), slices.Clone(m.events)
	c.history = make(map[string][]version, len(m.history))
	for key, h := range m.history {
		c.history[key] = slices.Clone(h)
	}
	c.leases = make(map[int64]*lease, len(m.leases))
	for id, l := range m.leases {
		l := *l
		l.keys = maps.Clone(l.keys)
		c.leases[id] = &l
	}
	return &c
}

// Compacted is the oldest revision that can be read, and watched from.
func (m *Model) Compacted() int64 { return m.compacted }

// Revision is that of the last change.
func (m *Model) Revision() int64 { return m.rev }

// write is one change under way: all of it has one revision.
type write struct {
	m       *Model
	rev     int64
	changed bool
}

func (m *Model) begin() *write { return &write{m: m, rev: m.rev + 1} }

func (w *write) end() {
	if w.changed {
		w.m.rev = w.rev
	}
}

// revision is what a read in the midst of the change sees.
func (w *write) revision() int64 {
	if w.changed {
		return w.rev
	}
	return w.m.rev
}

func (m *Model) latest(key string) *mvccpb.KeyValue {
	h := m.history[key]
	if len(h) == 0 {
		return nil
	}
	return h[len(h)-1].kv
}

func (w *write) set(key string, kv *mvccpb.KeyValue) {
	m := w.m
	w.changed = true
	h, known := m.history[key]
	if !known {
		i, _ := slices.BinarySearch(m.keys, key)
		m.keys = slices.Insert(m.keys, i, key)
	}
	m.history[key] = append(h, version{rev: w.rev, kv: kv})
	e := Event{KV: kv}
	if kv == nil {
		e = Event{Delete: true, KV: &mvccpb.KeyValue{Key: []byte(key), ModRevision: w.rev}}
	}
	m.events = append(m.events, e)
}

func (w *write) put(r *pb.PutRequest) (*pb.PutResponse, error) {
	m, key := w.m, string(r.Key)
	old := m.latest(key)
	if (r.IgnoreValue || r.IgnoreLease) && old == nil {
		return nil, rpctypes.ErrGRPCKeyNotFound
	}
	kv := &mvccpb.KeyValue{Key: r.Key, Value: r.Value, Lease: r.Lease, CreateRevision: w.rev, ModRevision: w.rev, Version: 1}
	if old != nil {
		kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
		if r.IgnoreValue {
			kv.Value = old.Value
		}
		if r.IgnoreLease {
			kv.Lease = old.Lease
		}
		w.detach(old)
	}
	if kv.Lease != 0 {
		m.leases[kv.Lease].keys[key] = true
	}
	w.set(key, kv)
	resp := &pb.PutResponse{Header: &pb.ResponseHeader{Revision: w.revision()}}
	if r.PrevKv {
		resp.PrevKv = clone(old)
	}
	return resp, nil
}

func (w *write) detach(kv *mvccpb.KeyValue) {
	if l := w.m.leases[kv.Lease]; l != nil {
		delete(l.keys, string(kv.Key))
	}
}

func (w *write) deleteRange(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	resp := &pb.DeleteRangeResponse{}
	for _, kv := range w.m.find(r.Key, r.RangeEnd, 0) {
		w.detach(kv)
		w.set(string(kv.Key), nil)
		resp.Deleted++
		if r.PrevKv {
			resp.PrevKvs = append(resp.PrevKvs, clone(kv))
		}
	}
	resp.Header = &pb.ResponseHeader{Revision: w.revision()}
	return resp
}

// find returns what a range of keys held at a revision, 0 for now.
func (m *Model) find(key, end []byte, rev int64) []*mvccpb.KeyValue {
	var out []*mvccpb.KeyValue
	from, _ := slices.BinarySearch(m.keys, string(key))
	for _, k := range m.keys[from:] {
		if !inRange(k, key, end) {
			break
		}
		h := m.history[k]
		at := len(h)
		if rev != 0 {
			at, _ = slices.BinarySearchFunc(h, rev+1, func(v version, rev int64) int { return cmp.Compare(v.rev, rev) })
		}
		// Within one change a key may change twice; the last one counts.
		if at > 0 && h[at-1].kv != nil {
			out = append(out, h[at-1].kv)
		}
	}
	return out
}

// inRange reports whether k, which is not below key, lies in the range: no end is the key alone, an end of one zero
// byte is everything from key on.
func inRange(k string, key, end []byte) bool {
	switch {
	case len(end) == 0:
		return k == string(key)
	case len(end) == 1 && end[0] == 0:
		return true
	}
	return k < string(end)
}

func (m *Model) checkRevision(rev int64) error {
	switch {
	case rev == 0:
		return nil
	case rev > m.rev:
		return rpctypes.ErrGRPCFutureRev
	case rev < m.compacted:
		return rpctypes.ErrGRPCCompacted
	}
	return nil
}

func (m *Model) rangeKeys(r *pb.RangeRequest, now int64) *pb.RangeResponse {
	kvs := m.find(r.Key, r.RangeEnd, r.Revision)
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: now}, Count: int64(len(kvs))}
	if r.CountOnly {
		return resp
	}
	kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		return r.MaxModRevision != 0 && kv.ModRevision > r.MaxModRevision ||
			r.MinModRevision != 0 && kv.ModRevision < r.MinModRevision ||
			r.MaxCreateRevision != 0 && kv.CreateRevision > r.MaxCreateRevision ||
			r.MinCreateRevision != 0 && kv.CreateRevision < r.MinCreateRevision
	})
	switch {
	case r.SortTarget != pb.RangeRequest_KEY:
		panic("etcdmodel: only the order of keys is modelled")
	case r.SortOrder == pb.RangeRequest_DESCEND:
		slices.Reverse(kvs)
	}
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs, resp.More = kvs[:r.Limit], true
	}
	for _, kv := range kvs {
		c := clone(kv)
		if r.KeysOnly {
			c.Value, c.Lease = nil, 0 // etcd answers from its index, which has no leases
		}
		resp.Kvs = append(resp.Kvs, c)
	}
	return resp
}

func (m *Model) holds(c *pb.Compare) bool {
	kvs := m.find(c.Key, c.RangeEnd, 0)
	if len(kvs) == 0 {
		// A value that is not there equals nothing, not even the empty one; every number of a missing key is 0.
		return c.Target != pb.Compare_VALUE && compareHolds(c, &mvccpb.KeyValue{})
	}
	return !slices.ContainsFunc(kvs, func(kv *mvccpb.KeyValue) bool { return !compareHolds(c, kv) })
}

func compareHolds(c *pb.Compare, kv *mvccpb.KeyValue) bool {
	var r int
	switch c.Target {
	case pb.Compare_VALUE:
		r = bytes.Compare(kv.Value, c.GetValue())
	case pb.Compare_VERSION:
		r = cmp.Compare(kv.Version, c.GetVersion())
	case pb.Compare_CREATE:
		r = cmp.Compare(kv.CreateRevision, c.GetCreateRevision())
	case pb.Compare_MOD:
		r = cmp.Compare(kv.ModRevision, c.GetModRevision())
	case pb.Compare_LEASE:
		r = cmp.Compare(kv.Lease, c.GetLease())
	}
	switch c.Result {
	case pb.Compare_EQUAL:
		return r == 0
	case pb.Compare_NOT_EQUAL:
		return r != 0
	case pb.Compare_GREATER:
		return r > 0
	case pb.Compare_LESS:
		return r < 0
	}
	return false
}

func clone(kv *mvccpb.KeyValue) *mvccpb.KeyValue {
	if kv == nil {
		return nil
	}
	return &mvccpb.KeyValue{
		Key: bytes.Clone(kv.Key), Value: bytes.Clone(kv.Value), Lease: kv.Lease,
		CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version,
	}
}

// Since returns what a watch of all keys from a revision on would have been told by now, in order. It returns etcd's error for a
// revision that was compacted; one that is still to come has no events.
func (m *Model) Since(rev int64) ([]Event, error) {
	if rev < m.compacted {
		return nil, rpctypes.ErrGRPCCompacted
	}
	from, _ := slices.BinarySearchFunc(m.events, rev, func(e Event, rev int64) int { return cmp.Compare(e.KV.ModRevision, rev) })
	out := make([]Event, 0, len(m.events)-from)
	for _, e := range m.events[from:] {
		out = append(out, Event{Delete: e.Delete, KV: clone(e.KV)})
	}
	return out, nil
}
