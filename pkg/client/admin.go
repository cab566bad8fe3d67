package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// Admin returns the cluster's admin API. Requests that only a topic's owner can answer are sent there; where
// ownership has moved, the call follows; where no broker answers, it is tried again until its context ends.
// Errors are of type [*Error].
//
// A call that changes something, was sent, and got no answer is not repeated, unless that leads to the same state: it fails
// with an unknown outcome (see [OutcomeUnknown]), as one does that is repeated until its context ends, and the caller looks
// at what happened.
func (c *Client) Admin() brokerv1.AdminClient { return brokerv1.NewAdminClient(&router{c: c}) }

// router is a connection to whichever broker should get a call.
type router struct{ c *Client }

// ownerOnly lists the calls that only the owner of the request's topic answers.
var ownerOnly = map[string]bool{
	brokerv1.Admin_DescribeTopic_FullMethodName:        true,
	brokerv1.Admin_UnloadTopic_FullMethodName:          true,
	brokerv1.Admin_CreateSubscription_FullMethodName:   true,
	brokerv1.Admin_ListSubscriptions_FullMethodName:    true,
	brokerv1.Admin_DescribeSubscription_FullMethodName: true,
	brokerv1.Admin_SeekSubscription_FullMethodName:     true,
	brokerv1.Admin_DeleteSubscription_FullMethodName:   true,
}

// reads lists the calls that change nothing.
var reads = map[string]bool{
	brokerv1.Admin_ListTopics_FullMethodName:           true,
	brokerv1.Admin_DescribeTopic_FullMethodName:        true,
	brokerv1.Admin_ListSubscriptions_FullMethodName:    true,
	brokerv1.Admin_DescribeSubscription_FullMethodName: true,
	brokerv1.Admin_ListTenants_FullMethodName:          true,
	brokerv1.Admin_ListNamespaces_FullMethodName:       true,
	brokerv1.Admin_GetNamespace_FullMethodName:         true,
	brokerv1.Admin_ListBrokers_FullMethodName:          true,
	brokerv1.Admin_ListBookies_FullMethodName:          true,
	brokerv1.Admin_ListLedgers_FullMethodName:          true,
	brokerv1.Admin_DescribeLedger_FullMethodName:       true,
}

// repeatable lists the calls that change something, and lead to the same state when they are repeated.
var repeatable = map[string]bool{
	brokerv1.Admin_SeekSubscription_FullMethodName: true,
	brokerv1.Admin_UnloadTopic_FullMethodName:      true,
	brokerv1.Admin_UpdateNamespace_FullMethodName:  true,
}

func opOf(method string) string {
	for i := len(method) - 1; i >= 0; i-- {
		if method[i] == '/' {
			return method[i+1:]
		}
	}
	return method
}

// target returns the connection that a call should use.
func (r *router) target(ctx context.Context, method, topic string, hint owner, avoid string) (*conn, error) {
	if hint.url == "" && topic != "" && ownerOnly[method] {
		var err error
		if hint, err = r.c.findOwner(ctx, topic, avoid); err != nil {
			return nil, err
		}
	}
	if hint.url != "" {
		return r.c.pool.get(hint.url)
	}
	return r.c.pool.get(r.c.dir.candidates(avoid)[0])
}

// Invoke makes a unary call.
func (r *router) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	topic := ""
	if t, ok := args.(interface{ GetTopic() string }); ok {
		topic = t.GetTopic()
	}
	op := opOf(method)
	b := newBackoff()
	var hint owner
	var avoid string
	var last error
	sent := false // and may be done, for all that is known
	giveUp := func() error {
		if sent {
			return unknownOutcome(op, topic, fmt.Errorf("%w; last attempt: %w", causeOf(ctx), last))
		}
		return gaveUp(op, topic, causeOf(ctx), last)
	}
	for {
		if r.c.life.Err() != nil {
			return closedError(op, topic)
		}
		conn, err := r.target(ctx, method, topic, hint, avoid)
		hint = owner{}
		if err == nil {
			avoid = conn.url
			var reached peer.Peer
			err = r.call(ctx, conn, method, topic, &hint, func(ctx context.Context) error {
				return conn.cc.Invoke(ctx, method, args, reply, append(slices.Clip(opts), grpc.Peer(&reached))...)
			})
			if err == nil {
				return nil
			}
			if !reads[method] && reached.Addr != nil && mayBeDone(err) {
				if !repeatable[method] {
					return unknownOutcome(op, topic, fromStatus(op, topic, conn.url, err))
				}
				sent = true
			}
			err = fromStatus(op, topic, conn.url, err)
			if hint.url != "" && ctx.Err() == nil {
				last = err
				continue
			}
		}
		e := asError(err)
		switch {
		case ctx.Err() != nil:
			if last == nil {
				last = err
			}
			return giveUp()
		case !e.Retryable:
			return err
		case e.moved != nil:
			hint = r.c.follow(e.moved)
		}
		last = err
		if !pause(ctx, b.next()) {
			return giveUp()
		}
	}
}

// call makes one attempt. One whose topic is served by another broker meanwhile is ended, and hint says by whom: a
// broker that went silent without its connection breaking would hold the call up until its context ends.
func (r *router) call(ctx context.Context, on *conn, method, topic string, hint *owner, invoke func(context.Context) error) error {
	if topic == "" || !ownerOnly[method] {
		return invoke(ctx)
	}
	attempt, cancel := context.WithCancel(ctx)
	var newer owner
	var wg sync.WaitGroup
	wg.Go(func() {
		if !pause(attempt, suspectAfter) {
			return
		}
		if n, ok := r.c.suspect(attempt, topic, owner{url: on.url}); ok {
			newer = n
			cancel()
		}
	})
	err := invoke(attempt)
	cancel()
	wg.Wait()
	if err != nil && ctx.Err() == nil && newer.url != "" {
		*hint = newer
	}
	return err
}

// NewStream opens a streaming call on any broker, or on the owner of the request's topic.
func (r *router) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	urls := r.c.dir.candidates("")
	var errs []error
	for _, url := range urls {
		conn, err := r.c.pool.get(url)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s, err := conn.cc.NewStream(ctx, desc, method, opts...)
		if err == nil {
			return &adminStream{ClientStream: s, op: opOf(method), broker: url}, nil
		}
		errs = append(errs, fromStatus(opOf(method), "", url, err))
	}
	return nil, unreachable(opOf(method), "", errs)
}

// adminStream makes errors of this package of those that end a stream.
type adminStream struct {
	grpc.ClientStream
	op, broker string
}

// RecvMsg receives a message; io.EOF is the good end.
func (s *adminStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil || errors.Is(err, io.EOF) {
		return err //nolint:wrapcheck // io.EOF is part of the interface
	}
	return fromStatus(s.op, "", s.broker, err)
}

// mayBeDone tells whether a failed call that had a connection may have reached a broker that never answered.
func mayBeDone(err error) bool {
	s, ok := status.FromError(err)
	if !ok || len(s.Details()) > 0 {
		return false // a broker answered
	}
	switch s.Code() {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return true
	default:
		return false
	}
}
