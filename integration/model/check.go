package model

import (
	"fmt"

	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// check returns the rule that s breaks, or "".
func (w *world) check(s *state) string {
	r, k := &w.record[s.record], &w.writer[s.writer]
	ended := r.l.State >= meta.LedgerClosed
	if ended {
		switch {
		case k.lac > r.last:
			return fmt.Sprintf("1: entry %d was confirmed, the ledger ends at %d", k.lac, r.last)
		case s.exposed > r.last:
			return fmt.Sprintf("4: readers were let up to entry %d, the ledger ends at %d", s.exposed, r.last)
		}
	}
	for e, level := range w.cfg.Levels {
		if broken := w.checkTold(s, r, k, int8(e), level, ended); broken != "" {
			return broken
		}
	}
	if r.l.State == meta.LedgerDeleting {
		return ""
	}
	for e := range int8(len(w.cfg.Levels)) {
		copies := w.copies(s, r, int(e))
		enough := w.enough(r, copies, int(e))
		switch {
		case ended && e <= r.last && copies.Len() < w.cfg.AckQuorum-w.cfg.losses():
			return fmt.Sprintf("2: entry %d of the closed ledger has %d copies where the record says", e, copies.Len())
		case !ended && e <= k.lac && !enough:
			return fmt.Sprintf("3: entry %d is confirmed, and has %d copies where the record says", e, copies.Len())
		case k.told[e] == '+' && w.cfg.Levels[e] == ledger.AckAll && w.cfg.losses() == 0 && copies.Len() < w.cfg.WriteQuorum:
			return fmt.Sprintf("3: entry %d was acknowledged by all, and has %d copies where the record says", e, copies.Len())
		}
	}
	return ""
}

// checkTold checks what the append of entry e was told.
func (w *world) checkTold(s *state, r *recordInfo, k *writerInfo, e int8, level ledger.AckLevel, ended bool) string {
	switch told := k.told[e]; {
	case told == 'x' && ended && e <= r.last:
		return fmt.Sprintf("19: entry %d was told not to be written, the ledger ends at %d", e, r.last)
	case told == 'x' && !ended:
		return fmt.Sprintf("19: entry %d was told not to be written, the ledger has no end", e)
	case told != '+':
	case level == ledger.AckQuorum || level == ledger.AckAll:
		switch {
		case e > k.lac:
			return fmt.Sprintf("20: entry %d was told to be stored, the LAC is %d", e, k.lac)
		case ended && e > r.last:
			return fmt.Sprintf("1: entry %d was acknowledged, the ledger ends at %d", e, r.last)
		}
	case level == ledger.AckOne:
		for before := range e + 1 {
			if !w.somewhere(s, int(before)) && w.cfg.losses() == 0 && !ended {
				return fmt.Sprintf("20: entry %d was acknowledged by one, entry %d is nowhere", e, before)
			}
		}
		if w.cfg.OneKept && ended && e > r.last {
			return fmt.Sprintf("1: entry %d was acknowledged by one, the ledger ends at %d", e, r.last)
		}
	}
	return ""
}

func (w *world) somewhere(s *state, e int) bool {
	for b := range s.bookies {
		if s.bookies[b].has>>e&1 != 0 {
			return true
		}
	}
	return false
}

// copies returns the slots of entry e's write set, in the fragment that the record gives it, that have it.
func (w *world) copies(s *state, r *recordInfo, e int) quorum.Set {
	var set quorum.Set
	for slot, b := range r.sets[e] {
		if b >= 0 && s.bookies[b].has>>e&1 != 0 {
			set |= 1 << slot
		}
	}
	return set
}

// enough reports whether copies make entry e count; lost disks apart.
func (w *world) enough(r *recordInfo, copies quorum.Set, e int) bool {
	if w.cfg.losses() == 0 {
		return r.quorums[e].Valid(copies)
	}
	return copies.Len() >= w.cfg.AckQuorum-w.cfg.losses()
}
