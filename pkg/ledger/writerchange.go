package ledger

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
	"github.com/penstock-mq/penstock/pkg/sched"
)

const (
	// candidatesFresh is how long a list of candidates is used without asking again.
	candidatesFresh = time.Second
	// verifiedFresh is how long a linearizable read proves that the metadata store answers.
	verifiedFresh = time.Second
	// avoidFor is how long a bookie that was replaced, or refused, is the last choice.
	avoidFor = 10 * time.Second
)

// changeState is what a writer knows for its next ensemble change.
type changeState struct {
	proposed     []meta.Fragment // while Changing
	candidates   []Candidate
	candidatesAt time.Time
	failedAt     time.Time // when no replacement was found; zero when the last plan worked
	refusedAt    time.Time // when the metadata store refused a proposal
	avoid        []avoided
	verify       bool // a bookie says that metadata does not let this writer write
	verifying    bool
	verifiedAt   time.Time
	stalledSince time.Time // zero: a quorum is possible
	wantsRoll    bool
	// futile counts ensemble changes since anything was confirmed, the first of them at futileSince; the next waits until
	// notBefore.
	futile      int
	futileSince time.Time
	notBefore   time.Time
}

type avoided struct {
	uuid  entry.StorageUUID
	until time.Time
}

func (c *WriterCore) suspects() quorum.Set {
	var s quorum.Set
	for i := range c.slots {
		if c.slots[i].suspect {
			s |= 1 << i
		}
	}
	return s
}

func (c *WriterCore) suspectSlot(i int, soft bool) {
	s := &c.slots[i]
	if !s.suspect {
		s.suspect, s.soft, s.since = true, soft, c.now
		s.retryAt, s.probes = c.now.Add(c.cfg.RetryAfter), 1
		c.ready.Suspects++
	}
	s.soft = s.soft && soft
	c.trimStraggler(i)
}

// trimStraggler hands confirmed entries to repair, oldest first, while a suspect slot holds back too many bytes. A short
// stall is no reason: the caller's budget bounds what it can hold back meanwhile.
func (c *WriterCore) trimStraggler(i int) {
	s := &c.slots[i]
	age, limit := c.now.Sub(s.since), c.cfg.StragglerBytes
	if !s.suspect || age < c.cfg.HandOverAfter {
		return
	}
	if age >= 10*c.cfg.HandOverAfter {
		limit = 0
	}
	lac := c.track.LAC()
	if s.unacked <= limit || c.track.Tail() > lac {
		return
	}
	for e := c.track.Tail(); e <= lac && e < c.held() && s.unacked > limit; e++ {
		if c.track.Tracked(e) && c.track.Missing(e).Has(i) {
			c.giveUp(e, 1<<i)
		}
	}
	c.completeAll()
}

// needs reports whether some unconfirmed entry cannot be confirmed without the given slots.
func (c *WriterCore) needs(slots quorum.Set) bool {
	q := c.track.Quorum()
	if slots == 0 || q.AlwaysValid(slots) {
		return false
	}
	from := c.track.LAC() + 1
	to := min(c.track.Next(), from+entry.EntryID(len(c.slots)))
	for e := from; e < to; e++ {
		// A copy that a suspect made before it became one counts.
		if !q.Valid(q.WriteSet(e)&^slots | c.track.Acks(e)) {
			return true
		}
	}
	return false
}

// evaluate decides whether the ensemble should change now. It runs after every event that might matter, so it
// leaves at once when all is well.
func (c *WriterCore) evaluate() {
	var hard, late, leaving quorum.Set
	for i := range c.slots {
		s := &c.slots[i]
		if s.leaving || s.refuses {
			leaving |= 1 << i
		}
		if !s.suspect {
			continue
		}
		c.trimStraggler(i)
		if !s.soft {
			hard |= 1 << i
		}
		if c.now.Sub(s.since) >= c.cfg.DelayedChange {
			late |= 1 << i
		}
	}
	if hard|late|leaving == 0 && !c.change.verify {
		c.change.stalledSince = time.Time{}
		c.checkDrained()
		return
	}
	if c.phase != Active {
		return
	}
	if c.change.verify {
		c.verify()
	}
	needed := c.needs(hard | late)
	c.noteStall(needed, hard|late)
	if c.phase == Active && !c.sealed && (needed || late|leaving != 0) {
		c.plan(hard|late|leaving, needed)
	}
	c.checkDrained()
}

