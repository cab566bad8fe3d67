package meta

import (
	"context"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
)

// sendKey carries a *atomic.Bool through a context: set when the request may have reached a server.
type sendKey struct{}

func withSendTracking(ctx context.Context) (context.Context, *atomic.Bool) {
	sent := new(atomic.Bool)
	return context.WithValue(ctx, sendKey{}, sent), sent
}

// sendTracker notes whether a transaction got as far as a connection. A call that never had one was certainly
// not applied, which its error alone does not tell.
type sendTracker struct{ pb.KVClient }

// Txn implements pb.KVClient.
func (t sendTracker) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	var p peer.Peer
	resp, err := t.KVClient.Txn(ctx, in, append(opts, grpc.Peer(&p))...)
	if sent, ok := ctx.Value(sendKey{}).(*atomic.Bool); ok && p.Addr != nil {
		sent.Store(true)
	}
	return resp, err //nolint:wrapcheck // passed through
}
