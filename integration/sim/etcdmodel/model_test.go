package etcdmodel_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

var runs = flag.Int("etcdmodel.runs", 30, "how many random runs are compared with etcd")

var (
	etcd   *embedetcd.Server
	series atomic.Int64 // tells keys of one run from those of another, also if tests are repeated
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "etcdmodel-")
		if err != nil {
			panic(err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		if etcd, err = embedetcd.Start(context.Background(), embedetcd.Config{Dir: dir, UnsafeNoFsync: true}); err != nil {
			panic(err)
		}
		defer etcd.Close()
		return m.Run()
	}())
}

// run is one series of random requests to the model and to etcd. They start at different revisions: all that come back
// are told relative to the start.
type run struct {
	t      *testing.T
	rng    *rand.Rand
	prefix string
	model  *etcdmodel.Model
	real   pb.KVClient
	base   int64 // etcd's revision minus the model's
	leases []int64
	log    []string
}

const idleTTL = 3600

var epoch = time.Unix(1_700_000_000, 0)

func (r *run) key() []byte {
	return fmt.Appendf([]byte(r.prefix), "%c%c", 'a'+r.rng.IntN(3), 'a'+r.rng.IntN(3))
}

// span returns a key and the end of a range that stays within the run's keys.
func (r *run) span() (key, end []byte) {
	switch r.rng.IntN(4) {
	case 0:
		return r.key(), nil
	case 1:
		a, b := r.key(), r.key()
		return a, b // may be empty, or the wrong way round
	case 2:
		k := r.key()
		k = k[:len(k)-1]
		return k, []byte(clientv3.GetPrefixRangeEnd(string(k)))
	}
	return []byte(r.prefix), []byte(clientv3.GetPrefixRangeEnd(r.prefix))
}

func (r *run) value() []byte { return []byte{byte('0' + r.rng.IntN(4))} }

func (r *run) lease() int64 {
	switch n := r.rng.IntN(6); {
	case n == 0:
		return 987_654 // there is no such lease
	case n < 3 && len(r.leases) > 0:
		return r.leases[r.rng.IntN(len(r.leases))]
	}
	return 0
}

// revision is one of the model's, mostly a true one.
func (r *run) revision() int64 { return max(1, r.model.Revision()+2-int64(r.rng.IntN(20))) }

func (r *run) rangeRequest() *pb.RangeRequest {
	q := &pb.RangeRequest{}
	q.Key, q.RangeEnd = r.span()
	if r.rng.IntN(4) == 0 {
		q.Revision = r.revision()
	}
	if r.rng.IntN(2) == 0 {
		q.Limit = int64(r.rng.IntN(4))
	}
	if r.rng.IntN(3) == 0 {
		q.SortOrder = pb.RangeRequest_SortOrder(r.rng.IntN(3))
	}
	q.KeysOnly, q.CountOnly = r.rng.IntN(6) == 0, r.rng.IntN(10) == 0
	if r.rng.IntN(8) == 0 {
		q.MinModRevision = r.revision()
	}
	if r.rng.IntN(8) == 0 {
		q.MaxCreateRevision = r.revision()
	}
	return q
}

func (r *run) putRequest() *pb.PutRequest {
	q := &pb.PutRequest{Key: r.key(), PrevKv: r.rng.IntN(3) == 0}
	switch r.rng.IntN(8) {
	case 0:
		q.IgnoreValue, q.Lease = true, r.lease()
	case 1:
		q.IgnoreLease, q.Value = true, r.value()
	default:
		q.Value, q.Lease = r.value(), r.lease()
	}
	return q
}

func (r *run) deleteRequest() *pb.DeleteRangeRequest {
	q := &pb.DeleteRangeRequest{PrevKv: r.rng.IntN(3) == 0}
	q.Key, q.RangeEnd = r.span()
	return q
}

