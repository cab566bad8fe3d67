package model

import (
	"fmt"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// successor is a state that one event leads to.
type successor struct {
	s      state
	broken string // the rule that broke on the way
	what   string // told only on demand
}

// expander lists the successors of a state.
type expander struct {
	*world
	out  []successor
	tell bool
}

func (x *expander) emit(s *state, broken, format string, args ...any) {
	n := successor{s: *s, broken: broken}
	x.settle(&n.s)
	if x.tell {
		n.what = fmt.Sprintf(format, args...)
	}
	x.out = append(x.out, n)
}

func (x *expander) expand(s *state) []successor {
	x.out = x.out[:0]
	x.moveWriter(s)
	for b := range x.cfg.Bookies {
		x.moveNetwork(s, b)
		x.moveDisk(s, b)
	}
	for r := range x.cfg.Recoveries {
		x.moveRecovery(s, r)
	}
	if x.cfg.Delete && x.record[s.record].l.State == meta.LedgerClosed {
		n := *s
		o := x.transact(&n, event(kindDelete, 0, 0), deleteLedger)
		x.emit(&n, o.broken, "etcd: the ledger is to be deleted (T7): %v", o.err)
	}
	if x.cfg.Collect {
		x.moveCollection(s)
	}
	for i := range x.cfg.Repairs {
		x.moveRepair(s, i)
	}
	return x.out
}

func (x *expander) moveWriter(s *state) {
	w := &x.writer[s.writer]
	if s.late != 0 {
		n := *s
		n.late = 0
		o, what := x.propose(&n, s.late)
		x.emit(&n, o.broken, "etcd: %s, long after its writer gave up: %s", what, o)
	}
	if w.over {
		return
	}
	proposes := w.change != nil || w.end != nil
	switch {
	case proposes && s.answer == 0:
		n := *s
		o, what := x.propose(&n, s.writer)
		n.answer = x.answers[memoKey{s.record, event(kindChange, uint64(s.writer), 0)}] + 1
		x.emit(&n, o.broken, "etcd: %s: %s", what, o)
	case proposes:
		n := *s
		n.answer = 0
		o := x.outcomes[s.answer-1]
		broken := x.stepWriter(&n, event(kindOutcome, uint64(s.answer), 0), outcomeEvent(o))
		x.emit(&n, broken, "writer: hears that its transaction has been %s; LAC %d", o, x.writer[n.writer].lac)
	}
	if proposes && x.cfg.Lossy {
		n := *s
		if s.answer == 0 {
			n.late = s.writer
		}
		n.answer = 0
		o := outcome{result: ledger.NoOutcome, err: meta.ErrUnknownOutcome}
		if x.cfg.lacks("an unknown outcome ends the writer") {
			o.result, o.err = ledger.NotApplied, nil
		}
		broken := x.stepWriter(&n, event(kindNoOutcome, 0, 0), outcomeEvent(o))
		x.emit(&n, broken, "writer: gets no answer to its transaction")
	}
	if w.verifying {
		n := *s
		broken := x.stepWriter(&n, event(kindVerified, uint64(s.record), 0), verifiedEvent(x.record[s.record].l))
		x.emit(&n, broken, "writer: reads the record%s", x.proposalOf(&n))
	}
	if x.cfg.Close {
		n := *s
		if broken := x.stepWriter(&n, event(kindClose, 0, 0), requestClose); n.writer != s.writer || broken != "" {
			x.emit(&n, broken, "writer: wants to close%s", x.proposalOf(&n))
		}
	}
	if x.cfg.Crash {
		n := *s
		x.die(&n)
		x.emit(&n, "", "writer: dies")
	}
	for b := range x.cfg.Bookies {
		k := &s.bookies[b]
		for e := range len(x.cfg.Levels) {
			x.moveAnswer(s, k, b, e)
		}
	}
}

// propose carries out what a writer proposes.
func (x *expander) propose(n *state, writer uint32) (outcome, string) {
	w := &x.writer[writer]
	what := event(kindChange, uint64(writer), 0)
	if w.change != nil {
		o := x.transact(n, what, change(*w.change))
		f := w.change.Fragments
		return o, fmt.Sprintf("ensemble change (T2), from entry %d on %s", f[len(f)-1].First, bookiesOf(f[len(f)-1]))
	}
	o := x.transact(n, what, closing(meta.Closing{Ledger: w.l, Last: w.end.Last}))
	return o, fmt.Sprintf("end at %d by the writer (T3)", w.end.Last)
}

// die ends the writer without a word.
func (x *expander) die(n *state) {
	w := &x.writer[n.writer]
	if w.over {
		return
	}
	if n.answer == 0 && x.cfg.Lossy && (w.change != nil || w.end != nil) {
		n.late = n.writer
	}
	n.answer = 0
	x.stepWriter(n, event(kindWithdraw, 0, 0), withdrawEvent)
}

// moveAnswer is what the writer hears of an add.
func (x *expander) moveAnswer(s *state, k *disk, b, e int) {
	bit := uint8(1) << e
	if k.acked&bit != 0 {
		n := *s
		n.bookies[b].acked &^= bit
		n.bookies[b].awaited &^= bit
		broken := x.stepWriter(&n, event(kindAck, uint64(e), uint64(b)), ackEvent(e, b))
		x.emit(&n, broken, "writer: hears that b%d has entry %d; LAC %d, told %s%s", b, e, x.writer[n.writer].lac, x.told(&n), x.proposalOf(&n))
	}
	if k.awaited&bit == 0 {
		return
	}
	broken := k.is(gone)
	if !broken && (int(s.failures) == x.cfg.Failures || !x.cfg.mayFail(b)) {
		return
	}
	n := *s
	if !broken {
		n.failures++
	}
	x.fail(&n, b, e, bookiewire.Disconnected, "writer: gives up waiting for b%d's answer to entry %d", b, e)
}

// fail tells the writer, if it waits for it, that an add will not be acknowledged.
func (x *expander) fail(n *state, b, e int, code bookiewire.Code, format string, args ...any) {
	bit := uint8(1) << e
	broken := ""
	if n.bookies[b].awaited&bit != 0 {
		n.bookies[b].awaited &^= bit
		n.bookies[b].acked &^= bit
		broken = x.stepWriter(n, event(kindFail, uint64(e)<<8|uint64(code), uint64(b)), failEvent(e, b, code))
	}
	x.emit(n, broken, format+"%s", append(args, x.proposalOf(n))...)
}

// moveNetwork carries out what is on its way to bookie b.
func (x *expander) moveNetwork(s *state, b int) {
	k := &s.bookies[b]
	if k.is(gone) {
		return
	}
	for e := range len(x.cfg.Levels) {
		bit := uint8(1) << e
		if k.sent&bit != 0 {
			x.moveAdd(s, b, e)
		}
		for r := range k.recovered {
			if k.recovered[r]&bit != 0 {
				x.moveAddAgain(s, b, e, r)
			}
		}
		for r := range k.copies {
			if k.copies[r]&bit != 0 {
				x.moveCopy(s, b, e, r)
			}
		}
	}
}

// admission says whether an add may go on: it was let in, or needs no leave. Otherwise it emits what comes first.
func (x *expander) admission(s *state, b, e int, again bool, term uint8, refused func(n *state)) bool {
	k := &s.bookies[b]
	admits, stale := admitsWriter, staleWriter
	if again {
		admits, stale = admitsOther, staleOther
	}
	switch {
	case k.is(known):
		return true
	case !k.is(admits):
		n := *s
		if !x.admits(s.record, b, again, term) {
			refused(&n)
			return false
		}
		if !x.cfg.Admission {
			return true
		}
		n.bookies[b].flags = n.bookies[b].flags&^stale | admits
		x.emit(&n, "", "b%d: reads the record, which lets entry %d in", b, e)
		return false
	case k.is(stale) && !x.cfg.lacks("admission compares the generation"):
		n := *s
		n.bookies[b].flags &^= admits | stale
		refused(&n)
		return false
	}
	return true
}

func (x *expander) moveAdd(s *state, b, e int) {
	refuse := func(n *state, code bookiewire.Code) {
		n.bookies[b].sent &^= 1 << e
		x.fail(n, b, e, code, "b%d: refuses entry %d, %s", b, e, code)
	}
	if !x.admission(s, b, e, false, 0, func(n *state) { refuse(n, bookiewire.NotAdmitted) }) {
		return
	}
	n := *s
	k := &n.bookies[b]
	if code := k.add(x.cfg, e); code != bookiewire.OK {
		refuse(&n, code)
		return
	}
	k.flags &^= admitsWriter | staleWriter
	k.sent &^= 1 << e
	k.acked |= k.awaited & (1 << e)
	x.emit(&n, "", "b%d: has entry %d on disk", b, e)
}

func (x *expander) moveAddAgain(s *state, b, e, r int) {
	answer := func(n *state, code bookiewire.Code) {
		n.bookies[b].recovered[r] &^= 1 << e
		slot := -1
		for _, a := range x.recovery[n.recovery[r]].adds {
			if a[0] == e && a[2] == b {
				slot = a[1]
			}
		}
		broken := ""
		if slot >= 0 {
			broken = x.stepRecovery(n, r, event(kindAdd, uint64(slot)<<16|uint64(e)<<8|uint64(code), uint64(b)), writeBackEvent(e, slot, b, code))
		}
		x.emit(n, broken, "b%d: entry %d written back by R%d: %s%s", b, e, r+1, code, x.recoveryWants(n, r))
	}
	if !x.admission(s, b, e, true, s.term[r], func(n *state) { answer(n, bookiewire.NotAdmitted) }) {
		return
	}
	n := *s
	k := &n.bookies[b]
	code := k.addAgain(x.cfg, e, s.term[r])
	if code == bookiewire.OK {
		k.flags &^= admitsOther | staleOther
	}
	answer(&n, code)
}

// moveDisk is what befalls bookie b.
func (x *expander) moveDisk(s *state, b int) {
	k := &s.bookies[b]
	if k.is(gone) {
		return
	}
	if int(s.lost) < x.cfg.losses() {
		n := *s
		n.lost++
		if x.cfg.Limbo > 0 {
			n.bookies[b].lose(x.cfg)
			x.emit(&n, "", "b%d: comes back with nothing on its disk", b)
		} else {
			x.vanish(&n, b)
			x.emit(&n, "", "b%d: its disk is lost for good", b)
		}
	}
	if x.cfg.Retire && !x.record[s.record].named[b] {
		n := *s
		if o := x.transact(&n, event(kindRetire, 0, uint64(b)), retire(b)); o.result == ledger.Applied {
			x.vanish(&n, b)
			x.emit(&n, o.broken, "etcd: b%d is retired", b)
		}
	}
}

func (x *expander) vanish(n *state, b int) {
	k := &n.bookies[b]
	*k = disk{flags: gone, awaited: k.awaited}
}

func (x *expander) moveRecovery(s *state, r int) {
	id := s.recovery[r]
	if id == 0 {
		if r > 0 && s.recovery[r-1] == 0 {
			return
		}
		x.startRecovery(s, r)
		return
	}
	i := &x.recovery[id]
	if i.end != nil {
		n := *s
		c := meta.Closing{Ledger: i.m, Last: i.end.Last, Tail: i.end.Tail, Recovery: true, Term: i.m.Term}
		o := x.transact(&n, event(kindEnd, uint64(id), 0), closing(c))
		x.stepRecovery(&n, r, event(kindOver, 0, 0), recoveryOver)
		x.emit(&n, o.broken, "etcd: end at %d by R%d (T5)%s: %s", i.end.Last, r+1, tailOf(i.end.Tail), o)
	}
	for _, slot := range i.fences {
		x.moveFence(s, r, slot, i.slots[slot])
	}
	beyond := -1
	for _, q := range i.reads {
		if q[0] >= len(x.cfg.Levels) {
			beyond = max(beyond, q[0])
			continue
		}
		x.moveRead(s, r, q[0], q[1], i.slots[q[1]])
	}
	if beyond >= 0 {
		x.moveNothing(s, r, beyond, i.slots)
	}
	for _, a := range i.adds {
		b := a[2]
		broken := s.bookies[b].is(gone)
		if !broken && int(s.recoveryFailures) == x.cfg.RecoveryFailures {
			continue
		}
		n := *s
		if !broken {
			n.recoveryFailures++
		}
		what := event(kindAdd, uint64(a[1])<<16|uint64(a[0])<<8|uint64(bookiewire.Disconnected), uint64(b))
		fault := x.stepRecovery(&n, r, what, writeBackEvent(a[0], a[1], b, bookiewire.Disconnected))
		x.emit(&n, fault, "R%d: gives up waiting for b%d to take entry %d%s", r+1, b, a[0], x.recoveryWants(&n, r))
	}
}

func (x *expander) startRecovery(s *state, r int) {
	if x.record[s.record].l.State > meta.LedgerInRecovery {
		return
	}
	n := *s
	o := x.transact(&n, event(kindStart, 0, 0), startRecovery)
	m := o.l
	n.term[r] = uint8(m.Term)
	n.recovery[r] = x.recoveries.begin(recoveryStart(m))
	if x.cfg.Dead {
		x.die(&n)
	}
	f := m.Fragments[len(m.Fragments)-1]
	x.emit(&n, o.broken, "etcd: R%d begins, term %d (T4); fences and reads %s, from entry %d", r+1, m.Term, bookiesOf(f), f.First)
}

func (x *expander) moveFence(s *state, r, slot, b int) {
	n := *s
	code := bookiewire.Disconnected
	if !s.bookies[b].is(gone) {
		code = n.bookies[b].fence(x.cfg, s.term[r])
	}
	if code == bookiewire.Fenced { // and gives up, which it may do at any time
		return
	}
	top := int8(-1)
	if code == bookiewire.OK {
		top = x.writer[s.writer].lac
	}
	for lac := int8(-1); lac <= top; lac++ {
		m := n
		what := event(kindFence, uint64(slot)<<8|uint64(code), uint64(lac+1))
		broken := x.stepRecovery(&m, r, what, fenceEvent(slot, int(lac), code))
		x.emit(&m, broken, "R%d: fences b%d: %s, LAC %d%s", r+1, b, code, lac, x.recoveryWants(&m, r))
	}
}

func (x *expander) moveRead(s *state, r, e, slot, b int) {
	n := *s
	code := bookiewire.Disconnected
	if !s.bookies[b].is(gone) {
		code = n.bookies[b].read(x.cfg, e, s.term[r])
	}
	if code == bookiewire.Fenced {
		return
	}
	what := event(kindRead, uint64(slot)<<8|uint64(code), uint64(e))
	broken := x.stepRecovery(&n, r, what, readEvent(e, slot, code))
	x.emit(&n, broken, "R%d: reads entry %d from b%d: %s%s", r+1, e, b, code, x.recoveryWants(&n, r))
}

// moveNothing is the reading of an entry that never was, in one event. It fences nobody: that would only stop who is to be
// caught.
func (x *expander) moveNothing(s *state, r, e int, slots []int) {
	n := *s
	var unknown uint64
	for slot, b := range slots {
		if s.bookies[b].is(gone) || s.bookies[b].is(limbo) && !x.cfg.lacks("limbo denies nothing") {
			unknown |= 1 << slot
		}
	}
	broken := x.stepRecovery(&n, r, event(kindNothing, uint64(e), unknown), nothingEvent(e, unknown))
	x.emit(&n, broken, "R%d: entry %d is nowhere%s", r+1, e, x.recoveryWants(&n, r))
}
