package ledger_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

func (s *sim) apply(op string, f func(l *meta.Ledger)) {
	old := s.record
	l := clone(old)
	f(&l)
	l.Rev++
	if l.State < old.State || l.Term < old.Term {
		s.failf("I6: %s takes the record from %s/%d to %s/%d", op, old.State, old.Term, l.State, l.Term)
	}
	for i := 1; i < len(l.Fragments); i++ {
		if l.Fragments[i].First <= l.Fragments[i-1].First {
			s.failf("I7: %s: fragments start at %d, then %d", op, l.Fragments[i-1].First, l.Fragments[i].First)
		}
	}
	for i := range min(len(old.Fragments), len(l.Fragments)) - 1 {
		if op != "T6" && !sameFragment(old.Fragments[i], l.Fragments[i]) {
			s.failf("I7: %s changes a fragment that is not the last", op)
		}
	}
	s.record = l
	s.logf("etcd: %s: %s term %d %s last %d", op, l.State, l.Term, s.fragments(l), l.Last)
	if l.State == meta.LedgerClosed && old.State != meta.LedgerClosed {
		s.checkClosed(op)
	}
}

func (s *sim) fragments(l meta.Ledger) string {
	var b []byte
	for _, f := range l.Fragments {
		b = fmt.Appendf(b, "[%d:", f.First)
		for _, x := range f.Slots {
			b = fmt.Appendf(b, " %s", s.name(x.UUID))
		}
		b = append(b, ']')
	}
	return string(b)
}

func (s *sim) etcdDelay() time.Duration {
	if !s.healed && s.rng.IntN(15) == 0 {
		return time.Duration(s.rng.IntN(300)) * time.Millisecond
	}
	return s.delay()
}

// txn sends a transaction that is applied only to the revision that was seen, and reports whether it was: late, and at times
// never, though it may have been applied, or be yet.
func (s *sim) txn(seen int64, apply func(), report func(ok bool)) (unanswered bool) {
	unanswered = !s.healed && s.rng.IntN(8) == 0
	s.after(s.etcdDelay(), func() {
		ok := s.record.Rev == seen
		if ok {
			apply()
		}
		if !unanswered {
			s.after(s.etcdDelay(), func() { report(ok) })
		}
	})
	return unanswered
}

// changeEnsemble is the runner's way to a definite outcome of T2: the record tells, and as long as it does not the
// transaction is sent again, to the revision that was read.
func (s *sim) changeEnsemble(ch ledger.Change) {
	s.logf("W: propose T2 %s", s.fragments(meta.Ledger{Fragments: ch.Fragments}))
	s.tryChange(ch, ch.Ledger.Rev)
}

func (s *sim) tryChange(ch ledger.Change, seen int64) {
	n := len(ch.Ledger.Fragments) - 1
	was, proposed := ch.Ledger.Fragments[n], ch.Fragments[len(ch.Fragments)-1]
	look := func() {
		l := clone(s.record)
		now := l.Fragments[len(l.Fragments)-1]
		s.after(s.etcdDelay(), func() {
			result := ledger.Lost
			switch {
			case l.State != meta.LedgerOpen || l.Nonce != ch.Ledger.Nonce:
			case sameFragment(now, proposed):
				result = ledger.Applied
			case sameFragment(now, was):
				s.tryChange(ch, l.Rev)
				return
			default:
				s.failf("somebody else changed the last fragment of an open ledger")
			}
			s.logf("W: T2 result %d", result)
			s.stepWriter(func(c *ledger.WriterCore) { c.ChangeDone(result, l, nil) })
		})
	}
	if s.txn(seen, func() {
		if s.record.State != meta.LedgerOpen {
			s.failf("T2 of a ledger that is %s", s.record.State)
		}
		s.apply("T2", func(l *meta.Ledger) {
			l.Fragments = append(l.Fragments[:n:n], clone(meta.Ledger{Fragments: ch.Fragments[n:]}).Fragments...)
		})
		s.checkLAC()
	}, func(bool) { look() }) {
		s.after(s.etcdDelay()+20*time.Millisecond, look)
	}
}

