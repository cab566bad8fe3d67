package ledger_test

import (
	"bytes"
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// sim is one small cluster under a seed: a writer, recoveries, bookies, one metadata record and repair, driven by a heap
// of events in virtual time. Messages are delayed, reordered and lost; transactions take effect long after they were
// given up, and their replies are lost; bookies and whole zones crash, lose what they had not synced, stop, fill up,
// drain, and come back. It checks the protocol's invariants, named by their numbers in the comments, as it goes and at
// the end. The bookies are in simbookie_test.go, the metadata and recovery's runner in simmeta_test.go.
type sim struct {
	rng  *rand.Rand
	now  time.Time
	heap simHeap
	seq  int
	err  error

	mood    simMood
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
	lostWrites int
	recovered  int
	repairs    int
	pulled     int // fragments that begin before the LAC
}

// simMood is what a seed has most of.
type simMood uint8

const (
	mixed      simMood = iota
	recoveries         // many recoveries at the same time, with bookies that fail under them
	flapping           // bookies that fail for a moment, with one spare: identities leave and come back
	moods
)

type simResult struct {
	level   ledger.AckLevel
	done    int
	dropped bool
	id      entry.EntryID
	err     error
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
		{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 4, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 3, WriteQuorum: 2, AckQuorum: 2},
		{Ensemble: 2, WriteQuorum: 2, AckQuorum: 2},
		{Ensemble: 2, WriteQuorum: 2, AckQuorum: 1},
		{Ensemble: 5, WriteQuorum: 3, AckQuorum: 2},
		{Ensemble: 5, WriteQuorum: 2, AckQuorum: 1},
		{Ensemble: 1, WriteQuorum: 1, AckQuorum: 1},
		{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2, MinZones: 2},
		{Ensemble: 4, WriteQuorum: 4, AckQuorum: 2, MinZones: 2},
		{Ensemble: 4, WriteQuorum: 4, AckQuorum: 3, MinZones: 2},
		{Ensemble: 4, WriteQuorum: 2, AckQuorum: 2, MinZones: 2},
		{Ensemble: 6, WriteQuorum: 3, AckQuorum: 2, MinZones: 2},
		{Ensemble: 6, WriteQuorum: 4, AckQuorum: 3, MinZones: 3},
	}
)

const simLedger = entry.LedgerID(77)

func newSim(seed uint64) *sim {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := &sim{
		rng: rng, now: simStart, mood: simMood(rng.IntN(int(moods))), r: simShapes[rng.IntN(len(simShapes))], bodies: map[entry.EntryID][]byte{},
		lastByLvl: map[ledger.AckLevel]entry.EntryID{}, exposed: entry.NoEntry, zones: map[entry.StorageUUID]string{},
	}
	zones := max(2, s.r.MinZones) + rng.IntN(2)
	spares := rng.IntN(4)
	if s.mood == flapping {
		spares = 1
	}
	for i, u := range bookieclient.FakeUUIDs(s.r.Ensemble + spares) {
		s.bookies = append(s.bookies, newSimBookie(u))
		s.zones[u] = string(rune('a' + i%zones))
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
	s.record = meta.Ledger{ID: simLedger, Nonce: 9, Rev: 1, Replication: s.r, Last: entry.NoEntry}
	slots, err := ledger.Place(ledger.PlaceRequest{Replication: s.r, Candidates: s.candidates(), Rand: rng})
	if err != nil {
		panic(err)
	}
	s.record.Fragments = []meta.Fragment{{Slots: slots}}
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
			s.request(u, func(b *simBookie) func() func() {
				code := b.add(a, s.admits(b))
				s.logf("%s: add e%d: %s", s.name(u), a.Entry, code)
				return func() func() {
					if code == bookiewire.OK {
						s.acknowledges(b, a.Entry)
					}
					return func() { s.answerWriter(a.Entry, i, u, code) }
				}
			}, func() { s.answerWriter(a.Entry, i, u, bookiewire.Disconnected) })
		})
	}
	rd.WriteLAC.Each(func(i int) {
		lac, u := rd.LAC, s.w.Ledger().Fragments[len(s.w.Ledger().Fragments)-1].Slots[i].UUID
		s.request(u, func(b *simBookie) func() func() {
			b.write(func(d *simDisk) { d.lac = max(d.lac, lac) })
			return func() func() { return func() {} }
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

func (s *sim) run() error {
	const span = 600 * time.Millisecond
	at := func(f func()) { s.after(time.Duration(s.rng.Int64N(int64(span))), f) }
	for range 10 + s.rng.IntN(40) {
		level := ledger.AckLevel(s.rng.IntN(4))
		if s.mood == recoveries && s.rng.IntN(2) == 0 {
			level = ledger.AckAll // whose copies a recovery must not make fewer
		}
		n := 1 + s.rng.IntN(3)
		at(func() {
			for range n {
				s.append(level)
			}
		})
	}
	evil, raised, looks, swaps := s.rng.IntN(10), s.rng.IntN(3), 20, s.rng.IntN(4)
	switch s.mood {
	case mixed, moods:
	case flapping:
		evil = 10 + s.rng.IntN(20)
	case recoveries:
		// Around one moment: the writer goes on until it is fenced.
		raised, looks, swaps = 2+s.rng.IntN(4), 60, s.rng.IntN(8)
		from := time.Duration(s.rng.Int64N(int64(span / 2)))
		at = func(f func()) { s.after(from+time.Duration(s.rng.Int64N(int64(span/4))), f) }
	}
	for range evil {
		at(s.mischief)
	}
	for range looks {
		at(s.tailRead)
	}
	for range swaps {
		at(s.repair)
	}
	for n := range raised {
		if s.mood == recoveries {
			at(func() { s.startRecovery(n) })
			continue
		}
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
			b.up, b.full, b.draining, b.packed = true, false, false, false
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
