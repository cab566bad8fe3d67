package broker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// unavailable says that a wait ended before what it waited for.
func unavailable(doing, what string, cause error) error {
	return refuse(brokerv1.Code_CODE_UNAVAILABLE, "%s %s: not done in time (%v); try again", doing, what, cause)
}

// policies returns a namespace's policies, or none.
func (b *Broker) policies(namespace string) meta.Policies {
	ns, _ := b.deps.Cache.Namespace(namespace)
	return ns.Policies
}

// stateReplication is how the state log of a bundle is copied: like its namespace's topics.
func (b *Broker) stateReplication(id meta.BundleID) meta.Replication {
	namespace, _, err := id.Split()
	if err == nil {
		if r, err := b.policies(namespace).Replication(b.cfg.Replication); err == nil {
			return r
		}
	}
	return b.cfg.Replication
}

func (b *Broker) autoCreate(namespace string) bool {
	if set := b.policies(namespace).AutoCreateTopics; set != nil {
		return *set
	}
	return !b.cfg.DisableAutoCreate
}

// record returns a topic's record, from the watched cache or, when it is new, from etcd; with create it is created
// where the namespace allows that.
func (b *Broker) record(ctx context.Context, base topicname.Name, create bool) (meta.Topic, error) {
	name := base.String()
	if t, ok := b.deps.Cache.Topic(name); ok {
		return checkDeleting(t)
	}
	if _, err := b.namespace(ctx, base.NamespaceName()); err != nil {
		return meta.Topic{}, fmt.Errorf("find topic %s: %w", name, err)
	}
	t, err := b.deps.Meta.GetTopic(ctx, name)
	if errors.Is(err, meta.ErrNotFound) {
		switch {
		case !create:
			return meta.Topic{}, refuse(brokerv1.Code_CODE_NOT_FOUND, "topic %s does not exist", name)
		case !b.autoCreate(base.NamespaceName()):
			return meta.Topic{}, refuse(brokerv1.Code_CODE_NOT_FOUND, "topic %s does not exist, and namespace %s does not create topics by themselves: penstock topic create %s", name, base.NamespaceName(), name)
		}
		t, err = b.deps.Meta.CreateTopic(ctx, name, 0)
		if errors.Is(err, meta.ErrExists) {
			t, err = b.deps.Meta.GetTopic(ctx, name)
		}
	}
	if err != nil {
		return meta.Topic{}, fmt.Errorf("find topic %s: %w", name, err)
	}
	return checkDeleting(t)
}

func checkDeleting(t meta.Topic) (meta.Topic, error) {
	if t.Deleting {
		return meta.Topic{}, refuse(brokerv1.Code_CODE_REFUSED, "topic %s is being deleted", t.Name)
	}
	return t, nil
}

// stillThere refuses a topic whose record is not the one that was found before, by what etcd says now: the cache may be late. One
// that is marked, and was found so, is there as long as its record is.
func (b *Broker) stillThere(ctx context.Context, r resolved) error {
	err := b.deps.Meta.TopicStillThere(ctx, r.record)
	switch {
	case errors.Is(err, meta.ErrNotFound), errors.Is(err, meta.ErrDeleting):
		return refuse(brokerv1.Code_CODE_UNAVAILABLE, "topic %s was deleted a moment ago; try again", r.record.Name)
	case err != nil:
		return fmt.Errorf("open topic %s: %w", r.name, err)
	}
	return nil
}

// resolve finds the topic or partition that a request names.
func (b *Broker) resolve(ctx context.Context, text string, create bool) (resolved, error) {
	name, err := topicname.Parse(text)
	if err != nil {
		return resolved{}, err //nolint:wrapcheck // it says which name and why
	}
	record, err := b.record(ctx, name.Base(), create && name.Partition == topicname.NoPartition)
	if err != nil {
		return resolved{}, err
	}
	switch {
	case record.Partitions == 0 && name.Partition != topicname.NoPartition:
		return resolved{}, refuse(brokerv1.Code_CODE_NOT_FOUND, "topic %s has no partitions", name.Base())
	case record.Partitions > 0 && name.Partition == topicname.NoPartition:
		return resolved{}, invalid("topic %s has %d partitions: name one, from %s to %s", name, record.Partitions,
			name.WithPartition(0), name.WithPartition(record.Partitions-1))
	case name.Partition >= max(record.Partitions, 1):
		return resolved{}, refuse(brokerv1.Code_CODE_NOT_FOUND, "topic %s has %d partitions, there is no %s", name.Base(), record.Partitions, name)
	}
	return resolved{name: name, record: record}, nil
}

// bundleOf returns the bundle of a topic or partition by its full name.
func (b *Broker) bundleOf(ctx context.Context, name topicname.Name) (meta.BundleID, error) {
	ns, err := b.namespace(ctx, name.NamespaceName())
	if err != nil {
		return "", err
	}
	return meta.BundleOf(ns, name.String()).ID, nil
}

