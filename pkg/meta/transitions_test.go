package meta_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// The life of a chain: open, roll twice, trim the middle, delete; the records follow at each step.
func TestLifeOfAChain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, first := f.open()
	if first.State != meta.LedgerOpen || first.Nonce == 0 || first.Chain != f.chain || first.Last != entry.NoEntry {
		t.Fatalf("T1 wrote %+v", first)
	}
	cl := closing(c, first, 7)
	c, second, err := f.OpenLedger(ctx, f.guard, c, f.newLedger(), &cl)
	check(t, err)
	cl = closing(c, second, 3)
	c, third, err := f.OpenLedger(ctx, f.guard, c, f.newLedger(), &cl)
	check(t, err)
	if got := c.Runs[2].First; got != 10 {
		t.Fatalf("the third run begins at offset %d, want 10", got)
	}
	c, err = f.DeleteLedger(ctx, f.guard, c, second.ID) // not a prefix
	check(t, err)
	stored, err := f.GetChain(ctx, f.chain)
	check(t, err)
	want := []meta.Run{
		{Ledger: first.ID, First: 0, Closed: true, End: 7, MaxTime: 1007, Bytes: 70},
		{Ledger: third.ID, First: 10},
	}
	if !slices.Equal(stored.Runs, want) || !slices.Equal(c.Runs, want) || stored.Rev != c.Rev {
		t.Fatalf("stored %+v, returned %+v, want runs %+v", stored, c, want)
	}
	gone, err := f.GetLedger(ctx, second.ID)
	check(t, err)
	if gone.State != meta.LedgerDeleting || len(gone.Fragments) != 1 {
		t.Fatalf("a deleted ledger's record is %+v", gone)
	}

	// Holders confirm; only the last one makes a tombstone, and the reverse index follows.
	for n := byte(1); n <= 3; n++ {
		on, err := f.LedgersOn(ctx, storage(n))
		check(t, err)
		if !slices.Contains(on, second.ID) {
			t.Fatalf("bookie %d is no holder before it confirmed: %v", n, on)
		}
		h, err := f.Holdings(ctx, storage(n))
		check(t, err)
		now, err := f.Revision(ctx)
		check(t, err)
		if !slices.Equal(h.Ledgers, on) || !slices.Equal(h.Deleting, []entry.LedgerID{second.ID}) || h.Revision < gone.Rev || h.Revision > now {
			t.Fatalf("bookie %d holds %+v, record is of revision %d, etcd at %d", n, h, gone.Rev, now)
		}
		check(t, f.ConfirmDeleted(ctx, second.ID, storage(n)))
		check(t, f.ConfirmDeleted(ctx, second.ID, storage(n)))
		on, err = f.LedgersOn(ctx, storage(n))
		check(t, err)
		if !slices.Equal(on, []entry.LedgerID{first.ID, third.ID}) {
			t.Fatalf("bookie %d holds %v", n, on)
		}
		gone, err := f.GetLedger(ctx, second.ID)
		check(t, err)
		if (len(gone.Fragments) == 0) != (n == 3) {
			t.Fatalf("after %d confirmations the record is %+v", n, gone)
		}
	}

	// Trimmed to nothing, the chain keeps its floor and its last ledger.
	cl = closing(c, third, 0)
	c, _, err = f.CloseLedger(ctx, f.guard, c, cl)
	check(t, err)
	for _, id := range []entry.LedgerID{third.ID, first.ID} {
		c, err = f.DeleteLedger(ctx, f.guard, c, id)
		check(t, err)
	}
	if len(c.Runs) != 0 || c.NextOffset != 10 || c.LastLedger != third.ID {
		t.Fatalf("trimmed to nothing: %+v", c)
	}
	c, fourth, err := f.OpenLedger(ctx, f.guard, c, f.newLedger(), nil)
	check(t, err)
	if c.Runs[0].First != 10 || fourth.ID <= third.ID {
		t.Fatalf("opened again: %+v", c)
	}
	all, err := f.ListLedgers(ctx, 0, 100)
	check(t, err)
	if len(all) != 4 || all[1].ID != second.ID {
		t.Fatalf("listed %d ledgers", len(all))
	}
}

