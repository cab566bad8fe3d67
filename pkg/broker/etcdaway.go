package broker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// What needs metadata waits while etcd is away, and whoever waits is to learn why: a client whose own time ends knows
// nothing but that.
const (
	// answerMargin is how long before a caller's deadline its answer is made, so that it arrives.
	answerMargin = 200 * time.Millisecond
	// awayPatience is how long etcd may be away before a stream that is being opened, which has no deadline, is told. It is
	// longer than an election takes. The client tries again.
	awayPatience = time.Second
	awayLook     = 200 * time.Millisecond
)

var errEtcdAway = errors.New("etcd, which has the metadata, does not answer")

// answerInTime is a gRPC interceptor: it ends what is done for a caller a moment before the caller's deadline, and names
// etcd as the reason if that is away.
func (b *Broker) answerInTime(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		short, cancel := context.WithDeadline(ctx, deadline.Add(-min(answerMargin, left/4)))
		defer cancel()
		ctx = short
	}
	resp, err := handler(ctx, req)
	if err == nil || b.deps.Meta.Away() == 0 {
		return resp, err
	}
	s, ok := status.FromError(err)
	if !ok || strings.Contains(s.Message(), errEtcdAway.Error()) {
		return resp, err
	}
	p := s.Proto()
	for _, d := range s.Details() {
		if wire, ok := d.(*brokerv1.Error); ok && mayWaitForEtcd(wire.GetCode()) {
			wire.Message += ": " + errEtcdAway.Error()
			p.Message, p.Details = wire.GetMessage(), nil
			detailed, err := status.FromProto(p).WithDetails(wire)
			if err != nil {
				panic(fmt.Sprintf("broker: attach details to status: %v", err))
			}
			return resp, detailed.Err()
		}
	}
	return resp, err
}

func mayWaitForEtcd(c brokerv1.Code) bool {
	return c == brokerv1.Code_CODE_UNAVAILABLE || c == brokerv1.Code_CODE_OUTCOME_UNKNOWN
}

// whileEtcdAnswers returns a context that ends with ctx, or when etcd is away for too long. stop must be called.
func (b *Broker) whileEtcdAnswers(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var mu sync.Mutex
	var timer *time.Timer
	stopped := false
	look := func() {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case stopped:
		case b.deps.Meta.Away() >= awayPatience:
			cancel(errEtcdAway)
		default:
			timer.Reset(awayLook)
		}
	}
	mu.Lock()
	timer = time.AfterFunc(awayLook, look)
	mu.Unlock()
	return ctx, func() {
		mu.Lock()
		stopped = true
		timer.Stop()
		mu.Unlock()
		cancel(nil)
	}
}

// orEtcdAway replaces the error of something that was given up because etcd is away.
func orEtcdAway(ctx context.Context, err error, doing, what string) error {
	if err != nil && errors.Is(context.Cause(ctx), errEtcdAway) {
		return refuse(brokerv1.Code_CODE_UNAVAILABLE, "%s %s: %v; try again", doing, what, errEtcdAway)
	}
	return err
}
