package broker

import (
	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/subscription"
)

// What package subscription says, as the wire has it.

var refusalCodes = [...]brokerv1.Code{
	subscription.Invalid:     brokerv1.Code_CODE_INVALID,
	subscription.NotFound:    brokerv1.Code_CODE_NOT_FOUND,
	subscription.Conflict:    brokerv1.Code_CODE_CONFLICT,
	subscription.Refused:     brokerv1.Code_CODE_REFUSED,
	subscription.Unavailable: brokerv1.Code_CODE_UNAVAILABLE,
	subscription.Moved:       brokerv1.Code_CODE_SUBSCRIPTION_MOVED,
}

func ownType(k brokerv1.SubscriptionType) subscription.Type {
	switch k {
	case brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_FAILOVER:
		return subscription.Failover
	case brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_SHARED:
		return subscription.Shared
	case brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_UNSPECIFIED, brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_EXCLUSIVE:
	}
	return subscription.Exclusive
}

func wireType(t subscription.Type) brokerv1.SubscriptionType {
	switch t {
	case subscription.Exclusive:
		return brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_EXCLUSIVE
	case subscription.Failover:
		return brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_FAILOVER
	case subscription.Shared:
		return brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_SHARED
	}
	return brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_UNSPECIFIED
}

// core makes the dispatch of a type, with the namespace's limits.
func (t *servedTopic) core(kind subscription.Type) dispatch.Core {
	shared := kind == subscription.Shared
	cfg := dispatch.DefaultConfig(shared)
	limit := func(to *uint64, set *int) {
		if set != nil {
			*to = uint64(*set)
		}
	}
	policies := t.u.b.policies(t.name.NamespaceName())
	limit(&cfg.MaxUnackedPerConsumer, policies.MaxUnackedPerConsumer)
	limit(&cfg.MaxUnackedPerSubscription, policies.MaxUnackedPerSubscription)
	switch {
	case shared:
		return dispatch.NewShared(cfg)
	case kind == subscription.Failover:
		return dispatch.NewFailover(cfg)
	}
	return dispatch.NewExclusive(cfg)
}