// namespace returns a namespace from the watched cache. One that is not there is asked for in etcd, so that what was
// created by another broker a moment ago is found.
func (b *Broker) namespace(ctx context.Context, name string) (meta.Namespace, error) {
	if ns, ok := b.deps.Cache.Namespace(name); ok {
		return ns, nil
	}
	ns, err := b.deps.Meta.GetNamespace(ctx, name)
	switch {
	case errors.Is(err, meta.ErrNotFound):
		return ns, refuse(brokerv1.Code_CODE_NOT_FOUND, "namespace %s does not exist: create it, or check the name (penstock namespace list)", name)
	case err != nil:
		return ns, fmt.Errorf("find namespace %s: %w", name, err)
	}
	return ns, b.deps.Cache.WaitRevision(ctx, ns.Rev) //nolint:wrapcheck // it says what it waited for
}

// topicFor returns a topic or partition that is served here, opening it if need be. It returns a *movedError when
// another broker should be asked.
func (b *Broker) topicFor(ctx context.Context, text string, create, producing bool) (*servedTopic, error) {
	r, err := b.resolve(ctx, text, create)
	if err != nil {
		return nil, err
	}
	u, err := b.bundleFor(ctx, r.name)
	if err != nil {
		return nil, err
	}
	return u.open(ctx, r, producing)
}

// bundleFor returns the bundle of a topic, waiting up to locateWait if it is about to be served here.
func (b *Broker) bundleFor(ctx context.Context, name topicname.Name) (*bundle, error) {
	id, err := b.bundleOf(ctx, name)
	if err != nil {
		return nil, err
	}
	return b.bundleByID(ctx, id, name.String())
}

// bundleByID is bundleFor, for what is in the bundle.
func (b *Broker) bundleByID(ctx context.Context, id meta.BundleID, what string) (*bundle, error) {
	ctx, cancel := context.WithTimeout(ctx, locateWait)
	defer cancel()
	route := b.owner.Locate(ctx, id)
	for route.Mine {
		u, another := b.served(id)
		if u != nil {
			return u, nil
		}
		select {
		case <-another:
		case <-ctx.Done():
			route.Mine, route.URL = false, ""
		}
	}
	return nil, &movedError{topic: what, bundle: id, url: route.URL, epoch: route.Epoch}
}

// lookup answers where topics are served.
type lookup struct {
	brokerv1.UnimplementedLookupServer
	b *Broker
}

// LookupTopic names the broker that serves a topic or partition.
func (l *lookup) LookupTopic(ctx context.Context, req *brokerv1.LookupTopicRequest) (*brokerv1.LookupTopicResponse, error) {
	name, err := topicname.Parse(req.GetTopic())
	if err != nil {
		return nil, statusError(err)
	}
	id, err := l.b.bundleOf(ctx, name)
	if err != nil {
		return nil, statusError(err)
	}
	ctx, cancel := context.WithTimeout(ctx, locateWait)
	defer cancel()
	route := l.b.owner.Locate(ctx, id)
	if beyond := entry.Epoch(req.GetBeyondEpoch()); req.GetBundle() == string(id) && !route.Mine && route.URL != "" && route.Epoch <= beyond {
		ctx, cancel := context.WithTimeout(ctx, successorWait)
		defer cancel()
		route = l.b.owner.LocateBeyond(ctx, id, beyond)
	}
	found := lookupElsewhere
	switch {
	case route.URL == "":
		found = lookupUnserved
	case route.Mine:
		found = lookupHere
	}
	l.b.metrics.lookups.WithLabelValues(found).Inc()
	if route.URL == "" {
		return nil, statusError(refuse(brokerv1.Code_CODE_UNAVAILABLE, "look up topic %s: nobody serves bundle %s yet; try again", name, id))
	}
	return &brokerv1.LookupTopicResponse{BrokerUrl: route.URL, Bundle: string(id), Epoch: uint64(route.Epoch), Brokers: l.b.liveBrokers()}, nil
}

// maxNamedBrokers is how many live brokers a lookup names.
const maxNamedBrokers = 16

// liveBrokers returns URLs of live brokers, some of them where there are many, from a random one on.
func (b *Broker) liveBrokers() []string {
	brokers := b.deps.Cache.Brokers()
	urls := make([]string, 0, min(len(brokers), maxNamedBrokers))
	from := rand.IntN(max(1, len(brokers))) //nolint:gosec // it spreads load, and keeps no secret
	for i := range min(len(brokers), maxNamedBrokers) {
		urls = append(urls, brokers[(from+i)%len(brokers)].URL)
	}
	return urls
}

// GetTopic tells how many partitions a topic has.
func (l *lookup) GetTopic(ctx context.Context, req *brokerv1.GetTopicRequest) (*brokerv1.GetTopicResponse, error) {
	name, err := topicname.Parse(req.GetTopic())
	if err != nil {
		return nil, statusError(err)
	}
	if name.Partition != topicname.NoPartition {
		r, err := l.b.resolve(ctx, req.GetTopic(), false)
		if err != nil {
			return nil, statusError(err)
		}
		return &brokerv1.GetTopicResponse{Topic: r.name.String()}, nil
	}
	record, err := l.b.record(ctx, name, req.GetCreate())
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.GetTopicResponse{Topic: record.Name, Partitions: uint32(record.Partitions)}, nil
}
