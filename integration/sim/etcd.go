package sim

import (
	"context"
	"net"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// etcd is the model with what can befall requests to it.
type etcd struct {
	w     *world
	model *etcdmodel.Model
	away  bool // no leader
}

// requestTimeout is when a client has given an attempt up.
const requestTimeout = 5 * time.Second

// etcdClient is one process's connection to etcd: it carries pkg/meta's requests.
type etcdClient struct {
	pb.KVClient // nothing but transactions is asked for
	e           *etcd
	p           *process
	cut         bool
	// who is told with each applied change.
	actor *broker
}

// Txn implements pb.KVClient, for a task.
func (c *etcdClient) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	k, p := c.e.w.kernel, c.p
	var resp *pb.TxnResponse
	var err error
	life, done := p.life, make(chan struct{})
	// answer brings an answer, which p may not live to hear.
	answer := func(after time.Duration, r *pb.TxnResponse, e error) {
		k.after(after, func() {
			p.deliver(life, func() {
				resp, err = r, e
				close(done)
			})
		})
	}
	switch {
	case c.cut && k.chance(2): // the connection is known to be gone
		answer(k.between(0, 50*time.Millisecond), nil, errUnreachable)
	case c.lost():
		sent(opts)
		// It may get there yet, long after its sender has given up.
		if k.chance(4) && !c.e.w.healed {
			k.after(k.between(0, 2*requestTimeout), func() { _, _ = c.e.apply(c, in) })
		}
	default:
		sent(opts)
		k.after(c.e.delay(), func() {
			if c.e.away {
				if k.chance(2) {
					answer(c.e.delay(), nil, errNoLeader)
				}
				return
			}
			got, failure := c.e.apply(c, in)
			switch {
			case !c.lost():
				answer(c.e.delay(), got, failure)
			case k.chance(2): // the connection breaks
				answer(c.e.delay(), nil, errReset)
			}
		})
	}
	ctx, cancel := p.sched.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, ended := p.sched.Wait(ctx, sched.Channels{done}); ended != nil {
		return nil, status.FromContextError(ended).Err() //nolint:wrapcheck // as gRPC has it
	}
	return resp, err
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
	w := c.e.w
	return c.cut || !w.healed && w.opt.Loss > 0 && w.chance(w.opt.Loss)
}

func (e *etcd) delay() time.Duration {
	k := e.w.kernel
	switch {
	case e.w.healed:
		return k.between(100*time.Microsecond, 2*time.Millisecond)
	case k.chance(20):
		return k.between(0, 400*time.Millisecond)
	}
	return k.between(200*time.Microsecond, 10*time.Millisecond)
}

// apply carries a transaction out, and has what changed checked.
func (e *etcd) apply(c *etcdClient, in *pb.TxnRequest) (*pb.TxnResponse, error) {
	before := e.model.Revision()
	resp, err := e.model.Txn(context.Background(), in)
	if e.model.Revision() != before {
		e.w.changed(c.actor, before+1)
	}
	return resp, err
}

// direct is a connection that takes no time, for the checks.
type direct struct {
	pb.KVClient
	model *etcdmodel.Model
}

// Txn implements pb.KVClient.
func (d direct) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	return d.model.Txn(ctx, in, opts...)
}
