package sim

import (
	"context"
	"net"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// etcd is the model with what can befall requests to it.
type etcd struct {
	*kernel
	model  *etcdmodel.Model
	away   bool  // no leader
	healed bool  // nothing is lost, and requests are quick
	keep   int64 // revisions that are not compacted
	loss   int   // one request, or reply, in so many is lost; 0: none
	late   []lateRequest
	// changed is told of what a client's transactions, or nobody's, have changed, from a revision on.
	changed func(actor *broker, from int64)
	streams []*stream
}

// lateRequest is one that is held up on its way.
type lateRequest struct {
	since time.Duration
	apply func()
}

// requestTimeout is when a client has given an attempt up.
const requestTimeout = 5 * time.Second

// etcdClient is one process's connection to etcd: it carries pkg/meta's requests, a session's and a cache's.
type etcdClient struct {
	pb.KVClient // nothing but transactions is asked for
	e           *etcd
	p           *process
	cut         bool
	// who is told with each applied change.
	actor *broker
}

var _ lease.Etcd = (*etcdClient)(nil)

// call carries a request to etcd and its answer back, unless something befalls them. apply runs at etcd, once at most, maybe
// long after the caller has given up.
func (c *etcdClient) call(ctx context.Context, sent func(), apply func() error) error {
	e, p, s := c.e, c.p, c.p.sched
	var answered error
	life, done := p.life, make(chan struct{}, ownCapacity)
	// answer brings an answer, which p may not live to hear.
	answer := func(after time.Duration, err error) {
		e.after(after, func() {
			p.deliver(life, func() {
				answered = err
				p.idle = !p.fire(done)
			})
		})
	}
	switch {
	case c.cut && e.chance(2): // the connection is known to be gone
		answer(e.between(0, 50*time.Millisecond), errUnreachable)
	case c.lost():
		sent()
		// It may get there yet, long after its sender has given up.
		switch late := func() { _ = e.apply(c, apply) }; {
		case e.healed:
		case e.chance(4):
			e.after(e.between(0, 2*requestTimeout), late)
		case e.chance(3):
			e.late = append(e.late, lateRequest{e.now, late})
		}
	default:
		sent()
		e.after(e.delay(), func() {
			if e.away {
				if e.chance(2) {
					answer(e.delay(), errNoLeader)
				}
				return
			}
			err := e.apply(c, apply)
			switch {
			case !c.lost():
				answer(e.delay(), err)
			case e.chance(2): // the connection breaks
				answer(e.delay(), errReset)
			}
		})
	}
	ctx, cancel := s.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, ended := s.Wait(ctx, sched.Channels{done}); ended != nil {
		return status.FromContextError(ended).Err() //nolint:wrapcheck // as gRPC has it
	}
	return answered
}

// Txn implements pb.KVClient, for a task.
func (c *etcdClient) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	var resp *pb.TxnResponse
	err := c.call(ctx, func() { sent(opts) }, func() (err error) {
		resp, err = c.e.model.Txn(ctx, in)
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// Grant implements lease.Etcd.
func (c *etcdClient) Grant(ctx context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error) {
	var id int64
	err := c.call(ctx, func() {}, func() (err error) {
		id, err = c.e.model.Grant(c.e.clock(), 0, ttl)
		return err
	})
	if err != nil {
		return nil, rpctypes.Error(err) //nolint:wrapcheck // as etcd's client says it
	}
	return &clientv3.LeaseGrantResponse{ID: clientv3.LeaseID(id), TTL: ttl}, nil
}

// KeepAliveOnce implements lease.Etcd.
func (c *etcdClient) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	var ttl int64
	err := c.call(ctx, func() {}, func() (err error) {
		ttl, err = c.e.model.KeepAlive(c.e.clock(), int64(id))
		return err
	})
	if err != nil {
		return nil, rpctypes.Error(err) //nolint:wrapcheck // as etcd's client says it
	}
	return &clientv3.LeaseKeepAliveResponse{ID: id, TTL: ttl}, nil
}

// Revoke implements lease.Etcd.
func (c *etcdClient) Revoke(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error) {
	err := c.call(ctx, func() {}, func() error { return c.e.model.Revoke(int64(id)) })
	if err != nil {
		return nil, rpctypes.Error(err) //nolint:wrapcheck // as etcd's client says it
	}
	return &clientv3.LeaseRevokeResponse{}, nil
}

// sent tells that a request may have reached a server.
func sent(opts []grpc.CallOption) {
	for _, o := range opts {
		if o, ok := o.(grpc.PeerCallOption); ok {
			*o.PeerAddr = peer.Peer{Addr: &net.TCPAddr{}}
		}
	}
}

var (
	errUnreachable = status.Error(codes.Unavailable, "connection refused")
	errNoLeader    = status.Error(codes.Unavailable, "etcdserver: no leader")
	errReset       = status.Error(codes.Unavailable, "connection reset")
)

func (c *etcdClient) lost() bool {
	return c.cut || !c.e.healed && c.e.loss > 0 && c.e.chance(c.e.loss)
}

func (e *etcd) delay() time.Duration {
	switch {
	case e.healed:
		return e.between(100*time.Microsecond, 2*time.Millisecond)
	case e.chance(20):
		return e.between(0, 400*time.Millisecond)
	}
	return e.between(200*time.Microsecond, 10*time.Millisecond)
}

// apply carries a request out, and has what changed checked and told.
func (e *etcd) apply(c *etcdClient, do func() error) error {
	before := e.model.Revision()
	err := do()
	if e.model.Revision() != before {
		e.changed(c.actor, before+1)
		e.pump()
	}
	return err
}

// letGo has what was held up get there, at a bad time; what is older than other late requests is lost.
func (e *etcd) letGo() {
	for _, r := range e.late {
		if e.now-r.since < 2*requestTimeout {
			e.after(e.between(0, 3*time.Millisecond), func() {
				if !e.healed {
					r.apply()
				}
			})
		}
	}
	e.late = nil
}

// goAway takes the leader away.
func (e *etcd) goAway() {
	e.away = true
	for _, s := range e.streams {
		e.after(e.between(500*time.Millisecond, 3*time.Second), func() {
			if e.away {
				s.end(rpctypes.ErrNoLeader)
			}
		})
	}
}

// back brings a leader back, a new one or that of before.
func (e *etcd) back() {
	if !e.away {
		return
	}
	e.away = false
	if e.chance(2) {
		e.model.ExtendAll(e.clock())
	}
	e.pump()
}

// restore puts an older copy in etcd's place: it answers as if nothing had happened since.
func (e *etcd) restore(old *etcdmodel.Model) {
	e.model = old
	e.model.ExtendAll(e.clock())
	for _, s := range e.streams {
		s.breaks()
	}
}

// tick is what etcd does by itself: it ends leases and compacts, and its watches' connections break.
func (e *etcd) tick() {
	e.after(250*time.Millisecond, e.tick)
	if e.away {
		return
	}
	before := e.model.Revision()
	e.model.Advance(e.clock())
	if now := e.model.Revision(); now != before {
		e.changed(nil, before+1)
		if now-e.model.Compacted() > 2*e.keep {
			_, _ = e.model.Compact(context.Background(), &pb.CompactionRequest{Revision: now - e.keep})
		}
	}
	e.pump()
	for _, s := range e.streams {
		switch {
		case s.next == e.model.Revision()+1 && e.chance(20):
			s.send(clientv3.WatchResponse{Header: &pb.ResponseHeader{Revision: e.model.Revision()}}, nil)
		case !e.healed && e.chance(400):
			s.breaks()
		}
	}
}

// direct is a connection that takes no time, for the checks and for operators.
type direct struct {
	pb.KVClient
	e *etcd
}

// operator is whoever uses direct: its chance is the run's.
type operator struct {
	sched.Scheduler
	k *kernel
}

// Uint64 implements sched.Scheduler.
func (o operator) Uint64() uint64 { return o.k.rng.Uint64() }

// Txn implements pb.KVClient.
func (d direct) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	return d.e.model.Txn(ctx, in, opts...)
}
