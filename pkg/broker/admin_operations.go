package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/operation"
)

// changeAttempts bounds how often a change of an operation is tried: whoever runs it writes it, too.
const changeAttempts = 20

// cookie finds a bookie by id or by the identity of its data. One that is retired has none.
func (a *admin) cookie(ctx context.Context, name string) (meta.Cookie, error) {
	if u, err := entry.ParseUUID(name); err == nil {
		all, err := a.b.deps.Meta.ListCookies(ctx)
		if err != nil {
			return meta.Cookie{}, err //nolint:wrapcheck // it says what of
		}
		if i := slices.IndexFunc(all, func(c meta.Cookie) bool { return c.UUID == u }); i >= 0 {
			return all[i], nil
		}
	} else if c, err := a.b.deps.Meta.GetCookie(ctx, name); !errors.Is(err, meta.ErrNotFound) {
		return c, err //nolint:wrapcheck // it names the bookie
	}
	return meta.Cookie{}, refuse(brokerv1.Code_CODE_NOT_FOUND, "there is no bookie %q: penstock bookie list", name)
}

// bookieInfo is what is listed of a bookie.
func (a *admin) bookieInfo(ctx context.Context, c meta.Cookie) (*brokerv1.BookieInfo, meta.Holdings, error) {
	held, err := a.b.deps.Meta.Holdings(ctx, c.UUID)
	if err != nil {
		return nil, held, fmt.Errorf("list ledgers of bookie %s: %w", c.ID, err)
	}
	info := &brokerv1.BookieInfo{Id: c.ID, StorageUuid: c.UUID.String(), State: "OFFLINE", Ledgers: uint64(len(held.Ledgers))}
	if m, ok := a.b.deps.Cache.Mark(c.UUID); ok {
		info.Mark, info.Operation = m.Kind.String(), m.Operation
	}
	if c.Retired {
		info.State = "RETIRED"
	} else if k, ok := a.b.deps.Cache.Bookie(c.UUID); ok {
		info.State, info.Address, info.Http, info.Zone, info.Host = k.State.String(), k.Data, k.HTTP, k.Zone, k.Host
		info.FreeBytes, info.TotalBytes, info.Sync, info.Version = k.FreeBytes, k.TotalBytes, k.Sync, k.Version
	}
	return info, held, nil
}

// DescribeBookie tells what a bookie has.
func (a *admin) DescribeBookie(ctx context.Context, req *brokerv1.DescribeBookieRequest) (*brokerv1.DescribeBookieResponse, error) {
	c, err := a.cookie(ctx, req.GetBookie())
	if err != nil {
		return nil, statusError(err)
	}
	info, held, err := a.bookieInfo(ctx, c)
	if err != nil {
		return nil, statusError(err)
	}
	out := &brokerv1.DescribeBookieResponse{Bookie: info, DeletingLedgers: uint64(len(held.Deleting))}
	err = a.b.eachLedger(ctx, held.Ledgers, func(l meta.Ledger) {
		if operation.OpenOn(l, c.UUID) {
			out.OpenLedgers++
		}
		out.EntryBytes += uint64(operation.BytesOn(l, c.UUID))
	})
	if err != nil {
		return nil, statusError(fmt.Errorf("describe bookie %s: %w", c.ID, err))
	}
	if m, ok := a.b.deps.Cache.Mark(c.UUID); ok {
		out.Marked = timestamppb.New(m.Since)
	}
	return out, nil
}

// DrainBookie marks a bookie for maintenance, or ends that.
func (a *admin) DrainBookie(ctx context.Context, req *brokerv1.DrainBookieRequest) (*brokerv1.DrainBookieResponse, error) {
	c, err := a.cookie(ctx, req.GetBookie())
	if err != nil {
		return nil, statusError(err)
	}
	if req.GetUndo() {
		err = a.b.deps.Meta.LiftMaintenance(ctx, c.ID)
	} else {
		_, err = a.b.deps.Meta.MarkMaintenance(ctx, c.ID, time.Now())
	}
	if err != nil {
		return nil, statusError(marked(err))
	}
	out := &brokerv1.DrainBookieResponse{}
	ids, err := a.b.deps.Meta.LedgersOn(ctx, c.UUID)
	if err == nil {
		err = a.b.eachLedger(ctx, ids, func(l meta.Ledger) {
			if operation.OpenOn(l, c.UUID) {
				out.OpenLedgers++
			}
		})
	}
	if err != nil {
		return nil, statusError(fmt.Errorf("bookie %s is marked, but what it has could not be read: %w", c.ID, err))
	}
	return out, nil
}

