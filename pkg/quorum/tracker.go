package quorum

import (
	"fmt"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Tracker counts the acknowledgements of a writer's entries and grows the confirmed prefix. It remembers entries
// from the oldest not yet dropped to the newest appended:
//
//	Tail ≤ LAC+1 ≤ Next
//
// It has no opinion on when the prefix may grow: a writer does not call [Tracker.Advance] while the ledger's
// metadata is changing. Not safe for concurrent use.
type Tracker struct {
	q    *Quorum
	tail entry.EntryID // oldest tracked entry
	next entry.EntryID // next to be appended
	lac  entry.EntryID
	one  entry.EntryID // every entry ≤ one has an acknowledgement, or is confirmed
	acks []Set         // ring, a power of two long; entry e at e & (len-1)
}

// NewTracker returns a tracker that has confirmed everything up to lac, and appends lac+1 next.
func NewTracker(q *Quorum, lac entry.EntryID) *Tracker {
	return &Tracker{q: q, tail: lac + 1, next: lac + 1, lac: lac, one: lac}
}

// Quorum returns the quorum that new entries are counted against.
func (t *Tracker) Quorum() *Quorum { return t.q }

// Tail returns the oldest entry still tracked; Next, if there is none.
func (t *Tracker) Tail() entry.EntryID { return t.tail }

// Next returns the id that the next entry gets.
func (t *Tracker) Next() entry.EntryID { return t.next }

// LAC returns the highest entry of the confirmed prefix.
func (t *Tracker) LAC() entry.EntryID { return t.lac }

// One returns the highest entry such that it and all before it have at least one acknowledgement.
func (t *Tracker) One() entry.EntryID { return t.one }

// Append adds an entry without acknowledgements and returns its id.
func (t *Tracker) Append() entry.EntryID {
	if int(t.next-t.tail) == len(t.acks) {
		t.grow()
	}
	e := t.next
	t.next++
	t.acks[t.at(e)] = 0
	return e
}

func (t *Tracker) at(e entry.EntryID) int { return int(e) & (len(t.acks) - 1) }

func (t *Tracker) grow() {
	bigger := make([]Set, max(8, 2*len(t.acks)))
	for e := t.tail; e < t.next; e++ {
		bigger[int(e)&(len(bigger)-1)] = t.acks[t.at(e)]
	}
	t.acks = bigger
}

// Tracked reports whether e is between Tail and Next.
func (t *Tracker) Tracked(e entry.EntryID) bool { return e >= t.tail && e < t.next }

// Acks returns the slots that acknowledged e, which must be tracked.
func (t *Tracker) Acks(e entry.EntryID) Set {
	if !t.Tracked(e) {
		panic(fmt.Sprintf("quorum: entry %d is not tracked (%d … %d)", e, t.tail, t.next-1))
	}
	return t.acks[t.at(e)]
}

// Missing returns the slots of e's write set that have not acknowledged it; e must be tracked.
func (t *Tracker) Missing(e entry.EntryID) Set { return t.q.WriteSet(e) &^ t.Acks(e) }

// Ack records that slot has e on disk. False when that is no news: e is not tracked, not written to that slot, or
// already acknowledged by it.
func (t *Tracker) Ack(e entry.EntryID, slot int) bool {
	if !t.Tracked(e) || !t.q.WriteSet(e).Has(slot) || t.acks[t.at(e)].Has(slot) {
		return false
	}
	t.acks[t.at(e)] |= 1 << slot
	return true
}

// Advance grows the confirmed prefix as far as the acknowledgements allow and returns its last entry.
func (t *Tracker) Advance() entry.EntryID {
	for t.lac+1 < t.next && t.q.Valid(t.acks[t.at(t.lac+1)]) {
		t.lac++
	}
	if t.one < t.lac {
		t.one = t.lac
	}
	return t.lac
}

// AdvanceOne grows the prefix of entries with at least one acknowledgement and returns its last entry.
func (t *Tracker) AdvanceOne() entry.EntryID {
	for t.one+1 < t.next && t.acks[t.at(t.one+1)] != 0 {
		t.one++
	}
	return t.one
}

// Prune is an acknowledged ensemble change: entries from from on are counted against q, and the acknowledgements of the
// changed slots are forgotten. Entries before from keep theirs: they belong to an older fragment. Confirmed entries may be
// among those from from on, if they count without the changed slots.
func (t *Tracker) Prune(from entry.EntryID, changed Set, q *Quorum) {
	t.q = q
	for e := max(from, t.tail); e < t.next; e++ {
		t.acks[t.at(e)] &^= changed
		if e <= t.lac && !q.Valid(t.acks[t.at(e)]) {
			panic(fmt.Sprintf("quorum: ensemble change from entry %d, entry %d is confirmed and would not count in it", from, e))
		}
	}
	if from < t.tail {
		panic(fmt.Sprintf("quorum: ensemble change from entry %d, tracked from %d on", from, t.tail))
	}
	t.one = t.lac
}

// Drop forgets the entries before to, all of them confirmed, and gives memory back when nothing is left.
func (t *Tracker) Drop(to entry.EntryID) {
	if to > t.lac+1 {
		panic(fmt.Sprintf("quorum: drop up to entry %d, confirmed is %d", to, t.lac))
	}
	t.tail = max(t.tail, to)
}

// Shrink releases the memory of a tracker that tracks nothing.
func (t *Tracker) Shrink() {
	if t.tail == t.next {
		t.acks = nil
	}
}