// A repair's target holds copies of a ledger that is being deleted, and confirms like others: an intent that ended then would
// take its ledger from it, and, were it the last one, leave the record without anybody whose word makes a tombstone of it.
func TestIntentsOfDeletedLedgersStay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c, l := f.open()
	c, l, err := f.CloseLedger(ctx, f.guard, c, closing(c, l, 4))
	check(t, err)
	_, err = f.AddIntent(ctx, l.ID, meta.ReplicaIntent{Target: storage(7)})
	check(t, err)
	_, err = f.DeleteLedger(ctx, f.guard, c, l.ID)
	check(t, err)
	for n := byte(1); n <= 3; n++ {
		check(t, f.ConfirmDeleted(ctx, l.ID, storage(n)))
	}
	_, err = f.DropIntent(ctx, l.ID, storage(7), 0)
	check(t, err)
	if on, err := f.LedgersOn(ctx, storage(7)); err != nil || !slices.Contains(on, l.ID) {
		t.Fatalf("the target holds %v, error %v", on, err)
	}
	check(t, f.ConfirmDeleted(ctx, l.ID, storage(7)))
	if gone, err := f.GetLedger(ctx, l.ID); err != nil || len(gone.Fragments) != 0 {
		t.Fatalf("all have confirmed, and the record is %+v, error %v", gone, err)
	}
}

