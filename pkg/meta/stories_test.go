package meta_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// B11: whatever is tried, a CLOSED ledger is not reopened and its end does not move.
func TestB11ClosedIsFinal(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	inRecovery, err := f.StartRecovery(ctx, l.ID)
	check(t, err)
	cl := closing(c, inRecovery, 6)
	cl.Recovery, cl.Term = true, inRecovery.Term
	closedChain, closed, err := f.CloseLedger(ctx, f.guard, c, cl)
	check(t, err)

	again, err := f.StartRecovery(ctx, l.ID)
	check(t, err)
	if again.State != meta.LedgerClosed || again.Rev != closed.Rev || again.Term != closed.Term {
		t.Fatalf("recovering a closed ledger gave %+v, want it as it was: %+v", again, closed)
	}
	for _, last := range []int64{2, 9} {
		for _, chain := range []meta.Chain{c, closedChain} {
			cl := closing(c, inRecovery, last)
			cl.Recovery, cl.Term = true, inRecovery.Term
			if _, _, err := f.CloseLedger(ctx, f.guard, chain, cl); err == nil {
				t.Fatalf("closed a second time, at %d", last)
			}
		}
	}
	stored, err := f.GetLedger(ctx, l.ID)
	check(t, err)
	if stored.Last != 5 || stored.Length != 60 || stored.Rev != closed.Rev {
		t.Fatalf("the end moved: %+v", stored)
	}
}

// B15: the writer is about to change its ensemble, another owner recovers the ledger meanwhile. The writer's
// change is refused, and what recovery wrote stands.
func TestB15ChangeAfterRecovery(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, writers := f.open()
	next := f.takeover()
	l, err := f.StartRecovery(ctx, writers.ID)
	check(t, err)
	cl := closing(c, l, 3)
	cl.Recovery, cl.Term = true, l.Term
	cl.Tail = []meta.Fragment{fragment(2, 1, 2, 5)}
	_, closed, err := f.CloseLedger(ctx, next, c, cl)
	check(t, err)

	_, err = f.ChangeEnsemble(ctx, writers, []meta.Fragment{fragment(0, 4, 2, 3)})
	var state *meta.LedgerStateError
	if !errors.As(err, &state) || state.Current.State != meta.LedgerClosed || state.Current.Last != 2 {
		t.Fatalf("the old writer's change: got %v, want a refusal with the closed record", err)
	}
	stored, err := f.GetLedger(ctx, writers.ID)
	check(t, err)
	want := []meta.Fragment{fragment(0, 1, 2, 3), fragment(2, 1, 2, 5)}
	if stored.Rev != closed.Rev || len(stored.Fragments) != 2 || !slices.Equal(stored.Fragments[1].Slots, want[1].Slots) {
		t.Fatalf("stored %+v, want fragments %+v", stored, want)
	}
	on, err := f.LedgersOn(ctx, storage(5))
	check(t, err)
	if !slices.Equal(on, []entry.LedgerID{writers.ID}) {
		t.Fatalf("the replacement is not in the reverse index: %v", on)
	}
}

// B16: two closes race; the loser gets the winner's end, not its own.
func TestB16SecondCloseGetsTheFirstsEnd(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	in, err := f.StartRecovery(ctx, l.ID)
	check(t, err)
	results := make([]error, 2)
	var wg sync.WaitGroup
	for i, last := range []int64{4, 8} {
		wg.Go(func() {
			cl := closing(c, in, last)
			cl.Recovery, cl.Term = true, in.Term
			_, _, results[i] = f.CloseLedger(ctx, f.guard, c, cl)
		})
	}
	wg.Wait()
	stored, err := f.GetLedger(ctx, l.ID)
	check(t, err)
	winner := 0
	if results[0] != nil {
		winner = 1
	}
	var state *meta.LedgerStateError
	if results[winner] != nil || !errors.As(results[1-winner], &state) {
		t.Fatalf("got %v and %v, want one success and one refusal", results[0], results[1])
	}
	if want := []entry.EntryID{3, 7}[winner]; stored.Last != want || state.Current.Last != want {
		t.Fatalf("stored end %d, the loser was told %d, the winner wrote %d", stored.Last, state.Current.Last, want)
	}
	chain, err := f.GetChain(ctx, f.chain)
	check(t, err)
	if chain.Runs[0].End != entry.Offset(stored.Last+1) {
		t.Fatalf("the run ends at %d, the ledger at %d", chain.Runs[0].End, stored.Last)
	}
}

