package repair_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// site is a made-up cluster and one ledger, which jobs go about.
type site struct {
	view   repair.View
	ledger meta.Ledger
	// held has the entries of a bookie, of all fragments; a bookie without has all that it should have.
	held   map[entry.StorageUUID]map[entry.EntryID]bool
	limbo  map[entry.StorageUUID]bool
	mute   map[entry.StorageUUID]bool
	closes bool // the owner closes the ledger when it is asked
	wait   bool // for owners
}

func uuid(n int) entry.StorageUUID { return entry.StorageUUID{0: byte(n), 15: 0xee} }

func newSite(bookies int, l meta.Ledger) *site {
	s := &site{
		view: repair.View{Now: time.Unix(1000, 0), Bookies: map[entry.StorageUUID]repair.Bookie{}}, ledger: l,
		held: map[entry.StorageUUID]map[entry.EntryID]bool{}, limbo: map[entry.StorageUUID]bool{}, mute: map[entry.StorageUUID]bool{},
	}
	for n := 1; n <= bookies; n++ {
		s.view.Bookies[uuid(n)] = repair.Bookie{
			ID: fmt.Sprintf("k%d", n), Live: true,
			Candidate: ledger.Candidate{UUID: uuid(n), Host: fmt.Sprintf("h%d", n), Zone: fmt.Sprintf("z%d", n%3), FreeBytes: 1, Writable: true},
		}
	}
	return s
}

func slots(bookies ...int) []meta.Slot {
	var all []meta.Slot
	for _, n := range bookies {
		all = append(all, meta.Slot{UUID: uuid(n), Host: meta.HostHash(fmt.Sprintf("h%d", n)), Zone: fmt.Sprintf("z%d", n%3)})
	}
	return all
}

func closedLedger(last entry.EntryID, fragments ...meta.Fragment) meta.Ledger {
	return meta.Ledger{ID: 9, State: meta.LedgerClosed, Replication: three, Last: last, Fragments: fragments}
}

func (s *site) change(n int, f func(*repair.Bookie)) {
	b := s.view.Bookies[uuid(n)]
	f(&b)
	s.view.Bookies[uuid(n)] = b
}

func (s *site) lose(bookies ...int) {
	for _, n := range bookies {
		s.change(n, func(b *repair.Bookie) { b.Live, b.Lost = false, true })
	}
}

// survey asks everybody.
func (s *site) survey() *repair.Survey {
	out := repair.NewSurvey(s.ledger, s.view)
	for _, f := range out.ToAsk() {
		for _, at := range f.Slots {
			b, known := s.view.Bookies[at.UUID]
			if !known || b.Lost || !b.Live {
				continue
			}
			h := &repair.Holding{First: f.First, Bits: make([]byte, (f.Last-f.First)/8+1), Limbo: s.limbo[at.UUID]}
			if s.mute[at.UUID] {
				h.Err = "no answer"
			}
			for e := f.First; e <= f.Last; e++ {
				if have, chosen := s.held[at.UUID]; !chosen || have[e] {
					h.Bits[(e-f.First)/8] |= 1 << ((e - f.First) % 8)
				}
			}
			out.Add(f.First, at.UUID, h)
		}
	}
	return out
}

// carryOut does what a step asks for, with success.
func (s *site) carryOut(p repair.Step) {
	switch p.Kind {
	case repair.StepDrop:
		var rest []meta.ReplicaIntent
		for _, i := range s.ledger.Pending {
			if i.Target != p.Storage || i.Fragment != p.Fragment.First {
				rest = append(rest, i)
			}
		}
		s.ledger.Pending = rest
	case repair.StepSwap:
		for i, f := range s.ledger.Fragments {
			if f.First == p.Fragment.First {
				fresh := append([]meta.Slot(nil), f.Slots...)
				fresh[p.Slot] = p.Target
				s.ledger.Fragments[i].Slots = fresh
			}
		}
		s.give(p.Target.UUID, p.Fragment)
		p.Kind, p.Storage = repair.StepDrop, p.Target.UUID
		s.carryOut(p)
	case repair.StepFill:
		s.give(p.Storage, p.Fragment)
	case repair.StepSettle:
		delete(s.limbo, p.Storage)
	case repair.StepRelease:
		if s.ledger.State == meta.LedgerOpen && s.closes {
			s.ledger.State = meta.LedgerClosed
			s.ledger.Last = s.ledger.Fragments[len(s.ledger.Fragments)-1].First + 4
		}
	case repair.StepDone, repair.StepStuck:
	}
}

