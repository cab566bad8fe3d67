package ledgerstore

import (
	"cmp"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// EntryRange is the entries First … Last of a ledger.
type EntryRange struct{ First, Last entry.EntryID }

// LedgerDamage is what was found unreadable of one ledger.
type LedgerDamage struct {
	Ledger entry.LedgerID
	// Entries are sorted and apart from each other. Where there are very many, they include some that are readable.
	Entries []EntryRange
}

// maxDamageRanges bounds what is kept of one ledger; beyond it neighbours are joined, with what lies between them.
const maxDamageRanges = 1024

// unreadable is the entries of a ledger that are stored and were found unreadable, as sorted ranges that do not touch.
type unreadable []EntryRange

func (d unreadable) at(e entry.EntryID) (int, bool) {
	return slices.BinarySearchFunc(d, e, func(r EntryRange, e entry.EntryID) int {
		switch {
		case r.Last < e:
			return -1
		case r.First > e:
			return 1
		}
		return 0
	})
}

// with returns d with first … last.
func (d unreadable) with(first, last entry.EntryID) unreadable {
	i, _ := slices.BinarySearchFunc(d, first, func(r EntryRange, e entry.EntryID) int { return cmp.Compare(r.Last+1, e) })
	j := i
	for ; j < len(d) && d[j].First <= last+1; j++ {
		first, last = min(first, d[j].First), max(last, d[j].Last)
	}
	d = slices.Replace(d, i, j, EntryRange{first, last})
	if len(d) > maxDamageRanges {
		d = d.joined()
	}
	return d
}

// joined closes the smallest gap.
func (d unreadable) joined() unreadable {
	at := 1
	for i := 2; i < len(d); i++ {
		if d[i].First-d[i-1].Last < d[at].First-d[at-1].Last {
			at = i
		}
	}
	d[at-1].Last = d[at].Last
	return slices.Delete(d, at, at+1)
}

// without returns d without e.
func (d unreadable) without(e entry.EntryID) unreadable {
	i, found := d.at(e)
	if !found {
		return d
	}
	switch r := d[i]; {
	case r.First == r.Last:
		return slices.Delete(d, i, i+1)
	case r.First == e:
		d[i].First++
	case r.Last == e:
		d[i].Last--
	default:
		d[i].Last = e - 1
		return slices.Insert(d, i+1, EntryRange{e + 1, r.Last})
	}
	return d
}

// noteDamage says that entries of a ledger which is here cannot be read.
func (t *table) noteDamage(id entry.LedgerID, first, last entry.EntryID) {
	s := t.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.ledgers[id]; l != nil && l.durable {
		l.unreadable = l.unreadable.with(first, last)
	}
}

// isDamaged reports whether an entry was found unreadable, and no other copy became durable since.
func (t *table) isDamaged(id entry.LedgerID, e entry.EntryID) bool {
	s := t.shard(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	l := s.ledgers[id]
	if l == nil {
		return false
	}
	_, found := l.unreadable.at(e)
	return found
}

// Damage lists what was found unreadable, by reads and by [Store.Scrub], and not stored anew since, by ledger. It is not kept
// across restarts: the next scrub finds it again.
func (s *Store) Damage() []LedgerDamage {
	var all []LedgerDamage
	for i := range s.table.shards {
		sh := &s.table.shards[i]
		sh.mu.RLock()
		for id, l := range sh.ledgers {
			if len(l.unreadable) > 0 && !l.deleting {
				all = append(all, LedgerDamage{Ledger: id, Entries: slices.Clone(l.unreadable)})
			}
		}
		sh.mu.RUnlock()
	}
	slices.SortFunc(all, func(a, b LedgerDamage) int { return cmp.Compare(a.Ledger, b.Ledger) })
	return all
}
