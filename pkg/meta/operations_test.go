package meta_test

import (
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

var noon = time.UnixMilli(1_800_000_000_000)

// bookie makes bookie "k<n>" with its cookie, and registers it.
func (f *fixture) bookie(n byte) string {
	f.t.Helper()
	id := "k" + string('0'+n)
	check(f.t, f.CreateCookie(f.t.Context(), meta.Cookie{ID: id, UUID: storage(n)}))
	check(f.t, f.RegisterBookie(f.t.Context(), meta.BookieInfo{ID: id, UUID: storage(n)}, f.lease, 0))
	return id
}

// A marked bookie is draining to all who look for bookies, though it registers anew, until the mark is lifted.
func TestAMarkOutlivesARegistration(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c := newCache(t, f.Store)
	id := f.bookie(1)
	draining := func(want bool) {
		t.Helper()
		await(t, c, meta.KindBookies, "draining", func() bool {
			b, ok := c.Bookie(storage(1))
			return ok && b.Draining == want && len(c.Bookies()) == 1 && c.Bookies()[0] == b
		})
	}
	draining(false)
	m, err := f.MarkMaintenance(ctx, id, noon)
	check(t, err)
	if m.UUID != storage(1) || m.Bookie != id || m.Kind != meta.MarkMaintenance || !m.Since.Equal(noon) || m.Empties() {
		t.Fatalf("marked %+v", m)
	}
	again, err := f.MarkMaintenance(ctx, id, noon.Add(time.Hour))
	check(t, err)
	if again != m {
		t.Fatalf("marked twice: %+v, then %+v", m, again)
	}
	draining(true)
	check(t, f.DeregisterBookie(ctx, storage(1), f.lease))
	await(t, c, meta.KindBookies, "the bookie's end", func() bool { _, ok := c.Bookie(storage(1)); return !ok })
	if got, ok := c.Mark(storage(1)); !ok || got != m {
		t.Fatalf("the mark went with the registration: %+v", got)
	}
	check(t, f.RegisterBookie(ctx, meta.BookieInfo{ID: id, UUID: storage(1)}, f.lease, 0))
	draining(true)
	check(t, f.LiftMaintenance(ctx, id))
	check(t, f.LiftMaintenance(ctx, id))
	draining(false)
	if all, err := f.ListMarks(ctx); err != nil || len(all) != 0 || len(c.Marks()) != 0 {
		t.Fatalf("marks %v, %v", all, err)
	}
	if _, err := f.MarkMaintenance(ctx, "nobody", noon); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("marked nobody: %v", err)
	}
}

func (f *fixture) start(id string, kind meta.OperationKind) meta.Operation {
	f.t.Helper()
	op, err := f.StartOperation(f.t.Context(), meta.Operation{
		Kind: kind, Bookie: id, Ledgers: 7, Bytes: 700, Created: noon,
		OperationOptions: meta.OperationOptions{Rate: 1 << 20, PauseAboveP99: 50 * time.Millisecond, RelaxZones: true},
	})
	check(f.t, err)
	return op
}

// An operation's record and its mark come and go together.
func TestOperations(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c := newCache(t, f.Store)
	id := f.bookie(1)
	_, err := f.MarkMaintenance(ctx, id, noon)
	check(t, err)

	op := f.start(id, meta.OperationDecommission)
	if op.UUID != storage(1) || op.State != meta.OperationPlanned || op.LedgersLeft != 7 || op.BytesLeft != 700 || !op.MayCopy() ||
		op.PauseAboveP99 != 50*time.Millisecond || op.Rate != 1<<20 || !op.RelaxZones || !op.Created.Equal(noon) {
		t.Fatalf("started %+v", op)
	}
	if m, err := f.GetMark(ctx, storage(1)); err != nil || m.Kind != meta.MarkEmptying || m.Operation != op.ID || !m.Empties() {
		t.Fatalf("mark %+v, %v", m, err)
	}
	var marked *meta.MarkedError
	if _, err := f.StartOperation(ctx, meta.Operation{Kind: meta.OperationRecover, Bookie: id}); !errors.As(err, &marked) || marked.Mark.Operation != op.ID {
		t.Fatalf("a second operation of one bookie: %v", err)
	}
	if err := f.LiftMaintenance(ctx, id); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("an operation's mark was lifted: %v", err)
	}
	if _, err := f.MarkMaintenance(ctx, id, noon); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("an operation's mark was replaced: %v", err)
	}

	// Its record is changed by who saw it last.
	stale := op
	op.State, op.LedgersLeft, op.Held, op.Paused, op.Runner = meta.OperationCopying, 3, "publishing is slow", true, "b1"
	op.Blocked, op.Blocks = 1, []meta.OperationBlock{{Ledger: 91, Owner: "public/default/orders", Reason: "no bookie in zone c"}}
	op, err = f.UpdateOperation(ctx, op)
	check(t, err)
	got, err := f.GetOperation(ctx, op.ID)
	check(t, err)
	if got.State != op.State || got.LedgersLeft != 3 || got.MayCopy() || got.Blocks[0] != op.Blocks[0] || got.Rev != op.Rev {
		t.Fatalf("stored %+v, want %+v", got, op)
	}
	if _, err := f.UpdateOperation(ctx, stale); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("a stale update: %v", err)
	}
	await(t, c, meta.KindOperations, "the operation", func() bool { o, ok := c.Operation(op.ID); return ok && o.LedgersLeft == 3 })
	for _, state := range []meta.OperationState{meta.OperationDone, meta.OperationCancelled} {
		over := op
		over.State = state
		if _, err := f.UpdateOperation(ctx, over); !errors.Is(err, meta.ErrInvalid) {
			t.Fatalf("it was ended by an update: %v", err)
		}
	}
	if err := f.ForgetOperation(ctx, op); !errors.Is(err, meta.ErrInvalid) {
		t.Fatalf("it was forgotten while it ran: %v", err)
	}

	// Cancelled, it leaves nothing but its record, and who ran it can't go on.
	stale = op
	op.State, op.Ended = meta.OperationCancelled, noon
	op, err = f.EndOperation(ctx, op)
	check(t, err)
	if _, err := f.GetMark(ctx, storage(1)); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("the mark of a cancelled operation: %v", err)
	}
	if _, err := f.FinishOperation(ctx, stale); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("a cancelled operation retired a bookie: %v", err)
	}
	if _, err := f.GetCookie(ctx, id); err != nil {
		t.Fatalf("its cookie: %v", err)
	}
	second := f.start(id, meta.OperationRecover)
	if m, err := f.GetMark(ctx, storage(1)); err != nil || m.Kind != meta.MarkDead {
		t.Fatalf("mark %+v, %v", m, err)
	}
	all, err := f.ListOperations(ctx)
	check(t, err)
	if len(all) != 2 {
		t.Fatalf("operations %+v", all)
	}
	check(t, f.ForgetOperation(ctx, op))
	if all, err = f.ListOperations(ctx); err != nil || len(all) != 1 || all[0].ID != second.ID {
		t.Fatalf("operations %+v, %v", all, err)
	}
	await(t, c, meta.KindOperations, "the forgotten operation's end", func() bool { return len(c.Operations()) == 1 })
	if _, err := f.GetOperation(ctx, op.ID); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("the forgotten operation: %v", err)
	}
}

