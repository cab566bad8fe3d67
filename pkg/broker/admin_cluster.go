package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// ListBrokers lists the live brokers.
func (a *admin) ListBrokers(context.Context, *brokerv1.ListBrokersRequest) (*brokerv1.ListBrokersResponse, error) {
	owned := map[string]uint32{}
	for _, o := range a.b.deps.Cache.Owners() {
		owned[o.Broker]++
	}
	out := &brokerv1.ListBrokersResponse{}
	for _, b := range a.b.deps.Cache.Brokers() {
		out.Brokers = append(out.Brokers, &brokerv1.BrokerInfo{
			Id: b.ID, Url: b.URL, Http: b.HTTP, Version: b.Version, Bundles: owned[b.ID], Started: timestamppb.New(b.Started),
		})
	}
	return out, nil
}

// ListBookies lists every bookie the cluster knows.
func (a *admin) ListBookies(ctx context.Context, _ *brokerv1.ListBookiesRequest) (*brokerv1.ListBookiesResponse, error) {
	cookies, err := a.b.deps.Meta.ListCookies(ctx)
	if err != nil {
		return nil, statusError(fmt.Errorf("list bookies: %w", err))
	}
	out := &brokerv1.ListBookiesResponse{}
	for _, c := range cookies {
		info, _, err := a.bookieInfo(ctx, c)
		if err != nil {
			return nil, statusError(err)
		}
		out.Bookies = append(out.Bookies, info)
	}
	return out, nil
}

const (
	defaultLedgers = 1000
	maxLedgers     = 10_000
)

// ListLedgers lists ledgers: of a topic, on a bookie, or all.
func (a *admin) ListLedgers(ctx context.Context, req *brokerv1.ListLedgersRequest) (*brokerv1.ListLedgersResponse, error) {
	limit := int(min(req.GetLimit(), maxLedgers))
	if limit == 0 {
		limit = defaultLedgers
	}
	found, err := a.ledgers(ctx, req, limit+1)
	if err != nil {
		return nil, statusError(fmt.Errorf("list ledgers: %w", err))
	}
	out := &brokerv1.ListLedgersResponse{More: len(found) > limit}
	names := a.bookieNames(ctx)
	for _, l := range found[:min(limit, len(found))] {
		out.Ledgers = append(out.Ledgers, wireLedger(l, names))
	}
	return out, nil
}

func (a *admin) ledgers(ctx context.Context, req *brokerv1.ListLedgersRequest, limit int) ([]meta.Ledger, error) {
	after := entry.LedgerID(req.GetAfter())
	if req.GetTopic() == "" && req.GetBookie() == "" {
		return a.b.deps.Meta.ListLedgers(ctx, after, limit) //nolint:wrapcheck // the caller says what for
	}
	ids, err := a.ledgerIDs(ctx, req)
	if err != nil {
		return nil, err
	}
	slices.Sort(ids)
	var out []meta.Ledger
	for _, id := range ids {
		if id <= after || len(out) == limit {
			continue
		}
		l, err := a.b.deps.Meta.GetLedger(ctx, id)
		if errors.Is(err, meta.ErrNotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return nil, err //nolint:wrapcheck // it names the ledger
		}
		out = append(out, l)
	}
	return out, nil
}

// ledgerIDs lists the ids that a topic and a bookie have in common, where both are named.
func (a *admin) ledgerIDs(ctx context.Context, req *brokerv1.ListLedgersRequest) ([]entry.LedgerID, error) {
	var ofTopic, onBookie []entry.LedgerID
	if req.GetTopic() != "" {
		r, err := a.b.resolve(ctx, req.GetTopic(), false)
		if err != nil {
			return nil, err
		}
		chain, err := a.b.deps.Meta.GetChain(ctx, r.chain())
		if err != nil && !errors.Is(err, meta.ErrNotFound) {
			return nil, err //nolint:wrapcheck // it names the chain
		}
		for _, run := range chain.Runs {
			ofTopic = append(ofTopic, run.Ledger)
		}
		if req.GetBookie() == "" {
			return ofTopic, nil
		}
	}
	id, err := a.storageUUID(ctx, req.GetBookie())
	if err != nil {
		return nil, err
	}
	if onBookie, err = a.b.deps.Meta.LedgersOn(ctx, id); err != nil {
		return nil, err //nolint:wrapcheck // it names the bookie
	}
	if req.GetTopic() == "" {
		return onBookie, nil
	}
	return slices.DeleteFunc(onBookie, func(l entry.LedgerID) bool { return !slices.Contains(ofTopic, l) }), nil
}