func (r *run) compare() *pb.Compare {
	c := &pb.Compare{Result: pb.Compare_CompareResult(r.rng.IntN(4))}
	if r.rng.IntN(4) == 0 {
		c.Key, c.RangeEnd = r.span()
	} else {
		c.Key = r.key()
	}
	rev := int64(0)
	if r.rng.IntN(2) == 0 {
		rev = r.revision()
		if resp, err := r.model.Range(r.t.Context(), &pb.RangeRequest{Key: c.Key}); err == nil && len(resp.Kvs) > 0 && r.rng.IntN(2) == 0 {
			rev = resp.Kvs[0].ModRevision
		}
	}
	switch c.Target = pb.Compare_CompareTarget(r.rng.IntN(5)); c.Target {
	case pb.Compare_VERSION:
		c.TargetUnion = &pb.Compare_Version{Version: int64(r.rng.IntN(4))}
	case pb.Compare_CREATE:
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: rev}
	case pb.Compare_MOD:
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: rev}
	case pb.Compare_VALUE:
		c.TargetUnion = &pb.Compare_Value{Value: r.value()}
	case pb.Compare_LEASE:
		c.TargetUnion = &pb.Compare_Lease{Lease: r.lease()}
	}
	return c
}

func (r *run) ops() []*pb.RequestOp {
	var ops []*pb.RequestOp
	for range r.rng.IntN(4) {
		op := &pb.RequestOp{}
		switch r.rng.IntN(4) {
		case 0:
			op.Request = &pb.RequestOp_RequestRange{RequestRange: r.rangeRequest()}
		case 1:
			op.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r.deleteRequest()}
		default:
			op.Request = &pb.RequestOp_RequestPut{RequestPut: r.putRequest()}
		}
		ops = append(ops, op)
	}
	return ops
}

func (r *run) txn() *pb.TxnRequest {
	q := &pb.TxnRequest{Success: r.ops(), Failure: r.ops()}
	for range r.rng.IntN(3) {
		q.Compare = append(q.Compare, r.compare())
	}
	return q
}

// shift adds by to every revision in m that is one; 0 and the numbers that no revision is stay.
func shift(m proto.Message, by int64) {
	add := func(n *int64) {
		if *n != 0 {
			*n += by
		}
	}
	header := func(h *pb.ResponseHeader) {
		if h != nil {
			h.ClusterId, h.MemberId, h.RaftTerm = 0, 0, 0
			h.Revision += by
		}
	}
	switch m := m.(type) {
	case *pb.RangeRequest:
		add(&m.Revision)
		add(&m.MinModRevision)
		add(&m.MaxCreateRevision)
	case *pb.TxnRequest:
		for _, c := range m.Compare {
			switch u := c.TargetUnion.(type) {
			case *pb.Compare_CreateRevision:
				add(&u.CreateRevision)
			case *pb.Compare_ModRevision:
				add(&u.ModRevision)
			}
		}
		for _, ops := range [][]*pb.RequestOp{m.Success, m.Failure} {
			for _, op := range ops {
				if q := op.GetRequestRange(); q != nil {
					shift(q, by)
				}
			}
		}
	case *pb.CompactionRequest:
		add(&m.Revision)
	case *pb.RangeResponse:
		header(m.Header)
		for _, kv := range m.Kvs {
			add(&kv.CreateRevision)
			add(&kv.ModRevision)
		}
	case *pb.PutResponse:
		header(m.Header)
		if m.PrevKv != nil {
			add(&m.PrevKv.CreateRevision)
			add(&m.PrevKv.ModRevision)
		}
	case *pb.DeleteRangeResponse:
		header(m.Header)
		for _, kv := range m.PrevKvs {
			add(&kv.CreateRevision)
			add(&kv.ModRevision)
		}
	case *pb.CompactionResponse:
		header(m.Header)
	case *pb.TxnResponse:
		header(m.Header)
		for _, op := range m.Responses {
			switch op := op.Response.(type) {
			case *pb.ResponseOp_ResponseRange:
				shift(op.ResponseRange, by)
			case *pb.ResponseOp_ResponsePut:
				shift(op.ResponsePut, by)
			case *pb.ResponseOp_ResponseDeleteRange:
				shift(op.ResponseDeleteRange, by)
			}
		}
	}
}

