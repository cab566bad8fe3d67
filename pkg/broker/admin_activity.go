package broker

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
)

const (
	// defaultActivity is how many topics and subscriptions are told of when nobody says otherwise.
	defaultActivity = 10
	// activityPatience is how long another broker has to say what it does.
	activityPatience = time.Second
)

// GetActivity tells what goes on, in the whole cluster or here.
func (a *admin) GetActivity(ctx context.Context, req *brokerv1.GetActivityRequest) (*brokerv1.GetActivityResponse, error) {
	top := int(min(req.GetTop(), maxTop))
	if top == 0 {
		top = defaultActivity
	}
	out := a.b.activity(top)
	if req.GetLocal() {
		return out, nil
	}
	var err error
	if out.Bookies, err = a.b.bookieActivity(ctx); err != nil {
		return nil, statusError(err)
	}
	for _, of := range a.b.othersActivity(ctx, top) {
		out.Brokers = append(out.Brokers, of.GetBrokers()...)
		out.Topics = append(out.Topics, of.GetTopics()...)
		out.Subscriptions = append(out.Subscriptions, of.GetSubscriptions()...)
		out.AllSubscriptions += of.GetAllSubscriptions()
	}
	slices.SortFunc(out.Brokers, func(x, y *brokerv1.BrokerActivity) int { return strings.Compare(x.GetId(), y.GetId()) })
	slices.SortFunc(out.Topics, func(x, y *brokerv1.TopicActivity) int {
		return cmp.Or(cmp.Compare(throughput(y), throughput(x)), strings.Compare(x.GetTopic(), y.GetTopic()))
	})
	slices.SortFunc(out.Subscriptions, func(x, y *brokerv1.SubscriptionActivity) int {
		return cmp.Or(cmp.Compare(y.GetLagSeconds(), x.GetLagSeconds()), cmp.Compare(y.GetBacklog(), x.GetBacklog()),
			strings.Compare(x.GetTopic(), y.GetTopic()), strings.Compare(x.GetSubscription(), y.GetSubscription()))
	})
	out.Topics = out.Topics[:min(top, len(out.Topics))]
	out.Subscriptions = out.Subscriptions[:min(top, len(out.Subscriptions))]
	return out, nil
}

func throughput(t *brokerv1.TopicActivity) float64 {
	return t.GetTraffic().GetBytesIn() + t.GetTraffic().GetBytesOut()
}

// activity is what goes on here, by the latest look.
func (b *Broker) activity(top int) *brokerv1.GetActivityResponse {
	f := b.latest.Load()
	me := &brokerv1.BrokerActivity{
		Id: b.cfg.Self.ID, Url: b.cfg.Self.URL, Started: timestamppb.New(b.cfg.Self.Started), Bundles: uint32(len(b.all())),
		Topics: uint32(len(f.topics)), Traffic: &brokerv1.Traffic{}, UnownedBundles: uint32(b.owner.Missing()),
		PublishBytes: uint64(b.topicEnv.Budget.Used()), PublishLimitBytes: uint64(b.topicEnv.Budget.Capacity()),
	}
	for i := range f.topics {
		t := &f.topics[i]
		me.Producers += uint32(t.producers)
		me.Consumers += uint32(t.consumers)
		rates := t.rates()
		me.Traffic.MessagesIn += rates.GetMessagesIn()
		me.Traffic.BytesIn += rates.GetBytesIn()
		me.Traffic.MessagesOut += rates.GetMessagesOut()
		me.Traffic.BytesOut += rates.GetBytesOut()
		for j := range t.subscriptions {
			me.Backlog += t.subscriptions[j].backlog
		}
	}
	out := &brokerv1.GetActivityResponse{Brokers: []*brokerv1.BrokerActivity{me}}
	for _, t := range f.busiest(top) {
		out.Topics = append(out.Topics, &brokerv1.TopicActivity{
			Topic: t.name, Broker: b.cfg.Self.ID, Traffic: t.rates(), StoredBytes: uint64(t.stored),
			Producers: uint32(t.producers), Consumers: uint32(t.consumers),
		})
	}
	subs, all := f.furthestBehind(top)
	out.AllSubscriptions = uint64(all)
	for _, s := range subs {
		out.Subscriptions = append(out.Subscriptions, &brokerv1.SubscriptionActivity{
			Topic: s.topic, Subscription: s.name, Broker: b.cfg.Self.ID, Backlog: s.backlog, BacklogBytes: uint64(s.backlogBytes),
			LagSeconds: s.age.Seconds(), Unacked: s.unacked, Consumers: uint32(s.consumers), WaitingReason: string(s.reason),
		})
	}
	return out
}

// rates are what went through the topic lately, by the second.
func (t *topicFigures) rates() *brokerv1.Traffic {
	seconds := t.over.Seconds()
	if seconds <= 0 {
		return &brokerv1.Traffic{}
	}
	return &brokerv1.Traffic{
		MessagesIn: float64(t.recent.published) / seconds, BytesIn: float64(t.recent.publishedBytes) / seconds,
		MessagesOut: float64(t.recent.delivered) / seconds, BytesOut: float64(t.recent.deliveredBytes) / seconds,
	}
}

// bookieActivity tells how every bookie stands that the cluster knows.
func (b *Broker) bookieActivity(ctx context.Context) ([]*brokerv1.BookieActivity, error) {
	cookies, err := b.deps.Meta.ListCookies(ctx)
	if err != nil {
		return nil, fmt.Errorf("list bookies: %w", err)
	}
	var out []*brokerv1.BookieActivity
	for _, c := range cookies {
		one := &brokerv1.BookieActivity{Id: c.ID, State: "OFFLINE"}
		if c.Retired {
			one.State = "RETIRED"
		} else if k, ok := b.deps.Cache.Bookie(c.UUID); ok {
			one.State, one.Zone, one.FreeBytes, one.TotalBytes = k.State.String(), k.Zone, k.FreeBytes, k.TotalBytes
		}
		out = append(out, one)
	}
	return out, nil
}

// othersActivity asks the other brokers, all at once. Of one that does not answer it says so.
func (b *Broker) othersActivity(ctx context.Context, top int) []*brokerv1.GetActivityResponse {
	ctx, cancel := context.WithTimeout(ctx, activityPatience)
	defer cancel()
	others := slices.DeleteFunc(b.deps.Cache.Brokers(), func(k meta.BrokerInfo) bool { return k.ID == b.cfg.Self.ID })
	out := make([]*brokerv1.GetActivityResponse, len(others))
	var asking sync.WaitGroup
	for i, k := range others {
		asking.Go(func() {
			answer, err := askActivity(ctx, k, top)
			if err != nil {
				answer = &brokerv1.GetActivityResponse{Brokers: []*brokerv1.BrokerActivity{
					{Id: k.ID, Url: k.URL, Started: timestamppb.New(k.Started), Error: err.Error()},
				}}
			}
			out[i] = answer
		})
	}
	asking.Wait()
	return out
}

func askActivity(ctx context.Context, k meta.BrokerInfo, top int) (*brokerv1.GetActivityResponse, error) {
	conn, err := dialPeer(k.Peer)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", k.Peer, err)
	}
	defer conn.Close()
	answer, err := brokerv1.NewAdminClient(conn).GetActivity(ctx, &brokerv1.GetActivityRequest{Top: uint32(top), Local: true})
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", k.Peer, err)
	}
	return answer, nil
}
