package ledger_test

import (
	"bytes"
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// sim is one small cluster under a seed: a writer, recoveries, bookies, one metadata record and repair, driven by a heap
// of events in virtual time. Messages are delayed, reordered and lost; bookies crash, stop and come back. It checks the
// protocol's invariants, named by their numbers in the comments, as it goes and at the end.
type sim struct {
	rng  *rand.Rand
	now  time.Time
	heap simHeap
	seq  int
	err  error

	r       meta.Replication
	zones   map[entry.StorageUUID]string
	bookies []*simBookie
	record  meta.Ledger
	cfg     ledger.Config
	healed  bool
	trace   []string
	verbose bool

	w          *ledger.WriterCore
	tickAt     time.Time
	bodies     map[entry.EntryID][]byte
	results    []*simResult // by append
	lastByLvl  map[ledger.AckLevel]entry.EntryID
	appended   int64
	returned   int64 // released, or given back
	exposed    entry.EntryID
	recovering int
	recovered  int
	repairs    int
	pulled     int // fragments that begin before the LAC
}

type simResult struct {
	level   ledger.AckLevel
	done    int
	dropped bool
	id      entry.EntryID
	err     error
}

type simBookie struct {
	uuid    entry.StorageUUID
	up      bool
	stopped bool
	queue   []func() // while stopped
	term    entry.Term
	lac     entry.EntryID
	has     map[entry.EntryID][]byte
	denied  map[entry.EntryID]bool // said no to a fencing read
}

type simEvent struct {
	at  time.Time
	seq int
	f   func()
}

type simHeap []simEvent

func (h simHeap) Len() int { return len(h) }
func (h simHeap) Less(i, j int) bool {
	if h[i].at.Equal(h[j].at) {
		return h[i].seq < h[j].seq
	}
	return h[i].at.Before(h[j].at)
}
func (h simHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *simHeap) Push(x any)   { *h = append(*h, x.(simEvent)) }
func (h *simHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func (s *sim) after(d time.Duration, f func()) {
	s.seq++
	heap.Push(&s.heap, simEvent{s.now.Add(d), s.seq, f})
}

// delay is mostly short, at times long enough to overtake and to time out.
func (s *sim) delay() time.Duration {
	if s.healed {
		return time.Duration(1+s.rng.IntN(500)) * time.Microsecond
	}
	switch s.rng.IntN(20) {
	case 0:
		return time.Duration(s.rng.IntN(150)) * time.Millisecond
	case 1, 2, 3:
		return time.Duration(s.rng.IntN(15)) * time.Millisecond
	}
	return time.Duration(1+s.rng.IntN(1500)) * time.Microsecond
}

func (s *sim) failf(format string, a ...any) {
	if s.err == nil {
		s.err = fmt.Errorf(format, a...)
	}
}

func (s *sim) logf(format string, a ...any) {
	if s.verbose {
		s.trace = append(s.trace, fmt.Sprintf("%8s  ", s.now.Sub(simStart).Round(10*time.Microsecond))+fmt.Sprintf(format, a...))
	}
}

var (
	simStart  = time.Unix(1_700_000_000, 0)
	simShapes = []meta.Replication{
		{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 4, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 3, WriteQuorum: 2, AckQuorum: 2},
		{Ensemble: 2, WriteQuorum: 2, AckQuorum: 2},
		{Ensemble: 2, WriteQuorum: 2, AckQuorum: 1},
		{Ensemble: 4, WriteQuorum: 4, AckQuorum: 2, MinZones: 2},
		{Ensemble: 5, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 4, WriteQuorum: 4, AckQuorum: 3, MinZones: 2},
		{Ensemble: 1, WriteQuorum: 1, AckQuorum: 1},
	}
)

const simLedger = entry.LedgerID(77)

func newSim(seed uint64) *sim {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := &sim{
		rng: rng, now: simStart, r: simShapes[rng.IntN(len(simShapes))], bodies: map[entry.EntryID][]byte{},
		lastByLvl: map[ledger.AckLevel]entry.EntryID{}, exposed: entry.NoEntry, zones: map[entry.StorageUUID]string{},
	}
	n := s.r.Ensemble + rng.IntN(4)
	for i, u := range bookieclient.FakeUUIDs(n) {
		s.bookies = append(s.bookies, &simBookie{
			uuid: u, up: true, lac: entry.NoEntry, has: map[entry.EntryID][]byte{}, denied: map[entry.EntryID]bool{},
		})
		s.zones[u] = string(rune('a' + i%2))
	}
	s.cfg = ledger.Config{
		SuspectAfter: 30 * time.Millisecond, DelayedChange: time.Duration(5+rng.IntN(60)) * time.Millisecond,
		RetryAfter: 4 * time.Millisecond, StallTimeout: 100 * time.Millisecond, IdleLAC: 8 * time.Millisecond,
		RequestTimeout: 40 * time.Millisecond, NegativeWait: time.Duration(rng.IntN(20)) * time.Millisecond,
		RecoveryWindow: 1 + rng.IntN(6), HandOverAfter: time.Duration(1+rng.IntN(40)) * time.Millisecond, MaxFragments: 2 + rng.IntN(8), Seed: seed + 1,
	}
	if rng.IntN(3) == 0 {
		s.cfg.StragglerBytes = int64(400 + rng.IntN(2000))
	}
	s.record = meta.Ledger{ID: simLedger, Nonce: 9, Rev: 1, Replication: s.r, Last: entry.NoEntry, Fragments: []meta.Fragment{{}}}
	for i := range s.r.Ensemble {
		u := s.bookies[i].uuid
		s.record.Fragments[0].Slots = append(s.record.Fragments[0].Slots, meta.Slot{UUID: u, Zone: s.zones[u]})
	}
	s.w = ledger.NewWriterCore(s.cfg, clone(s.record), s.now)
	return s
}

func (s *sim) bookie(u entry.StorageUUID) *simBookie {
	for _, b := range s.bookies {
		if b.uuid == u {
			return b
		}
	}
	panic("no such bookie")
}

func (s *sim) name(u entry.StorageUUID) string {
	return fmt.Sprint("b", slices.IndexFunc(s.bookies, func(b *simBookie) bool { return b.uuid == u }))
}

func (s *sim) candidates() []ledger.Candidate {
	var list []ledger.Candidate
	for i, b := range s.bookies {
		// The registration of a bookie that is down stays for a while: it may be chosen in vain.
		if b.up || s.rng.IntN(4) == 0 {
			list = append(list, ledger.Candidate{UUID: b.uuid, Host: strconv.Itoa(i), Zone: s.zones[b.uuid], Writable: true})
		}
	}
	return list
}

// request carries a request to a bookie and its answer back. answer runs at the bookie and returns what runs at the
// caller; lost is what the caller hears when the connection breaks, the request carried out or not.
func (s *sim) request(u entry.StorageUUID, answer func(*simBookie) func(), lost func()) {
	b := s.bookie(u)
	loss := 0
	if !s.healed {
		loss = s.rng.IntN(60)
	}
	if loss == 1 { // on the way there
		s.after(s.delay()+20*time.Millisecond, lost)
		return
	}
	s.after(s.delay(), func() {
		arrive := func() {
			if !b.up {
				s.after(s.delay(), lost)
				return
			}
			reply := answer(b)
			if loss == 2 { // on the way back
				reply = lost
			}
			s.after(s.delay(), reply)
		}
		if b.stopped {
			b.queue = append(b.queue, arrive)
			return
		}
		arrive()
	})
}

func (b *simBookie) add(a bookiewire.Add) bookiewire.Code {
	if a.Term < b.term || (!a.Recovery && b.term > 0) {
		return bookiewire.Fenced
	}
	b.term = a.Term
	b.has[a.Entry] = a.Body
	b.lac = max(b.lac, a.LAC)
	return bookiewire.OK
}

// fence is what a fence and a fencing read do first.
func (b *simBookie) fence(t entry.Term) bool {
	if t < b.term {
		return false
	}
	b.term = t
	return true
}

// --- the writer's runner ---

func (s *sim) stepWriter(f func(*ledger.WriterCore)) {
	before, lac := s.w.Phase(), s.w.LAC()
	s.w.Now(s.now)
	f(s.w)
	for rd := s.w.Ready(); rd.NeedCandidates; rd = s.w.Ready() {
		rd.NeedCandidates = false
		s.w.Candidates(s.candidates())
	}
	rd := s.w.Ready()
	frozen := (before == ledger.Changing || before == ledger.Closing) && s.w.Phase() == before && rd.Change == nil && rd.Close == nil
	if frozen && s.w.LAC() != lac {
		s.failf("I12: LAC moved from %d to %d while %s", lac, s.w.LAC(), before)
	}
	if rd.Change != nil {
		s.checkFirst(rd.Change.Fragments[len(rd.Change.Fragments)-1].First)
	}
	if rd.Close != nil && rd.Close.Last != s.w.LAC() {
		s.failf("I12: proposed end is %d, the LAC %d", rd.Close.Last, s.w.LAC())
	}
	if s.w.LAC() < lac {
		s.failf("I20: LAC fell from %d to %d", lac, s.w.LAC())
	}
	if s.w.LAC() > lac {
		s.logf("W: lac %d", s.w.LAC())
		s.checkLAC()
	}
	s.carryOutWriter(rd)
	s.w.Done()
	s.scheduleTick()
}

// checkFirst: a fragment begins after the LAC, or earlier for the sake of an append that waits for all its copies. That
// what is confirmed counts there too is invariant 3.
func (s *sim) checkFirst(first entry.EntryID) {
	lac := s.w.LAC()
	if first > lac+1 {
		s.failf("I12: proposed fragment starts at %d, the LAC is %d", first, lac)
	}
	if first <= lac {
		s.pulled++
		if r := s.results[first]; r.level != ledger.AckAll || r.done != 0 {
			s.failf("I12: proposed fragment starts at %d for no append that waits, the LAC is %d", first, lac)
		}
	}
}

func (s *sim) carryOutWriter(rd *ledger.Ready) {
	nonce := s.record.Nonce
	for _, send := range rd.Sends {
		if !bytes.Equal(send.Body, s.bodies[send.Entry]) {
			s.failf("I5: entry %d is sent with another body", send.Entry)
		}
		send.Slots.Each(func(i int) {
			u := send.Ensemble[i].UUID
			a := bookiewire.Add{Ledger: simLedger, Entry: send.Entry, Nonce: nonce, LAC: rd.LAC, Body: send.Body, Checksum: send.Checksum}
			s.logf("W: add e%d → %s (lac %d)", send.Entry, s.name(u), rd.LAC)
			s.request(u, func(b *simBookie) func() {
				code := b.add(a)
				if code == bookiewire.OK && b.denied[a.Entry] {
					s.failf("I8: bookie %s acknowledges e%d after denying it", s.name(u), a.Entry)
				}
				s.logf("%s: add e%d: %s", s.name(u), a.Entry, code)
				return func() { s.answerWriter(a.Entry, i, u, code) }
			}, func() { s.answerWriter(a.Entry, i, u, bookiewire.Disconnected) })
		})
	}
	rd.WriteLAC.Each(func(i int) {
		lac, u := rd.LAC, s.w.Ledger().Fragments[len(s.w.Ledger().Fragments)-1].Slots[i].UUID
		s.request(u, func(b *simBookie) func() {
			b.lac = max(b.lac, lac)
			return func() {}
		}, func() {})
	})
	if rd.Verify {
		s.after(s.delay(), func() {
			l := clone(s.record)
			s.after(s.delay(), func() { s.stepWriter(func(c *ledger.WriterCore) { c.Verified(l, nil) }) })
		})
	}
	if rd.Change != nil {
		s.changeEnsemble(*rd.Change)
	}
	if rd.Close != nil {
		s.closeLedger(*rd.Close)
	}
	s.returned += int64(rd.Released)
	for _, k := range rd.Completions {
		if k.Dropped {
			s.returned += int64(len(k.Body))
			s.dropped(k)
			continue
		}
		k.Done(k.Entry, k.Err)
	}
}

func (s *sim) answerWriter(e entry.EntryID, slot int, u entry.StorageUUID, code bookiewire.Code) {
	s.logf("W: answer e%d slot %d %s: %s", e, slot, s.name(u), code)
	s.stepWriter(func(c *ledger.WriterCore) {
		if code == bookiewire.OK {
			c.Ack(e, slot, u)
		} else {
			c.Fail(e, slot, u, code)
		}
	})
}

func (s *sim) scheduleTick() {
	d := s.w.Deadline()
	if d.IsZero() || (!s.tickAt.IsZero() && !d.Before(s.tickAt)) {
		return
	}
	// Like the ticker of the real runner, no finer than a millisecond.
	at := d.Sub(s.now)
	at = max(at, time.Millisecond)
	s.tickAt = s.now.Add(at)
	s.after(at, func() {
		s.tickAt = time.Time{}
		s.stepWriter(func(c *ledger.WriterCore) { c.Tick(s.now) })
	})
}

func (s *sim) append(level ledger.AckLevel) {
	n := len(s.results)
	b := fmt.Appendf(nil, "append %d %s", n, bytes.Repeat([]byte{'x'}, s.rng.IntN(100)))
	r := &simResult{level: level, id: entry.NoEntry}
	s.results = append(s.results, r)
	over := s.w.Phase() == ledger.Closed || s.w.Phase() == ledger.Withdrawn
	if !over {
		s.bodies[entry.EntryID(n)] = b // ids follow appends until the writer is over
		s.appended += int64(len(b))
	}
	s.stepWriter(func(c *ledger.WriterCore) {
		c.Append(b, level, func(id entry.EntryID, err error) {
			r.done++
			r.id, r.err = id, err
			s.logf("W: done e%d %s: %v", id, level, err)
			var ae *ledger.AppendError
			if errors.As(err, &ae) && ae.Outcome == ledger.NotWritten && id != entry.NoEntry {
				s.returned += int64(len(b))
			}
			if id != entry.NoEntry {
				if id != entry.EntryID(n) {
					s.failf("append %d got id %d", n, id)
				}
				s.checkDone(r)
			}
		})
	})
}

func (s *sim) checkDone(r *simResult) {
	if before, ok := s.lastByLvl[r.level]; ok && before >= r.id {
		s.failf("I20: %s: done of e%d after e%d", r.level, r.id, before)
	}
	s.lastByLvl[r.level] = r.id
	if r.err != nil {
		return
	}
	switch r.level {
	case ledger.AckOne:
		for e := entry.EntryID(0); e <= r.id; e++ {
			if s.copies(e) == 0 {
				s.failf("I20: e%d is reported at level one, but no bookie has its predecessor e%d", r.id, e)
			}
		}
	case ledger.AckQuorum, ledger.AckAll:
		if r.id > s.w.LAC() {
			s.failf("I20: e%d is reported, confirmed is %d", r.id, s.w.LAC())
		}
	case ledger.AckNone:
	}
}

func (s *sim) dropped(k ledger.Completion) {
	r := s.results[k.Entry]
	if r.done != 1 || r.err != nil || (r.level != ledger.AckNone && r.level != ledger.AckOne) {
		s.failf("e%d was dropped, but not reported early", k.Entry)
	}
	r.dropped = true
}

func (s *sim) copies(e entry.EntryID) int {
	n := 0
	for _, b := range s.bookies {
		if b.has[e] != nil {
			n++
		}
	}
	return n
}

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

// holders returns the slots of e's write set, in the fragment that metadata names, whose bookies have it.
func (s *sim) holders(e entry.EntryID) (quorum.Set, *quorum.Quorum) {
	f := ledger.FragmentOf(s.record.Fragments, e)
	zones := make([]string, len(f.Slots))
	for i := range f.Slots {
		zones[i] = f.Slots[i].Zone
	}
	q := quorum.MustNew(quorum.Config{Ensemble: s.r.Ensemble, WriteQuorum: s.r.WriteQuorum, AckQuorum: s.r.AckQuorum, MinZones: s.r.MinZones}, zones)
	var have quorum.Set
	q.WriteSet(e).Each(func(i int) {
		if s.bookie(f.Slots[i].UUID).has[e] != nil {
			have |= 1 << i
		}
	})
	return have, q
}

// validByHand is the ack predicate in the words of the protocol.
func (s *sim) validByHand(e entry.EntryID, have quorum.Set) bool {
	zones := map[string]bool{}
	have.Each(func(i int) { zones[ledger.FragmentOf(s.record.Fragments, e).Slots[i].Zone] = true })
	return have.Len() >= s.r.AckQuorum && len(zones) >= s.r.MinZones
}

// --- metadata ---

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

func (s *sim) changeEnsemble(ch ledger.Change) {
	s.logf("W: propose T2 %s", s.fragments(meta.Ledger{Fragments: ch.Fragments}))
	s.after(s.etcdDelay(), func() {
		result := ledger.Lost
		if s.record.State == meta.LedgerOpen && s.record.Nonce == ch.Ledger.Nonce {
			result = ledger.Applied
			n := len(ch.Ledger.Fragments) - 1
			s.apply("T2", func(l *meta.Ledger) {
				l.Fragments = append(l.Fragments[:n:n], clone(meta.Ledger{Fragments: ch.Fragments[n:]}).Fragments...)
			})
			s.checkLAC()
		}
		if s.rng.IntN(12) == 0 {
			result = ledger.NoOutcome
		}
		l := clone(s.record)
		s.after(s.etcdDelay(), func() {
			s.logf("W: T2 result %d", result)
			s.stepWriter(func(c *ledger.WriterCore) { c.ChangeDone(result, l, nil) })
		})
	})
}

func (s *sim) closeLedger(p ledger.CloseProposal) {
	s.logf("W: propose T3 last %d", p.Last)
	refuse := s.rng.IntN(4) == 0
	s.after(s.etcdDelay(), func() {
		result := ledger.NotApplied
		switch {
		case s.record.State != meta.LedgerOpen:
			result = ledger.Lost
		case !refuse:
			result = ledger.Applied
			s.apply("T3", func(l *meta.Ledger) { l.State, l.Last, l.Length = meta.LedgerClosed, p.Last, p.Length })
		}
		if result != ledger.NotApplied && s.rng.IntN(6) == 0 {
			result = ledger.NoOutcome
		}
		l := clone(s.record)
		s.after(s.etcdDelay(), func() {
			s.logf("W: T3 result %d", result)
			s.stepWriter(func(c *ledger.WriterCore) { c.CloseDone(result, l, nil) })
			if result == ledger.NotApplied && s.rng.IntN(2) == 0 {
				s.requestClose()
			}
		})
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
			target.has[e] = s.bodies[e]
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

// startRecovery is T4, and an attempt; it repeats until the ledger is closed.
func (s *sim) startRecovery(n int) {
	s.recovering++
	s.after(s.etcdDelay(), func() {
		if s.record.State >= meta.LedgerClosed {
			s.recovering--
			return
		}
		s.apply("T4", func(l *meta.Ledger) { l.State, l.Term = meta.LedgerInRecovery, l.Term+1 })
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
	s.recovering--
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
	s.request(u, func(b *simBookie) func() {
		if !b.fence(m.Term) {
			return done(0, bookiewire.Fenced)
		}
		s.logf("%s: fenced by R%d term %d", s.name(u), r.n, m.Term)
		return done(b.lac, bookiewire.OK)
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
	s.request(u, func(b *simBookie) func() {
		if !b.fence(m.Term) {
			return done(bookiewire.Fenced, nil)
		}
		if have := b.has[e]; have != nil {
			if s.rng.IntN(50) == 0 && !s.healed {
				return func() { // damaged on the disk
					if r.core == c {
						damaged := append([]byte("?"), have[1:]...)
						r.step(func(c *ledger.RecoveryCore) {
							c.ReadDone(e, i, bookiewire.OK, entry.Checksum(simLedger, e, have), damaged)
						})
					}
				}
			}
			return done(bookiewire.OK, have)
		}
		b.denied[e] = true
		return done(bookiewire.NoEntry, nil)
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
	s.request(u, func(b *simBookie) func() {
		code := b.add(bookiewire.Add{Entry: w.Entry, Term: m.Term, Recovery: true, LAC: base, Body: w.Body})
		s.logf("%s: R%d writes e%d (lac %d): %s", s.name(u), r.n, w.Entry, base, code)
		return done(code)
	}, done(bookiewire.Disconnected))
}

func (r *simRecovery) finish(m meta.Ledger, end ledger.RecoveryEnd) {
	s := r.s
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
		s.after(s.etcdDelay(), func() { r.over(nil) })
	})
}

// --- faults, readers, checks ---

func (s *sim) mischief() {
	b := s.bookies[s.rng.IntN(len(s.bookies))]
	span := time.Duration(10+s.rng.IntN(200)) * time.Millisecond
	if s.rng.IntN(2) == 0 {
		s.logf("%s: down", s.name(b.uuid))
		b.up = false
		s.after(span, func() { b.up = true })
		return
	}
	s.logf("%s: stopped", s.name(b.uuid))
	b.stopped = true
	s.after(span, b.resume)
}

func (b *simBookie) resume() {
	b.stopped = false
	queue := b.queue
	b.queue = nil
	for _, f := range queue {
		f()
	}
}

// tailRead is a reader elsewhere that asks a bookie for its LAC: what it may see must stay (invariant 4).
func (s *sim) tailRead() {
	b := s.bookies[s.rng.IntN(len(s.bookies))]
	s.exposed = max(s.exposed, b.lac)
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
		for e, body := range b.has {
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

func (s *sim) run() error {
	const span = 600 * time.Millisecond
	at := func(f func()) { s.after(time.Duration(s.rng.Int64N(int64(span))), f) }
	for range 10 + s.rng.IntN(40) {
		level := ledger.AckLevel(s.rng.IntN(4))
		n := 1 + s.rng.IntN(3)
		at(func() {
			for range n {
				s.append(level)
			}
		})
	}
	for range s.rng.IntN(8) {
		at(s.mischief)
	}
	for range 20 {
		at(s.tailRead)
	}
	for range s.rng.IntN(4) {
		at(s.repair)
	}
	for n := range s.rng.IntN(3) {
		s.after(span/4+time.Duration(s.rng.Int64N(int64(span))), func() { s.startRecovery(n) })
	}
	if s.rng.IntN(3) == 0 {
		at(s.requestClose)
	}
	if s.rng.IntN(2) == 0 {
		at(func() {
			s.stepWriter(func(c *ledger.WriterCore) { c.SetMayAckEarly(false) })
			s.after(50*time.Millisecond, func() { s.stepWriter(func(c *ledger.WriterCore) { c.SetMayAckEarly(true) }) })
		})
	}
	s.after(span, func() {
		s.healed = true
		for _, b := range s.bookies {
			b.up = true
			b.resume()
		}
	})
	s.after(span+590*time.Millisecond, func() {
		// With everything healed, a writer that nobody disturbs has confirmed what it was given.
		if s.w.Phase() == ledger.Active && s.record.State == meta.LedgerOpen && !s.w.WantsRoll() && int(s.w.LAC()) != len(s.results)-1 {
			s.failf("I22: LAC is %d of %d, though all is well", s.w.LAC(), len(s.results)-1)
		}
	})
	// Half of the runs end with the writer's own close, the others with its silent death and a recovery.
	polite := s.rng.IntN(2) == 0
	s.after(span+600*time.Millisecond, func() {
		if polite {
			s.requestClose()
		}
	})
	s.after(span+900*time.Millisecond, func() {
		s.startRecovery(9)
	})
	s.after(span+1900*time.Millisecond, func() { s.stepWriter(func(c *ledger.WriterCore) { c.Withdraw(ledger.ErrShutdown) }) })
	for end := s.now.Add(span + 3*time.Second); len(s.heap) > 0 && s.err == nil; {
		ev := heap.Pop(&s.heap).(simEvent)
		if ev.at.After(end) {
			break
		}
		s.now = ev.at
		ev.f()
	}
	if s.err == nil {
		s.checkEnd()
	}
	return s.err
}

// tally counts what happened over many seeds.
type tally struct {
	Runs, Changes, Pulled, Recovered, Closed, Repairs, Acked, All, Unknown, NotWritten, Dropped int
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
}