// storageUUID finds a bookie by id or by the identity of its data.
func (a *admin) storageUUID(ctx context.Context, name string) (entry.StorageUUID, error) {
	if id, err := entry.ParseUUID(name); err == nil {
		return id, nil
	}
	c, err := a.b.deps.Meta.GetCookie(ctx, name)
	if errors.Is(err, meta.ErrNotFound) {
		return entry.StorageUUID{}, refuse(brokerv1.Code_CODE_NOT_FOUND, "there is no bookie %q: penstock bookie list", name)
	}
	return c.UUID, err //nolint:wrapcheck // it names the bookie
}

// bookieNames maps identities to bookie ids, as far as they are known now.
func (a *admin) bookieNames(ctx context.Context) map[entry.StorageUUID]string {
	names := map[entry.StorageUUID]string{}
	cookies, err := a.b.deps.Meta.ListCookies(ctx)
	if err != nil {
		return names // identities say it too
	}
	for _, c := range cookies {
		names[c.UUID] = c.ID
	}
	return names
}

// DescribeLedger returns one ledger's metadata.
func (a *admin) DescribeLedger(ctx context.Context, req *brokerv1.DescribeLedgerRequest) (*brokerv1.DescribeLedgerResponse, error) {
	l, err := a.ledger(ctx, req.GetId())
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.DescribeLedgerResponse{Ledger: wireLedger(l, a.bookieNames(ctx))}, nil
}

// ledger finds a ledger that a person named.
func (a *admin) ledger(ctx context.Context, id uint64) (meta.Ledger, error) {
	l, err := a.b.deps.Meta.GetLedger(ctx, entry.LedgerID(id))
	if errors.Is(err, meta.ErrNotFound) {
		return l, refuse(brokerv1.Code_CODE_NOT_FOUND, "there is no ledger %d, or no longer: penstock ledger list shows them", id)
	}
	return l, err //nolint:wrapcheck // it names the ledger
}

func wireLedger(l meta.Ledger, names map[entry.StorageUUID]string) *brokerv1.Ledger {
	out := &brokerv1.Ledger{
		Id: uint64(l.ID), State: l.State.String(), Term: uint64(l.Term), Ensemble: uint32(l.Ensemble), WriteQuorum: uint32(l.WriteQuorum),
		AckQuorum: uint32(l.AckQuorum), MinZones: uint32(l.MinZones), LastEntry: int64(l.Last), Bytes: uint64(l.Length), Chain: string(l.Chain),
	}
	for _, f := range l.Fragments {
		wire := &brokerv1.Fragment{FirstEntry: int64(f.First)}
		for _, s := range f.Slots {
			wire.Slots = append(wire.Slots, &brokerv1.FragmentSlot{StorageUuid: s.UUID.String(), Bookie: names[s.UUID], Zone: s.Zone})
		}
		out.Fragments = append(out.Fragments, wire)
	}
	return out
}

// ReadLedger reads stored entries up to what is confirmed.
func (a *admin) ReadLedger(req *brokerv1.ReadLedgerRequest, stream brokerv1.Admin_ReadLedgerServer) error {
	ctx := stream.Context()
	l, err := a.ledger(ctx, req.GetId())
	if err != nil {
		return statusError(err)
	}
	if req.GetFirstEntry() < 0 {
		return statusError(invalid("read ledger %d: entries start at 0, not at %d", l.ID, req.GetFirstEntry()))
	}
	env := a.b.topicEnv.Chain.Ledger
	env.Metadata = a.b.deps.Meta
	reader := ledger.NewReader(env, l)
	sent := uint32(0)
	for next := entry.EntryID(req.GetFirstEntry()); ; {
		entries, err := reader.Read(ctx, next, ledger.AskLAC, maxDeliverBytes)
		if err != nil {
			return statusError(err)
		}
		if len(entries) == 0 {
			return nil
		}
		for _, e := range entries {
			if sent++; req.GetLimit() > 0 && sent > req.GetLimit() {
				return nil
			}
			if err := stream.Send(&brokerv1.ReadLedgerResponse{Entry: int64(e.ID), Body: e.Body}); err != nil {
				return err //nolint:wrapcheck // gRPC's own
			}
			next = e.ID + 1
		}
	}
}
