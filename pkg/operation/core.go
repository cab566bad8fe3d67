package operation

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Times of an operation.
const (
	// openPatience is how long an open ledger may name the bookie before it counts as blocked.
	openPatience = 30 * time.Second
	// writeEvery is the least time between two writes of figures alone, writeAtLeast the most: a record that is older
	// than that has nobody who runs it.
	writeEvery   = 2 * time.Second
	writeAtLeast = 10 * time.Second
	// speedOver is the time that the speed is measured over.
	speedOver = 30 * time.Second
)

// Left is a ledger that names the bookie.
type Left struct {
	Ledger entry.LedgerID
	// Bytes of it there, estimated.
	Bytes int64
	// Open: it is not closed, and names the bookie in its last fragment. Deleting: its deletion is to be confirmed.
	Open, Deleting bool
	// Owner is what it is part of, for people.
	Owner string
	// Stuck says why repair does not go on with it; empty if it does.
	Stuck string
}

// Survey is what is known at one time.
type Survey struct {
	Now  time.Time
	Left []Left // by ledger
	// Up: the bookie is registered.
	Up bool
	// P99 is publishing's, of late; 0 when nothing was published.
	P99 time.Duration
	// Runner is the id of the broker that looks.
	Runner string
}

// Decision is what comes next. Op is the record as it is to be: written if Write, or by the transaction that retires the
// identity if Finish.
type Decision struct {
	Op            meta.Operation
	Write, Finish bool
	// Confirm are ledgers whose deletion is to be confirmed for the dead disk.
	Confirm []entry.LedgerID
}

// Core decides about one operation, from its record and a survey. What it remembers makes figures smooth and spares
// attempts; without it the decisions are the same, a little later. It has no clock and no goroutine.
type Core struct {
	samples []sample
	open    map[entry.LedgerID]time.Time // since when a ledger is open there
}

type sample struct {
	at   time.Time
	left int64
}

// Step returns what comes next for an operation that is not over.
func (c *Core) Step(op meta.Operation, s Survey) Decision {
	d := Decision{Op: op}
	if op.Over() {
		return d
	}
	o := &d.Op
	o.Runner, o.LedgersLeft, o.BytesLeft, o.OpenLeft = s.Runner, int64(len(s.Left)), 0, 0
	for _, l := range s.Left {
		o.BytesLeft += l.Bytes
		if l.Open {
			o.OpenLeft++
		}
		if l.Deleting && op.Kind == meta.OperationRecover {
			d.Confirm = append(d.Confirm, l.Ledger)
		}
	}
	o.Ledgers, o.Bytes = max(o.Ledgers, o.LedgersLeft), max(o.Bytes, o.BytesLeft) // ledgers close while it runs
	switch {
	case o.OpenLeft > 0:
		o.State = meta.OperationDraining
	case o.LedgersLeft > 0:
		o.State = meta.OperationCopying
	default:
		o.State = meta.OperationProving
	}
	o.Held = ""
	if op.PauseAboveP99 > 0 && s.P99 > op.PauseAboveP99 {
		o.Held = fmt.Sprintf("publishing's p99 is above %s on broker %s", op.PauseAboveP99, s.Runner)
	}
	o.Speed = c.speed(s.Now, o.BytesLeft)
	c.followOpen(s)
	c.block(o, s)
	if o.State == meta.OperationProving && !op.Paused {
		d.Finish, o.Ended, o.Updated = true, s.Now, s.Now
		return d
	}
	d.Write = worthWriting(op, *o, s.Now)
	if d.Write {
		o.Updated = s.Now
	}
	return d
}

// worthWriting reports whether the record has changed for whoever reads it.
func worthWriting(old, now meta.Operation, at time.Time) bool {
	age := at.Sub(old.Updated)
	switch {
	case old.State != now.State, old.Held != now.Held, old.Runner != now.Runner, !slices.Equal(old.Blocks, now.Blocks), old.Blocked != now.Blocked:
		return true
	case old.LedgersLeft != now.LedgersLeft, old.BytesLeft != now.BytesLeft, old.OpenLeft != now.OpenLeft:
		return age >= writeEvery || age < 0
	}
	return age >= writeAtLeast || age < 0
}

// speed returns the bytes a second by which what is left has fallen.
func (c *Core) speed(now time.Time, left int64) int64 {
	c.samples = append(c.samples, sample{now, left})
	for len(c.samples) > 2 && now.Sub(c.samples[0].at) > speedOver {
		c.samples = c.samples[1:]
	}
	first := c.samples[0]
	took := now.Sub(first.at).Seconds()
	if took <= 0 || left >= first.left {
		return 0
	}
	return int64(float64(first.left-left) / took)
}

func (c *Core) followOpen(s Survey) {
	open := map[entry.LedgerID]time.Time{}
	for _, l := range s.Left {
		if !l.Open {
			continue
		}
		since, ok := c.open[l.Ledger]
		if !ok {
			since = s.Now
		}
		open[l.Ledger] = since
	}
	c.open = open
}

// block names the ledgers that do not go on.
func (c *Core) block(o *meta.Operation, s Survey) {
	o.Blocked, o.Blocks = 0, nil
	for _, l := range s.Left {
		reason := l.Stuck
		switch {
		case l.Deleting && !s.Up && o.Kind == meta.OperationDecommission:
			reason = fmt.Sprintf("it is being deleted, and bookie %s is down and can't confirm that → start it, or cancel and penstock bookie recover %s", o.Bookie, o.Bookie)
		case reason == "" && l.Open && s.Now.Sub(c.open[l.Ledger]) >= openPatience:
			reason = fmt.Sprintf("it is open, and no other bookie can take the place of %s in it, or no broker can open what it is part of → add a bookie, or see the brokers' logs", o.Bookie)
		case l.Deleting:
			reason = ""
		}
		if reason == "" {
			continue
		}
		o.Blocked++
		if len(o.Blocks) < meta.MaxOperationBlocks {
			o.Blocks = append(o.Blocks, meta.OperationBlock{Ledger: l.Ledger, Owner: l.Owner, Reason: reason})
		}
	}
}
