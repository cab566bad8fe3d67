package dispatch

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// shared gives every consumer a share, in turns, and keeps no order. What is given back, or was held by a
// consumer that left, goes to whoever can take it, before anything new.
type shared struct {
	base
	turn int // index of the consumer whose turn it is
}

// NewShared makes the core of a Shared subscription. It delivers nothing before Loaded.
func NewShared(cfg Config) Core { return &shared{base: base{cfg: cfg}} }

// Loaded implements [Core].
func (s *shared) Loaded(g cursor.Generation, from, end entry.Offset, retries []Retry, now time.Time) {
	s.loaded, s.generation, s.pos, s.end = true, g, from, max(s.end, end)
	for _, r := range retries {
		s.counts.Set(r.Range, r.Count)
		if r.NotBefore.After(now) {
			s.delayed.push(r.NotBefore, r.Range)
			s.ahead.Add(r.Range)
		}
	}
}

// ConsumerAdded implements [Core].
func (s *shared) ConsumerAdded(c Consumer, _ time.Time) error {
	s.consumers = append(s.consumers, &consumer{Consumer: c})
	return nil
}

// ConsumerRemoved implements [Core].
func (s *shared) ConsumerRemoved(id ConsumerID, _ time.Time) {
	for i, c := range s.consumers {
		if c.ID != id {
			continue
		}
		s.due.AddAll(s.giveBack(c, cursor.Range{End: ^entry.Offset(0)}, time.Time{}, cursor.RetryConsumerGone))
		s.consumers = append(s.consumers[:i:i], s.consumers[i+1:]...)
		if s.turn > i {
			s.turn--
		}
		break
	}
	if len(s.consumers) == 0 { // nobody to hold entries in memory for
		s.drop()
		s.abandonRead()
	}
}

// Nacked implements [Core].
func (s *shared) Nacked(id ConsumerID, notBefore, now time.Time, ranges ...cursor.Range) {
	c := s.find(id)
	if c == nil {
		return
	}
	for _, r := range ranges {
		held := s.giveBack(c, r, notBefore, cursor.RetryNacked)
		if !notBefore.After(now) {
			s.due.AddAll(held)
			continue
		}
		for _, part := range held {
			s.delayed.push(notBefore, part)
		}
	}
}

// wait says what is waited for; ReasonNone if there is something to do for someone.
func (s *shared) wait(now time.Time) Action {
	if r := s.gate(); r != ReasonNone {
		return Action{Reason: r}
	}
	later := s.delayed.next()
	redeliver := !s.due.Empty() || s.delayed.len() > 0 && !later.After(now)
	if !redeliver && s.ready.empty() {
		switch {
		case s.pos >= s.end && s.delayed.len() > 0:
			return Action{Reason: ReasonRedeliveryDelay, Until: later}
		case s.pos >= s.end:
			return Action{Reason: ReasonNoData}
		case s.cfg.MaxDelayed > 0 && s.delayed.len() >= s.cfg.MaxDelayed:
			return Action{Reason: ReasonDelayedLimit, Until: later}
		}
	}
	if r := s.allBlocked(); r != ReasonNone {
		return Action{Reason: r}
	}
	if s.retryAt.After(now) && (redeliver && s.replay.empty() || !redeliver && s.ready.empty()) {
		return Action{Reason: ReasonReadFailed, Until: s.retryAt}
	}
	return Action{Reason: ReasonNone}
}

// allBlocked says why nobody may be sent anything: the reason of one that asks for more, if there is one.
func (s *shared) allBlocked() Reason {
	reason := ReasonNoPermits
	for _, c := range s.consumers {
		switch r := s.blocked(c); r {
		case ReasonNone, ReasonUnackedSubscription:
			return r
		case ReasonNoPermits:
		default:
			reason = r
		}
	}
	return reason
}

// Next implements [Core].
func (s *shared) Next(now time.Time) Action {
	if a, ok := s.pending(); ok {
		return a
	}
	if a := s.wait(now); a.Reason != ReasonNone {
		s.drop()
		return a
	}
	s.delayed.popDue(now, s.due.Add)
	q := &s.ready
	switch {
	case !s.replay.empty():
		q = &s.replay
	case !s.due.Empty():
		return s.readDue()
	case s.ready.empty():
		if s.pos >= s.end { // what was delayed is acknowledged
			return s.wait(now)
		}
		return s.startRead(s.pos, min(s.end, s.pos+s.room()), false)
	}
	free, able := -1, uint64(0)
	for i := range s.consumers {
		at := (s.turn + i) % len(s.consumers)
		if s.blocked(s.consumers[at]) == ReasonNone {
			if free < 0 {
				free = at
			}
			able++
		}
	}
	s.turn = free + 1
	return s.send(s.consumers[free], q, (q.filled+able-1)/able)
}

// room returns how many messages all consumers together may be sent.
func (s *shared) room() entry.Offset {
	n := uint64(0)
	for _, c := range s.consumers {
		n += s.base.room(c)
	}
	if limit := s.cfg.MaxUnackedPerSubscription; limit > 0 {
		n = min(n, limit-min(limit, s.unacked))
	}
	return entry.Offset(n)
}

// maxGap is how far apart redeliveries may lie to be read at once.
const maxGap = 64

// readDue reads the first of what is due, and what lies close after it.
func (s *shared) readDue() Action {
	s.drop()
	first, _ := s.due.First()
	until, most := first.First, first.First+s.room()
	for r := range s.due.Within(cursor.Range{First: first.First, End: most}) {
		if r.First > until+maxGap {
			break
		}
		until = r.End
	}
	return s.startRead(first.First, until, true)
}

// Status implements [Core].
func (s *shared) Status(now time.Time) Status {
	return s.status(s.wait(now), now, func(*consumer) bool { return true })
}
