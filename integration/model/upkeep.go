package model

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// moveCollection is garbage collection, on one bookie at a time. It reads the ledger's mark and the record, then what is here of
// the ledger, and judges; and then it deletes, by the mark. Between mark and record nothing happens: it could only make the
// deletion fail.
func (x *expander) moveCollection(s *state) {
	if s.looked == 0 {
		for b := range x.cfg.Bookies {
			k := &s.bookies[b]
			if k.is(gone) || !k.is(known|limbo) && !(x.record[s.record].l.State == meta.LedgerDeleting && x.record[s.record].named[b]) {
				continue
			}
			n := *s
			n.looked, n.collects = s.record+1, uint8(b)
			if v := x.judge(&n, b); v == bookie.Keep || v == bookie.Watch && k.sighted == 1+k.entries() {
				continue // nothing comes of it
			}
			n.bookies[b].flags = k.flags&^touched | marked
			x.emit(&n, "", "b%d: garbage collection reads the record: %s", b, x.record[s.record].l.State)
		}
		return
	}
	b := int(s.collects)
	n := *s
	k := &n.bookies[b]
	if s.dooms != 0 {
		n.looked, n.dooms, n.collects = 0, 0, 0
		if !k.is(marked) {
			x.emit(&n, "", "b%d: deletes nothing, its disk is lost", b)
			return
		}
		deleted := k.buryMarked(x.cfg)
		k.flags &^= marked | touched
		if !deleted {
			k.sighted = 0
			x.emit(&n, "", "b%d: does not delete the ledger, which was added to meanwhile", b)
			return
		}
		broken := ""
		if r := &x.record[s.record]; r.l.State != meta.LedgerDeleting && r.member[b] {
			broken = fmt.Sprintf("16: b%d deletes a ledger that is its own", b)
		}
		x.emit(&n, broken, "b%d: deletes the ledger", b)
		return
	}
	n.looked, n.collects = 0, 0
	if k.is(gone) {
		x.emit(&n, "", "b%d: is gone", b)
		return
	}
	k.flags &^= marked | touched
	switch x.judge(s, b) {
	case bookie.Delete:
		k.flags |= s.bookies[b].flags & (marked | touched)
		n.looked, n.collects, n.dooms = s.looked, s.collects, 1
		x.emit(&n, "", "b%d: decides to delete the ledger, of which it has %d entries", b, k.entries())
	case bookie.Watch:
		k.sighted = 1 + k.entries()
		x.emit(&n, "", "b%d: the ledger is closed and not its own; it has %d entries", b, k.entries())
	case bookie.Confirm:
		o := x.transact(&n, event(kindConfirm, 0, uint64(b)), confirmDeleted(b))
		x.emit(&n, o.broken, "b%d: confirms the deletion (T8)", b)
	default:
		k.sighted = 0
		x.emit(&n, "", "b%d: keeps the ledger", b)
	}
}

// judge is the verdict on what is on bookie b now, by the record that was read. The grace time is always over.
func (x *expander) judge(s *state, b int) bookie.Verdict {
	const grace = time.Minute
	k := &s.bookies[b]
	var seen bookie.Sighting
	if k.sighted > 0 {
		seen = bookie.Sighting{At: now.Add(-grace), Entries: int64(k.sighted - 1)}
	}
	here := bookie.Local{Stored: k.is(known), Entries: int64(k.entries())}
	return bookie.Judge(uuidOf(b), here, x.record[s.looked-1].l, nil, seen, now, grace)
}

// needs returns the entries that the slot of old in a fragment of record r holds.
func (x *expander) needs(p repair) (first entry.EntryID, set uint8) {
	l := x.record[p.record].l
	f := l.Fragments[p.fragment]
	end := l.Last
	if int(p.fragment) < len(l.Fragments)-1 {
		end = l.Fragments[p.fragment+1].First - 1
	}
	for e := f.First; e <= end; e++ {
		for i, b := range x.record[p.record].sets[e] {
			if b == int(p.old) && i >= 0 {
				set |= 1 << e
			}
		}
	}
	return f.First, set
}

// moveRepair is repair i: T6, copies, proof, T6.
func (x *expander) moveRepair(s *state, i int) {
	p := s.repair[i]
	switch p.phase {
	case idle:
		if i > 0 && s.repair[i-1].phase == idle {
			return
		}
		x.beginRepair(s, i)
		return
	case over:
		return
	case copying:
		x.sendCopies(s, i)
	case proved:
		n := *s
		f := x.record[p.record].l.Fragments[p.fragment]
		what := event(kindSwap, uint64(p.record)<<1|uint64(i), uint64(p.fragment)<<16|uint64(p.old)<<8|uint64(p.target))
		o := x.transact(&n, what, swapReplica(i, f, int(p.old), int(p.target), x.cfg.zone(int(p.target))))
		n.repair[i] = repair{phase: over}
		x.emit(&n, o.broken, "etcd: repair %d: b%d takes the place of b%d from entry %d (T6): %s", i+1, p.target, p.old, f.First, o)
	case copied:
	}
	if int(s.drops) < x.cfg.Drops {
		n := *s
		n.drops++
		first, _ := x.needs(p)
		o := x.transact(&n, event(kindDrop, uint64(first), uint64(p.target)), dropIntent(int(p.target), first))
		x.emit(&n, o.broken, "etcd: the intent of repair %d ends", i+1)
	}
}