// The transaction that ends an operation retires its identity, and it is refused while anything names that.
func TestAnOperationFinishesWithoutReferencesOnly(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	f.bookie(4)
	id := f.bookie(1)
	c, l := f.open() // on 1, 2 and 3
	op := f.start(id, meta.OperationDecommission)
	finish := func() (meta.Operation, error) {
		op.Ended = noon
		return f.FinishOperation(ctx, op)
	}
	refused := func(why string) {
		t.Helper()
		if _, err := finish(); !errors.Is(err, meta.ErrNotEmpty) {
			t.Fatalf("it finished though %s: %v", why, err)
		}
		if got, err := f.GetOperation(ctx, op.ID); err != nil || got.Over() {
			t.Fatalf("the operation: %+v, %v", got, err)
		}
	}
	refused("an open ledger without an entry names the bookie")
	l, err := f.ChangeEnsemble(ctx, l, []meta.Fragment{fragment(0, 4, 2, 3)})
	check(t, err)
	c, err2 := f.closeAfter(c, l, 1)
	check(t, err2)
	deadline := noon.Add(time.Minute)
	_, err = f.AddIntent(ctx, l.ID, meta.ReplicaIntent{Target: storage(1), Deadline: deadline})
	check(t, err)
	refused("an intent names the bookie")
	_, err = f.DropIntent(ctx, l.ID, storage(1), 0)
	check(t, err)
	done, err := finish()
	check(t, err)
	if done.State != meta.OperationDone || !done.Ended.Equal(noon) {
		t.Fatalf("finished %+v", done)
	}
	if again, err := finish(); err != nil || again.State != meta.OperationDone {
		t.Fatalf("finished twice: %+v, %v", again, err)
	}
	if _, err := f.GetMark(ctx, storage(1)); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("the mark of a retired identity: %v", err)
	}
	if err := f.CreateCookie(ctx, meta.Cookie{ID: id, UUID: storage(1)}); !errors.Is(err, meta.ErrRetired) {
		t.Fatalf("the identity lives on: %v", err)
	}
	check(t, f.CreateCookie(ctx, meta.Cookie{ID: id, UUID: entry.StorageUUID{77}}))
	_ = c
}

// closeAfter closes l after n entries.
func (f *fixture) closeAfter(c meta.Chain, l meta.Ledger, n int64) (meta.Chain, error) {
	c, _, err := f.CloseLedger(f.t.Context(), f.guard, c, closing(c, l, n))
	return c, err
}

// A role has one holder, until that gives it back or its lease ends.
func TestRoles(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	first, second := newLease(t), newLease(t)
	claim := func(lease clientv3.LeaseID, want bool) {
		t.Helper()
		got, err := f.ClaimRole(ctx, "operations", "b", lease)
		check(t, err)
		if got != want {
			t.Fatalf("claimed under lease %d: %v, want %v", lease, got, want)
		}
	}
	claim(first, true)
	claim(first, true)
	claim(second, false)
	check(t, f.ReleaseRole(ctx, "operations", second))
	claim(second, false)
	check(t, f.ReleaseRole(ctx, "operations", first))
	claim(second, true)
	_, err := etcd.Client().Revoke(ctx, second)
	check(t, err)
	claim(first, true)
	for _, gone := range []clientv3.LeaseID{second, clientv3.NoLease} {
		if _, err := f.ClaimRole(ctx, "another", "b", gone); !errors.Is(err, meta.ErrLease) {
			t.Fatalf("claimed under no lease: %v", err)
		}
	}
}
