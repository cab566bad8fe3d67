package broker

import (
	"context"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/dispatch"
)

// CreateSubscription creates a subscription before any consumer comes.
func (a *admin) CreateSubscription(ctx context.Context, req *brokerv1.CreateSubscriptionRequest) (*brokerv1.CreateSubscriptionResponse, error) {
	t, err := a.b.topicFor(ctx, req.GetTopic(), false, false)
	if err != nil {
		return nil, statusError(err)
	}
	_, created, err := t.subs.ensure(ctx, req.GetSubscription(), req.GetStart())
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
	subs, err := t.subs.list(ctx)
	if err != nil {
		return nil, statusError(err)
	}
	out := &brokerv1.ListSubscriptionsResponse{}
	ctx, cancel := context.WithTimeout(ctx, lagPatience) // for all of them
	defer cancel()
	for _, s := range subs {
		summary, _ := s.describe(ctx)
		out.Subscriptions = append(out.Subscriptions, summary)
	}
	return out, nil
}

// DescribeSubscription tells where a subscription stands and what it waits for.
func (a *admin) DescribeSubscription(ctx context.Context, req *brokerv1.DescribeSubscriptionRequest) (*brokerv1.DescribeSubscriptionResponse, error) {
	s, err := a.subscription(ctx, req.GetTopic(), req.GetSubscription())
	if err != nil {
		return nil, statusError(err)
	}
	ctx, cancel := context.WithTimeout(ctx, lagPatience)
	defer cancel()
	summary, status := s.describe(ctx)
	out := &brokerv1.DescribeSubscriptionResponse{
		Subscription: summary, WaitingReason: string(status.Reason), WaitingDetail: status.Detail, NextOffset: uint64(status.Next),
	}
	info := s.clientInfo()
	for _, c := range status.Consumers {
		out.Consumers = append(out.Consumers, &brokerv1.ConsumerState{
			Name: c.Name, Permits: c.Permits, Unacked: c.Unacked, Active: c.Active, ClientInfo: info[c.ID],
		})
	}
	return out, nil
}

func (a *admin) subscription(ctx context.Context, topic, name string) (*subscription, error) {
	t, err := a.b.topicFor(ctx, topic, false, false)
	if err != nil {
		return nil, err
	}
	return t.subs.get(ctx, name)
}

func (s *subscription) clientInfo() map[dispatch.ConsumerID]string {
	s.attaching.Lock()
	defer s.attaching.Unlock()
	out := make(map[dispatch.ConsumerID]string, len(s.consumers))
	for c := range s.consumers {
		out[c.id] = c.info
	}
	return out
}

// lagPatience is how long describing subscriptions waits for storage. Without it, the lag is told as far as it is known:
// whoever asks why nothing is delivered must not wait for what may be the reason.
const lagPatience = 500 * time.Millisecond

func (s *subscription) describe(ctx context.Context) (*brokerv1.Subscription, dispatch.Status) {
	status, kind := s.why()
	end := s.t.log.Next()
	s.mu.Lock()
	out := &brokerv1.Subscription{
		Name: s.name, Type: kind, AckFloor: uint64(s.cur.Floor()), Backlog: s.cur.Backlog(end), AckHoles: s.cur.Holes(), Unacked: status.Unacked,
	}
	floor := s.cur.Floor()
	s.mu.Unlock()
	for _, c := range status.Consumers {
		out.Consumers = append(out.Consumers, c.Name)
	}
	if at, _, ok := s.t.log.StoredAt(ctx, floor); ok {
		out.LagSeconds = max(0, time.Since(time.UnixMilli(at)).Seconds())
	}
	return out, status
}

// SeekSubscription moves a subscription.
func (a *admin) SeekSubscription(ctx context.Context, req *brokerv1.SeekSubscriptionRequest) (*brokerv1.SeekSubscriptionResponse, error) {
	if req.GetTo().GetAt() == nil { // what a new subscription takes for the end would pass over everything here
		return nil, statusError(invalid("seek subscription %q of %q: the request does not say where to", req.GetSubscription(), req.GetTopic()))
	}
	s, err := a.subscription(ctx, req.GetTopic(), req.GetSubscription())
	if err != nil {
		return nil, statusError(err)
	}
	to, err := startOffset(ctx, s.t.log, req.GetTo())
	if err == nil {
		err = s.seek(ctx, to)
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
		err = t.subs.remove(ctx, req.GetSubscription(), req.GetForce())
	}
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.DeleteSubscriptionResponse{}, nil
}
