package etcdmodel

import (
	"context"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var _ pb.KVClient = (*Model)(nil)

// Range implements pb.KVClient.
func (m *Model) Range(_ context.Context, r *pb.RangeRequest, _ ...grpc.CallOption) (*pb.RangeResponse, error) {
	if len(r.Key) == 0 {
		return nil, rpctypes.ErrGRPCEmptyKey
	}
	if err := m.checkRevision(r.Revision); err != nil {
		return nil, err
	}
	return m.rangeKeys(r, m.rev), nil
}

// Put implements pb.KVClient.
func (m *Model) Put(_ context.Context, r *pb.PutRequest, _ ...grpc.CallOption) (*pb.PutResponse, error) {
	if err := checkPut(r); err != nil {
		return nil, err
	}
	if err := m.checkLease(r); err != nil {
		return nil, err
	}
	w := m.begin()
	defer w.end()
	return w.put(r)
}

// DeleteRange implements pb.KVClient.
func (m *Model) DeleteRange(_ context.Context, r *pb.DeleteRangeRequest, _ ...grpc.CallOption) (*pb.DeleteRangeResponse, error) {
	if len(r.Key) == 0 {
		return nil, rpctypes.ErrGRPCEmptyKey
	}
	w := m.begin()
	defer w.end()
	return w.deleteRange(r), nil
}

// Txn implements pb.KVClient.
func (m *Model) Txn(_ context.Context, r *pb.TxnRequest, _ ...grpc.CallOption) (*pb.TxnResponse, error) {
	if err := checkTxn(r); err != nil {
		return nil, err
	}
	succeeded := !slices.ContainsFunc(r.Compare, func(c *pb.Compare) bool { return !m.holds(c) })
	ops := r.Success
	if !succeeded {
		ops = r.Failure
	}
	for _, op := range ops {
		var err error
		if get := op.GetRequestRange(); get != nil {
			err = m.checkRevision(get.Revision)
		} else if put := op.GetRequestPut(); put != nil {
			err = m.checkLease(put)
			if err == nil && (put.IgnoreValue || put.IgnoreLease) && m.latest(string(put.Key)) == nil {
				err = rpctypes.ErrGRPCKeyNotFound
			}
		}
		if err != nil {
			return nil, err
		}
	}
	w := m.begin()
	resp := &pb.TxnResponse{Succeeded: succeeded}
	for _, op := range ops {
		switch op := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			got := m.rangeKeys(op.RequestRange, w.revision())
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: got}})
		case *pb.RequestOp_RequestPut:
			got, err := w.put(op.RequestPut)
			if err != nil {
				panic("etcdmodel: a put failed that was checked")
			}
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: got}})
		case *pb.RequestOp_RequestDeleteRange:
			got := w.deleteRange(op.RequestDeleteRange)
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: got}})
		}
	}
	w.end()
	resp.Header = &pb.ResponseHeader{Revision: m.rev}
	return resp, nil
}

// Compact implements pb.KVClient.
func (m *Model) Compact(_ context.Context, r *pb.CompactionRequest, _ ...grpc.CallOption) (*pb.CompactionResponse, error) {
	switch {
	case r.Revision <= m.compacted:
		return nil, rpctypes.ErrGRPCCompacted
	case r.Revision > m.rev:
		return nil, rpctypes.ErrGRPCFutureRev
	}
	m.compacted = r.Revision
	from, _ := slices.BinarySearchFunc(m.events, m.compacted, func(e Event, rev int64) int { return int(e.KV.ModRevision - rev) })
	m.events = slices.Clone(m.events[from:])
	m.keys = slices.DeleteFunc(m.keys, func(key string) bool {
		h := m.history[key]
		// What was in force at the revision stays readable there.
		keep := 0
		for keep+1 < len(h) && h[keep+1].rev <= m.compacted {
			keep++
		}
		if h = h[keep:]; len(h) == 1 && h[0].kv == nil && h[0].rev <= m.compacted {
			delete(m.history, key)
			return true
		}
		m.history[key] = slices.Clone(h)
		return false
	})
	return &pb.CompactionResponse{Header: &pb.ResponseHeader{Revision: m.rev}}, nil
}

// RangeStream implements pb.KVClient. Nobody asks for it.
func (m *Model) RangeStream(context.Context, *pb.RangeRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[pb.RangeStreamResponse], error) {
	return nil, status.Error(codes.Unimplemented, "etcdmodel: no streams")
}

func checkPut(r *pb.PutRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.IgnoreValue && len(r.Value) > 0:
		return rpctypes.ErrGRPCValueProvided
	case r.IgnoreLease && r.Lease != 0:
		return rpctypes.ErrGRPCLeaseProvided
	}
	return nil
}

func (m *Model) checkLease(r *pb.PutRequest) error {
	if r.Lease != 0 && m.leases[r.Lease] == nil {
		return rpctypes.ErrGRPCLeaseNotFound
	}
	return nil
}

func checkTxn(r *pb.TxnRequest) error {
	if max(len(r.Compare), len(r.Success), len(r.Failure)) > MaxTxnOps {
		return rpctypes.ErrGRPCTooManyOps
	}
	for _, c := range r.Compare {
		if len(c.Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	}
	for _, ops := range [][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range ops {
			if err := checkOp(op); err != nil {
				return err
			}
		}
	}
	for _, ops := range [][]*pb.RequestOp{r.Success, r.Failure} {
		if err := checkOverlaps(ops); err != nil {
			return err
		}
	}
	return nil
}

func checkOp(op *pb.RequestOp) error {
	switch op := op.Request.(type) {
	case *pb.RequestOp_RequestRange:
		if len(op.RequestRange.Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	case *pb.RequestOp_RequestPut:
		return checkPut(op.RequestPut)
	case *pb.RequestOp_RequestDeleteRange:
		if len(op.RequestDeleteRange.Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	case *pb.RequestOp_RequestTxn:
		panic("etcdmodel: nested transactions are not modelled")
	}
	return nil
}

// checkOverlaps refuses two puts of one key, and a put of a key that is deleted as well.
func checkOverlaps(ops []*pb.RequestOp) error {
	for i, op := range ops {
		put := op.GetRequestPut()
		if put == nil {
			continue
		}
		for j, other := range ops {
			if p := other.GetRequestPut(); p != nil && j != i && string(p.Key) == string(put.Key) {
				return rpctypes.ErrGRPCDuplicateKey
			}
			if d := other.GetRequestDeleteRange(); d != nil && string(put.Key) >= string(d.Key) && inRange(string(put.Key), d.Key, d.RangeEnd) {
				return rpctypes.ErrGRPCDuplicateKey
			}
		}
	}
	return nil
}
