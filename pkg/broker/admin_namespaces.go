package broker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// CreateTenant creates a tenant.
func (a *admin) CreateTenant(ctx context.Context, req *brokerv1.CreateTenantRequest) (*brokerv1.CreateTenantResponse, error) {
	err := topicname.CheckTenant(req.GetTenant())
	if err == nil {
		err = a.b.deps.Meta.CreateTenant(ctx, req.GetTenant())
	}
	if err != nil {
		return nil, statusError(fmt.Errorf("create tenant %q: %w", req.GetTenant(), err))
	}
	return &brokerv1.CreateTenantResponse{}, nil
}

// ListTenants lists the tenants.
func (a *admin) ListTenants(ctx context.Context, _ *brokerv1.ListTenantsRequest) (*brokerv1.ListTenantsResponse, error) {
	names, err := a.b.deps.Meta.ListTenants(ctx)
	if err != nil {
		return nil, statusError(fmt.Errorf("list tenants: %w", err))
	}
	return &brokerv1.ListTenantsResponse{Tenants: names}, nil
}

// DeleteTenant deletes a tenant that has no namespaces.
func (a *admin) DeleteTenant(ctx context.Context, req *brokerv1.DeleteTenantRequest) (*brokerv1.DeleteTenantResponse, error) {
	if err := a.b.deps.Meta.DeleteTenant(ctx, req.GetTenant()); err != nil {
		return nil, statusError(fmt.Errorf("delete tenant %q: %w", req.GetTenant(), err))
	}
	return &brokerv1.DeleteTenantResponse{}, nil
}

func namespaceName(text string) (string, error) {
	tenant, namespace, err := topicname.ParseNamespace(text)
	return tenant + "/" + namespace, err
}

// CreateNamespace creates a namespace.
func (a *admin) CreateNamespace(ctx context.Context, req *brokerv1.CreateNamespaceRequest) (*brokerv1.CreateNamespaceResponse, error) {
	name, err := namespaceName(req.GetNamespace())
	if err != nil {
		return nil, statusError(err)
	}
	policies, err := a.policies(req.GetPolicies())
	if err == nil {
		bundles := meta.DefaultBundles
		if req.GetBundles() != 0 {
			bundles = int(req.GetBundles())
		}
		if !req.GetForce() {
			err = a.placeable(policies, meta.Policies{})
		}
		if err == nil {
			_, err = a.b.deps.Meta.CreateNamespace(ctx, name, policies, bundles)
		}
	}
	if err != nil {
		return nil, statusError(fmt.Errorf("create namespace %s: %w", name, err))
	}
	return &brokerv1.CreateNamespaceResponse{}, nil
}

// ListNamespaces lists a tenant's namespaces, or all.
func (a *admin) ListNamespaces(ctx context.Context, req *brokerv1.ListNamespacesRequest) (*brokerv1.ListNamespacesResponse, error) {
	tenants := []string{req.GetTenant()}
	if req.GetTenant() == "" {
		var err error
		if tenants, err = a.b.deps.Meta.ListTenants(ctx); err != nil {
			return nil, statusError(fmt.Errorf("list namespaces: %w", err))
		}
	}
	out := &brokerv1.ListNamespacesResponse{}
	for _, tenant := range tenants {
		found, err := a.b.deps.Meta.ListNamespaces(ctx, tenant)
		if err != nil {
			return nil, statusError(fmt.Errorf("list namespaces of %q: %w", tenant, err))
		}
		for _, ns := range found {
			out.Namespaces = append(out.Namespaces, ns.Name)
		}
	}
	return out, nil
}

