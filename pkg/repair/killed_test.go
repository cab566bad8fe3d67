package repair_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// mortal is a worker's way to the world, which ends before or after a certain call: with it ends the worker.
type mortal struct {
	*meta.Store
	control *bookieclient.Control
	calls   atomic.Int64
	dies    int64 // before the call of that number if odd, after it if even; 0: never
	dead    chan struct{}
}

func newMortal(w *town, dies int64) *mortal {
	return &mortal{Store: w.meta, control: w.control, dies: dies, dead: make(chan struct{})}
}

// life carries a call out, or dies.
func life[T any](ctx context.Context, m *mortal, call func() (T, error)) (T, error) {
	var none T
	if m.calls.Add(1) == m.dies {
		return none, m.die(ctx)
	}
	got, err := call()
	if m.calls.Add(1) == m.dies {
		return none, m.die(ctx)
	}
	return got, err
}

func (m *mortal) die(ctx context.Context) error {
	close(m.dead)
	<-ctx.Done()
	return ctx.Err()
}

func (m *mortal) AddIntent(ctx context.Context, id entry.LedgerID, i meta.ReplicaIntent) (meta.Ledger, error) {
	return life(ctx, m, func() (meta.Ledger, error) { return m.Store.AddIntent(ctx, id, i) })
}

func (m *mortal) SwapReplica(ctx context.Context, id entry.LedgerID, f meta.Fragment, old entry.StorageUUID, s meta.Slot, deadline time.Time) (meta.Ledger, error) {
	return life(ctx, m, func() (meta.Ledger, error) { return m.Store.SwapReplica(ctx, id, f, old, s, deadline) })
}

func (m *mortal) UpdateRepair(ctx context.Context, r meta.Repair) (meta.Repair, error) {
	return life(ctx, m, func() (meta.Repair, error) { return m.Store.UpdateRepair(ctx, r) })
}

func (m *mortal) EndRepair(ctx context.Context, r meta.Repair) error {
	_, err := life(ctx, m, func() (struct{}, error) { return struct{}{}, m.Store.EndRepair(ctx, r) })
	return err
}

func (m *mortal) ClaimRepair(ctx context.Context, id entry.LedgerID, worker string, lease repair.LeaseID) (bool, error) {
	return life(ctx, m, func() (bool, error) { return m.Store.ClaimRepair(ctx, id, worker, lease) })
}

// ListEntries, ListDamage and EndLimbo are the bookies' control calls.
func (m *mortal) ListEntries(ctx context.Context, u entry.StorageUUID, l entry.LedgerID, first, last entry.EntryID) (bookieclient.Listing, error) {
	return life(ctx, m, func() (bookieclient.Listing, error) { return m.control.ListEntries(ctx, u, l, first, last) })
}

func (m *mortal) ListDamage(ctx context.Context, u entry.StorageUUID) ([]bookieclient.Damage, error) {
	return m.control.ListDamage(ctx, u)
}

func (m *mortal) EndLimbo(ctx context.Context, u entry.StorageUUID, l entry.LedgerID) error {
	return m.control.EndLimbo(ctx, u, l)
}

// A worker is killed before and after each thing that it does; another one goes on from there, and the ledger is whole in the end.
func TestWorkerKilledAtEachStep(t *testing.T) {
	t.Parallel()
	w := newTown(t, 4)
	ghost := entry.StorageUUID{0xdd} // of no bookie that the cluster knows
	only := brisk("a")
	only.CompareEvery, only.DamageEvery = time.Hour, time.Hour
	deaths := 0
	for dies := int64(1); ; dies++ {
		f := w.fragment(0, 0, 1, 2)
		f.Slots[0] = meta.Slot{UUID: ghost}
		id := w.writeAs(plan{
			replication: three, fragments: []meta.Fragment{f}, entries: 6,
			without: func(_ entry.EntryID, u entry.StorageUUID) bool { return u == ghost },
		})
		w.check(w.meta.NoteRepair(w.ctx, meta.Repair{Ledger: id, Causes: meta.CauseLost, Since: time.Now()}))
		m := newMortal(w, dies)
		_, stop := w.run(only, func(env *repair.Env) { env.Meta, env.Control = m, m })
		gone := func() bool { _, err := w.meta.GetRepair(w.ctx, id); return err != nil }
		w.until("it is dead, or done", func() bool {
			select {
			case <-m.dead:
				return true
			default:
				return gone()
			}
		})
		stop()
		select {
		case <-m.dead:
			deaths++
		default:
			w.audit()
			if deaths < 12 {
				t.Fatalf("it could be killed %d times only", deaths)
			}
			return
		}
		next := only
		next.Worker = "b"
		_, stop = w.run(next, nil)
		w.until("another one has mended it", gone)
		stop()
		w.audit()
	}
}
