package model

import (
	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// state is one state of the cluster: all that its future depends on.
type state struct {
	writer, record uint32
	// answer is an outcome on its way to the writer, plus 1. late is a writer whose proposal may be applied yet.
	answer, late uint32
	recovery     [2]uint32
	repair       [2]repair
	// looked is the record that a pass of garbage collection has read, on the bookie collects, plus 1; dooms is 1 if it goes on
	// to delete.
	looked   uint32
	collects uint8
	dooms    uint8
	bookies  [maxBookies]disk
	// exposed is the highest LAC that was sent to anybody.
	exposed int8
	// term is that of each recovery.
	term                                    [2]uint8
	failures, recoveryFailures, lost, drops uint8
}

// repair copies what a slot lacks, or should be rid of, to another bookie.
type repair struct {
	record uint32 // the record that it goes by, with its intent
	phase  repairPhase
	// fragment is an index; old and target are bookies.
	fragment, old, target uint8
}

type repairPhase uint8

const (
	idle repairPhase = iota
	copying
	copied // sent, that is
	proved
	over
)

// world is the search's tables: what the numbers in a state stand for.
type world struct {
	cfg        *Config
	writers    *machines[writerEvent, sent, *writer]
	recoveries *machines[recoveryEvent, sent, *recovery]
	records    *machines[txn, outcome, *records]

	writer   []writerInfo
	recovery []recoveryInfo
	record   []recordInfo

	outcomes []outcome
	// answers numbers outcomes.
	answers map[memoKey]uint32
	first   state
	// recoveryOver is the number of an attempt that has come to its end.
	recoveryOver uint32
}

// writerInfo is what the search needs to know of a writer.
type writerInfo struct {
	lac              int8
	told             [maxEntries]byte
	phase            ledger.Phase
	over             bool
	verifying, needs bool
	change           *ledger.Change
	end              *ledger.CloseProposal
	l                meta.Ledger
}

type recoveryInfo struct {
	over  bool
	needs bool
	end   *ledger.RecoveryEnd
	m     meta.Ledger
	base  int8
	// fences are slots, reads entry and slot, adds entry, slot and bookie; slots the bookies read from.
	fences []int
	reads  [][2]int
	adds   [][3]int
	slots  []int
}

type recordInfo struct {
	l    meta.Ledger
	last int8
	// sets are the bookies of each entry's write set, by slot, in the fragment that it belongs to; -1 for other slots.
	sets    [maxEntries][]int
	quorums [maxEntries]*quorum.Quorum
	// member are the bookies in a fragment, named those in an intent too.
	member, named [maxBookies]bool
}

func newWorld(cfg *Config) *world {
	w := &world{cfg: cfg, answers: map[memoKey]uint32{}}
	w.writer, w.recovery, w.record = make([]writerInfo, 1), make([]recoveryInfo, 1), make([]recordInfo, 1)
	w.records = newMachines(func(txn) *records { return newRecords(cfg) }, w.noteRecord)
	w.first.record = w.records.begin(nil)
	w.writers = newMachines(startWriter(cfg, w.record[w.first.record].l), w.noteWriter)
	w.recoveries = newMachines(startRecoveryMachine(cfg), w.noteRecovery)
	w.first.exposed = -1
	for b := range cfg.Bookies {
		if cfg.Known {
			w.first.bookies[b].flags = known
		}
	}
	w.first.writer = w.writers.begin(writerEvent{})
	w.noteOver()
	w.stepWriter(&w.first, 1, func() writerEvent { return appendAll(cfg.Levels) })
	return w
}

// noteOver finds the number of a recovery that is over.
func (w *world) noteOver() {
	m := w.record[w.first.record].l
	m.State, m.Term = meta.LedgerInRecovery, 1
	w.recoveryOver, _ = w.recoveries.step(w.recoveries.begin(recoveryStart(m)), event(kindOver, 0, 0), recoveryOver)
}

func (w *world) noteWriter(_ uint32, m *writer) {
	w.writer = append(w.writer, writerInfo{
		lac: int8(m.core.LAC()), told: m.told, phase: m.core.Phase(), over: m.over(), verifying: m.verifying, needs: m.needs,
		change: m.change, end: m.end, l: m.core.Ledger(),
	})
}

func (w *world) noteRecovery(_ uint32, m *recovery) {
	i := recoveryInfo{over: m.over, needs: m.needs, end: m.end, m: m.m, base: int8(m.core.Base())}
	for slot, s := range m.core.Fragment().Slots {
		i.slots = append(i.slots, bookieOf(s.UUID))
		if m.fences[slot] {
			i.fences = append(i.fences, slot)
		}
	}
	for e := range maxEntries + 1 {
		for slot := range maxBookies {
			if m.reads[[3]int{e, slot, 0}] {
				i.reads = append(i.reads, [2]int{e, slot})
			}
			for b := range maxBookies {
				if m.adds[[3]int{e, slot, b}] {
					i.adds = append(i.adds, [3]int{e, slot, b})
				}
			}
		}
	}
	w.recovery = append(w.recovery, i)
}

func (w *world) noteRecord(_ uint32, m *records) {
	r := recordInfo{l: m.l, last: int8(m.l.Last)}
	for e := range len(w.cfg.Levels) {
		if len(m.l.Fragments) == 0 {
			break
		}
		f := ledger.FragmentOf(m.l.Fragments, entry.EntryID(e))
		q := quorumOf(w.cfg, f)
		set := make([]int, len(f.Slots))
		for i, s := range f.Slots {
			set[i] = -1
			if q.WriteSet(entry.EntryID(e)).Has(i) {
				set[i] = bookieOf(s.UUID)
			}
		}
		r.sets[e], r.quorums[e] = set, q
	}
	for _, f := range m.l.Fragments {
		for _, s := range f.Slots {
			r.named[bookieOf(s.UUID)], r.member[bookieOf(s.UUID)] = true, true
		}
	}
	for _, i := range m.l.Pending {
		r.named[bookieOf(i.Target)] = true
	}
	w.record = append(w.record, r)
}

func quorumOf(c *Config, f meta.Fragment) *quorum.Quorum {
	zones := make([]string, len(f.Slots))
	for i, s := range f.Slots {
		zones[i] = s.Zone
	}
	return quorum.MustNew(quorum.Config{
		Ensemble: c.Ensemble, WriteQuorum: c.WriteQuorum, AckQuorum: c.AckQuorum, MinZones: c.MinZones,
	}, zones)
}

// admits is what a bookie's look at the record comes to.
func (w *world) admits(record uint32, b int, again bool, term uint8) bool {
	if w.cfg.lacks("a bookie reads the record before a ledger is new to it") {
		return true
	}
	a := bookiewire.Add{Ledger: theLedger, Nonce: theNonce}
	if again {
		a = bookiewire.Add{Ledger: theLedger, Recovery: true, Term: entry.Term(term)}
	}
	return bookie.Admit(w.record[record].l, uuidOf(b), &a) == nil
}

// stepWriter gives the writer of s an event, and it candidates if it wants them.
func (w *world) stepWriter(s *state, what uint64, e func() writerEvent) string {
	before := w.writer[s.writer]
	to, out := w.writers.step(s.writer, what, e)
	broken := out.broken
	w.send(s, to, out)
	for w.writer[s.writer].needs && broken == "" {
		gone := s.goneMask()
		to, out = w.writers.step(s.writer, event(kindCandidates, uint64(gone), 0), candidatesEvent(gone))
		broken = out.broken
		w.send(s, to, out)
	}
	now := &w.writer[s.writer]
	if now.over {
		for b := range s.bookies {
			s.bookies[b].awaited, s.bookies[b].acked = 0, 0
		}
	}
	if now.lac < before.lac && broken == "" {
		broken = "12: the LAC goes back"
	}
	s.exposed = max(s.exposed, now.lac)
	return broken
}

func (w *world) send(s *state, to uint32, out sent) {
	s.writer = to
	for b, m := range out.to {
		s.bookies[b].sent |= m
		s.bookies[b].awaited |= m
		s.bookies[b].acked &^= m
	}
}

func (w *world) stepRecovery(s *state, r int, what uint64, e func() recoveryEvent) string {
	to, out := w.recoveries.step(s.recovery[r], what, e)
	broken := out.broken
	w.sendAgain(s, r, to, out)
	for w.recovery[s.recovery[r]].needs && broken == "" {
		gone := s.goneMask()
		to, out = w.recoveries.step(s.recovery[r], event(kindCandidates, uint64(gone), 0), recoveryCandidates(gone))
		broken = out.broken
		w.sendAgain(s, r, to, out)
	}
	return broken
}

func (w *world) sendAgain(s *state, r int, to uint32, out sent) {
	s.recovery[r] = to
	for b, m := range out.to {
		s.bookies[b].recovered[r] |= m
		if m != 0 {
			s.exposed = max(s.exposed, w.recovery[to].base)
		}
	}
}

func (s *state) goneMask() uint32 {
	var m uint32
	for b := range s.bookies {
		if s.bookies[b].is(gone) {
			m |= 1 << b
		}
	}
	return m
}

// transact carries out a transaction, which what stands for, and numbers its outcome.
func (w *world) transact(s *state, what uint64, t txn) outcome {
	from := s.record
	to, o := w.records.step(from, what, func() txn { return t })
	s.record = to
	key := memoKey{from, what}
	if _, ok := w.answers[key]; !ok {
		w.answers[key] = uint32(len(w.outcomes))
		w.outcomes = append(w.outcomes, o)
	}
	return o
}

// Kinds of events, for the tables.
const (
	kindAck = iota + 2
	kindFail
	kindCandidates
	kindVerified
	kindClose
	kindWithdraw
	kindOutcome
	kindNoOutcome
	kindFence
	kindRead
	kindNothing
	kindAdd
	kindOver
	kindChange
	kindEnd
	kindStart
	kindDelete
	kindConfirm
	kindIntent
	kindDrop
	kindSwap
	kindRetire
)

// event stands for an event in the tables of a machine.
func event(kind, a, b uint64) uint64 { return kind<<56 | a<<24 | b }
