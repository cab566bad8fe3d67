package repair_test

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// A bookie is lost: whatever it had has as many copies as before in the end, with the same bytes, empty ledgers and striped ones and
// older fragments included.
func TestLostBookie(t *testing.T) {
	t.Parallel()
	w := newTown(t, 5)
	for i := range entry.EntryID(8) {
		w.write(10 * i) // the first one is empty
	}
	w.writeAs(plan{
		replication: meta.Replication{Ensemble: 4, WriteQuorum: 2, AckQuorum: 2}, entries: 101,
		fragments: []meta.Fragment{w.fragment(0, 0, 1, 2, 3)},
	})
	w.writeAs(plan{
		replication: three, entries: 40,
		fragments: []meta.Fragment{w.fragment(0, 0, 1, 2), w.fragment(17, 1, 2, 3), w.fragment(40, 0, 2, 3)},
	})
	w.stop(0)
	w.run(brisk("a"), nil)
	w.run(brisk("b"), nil)
	w.mended()
	w.audit()
	if h, err := w.meta.LedgersOn(w.ctx, w.uuids[0]); err != nil || len(h) > 0 {
		t.Fatalf("the lost bookie is still named by %v, %v", h, err)
	}
}

// A second bookie dies while the first one's copies are being made anew: the third one's are enough.
func TestSecondBookieDiesInTheMidstOfARepair(t *testing.T) {
	t.Parallel()
	w := newTown(t, 6)
	for range 12 {
		w.write(20)
	}
	w.stop(0)
	slow := brisk("a")
	slow.BytesPerSecond = 128 << 10
	w.run(slow, nil)
	w.until("some are mended", func() bool {
		h, err := w.meta.LedgersOn(w.ctx, w.uuids[0])
		w.check(err)
		return len(h) < 10
	})
	w.stop(1)
	w.mended()
	w.audit()
}

// What nobody has who lives is named, and mended when somebody comes back who has it.
func TestUnavailableEntriesAreNamed(t *testing.T) {
	t.Parallel()
	w := newTown(t, 5)
	id := w.writeAs(plan{
		replication: three, fragments: []meta.Fragment{w.fragment(0, 0, 1, 2)}, entries: 10,
		without: func(e entry.EntryID, u entry.StorageUUID) bool { return u == w.uuids[2] && e == 7 },
	})
	w.stop(0)
	w.stop(1)
	w.run(brisk("a"), nil)
	w.until("the record names the entry", func() bool {
		r, err := w.meta.GetRepair(w.ctx, id)
		return err == nil && strings.Contains(r.Stuck, "read entry 7 of ledger") && r.Counts == meta.RepairCounts{BelowWriteQuorum: 10, BelowAckQuorum: 10, Unavailable: 1}
	})
	w.start(1)
	w.mended()
	w.audit()
}

// Entries that rot on one bookie are found by its scrub, and stored there anew; no slot moves.
func TestScrubFindingsAreMendedInPlace(t *testing.T) {
	t.Parallel()
	w := newTown(t, 3)
	for range 5 {
		w.write(100)
	}
	w.write(400) // seals what is before
	w.rot(1)
	if sum := w.scrub(1); sum.GetDamaged() == 0 {
		t.Fatalf("nothing was found: %v", sum)
	}
	w.run(brisk("a"), nil)
	w.until("nothing is damaged any more", func() bool {
		all, err := w.control.ListDamage(w.ctx, w.uuids[1])
		w.check(err)
		return len(all) == 0
	})
	w.mended()
	w.audit()
	for _, id := range w.ledgers {
		l, err := w.meta.GetLedger(w.ctx, id)
		w.check(err)
		if l.Fragments[0].Slots[1].UUID != w.uuids[1] {
			t.Errorf("ledger %d has moved to %+v", id, l.Fragments)
		}
	}
}

// What a bookie never got is found by the comparison of all ledgers, also where it knows nothing of the ledger.
func TestMissingEntriesAreFoundAndSent(t *testing.T) {
	t.Parallel()
	w := newTown(t, 3)
	for i := range entry.EntryID(4) {
		w.writeAs(plan{
			replication: three, fragments: []meta.Fragment{w.fragment(0, 0, 1, 2)}, entries: 20,
			without: func(e entry.EntryID, u entry.StorageUUID) bool { return u == w.uuids[0] && e%4 <= i },
		})
	}
	w.run(brisk("a"), nil)
	w.mended()
	w.audit()
}

