package repair

import (
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Holding is what one bookie says that it has of one fragment.
type Holding struct {
	// First is the fragment's first entry; Bits has a bit for each from there on: durable, and not known to be unreadable.
	First entry.EntryID
	Bits  []byte
	// Limbo: it may have lost entries, and shuts writers out.
	Limbo bool
	// Err says why it cannot tell; then nothing else counts.
	Err string
}

// Has reports whether the bookie has an entry of the fragment.
func (h *Holding) Has(e entry.EntryID) bool {
	i := e - h.First
	return i >= 0 && int(i/8) < len(h.Bits) && h.Bits[i/8]&(1<<(i%8)) != 0
}

type holder struct {
	fragment entry.EntryID
	storage  entry.StorageUUID
}

// Survey is all that is known of one ledger: its record, the cluster, and what bookies say of its settled fragments.
type Survey struct {
	Ledger meta.Ledger
	View   View
	held   map[holder]*Holding
}

// NewSurvey makes a survey that knows of no bookie's word yet.
func NewSurvey(l meta.Ledger, v View) *Survey {
	return &Survey{Ledger: l, View: v, held: map[holder]*Holding{}}
}

// Add adds a bookie's word.
func (s *Survey) Add(fragment entry.EntryID, u entry.StorageUUID, h *Holding) {
	s.held[holder{fragment, u}] = h
}

// Holding returns a bookie's word of a fragment, nil if it was not asked.
func (s *Survey) Holding(fragment entry.EntryID, u entry.StorageUUID) *Holding {
	return s.held[holder{fragment, u}]
}

// ToAsk lists whom to ask about which fragments: live members of settled ones that have entries.
func (s *Survey) ToAsk() []Stretch {
	var all []Stretch
	for _, f := range Stretches(s.Ledger) {
		if f.Settled && f.Last >= f.First {
			all = append(all, f)
		}
	}
	return all
}

// Findings is what is wrong with a ledger.
type Findings struct {
	Causes   meta.RepairCause
	Storages []entry.StorageUUID
	Counts   meta.RepairCounts
}

// Sound reports that nothing is wrong.
func (f Findings) Sound() bool { return f.Causes == 0 }

// Assess holds what is known of a ledger against what its record promises. Bookies that were not asked are taken at their word: they have
// what they should have.
func (s *Survey) Assess() Findings {
	var out Findings
	if s.Ledger.State == meta.LedgerDeleting {
		return out
	}
	suspects := map[entry.StorageUUID]bool{}
	note := func(u entry.StorageUUID, why meta.RepairCause) {
		out.Causes |= why
		if !suspects[u] {
			suspects[u] = true
			out.Storages = append(out.Storages, u)
		}
	}
	for _, f := range Stretches(s.Ledger) {
		for _, slot := range f.Slots {
			switch {
			case s.View.lost(slot.UUID):
				note(slot.UUID, meta.CauseLost)
			case s.View.Bookies[slot.UUID].Emptying:
				note(slot.UUID, meta.CauseDecommission)
			}
		}
		if f.Settled {
			s.count(f, &out.Counts, note)
		}
	}
	if out.Counts.Misplaced > 0 {
		out.Causes |= meta.CauseMisplaced
	}
	if len(s.Ledger.Pending) > 0 {
		out.Causes |= meta.CauseIntent
	}
	return out
}

// count counts the entries of a settled fragment.
func (s *Survey) count(f Stretch, counts *meta.RepairCounts, note func(entry.StorageUUID, meta.RepairCause)) {
	if f.Last < f.First {
		return
	}
	r := s.Ledger.Replication
	asked := false
	for _, slot := range f.Slots {
		h := s.Holding(f.First, slot.UUID)
		asked = asked || h != nil && h.Err == ""
		if h != nil && h.Limbo && !s.View.lost(slot.UUID) {
			note(slot.UUID, meta.CauseMissing)
		}
	}
	total := entry.EntryID(f.entries())
	for class := range min(total, entry.EntryID(r.Ensemble)) {
		if !s.misplaced(f.Slots, f.First+class) {
			continue
		}
		counts.Misplaced += uint64((total-class-1)/entry.EntryID(r.Ensemble) + 1)
	}
	if !asked { // entries of one class are alike
		for class := range min(total, entry.EntryID(r.Ensemble)) {
			s.countEntry(f, f.First+class, uint64((total-class-1)/entry.EntryID(r.Ensemble)+1), counts, note)
		}
		return
	}
	for e := f.First; e <= f.Last; e++ {
		s.countEntry(f, e, 1, counts, note)
	}
}

// countEntry counts n entries that are like e.
func (s *Survey) countEntry(f Stretch, e entry.EntryID, n uint64, counts *meta.RepairCounts, note func(entry.StorageUUID, meta.RepairCause)) {
	r := s.Ledger.Replication
	copies, reached := 0, 0
	for slot, at := range f.Slots {
		if !has(r, slot, e) || s.View.lost(at.UUID) {
			continue
		}
		if h := s.Holding(f.First, at.UUID); h != nil && h.Err == "" && !h.Has(e) {
			note(at.UUID, meta.CauseMissing)
			continue
		}
		copies++
		if s.View.Bookies[at.UUID].Live {
			reached++
		}
	}
	if copies < r.WriteQuorum {
		counts.BelowWriteQuorum += n
	}
	if copies < r.AckQuorum {
		counts.BelowAckQuorum += n
	}
	if reached == 0 {
		counts.Unavailable += n
	}
}

// misplaced reports whether the copies of an entry share a host or span too few zones, as its slots are.
func (s *Survey) misplaced(slots []meta.Slot, e entry.EntryID) bool {
	r := s.Ledger.Replication
	hosts, zones := map[uint32]bool{}, map[string]bool{}
	for i, slot := range slots {
		if !has(r, i, e) {
			continue
		}
		if h := s.View.host(slot); h != 0 {
			if hosts[h] {
				return true
			}
			hosts[h] = true
		}
		if slot.Zone != "" {
			zones[slot.Zone] = true
		}
	}
	return r.MinZones > 1 && len(zones) < r.MinZones
}

// anyMisplaced reports whether some entry of a fragment would be misplaced in those slots.
func (s *Survey) anyMisplaced(f Stretch, slots []meta.Slot) bool {
	for e := f.First; e <= min(f.Last, f.First+entry.EntryID(s.Ledger.Ensemble)-1); e++ {
		if s.misplaced(slots, e) {
			return true
		}
	}
	return false
}