// Each guard of each transition, refused.
func TestGuards(t *testing.T) {
	t.Parallel()
	type state struct {
		*fixture
		c meta.Chain
		l meta.Ledger
	}
	closeIt := func(s *state) {
		cl := closing(s.c, s.l, 4)
		var err error
		s.c, s.l, err = s.CloseLedger(s.t.Context(), s.guard, s.c, cl)
		check(s.t, err)
	}
	recoverIt := func(s *state) meta.Ledger {
		l, err := s.StartRecovery(s.t.Context(), s.l.ID)
		check(s.t, err)
		return l
	}
	retire := func(s *state, n byte) {
		id := fmt.Sprintf("k%d", n)
		check(s.t, s.CreateCookie(s.t.Context(), meta.Cookie{ID: id, UUID: storage(n)}))
		check(s.t, s.RetireStorage(s.t.Context(), id, storage(n)))
	}
	intend := func(s *state, n byte, deadline int64) {
		_, err := s.AddIntent(s.t.Context(), s.l.ID, meta.ReplicaIntent{Target: storage(n), Deadline: time.UnixMilli(deadline)})
		check(s.t, err)
	}
	stateErr := func(want meta.LedgerState) func(error) bool {
		return func(err error) bool {
			var e *meta.LedgerStateError
			return errors.As(err, &e) && e.Current.State == want && e.Current.Rev != 0
		}
	}
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	recovery := func(s *state, l meta.Ledger) meta.Closing {
		cl := closing(s.c, l, 2)
		cl.Recovery, cl.Term = true, l.Term
		return cl
	}

	for _, tc := range []struct {
		name string
		do   func(*state) error
		want func(error) bool
	}{
		{"T1 by an old owner", func(s *state) error {
			closeIt(s)
			s.takeover()
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), nil)
			return err
		}, is(meta.ErrEpoch)},
		{"T1 by an owner that never was", func(s *state) error {
			closeIt(s)
			_, _, err := s.OpenLedger(s.t.Context(), meta.Guard{Bundle: bundle, Epoch: s.guard.Epoch + 1}, s.c, s.newLedger(), nil)
			return err
		}, is(meta.ErrEpoch)},
		{"T1 with epoch 0", func(s *state) error {
			closeIt(s)
			_, _, err := s.OpenLedger(s.t.Context(), meta.Guard{Bundle: "public/default/9"}, s.c, s.newLedger(), nil)
			return err
		}, is(meta.ErrEpoch)},
		{"T1 on a chain read before a change", func(s *state) error {
			old := s.c
			closeIt(s)
			old.Runs = slices.Clone(s.c.Runs)
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, old, s.newLedger(), nil)
			return err
		}, is(meta.ErrConflict)},
		{"T1 creating a chain that exists", func(s *state) error {
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, meta.Chain{ID: s.chain}, s.newLedger(), nil)
			return err
		}, is(meta.ErrConflict)},
		{"T1 while the previous ledger is open", func(s *state) error {
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), nil)
			return err
		}, is(meta.ErrInvalid)},
		{"T1 with an id that is taken", func(s *state) error {
			other, err := s.CreateTopic(s.t.Context(), "public/default/other", 0)
			check(s.t, err)
			taken := s.newLedger()
			taken.ID = s.l.ID
			_, _, err = s.OpenLedger(s.t.Context(), s.guard, meta.Chain{ID: meta.DataChain(other.UUID, 0)}, taken, nil)
			return err
		}, is(meta.ErrExists)},
		{"T1 with an id below the chain's last", func(s *state) error {
			low := s.l.ID
			closeIt(s)
			l := s.newLedger()
			l.ID = low
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, l, nil)
			return err
		}, is(meta.ErrLedgerOrder)},
		{"T1 naming a retired identity", func(s *state) error {
			closeIt(s)
			retire(s, 8)
			l := s.newLedger()
			l.Fragments = []meta.Fragment{fragment(0, 1, 2, 8)}
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, l, nil)
			return err
		}, is(meta.ErrRetired)},
		{"T1 naming a bookie twice", func(s *state) error {
			closeIt(s)
			l := s.newLedger()
			l.Fragments = []meta.Fragment{fragment(0, 1, 2, 2)}
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, l, nil)
			return err
		}, is(meta.ErrInvalid)},
		{"T1 for a topic that is being deleted", func(s *state) error {
			closeIt(s)
			s.guard.Topic = &s.topic
			_, err := s.MarkTopicDeleting(s.t.Context(), s.topic.Name)
			check(s.t, err)
			_, _, err = s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), nil)
			return err
		}, is(meta.ErrDeleting)},
		{"T1 with T3 for a topic that is being deleted", func(s *state) error {
			s.guard.Topic = &s.topic
			_, err := s.MarkTopicDeleting(s.t.Context(), s.topic.Name)
			check(s.t, err)
			cl := closing(s.c, s.l, 4)
			_, _, err = s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), &cl)
			return err
		}, is(meta.ErrDeleting)},
		{"T1 for a topic that is gone", func(s *state) error {
			s.guard.Topic = s.gone()
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, meta.Chain{ID: meta.DataChain(s.guard.Topic.UUID, 0)}, s.newLedger(), nil)
			return err
		}, is(meta.ErrNotFound)},
		{"T1 for a topic that was created anew", func(s *state) error {
			s.guard.Topic = s.gone()
			_, err := s.CreateTopic(s.t.Context(), s.guard.Topic.Name, 0)
			check(s.t, err)
			_, _, err = s.OpenLedger(s.t.Context(), s.guard, meta.Chain{ID: meta.DataChain(s.guard.Topic.UUID, 0)}, s.newLedger(), nil)
			return err
		}, is(meta.ErrNotFound)},
		{"T1 for another topic's chain", func(s *state) error {
			closeIt(s)
			s.guard.Topic = s.gone()
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), nil)
			return err
		}, is(meta.ErrInvalid)},
		{"T1 with quorums that can't be", func(s *state) error {
			closeIt(s)
			l := s.newLedger()
			l.WriteQuorum = 4
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, l, nil)
			return err
		}, is(meta.ErrInvalid)},

		{"T2 in recovery", func(s *state) error {
			recoverIt(s)
			_, err := s.ChangeEnsemble(s.t.Context(), s.l, []meta.Fragment{fragment(0, 1, 2, 4)})
			return err
		}, stateErr(meta.LedgerInRecovery)},
		{"T2 when closed", func(s *state) error {
			l := s.l
			closeIt(s)
			_, err := s.ChangeEnsemble(s.t.Context(), l, []meta.Fragment{fragment(0, 1, 2, 4)})
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T2 by another writer", func(s *state) error {
			s.l.Nonce++
			s.l.Rev-- // as a writer that saw something else
			_, err := s.ChangeEnsemble(s.t.Context(), s.l, []meta.Fragment{fragment(0, 1, 2, 4)})
			return err
		}, stateErr(meta.LedgerOpen)},
		{"T2 naming a retired identity", func(s *state) error {
			retire(s, 8)
			_, err := s.ChangeEnsemble(s.t.Context(), s.l, []meta.Fragment{fragment(0, 1, 2, 8)})
			return err
		}, is(meta.ErrRetired)},
		{"T2 changing a settled fragment", func(s *state) error {
			l, err := s.ChangeEnsemble(s.t.Context(), s.l, []meta.Fragment{fragment(0, 1, 2, 3), fragment(5, 1, 2, 4)})
			check(s.t, err)
			_, err = s.ChangeEnsemble(s.t.Context(), l, []meta.Fragment{fragment(0, 1, 2, 9), fragment(5, 1, 2, 4)})
			return err
		}, is(meta.ErrInvalid)},
		{"T2 by an old owner", func(s *state) error {
			s.takeover()
			_, err := s.Owned(s.guard).ChangeEnsemble(s.t.Context(), s.l, []meta.Fragment{fragment(0, 1, 2, 4)})
			return err
		}, is(meta.ErrEpoch)},

		{"T3 in recovery", func(s *state) error {
			recoverIt(s)
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, closing(s.c, s.l, 4))
			return err
		}, stateErr(meta.LedgerInRecovery)},
		{"T3 twice", func(s *state) error {
			c, l := s.c, s.l
			closeIt(s)
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, c, closing(c, l, 9))
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T3 by an old owner", func(s *state) error {
			s.takeover()
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, closing(s.c, s.l, 4))
			return err
		}, is(meta.ErrEpoch)},
		{"T3 with T1, in recovery", func(s *state) error {
			recoverIt(s)
			cl := closing(s.c, s.l, 4)
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), &cl)
			return err
		}, stateErr(meta.LedgerInRecovery)},
		{"T3 of a ledger that is not the chain's", func(s *state) error {
			cl := closing(s.c, s.l, 4)
			cl.Ledger.ID += 7
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, cl)
			return err
		}, is(meta.ErrInvalid)},

		{"T4 of a ledger that is being deleted", func(s *state) error {
			closeIt(s)
			_, err := s.DeleteLedger(s.t.Context(), s.guard, s.c, s.l.ID)
			check(s.t, err)
			_, err = s.StartRecovery(s.t.Context(), s.l.ID)
			return err
		}, stateErr(meta.LedgerDeleting)},
		{"T4 of no ledger", func(s *state) error {
			_, err := s.StartRecovery(s.t.Context(), 1<<40)
			return err
		}, is(meta.ErrNotFound)},
		{"T4 by an old owner", func(s *state) error {
			s.takeover()
			_, err := s.Owned(s.guard).StartRecovery(s.t.Context(), s.l.ID)
			return err
		}, is(meta.ErrEpoch)},

		{"T5 of an open ledger", func(s *state) error {
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, recovery(s, s.l))
			return err
		}, stateErr(meta.LedgerOpen)},
		{"T5 with an old term", func(s *state) error {
			l := recoverIt(s)
			recoverIt(s)
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, recovery(s, l))
			return err
		}, stateErr(meta.LedgerInRecovery)},
		{"T5 by an old owner", func(s *state) error {
			l := recoverIt(s)
			s.takeover()
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, recovery(s, l))
			return err
		}, is(meta.ErrEpoch)},
		{"T5 naming a retired identity", func(s *state) error {
			retire(s, 8)
			cl := recovery(s, recoverIt(s))
			cl.Tail = []meta.Fragment{fragment(1, 1, 2, 8)}
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, cl)
			return err
		}, is(meta.ErrRetired)},
		{"T5 with a last fragment that is not T4's", func(s *state) error {
			cl := recovery(s, recoverIt(s))
			cl.Ledger.Fragments = []meta.Fragment{fragment(0, 1, 2, 9)}
			cl.Ledger.Rev-- // as a recovery that saw something else
			_, _, err := s.CloseLedger(s.t.Context(), s.guard, s.c, cl)
			return err
		}, stateErr(meta.LedgerInRecovery)},
		{"T5 replacing settled fragments", func(s *state) error {
			_, err := s.ChangeEnsemble(s.t.Context(), s.l, []meta.Fragment{fragment(0, 1, 2, 3), fragment(5, 1, 2, 4)})
			check(s.t, err)
			cl := recovery(s, recoverIt(s))
			cl.Tail = []meta.Fragment{fragment(3, 1, 2, 6)}
			_, _, err = s.CloseLedger(s.t.Context(), s.guard, s.c, cl)
			return err
		}, is(meta.ErrInvalid)},

		{"T6 in the last fragment of an open ledger", func(s *state) error {
			_, err := s.AddIntent(s.t.Context(), s.l.ID, meta.ReplicaIntent{Target: storage(7)})
			return err
		}, stateErr(meta.LedgerOpen)},
		{"T6 swap in the last fragment of an open ledger", func(s *state) error {
			_, err := s.SwapReplica(s.t.Context(), s.l.ID, s.l.Fragments[0], storage(1), meta.Slot{UUID: storage(7)}, time.Time{})
			return err
		}, stateErr(meta.LedgerOpen)},
		{"T6 swap in a fragment that changed", func(s *state) error {
			closeIt(s)
			seen := s.l.Fragments[0]
			intend(s, 7, 1)
			intend(s, 8, 1)
			_, err := s.SwapReplica(s.t.Context(), s.l.ID, seen, storage(1), meta.Slot{UUID: storage(7)}, time.UnixMilli(1))
			check(s.t, err)
			_, err = s.SwapReplica(s.t.Context(), s.l.ID, seen, storage(2), meta.Slot{UUID: storage(8)}, time.UnixMilli(1))
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T6 swap after the intent ended", func(s *state) error {
			closeIt(s)
			intend(s, 7, 1)
			_, err := s.DropIntent(s.t.Context(), s.l.ID, storage(7), 0)
			check(s.t, err)
			_, err = s.SwapReplica(s.t.Context(), s.l.ID, s.l.Fragments[0], storage(1), meta.Slot{UUID: storage(7)}, time.UnixMilli(1))
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T6 swap under another's intent", func(s *state) error {
			closeIt(s)
			intend(s, 7, 1)
			intend(s, 7, 2)
			_, err := s.SwapReplica(s.t.Context(), s.l.ID, s.l.Fragments[0], storage(1), meta.Slot{UUID: storage(7)}, time.UnixMilli(1))
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T6 to a bookie that is in the fragment", func(s *state) error {
			closeIt(s)
			_, err := s.SwapReplica(s.t.Context(), s.l.ID, s.l.Fragments[0], storage(1), meta.Slot{UUID: storage(2)}, time.Time{})
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T6 intent for a bookie that is in the fragment", func(s *state) error {
			closeIt(s)
			_, err := s.AddIntent(s.t.Context(), s.l.ID, meta.ReplicaIntent{Target: storage(2)})
			return err
		}, stateErr(meta.LedgerClosed)},
		{"T6 intent for a retired identity", func(s *state) error {
			closeIt(s)
			retire(s, 8)
			_, err := s.AddIntent(s.t.Context(), s.l.ID, meta.ReplicaIntent{Target: storage(8)})
			return err
		}, is(meta.ErrRetired)},
		{"T6 of a ledger that is being deleted", func(s *state) error {
			closeIt(s)
			_, err := s.DeleteLedger(s.t.Context(), s.guard, s.c, s.l.ID)
			check(s.t, err)
			_, err = s.AddIntent(s.t.Context(), s.l.ID, meta.ReplicaIntent{Target: storage(8)})
			return err
		}, stateErr(meta.LedgerDeleting)},

		{"T7 of an open ledger", func(s *state) error {
			_, err := s.DeleteLedger(s.t.Context(), s.guard, s.c, s.l.ID)
			return err
		}, is(meta.ErrInvalid)},
		{"T7 of an open ledger that the caller calls closed", func(s *state) error {
			s.c.Runs[0].Closed = true
			_, err := s.DeleteLedger(s.t.Context(), s.guard, s.c, s.l.ID)
			return err
		}, stateErr(meta.LedgerOpen)},
		{"T7 by an old owner", func(s *state) error {
			closeIt(s)
			s.takeover()
			_, err := s.DeleteLedger(s.t.Context(), s.guard, s.c, s.l.ID)
			return err
		}, is(meta.ErrEpoch)},
		{"T7 on a chain read before a change", func(s *state) error {
			closeIt(s)
			old := s.c
			_, _, err := s.OpenLedger(s.t.Context(), s.guard, s.c, s.newLedger(), nil)
			check(s.t, err)
			_, err = s.DeleteLedger(s.t.Context(), s.guard, old, s.l.ID)
			return err
		}, is(meta.ErrConflict)},
		{"T7 of a ledger that the chain does not have", func(s *state) error {
			_, err := s.DeleteLedger(s.t.Context(), s.guard, s.c, 1<<40)
			return err
		}, is(meta.ErrNotFound)},

		{"T8 of a closed ledger", func(s *state) error {
			closeIt(s)
			return s.PurgeTombstone(s.t.Context(), s.l.ID)
		}, stateErr(meta.LedgerClosed)},
		{"confirming the deletion of a closed ledger", func(s *state) error {
			closeIt(s)
			return s.ConfirmDeleted(s.t.Context(), s.l.ID, storage(1))
		}, stateErr(meta.LedgerClosed)},
		{"retiring an identity that an open, empty ledger names", func(s *state) error {
			check(s.t, s.CreateCookie(s.t.Context(), meta.Cookie{ID: "k1", UUID: storage(1)}))
			return s.RetireStorage(s.t.Context(), "k1", storage(1))
		}, is(meta.ErrNotEmpty)},
		{"retiring an identity that an intent names", func(s *state) error {
			closeIt(s)
			_, err := s.AddIntent(s.t.Context(), s.l.ID, meta.ReplicaIntent{Target: storage(7), Deadline: time.UnixMilli(1)})
			check(s.t, err)
			check(s.t, s.CreateCookie(s.t.Context(), meta.Cookie{ID: "k7", UUID: storage(7)}))
			return s.RetireStorage(s.t.Context(), "k7", storage(7))
		}, is(meta.ErrNotEmpty)},
		{"deleting a chain with ledgers", func(s *state) error {
			return s.DeleteChain(s.t.Context(), s.guard, s.c)
		}, is(meta.ErrNotEmpty)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := &state{fixture: newFixture(t)}
			s.c, s.l = s.open()
			if err := tc.do(s); !tc.want(err) {
				t.Fatalf("got %v", err)
			}
		})
	}
}

// gone is a topic that was deleted, as somebody with a late cache still sees it.
func (f *fixture) gone() *meta.Topic {
	f.t.Helper()
	topic, err := f.CreateTopic(f.t.Context(), "public/default/gone", 0)
	check(f.t, err)
	marked, err := f.MarkTopicDeleting(f.t.Context(), topic.Name)
	check(f.t, err)
	check(f.t, f.DeleteTopic(f.t.Context(), marked))
	return &topic
}

// A topic's record that was written again, but is the same topic's, is no obstacle to T1.
func TestOpenLedgerOfATopicWrittenAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	old := f.topic
	old.Rev--
	f.guard.Topic = &old
	f.open()
}