func (c *WriterCore) noteStall(needed bool, bad quorum.Set) {
	ch := &c.change
	switch {
	case !needed:
		ch.stalledSince = time.Time{}
	case ch.stalledSince.IsZero():
		ch.stalledSince = c.now
		c.ready.Stalled = true
	case c.now.Sub(ch.stalledSince) < c.cfg.StallTimeout:
	case c.exhausted(bad):
	default:
		ch.wantsRoll = true
	}
}

// exhausted reports whether it is reserves that are used up: another ledger would be opened on the same bookies, and then
// another.
func (c *WriterCore) exhausted(bad quorum.Set) bool {
	return c.cfg.Urgent && !c.needs(bad&^c.refusing())
}

// changed notes an ensemble change. While nothing is confirmed, each is as likely to help as the one before, and all that is
// pending is sent once more: the second may come at once, for a bookie may be replaced by one that is dead too, and the pause
// before each later one doubles. So it goes where the bookies have this ledger's id from before etcd was restored from an
// older copy: no ensemble takes its entries then, but another ledger may.
func (c *WriterCore) changed() {
	ch := &c.change
	if ch.futile == 0 {
		ch.futileSince = c.now
	}
	if ch.futile++; ch.futile == 1 {
		return
	}
	pause := sched.Doubled(c.cfg.RetryAfter/4, ch.futile-2, 25*c.cfg.RetryAfter)
	if pause <= 0 { // it is configured to be none
		return
	}
	ch.notBefore = c.now.Add(pause/2 + time.Duration(c.placementRand().Int64N(int64(pause/2)+1)))
}

// progressed notes that something was confirmed: ensembles have helped.
func (ch *changeState) progressed() {
	ch.futile, ch.futileSince, ch.notBefore = 0, time.Time{}, time.Time{}
}

// refusing returns the slots whose bookies answered that they have no room.
func (c *WriterCore) refusing() quorum.Set {
	var s quorum.Set
	for i := range c.slots {
		if c.slots[i].refuses {
			s |= 1 << i
		}
	}
	return s
}

func (c *WriterCore) verify() {
	if ch := &c.change; !ch.verifying {
		ch.verifying, ch.verify = true, false
		c.ready.Verify = true
	}
}

// plan proposes an ensemble without the bad slots, as far as there are replacements. A change that is not needed for
// a quorum waits until the metadata store is known to answer: while a proposal is out nothing is confirmed, so
// proposing to a store that is away would stop appends that could go on.
func (c *WriterCore) plan(bad quorum.Set, needed bool) {
	ch := &c.change
	pause := max(c.cfg.RetryAfter, candidatesFresh/2)
	if !ch.refusedAt.IsZero() && c.now.Sub(ch.refusedAt) < c.cfg.RetryAfter {
		return
	}
	if !ch.failedAt.IsZero() && c.now.Sub(ch.failedAt) < pause {
		return
	}
	if ch.futile > 1 && c.now.Sub(ch.futileSince) >= c.cfg.StallTimeout && !c.exhausted(bad) {
		ch.wantsRoll = true
	}
	if c.now.Before(ch.notBefore) {
		return
	}
	capped := len(c.ledger.Fragments) >= c.cfg.MaxFragments
	if capped && ch.wantsRoll {
		return
	}
	if ch.candidatesAt.IsZero() || c.now.Sub(ch.candidatesAt) > candidatesFresh {
		c.ready.NeedCandidates = true
		return
	}
	slots := c.replace(bad, false)
	if slots == nil && needed && c.cfg.Urgent {
		// A full bookie takes urgent adds, too. One that does not has used its reserve up: it is left alone for a while.
		slots = c.replace(bad&^c.leaving(), true)
	}
	if slots == nil {
		ch.failedAt = c.now
		return
	}
	ch.failedAt = time.Time{}
	first := c.firstOfChange(slots)
	if capped && first != c.first {
		ch.wantsRoll = true
		return
	}
	if !needed && (ch.verifiedAt.IsZero() || c.now.Sub(ch.verifiedAt) > verifiedFresh) {
		c.verify()
		return
	}
	fragments := slices.Clone(c.ledger.Fragments)
	if fragments[len(fragments)-1].First == first {
		fragments = fragments[:len(fragments)-1]
	}
	ch.proposed = append(fragments, meta.Fragment{First: first, Slots: slots})
	c.phase = Changing
	c.ready.Change = &Change{Ledger: c.ledger, Fragments: ch.proposed}
}