func (s *site) give(u entry.StorageUUID, f repair.Stretch) {
	if s.held[u] == nil {
		return
	}
	for e := f.First; e <= f.Last; e++ {
		s.held[u][e] = true
	}
}

// tell is what a job does, a line a step.
func (s *site) tell(causes meta.RepairCause) string {
	job := repair.NewJob(causes, s.wait, 1)
	var lines []string
	for range 20 {
		p := job.Next(s.survey())
		switch p.Kind {
		case repair.StepDone:
			return strings.Join(append(lines, "done"), "\n")
		case repair.StepStuck:
			return strings.Join(append(lines, "stuck: "+p.Why), "\n")
		case repair.StepDrop, repair.StepSwap, repair.StepFill, repair.StepSettle, repair.StepRelease:
		}
		lines = append(lines, p.Why)
		before := s.ledger.State
		s.carryOut(p)
		if p.Kind == repair.StepRelease && s.ledger.State == before {
			job.Failed(p, "its owner does not answer", true)
		}
	}
	return strings.Join(append(lines, "…"), "\n")
}

func (s *site) wants(t *testing.T, causes meta.RepairCause, lines ...string) {
	t.Helper()
	if got, want := s.tell(causes), strings.Join(lines, "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestJobStories(t *testing.T) {
	t.Parallel()
	frag := func(first entry.EntryID, bookies ...int) meta.Fragment {
		return meta.Fragment{First: first, Slots: slots(bookies...)}
	}
	except := func(n int, missing ...entry.EntryID) map[entry.EntryID]bool {
		all := map[entry.EntryID]bool{}
		for e := range entry.EntryID(n) {
			all[e] = true
		}
		for _, e := range missing {
			delete(all, e)
		}
		return all
	}
	t.Run("nothing is wrong", func(t *testing.T) {
		newSite(4, closedLedger(9, frag(0, 1, 2, 3))).wants(t, meta.CauseLost, "done")
	})
	t.Run("a bookie is lost", func(t *testing.T) {
		s := newSite(4, closedLedger(9, frag(0, 1, 2, 3)))
		s.lose(2)
		s.wants(t, meta.CauseLost, "copy what bookie k2 has from entry 0 on to bookie k4", "done")
	})
	t.Run("of two fragments the one with fewer copies comes first", func(t *testing.T) {
		s := newSite(6, closedLedger(9, frag(0, 1, 4, 3), frag(5, 1, 2, 3)))
		s.lose(1, 2)
		got := s.tell(meta.CauseLost)
		if !strings.HasPrefix(got, "copy what bookie k1 has from entry 5 on") || !strings.HasSuffix(got, "done") {
			t.Errorf("got\n%s", got)
		}
	})
	t.Run("an empty ledger", func(t *testing.T) {
		s := newSite(4, closedLedger(-1, frag(0, 1, 2, 3)))
		s.lose(1)
		s.wants(t, meta.CauseLost, "copy what bookie k1 has from entry 0 on to bookie k4", "done")
	})
	t.Run("there is nobody to copy to", func(t *testing.T) {
		s := newSite(3, closedLedger(9, frag(0, 1, 2, 3)))
		s.lose(2)
		s.wants(t, meta.CauseLost, "stuck: no bookie for the copies of bookie k2: place ensemble: 1 bookie on a host of its own is needed, and 0 hosts have a usable one: add bookies on 1 more host")
	})
	t.Run("the open fragment is its owner's", func(t *testing.T) {
		l := closedLedger(0, frag(0, 1, 2, 3), frag(5, 1, 2, 4))
		l.State = meta.LedgerOpen
		s := newSite(5, l)
		s.lose(2)
		s.wants(t, meta.CauseLost, "copy what bookie k2 has from entry 0 on to bookie k5", "have the ledger closed: bookie k2 is lost", "stuck: its owner does not answer")
	})
	t.Run("the owner closes the ledger", func(t *testing.T) {
		l := closedLedger(0, frag(0, 1, 2, 3))
		l.State = meta.LedgerOpen
		s := newSite(4, l)
		s.lose(2)
		s.closes = true
		s.wants(t, meta.CauseLost, "have the ledger closed: bookie k2 is lost", "copy what bookie k2 has from entry 0 on to bookie k4", "done")
	})
	t.Run("a live bookie is to be emptied", func(t *testing.T) {
		s := newSite(4, closedLedger(9, frag(0, 1, 2, 3)))
		s.change(3, func(b *repair.Bookie) { b.Emptying, b.Candidate.Draining = true, true })
		s.wants(t, meta.CauseDecommission, "copy what bookie k3 has from entry 0 on to bookie k4", "done")
	})
	t.Run("owners have time to leave a live bookie", func(t *testing.T) {
		l := closedLedger(0, frag(0, 1, 2, 3))
		l.State = meta.LedgerOpen
		s := newSite(4, l)
		s.change(3, func(b *repair.Bookie) { b.Emptying, b.Candidate.Draining = true, true })
		s.wait, s.closes = true, true
		s.wants(t, meta.CauseDecommission, "stuck: the ledger is open, and its owner is leaving bookie k3")
		s.wait = false
		s.wants(t, meta.CauseDecommission, "have the ledger closed: bookie k3 is to be emptied", "copy what bookie k3 has from entry 0 on to bookie k4", "done")
	})
	t.Run("a bookie lacks entries", func(t *testing.T) {
		s := newSite(3, closedLedger(9, frag(0, 1, 2, 3)))
		s.held[uuid(2)] = except(10, 3, 7)
		s.wants(t, meta.CauseMissing, "send bookie k2 2 entries that it lacks", "done")
	})
	t.Run("a bookie that lacks entries is away", func(t *testing.T) {
		s := newSite(3, closedLedger(9, frag(0, 1, 2, 3)))
		s.change(2, func(b *repair.Bookie) { b.Live = false })
		s.wants(t, meta.CauseHint, "stuck: bookie k2 is away; its copies are made anew once it counts as lost")
	})
	t.Run("a bookie does not say what it has", func(t *testing.T) {
		s := newSite(3, closedLedger(9, frag(0, 1, 2, 3)))
		s.mute[uuid(2)] = true
		s.wants(t, meta.CauseHint, "stuck: bookie k2 cannot tell what it has: no answer")
	})
	t.Run("limbo ends when all is there again", func(t *testing.T) {
		s := newSite(3, closedLedger(9, frag(0, 1, 2, 3)))
		s.held[uuid(2)], s.limbo[uuid(2)] = except(10, 3), true
		s.wants(t, meta.CauseMissing, "send bookie k2 1 entries that it lacks", "end the limbo at bookie k2", "done")
	})
	t.Run("an open ledger in limbo is closed first", func(t *testing.T) {
		l := closedLedger(0, frag(0, 1, 2, 3), frag(5, 1, 3, 4))
		l.State = meta.LedgerOpen
		s := newSite(4, l)
		s.limbo[uuid(2)], s.closes = true, true
		s.wants(t, meta.CauseMissing, "have the ledger closed: bookie k2 may have lost entries, and takes none as long as the ledger is open", "end the limbo at bookie k2", "done")
	})
	t.Run("an intent that another worker left is gone on with", func(t *testing.T) {
		l := closedLedger(9, frag(0, 1, 2, 3))
		l.Pending = []meta.ReplicaIntent{{Target: uuid(6)}}
		s := newSite(6, l)
		s.lose(2)
		s.wants(t, meta.CauseLost, "copy what bookie k2 has from entry 0 on to bookie k6", "done")
	})
	t.Run("an intent that is of no use is ended", func(t *testing.T) {
		l := closedLedger(9, frag(0, 1, 2, 3))
		l.Pending = []meta.ReplicaIntent{{Target: uuid(4)}}
		newSite(4, l).wants(t, meta.CauseIntent, "end a copying to bookie k4", "done")
	})
	t.Run("copies on one host are moved apart", func(t *testing.T) {
		s := newSite(4, closedLedger(9, frag(0, 1, 2, 3)))
		s.change(2, func(b *repair.Bookie) { b.Candidate.Host = "h1" })
		s.wants(t, meta.CauseMisplaced, "move what bookie k1 has from entry 0 on to bookie k4, where it belongs", "done")
	})
	t.Run("zones can be relaxed for an operation", func(t *testing.T) {
		l := closedLedger(9, frag(0, 1, 2, 3))
		l.MinZones = 2
		s := newSite(4, l)
		for _, n := range []int{2, 3, 4} {
			s.change(n, func(b *repair.Bookie) { b.Candidate.Zone = "z" })
		}
		for i := range s.ledger.Fragments[0].Slots[1:] {
			s.ledger.Fragments[0].Slots[i+1].Zone = "z"
		}
		s.change(1, func(b *repair.Bookie) { b.Emptying, b.Candidate.Draining = true, true })
		if got := s.tell(meta.CauseDecommission); !strings.HasPrefix(got, "stuck: no bookie for the copies of bookie k1") || !strings.Contains(got, "zone") {
			t.Errorf("got\n%s", got)
		}
		s.change(1, func(b *repair.Bookie) { b.RelaxZones = true })
		if got := s.tell(meta.CauseDecommission); !strings.HasPrefix(got, "copy what bookie k1 has from entry 0 on to bookie k4") {
			t.Errorf("got\n%s", got)
		}
	})
	t.Run("a ledger that is being deleted is left alone", func(t *testing.T) {
		l := closedLedger(9, frag(0, 1, 2, 3))
		l.State, l.Pending = meta.LedgerDeleting, []meta.ReplicaIntent{{Target: uuid(4)}}
		s := newSite(4, l)
		s.lose(1)
		s.wants(t, meta.CauseLost, "done")
	})
}

// A target that does not take copies is not tried again; entries that nobody has are not asked of one target after the other.
func TestJobGoesOnFromFailures(t *testing.T) {
	t.Parallel()
	s := newSite(6, closedLedger(9, meta.Fragment{Slots: slots(1, 2, 3)}))
	s.lose(2)
	job := repair.NewJob(meta.CauseLost, false, 1)
	tried := map[entry.StorageUUID]bool{}
	for range 3 {
		p := job.Next(s.survey())
		if p.Kind != repair.StepSwap || tried[p.Target.UUID] {
			t.Fatalf("got %+v, after %v", p, tried)
		}
		tried[p.Target.UUID] = true
		job.Failed(p, "it is full", true)
	}
	if p := job.Next(s.survey()); p.Kind != repair.StepStuck || !strings.Contains(p.Why, "k2") {
		t.Fatalf("got %+v", p)
	}
	job = repair.NewJob(meta.CauseLost, false, 1)
	job.Failed(job.Next(s.survey()), "entry 4 is nowhere", false)
	if p := job.Next(s.survey()); p.Kind != repair.StepStuck || p.Why != "entry 4 is nowhere" {
		t.Fatalf("got %+v", p)
	}
}

// Who may have lost entries is not believed again as long as it lacks some.
func TestJobKeepsLimboWhileEntriesLack(t *testing.T) {
	t.Parallel()
	s := newSite(3, closedLedger(9, meta.Fragment{Slots: slots(1, 2, 3)}))
	s.held[uuid(2)], s.limbo[uuid(2)] = map[entry.EntryID]bool{0: true}, true
	job := repair.NewJob(meta.CauseMissing, false, 1)
	p := job.Next(s.survey())
	if p.Kind != repair.StepFill {
		t.Fatalf("got %+v", p)
	}
	job.Failed(p, "its disk is full", true)
	if p := job.Next(s.survey()); p.Kind != repair.StepStuck {
		t.Fatalf("got %+v", p)
	}
}

// Whatever a job finds, it ends; it never goes about the open fragment; and what it leaves undone it can name.
func TestJobEndsWhateverItFinds(t *testing.T) {
	t.Parallel()
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 5))
		r := meta.Replication{Ensemble: 1 + rng.IntN(4)}
		r.WriteQuorum = 1 + rng.IntN(r.Ensemble)
		r.AckQuorum = 1 + rng.IntN(r.WriteQuorum)
		l := meta.Ledger{ID: 9, Replication: r, State: meta.LedgerClosed, Last: -1}
		if rng.IntN(3) == 0 {
			l.State = meta.LedgerOpen
		}
		first := entry.EntryID(0)
		for range 1 + rng.IntN(3) {
			f := meta.Fragment{First: first}
			for _, n := range rng.Perm(7)[:r.Ensemble] {
				f.Slots = append(f.Slots, slots(n+1)...)
			}
			l.Fragments = append(l.Fragments, f)
			l.Last = first + entry.EntryID(rng.IntN(12)) - 1
			first = l.Last + 1 + entry.EntryID(rng.IntN(2))
			l.Last = first - 1
			first = max(first, f.First+1)
		}
		if l.State == meta.LedgerOpen {
			l.Last = 0
		}
		s := newSite(7, l)
		s.closes = rng.IntN(2) == 0
		for n := 1; n <= 7; n++ {
			switch rng.IntN(8) {
			case 0:
				s.lose(n)
			case 1:
				s.change(n, func(b *repair.Bookie) { b.Emptying, b.Candidate.Draining = true, true })
			case 2:
				s.limbo[uuid(n)] = true
			case 3:
				s.held[uuid(n)] = map[entry.EntryID]bool{}
			case 4:
				s.change(n, func(b *repair.Bookie) { b.Candidate.Host = "h1" })
			}
		}
		if rng.IntN(3) == 0 {
			s.ledger.Pending = []meta.ReplicaIntent{{Target: uuid(1 + rng.IntN(7)), Fragment: l.Fragments[0].First}}
		}
		job := repair.NewJob(meta.CauseLost, seed%2 == 0, seed)
		for steps := 0; ; steps++ {
			if steps > 200 {
				t.Fatalf("seed %d: it does not end", seed)
			}
			survey := s.survey()
			p := job.Next(survey)
			if p.Kind == repair.StepDone {
				if f := survey.Assess(); !f.Sound() {
					t.Fatalf("seed %d: it is done, and %+v", seed, f)
				}
				break
			}
			if p.Kind == repair.StepStuck {
				if p.Why == "" || survey.Assess().Sound() {
					t.Fatalf("seed %d: stuck without a reason: %q, %+v", seed, p.Why, survey.Assess())
				}
				break
			}
			if (p.Kind == repair.StepSwap || p.Kind == repair.StepFill) && !p.Fragment.Settled {
				t.Fatalf("seed %d: %s touches the open fragment", seed, p.Why)
			}
			if p.Kind == repair.StepSwap {
				for _, at := range p.Fragment.Slots {
					if at.UUID == p.Target.UUID {
						t.Fatalf("seed %d: %s, which has a slot already", seed, p.Why)
					}
				}
				if b := s.view.Bookies[p.Target.UUID]; !b.Live || b.Lost || b.Emptying {
					t.Fatalf("seed %d: %s, which is to go", seed, p.Why)
				}
			}
			before := s.ledger.State
			if rng.IntN(6) == 0 || p.Kind == repair.StepRelease && !s.closes {
				job.Failed(p, "it failed", rng.IntN(2) == 0)
				continue
			}
			s.carryOut(p)
			if p.Kind == repair.StepRelease && s.ledger.State == before {
				job.Failed(p, "it is not closed", true)
			}
		}
	}
}

