package repair

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// StepKind says what is to be done next for a ledger.
type StepKind uint8

// The kinds of steps.
const (
	// StepDone: nothing is wrong with it any more.
	StepDone StepKind = iota
	// StepStuck: what is wrong cannot be mended now; Why says why not.
	StepStuck
	// StepDrop ends an intent that is of no use.
	StepDrop
	// StepSwap gives a slot to another bookie.
	StepSwap
	// StepFill sends a bookie what it lacks of a fragment.
	StepFill
	// StepSettle lets a bookie say again what it does not have: it has all that it should.
	StepSettle
	// StepRelease has the owner close the ledger, so that its open fragment is settled.
	StepRelease
)

// Step is one of them.
type Step struct {
	Kind StepKind
	// Fragment is the one that it is about, and Slot the slot in it.
	Fragment Stretch
	Slot     int
	// Storage is the bookie that is to be relieved (StepSwap), that lacks entries (StepFill), is in limbo (StepSettle), or is the
	// target of an intent (StepDrop).
	Storage entry.StorageUUID
	// Target gets the slot (StepSwap).
	Target meta.Slot
	// Rate bounds the copying, in bytes per second; 0: only by the budget.
	Rate int64
	// Why says what for, or what is in the way, in a few words.
	Why string
}

// key tells steps apart that may fail on their own.
func (p Step) key() string {
	return fmt.Sprintf("%d/%d/%d/%s/%s", p.Kind, p.Fragment.First, p.Slot, p.Storage, p.Target.UUID)
}

// Job decides what to do for one ledger, step by step, each by the newest survey. It is a state machine of the caller: no method
// may be called while another is under way.
//
// It knows nothing of how far an earlier worker came: what that did is in the ledger's record and on the bookies. It only remembers
// what has failed, so as to go on with what else there is.
type Job struct {
	open   bool // copies are missing in the open fragment
	wait   bool // for owners to leave bookies that are to be emptied
	rng    *rand.Rand
	failed map[string]string
	bad    map[entry.StorageUUID]bool // targets that failed
}

// NewJob begins a job for a ledger with those causes; seed decides among targets that are as good as each other. With wait, owners have
// time still to leave a live bookie that is to be emptied by an ensemble change of their own.
func NewJob(causes meta.RepairCause, wait bool, seed uint64) *Job {
	return &Job{
		open: causes&meta.CauseOpen != 0, wait: wait, rng: rand.New(rand.NewPCG(seed, 0x7265706169)), //nolint:gosec // it spreads load
		failed: map[string]string{}, bad: map[entry.StorageUUID]bool{},
	}
}

// Failed notes that a step came to nothing, and why. It is not taken again in this job; a swap is, to another target, if it may be
// this one's fault.
func (j *Job) Failed(p Step, why string, target bool) {
	if p.Kind == StepSwap && target {
		j.bad[p.Target.UUID] = true
	} else {
		p.Target = meta.Slot{}
	}
	j.failed[p.key()] = why
}

// Next decides.
func (j *Job) Next(s *Survey) Step {
	if s.Ledger.State == meta.LedgerDeleting {
		return Step{Kind: StepDone}
	}
	var stuck []string
	try := func(p Step) bool {
		why, failed := j.failed[p.key()]
		if p.Target = (meta.Slot{}); !failed {
			why, failed = j.failed[p.key()]
		}
		if failed && !slices.Contains(stuck, why) {
			stuck = append(stuck, why)
		}
		return !failed
	}
	blocked := func(why string) {
		if !slices.Contains(stuck, why) {
			stuck = append(stuck, why)
		}
	}
	swaps := j.swaps(s, blocked)
	for _, i := range s.Ledger.Pending {
		if p, ok := useless(s, i, swaps); ok && try(p) {
			return p
		}
	}
	for _, p := range slices.Concat(swaps, j.fills(s, blocked), settles(s), j.moves(s, blocked), j.releases(s, blocked)) {
		if try(p) {
			return p
		}
	}
	if len(stuck) > 0 {
		return Step{Kind: StepStuck, Why: strings.Join(stuck, "; ")}
	}
	return Step{Kind: StepDone}
}

