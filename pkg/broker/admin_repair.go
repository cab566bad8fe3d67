package broker

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// ListUnderReplicated lists ledgers that lack copies, and what is done about it.
func (a *admin) ListUnderReplicated(ctx context.Context, req *brokerv1.ListUnderReplicatedRequest) (*brokerv1.ListUnderReplicatedResponse, error) {
	limit := int(min(req.GetLimit(), maxLedgers))
	if limit == 0 {
		limit = defaultLedgers
	}
	var on entry.StorageUUID
	if req.GetBookie() != "" {
		var err error
		if on, err = a.storageUUID(ctx, req.GetBookie()); err != nil {
			return nil, statusError(err)
		}
	}
	census, err := a.b.deps.Meta.GetRepairCensus(ctx)
	if err != nil {
		return nil, statusError(fmt.Errorf("list under-replicated ledgers: %w", err))
	}
	names := a.bookieNames(ctx)
	out := &brokerv1.ListUnderReplicatedResponse{Waiting: census.Waiting, Auditor: census.Auditor, At: stamp(census.At), Compared: stamp(census.ComparedAll)}
	for _, k := range census.Absent {
		out.Absent = append(out.Absent, &brokerv1.AbsentBookie{
			Id: k.ID, StorageUuid: k.UUID.String(), Since: stamp(k.Since), Lost: stamp(k.Lost), Ledgers: k.Ledgers,
		})
	}
	for after := entry.LedgerID(req.GetAfter()); ; {
		page, err := a.b.deps.Meta.ListRepairs(ctx, after, limit+1)
		if err != nil {
			return nil, statusError(fmt.Errorf("list under-replicated ledgers: %w", err))
		}
		out.Total = uint64(page.Total)
		for _, r := range page.Repairs {
			after = r.Ledger
			if !on.IsZero() && !slices.Contains(r.Storages, on) {
				continue
			}
			if len(out.Ledgers) == limit {
				out.More = true
				return out, nil
			}
			out.Ledgers = append(out.Ledgers, a.wireRepair(ctx, r, page.Claims[r.Ledger], names))
		}
		if len(page.Repairs) <= limit {
			return out, nil
		}
	}
}

// stamp is a time for the wire; nil for none.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func (a *admin) wireRepair(ctx context.Context, r meta.Repair, worker string, names map[entry.StorageUUID]string) *brokerv1.UnderReplicatedLedger {
	out := &brokerv1.UnderReplicatedLedger{
		Ledger: uint64(r.Ledger), Since: stamp(r.Since), BelowWriteQuorum: r.Counts.BelowWriteQuorum, BelowAckQuorum: r.Counts.BelowAckQuorum,
		Unavailable: r.Counts.Unavailable, Misplaced: r.Counts.Misplaced, State: "WAITING", Doing: r.Doing, Worker: r.Worker,
		CopiedEntries: r.CopiedEntries, CopiedBytes: r.CopiedBytes,
	}
	switch {
	case worker != "":
		out.State, out.Worker = "WORKING", worker
	case r.Stuck != "":
		out.State = "STUCK"
	}
	out.Reason = r.Stuck
	for _, cause := range r.Causes.Each() {
		out.Causes = append(out.Causes, cause.String())
	}
	for _, u := range r.Storages {
		if name := names[u]; name != "" {
			out.Bookies = append(out.Bookies, name)
		} else {
			out.Bookies = append(out.Bookies, u.String())
		}
	}
	l, err := a.b.deps.Meta.GetLedger(ctx, r.Ledger)
	if err != nil {
		return out // the rest says enough
	}
	out.Chain = string(l.Chain)
	if record, err := a.b.deps.Meta.GetChain(ctx, l.Chain); err == nil {
		out.Owner = string(record.Bundle)
		if topic, err := a.b.ofChain(l.Chain, record.Bundle); err == nil {
			out.Owner = topic.name.String()
		}
	}
	return out
}

// ReleaseLedger has an open ledger closed by its owner.
func (a *admin) ReleaseLedger(ctx context.Context, req *brokerv1.ReleaseLedgerRequest) (*brokerv1.ReleaseLedgerResponse, error) {
	l, err := a.ledger(ctx, req.GetId())
	if err != nil {
		return nil, statusError(err)
	}
	if l.State == meta.LedgerClosed || l.State == meta.LedgerDeleting {
		return &brokerv1.ReleaseLedgerResponse{}, nil
	}
	if err := a.b.release(ctx, l); err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.ReleaseLedgerResponse{}, nil
}