// B37: a ledger that looks empty to an old owner is deleted by it; the new owner has data in it. The deletion
// is part of the chain's transaction, so the old owner deletes nothing.
func TestB37OldOwnerDeletesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	oldChain, _, err := f.CloseLedger(ctx, f.guard, c, closing(c, l, 0))
	check(t, err)
	next := f.takeover()
	now, err := f.GetChain(ctx, f.chain)
	check(t, err)
	now, _, err = f.OpenLedger(ctx, next, now, f.newLedger(), nil)
	check(t, err)

	if _, err := f.DeleteLedger(ctx, f.guard, oldChain, l.ID); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("the old owner's deletion: got %v, want %v", err, meta.ErrEpoch)
	}
	// Not with the new chain either: the epoch is not its own.
	if _, err := f.DeleteLedger(ctx, f.guard, now, l.ID); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("got %v, want %v", err, meta.ErrEpoch)
	}
	stored, err := f.GetLedger(ctx, l.ID)
	check(t, err)
	if stored.State != meta.LedgerClosed {
		t.Fatalf("the ledger is %s", stored.State)
	}
}

// B38: an owner whose list change failed goes on with a ledger that nobody lists. Here a ledger that is not in
// the chain does not exist at all, and each later change of the old owner fails too.
func TestB38NoLedgerOutsideItsChain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	f.takeover()
	orphan := f.newLedger()
	cl := closing(c, l, 5)
	if _, _, err := f.OpenLedger(ctx, f.guard, c, orphan, &cl); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("got %v, want %v", err, meta.ErrEpoch)
	}
	if _, err := f.GetLedger(ctx, orphan.ID); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("a ledger outside its chain: %v", err)
	}
	stored, err := f.GetLedger(ctx, l.ID)
	check(t, err)
	if stored.State != meta.LedgerOpen || stored.Rev != l.Rev {
		t.Fatalf("half of the transaction was applied: %+v", stored)
	}
	if _, err := f.Owned(f.guard).ChangeEnsemble(ctx, l, []meta.Fragment{fragment(0, 1, 2, 4)}); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("the old owner's later change: got %v, want %v", err, meta.ErrEpoch)
	}
	if err := f.ReleaseBundle(ctx, f.guard, "b1"); !errors.Is(err, meta.ErrEpoch) {
		t.Fatalf("the old owner's release: got %v, want %v", err, meta.ErrEpoch)
	}
}

// An ensemble change races a recovery. Either the change is first, and recovery sees its fragment; or recovery
// is first, and the writer is refused. Never is a change lost that was acknowledged.
func TestEnsembleChangeRacesRecovery(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	for round := range 20 {
		var changed, recovered meta.Ledger
		var changeErr, recoverErr error
		var wg sync.WaitGroup
		wg.Go(func() { changed, changeErr = f.ChangeEnsemble(ctx, l, []meta.Fragment{fragment(0, 1, 2, 4)}) })
		wg.Go(func() { recovered, recoverErr = f.StartRecovery(ctx, l.ID) })
		wg.Wait()
		check(t, recoverErr)
		third := recovered.Fragments[0].Slots[2].UUID
		var state *meta.LedgerStateError
		switch {
		case changeErr == nil && (changed.State != meta.LedgerOpen || third != storage(4)):
			t.Fatalf("round %d: the change was acknowledged, recovery saw %+v", round, recovered)
		case changeErr != nil && (!errors.As(changeErr, &state) || third != storage(3)):
			t.Fatalf("round %d: the change failed with %v, recovery saw %+v", round, changeErr, recovered)
		}
		cl := closing(c, recovered, 1)
		cl.Recovery, cl.Term = true, recovered.Term
		var err error
		c, l, err = f.OpenLedger(ctx, f.guard, c, f.newLedger(), &cl)
		check(t, err)
	}
}