// GetNamespace returns a namespace's policies and bundles.
func (a *admin) GetNamespace(ctx context.Context, req *brokerv1.GetNamespaceRequest) (*brokerv1.GetNamespaceResponse, error) {
	name, err := namespaceName(req.GetNamespace())
	if err != nil {
		return nil, statusError(err)
	}
	ns, err := a.b.deps.Meta.GetNamespace(ctx, name)
	if err != nil {
		return nil, statusError(fmt.Errorf("get namespace %s: %w", name, err))
	}
	out := &brokerv1.GetNamespaceResponse{Namespace: ns.Name, Policies: wirePolicies(ns.Policies)}
	for _, k := range ns.Bundles {
		owner, _ := a.b.deps.Cache.Owner(k.ID)
		out.Bundles = append(out.Bundles, &brokerv1.Bundle{
			Id: string(k.ID), FirstHash: k.First, LastHash: k.Last, BrokerUrl: owner.URL, Epoch: uint64(k.Epoch),
		})
	}
	return out, nil
}

// UpdateNamespace replaces a namespace's policies.
func (a *admin) UpdateNamespace(ctx context.Context, req *brokerv1.UpdateNamespaceRequest) (*brokerv1.UpdateNamespaceResponse, error) {
	name, err := namespaceName(req.GetNamespace())
	if err != nil {
		return nil, statusError(err)
	}
	policies, err := a.policies(req.GetPolicies())
	if err == nil && !req.GetForce() {
		var now meta.Namespace
		if now, err = a.b.deps.Meta.GetNamespace(ctx, name); err == nil {
			err = a.placeable(policies, now.Policies)
		}
	}
	if err == nil {
		_, err = a.b.deps.Meta.UpdateNamespace(ctx, name, policies)
	}
	if err != nil {
		return nil, statusError(fmt.Errorf("update namespace %s: %w", name, err))
	}
	return &brokerv1.UpdateNamespaceResponse{}, nil
}

// DeleteNamespace marks a namespace that has no topics for deletion, and waits until its bundles' owners have done it.
func (a *admin) DeleteNamespace(ctx context.Context, req *brokerv1.DeleteNamespaceRequest) (*brokerv1.DeleteNamespaceResponse, error) {
	name, err := namespaceName(req.GetNamespace())
	if err != nil {
		return nil, statusError(err)
	}
	topics, err := a.b.deps.Meta.ListTopics(ctx, name)
	if err == nil && len(topics) > 0 {
		err = refuse(brokerv1.Code_CODE_REFUSED, "it has %d topics: delete them first (penstock topic list %s)", len(topics), name)
	}
	if err == nil {
		_, err = a.b.deps.Meta.MarkNamespaceDeleting(ctx, name)
	}
	if err != nil {
		return nil, statusError(fmt.Errorf("delete namespace %s: %w", name, err))
	}
	for {
		changed := a.b.deps.Cache.Changed(meta.KindNamespaces)
		_, err := a.b.deps.Meta.GetNamespace(ctx, name)
		switch {
		case errors.Is(err, meta.ErrNotFound):
			return &brokerv1.DeleteNamespaceResponse{}, nil
		case err != nil:
			return nil, statusError(fmt.Errorf("delete namespace %s: %w", name, err))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, statusError(unavailable("delete namespace", name+" (it is marked, and its bundles' owners go on deleting it)", ctx.Err()))
		}
	}
}

// placeable refuses a change of policies after which no ledger could be opened on the bookies that are registered:
// producers would wait, and nobody would tell the person who asked for too much. A disk that is full now counts, since it
// may be cleared; a change of other policies is nobody's fault and passes.
func (a *admin) placeable(p, before meta.Policies) error {
	want, err := p.Replication(a.b.cfg.Replication)
	if err != nil {
		return err //nolint:wrapcheck // it names the rule
	}
	if had, err := before.Replication(a.b.cfg.Replication); err == nil && had == want {
		return nil
	}
	there := a.b.candidates()
	for i := range there {
		there[i].Writable = true
	}
	_, err = ledger.Place(ledger.PlaceRequest{Replication: want, Candidates: there})
	var missing *ledger.PlacementError
	if !errors.As(err, &missing) {
		return err //nolint:wrapcheck // it says what is being placed
	}
	return refuse(brokerv1.Code_CODE_REFUSED,
		"ensemble %d, write quorum %d, ack quorum %d and min zones %d cannot be met now: %v, or ask for less, or use --force if they are still to come",
		want.Ensemble, want.WriteQuorum, want.AckQuorum, want.MinZones, missing)
}