func (s *sim) closeLedger(p ledger.CloseProposal) {
	s.logf("W: propose T3 last %d", p.Last)
	refuse := s.rng.IntN(4) == 0
	report := func(result ledger.TxnResult) {
		l := clone(s.record)
		s.after(s.etcdDelay(), func() {
			s.logf("W: T3 result %d", result)
			s.stepWriter(func(c *ledger.WriterCore) { c.CloseDone(result, l, nil) })
			if result == ledger.NotApplied && s.rng.IntN(2) == 0 {
				s.requestClose()
			}
		})
	}
	// Without an answer it may still be applied after the writer has withdrawn.
	unanswered := s.rng.IntN(6) == 0
	if unanswered {
		report(ledger.NoOutcome)
	}
	s.after(s.etcdDelay(), func() {
		result := ledger.NotApplied
		switch {
		case s.record.State != meta.LedgerOpen:
			result = ledger.Lost
		case !refuse:
			result = ledger.Applied
			s.apply("T3", func(l *meta.Ledger) { l.State, l.Last, l.Length = meta.LedgerClosed, p.Last, p.Length })
		}
		if !unanswered {
			report(result)
		}
	})
}

func (s *sim) requestClose() {
	until := s.now.Add(time.Duration(s.rng.IntN(60)) * time.Millisecond)
	s.stepWriter(func(c *ledger.WriterCore) { c.RequestClose(until) })
}

// repair is T6: a slot of a fragment that is not the last moves to another bookie, entries first.
func (s *sim) repair() {
	if len(s.record.Fragments) < 2 || s.record.State >= meta.LedgerClosed {
		return
	}
	at := s.rng.IntN(len(s.record.Fragments) - 1)
	f := s.record.Fragments[at]
	slot := s.rng.IntN(len(f.Slots))
	target := s.bookies[s.rng.IntN(len(s.bookies))]
	if slices.ContainsFunc(f.Slots, func(x meta.Slot) bool { return x.UUID == target.uuid }) || s.zones[target.uuid] != f.Slots[slot].Zone {
		return
	}
	for e := f.First; e < s.record.Fragments[at+1].First; e++ {
		if have, q := s.holders(e); q.WriteSet(e).Has(slot) && have != 0 {
			target.disk.has[e], target.mem.has[e] = s.bodies[e], s.bodies[e]
			target.disk.known, target.mem.known = true, true
		}
	}
	s.repairs++
	s.apply("T6", func(l *meta.Ledger) { l.Fragments[at].Slots[slot].UUID = target.uuid })
}

// --- recovery's runner ---

type simRecovery struct {
	s    *sim
	n    int
	core *ledger.RecoveryCore
}

// startRecovery is T4, and an attempt; it repeats until the ledger is closed. T4 whose reply is lost is sent again, and
// raises the term once more.
func (s *sim) startRecovery(n int) {
	s.after(s.etcdDelay(), func() {
		if s.record.State >= meta.LedgerClosed {
			return
		}
		s.apply("T4", func(l *meta.Ledger) { l.State, l.Term = meta.LedgerInRecovery, l.Term+1 })
		if !s.healed && s.rng.IntN(12) == 0 {
			s.startRecovery(n)
			return
		}
		m := clone(s.record)
		s.after(s.etcdDelay(), func() {
			r := &simRecovery{s: s, n: n, core: ledger.NewRecoveryCore(s.cfg, m, s.now)}
			r.step(func(*ledger.RecoveryCore) {})
			r.tick()
		})
	})
}

func (r *simRecovery) tick() {
	if r.core == nil {
		return
	}
	r.s.after(5*time.Millisecond, func() {
		if r.core != nil {
			r.step(func(c *ledger.RecoveryCore) { c.Tick(r.s.now) })
			r.tick()
		}
	})
}

func (r *simRecovery) over(err error) {
	s := r.s
	s.logf("R%d: over: %v", r.n, err)
	r.core = nil
	if s.record.State < meta.LedgerClosed {
		s.after(time.Duration(1+s.rng.IntN(80))*time.Millisecond, func() { s.startRecovery(r.n) })
	}
}

func (r *simRecovery) step(f func(*ledger.RecoveryCore)) {
	s, c := r.s, r.core
	if c == nil {
		return
	}
	c.Now(s.now)
	f(c)
	for rd := c.Ready(); rd.NeedCandidates; rd = c.Ready() {
		rd.NeedCandidates = false
		c.Candidates(s.candidates())
	}
	rd := *c.Ready()
	c.Done()
	if rd.Abort != nil {
		r.over(rd.Abort)
		return
	}
	m, f0 := c.Ledger(), c.Fragment()
	rd.Fence.Each(func(i int) { r.fence(m, f0.Slots[i].UUID, i) })
	for _, q := range rd.Reads {
		q.Slots.Each(func(i int) { r.read(m, f0.Slots[i].UUID, i, q.Entry) })
	}
	for _, w := range rd.Writes {
		if !bytes.Equal(w.Body, s.bodies[w.Entry]) {
			s.failf("I5: recovery writes e%d with another body", w.Entry)
		}
		w.Slots.Each(func(i int) { r.write(m, w.Ensemble[i].UUID, i, w, c.Base()) })
	}
	if rd.Finish != nil {
		r.finish(m, *rd.Finish)
	}
}

