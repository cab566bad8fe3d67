package ledger

import (
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// confirm grows the prefixes and completes what that allows.
func (c *WriterCore) confirm() {
	old := c.track.LAC()
	if c.phase == Active {
		c.track.Advance()
	}
	lac := c.track.LAC()
	for e := old + 1; e <= lac; e++ {
		p := c.at(e)
		c.confirmedLength += int64(p.size)
		if !p.reported && p.level != AckAll {
			c.report(e, p, nil)
		}
	}
	if lac > old {
		c.ready.Confirmed = true
		c.change.progressed()
		for e := old + 1; e <= lac; e++ {
			c.settle(e)
		}
		c.completeAll()
	}
	// In Closing, what lies above the LAC is about to become "not written", a single copy or not.
	if one := c.track.AdvanceOne(); c.mayAckEarly && c.phase != Closing {
		for e := max(c.oneScan, lac) + 1; e <= one; e++ {
			if p := c.at(e); p.level == AckOne && !p.reported {
				c.report(e, p, nil)
			}
		}
		c.oneScan = max(c.oneScan, one)
	}
}

func (c *WriterCore) report(e entry.EntryID, p *pendingEntry, err error) {
	p.reported = true
	if p.level == AckNone && c.unreportedNone > 0 {
		c.unreportedNone--
	}
	c.ready.Completions = append(c.ready.Completions, Completion{Entry: e, Done: p.done, Err: err})
	p.done = nil
}

func (c *WriterCore) unknown(e entry.EntryID, cause error) error {
	return &AppendError{Ledger: c.ledger.ID, Entry: e, Outcome: Unknown, Err: cause}
}

// completeAll completes, in order, the entries that wait for all their copies.
func (c *WriterCore) completeAll() {
	n := 0
	for _, e := range c.allQ {
		if e > c.track.LAC() || e >= c.held() {
			break
		}
		if !c.track.Tracked(e) {
			panic("ledger: an entry that waits for all copies was dropped")
		}
		p := c.at(e)
		switch {
		case c.track.Missing(e) == 0:
			c.report(e, p, nil)
		case p.lost != 0:
			c.report(e, p, c.unknown(e, ErrHandedToRepair))
		default:
			c.allQ = c.allQ[:copy(c.allQ, c.allQ[n:])]
			c.dropSettled()
			return
		}
		n++
	}
	c.allQ = c.allQ[:copy(c.allQ, c.allQ[n:])]
	c.dropSettled()
}

// settle releases a confirmed entry that waits for no copy any more.
func (c *WriterCore) settle(e entry.EntryID) {
	p := c.at(e)
	if e < c.held() && !p.released && c.track.Missing(e)&^p.lost == 0 {
		p.released = true
		p.body = nil
		c.ready.Released += p.size
	}
	c.dropSettled()
}

// dropSettled forgets the oldest entries that are done in every way.
func (c *WriterCore) dropSettled() {
	to := c.track.Tail()
	for to <= c.track.LAC() && c.at(to).released && c.at(to).reported {
		*c.at(to) = pendingEntry{}
		to++
	}
	c.track.Drop(to)
}

// giveUp leaves the copies of the confirmed entry e in the given slots to repair.
func (c *WriterCore) giveUp(e entry.EntryID, slots quorum.Set) {
	p := c.at(e)
	slots &= c.track.Missing(e) &^ p.lost
	if slots == 0 {
		return
	}
	p.lost |= slots
	slots.Each(func(i int) {
		c.slots[i].unacked -= int64(p.size + entryOverhead)
		if p.inflight.Has(i) {
			// The entry may be forgotten before the answer comes.
			p.inflight &^= 1 << i
			c.slots[i].inflight--
		}
		c.hint(e, i)
	})
	c.settle(e)
}

// hint reports a missing copy, joined to the hint before it if that is about the same slot.
func (c *WriterCore) hint(e entry.EntryID, slot int) {
	f := c.fragmentOf(e)
	for i := range c.ready.Hints {
		if h := &c.ready.Hints[i]; h.Slot == slot && h.Fragment == f.First {
			h.First, h.Last = min(h.First, e), max(h.Last, e)
			return
		}
	}
	c.ready.Hints = append(c.ready.Hints, Hint{
		Ledger: c.ledger.ID, Fragment: f.First, Slot: slot, UUID: f.Slots[slot].UUID, First: e, Last: e,
	})
}

func (c *WriterCore) fragmentOf(e entry.EntryID) meta.Fragment {
	return FragmentOf(c.ledger.Fragments, e)
}

// FragmentOf returns the fragment that holds entry e; fragments must not be empty.
func FragmentOf(fragments []meta.Fragment, e entry.EntryID) meta.Fragment {
	f := fragments[0]
	for _, g := range fragments[1:] {
		if g.First > e {
			break
		}
		f = g
	}
	return f
}

// Withdraw is the event of the end: the ledger is left as it is, for a recovery to close. What is pending has an
// unknown outcome.
func (c *WriterCore) Withdraw(err error) {
	if !c.over() {
		c.withdraw(err)
	}
}

func (c *WriterCore) withdraw(err error) {
	c.phase, c.err = Withdrawn, err
	lac := c.track.LAC()
	for e := c.track.Tail(); e < c.track.Next(); e++ {
		p := c.at(e)
		switch {
		case e > c.sentTo:
			c.notWritten(e, p, err)
			continue
		case p.reported:
		default:
			c.report(e, p, c.unknown(e, err))
		}
		if e <= lac {
			c.giveUp2(e, p)
		}
		c.release(p)
	}
	c.forget()
}

// giveUp2 hints at the missing copies of an entry that is about to be forgotten.
func (c *WriterCore) giveUp2(e entry.EntryID, p *pendingEntry) {
	(c.track.Missing(e) &^ p.lost).Each(func(i int) { c.hint(e, i) })
}

func (c *WriterCore) release(p *pendingEntry) {
	if !p.released {
		p.released = true
		c.ready.Released += p.size
	}
}

// notWritten completes an entry that is certainly not part of the ledger; its body is the caller's again.
func (c *WriterCore) notWritten(e entry.EntryID, p *pendingEntry, cause error) {
	if p.reported {
		c.ready.Completions = append(c.ready.Completions, Completion{Entry: e, Dropped: true, Body: p.body})
		return
	}
	c.report(e, p, &AppendError{Ledger: c.ledger.ID, Entry: e, Outcome: NotWritten, Err: cause})
}

// forget drops all entries at the end of a writer's life.
func (c *WriterCore) forget() {
	c.pending, c.allQ = nil, nil
	c.track = quorum.NewTracker(c.track.Quorum(), c.track.LAC())
	c.change = changeState{wantsRoll: c.change.wantsRoll}
	c.sealed = false
}