// firstOfChange returns where the fragment with the given slots is to begin: after the LAC, or where the copies begin that an
// append of AckAll still waits for and a changed slot lacks. In the older fragment nobody would make them any more. What
// is confirmed moves along, so it must count in the new fragment too: those who acknowledged it stay in their slots. An
// entry with a copy in a changed slot, or with one that was left to repair, ends the search.
func (c *WriterCore) firstOfChange(slots []meta.Slot) entry.EntryID {
	first := c.track.LAC() + 1
	if len(c.allQ) == 0 {
		return first
	}
	changed := changedSlots(c.ensemble(), slots)
	for e := first - 1; e >= max(c.first, c.allQ[0]); e-- {
		p, ws := c.at(e), c.track.Quorum().WriteSet(e)
		if c.track.Acks(e)&changed != 0 || p.lost != 0 {
			break
		}
		if p.level == AckAll && ws&changed != 0 {
			first = e
		}
	}
	return first
}

func changedSlots(old, next []meta.Slot) quorum.Set {
	var changed quorum.Set
	for i := range next {
		if next[i].UUID != old[i].UUID {
			changed |= 1 << i
		}
	}
	return changed
}

// held returns the first entry that a proposed ensemble change may move: until its outcome is known, no copy of it or of
// later ones is final.
func (c *WriterCore) held() entry.EntryID {
	if c.phase == Changing {
		return last(c.change.proposed).First
	}
	return math.MaxInt64
}

// leaving returns the slots whose bookies are to go without being suspect.
func (c *WriterCore) leaving() quorum.Set {
	var s quorum.Set
	for i := range c.slots {
		if c.slots[i].leaving && !c.slots[i].suspect {
			s |= 1 << i
		}
	}
	return s
}

// replace returns the ensemble with as many of the bad slots replaced as possible, or nil if none can be. With full it may
// be by bookies that are not writable, but not by those to be avoided.
func (c *WriterCore) replace(bad quorum.Set, full bool) []meta.Slot {
	ch := &c.change
	ch.avoid = slices.DeleteFunc(ch.avoid, func(a avoided) bool { return !c.now.Before(a.until) })
	keep := slices.Clone(c.ensemble())
	var exclude, avoid []entry.StorageUUID
	bad.Each(func(i int) { exclude = append(exclude, keep[i].UUID) })
	for _, a := range ch.avoid {
		avoid = append(avoid, a.uuid)
	}
	place := func(open quorum.Set) bool {
		req := PlaceRequest{
			Replication: c.ledger.Replication, Candidates: ch.candidates, Exclude: append(slices.Clone(exclude), avoid...),
			Keep: slices.Clone(keep), Rand: c.placementRand(), Full: full,
		}
		open.Each(func(i int) { req.Keep[i] = meta.Slot{} })
		slots, err := Place(req)
		if err != nil && len(avoid) > 0 && !full {
			req.Exclude = exclude
			slots, err = Place(req)
		}
		if err != nil {
			return false
		}
		keep = slots
		return true
	}
	if place(bad) {
		return keep
	}
	some := false
	bad.Each(func(i int) { some = place(1<<i) || some })
	if !some {
		return nil
	}
	return keep
}

