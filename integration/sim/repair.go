package sim

import (
	"context"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	repairs "github.com/penstock-mq/penstock/pkg/repair"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// repair gives one slot of a fragment to another disk: it says so in the ledger's record, sends the disk its copies, and swaps once
// all are durable there.
type repair struct {
	*repairer
	ledger   meta.Ledger // with the intent
	fragment meta.Fragment
	last     entry.EntryID // of the fragment
	slot     int
	target   meta.Slot
	deadline time.Time // which tells this intent from others
}

// repairSomething repairs a ledger that lies on some disk: that disk is gone for good, or to be emptied, or just any.
func (r *repairer) repairSomething() {
	w := r.w
	ctx, cancel := r.sched.WithTimeout(context.Background(), 2*repairPatience)
	defer cancel()
	var disk entry.StorageUUID
	for range 4 { // what is gone comes first
		binary.BigEndian.PutUint64(disk[:], 1+w.rng.Uint64N(uint64(w.disks)))
		if w.bookieOf(disk) == nil {
			break
		}
	}
	ids, err := r.meta.LedgersOn(ctx, disk)
	if others := slices.Sorted(maps.Keys(w.ghost.intents)); len(others) > 0 && w.chance(4) { // somebody is at it, or was
		ids = others
	}
	if err != nil || len(ids) == 0 {
		return
	}
	l, err := r.meta.GetLedger(ctx, pick(w.kernel, ids))
	if err != nil {
		return
	}
	x := r.plan(l, disk)
	if x == nil {
		return
	}
	w.trace(r.name, ledgerSubject(l.ID), "is to copy ledger %d from entry %d to %s, in place of %s", l.ID, x.fragment.First, w.names[x.target.UUID], w.names[disk])
	r.dieSoon()
	if x.ledger, err = r.meta.AddIntent(ctx, l.ID, meta.ReplicaIntent{Target: x.target.UUID, Fragment: x.fragment.First, Deadline: x.deadline}); err == nil {
		err = x.carryOut(ctx, disk)
	}
	if w.trace(r.name, ledgerSubject(l.ID), "swaps in ledger %d from entry %d: %v", l.ID, x.fragment.First, err == nil); err == nil || w.chance(2) {
		return
	}
	_, _ = r.meta.DropIntent(ctx, l.ID, x.target.UUID, x.fragment.First)
}

// plan chooses a fragment in which the disk has a slot, and another disk for it; nil if there is none.
func (r *repairer) plan(l meta.Ledger, disk entry.StorageUUID) *repair {
	w := r.w
	var can []*repair
	for i, f := range l.Fragments {
		if i == len(l.Fragments)-1 && l.State != meta.LedgerClosed || l.State == meta.LedgerDeleting {
			continue
		}
		for slot, s := range f.Slots {
			if s.UUID == disk {
				can = append(can, &repair{repairer: r, fragment: f, slot: slot})
			}
		}
	}
	if len(can) == 0 {
		return nil
	}
	x := pick(w.kernel, can)
	var all []ledger.Candidate
	for _, b := range w.bookies {
		all = append(all, ledger.Candidate{UUID: b.uuid, Host: b.name, Zone: b.zone, FreeBytes: 1, Writable: true})
	}
	keep := append([]meta.Slot(nil), x.fragment.Slots...)
	keep[x.slot] = meta.Slot{}
	//nolint:gosec // seeded on purpose
	slots, err := ledger.Place(ledger.PlaceRequest{
		Replication: l.Replication, Candidates: all, Exclude: []entry.StorageUUID{disk}, Keep: keep, Rand: rand.New(rand.NewPCG(w.rng.Uint64(), 0)),
	})
	if err != nil {
		return nil
	}
	x.target = slots[x.slot]
	x.deadline = r.sched.Now().Add(w.between(time.Second, repairPatience)).Truncate(time.Millisecond)
	return x
}

// carryOut copies and swaps, under the intent.
func (x *repair) carryOut(ctx context.Context, old entry.StorageUUID) error {
	w := x.w
	x.last = x.ledger.Last
	for i, f := range x.ledger.Fragments {
		if f.First == x.fragment.First && i+1 < len(x.ledger.Fragments) {
			x.last = x.ledger.Fragments[i+1].First - 1
		}
	}
	copier := repairs.Copier{Ledger: x.env.Ledger, Before: x.dieSoon, ReadBytes: 4 << 10}
	_, err := copier.Copy(ctx, repairs.Copying{
		Ledger: x.ledger, Fragment: repairs.Stretch{Fragment: x.fragment, Last: x.last, Settled: true}, Slot: x.slot, To: x.target.UUID,
	})
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	if w.chance(2) { // while others go on
		_ = sched.Sleep(ctx, x.sched, w.between(0, 15*time.Second))
	}
	x.dieSoon()
	_, err = x.meta.SwapReplica(ctx, x.ledger.ID, x.fragment, old, x.target, x.deadline)
	return err //nolint:wrapcheck // it says what failed
}