// A replica swap between two of the writer's looks is kept by the writer's next change and close.
func TestSwapIsRebasedNotOverwritten(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	l, err := f.ChangeEnsemble(ctx, l, []meta.Fragment{fragment(0, 1, 2, 3), fragment(5, 1, 2, 4)})
	check(t, err)
	intent := meta.ReplicaIntent{Target: storage(7), Deadline: time.UnixMilli(99)}
	_, err = f.AddIntent(ctx, l.ID, intent)
	check(t, err)
	_, err = f.AddIntent(ctx, l.ID, meta.ReplicaIntent{Target: storage(8), Deadline: time.UnixMilli(99)})
	check(t, err)
	repaired, err := f.SwapReplica(ctx, l.ID, fragment(0, 1, 2, 3), storage(3), meta.Slot{UUID: storage(7), Zone: "z1"}, intent.Deadline)
	check(t, err)
	if len(repaired.Pending) != 1 || repaired.Pending[0].Target != storage(8) {
		t.Fatalf("intents after the swap: %+v", repaired.Pending)
	}

	changed, err := f.ChangeEnsemble(ctx, l, []meta.Fragment{fragment(0, 1, 2, 3), fragment(5, 1, 2, 4), fragment(9, 1, 2, 6)})
	check(t, err)
	if got := changed.Fragments[0].Slots[2].UUID; got != storage(7) || len(changed.Fragments) != 3 || len(changed.Pending) != 1 {
		t.Fatalf("the swap was overwritten: %+v", changed)
	}
	_, closed, err := f.CloseLedger(ctx, f.guard, c, closing(c, l, 12)) // as seen before all of that
	check(t, err)
	if closed.Fragments[0].Slots[2].UUID != storage(7) || len(closed.Fragments) != 3 {
		t.Fatalf("the swap was overwritten by the close: %+v", closed)
	}
	if _, err = f.DropIntent(ctx, l.ID, storage(8), 0); err != nil {
		t.Fatal(err)
	}
	for n, want := range map[byte]int{1: 1, 2: 1, 3: 0, 4: 1, 6: 1, 7: 1, 8: 0} {
		on, err := f.LedgersOn(ctx, storage(n))
		check(t, err)
		if len(on) != want {
			t.Errorf("bookie %d holds %v, want %d ledgers", n, on, want)
		}
	}
}

// Recoveries may follow each other; each has a higher term, and only the last one closes.
func TestTermsGrow(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	var mu sync.Mutex
	var terms []entry.Term
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			in, err := f.StartRecovery(ctx, l.ID)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			terms = append(terms, in.Term)
		})
	}
	wg.Wait()
	slices.Sort(terms)
	if !slices.Equal(terms, []entry.Term{1, 2, 3, 4, 5, 6, 7, 8}) {
		t.Fatalf("terms %v", terms)
	}
	in, err := f.GetLedger(ctx, l.ID)
	check(t, err)
	cl := closing(c, in, 2)
	cl.Recovery, cl.Term = true, 8
	_, _, err = f.CloseLedger(ctx, f.guard, c, cl)
	check(t, err)
}

// B10: the writer closes its ledger at its own LAC while a recovery is under way, with the record as it was before and as it is now.
// The close is refused each time, and the recovery's end, beyond that LAC, is the ledger's.
func TestB10WriterClosesDuringRecovery(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	in, err := f.StartRecovery(ctx, l.ID)
	check(t, err)
	for _, seen := range []meta.Ledger{l, in} {
		var state *meta.LedgerStateError
		if _, _, err := f.CloseLedger(ctx, f.guard, c, closing(c, seen, 3)); !errors.As(err, &state) || state.Current.State != meta.LedgerInRecovery {
			t.Fatalf("the writer's close: got %v, want a refusal with the record in recovery", err)
		}
	}
	cl := closing(c, in, 5)
	cl.Recovery, cl.Term = true, in.Term
	_, closed, err := f.CloseLedger(ctx, f.guard, c, cl)
	check(t, err)
	if closed.State != meta.LedgerClosed || closed.Last != 4 {
		t.Fatalf("closed as %+v, want its end at 4", closed)
	}
}