// ask gives one request to both, and compares.
func ask[Q, A proto.Message](r *run, q Q, do func(kv pb.KVClient, q Q) (A, error)) {
	r.t.Helper()
	r.log = append(r.log, fmt.Sprintf("%T %s", q, prototext.MarshalOptions{}.Format(q)))
	mine, mineErr := do(r.model, q)
	theirQ, _ := proto.Clone(q).(Q)
	shift(theirQ, r.base)
	theirs, theirErr := do(r.real, theirQ)
	if text(mineErr) != text(theirErr) {
		r.fail("the model answers error %v, etcd %v", mineErr, theirErr)
	}
	if mineErr != nil {
		return
	}
	shift(theirs, -r.base)
	if !proto.Equal(mine, theirs) {
		r.fail("the model answers\n%s\netcd\n%s", prototext.Format(mine), prototext.Format(theirs))
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return rpctypes.Error(err).Error()
}

func (r *run) fail(format string, args ...any) {
	r.t.Helper()
	for i, l := range r.log {
		r.t.Logf("%3d %s", i, l)
	}
	r.t.Fatalf(format, args...)
}

func (r *run) grant() {
	if len(r.leases) >= 4 {
		return
	}
	resp, err := etcd.Client().Grant(r.t.Context(), idleTTL)
	if err != nil {
		r.t.Fatal(err)
	}
	id := int64(resp.ID)
	if _, err := r.model.Grant(epoch, id, idleTTL); err != nil {
		r.fail("grant: %v", err)
	}
	if _, err := r.model.Grant(epoch, id, idleTTL); !errors.Is(err, rpctypes.ErrGRPCLeaseExist) {
		r.fail("a second grant of one id: %v", err)
	}
	r.leases = append(r.leases, id)
	r.log = append(r.log, fmt.Sprint("grant ", id))
}

func (r *run) renew() {
	if len(r.leases) == 0 {
		return
	}
	id := r.leases[r.rng.IntN(len(r.leases))]
	resp, err := etcd.Client().KeepAliveOnce(r.t.Context(), clientv3.LeaseID(id))
	if err != nil {
		r.t.Fatal(err)
	}
	if mine, err := r.model.KeepAlive(epoch, id); err != nil || mine != resp.TTL {
		r.fail("keep alive: the model says %d, %v, etcd %d", mine, err, resp.TTL)
	}
}

func (r *run) endLease() {
	if len(r.leases) == 0 {
		return
	}
	i := r.rng.IntN(len(r.leases))
	id := r.leases[i]
	r.leases = slices.Delete(r.leases, i, i+1)
	r.log = append(r.log, fmt.Sprint("revoke ", id))
	ttl, err := etcd.Client().TimeToLive(r.t.Context(), clientv3.LeaseID(id), clientv3.WithAttachedKeys())
	if err != nil {
		r.t.Fatal(err)
	}
	var theirs []string
	for _, k := range ttl.Keys {
		theirs = append(theirs, string(k))
	}
	slices.Sort(theirs)
	if mine, ok := r.model.Keys(id); !ok || !slices.Equal(mine, theirs) {
		r.fail("the model has keys %q under lease %d, etcd %q", mine, id, theirs)
	}
	_, theirErr := etcd.Client().Revoke(r.t.Context(), clientv3.LeaseID(id))
	if theirErr != nil {
		r.t.Fatal(theirErr)
	}
	if r.rng.IntN(2) == 0 {
		if err := r.model.Revoke(id); err != nil {
			r.fail("revoke: %v", err)
		}
	} else { // it runs out, the others do not
		for _, other := range r.leases {
			if _, err := r.model.KeepAlive(epoch.Add(time.Second), other); err != nil {
				r.fail("keep alive: %v", err)
			}
		}
		if gone := r.model.Advance(epoch.Add(idleTTL * time.Second)); !slices.Equal(gone, []int64{id}) {
			r.fail("leases %v ran out, want %d", gone, id)
		}
		for _, other := range r.leases {
			if _, err := r.model.KeepAlive(epoch, other); err != nil {
				r.fail("keep alive: %v", err)
			}
		}
	}
	if _, err := r.model.KeepAlive(epoch, id); !errors.Is(err, rpctypes.ErrGRPCLeaseNotFound) {
		r.fail("keep alive of a lease that is gone: %v", err)
	}
	if _, err := etcd.Client().KeepAliveOnce(r.t.Context(), clientv3.LeaseID(id)); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		r.fail("etcd, keep alive of a lease that is gone: %v", err)
	}
}