func (x *expander) beginRepair(s *state, i int) {
	l := x.record[s.record].l
	for at, f := range l.Fragments {
		if at == len(l.Fragments)-1 && l.State != meta.LedgerClosed {
			continue
		}
		for _, slot := range f.Slots {
			for target := range x.cfg.Bookies {
				if s.bookies[target].is(gone) || x.cfg.Target != 0 && target != x.cfg.Target {
					continue
				}
				n := *s
				o := x.transact(&n, event(kindIntent, uint64(f.First)<<8|uint64(i), uint64(target)), addIntent(i, target, f.First))
				if o.err != nil {
					continue
				}
				n.repair[i] = repair{record: n.record, phase: copying, fragment: uint8(at), old: uint8(bookieOf(slot.UUID)), target: uint8(target)}
				x.emit(&n, o.broken, "etcd: repair %d is to copy from entry %d to b%d, in place of b%d (T6)", i+1, f.First, target, bookieOf(slot.UUID))
			}
		}
	}
}

// sendCopies reads what is needed, from any bookie that should have it, and sends it, all at once.
func (x *expander) sendCopies(s *state, i int) {
	p := s.repair[i]
	n := *s
	_, want := x.needs(p)
	for e := range len(x.cfg.Levels) {
		if want>>e&1 == 0 {
			continue
		}
		found := false
		for _, b := range x.record[p.record].sets[e] {
			found = found || b >= 0 && s.bookies[b].has>>e&1 != 0
		}
		if !found {
			return
		}
	}
	n.bookies[p.target].copies[i] |= want
	n.repair[i].phase = copied
	x.emit(&n, "", "repair %d: sends entries %s to b%d", i+1, entriesOf(want), p.target)
}

// prove ends the copying once the target says that it has everything.
func (x *expander) prove(n *state, i int) {
	p := &n.repair[i]
	if p.phase != copied {
		return
	}
	_, want := x.needs(*p)
	if n.bookies[p.target].has&want == want || x.cfg.lacks("a target proves that it has all entries") {
		p.phase = proved
	}
}

func (x *expander) moveCopy(s *state, b, e, i int) {
	answer := func(n *state, code bookiewire.Code) {
		n.bookies[b].copies[i] &^= 1 << e
		switch {
		case code == bookiewire.OK:
			x.prove(n, i)
		case n.repair[i].phase == copied:
			n.repair[i] = repair{phase: over}
		}
		x.emit(n, "", "b%d: entry %d copied by repair %d: %s", b, e, i+1, code)
	}
	term := uint8(x.record[s.repair[i].record].l.Term)
	if s.repair[i].phase == over {
		term = 0 // a latecomer
	}
	if !x.admission(s, b, e, true, term, func(n *state) { answer(n, bookiewire.NotAdmitted) }) {
		return
	}
	n := *s
	k := &n.bookies[b]
	code := k.addAgain(x.cfg, e, term)
	if code == bookiewire.OK {
		k.flags &^= admitsOther | staleOther
	}
	answer(&n, code)
}

// What a story is told with.

func bookiesOf(f meta.Fragment) string {
	var s []string
	for _, slot := range f.Slots {
		s = append(s, fmt.Sprintf("b%d", bookieOf(slot.UUID)))
	}
	return strings.Join(s, " ")
}

func tailOf(fragments []meta.Fragment) string {
	var s strings.Builder
	for _, f := range fragments {
		fmt.Fprintf(&s, ", from %d on %s", f.First, bookiesOf(f))
	}
	return s.String()
}

func entriesOf(set uint8) string {
	var s []string
	for e := range maxEntries {
		if set>>e&1 != 0 {
			s = append(s, strconv.Itoa(e))
		}
	}
	return strings.Join(s, ", ")
}

// String says what became of a transaction.
func (o outcome) String() string {
	switch o.result {
	case ledger.Applied:
		return "applied"
	case ledger.Lost:
		return "refused, the ledger is not the writer's any more"
	case ledger.NoOutcome:
		return "without an answer"
	case ledger.NotApplied:
	}
	return fmt.Sprintf("refused: %v", o.err)
}

func (x *expander) told(n *state) string {
	t := x.writer[n.writer].told
	return string(t[:len(x.cfg.Levels)])
}

func (x *expander) proposalOf(n *state) string {
	if !x.tell {
		return ""
	}
	w := &x.writer[n.writer]
	switch {
	case w.change != nil:
		f := w.change.Fragments
		return fmt.Sprintf("; proposes %s from entry %d", bookiesOf(f[len(f)-1]), f[len(f)-1].First)
	case w.end != nil:
		return fmt.Sprintf("; proposes to end at %d", w.end.Last)
	case w.phase == ledger.Withdrawn:
		return "; withdraws"
	}
	return ""
}

func (x *expander) recoveryWants(n *state, r int) string {
	if !x.tell {
		return ""
	}
	i := &x.recovery[n.recovery[r]]
	switch {
	case i.over:
		return "; gives up"
	case i.end != nil:
		return fmt.Sprintf("; proposes to end at %d", i.end.Last)
	}
	return ""
}
