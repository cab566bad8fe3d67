package subscription

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// Subscription is one subscription of a topic that is open here. It is safe for concurrent use.
//
// The lock guards the cursor and who waits for it; it is never held while the state log or dispatch is called. One
// flush at a time is under way: what is acknowledged meanwhile makes the next group.
type Subscription struct {
	set  *Set
	name string
	uuid entry.UUID
	made cursor.Ticket // of its making, if that was here

	mu       sync.Mutex
	cur      *cursor.Cursor
	waiting  []ackWaiter
	flushing bool
	idle     chan struct{} // closed when the flush under way ends; nil without one
	failed   error         // nothing is confirmed any more: the state log refused, or the process is stopping
	deleting bool          // the log is being told, or was
	deleted  bool          // … and has it
	ended    bool          // the topic is not served any more: what the log has of the subscription is another cursor's to change

	// attaching guards who consumes; it is held while a consumer comes or goes, and taken before mu.
	attaching sched.Turn
	kind      Type
	runner    *dispatch.Runner
	leaving   bool // nobody is let in any more
	consumers map[dispatch.ConsumerID]*Consumer
}

type ackWaiter struct {
	ticket cursor.Ticket
	done   func(error)
}

func newSubscription(set *Set, cur *cursor.Cursor) *Subscription {
	return &Subscription{set: set, name: cur.Meta().Name, uuid: cur.Meta().UUID, cur: cur, consumers: map[dispatch.ConsumerID]*Consumer{}}
}

// Name returns the subscription's name.
func (s *Subscription) Name() string { return s.name }

// UUID tells the subscription from others of its name, before it and after it.
func (s *Subscription) UUID() entry.UUID { return s.uuid }

// Floor returns the offset below which everything is acknowledged.
func (s *Subscription) Floor() entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.Floor()
}

// Generation counts how often it was moved.
func (s *Subscription) Generation() cursor.Generation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.Generation()
}

// trimFloor is what retention may go by: only what is durable.
func (s *Subscription) trimFloor() entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.TrimFloor()
}

// Progress is where a subscription stands.
type Progress struct {
	// Floor is the offset below which everything is acknowledged, Backlog counts the messages that are not, Holes the gaps
	// in what is above the floor.
	Floor   entry.Offset
	Backlog uint64
	Holes   uint64
	// Type is none without consumers.
	Type   Type
	Status dispatch.Status
}

// Progress tells where the subscription stands, and what it waits for.
func (s *Subscription) Progress() Progress {
	var p Progress
	p.Status, p.Type = s.why()
	end := s.set.cfg.Topic.Next()
	s.mu.Lock()
	defer s.mu.Unlock()
	p.Floor, p.Backlog, p.Holes = s.cur.Floor(), s.cur.Backlog(end), s.cur.Holes()
	return p
}

func (s *Subscription) why() (dispatch.Status, Type) {
	s.take()
	runner, kind, connected := s.runner, s.kind, len(s.consumers)
	s.attaching.Give()
	if runner == nil {
		return dispatch.Status{
			Reason: dispatch.ReasonNoConsumers, Detail: "no consumer is connected", Next: s.NextUnacked(s.Floor()), End: s.set.cfg.Topic.Next(),
		}, 0
	}
	if connected == 0 {
		kind = 0
	}
	return runner.Why(), kind
}

// take waits for the turn of who consumes, which nobody has for long.
func (s *Subscription) take() {
	_ = s.attaching.Take(context.Background(), s.set.b.env.Sched) // never canceled
}

// Acknowledgement state as dispatch asks for it.

// NextUnacked returns the lowest unacknowledged offset ≥ o.
func (s *Subscription) NextUnacked(o entry.Offset) entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.NextUnacked(o)
}

// Missing appends what of r is not acknowledged.
func (s *Subscription) Missing(dst []cursor.Range, r cursor.Range) []cursor.Range {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.Missing(dst, r)
}