// watch compares what a watch from a past revision on delivers.
func (r *run) watch(from int64) {
	mine, err := r.model.Since(from)
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	w := etcd.Client().Watch(ctx, r.prefix, clientv3.WithPrefix(), clientv3.WithRev(from+r.base), clientv3.WithPrevKV())
	if err != nil {
		resp := <-w
		if !errors.Is(err, rpctypes.ErrGRPCCompacted) || resp.Err() == nil || resp.CompactRevision != r.model.Compacted()+r.base {
			r.fail("watch from %d, compacted is %d: the model says %v, etcd %v at %d", from, r.model.Compacted(), err, resp.Err(), resp.CompactRevision-r.base)
		}
		return
	}
	for i := 0; i < len(mine); {
		resp, ok := <-w
		if !ok || resp.Err() != nil {
			r.fail("watch from %d: %v %v after %d of %d events", from, ok, resp.Err(), i, len(mine))
		}
		for _, e := range resp.Events {
			if i == len(mine) {
				r.fail("etcd's watch from %d has an event more: %v", from, e)
			}
			m := mine[i]
			theirs := proto.CloneOf(e.Kv)
			theirs.ModRevision -= r.base
			if theirs.CreateRevision != 0 {
				theirs.CreateRevision -= r.base
			}
			if m.Delete != (e.Type == clientv3.EventTypeDelete) || !proto.Equal(m.KV, theirs) {
				r.fail("event %d from %d: the model has %v %v, etcd %v", i, from, m.Delete, m.KV, theirs)
			}
			i++
		}
	}
}

// TestAnswersAsEtcdDoes gives the same random requests to the model and to an etcd server.
func TestAnswersAsEtcdDoes(t *testing.T) {
	for seed := range *runs {
		t.Run(strconv.Itoa(seed), func(t *testing.T) {
			r := &run{
				t: t, rng: rand.New(rand.NewPCG(uint64(seed), 2)), prefix: fmt.Sprintf("m%04d-%d/", seed, series.Add(1)),
				model: etcdmodel.New(), real: clientv3.RetryKVClient(etcd.Client()),
			}
			now, err := etcd.Client().Get(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			r.base = now.Header.Revision - r.model.Revision()
			compacted := r.model.Revision() // as another run may have left it
			for range 150 {
				switch n := r.rng.IntN(40); {
				case n < 8:
					ask(r, r.rangeRequest(), func(kv pb.KVClient, q *pb.RangeRequest) (*pb.RangeResponse, error) { return kv.Range(t.Context(), q) })
				case n < 14:
					ask(r, r.putRequest(), func(kv pb.KVClient, q *pb.PutRequest) (*pb.PutResponse, error) { return kv.Put(t.Context(), q) })
				case n < 17:
					ask(r, r.deleteRequest(), func(kv pb.KVClient, q *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
						return kv.DeleteRange(t.Context(), q)
					})
				case n < 36:
					ask(r, r.txn(), func(kv pb.KVClient, q *pb.TxnRequest) (*pb.TxnResponse, error) { return kv.Txn(t.Context(), q) })
				case n == 36:
					rev := r.model.Revision() - int64(r.rng.IntN(10))
					if rev <= compacted {
						continue
					}
					compacted = rev
					ask(r, &pb.CompactionRequest{Revision: rev, Physical: true}, func(kv pb.KVClient, q *pb.CompactionRequest) (*pb.CompactionResponse, error) {
						return kv.Compact(t.Context(), q)
					})
				case n == 37:
					r.endLease()
				case n == 38:
					r.renew()
				default:
					r.grant()
				}
			}
			r.watch(1 + r.rng.Int64N(r.model.Revision()))
			if c := r.model.Compacted(); c > 1 {
				r.watch(c - 1)
				r.watch(c)
			}
			for len(r.leases) > 0 {
				r.endLease()
			}
			ask(r, &pb.RangeRequest{Key: []byte(r.prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(r.prefix))},
				func(kv pb.KVClient, q *pb.RangeRequest) (*pb.RangeResponse, error) { return kv.Range(t.Context(), q) })
		})
	}
}
