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

// A store over any connection waits by the sleep that it was given, longer each time.
func TestNewOver(t *testing.T) {
	t.Parallel()
	var slept []time.Duration
	ctx, cancel := context.WithCancel(t.Context())
	kv := &unreachable{KVClient: clientv3.RetryKVClient(etcd.Client()), left: 3}
	s := meta.NewOver(kv, func(_ context.Context, d time.Duration) {
		slept = append(slept, d)
		if len(slept) == 5 {
			cancel()
		}
	}, uniqueCluster(), nil)
	if _, err := s.EnsureCluster(ctx); err != nil {
		t.Fatal(err)
	}
	if len(slept) != 3 || slept[1] != 2*slept[0] || slept[2] != 2*slept[1] {
		t.Fatalf("slept %v", slept)
	}
	kv.left = 2
	if err := s.CreateTenant(ctx, "acme"); !errors.Is(err, meta.ErrUnavailable) {
		t.Fatalf("an attempt that was never sent: %v", err)
	}
}