// change applies a change to the cursor and has it written. done, if not nil, is called once with nil when everything
// applied so far is durable, or with the error that prevents it; never before change has returned its own error.
func (s *Subscription) change(f func(*cursor.Cursor) (cursor.Ticket, error), done func(error)) error {
	s.mu.Lock()
	if err := s.refusal(); err != nil {
		s.mu.Unlock()
		return err
	}
	ticket, err := f(s.cur)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	durable := ticket <= s.cur.Durable()
	if !durable && done != nil {
		s.waiting = append(s.waiting, ackWaiter{ticket: ticket, done: done})
	}
	var dropped []ackWaiter
	var why error
	if !s.startFlush() {
		s.failed = topic.ErrClosed
		dropped, s.waiting = s.waiting, nil
		why = s.refusal()
	}
	s.mu.Unlock()
	for _, w := range dropped {
		w.done(why)
	}
	if durable && done != nil {
		done(nil)
	}
	return nil
}

// wait applies a change, calls applied, and waits until the change is durable.
func (s *Subscription) wait(ctx context.Context, doing string, f func(*cursor.Cursor) (cursor.Ticket, error), applied func()) error {
	ended := make(chan struct{})
	var outcome error
	if err := s.change(f, func(err error) { outcome = err; close(ended) }); err != nil {
		return err
	}
	applied()
	if _, err := s.set.b.env.Sched.Wait(ctx, sched.Channels{ended}); err != nil {
		return unavailable(doing, s.name, err)
	}
	return outcome
}

// awaitMade waits until the subscription is durable.
func (s *Subscription) awaitMade(ctx context.Context) error {
	return s.wait(ctx, "write state of subscription", func(*cursor.Cursor) (cursor.Ticket, error) { return s.made, nil }, func() {})
}

// refusal says why the cursor takes no changes. The lock is held.
func (s *Subscription) refusal() error {
	switch {
	case s.deleted:
		return refuse(NotFound, "subscription %s of %s was deleted", s.name, s.set.cfg.Name)
	case s.failed != nil:
		return fmt.Errorf("subscription %s of %s: %w", s.name, s.set.cfg.Name, s.failed)
	case s.deleting:
		return refuse(Unavailable, "subscription %s of %s is being deleted; try again", s.name, s.set.cfg.Name)
	case s.ended:
		return fmt.Errorf("subscription %s of %s: %w", s.name, s.set.cfg.Name, topic.ErrClosed)
	}
	return nil
}

