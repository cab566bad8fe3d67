package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// admin manages what a cluster holds. What needs the owner of a topic is answered by the owner alone.
type admin struct {
	brokerv1.UnimplementedAdminServer
	b *Broker
}

// CreateTopic creates a topic.
func (a *admin) CreateTopic(ctx context.Context, req *brokerv1.CreateTopicRequest) (*brokerv1.CreateTopicResponse, error) {
	name, err := topicname.Parse(req.GetTopic())
	switch {
	case err != nil:
		return nil, statusError(err)
	case name.Partition != topicname.NoPartition:
		return nil, statusError(invalid("create topic %s: the name ends like a partition's; name the topic and give it partitions", name))
	case req.GetPartitions() > topicname.MaxPartitions:
		return nil, statusError(invalid("create topic %s with %d partitions: at most %d are allowed", name, req.GetPartitions(), topicname.MaxPartitions))
	}
	if _, err := a.b.deps.Meta.CreateTopic(ctx, name.String(), int(req.GetPartitions())); err != nil {
		return nil, statusError(fmt.Errorf("create topic %s: %w", name, err))
	}
	return &brokerv1.CreateTopicResponse{}, nil
}

// ListTopics lists a namespace's topics.
func (a *admin) ListTopics(ctx context.Context, req *brokerv1.ListTopicsRequest) (*brokerv1.ListTopicsResponse, error) {
	tenant, namespace, err := topicname.ParseNamespace(req.GetNamespace())
	if err != nil {
		return nil, statusError(err)
	}
	name := tenant + "/" + namespace
	topics, err := a.b.deps.Meta.ListTopics(ctx, name)
	if err != nil {
		return nil, statusError(fmt.Errorf("list topics of %s: %w", name, err))
	}
	out := &brokerv1.ListTopicsResponse{}
	for _, t := range topics {
		out.Topics = append(out.Topics, &brokerv1.TopicSummary{Topic: t.Name, Partitions: uint32(t.Partitions)})
	}
	return out, nil
}

// DescribeTopic tells what a topic or partition holds. A topic with partitions is described by any broker, from
// metadata alone.
func (a *admin) DescribeTopic(ctx context.Context, req *brokerv1.DescribeTopicRequest) (*brokerv1.DescribeTopicResponse, error) {
	name, err := topicname.Parse(req.GetTopic())
	if err != nil {
		return nil, statusError(err)
	}
	if name.Partition == topicname.NoPartition {
		record, err := a.b.record(ctx, name, false)
		if err != nil {
			return nil, statusError(err)
		}
		if record.Partitions > 0 {
			return &brokerv1.DescribeTopicResponse{Topic: record.Name, Partitions: uint32(record.Partitions)}, nil
		}
	}
	t, err := a.b.topicFor(ctx, req.GetTopic(), false, false)
	if err != nil {
		return nil, statusError(err)
	}
	return t.describe(ctx)
}

func (t *servedTopic) describe(ctx context.Context) (*brokerv1.DescribeTopicResponse, error) {
	subs, err := t.subs.List(ctx)
	if err != nil {
		return nil, statusError(err)
	}
	opening := t.log.Chain().Opening()
	out := &brokerv1.DescribeTopicResponse{
		Topic: t.name.String(), Bundle: string(t.u.guard.Bundle), Epoch: uint64(t.u.guard.Epoch), BrokerUrl: t.u.b.cfg.Self.URL,
		EarliestOffset: uint64(t.log.Earliest()), NextOffset: uint64(t.log.Next()), Bytes: uint64(t.log.Bytes()),
		Producers: t.producerNames(), Consumers: uint32(t.subs.Connected()), RecoveredTailBytes: uint64(opening.Ledger.BytesRewritten),
	}
	for _, s := range subs {
		out.Subscriptions = append(out.Subscriptions, s.Name())
	}
	for _, r := range t.log.Chain().Runs() {
		run := &brokerv1.LedgerRun{
			Ledger: uint64(r.Ledger), FirstOffset: uint64(r.First), State: meta.LedgerOpen.String(), Bytes: uint64(r.Bytes),
		}
		if r.Closed {
			run.EndOffset, run.State = uint64(r.End), meta.LedgerClosed.String()
		}
		out.Ledgers = append(out.Ledgers, run)
	}
	return out, nil
}

// DeleteTopic marks a topic for deletion, and waits until its owners have done it.
func (a *admin) DeleteTopic(ctx context.Context, req *brokerv1.DeleteTopicRequest) (*brokerv1.DeleteTopicResponse, error) {
	name, err := topicname.Parse(req.GetTopic())
	if err != nil {
		return nil, statusError(err)
	}
	if name.Partition != topicname.NoPartition {
		return nil, statusError(invalid("delete topic %s: partitions are deleted with their topic %s", name, name.Base()))
	}
	record, err := a.b.deps.Meta.GetTopic(ctx, name.String())
	if err != nil {
		return nil, statusError(fmt.Errorf("delete topic %s: %w", name, err))
	}
	if !req.GetForce() && !record.Deleting {
		for _, part := range partitionsOf(name, record) {
			d, err := a.ask(ctx, part)
			if err != nil {
				return nil, statusError(fmt.Errorf("find out whether topic %s is in use: %w", part, err))
			}
			if n := len(d.GetProducers()) + int(d.GetConsumers()); n > 0 {
				return nil, statusError(refuse(brokerv1.Code_CODE_REFUSED,
					"delete topic %s: %d producers and %d consumers are connected: disconnect them, or use --force", part, len(d.GetProducers()), d.GetConsumers()))
			}
		}
	}
	marked, err := a.b.deps.Meta.MarkThisTopicDeleting(ctx, record) // not one that was created in its place, and that may be in use
	if err != nil {
		return nil, statusError(fmt.Errorf("delete topic %s: %w", name, err))
	}
	if err := a.b.deps.Cache.TopicGone(ctx, marked); err != nil {
		return nil, statusError(unavailable("delete topic", name.String()+" (it is marked, and its owners go on deleting it)", err))
	}
	return &brokerv1.DeleteTopicResponse{}, nil
}

// ask describes a topic or partition by its owner, here or elsewhere.
func (a *admin) ask(ctx context.Context, name topicname.Name) (*brokerv1.DescribeTopicResponse, error) {
	t, err := a.b.topicFor(ctx, name.String(), false, false)
	if err == nil {
		return t.describe(ctx)
	}
	var moved *movedError
	if !errors.As(err, &moved) || moved.url == "" {
		return nil, err
	}
	i := slices.IndexFunc(a.b.deps.Cache.Brokers(), func(b meta.BrokerInfo) bool { return b.URL == moved.url })
	if i < 0 {
		return nil, err
	}
	conn, dialErr := dialPeer(a.b.deps.Cache.Brokers()[i].Peer)
	if dialErr != nil {
		return nil, fmt.Errorf("dial %s: %w", moved.url, dialErr)
	}
	defer conn.Close()
	return brokerv1.NewAdminClient(conn).DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: name.String()})
}

// UnloadTopic closes a topic, which its next use opens again.
func (a *admin) UnloadTopic(ctx context.Context, req *brokerv1.UnloadTopicRequest) (*brokerv1.UnloadTopicResponse, error) {
	t, err := a.b.topicFor(ctx, req.GetTopic(), false, false)
	if err != nil {
		return nil, statusError(err)
	}
	t.close(ctx, a.b.cfg.Self.URL)
	return &brokerv1.UnloadTopicResponse{}, nil
}