func (r *simRecovery) fence(m meta.Ledger, u entry.StorageUUID, i int) {
	s, c := r.s, r.core
	done := func(lac entry.EntryID, code bookiewire.Code) func() {
		return func() {
			if r.core == c {
				r.step(func(c *ledger.RecoveryCore) { c.FenceDone(i, lac, code) })
			}
		}
	}
	s.request(u, func(b *simBookie) func() func() {
		if !b.fence(m.Term) {
			return func() func() { return done(0, bookiewire.Fenced) }
		}
		s.logf("%s: fenced by R%d term %d", s.name(u), r.n, m.Term)
		lac := b.mem.lac
		return func() func() {
			s.promises(b, m.Term)
			return done(lac, bookiewire.OK)
		}
	}, done(0, bookiewire.Disconnected))
}

func (r *simRecovery) read(m meta.Ledger, u entry.StorageUUID, i int, e entry.EntryID) {
	s, c := r.s, r.core
	done := func(code bookiewire.Code, b []byte) func() {
		return func() {
			if r.core == c {
				s.logf("R%d: read e%d from %s: %s", r.n, e, s.name(u), code)
				r.step(func(c *ledger.RecoveryCore) { c.ReadDone(e, i, code, entry.Checksum(simLedger, e, b), b) })
			}
		}
	}
	s.request(u, func(b *simBookie) func() func() {
		if !b.fence(m.Term) {
			return func() func() { return done(bookiewire.Fenced, nil) }
		}
		have := b.mem.has[e]
		damaged := s.rng.IntN(50) == 0 && !s.healed
		return func() func() {
			s.promises(b, m.Term)
			switch {
			case have == nil:
				b.denied[e] = true
				return done(bookiewire.NoEntry, nil)
			case damaged:
				return func() {
					if r.core == c {
						dust := append([]byte("?"), have[1:]...)
						r.step(func(c *ledger.RecoveryCore) {
							c.ReadDone(e, i, bookiewire.OK, entry.Checksum(simLedger, e, have), dust)
						})
					}
				}
			}
			return done(bookiewire.OK, have)
		}
	}, done(bookiewire.Disconnected, nil))
}

func (r *simRecovery) write(m meta.Ledger, u entry.StorageUUID, i int, w ledger.Send, base entry.EntryID) {
	s, c := r.s, r.core
	done := func(code bookiewire.Code) func() {
		return func() {
			if r.core == c {
				r.step(func(c *ledger.RecoveryCore) { c.AddDone(w.Entry, i, u, code) })
			}
		}
	}
	s.request(u, func(b *simBookie) func() func() {
		code := b.add(bookiewire.Add{Entry: w.Entry, Term: m.Term, Recovery: true, LAC: base, Body: w.Body}, true)
		s.logf("%s: R%d writes e%d (lac %d): %s", s.name(u), r.n, w.Entry, base, code)
		return func() func() {
			if code == bookiewire.OK {
				b.acked[w.Entry] = true
			}
			return done(code)
		}
	}, done(bookiewire.Disconnected))
}

func (r *simRecovery) finish(m meta.Ledger, end ledger.RecoveryEnd) {
	s := r.s
	unanswered := !s.healed && s.rng.IntN(8) == 0
	if unanswered { // given up before it is applied
		r.over(nil)
	}
	s.after(s.etcdDelay(), func() {
		n := len(s.record.Fragments)
		ok := s.record.State == meta.LedgerInRecovery && s.record.Term == m.Term &&
			sameFragment(s.record.Fragments[n-1], m.Fragments[len(m.Fragments)-1])
		if ok {
			s.recovered++
			s.apply("T5", func(l *meta.Ledger) {
				if len(end.Tail) > 0 {
					if end.Tail[0].First == l.Fragments[n-1].First {
						n--
					}
					l.Fragments = append(l.Fragments[:n:n], clone(meta.Ledger{Fragments: end.Tail}).Fragments...)
				}
				l.State, l.Last = meta.LedgerClosed, end.Last
			})
		}
		if !unanswered {
			s.after(s.etcdDelay(), func() { r.over(nil) })
		}
	})
}

// --- checks ---

