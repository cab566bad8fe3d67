package broker

import (
	"context"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/subscription"
)

// CreateSubscription creates a subscription before any consumer comes.
func (a *admin) CreateSubscription(ctx context.Context, req *brokerv1.CreateSubscriptionRequest) (*brokerv1.CreateSubscriptionResponse, error) {
	t, err := a.b.topicFor(ctx, req.GetTopic(), false, false)
	if err != nil {
		return nil, statusError(err)
	}
	_, created, err := t.subs.Ensure(ctx, req.GetSubscription(), t.starting(req.GetStart()))
	if err == nil && !created {
		err = refuse(brokerv1.Code_CODE_CONFLICT, "subscription %s of %s exists already", req.GetSubscription(), t.name)
	}
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.CreateSubscriptionResponse{}, nil
}

// ListSubscriptions lists a topic's subscriptions.
func (a *admin) ListSubscriptions(ctx context.Context, req *brokerv1.ListSubscriptionsRequest) (*brokerv1.ListSubscriptionsResponse, error) {
	t, err := a.b.topicFor(ctx, req.GetTopic(), false, false)
	if err != nil {
		return nil, statusError(err)
	}
	subs, err := t.subs.List(ctx)
	if err != nil {
		return nil, statusError(err)
	}
	out := &brokerv1.ListSubscriptionsResponse{}
	ctx, cancel := context.WithTimeout(ctx, lagPatience) // for all of them
	defer cancel()
	for _, s := range subs {
		summary, _ := t.describeSubscription(ctx, s)
		out.Subscriptions = append(out.Subscriptions, summary)
	}
	return out, nil
}

// DescribeSubscription tells where a subscription stands and what it waits for.
func (a *admin) DescribeSubscription(ctx context.Context, req *brokerv1.DescribeSubscriptionRequest) (*brokerv1.DescribeSubscriptionResponse, error) {
	t, s, err := a.subscription(ctx, req.GetTopic(), req.GetSubscription())
	if err != nil {
		return nil, statusError(err)
	}
	ctx, cancel := context.WithTimeout(ctx, lagPatience)
	defer cancel()
	summary, status := t.describeSubscription(ctx, s)
	out := &brokerv1.DescribeSubscriptionResponse{
		Subscription: summary, WaitingReason: string(status.Reason), WaitingDetail: status.Detail, NextOffset: uint64(status.Next),
	}
	streams := s.Consumers()
	for _, c := range status.Consumers {
		state := &brokerv1.ConsumerState{Name: c.Name, Permits: c.Permits, Unacked: c.Unacked, Active: c.Active}
		if stream, ok := streams[c.ID].(*consumer); ok {
			state.ClientInfo = stream.info
		}
		out.Consumers = append(out.Consumers, state)
	}
	return out, nil
}

func (a *admin) subscription(ctx context.Context, topic, name string) (*servedTopic, *subscription.Subscription, error) {
	t, err := a.b.topicFor(ctx, topic, false, false)
	if err != nil {
		return nil, nil, err
	}
	s, err := t.subs.Get(ctx, name)
	return t, s, err //nolint:wrapcheck // it names both
}

// lagPatience is how long describing subscriptions waits for storage. Without it, the lag is told as far as it is known:
// whoever asks why nothing is delivered must not wait for what may be the reason.
const lagPatience = 500 * time.Millisecond

func (t *servedTopic) describeSubscription(ctx context.Context, s *subscription.Subscription) (*brokerv1.Subscription, dispatch.Status) {
	p := s.Progress()
	out := &brokerv1.Subscription{
		Name: s.Name(), Type: wireType(p.Type), AckFloor: uint64(p.Floor), Backlog: p.Backlog, AckHoles: p.Holes, Unacked: p.Status.Unacked,
	}
	for _, c := range p.Status.Consumers {
		out.Consumers = append(out.Consumers, c.Name)
	}
	if at, _, ok := t.log.StoredAt(ctx, p.Floor); ok {
		out.LagSeconds = max(0, sched.Real.Now().Sub(time.UnixMilli(at)).Seconds())
	}
	return out, p.Status
}

// SeekSubscription moves a subscription.
func (a *admin) SeekSubscription(ctx context.Context, req *brokerv1.SeekSubscriptionRequest) (*brokerv1.SeekSubscriptionResponse, error) {
	if req.GetTo().GetAt() == nil { // what a new subscription takes for the end would pass over everything here
		return nil, statusError(invalid("seek subscription %q of %q: the request does not say where to", req.GetSubscription(), req.GetTopic()))
	}
	t, s, err := a.subscription(ctx, req.GetTopic(), req.GetSubscription())
	if err != nil {
		return nil, statusError(err)
	}
	to, err := startOffset(ctx, t.log, req.GetTo())
	if err == nil {
		err = s.Seek(ctx, to)
	}
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.SeekSubscriptionResponse{Offset: uint64(to)}, nil
}

// DeleteSubscription forgets a subscription.
func (a *admin) DeleteSubscription(ctx context.Context, req *brokerv1.DeleteSubscriptionRequest) (*brokerv1.DeleteSubscriptionResponse, error) {
	t, err := a.b.topicFor(ctx, req.GetTopic(), false, false)
	if err == nil {
		err = t.subs.Remove(ctx, req.GetSubscription(), req.GetForce())
	}
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.DeleteSubscriptionResponse{}, nil
}
