package client

import (
	"fmt"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// acker groups the acknowledgements of one consumer on one partition: a pure state machine. Every group that is
// sent carries a request id, confirmed or not asked for by the application, because only the broker's answer
// says that it is durable: what is not answered when a stream breaks is sent again on the next, and messages
// that the broker redelivers meanwhile are recognised.
type acker struct {
	max   int
	delay time.Duration

	pending  ackGroup
	count    int       // acknowledgements in pending
	due      time.Time // of pending, when it is not empty
	inFlight map[uint64]*ackGroup
	last     uint64 // request id
	refusal  error  // why the latest group that was refused for now was; nil once one is durable
}

// ackGroup is what one Ack request says.
type ackGroup struct {
	id         uint64
	ranges     rangeSet
	cumulative *entry.Offset
	waiters    []chan error // buffered; told once the group is durable, or failed
}

func (g *ackGroup) empty() bool { return g.ranges.empty() && g.cumulative == nil }

func (g *ackGroup) contains(o entry.Offset) bool {
	return g.cumulative != nil && o <= *g.cumulative || g.ranges.contains(o)
}

func (g *ackGroup) merge(other *ackGroup) {
	g.ranges.merge(other.ranges)
	if other.cumulative != nil {
		g.cumulate(*other.cumulative)
	}
	g.waiters = append(g.waiters, other.waiters...)
}

func (g *ackGroup) cumulate(o entry.Offset) {
	if g.cumulative == nil || *g.cumulative < o {
		g.cumulative = &o
	}
	g.ranges.removeUpTo(*g.cumulative)
}

// changes tells whether one more acknowledgement changes when the next group is due, so that step is to be asked again. If
// not, the time of that acknowledgement does not matter.
func (a *acker) changes(waiter chan error) bool {
	return a.count == 0 || waiter != nil || a.count+1 >= a.max
}

// add acknowledges one message; waiter, if not nil, is told of the outcome, and makes the group leave at once.
func (a *acker) add(o entry.Offset, waiter chan error, now time.Time) {
	if g := &a.pending; !g.contains(o) {
		g.ranges.add(o)
	}
	a.added(waiter, now)
}

// addCumulative acknowledges everything up to and including o.
func (a *acker) addCumulative(o entry.Offset, waiter chan error, now time.Time) {
	a.pending.cumulate(o)
	a.added(waiter, now)
}

func (a *acker) added(waiter chan error, now time.Time) {
	if a.count == 0 {
		a.due = now.Add(a.delay)
	}
	a.count++
	if waiter != nil {
		a.pending.waiters = append(a.pending.waiters, waiter)
		a.due = now
	}
	if a.count >= a.max {
		a.due = now
	}
}

// step returns the group to send now, or the time at which to ask again; neither when nothing is pending.
func (a *acker) step(now time.Time) (*ackGroup, time.Time) {
	if a.pending.empty() {
		return nil, time.Time{}
	}
	if now.Before(a.due) {
		return nil, a.due
	}
	g := a.pending
	a.last++
	g.id = a.last
	a.pending, a.count = ackGroup{}, 0
	if a.inFlight == nil {
		a.inFlight = make(map[uint64]*ackGroup)
	}
	a.inFlight[g.id] = &g
	return &g, time.Time{}
}

// answered says that the broker answered a group. A failure that may pass puts it back, to be sent again at
// retryAt. It returns the waiters to tell.
func (a *acker) answered(id uint64, err *Error, retryAt time.Time) []chan error {
	g, ok := a.inFlight[id]
	if !ok {
		return nil
	}
	delete(a.inFlight, id)
	a.refusal = nil
	if err != nil && err.Retryable {
		a.refusal = err
		a.again(g, retryAt)
		return nil
	}
	return g.waiters
}

func (a *acker) again(g *ackGroup, at time.Time) {
	if a.count == 0 || a.due.Before(at) {
		a.due = at
	}
	a.pending.merge(g)
	a.count++
}

// broken says that the stream is gone: what was not answered is pending again, due at once.
func (a *acker) broken(now time.Time) {
	for id, g := range a.inFlight {
		a.again(g, now)
		delete(a.inFlight, id)
	}
	if a.count > 0 {
		a.due = now
	}
}

// flushNow makes what is pending leave at once.
func (a *acker) flushNow(now time.Time) { a.due = now }

// waiting tells whether the application waits for an answer.
func (a *acker) waiting() bool {
	for _, g := range a.inFlight {
		if len(g.waiters) > 0 {
			return true
		}
	}
	return len(a.pending.waiters) > 0
}

// unconfirmed tells whether the application acknowledged o and the broker has not answered yet.
func (a *acker) unconfirmed(o entry.Offset) bool {
	if a.pending.contains(o) {
		return true
	}
	for _, g := range a.inFlight {
		if g.contains(o) {
			return true
		}
	}
	return false
}

// namedRanges bounds how many ranges of offsets an error names.
const namedRanges = 8

// unanswered says which acknowledgements no broker has confirmed yet, for people; "" is none.
func (a *acker) unanswered() string {
	all := a.outstanding()
	return all.offsets()
}

// outstanding returns the acknowledgements that no broker has confirmed yet, without who waits for them.
func (a *acker) outstanding() ackGroup {
	var all ackGroup
	all.note(&a.pending)
	for _, g := range a.inFlight {
		all.note(g)
	}
	return all
}

// note adds what other acknowledges, without who waits for it.
func (g *ackGroup) note(other *ackGroup) {
	g.merge(&ackGroup{ranges: other.ranges, cumulative: other.cumulative})
}

// offsets names what is acknowledged, for people; "" is nothing.
func (g *ackGroup) offsets() string {
	var parts []string
	if g.cumulative != nil {
		parts = append(parts, fmt.Sprintf("up to %d", *g.cumulative))
	}
	for i, r := range g.ranges.ranges {
		switch {
		case i == namedRanges:
			parts = append(parts, fmt.Sprintf("and %d ranges more", len(g.ranges.ranges)-i))
		case i > namedRanges:
		case r.first == r.last:
			parts = append(parts, fmt.Sprint(r.first))
		default:
			parts = append(parts, fmt.Sprintf("%d to %d", r.first, r.last))
		}
	}
	return strings.Join(parts, ", ")
}

// reset forgets everything, and returns the waiters to tell.
func (a *acker) reset() []chan error {
	waiters := a.pending.waiters
	for _, g := range a.inFlight {
		waiters = append(waiters, g.waiters...)
	}
	a.pending, a.count, a.inFlight = ackGroup{}, 0, nil
	return waiters
}