// policies converts and checks policies, also against the cluster's defaults.
func (a *admin) policies(w *brokerv1.Policies) (meta.Policies, error) {
	p := meta.Policies{
		Ensemble: number(w.GetEnsemble(), w != nil && w.Ensemble != nil), WriteQuorum: number(w.GetWriteQuorum(), w != nil && w.WriteQuorum != nil),
		AckQuorum: number(w.GetAckQuorum(), w != nil && w.AckQuorum != nil), MinZones: number(w.GetMinZones(), w != nil && w.MinZones != nil),
		MaxUnackedPerSubscription: number(w.GetMaxUnackedPerSubscription(), w != nil && w.MaxUnackedPerSubscription != nil),
		MaxUnackedPerConsumer:     number(w.GetMaxUnackedPerConsumer(), w != nil && w.MaxUnackedPerConsumer != nil),
		RetentionTime:             span(w.GetRetentionTime()), MessageTTL: span(w.GetMessageTtl()),
		BacklogAction: meta.BacklogAction(w.GetBacklogAction()),
	}
	if w != nil {
		p.AutoCreateTopics = w.AutoCreateTopics
	}
	var err error
	if p.RetentionBytes, err = size("retention bytes", w.GetRetentionBytes(), w != nil && w.RetentionBytes != nil); err != nil {
		return p, err
	}
	if p.BacklogBytes, err = size("backlog bytes", w.GetBacklogBytes(), w != nil && w.BacklogBytes != nil); err != nil {
		return p, err
	}
	if err := p.Validate(); err != nil {
		return p, err //nolint:wrapcheck // it names the policy
	}
	_, err = p.Replication(a.b.cfg.Replication)
	return p, err //nolint:wrapcheck // it names the rule
}

func number(v uint32, set bool) *int {
	if !set {
		return nil
	}
	n := int(v)
	return &n
}

func size(what string, v uint64, set bool) (*int64, error) {
	if !set {
		return nil, nil
	}
	if v > math.MaxInt64 {
		return nil, invalid("%s of %d: at most %d are allowed", what, v, int64(math.MaxInt64))
	}
	n := int64(v)
	return &n, nil
}

func span(d *durationpb.Duration) *time.Duration {
	if d == nil {
		return nil
	}
	v := d.AsDuration()
	return &v
}

func wirePolicies(p meta.Policies) *brokerv1.Policies {
	number := func(v *int) *uint32 {
		if v == nil {
			return nil
		}
		n := uint32(*v)
		return &n
	}
	size := func(v *int64) *uint64 {
		if v == nil {
			return nil
		}
		n := uint64(*v)
		return &n
	}
	span := func(v *time.Duration) *durationpb.Duration {
		if v == nil {
			return nil
		}
		return durationpb.New(*v)
	}
	return &brokerv1.Policies{
		Ensemble: number(p.Ensemble), WriteQuorum: number(p.WriteQuorum), AckQuorum: number(p.AckQuorum), MinZones: number(p.MinZones),
		RetentionTime: span(p.RetentionTime), RetentionBytes: size(p.RetentionBytes), MessageTtl: span(p.MessageTTL),
		BacklogBytes: size(p.BacklogBytes), BacklogAction: brokerv1.BacklogAction(p.BacklogAction), AutoCreateTopics: p.AutoCreateTopics,
		MaxUnackedPerSubscription: number(p.MaxUnackedPerSubscription), MaxUnackedPerConsumer: number(p.MaxUnackedPerConsumer),
	}
}