// marked makes the conflict with an operation a refusal that names it.
func marked(err error) error {
	var by *meta.MarkedError
	if errors.As(err, &by) {
		return refuse(brokerv1.Code_CODE_REFUSED, "operation %s empties bookie %s: penstock op watch %s, or op cancel", by.Mark.Operation, by.Mark.Bookie, by.Mark.Operation)
	}
	return err
}

// StartOperation begins an operation, or says what it would do.
func (a *admin) StartOperation(ctx context.Context, req *brokerv1.StartOperationRequest) (*brokerv1.StartOperationResponse, error) {
	kind := meta.OperationKind(req.GetKind())
	if kind != meta.OperationDecommission && kind != meta.OperationRecover {
		return nil, statusError(invalid("start operation on bookie %q: unknown kind %d", req.GetBookie(), req.GetKind()))
	}
	o := req.GetOptions()
	options := meta.OperationOptions{Rate: int64(min(o.GetRate(), 1<<50)), PauseAboveP99: o.GetPauseAboveP99().AsDuration(), RelaxZones: o.GetRelaxZones()}
	if options.PauseAboveP99 < 0 {
		return nil, statusError(invalid("start operation on bookie %q: a p99 of %s is below 0", req.GetBookie(), options.PauseAboveP99))
	}
	c, err := a.cookie(ctx, req.GetBookie())
	if err != nil {
		return nil, statusError(err)
	}
	if c.Retired {
		return nil, statusError(refuse(brokerv1.Code_CODE_REFUSED, "%s bookie %s: storage %s is retired already", kind, c.ID, c.UUID))
	}
	plan, err := a.plan(ctx, operation.Request{Kind: kind, Bookie: c, OperationOptions: options})
	if err != nil {
		return nil, statusError(fmt.Errorf("plan to %s bookie %s: %w", kind, c.ID, err))
	}
	out := &brokerv1.StartOperationResponse{Plan: wirePlan(plan)}
	if req.GetDryRun() {
		return out, nil
	}
	if bad := plan.Refused(); len(bad) > 0 {
		texts := make([]string, len(bad))
		for i, k := range bad {
			texts[i] = k.Text + " (" + k.Advice + ")"
		}
		return nil, statusError(refuse(brokerv1.Code_CODE_REFUSED, "%s bookie %s: not so: %s", kind, c.ID, strings.Join(texts, "; ")))
	}
	op, err := a.b.deps.Meta.StartOperation(ctx, meta.Operation{
		Kind: kind, Bookie: c.ID, OperationOptions: options, Ledgers: int64(plan.Ledgers), Bytes: plan.Bytes, Created: time.Now(),
	})
	if err != nil {
		return nil, statusError(marked(err))
	}
	a.b.log.Info("operation is started", "operation", op.ID, "kind", kind, "bookie", c.ID, "ledgers", op.Ledgers, "bytes", op.Bytes)
	out.Operation = wireOperation(op)
	return out, nil
}

func (a *admin) plan(ctx context.Context, r operation.Request) (operation.Plan, error) {
	held, err := a.b.deps.Meta.Holdings(ctx, r.Bookie.UUID)
	if err != nil {
		return operation.Plan{}, err //nolint:wrapcheck // it says what of
	}
	var ledgers []meta.Ledger
	if err := a.b.eachLedger(ctx, held.Ledgers, func(l meta.Ledger) { ledgers = append(ledgers, l) }); err != nil {
		return operation.Plan{}, err
	}
	c := operation.Cluster{Bookies: a.b.deps.Cache.Bookies(), WriteQuorum: a.b.cfg.Replication.WriteQuorum}
	if c.Cookies, err = a.b.deps.Meta.ListCookies(ctx); err != nil {
		return operation.Plan{}, err //nolint:wrapcheck // it says what of
	}
	for _, ns := range a.b.deps.Cache.Namespaces() {
		if rep, err := ns.Policies.Replication(a.b.cfg.Replication); err == nil {
			c.WriteQuorum = max(c.WriteQuorum, rep.WriteQuorum)
		}
	}
	repairs, err := a.b.deps.Meta.ListRepairs(ctx, 0, 1)
	if err != nil {
		return operation.Plan{}, err //nolint:wrapcheck // it says what of
	}
	c.Damaged = repairs.Total
	m, err := a.b.deps.Meta.GetMark(ctx, r.Bookie.UUID)
	if err == nil {
		c.Marked = &m
	}
	return operation.MakePlan(r, c, ledgers), ignoring(err, meta.ErrNotFound)
}

func wirePlan(p operation.Plan) *brokerv1.OperationPlan {
	out := &brokerv1.OperationPlan{
		Bookie: p.Bookie.ID, StorageUuid: p.Bookie.UUID.String(), Ledgers: uint64(p.Ledgers), Bytes: uint64(p.Bytes), Targets: p.Targets, Zones: p.Zones,
	}
	for _, c := range p.Checks {
		out.Checks = append(out.Checks, &brokerv1.PlanCheck{Text: c.Text, Ok: c.OK, Advice: c.Advice})
	}
	return out
}

