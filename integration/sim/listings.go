package sim

import (
	"context"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// lie is what befalls a collector's reads of etcd for a while.
type lie uint8

const (
	truthful     lie = iota
	refused          // some fail: listings at once or in their midst, records
	emptyLists       // listings are empty
	partLists        // listings leave out much of what there is, and say that this is all
	noRecords        // records are not there, though the cluster's is
	nothingThere     // nothing is there
	liesEnd
)

// collectorReads is a bookie's connection to etcd, as its collector uses it.
type collectorReads struct {
	*etcdClient
	b *bookieProcess
}

var refusals = []error{
	rpctypes.ErrGRPCCompacted, rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCNoSpace, rpctypes.ErrGRPCRequestTooLarge,
	status.Error(codes.ResourceExhausted, "received message larger than max"), status.Error(codes.DataLoss, "corrupt"),
}

// Txn implements pb.KVClient. Lists come in pages, shorter ones than the caller asked for.
func (c *collectorReads) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	read := len(in.Compare) == 0 && !slices.ContainsFunc(in.Success, func(op *pb.RequestOp) bool { return op.GetRequestRange() == nil })
	if !read {
		return c.etcdClient.Txn(ctx, in, opts...)
	}
	short := &pb.TxnRequest{}
	for _, op := range in.Success {
		r := op.GetRequestRange()
		limit := r.Limit
		if limit > 0 {
			limit = min(limit, 1+c.e.rng.Int64N(40))
		}
		short.Success = append(short.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{
			Key: r.Key, RangeEnd: r.RangeEnd, Limit: limit, Revision: r.Revision, Serializable: r.Serializable, CountOnly: r.CountOnly, KeysOnly: r.KeysOnly,
		}}})
	}
	if c.b.lie == refused && c.e.chance(3) {
		sent(opts)
		return nil, pick(c.e.kernel, refusals)
	}
	resp, err := c.etcdClient.Txn(ctx, short, opts...)
	if err != nil {
		return nil, err
	}
	for i, op := range in.Success {
		c.bend(op.GetRequestRange(), resp.Responses[i].GetResponseRange())
	}
	return resp, nil
}

// bend makes an answer what the lie has it be.
func (c *collectorReads) bend(r *pb.RangeRequest, got *pb.RangeResponse) {
	list := len(r.RangeEnd) > 0
	switch lie := c.b.lie; {
	case lie == emptyLists && list, lie == noRecords && !list && string(r.Key) != keyPrefix+"cluster", lie == nothingThere:
		got.Kvs, got.More, got.Count = nil, false, 0
	case lie == partLists && list:
		got.Kvs = slices.DeleteFunc(got.Kvs, func(*mvccpb.KeyValue) bool { return !c.e.chance(3) })
		got.More = false
	}
}
