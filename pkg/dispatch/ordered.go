package dispatch

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// ordered delivers to one active consumer at a time, always in order of offset.
//
// A redelivery is a step back: what is given back, and everything the consumer holds after it, is read and
// delivered again in order. Delivering only what was given back, as Pulsar's Exclusive does, would put a
// message behind later ones of its producer. For the same reason a delay holds everything from there on.
type ordered struct {
	base
	active *consumer
	choose func([]*consumer) *consumer
	tell   bool      // consumers hear of becoming active
	hold   time.Time // nothing is delivered before
}

// Loaded implements [Core].
func (o *ordered) Loaded(g cursor.Generation, from, end entry.Offset, retries []Retry, _ time.Time) {
	o.loaded, o.generation, o.pos, o.end = true, g, from, max(o.end, end)
	for _, r := range retries {
		o.counts.Set(r.Range, r.Count)
		if r.NotBefore.After(o.hold) {
			o.hold = r.NotBefore
		}
	}
}

func (o *ordered) add(c Consumer) {
	o.consumers = append(o.consumers, &consumer{Consumer: c})
	o.elect()
}

// ConsumerRemoved implements [Core].
func (o *ordered) ConsumerRemoved(id ConsumerID, _ time.Time) {
	for i, c := range o.consumers {
		if c.ID == id {
			if c == o.active {
				o.active = nil
				o.stepBack(c, 0, time.Time{}, cursor.RetryConsumerGone)
			}
			o.consumers = append(o.consumers[:i:i], o.consumers[i+1:]...)
			o.elect()
			return
		}
	}
}

// elect makes the right consumer the active one.
func (o *ordered) elect() {
	next := o.choose(o.consumers)
	if next == o.active {
		return
	}
	if old := o.active; old != nil {
		o.stepBack(old, 0, time.Time{}, cursor.RetryConsumerGone)
		o.notices = append(o.notices, Action{Kind: ActionDeactivate, Consumer: old.ID})
	}
	o.active = next
	if next != nil && o.tell {
		o.notices = append(o.notices, Action{Kind: ActionActivate, Consumer: next.ID})
	}
}

// stepBack takes back what c holds from an offset on, and goes back to the first of it, or of what is ready.
func (o *ordered) stepBack(c *consumer, from entry.Offset, notBefore time.Time, why cursor.RetryReason) {
	if held := o.giveBack(c, cursor.Range{First: from, End: ^entry.Offset(0)}, notBefore, why); len(held) > 0 {
		o.pos = min(o.pos, held[0].First)
	}
	o.drop()
	o.abandonRead()
}

// Nacked implements [Core].
func (o *ordered) Nacked(id ConsumerID, notBefore, _ time.Time, ranges ...cursor.Range) {
	c := o.find(id)
	if c == nil {
		return
	}
	first, found := entry.Offset(0), false
	for _, r := range ranges {
		for held := range c.outstanding.Within(r) {
			if !found || held.First < first {
				first, found = held.First, true
			}
			break
		}
	}
	if !found {
		return
	}
	o.stepBack(c, first, notBefore, cursor.RetryNacked)
	if notBefore.After(o.hold) {
		o.hold = notBefore
	}
}

// Acked implements [Core]. What is acknowledged need not be waited for.
func (o *ordered) Acked(g cursor.Generation, id ConsumerID, ranges ...cursor.Range) {
	o.base.Acked(g, id, ranges...)
	if !o.hold.IsZero() && o.counts.Len() == 0 {
		o.hold = time.Time{}
	}
}

// SeekDone implements [Core].
func (o *ordered) SeekDone(g cursor.Generation, to entry.Offset) {
	if g > o.generation {
		o.hold = time.Time{}
	}
	o.base.SeekDone(g, to)
}

// wait says what is waited for; ReasonNone if there is something to do.
func (o *ordered) wait(now time.Time) Action {
	if r := o.gate(); r != ReasonNone {
		return Action{Reason: r}
	}
	if o.ready.empty() && o.pos >= o.end {
		return Action{Reason: ReasonNoData}
	}
	if o.hold.After(now) {
		return Action{Reason: ReasonRedeliveryDelay, Until: o.hold}
	}
	if r := o.blocked(o.active); r != ReasonNone {
		return Action{Reason: r}
	}
	if o.ready.empty() && o.retryAt.After(now) {
		return Action{Reason: ReasonReadFailed, Until: o.retryAt}
	}
	return Action{Reason: ReasonNone}
}

// Next implements [Core].
func (o *ordered) Next(now time.Time) Action {
	if a, ok := o.pending(); ok {
		return a
	}
	if a := o.wait(now); a.Reason != ReasonNone {
		o.drop()
		return a
	}
	if !o.ready.empty() {
		return o.send(o.active, &o.ready, ^uint64(0))
	}
	return o.startRead(o.pos, min(o.end, o.pos+entry.Offset(o.room(o.active))), false)
}

// Status implements [Core].
func (o *ordered) Status(now time.Time) Status {
	s := o.status(o.wait(now), now, func(c *consumer) bool { return c == o.active })
	if s.Reason == ReasonRedeliveryDelay {
		s.Delayed = o.counts.Offsets()
		s.Detail = o.detail(s, o.wait(now), now)
	}
	return s
}
