package meta_test

import (
	"context"
	"errors"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// unreachable fails the first requests without having sent them.
type unreachable struct {
	pb.KVClient
	left int
}

func (u *unreachable) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	if u.left > 0 {
		u.left--
		return nil, status.Error(codes.Unavailable, "no connection")
	}
	return u.KVClient.Txn(ctx, in, opts...)
}

// impatient is a scheduler whose timers pass at once; the fifth ends the test.
type impatient struct {
	sched.Scheduler
	slept  []time.Duration
	cancel func()
}

func (s *impatient) Uint64() uint64 { return 0 }

func (s *impatient) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	s.slept = append(s.slept, d)
	if len(s.slept) == 5 {
		s.cancel()
	}
	f()
	return func() bool { return false }
}

// A store over any connection waits by the scheduler that it was given, longer each time.
func TestNewOver(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	clock := &impatient{Scheduler: sched.Real, cancel: cancel}
	kv := &unreachable{KVClient: clientv3.RetryKVClient(etcd.Client()), left: 3}
	s := meta.NewOver(kv, clock, uniqueCluster(), nil)
	if _, err := s.EnsureCluster(ctx); err != nil {
		t.Fatal(err)
	}
	if slept := clock.slept; len(slept) != 3 || slept[1] != 2*slept[0] || slept[2] != 2*slept[1] {
		t.Fatalf("slept %v", slept)
	}
	kv.left = 2
	if err := s.CreateTenant(ctx, "acme"); !errors.Is(err, meta.ErrUnavailable) {
		t.Fatalf("an attempt that was never sent: %v", err)
	}
}