func TestAssessCounts(t *testing.T) {
	t.Parallel()
	striped := meta.Ledger{
		ID: 9, State: meta.LedgerClosed, Replication: meta.Replication{Ensemble: 4, WriteQuorum: 2, AckQuorum: 2}, Last: 9,
		Fragments: []meta.Fragment{{Slots: slots(1, 2, 3, 4)}},
	}
	// Entries 0, 4, 8 are on 1 and 2; 1, 5, 9 on 2 and 3; 2, 6 on 3 and 4; 3, 7 on 4 and 1.
	s := newSite(6, striped)
	s.lose(2)
	if got := repair.NewSurvey(s.ledger, s.view).Assess(); got.Counts != (meta.RepairCounts{BelowWriteQuorum: 6, BelowAckQuorum: 6}) || got.Causes != meta.CauseLost {
		t.Errorf("one is lost: %+v", got)
	}
	if unasked, asked := repair.NewSurvey(s.ledger, s.view).Assess(), s.survey().Assess(); unasked.Counts != asked.Counts {
		t.Errorf("asked: %+v, not asked: %+v", asked, unasked)
	}
	s.change(1, func(b *repair.Bookie) { b.Live = false }) // away for a moment: its copies count, and cannot be had
	if got := repair.NewSurvey(s.ledger, s.view).Assess(); got.Counts != (meta.RepairCounts{BelowWriteQuorum: 6, BelowAckQuorum: 6, Unavailable: 3}) {
		t.Errorf("one is lost and one is away: %+v", got)
	}
	s = newSite(6, striped)
	s.held[uuid(3)] = map[entry.EntryID]bool{1: true, 2: true, 6: true} // it lacks 5 and 9
	if got := s.survey().Assess(); got.Counts != (meta.RepairCounts{BelowWriteQuorum: 2, BelowAckQuorum: 2}) || got.Causes != meta.CauseMissing ||
		len(got.Storages) != 1 || got.Storages[0] != uuid(3) {
		t.Errorf("one lacks entries: %+v", got)
	}
	s = newSite(6, striped)
	s.change(4, func(b *repair.Bookie) { b.Candidate.Host = "h3" })
	if got := s.survey().Assess(); got.Counts != (meta.RepairCounts{Misplaced: 2}) || got.Causes != meta.CauseMisplaced {
		t.Errorf("two share a host: %+v", got)
	}
}