// checkLAC is invariant 3: every entry up to the LAC lies on a valid set of the fragment that metadata names for it.
func (s *sim) checkLAC() {
	if s.record.State >= meta.LedgerClosed && s.w.LAC() > s.record.Last {
		s.failf("I1: LAC %d above the end %d of a closed ledger", s.w.LAC(), s.record.Last)
	}
	for e := entry.EntryID(0); e <= s.w.LAC(); e++ {
		if have, q := s.holders(e); !q.Valid(have) || !s.validByHand(e, have) {
			s.failf("I3: LAC is %d, but e%d lies on slots %b only", s.w.LAC(), e, have)
		}
	}
	s.exposed = max(s.exposed, s.w.LAC())
}

// validByHand is the ack predicate in the words of the protocol.
func (s *sim) validByHand(e entry.EntryID, have quorum.Set) bool {
	zones := map[string]bool{}
	have.Each(func(i int) { zones[ledger.FragmentOf(s.record.Fragments, e).Slots[i].Zone] = true })
	return have.Len() >= s.r.AckQuorum && len(zones) >= s.r.MinZones
}

func (s *sim) checkClosed(op string) {
	l := s.record
	if s.exposed > l.Last {
		s.failf("I4: %s ends the ledger at %d, a reader may have seen %d", op, l.Last, s.exposed)
	}
	if s.w.LAC() > l.Last {
		s.failf("I1: %s ends the ledger at %d, confirmed is %d", op, l.Last, s.w.LAC())
	}
	for e := entry.EntryID(0); e <= l.Last; e++ {
		if have, _ := s.holders(e); have.Len() < s.r.AckQuorum {
			s.failf("I2: %s ends the ledger at %d, but e%d lies on slots %b only", op, l.Last, e, have)
		}
	}
}

func (s *sim) checkEnd() {
	if s.record.State != meta.LedgerClosed {
		s.failf("I22: the ledger is not closed in the end but %s", s.record.State)
		return
	}
	for i, r := range s.results {
		if r.done != 1 {
			s.failf("append %d is done %d times", i, r.done)
			continue
		}
		var ae *ledger.AppendError
		within := entry.EntryID(i) <= s.record.Last && r.id != entry.NoEntry
		switch {
		case r.err == nil && (r.level == ledger.AckQuorum || r.level == ledger.AckAll) && !within:
			s.failf("I1: e%d was acknowledged, the ledger ends at %d", i, s.record.Last)
		case r.dropped && within:
			s.failf("I19: e%d was dropped, the ledger ends at %d", i, s.record.Last)
		case errors.As(r.err, &ae) && ae.Outcome == ledger.NotWritten && within:
			s.failf("I19: e%d is reported not written, the ledger ends at %d", i, s.record.Last)
		case r.err == nil && r.level == ledger.AckAll:
			if have, q := s.holders(r.id); have != q.WriteSet(r.id) {
				s.failf("all: e%d was acknowledged by all, and lies on slots %b", r.id, have)
			}
		}
	}
	for _, b := range s.bookies {
		for e, body := range b.disk.has {
			if !bytes.Equal(body, s.bodies[e]) {
				s.failf("I5: %s has another body for e%d", s.name(b.uuid), e)
			}
		}
	}
	if s.returned != s.appended {
		s.failf("%d bytes were appended, %d released or given back", s.appended, s.returned)
	}
	if s.exposed > s.record.Last {
		s.failf("I4: the ledger ends at %d, a reader may have seen %d", s.record.Last, s.exposed)
	}
}

// tally counts what happened over many seeds.
type tally struct {
	Runs, Changes, Pulled, Recovered, Closed, Repairs, Acked, All, Unknown, NotWritten, Dropped, LostWrites int
}

func (k *tally) add(s *sim) {
	k.Runs++
	k.Changes += len(s.record.Fragments) - 1
	k.Pulled += s.pulled
	k.Recovered += s.recovered
	if s.recovered == 0 {
		k.Closed++
	}
	k.Repairs += s.repairs
	k.LostWrites += s.lostWrites
	for _, r := range s.results {
		var ae *ledger.AppendError
		switch {
		case r.dropped:
			k.Dropped++
		case r.err == nil && r.level == ledger.AckAll:
			k.All++
		case r.err == nil:
			k.Acked++
		case errors.As(r.err, &ae) && ae.Outcome == ledger.NotWritten:
			k.NotWritten++
		default:
			k.Unknown++
		}
	}
}

func (k *tally) merge(o tally) {
	k.Runs += o.Runs
	k.Changes += o.Changes
	k.Pulled += o.Pulled
	k.Recovered += o.Recovered
	k.Closed += o.Closed
	k.Repairs += o.Repairs
	k.Acked += o.Acked
	k.All += o.All
	k.Unknown += o.Unknown
	k.NotWritten += o.NotWritten
	k.Dropped += o.Dropped
	k.LostWrites += o.LostWrites
}