// A bookie in limbo is believed again once it has all of a ledger.
func TestLimboEndsWhenAllIsThere(t *testing.T) {
	t.Parallel()
	w := newTown(t, 3)
	id := w.writeAs(plan{
		replication: three, fragments: []meta.Fragment{w.fragment(0, 0, 1, 2)}, entries: 20,
		without: func(e entry.EntryID, u entry.StorageUUID) bool { return u == w.uuids[0] && e == 7 },
	})
	w.limbo(0, id)
	w.run(brisk("a"), nil)
	w.mended()
	w.audit()
	if got, err := w.control.ListEntries(w.ctx, w.uuids[0], id, 0, 0); err != nil || got.Limbo {
		t.Fatalf("it is still in limbo: %+v, %v", got, err)
	}
}

// The fragment that a writer may be writing to is left alone; its ledger's record says why it is not mended.
func TestOpenFragmentIsNotTouched(t *testing.T) {
	t.Parallel()
	w := newTown(t, 5)
	id := w.writeAs(plan{
		replication: three, fragments: []meta.Fragment{w.fragment(0, 0, 1, 2), w.fragment(10, 0, 2, 3)}, entries: 20, open: true,
	})
	before, err := w.meta.GetLedger(w.ctx, id)
	w.check(err)
	w.stop(0)
	w.run(brisk("a"), nil)
	w.until("the record says what is in the way", func() bool {
		r, err := w.meta.GetRepair(w.ctx, id)
		return err == nil && r.Stuck == "have the ledger closed: bookie bookie-0 is lost: nobody owns it"
	})
	after, err := w.meta.GetLedger(w.ctx, id)
	w.check(err)
	if after.State != meta.LedgerOpen || after.Term != 0 || after.Fragments[1].Slots[0] != before.Fragments[1].Slots[0] {
		t.Fatalf("the open fragment was touched: %+v", after)
	}
	if got := after.Fragments[0].Slots[0].UUID; got == w.uuids[0] {
		t.Fatalf("the settled fragment was not mended: %+v", after)
	}
}

// An intent of a worker that is gone, for a fragment that is sound, is ended.
func TestForgottenIntentsAreEnded(t *testing.T) {
	t.Parallel()
	w := newTown(t, 4)
	id := w.write(10)
	_, err := w.meta.AddIntent(w.ctx, id, meta.ReplicaIntent{Target: w.uuids[3], Deadline: time.Now().Add(time.Hour)})
	w.check(err)
	w.run(brisk("a"), nil)
	w.mended()
	w.audit()
}

// A bookie that is to be emptied is relieved of everything while it lives; one that a person declared dead at once, and what
// is being deleted waits for it no longer.
func TestMarkedBookiesAreRelieved(t *testing.T) {
	t.Parallel()
	for kind, name := range map[meta.OperationKind]string{meta.OperationDecommission: "emptied", meta.OperationRecover: "dead"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTown(t, 4)
			for i := range entry.EntryID(4) {
				w.write(10 * i)
			}
			gone := w.write(5)
			c, err := w.meta.GetChain(w.ctx, w.chain)
			w.check(err)
			_, err = w.meta.DeleteLedger(w.ctx, w.guard, c, gone)
			w.check(err)
			w.ledgers = w.ledgers[:len(w.ledgers)-1]
			cfg := brisk("a")
			cfg.Delay = time.Hour
			if kind == meta.OperationRecover {
				w.stop(1)
			}
			op, err := w.meta.StartOperation(w.ctx, meta.Operation{Kind: kind, Bookie: "bookie-1", Created: time.Now()})
			w.check(err)
			w.run(cfg, nil)
			w.until("nothing names it", func() bool {
				h, err := w.meta.Holdings(w.ctx, w.uuids[1])
				w.check(err)
				return len(h.Ledgers) == 0 || kind == meta.OperationDecommission && len(h.Ledgers) == len(h.Deleting)
			})
			w.mended()
			w.audit()
			if kind == meta.OperationRecover {
				w.check(w.meta.RetireStorage(w.ctx, "bookie-1", op.UUID))
			}
		})
	}
}

// Copies that a writer has given up are made when it says so, and not only when the comparison comes by.
func TestHintsAreFollowed(t *testing.T) {
	t.Parallel()
	w := newTown(t, 3)
	id := w.writeAs(plan{
		replication: three, fragments: []meta.Fragment{w.fragment(0, 0, 1, 2)}, entries: 20,
		without: func(e entry.EntryID, u entry.StorageUUID) bool { return u == w.uuids[1] && e > 10 },
	})
	cfg := brisk("a")
	cfg.CompareEvery = time.Hour
	r, _ := w.run(cfg, nil)
	r.Hint(ledger.Hint{Ledger: id, Fragment: 0, Slot: 1, UUID: w.uuids[1], First: 11, Last: 19})
	w.until("all copies are there", func() bool {
		got, err := w.control.ListEntries(w.ctx, w.uuids[1], id, 0, 19)
		w.check(err)
		return got.Bits[2] == 0xf && got.Bits[1] == 0xff
	})
	w.audit()
}