// useless is the step that ends an intent, unless a swap goes on with it.
func useless(s *Survey, i meta.ReplicaIntent, swaps []Step) (Step, bool) {
	for _, p := range swaps {
		if p.Fragment.First == i.Fragment && p.Target.UUID == i.Target {
			return Step{}, false
		}
	}
	p := Step{Kind: StepDrop, Storage: i.Target, Why: "end a copying to " + s.View.name(i.Target)}
	p.Fragment.First = i.Fragment
	return p, true
}

// swaps are the slots of settled fragments that are to go elsewhere, those with the fewest other copies first.
func (j *Job) swaps(s *Survey, blocked func(string)) []Step {
	var all []Step
	for _, f := range Stretches(s.Ledger) {
		if !f.Settled {
			continue
		}
		for slot, at := range f.Slots {
			if !s.View.leaves(at.UUID) {
				continue
			}
			target, err := j.place(s, f, slot)
			if err != nil {
				blocked(fmt.Sprintf("no bookie for the copies of %s: %v", s.View.name(at.UUID), err))
				continue
			}
			b := s.View.Bookies[at.UUID]
			all = append(all, Step{
				Kind: StepSwap, Fragment: f, Slot: slot, Storage: at.UUID, Target: target, Rate: b.Rate,
				Why: fmt.Sprintf("copy what %s has from entry %d on to %s", s.View.name(at.UUID), f.First, s.View.name(target.UUID)),
			})
		}
	}
	left := func(p Step) (n int) {
		for _, at := range p.Fragment.Slots {
			if !s.View.lost(at.UUID) {
				n++
			}
		}
		return n
	}
	slices.SortStableFunc(all, func(a, b Step) int { return cmp.Compare(left(a), left(b)) })
	return all
}

// place chooses who gets a slot: whom an intent names already, if that one will do.
func (j *Job) place(s *Survey, f Stretch, slot int) (meta.Slot, error) {
	old := f.Slots[slot].UUID
	candidates := s.View.candidates()
	for _, i := range s.Ledger.Pending {
		if i.Fragment != f.First || j.bad[i.Target] {
			continue
		}
		only := slices.DeleteFunc(slices.Clone(candidates), func(c ledger.Candidate) bool {
			return c.UUID != i.Target && f.slotOf(c.UUID) < 0
		})
		if target, err := j.placeAmong(s, f, slot, only, []entry.StorageUUID{old}); err == nil {
			return target, nil
		}
	}
	exclude := []entry.StorageUUID{old}
	for u := range j.bad {
		exclude = append(exclude, u)
	}
	return j.placeAmong(s, f, slot, candidates, exclude)
}

func (j *Job) placeAmong(s *Survey, f Stretch, slot int, candidates []ledger.Candidate, exclude []entry.StorageUUID) (meta.Slot, error) {
	req := ledger.PlaceRequest{
		Replication: s.Ledger.Replication, Candidates: candidates, Exclude: exclude, Keep: slices.Clone(f.Slots), Rand: j.rng,
	}
	req.Keep[slot] = meta.Slot{}
	slots, err := ledger.Place(req)
	if err != nil && s.View.Bookies[f.Slots[slot].UUID].RelaxZones {
		req.Replication.MinZones = 0
		slots, err = ledger.Place(req)
	}
	if err != nil {
		return meta.Slot{}, err //nolint:wrapcheck // it says what is missing, and is told to people
	}
	return slots[slot], nil
}

// fills are what members lack that are to stay.
func (j *Job) fills(s *Survey, blocked func(string)) []Step {
	var all []Step
	for _, f := range s.ToAsk() {
		for slot, at := range f.Slots {
			h := s.Holding(f.First, at.UUID)
			switch {
			case s.View.leaves(at.UUID):
			case !s.View.Bookies[at.UUID].Live:
				blocked(s.View.name(at.UUID) + " is away; its copies are made anew once it counts as lost")
			case h == nil:
			case h.Err != "":
				blocked(fmt.Sprintf("%s cannot tell what it has: %s", s.View.name(at.UUID), h.Err))
			default:
				if n := lacks(s.Ledger.Replication, f, slot, h); n > 0 {
					all = append(all, Step{
						Kind: StepFill, Fragment: f, Slot: slot, Storage: at.UUID,
						Why: fmt.Sprintf("send %s %d entries that it lacks", s.View.name(at.UUID), n),
					})
				}
			}
		}
	}
	return all
}

