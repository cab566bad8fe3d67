package ledger

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// RequestClose is the event of a wish to close. Entries in flight may still be confirmed until drainUntil, later ones
// are kept back; then [Ready.Close] proposes the end, and nothing is confirmed before its outcome.
func (c *WriterCore) RequestClose(drainUntil time.Time) {
	if c.over() || c.sealed {
		return
	}
	c.sealed, c.drainDeadline = true, drainUntil
	c.evaluate()
}

// CancelClose is the event of a closer that gave up before anything was proposed; false if it is too late for that.
func (c *WriterCore) CancelClose() bool {
	if c.over() || !c.sealed {
		return true
	}
	if c.phase == Closing {
		return false
	}
	c.sealed = false
	for e := c.sentTo + 1; e < c.track.Next(); e++ {
		c.resume(e)
	}
	c.evaluate()
	return true
}

// resume sends what was kept back while a close was on its way.
func (c *WriterCore) resume(e entry.EntryID) {
	if c.track.Tracked(e) {
		c.send(e)
	}
}

// checkDrained proposes the close once nothing more is to be had from waiting.
func (c *WriterCore) checkDrained() {
	if !c.sealed || c.phase != Active {
		return
	}
	drained := c.track.LAC() >= c.sentTo && len(c.unsentAll()) == 0
	if !drained && c.change.stalledSince.IsZero() && c.now.Before(c.drainDeadline) {
		return
	}
	c.phase = Closing
	c.ready.Close = &CloseProposal{Last: c.track.LAC(), Length: c.confirmedLength}
}

// unsentAll returns the sent entries that still wait for all their copies.
func (c *WriterCore) unsentAll() []entry.EntryID {
	n := 0
	for _, e := range c.allQ {
		if e <= c.sentTo {
			n++
		}
	}
	return c.allQ[:n]
}

// CloseDone is the event of the proposed close's outcome; l is the record with [Applied].
func (c *WriterCore) CloseDone(result TxnResult, l meta.Ledger, err error) {
	if c.over() {
		return
	}
	if c.phase != Closing {
		panic("ledger: outcome of a close that was not proposed")
	}
	switch result {
	case Applied:
		c.closed(l)
	case NotApplied:
		c.phase, c.sealed = Active, false
		for e := c.track.Tail(); e < c.track.Next(); e++ {
			c.resume(e)
		}
		c.confirm()
		c.evaluate()
	case Lost:
		c.withdraw(joinCause(ErrTakenOver, err))
	case NoOutcome:
		c.withdraw(joinCause(meta.ErrUnknownOutcome, err))
	}
}

func (c *WriterCore) closed(l meta.Ledger) {
	c.ledger, c.phase = l, Closed
	lac := c.track.LAC()
	if l.Last != lac {
		panic("ledger: closed at another entry than proposed")
	}
	for e := c.track.Tail(); e < c.track.Next(); e++ {
		p := c.at(e)
		if e > lac {
			c.notWritten(e, p, ErrClosed)
			continue
		}
		missing := c.track.Missing(e)
		if !p.reported {
			c.report(e, p, c.unknown(e, ErrHandedToRepair))
		}
		(missing &^ p.lost).Each(func(i int) { c.hint(e, i) })
		c.release(p)
	}
	c.forget()
}