// end lets nobody in any more, stops delivery, and refuses changes once delivery has told what was given back. What was taken
// in before goes on being written.
func (s *Subscription) end() {
	s.take()
	s.leaving = true
	runner := s.runner
	s.attaching.Give()
	if runner != nil {
		runner.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}

// occupy waits until no flush is under way, and keeps others from beginning: whoever occupies the log writes alone, and
// calls leave afterwards. It fails when no changes are taken any more.
func (s *Subscription) occupy(ctx context.Context) error {
	for {
		s.settled(ctx)
		s.mu.Lock()
		err := s.refusal()
		if err == nil && s.flushing {
			err = ctx.Err()
			if err == nil {
				s.mu.Unlock()
				continue
			}
			err = unavailable("write state of subscription", s.name, err)
		}
		if err == nil {
			s.flushing, s.idle = true, make(chan struct{})
		}
		s.mu.Unlock()
		return err
	}
}

// leave ends a flush or an occupation. The lock is held.
func (s *Subscription) leave() {
	s.flushing = false
	close(s.idle)
	s.idle = nil
}

// startFlush has pending changes written, unless that is under way. It reports false when nothing is written any more. The
// lock is held.
func (s *Subscription) startFlush() bool {
	if s.flushing || !s.cur.Pending() {
		return true
	}
	s.flushing = true
	s.idle = make(chan struct{})
	if !s.set.b.env.Go(s.flush) {
		s.leave()
		return false
	}
	return true
}

// flush writes group after group until nothing is pending.
func (s *Subscription) flush() {
	for {
		s.mu.Lock()
		batch, ok := s.cur.Take(s.set.b.env.Sched.Now().UnixMilli())
		if !ok || s.failed != nil {
			s.leave()
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		err := s.write(batch.Records, batch.Split)
		s.mu.Lock()
		var done []ackWaiter
		if err != nil {
			s.failed = err
			done, s.waiting = s.waiting, nil
		} else {
			s.cur.Confirm(batch.Seq)
			durable := s.cur.Durable()
			rest := s.waiting[:0]
			for _, w := range s.waiting {
				if w.ticket <= durable {
					done = append(done, w)
				} else {
					rest = append(rest, w)
				}
			}
			s.waiting = rest
		}
		s.mu.Unlock()
		for _, w := range done {
			w.done(err)
		}
	}
}

func (s *Subscription) write(records []cursor.Record, split func(int) [][]cursor.Record) error {
	if err := s.set.b.write(&s.set.cfg, records, split); err != nil {
		return fmt.Errorf("write state of subscription %s: %w", s.name, err)
	}
	return nil
}

// settled waits until no flush is under way, as long as ctx lasts.
func (s *Subscription) settled(ctx context.Context) {
	for {
		s.mu.Lock()
		idle := s.idle
		s.mu.Unlock()
		if idle == nil {
			return
		}
		if _, err := s.set.b.env.Sched.Wait(ctx, sched.Channels{idle}); err != nil {
			return
		}
	}
}

// Expire acknowledges everything below upTo unread.
func (s *Subscription) Expire(upTo entry.Offset) error {
	from := s.Floor()
	if upTo <= from {
		return nil
	}
	var generation cursor.Generation
	err := s.change(func(c *cursor.Cursor) (cursor.Ticket, error) {
		generation = c.Generation()
		return c.AckCumulative(generation, s.set.cfg.Topic.Next(), upTo)
	}, nil)
	if err != nil {
		return err
	}
	s.take()
	runner := s.runner
	s.attaching.Give()
	if runner != nil {
		runner.Acked(generation, 0, cursor.Range{First: from, End: upTo})
	}
	return nil
}

// remember keeps in the cursor what is to be delivered again, so that counts and delays survive a failover.
func (s *Subscription) remember(generation cursor.Generation, retries []dispatch.Retry) {
	end := s.set.cfg.Topic.Next()
	// A refusal means that the subscription was moved, deleted or lost meanwhile: then there is nothing to remember.
	_ = s.change(func(c *cursor.Cursor) (cursor.Ticket, error) {
		ticket := c.Ticket()
		for _, r := range retries {
			retry := cursor.Retry{Count: r.Count, NotBefore: r.NotBefore.UnixMilli(), Reason: r.Reason}
			var err error
			if ticket, err = c.SetRetry(generation, end, r.Range, retry); err != nil {
				return 0, err //nolint:wrapcheck // looked at by nobody
			}
		}
		return ticket, nil
	}, nil)
}

// Seek moves the subscription, and waits until that is durable. Its consumers are told to come again at once: what they
// hold was delivered before the move, and delivery follows the cursor, whether anybody waits for the log or not.
func (s *Subscription) Seek(ctx context.Context, to entry.Offset) error {
	to, err := s.set.besideTrim(ctx, to)
	if err != nil {
		return err
	}
	unlock := sync.OnceFunc(s.set.mu.Unlock)
	defer unlock()
	var generation cursor.Generation
	return s.wait(ctx, "move subscription", func(c *cursor.Cursor) (cursor.Ticket, error) {
		ticket := c.Seek(to)
		generation = c.Generation()
		return ticket, nil
	}, func() {
		unlock() // the next trim sees where the cursor is
		s.take()
		defer s.attaching.Give()
		if s.runner != nil {
			s.runner.Seek(generation, to)
		}
		s.stop(refuse(Moved, "subscription %s of %s was moved to offset %d", s.name, s.set.cfg.Name, to))
	})
}

// stop has every consumer's stream end. The turn is held.
func (s *Subscription) stop(why error) {
	for _, id := range s.ids() {
		s.consumers[id].stream.Stop(why)
	}
}

// ids returns the consumers in the order in which they came. The turn is held.
func (s *Subscription) ids() []dispatch.ConsumerID {
	ids := make([]dispatch.ConsumerID, 0, len(s.consumers))
	for id := range s.consumers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// disconnect ends every consumer's stream and the dispatch.
func (s *Subscription) disconnect(why error) {
	s.take()
	defer s.attaching.Give()
	s.stop(why)
	if s.runner != nil {
		s.runner.Close()
	}
}

// Consumers returns the streams of the consumers.
func (s *Subscription) Consumers() map[dispatch.ConsumerID]Stream {
	s.take()
	defer s.attaching.Give()
	out := make(map[dispatch.ConsumerID]Stream, len(s.consumers))
	for id, c := range s.consumers {
		out[id] = c.stream
	}
	return out
}

// Attach lets a consumer in, making the dispatch of its type if need be. The consumer must be closed.
func (s *Subscription) Attach(stream Stream, kind Type, who dispatch.Consumer) (*Consumer, error) {
	if err := s.set.attached(); err != nil {
		return nil, err
	}
	c, err := s.attach(stream, kind, who)
	if err != nil {
		s.set.detached()
	}
	return c, err
}

func (s *Subscription) attach(stream Stream, kind Type, who dispatch.Consumer) (*Consumer, error) {
	s.take()
	defer s.attaching.Give()
	if s.leaving {
		return nil, fmt.Errorf("subscription %s of %s: %w", s.name, s.set.cfg.Name, topic.ErrClosed)
	}
	if s.runner != nil && s.kind != kind {
		if len(s.consumers) > 0 {
			return nil, refuse(Conflict, "subscription %s of %s has %d consumers of type %s: use that type, or disconnect them",
				s.name, s.set.cfg.Name, len(s.consumers), s.kind)
		}
		s.runner.Close() // before the cursor is asked what is to be delivered again: it may be told yet
		s.runner = nil
	}
	s.mu.Lock()
	err := s.refusal()
	generation, floor := s.cur.Generation(), s.cur.Floor()
	var retries []dispatch.Retry
	for r, retry := range s.cur.Retries().All() {
		retries = append(retries, dispatch.Retry{Range: r, Count: retry.Count, NotBefore: time.UnixMilli(retry.NotBefore), Reason: retry.Reason})
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	env, t := &s.set.b.env, s.set.cfg.Topic
	if s.runner == nil {
		s.kind = kind
		s.runner = dispatch.New(s.set.cfg.Core(kind), dispatch.Env{
			Source: &source{t: t}, Acks: s, OnRetries: s.remember, Budget: env.Reads, Metrics: env.Dispatch, Log: env.Log, Sched: env.Sched,
		})
		s.runner.Loaded(generation, floor, t.Next(), retries)
	}
	c := &Consumer{
		set: s.set, sub: s, stream: stream, runner: s.runner, generation: generation,
		incarnation: binary.BigEndian.AppendUint32(s.uuid[:], uint32(generation)),
	}
	if c.id, err = s.runner.AddConsumer(who, stream); err != nil {
		return nil, err //nolint:wrapcheck // it says who is in the way
	}
	s.consumers[c.id] = c
	s.runner.Notify(t.Next()) // a runner from before has not been told while there was no consumer
	return c, nil
}

// detach lets a consumer go; what it did not acknowledge is delivered again.
func (s *Subscription) detach(c *Consumer) {
	s.take()
	defer s.attaching.Give()
	if s.consumers[c.id] == c {
		delete(s.consumers, c.id)
		c.runner.RemoveConsumer(c.id)
	}
}