// lacks counts the entries of its slot that a bookie lacks.
func lacks(r meta.Replication, f Stretch, slot int, h *Holding) (n int) {
	for e := f.First; e <= f.Last; e++ {
		if has(r, slot, e) && !h.Has(e) {
			n++
		}
	}
	return n
}

// settles are the bookies in limbo that have all of a closed ledger.
func settles(s *Survey) []Step {
	if s.Ledger.State != meta.LedgerClosed {
		return nil
	}
	whole := map[entry.StorageUUID]bool{}
	for _, f := range s.ToAsk() {
		for slot, at := range f.Slots {
			h := s.Holding(f.First, at.UUID)
			if h == nil || h.Err != "" || !h.Limbo {
				continue
			}
			if _, seen := whole[at.UUID]; !seen {
				whole[at.UUID] = true
			}
			whole[at.UUID] = whole[at.UUID] && lacks(s.Ledger.Replication, f, slot, h) == 0
		}
	}
	var all []Step
	for u, ok := range whole {
		if ok && !s.View.leaves(u) {
			all = append(all, Step{Kind: StepSettle, Storage: u, Why: "end the limbo at " + s.View.name(u)})
		}
	}
	slices.SortFunc(all, func(a, b Step) int { return slices.Compare(a.Storage[:], b.Storage[:]) })
	return all
}

// moves are swaps that put misplaced copies right: of one slot, after which nothing of the fragment is misplaced.
func (j *Job) moves(s *Survey, blocked func(string)) []Step {
	var all []Step
	for _, f := range s.ToAsk() {
		if !s.anyMisplaced(f, f.Slots) || slices.ContainsFunc(f.Slots, func(at meta.Slot) bool { return s.View.leaves(at.UUID) }) {
			continue
		}
		found := false
		var failure error
		for slot, at := range f.Slots {
			target, err := j.place(s, f, slot)
			if err != nil {
				failure = err
				continue
			}
			after := slices.Clone(f.Slots)
			if after[slot] = target; s.anyMisplaced(f, after) {
				continue
			}
			found = true
			all = append(all, Step{
				Kind: StepSwap, Fragment: f, Slot: slot, Storage: at.UUID, Target: target,
				Why: fmt.Sprintf("move what %s has from entry %d on to %s, where it belongs", s.View.name(at.UUID), f.First, s.View.name(target.UUID)),
			})
			break
		}
		if !found {
			why := "copies share a host or span too few zones, and no single one can be moved so that they do not"
			if failure != nil {
				why += ": " + failure.Error()
			}
			blocked(why)
		}
	}
	return all
}

// releases asks for the open fragment, if copies are missing there or are to go.
func (j *Job) releases(s *Survey, blocked func(string)) []Step {
	l := s.Ledger
	if l.State == meta.LedgerClosed || len(l.Fragments) == 0 {
		return nil
	}
	why := ""
	for _, at := range l.Fragments[len(l.Fragments)-1].Slots {
		switch {
		case s.View.lost(at.UUID):
			why = s.View.name(at.UUID) + " is lost"
		case s.View.Bookies[at.UUID].Emptying && j.wait:
			blocked("the ledger is open, and its owner is leaving " + s.View.name(at.UUID))
		case s.View.Bookies[at.UUID].Emptying:
			why = s.View.name(at.UUID) + " is to be emptied"
		}
	}
	for _, f := range s.ToAsk() {
		for _, at := range f.Slots {
			if h := s.Holding(f.First, at.UUID); h != nil && h.Err == "" && h.Limbo {
				why = s.View.name(at.UUID) + " may have lost entries, and takes none as long as the ledger is open"
			}
		}
	}
	if why == "" && j.open {
		why = "copies are missing"
	}
	if why == "" {
		return nil
	}
	return []Step{{Kind: StepRelease, Why: "have the ledger closed: " + why}}
}
