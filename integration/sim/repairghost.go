package sim

import (
	"slices"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// fragmentsChanged holds how fragments change against what may be: settled ones, by a swap alone.
func (g *ghost) fragmentsChanged(old, now meta.Ledger) {
	settled := len(old.Fragments)
	if old.State < meta.LedgerClosed {
		settled--
	}
	for i := range min(settled, len(now.Fragments)) {
		before, after := old.Fragments[i], now.Fragments[i]
		if before.First == after.First && slices.Equal(before.Slots, after.Slots) {
			continue
		}
		slot := swappedSlot(before, after)
		if slot < 0 || !slices.ContainsFunc(old.Pending, func(in meta.ReplicaIntent) bool {
			return in.Target == after.Slots[slot].UUID && in.Fragment == after.First
		}) {
			g.w.fail("7", ledgerSubject(now.ID), "a settled fragment of ledger %d changes: %s, then %s", now.ID, g.w.fragments(old.Fragments), g.w.fragments(now.Fragments))
			return
		}
		g.swapped(now, i, slot)
	}
	if delete(g.intents, now.ID); len(now.Pending) > 0 {
		g.intents[now.ID] = true
	}
	for _, in := range now.Pending {
		if g.retired[in.Target] {
			g.w.fail("retired", ledgerSubject(now.ID), "a repair of ledger %d copies to %s, which is retired", now.ID, g.w.names[in.Target])
		}
	}
}

// swappedSlot returns the one slot in which two fragments differ, or -1.
func swappedSlot(before, after meta.Fragment) int {
	at := -1
	if before.First != after.First || len(before.Slots) != len(after.Slots) {
		return at
	}
	for i := range before.Slots {
		if before.Slots[i] == after.Slots[i] {
			continue
		}
		if at >= 0 {
			return -1
		}
		at = i
	}
	return at
}

// swapped is a slot that goes to another disk, which must have promised all that the slot holds, and deleted nothing of it since.
func (g *ghost) swapped(l meta.Ledger, fragment, slot int) {
	f, last := l.Fragments[fragment], l.Last
	if fragment < len(l.Fragments)-1 {
		last = l.Fragments[fragment+1].First - 1
	}
	g.swaps++
	q := quorumOf(l.Replication, f.Slots)
	for e := f.First; e <= last; e++ {
		if q.WriteSet(e)&(1<<slot) != 0 && !g.keeps(f.Slots[slot].UUID, entryKey{l.ID, e}) {
			g.w.fail("I12", entrySubject(l.ID, e), "%s takes slot %d of ledger %d from entry %d on, and does not have %d", g.w.names[f.Slots[slot].UUID], slot, l.ID, f.First, e)
			return
		}
	}
}

// keeps reports whether a disk has acknowledged an entry, and deleted nothing of its ledger since.
func (g *ghost) keeps(u entry.StorageUUID, k entryKey) bool {
	d := g.disk(u)
	return d.stored[k] && !d.gone[k.ledger]
}

// copied is a repair's copy on a disk that has deleted the ledger before: what it says of the ledger counts anew.
func (g *ghost) copied(b *bookieProcess, a *bookiewire.Add) {
	d, l := g.disk(b.uuid), g.ledger(a.Ledger).record
	if !d.gone[a.Ledger] || !a.Recovery || l.State >= meta.LedgerDeleting ||
		!slices.ContainsFunc(l.Pending, func(in meta.ReplicaIntent) bool { return in.Target == b.uuid }) {
		return
	}
	id := a.Ledger
	delete(d.gone, id)
	delete(d.terms, id)
	delete(d.shut, id)
	var kept []entryKey
	for i, k := range d.sorted {
		if k.ledger != id {
			kept = append(kept, k)
			continue
		}
		delete(d.stored, k)
		if i < d.found {
			d.found--
		}
	}
	d.sorted = kept
	for e := entry.EntryID(0); e <= l.Last; e++ {
		delete(d.denied, entryKey{id, e})
	}
}