func (c *WriterCore) placementRand() *rand.Rand {
	//nolint:gosec // spreads load, guards nothing
	return rand.New(rand.NewPCG(c.cfg.Seed, uint64(c.ledger.ID)<<8|uint64(len(c.ledger.Fragments)&0xff)))
}

func (c *WriterCore) avoidBookie(u entry.StorageUUID) {
	c.change.avoid = append(c.change.avoid, avoided{u, c.now.Add(avoidFor)})
}

// Candidates is the event of a list of candidates: asked for by Ready, or because it changed.
func (c *WriterCore) Candidates(list []Candidate) {
	if c.over() {
		return
	}
	c.change.candidates, c.change.candidatesAt = list, c.now
	c.change.failedAt = time.Time{}
	for i := range c.slots {
		s := &c.slots[i]
		for _, k := range list {
			if k.UUID == s.uuid {
				s.leaving = k.Draining || !k.Writable
			}
		}
	}
	c.evaluate()
}

// Verified is the event of a linearizable read of the record, or of its failure.
func (c *WriterCore) Verified(l meta.Ledger, err error) {
	c.change.verifying = false
	if c.over() {
		return
	}
	if err == nil {
		if l.State != meta.LedgerOpen || l.Nonce != c.ledger.Nonce {
			if c.phase == Active {
				c.withdraw(fmt.Errorf("%w: it is %s", ErrTakenOver, l.State))
			}
			return
		}
		c.change.verifiedAt = c.now
	} else {
		c.change.failedAt = c.now
	}
	c.evaluate()
}

// TxnResult is the definite outcome of a transaction, or the word that there is none.
type TxnResult uint8

// The results.
const (
	// Applied: by this writer.
	Applied TxnResult = iota
	// NotApplied: it certainly was not, and will not be; the ledger is still this writer's.
	NotApplied
	// Lost: it certainly was not, and the ledger is no longer this writer's.
	Lost
	// NoOutcome: it may have been applied, or may yet be. The writer withdraws.
	NoOutcome
)

// ChangeDone is the event of a proposed ensemble change's outcome; l is the record with [Applied].
func (c *WriterCore) ChangeDone(result TxnResult, l meta.Ledger, err error) {
	if c.over() {
		return
	}
	if c.phase != Changing {
		panic("ledger: outcome of an ensemble change that was not proposed")
	}
	switch result {
	case Applied:
		c.adopt(l)
	case NotApplied:
		if errors.Is(err, meta.ErrRetired) {
			old := c.ensemble()
			for i, s := range c.change.proposed[len(c.change.proposed)-1].Slots {
				if s.UUID != old[i].UUID {
					c.avoidBookie(s.UUID)
				}
			}
		}
		held := c.held()
		c.change.proposed = nil
		c.change.refusedAt = c.now
		c.phase = Active
		c.settleFrom(held)
		c.confirm()
	case Lost, NoOutcome:
		c.withdraw(joinCause(ErrTakenOver, err))
		return
	}
	c.evaluate()
}

