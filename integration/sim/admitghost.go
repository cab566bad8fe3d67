package sim

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// admitGhost is until when a ledger's record, as it was before, let adds in that make the ledger known to a bookie.
type admitGhost struct {
	writers    map[entry.StorageUUID]time.Duration // to whom
	recoveries map[entry.Term]time.Duration        // of that term, to anybody
	repairs    map[entry.StorageUUID]time.Duration // to whom
}

// letsIn calls f for each that a record lets in: writers to a disk, a recovery, repairs to a disk.
func letsIn(l meta.Ledger, writer func(entry.StorageUUID), recovery func(entry.Term), repair func(entry.StorageUUID)) {
	if l.State == meta.LedgerOpen && len(l.Fragments) > 0 {
		for _, s := range l.Fragments[len(l.Fragments)-1].Slots {
			writer(s.UUID)
		}
	}
	if l.State == meta.LedgerInRecovery {
		recovery(l.Term)
	}
	if l.State == meta.LedgerDeleting {
		return
	}
	for _, in := range l.Pending {
		repair(in.Target)
	}
	for i, f := range l.Fragments { // where nobody else writes any more, what is missing may be made anew
		if i < len(l.Fragments)-1 || l.State == meta.LedgerClosed {
			for _, s := range f.Slots {
				repair(s.UUID)
			}
		}
	}
}

// lapses notes that a ledger's record is another one from now on.
func (a *admitGhost) lapses(old meta.Ledger, now time.Duration) {
	if a.writers == nil {
		*a = admitGhost{map[entry.StorageUUID]time.Duration{}, map[entry.Term]time.Duration{}, map[entry.StorageUUID]time.Duration{}}
	}
	letsIn(old, func(u entry.StorageUUID) { a.writers[u] = now }, func(t entry.Term) { a.recoveries[t] = now }, func(u entry.StorageUUID) { a.repairs[u] = now })
}

// letIn is an add that a bookie has acknowledged though it did not know the ledger when that arrived: at some moment since, the
// record must have let it in.
func (g *ghost) letIn(b *bookieProcess, x *arrival) {
	l := g.ledger(x.Ledger)
	var ok bool
	since := func(until time.Duration, lapsed bool) bool { return lapsed && until >= x.at }
	until, lapsed := l.admits.writers[b.uuid]
	ok = !x.Recovery && since(until, lapsed)
	if x.Recovery {
		until, lapsed = l.admits.recoveries[x.Term]
		ok = since(until, lapsed)
		until, lapsed = l.admits.repairs[b.uuid]
		ok = ok || since(until, lapsed)
	}
	letsIn(l.record, func(u entry.StorageUUID) { ok = ok || !x.Recovery && u == b.uuid },
		func(t entry.Term) { ok = ok || x.Recovery && t == x.Term }, func(u entry.StorageUUID) { ok = ok || x.Recovery && u == b.uuid })
	if !ok {
		g.w.fail("18", entrySubject(x.Ledger, x.Entry), "%s takes %d:%d, recovery %v, of a ledger that it did not know when that came %v ago; since then the record did not let it in, which is %s, term %d, %s",
			b.name, x.Ledger, x.Entry, x.Recovery, g.w.now-x.at, l.record.State, l.record.Term, g.w.fragments(l.record.Fragments[max(0, len(l.record.Fragments)-1):]))
	}
}

// held is an ensemble change or an end that a writer has proposed, and of which it does not know yet what became.
type held struct {
	by   *broker
	life int
	lac  entry.EntryID // that of the proposal
	what string
}

// proposes notes a proposal. It returns what to call once its outcome is known.
func (g *ghost) proposes(b *broker, id entry.LedgerID, lac entry.EntryID, what string) (done func()) {
	l := g.ledger(id)
	h := &held{by: b, life: b.life, lac: lac, what: what}
	l.held = h
	g.w.trace(b.name, ledgerSubject(id), "proposes %s of ledger %d at %d", what, id, lac)
	return func() {
		if l.held == h {
			l.held = nil
		}
	}
}

// confirms is a writer's word, to anybody, that an entry is confirmed.
func (g *ghost) confirms(b *broker, id entry.LedgerID, e entry.EntryID) {
	if h := g.ledger(id).held; h != nil && h.by == b && h.life == b.life && e > h.lac {
		g.w.fail("12", entrySubject(id, e), "%s confirms %d:%d while %s that it has proposed at %d is under way", b.name, id, e, h.what, h.lac)
	}
}

// provable returns the highest entry such that it and those before it lie on as many bookies as they need: no writer's
// LAC is above it.
func (g *ghost) provable(l *ledgerGhost) entry.EntryID {
	e := max(l.claimed, l.acked)
	f := l.record.Fragments[len(l.record.Fragments)-1]
	q := quorumOf(l.record.Replication, f.Slots)
	for q.Valid(g.holders(f, q, entryKey{l.record.ID, e + 1})) {
		e++
	}
	return e
}
