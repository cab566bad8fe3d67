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
)

// etcd is the model with what can befall requests to it.
type etcd struct {
	w     *world
	model *etcdmodel.Model
	away  bool // no leader
}

// requestTimeout is when a client gives an attempt up.
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
	t, k := taskOf(ctx), c.e.w.kernel
	var resp *pb.TxnResponse
	var err error
	t.await(func(wake func()) {
		answered := false
		answer := func(r *pb.TxnResponse, e error) {
			if !answered {
				answered = true
				resp, err = r, e
				wake()
			}
		}
		if c.cut && k.chance(2) { // the connection is known to be gone
			k.after(k.between(0, 50*time.Millisecond), func() { answer(nil, errUnreachable) })
			return
		}
		for _, o := range opts {
			if o, ok := o.(grpc.PeerCallOption); ok {
				*o.PeerAddr = peer.Peer{Addr: &net.TCPAddr{}}
			}
		}
		k.after(requestTimeout, func() { answer(nil, errTimeout) })
		if c.lost() {
			// It may get there yet, long after its sender has given up.
			if !k.chance(4) || c.e.w.healed {
				return
			}
			k.after(k.between(0, 2*requestTimeout), func() { _, _ = c.e.apply(c, in) })
			return
		}
		k.after(c.e.delay(), func() {
			if c.e.away {
				if k.chance(2) {
					k.after(c.e.delay(), func() { answer(nil, errNoLeader) })
				}
				return
			}
			got, failure := c.e.apply(c, in)
			if c.lost() {
				if k.chance(2) { // the connection breaks
					k.after(c.e.delay(), func() { answer(nil, errReset) })
				}
				return
			}
			k.after(c.e.delay(), func() { answer(got, failure) })
		})
	})
	return resp, err
}

var (
	errUnreachable = status.Error(codes.Unavailable, "connection refused")
	errTimeout     = status.Error(codes.DeadlineExceeded, "context deadline exceeded")
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