func joinCause(kind, err error) error {
	if err == nil {
		return kind
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// settleFrom settles the confirmed entries from e on that an ensemble change held back.
func (c *WriterCore) settleFrom(e entry.EntryID) {
	for e = max(e, c.track.Tail()); e <= c.track.LAC(); e++ {
		if c.track.Tracked(e) {
			c.settle(e)
		}
	}
	c.completeAll()
}

// adopt makes the acknowledged ensemble the one that entries of its fragment are counted against.
func (c *WriterCore) adopt(l meta.Ledger) {
	old, f := c.ensemble(), last(l.Fragments)
	if !sameFragment(f, last(c.change.proposed)) {
		panic("ledger: the acknowledged fragment is not the one proposed")
	}
	c.ledger = l
	c.first = f.First
	changed := changedSlots(old, f.Slots)
	changed.Each(func(i int) { c.avoidBookie(old[i].UUID) })
	// What stays in the older fragment gets no more copies in its replaced slots from here.
	for e := c.track.Tail(); e < f.First; e++ {
		if c.track.Tracked(e) {
			c.giveUp(e, changed)
		}
	}
	c.track.Prune(f.First, changed, quorumOf(l.Replication, f.Slots))
	changed.Each(func(i int) { c.slots[i] = slotState{uuid: f.Slots[i].UUID, progress: c.now} })
	for e := f.First; e < c.track.Next(); e++ {
		p := c.at(e)
		p.inflight &^= changed
		(c.track.Quorum().WriteSet(e) & changed).Each(func(i int) { c.slots[i].unacked += int64(p.size + entryOverhead) })
	}
	c.change.proposed = nil
	c.change.stalledSince, c.change.refusedAt = time.Time{}, time.Time{}
	c.changed()
	c.phase = Active
	c.settleFrom(f.First)
	for e := max(f.First, c.track.Tail()); e <= c.sentTo; e++ {
		if c.track.Tracked(e) {
			c.send(e)
		}
	}
	c.confirm()
}

// Tick is the event of time passing; see [WriterCore.Deadline].
func (c *WriterCore) Tick(now time.Time) {
	c.now = now
	if c.over() {
		return
	}
	for i := range c.slots {
		s := &c.slots[i]
		if !s.suspect && s.inflight > 0 && now.Sub(s.progress) >= c.cfg.SuspectAfter {
			c.suspectSlot(i, false)
		}
		if s.suspect && s.inflight == 0 && !now.Before(s.retryAt) && c.phase != Closing {
			c.probe(i)
		}
	}
	if lac := c.track.LAC(); lac > c.lacSent && now.Sub(c.lastSend) >= c.cfg.IdleLAC {
		c.lacSent = lac
		c.ready.WriteLAC = quorum.All(len(c.slots)) &^ c.suspects()
	}
	c.evaluate()
}

// probe sends a suspect slot the oldest entry that it lacks.
func (c *WriterCore) probe(i int) {
	for e := c.track.Tail(); e <= c.sentTo; e++ {
		if c.track.Missing(e).Has(i) && !c.at(e).lost.Has(i) {
			c.send(e)
			return
		}
	}
}

// Deadline returns when Tick is next wanted; zero: not before another event.
func (c *WriterCore) Deadline() time.Time {
	var at time.Time
	by := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	if c.over() || c.phase == Closing {
		return at
	}
	for i := range c.slots {
		s := &c.slots[i]
		switch {
		case s.suspect && (!c.Idle() || c.change.failedAt.IsZero()):
			if d := s.since.Add(c.cfg.HandOverAfter); c.now.Before(d) {
				by(d)
			}
			if d := s.since.Add(c.cfg.DelayedChange); c.now.Before(d) {
				by(d)
			} else {
				by(c.now.Add(c.cfg.RetryAfter))
			}
			if s.inflight == 0 && !c.Idle() {
				by(s.retryAt)
			}
		case !s.suspect && s.inflight > 0:
			by(s.progress.Add(c.cfg.SuspectAfter))
		case (s.leaving || s.refuses) && c.change.failedAt.IsZero():
			by(c.now.Add(c.cfg.RetryAfter))
		}
	}
	if d := c.change.stalledSince.Add(c.cfg.StallTimeout); !c.change.stalledSince.IsZero() && !c.change.wantsRoll && c.now.Before(d) {
		by(d)
	}
	if c.now.Before(c.change.notBefore) && c.suspects()|c.refusing() != 0 {
		by(c.change.notBefore)
	}
	if c.sealed {
		by(c.drainDeadline)
	}
	if c.track.LAC() > c.lacSent {
		by(c.lastSend.Add(c.cfg.IdleLAC))
	}
	return at
}