func wireOperation(o meta.Operation) *brokerv1.Operation {
	out := &brokerv1.Operation{
		Id: o.ID, Kind: brokerv1.OperationKind(o.Kind), State: o.State.String(), Bookie: o.Bookie, StorageUuid: o.UUID.String(),
		Options: &brokerv1.OperationOptions{Rate: uint64(o.Rate), RelaxZones: o.RelaxZones},
		Paused:  o.Paused, Held: o.Held, Ledgers: uint64(o.Ledgers), Bytes: uint64(o.Bytes), LedgersLeft: uint64(o.LedgersLeft), BytesLeft: uint64(o.BytesLeft),
		OpenLeft: uint64(o.OpenLeft), Speed: uint64(o.Speed), Blocked: uint64(o.Blocked), Runner: o.Runner, Error: o.Error,
	}
	if o.PauseAboveP99 > 0 {
		out.Options.PauseAboveP99 = durationpb.New(o.PauseAboveP99)
	}
	for _, b := range o.Blocks {
		out.Blocks = append(out.Blocks, &brokerv1.OperationBlock{Ledger: uint64(b.Ledger), Owner: b.Owner, Reason: b.Reason})
	}
	for _, at := range []struct {
		from time.Time
		to   **timestamppb.Timestamp
	}{{o.Created, &out.Created}, {o.Updated, &out.Updated}, {o.Ended, &out.Ended}} {
		if !at.from.IsZero() {
			*at.to = timestamppb.New(at.from)
		}
	}
	return out
}

// ListOperations lists operations, oldest first.
func (a *admin) ListOperations(ctx context.Context, _ *brokerv1.ListOperationsRequest) (*brokerv1.ListOperationsResponse, error) {
	all, err := a.b.deps.Meta.ListOperations(ctx)
	if err != nil {
		return nil, statusError(err)
	}
	out := &brokerv1.ListOperationsResponse{}
	for _, o := range all {
		out.Operations = append(out.Operations, wireOperation(o))
	}
	return out, nil
}

// GetOperation returns one operation.
func (a *admin) GetOperation(ctx context.Context, req *brokerv1.GetOperationRequest) (*brokerv1.GetOperationResponse, error) {
	o, err := a.operation(ctx, req.GetId())
	if err != nil {
		return nil, statusError(err)
	}
	return &brokerv1.GetOperationResponse{Operation: wireOperation(o)}, nil
}

func (a *admin) operation(ctx context.Context, id string) (meta.Operation, error) {
	o, err := a.b.deps.Meta.GetOperation(ctx, id)
	if errors.Is(err, meta.ErrNotFound) {
		return o, refuse(brokerv1.Code_CODE_NOT_FOUND, "there is no operation %q, or no longer: penstock op list", id)
	}
	return o, err //nolint:wrapcheck // it names the operation
}

// ChangeOperation pauses, resumes or cancels an operation.
func (a *admin) ChangeOperation(ctx context.Context, req *brokerv1.ChangeOperationRequest) (*brokerv1.ChangeOperationResponse, error) {
	for attempt := 1; ; attempt++ {
		o, err := a.operation(ctx, req.GetId())
		if err != nil {
			return nil, statusError(err)
		}
		if o.Over() {
			return nil, statusError(refuse(brokerv1.Code_CODE_REFUSED, "operation %s is %s", o.ID, o.State))
		}
		switch req.GetChange() {
		case brokerv1.OperationChange_OPERATION_CHANGE_PAUSE, brokerv1.OperationChange_OPERATION_CHANGE_RESUME:
			o.Paused = req.GetChange() == brokerv1.OperationChange_OPERATION_CHANGE_PAUSE
			o, err = a.b.deps.Meta.UpdateOperation(ctx, o)
		case brokerv1.OperationChange_OPERATION_CHANGE_CANCEL:
			o.State, o.Ended, o.Updated = meta.OperationCancelled, time.Now(), time.Now()
			o, err = a.b.deps.Meta.EndOperation(ctx, o)
		case brokerv1.OperationChange_OPERATION_CHANGE_UNSPECIFIED:
			fallthrough
		default:
			err = invalid("change operation %s: unknown change %d", o.ID, req.GetChange())
		}
		if errors.Is(err, meta.ErrConflict) && attempt < changeAttempts {
			continue // whoever runs it has written it since
		}
		if err != nil {
			return nil, statusError(err)
		}
		a.b.log.Info("operation is changed", "operation", o.ID, "change", req.GetChange(), "state", o.State)
		return &brokerv1.ChangeOperationResponse{Operation: wireOperation(o)}, nil
	}
}
