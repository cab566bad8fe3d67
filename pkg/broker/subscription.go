package broker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// recordRoom is what a group of cursor records leaves free in a state-log entry for owner and framing.
const recordRoom = 64 << 10

// subscription is one subscription of a topic that is open here: its cursor, whose changes go to the bundle's state log
// in groups, and its dispatch, which exists once a consumer has come.
//
// The lock guards the cursor and who waits for it; it is never held while the state log or dispatch is called. One
// flush at a time is under way: what is acknowledged meanwhile makes the next group.
type subscription struct {
	t    *servedTopic
	name string

	mu       sync.Mutex
	cur      *cursor.Cursor
	waiting  []ackWaiter
	flushing bool
	idle     chan struct{} // closed when the flush under way ends; nil without one
	failed   error         // the state log refused: nothing is confirmed any more
	deleted  bool
	ended    bool // the topic is not served any more: what the log has of the subscription is another cursor's to change

	// attaching guards who consumes; it is held while a consumer comes or goes, and taken before mu.
	attaching sync.Mutex
	kind      brokerv1.SubscriptionType
	runner    *dispatch.Runner
	consumers map[*consumer]struct{}
}

type ackWaiter struct {
	ticket cursor.Ticket
	done   func(error)
}

func newSubscription(t *servedTopic, cur *cursor.Cursor) *subscription {
	return &subscription{t: t, name: cur.Meta().Name, cur: cur, consumers: map[*consumer]struct{}{}}
}

// Acknowledgement state as dispatch asks for it.

// NextUnacked returns the lowest unacknowledged offset ≥ o.
func (s *subscription) NextUnacked(o entry.Offset) entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.NextUnacked(o)
}

// Missing appends what of r is not acknowledged.
func (s *subscription) Missing(dst []cursor.Range, r cursor.Range) []cursor.Range {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.Missing(dst, r)
}

// change applies a change to the cursor and has it written. done, if not nil, is called once with nil when everything
// applied so far is durable, or with the error that prevents it; never before change has returned its own error.
func (s *subscription) change(f func(*cursor.Cursor) (cursor.Ticket, error), done func(error)) error {
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
	s.startFlush()
	s.mu.Unlock()
	if durable && done != nil {
		done(nil)
	}
	return nil
}

// wait applies a change and waits until it is durable.
func (s *subscription) wait(ctx context.Context, f func(*cursor.Cursor) (cursor.Ticket, error)) error {
	done := make(chan error, 1)
	if err := s.change(f, func(err error) { done <- err }); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return unavailable("write state of subscription", s.name, ctx.Err())
	}
}

// refusal says why the cursor takes no changes. The lock is held.
func (s *subscription) refusal() error {
	switch {
	case s.deleted:
		return refuse(brokerv1.Code_CODE_NOT_FOUND, "subscription %s of %s was deleted", s.name, s.t.name)
	case s.failed != nil:
		return fmt.Errorf("subscription %s of %s: %w", s.name, s.t.name, s.failed)
	case s.ended:
		return fmt.Errorf("subscription %s of %s: %w", s.name, s.t.name, topic.ErrClosed)
	}
	return nil
}

// end refuses changes from now on. What was taken in before goes on being written.
func (s *subscription) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}

// occupy waits until no flush is under way, and keeps others from beginning: whoever occupies the log writes alone, and
// calls leave afterwards. It fails when no changes are taken any more.
func (s *subscription) occupy(ctx context.Context) error {
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
func (s *subscription) leave() {
	s.flushing = false
	close(s.idle)
	s.idle = nil
}

// startFlush has pending changes written, unless that is under way. The lock is held.
func (s *subscription) startFlush() {
	if s.flushing || !s.cur.Pending() {
		return
	}
	s.flushing = true
	s.idle = make(chan struct{})
	if !s.t.u.b.spawn(s.flush) {
		s.leave()
	}
}

// flush writes group after group until nothing is pending.
func (s *subscription) flush() {
	for {
		s.mu.Lock()
		batch, ok := s.cur.Take()
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

// write appends records to the bundle's state log, in order, and waits until they are durable. What is definitely not
// written (too few bookies) is tried again as long as the bundle is served here.
func (s *subscription) write(records []cursor.Record, split func(int) [][]cursor.Record) error {
	if len(records) == 0 {
		return nil
	}
	u := s.t.u
	log, err := u.stateLog(u.life)
	if err != nil {
		return err
	}
	for _, group := range split(statelog.MaxEntry - recordRoom) {
		pause := openPauseMin
		for {
			err := appendState(u.life, log, s.t.stateRecords(group))
			if err == nil {
				break
			}
			var failed *ledger.AppendError
			if !errors.As(err, &failed) || failed.Outcome != ledger.NotWritten || !sleep(u.life, pause) {
				return fmt.Errorf("write state of subscription %s: %w", s.name, err)
			}
			pause = min(2*pause, openPauseMax)
		}
	}
	return nil
}

func (t *servedTopic) stateRecords(records []cursor.Record) []statelog.Record {
	out := make([]statelog.Record, len(records))
	for i, r := range records {
		out[i] = statelog.Record{Owner: t.stateOwner(), Kind: r.Kind, Key: r.Key, Value: r.Value, Delete: r.Delete}
	}
	return out
}

// settled waits until no flush is under way, as long as ctx lasts.
func (s *subscription) settled(ctx context.Context) {
	for {
		s.mu.Lock()
		idle := s.idle
		s.mu.Unlock()
		if idle == nil {
			return
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return
		}
	}
}

// trimFloor is what retention may go by: only what is durable.
func (s *subscription) trimFloor() entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.TrimFloor()
}

func (s *subscription) floor() entry.Offset {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.Floor()
}

// expire acknowledges everything below upTo unread.
func (s *subscription) expire(upTo entry.Offset) error {
	from := s.floor()
	if upTo <= from {
		return nil
	}
	var generation cursor.Generation
	err := s.change(func(c *cursor.Cursor) (cursor.Ticket, error) {
		generation = c.Generation()
		return c.AckCumulative(generation, s.t.log.Next(), upTo)
	}, nil)
	if err != nil {
		return err
	}
	s.attaching.Lock()
	runner := s.runner
	s.attaching.Unlock()
	if runner != nil {
		runner.Acked(generation, 0, cursor.Range{First: from, End: upTo})
	}
	return nil
}

// attach lets a consumer in, making the dispatch of its type if need be.
func (s *subscription) attach(c *consumer, kind brokerv1.SubscriptionType, who dispatch.Consumer) error {
	s.attaching.Lock()
	defer s.attaching.Unlock()
	if s.runner != nil && s.kind != kind {
		if len(s.consumers) > 0 {
			return refuse(brokerv1.Code_CODE_CONFLICT, "subscription %s of %s has %d consumers of type %s: use that type, or disconnect them",
				s.name, s.t.name, len(s.consumers), kindText(s.kind))
		}
		s.runner.Close() // before the cursor is asked what is to be delivered again: it may be told yet
		s.runner = nil
	}
	s.mu.Lock()
	err := s.refusal()
	generation, floor := s.cur.Generation(), s.cur.Floor()
	uuid := s.cur.Meta().UUID
	incarnation := binary.BigEndian.AppendUint32(uuid[:], uint32(generation))
	var retries []dispatch.Retry
	for r, retry := range s.cur.Retries().All() {
		retries = append(retries, dispatch.Retry{Range: r, Count: retry.Count, NotBefore: time.UnixMilli(retry.NotBefore), Reason: retry.Reason})
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if s.runner == nil {
		s.kind = kind
		s.runner = dispatch.New(s.t.core(kind), dispatch.Env{
			Source: &source{t: s.t}, Acks: s, OnRetries: s.remember, Budget: s.t.u.b.reads, Metrics: s.t.u.b.dispatch, Log: s.t.u.b.log,
		})
		s.runner.Loaded(generation, floor, s.t.log.Next(), retries)
	}
	if c.id, err = s.runner.AddConsumer(who, c); err != nil {
		return err //nolint:wrapcheck // it says who is in the way
	}
	c.runner, c.generation, c.incarnation = s.runner, generation, incarnation
	s.consumers[c] = struct{}{}
	return nil
}

// detach lets a consumer go; what it did not acknowledge is delivered again.
func (s *subscription) detach(c *consumer) {
	s.attaching.Lock()
	defer s.attaching.Unlock()
	if _, ok := s.consumers[c]; !ok {
		return
	}
	delete(s.consumers, c)
	c.runner.RemoveConsumer(c.id)
}

// remember keeps in the cursor what is to be delivered again, so that counts and delays survive a failover.
func (s *subscription) remember(generation cursor.Generation, retries []dispatch.Retry) {
	end := s.t.log.Next()
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

// seek moves the subscription, and waits until that is durable. Its consumers are told to come again at once: what they
// hold was delivered before the move, and delivery follows the cursor, whether anybody waits for the log or not.
func (s *subscription) seek(ctx context.Context, to entry.Offset) error {
	done := make(chan error, 1)
	var generation cursor.Generation
	err := s.change(func(c *cursor.Cursor) (cursor.Ticket, error) {
		ticket := c.Seek(to)
		generation = c.Generation()
		return ticket, nil
	}, func(err error) { done <- err })
	if err != nil {
		return err
	}
	s.attaching.Lock()
	if s.runner != nil {
		s.runner.Seek(generation, to)
	}
	for c := range s.consumers {
		c.stop(refuse(brokerv1.Code_CODE_SUBSCRIPTION_MOVED, "subscription %s of %s was moved to offset %d", s.name, s.t.name, to))
	}
	s.attaching.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return unavailable("move subscription", s.name, ctx.Err())
	}
}

// disconnect ends every consumer's stream and the dispatch.
func (s *subscription) disconnect(why error) {
	s.attaching.Lock()
	defer s.attaching.Unlock()
	for c := range s.consumers {
		c.stop(why)
	}
	if s.runner != nil {
		s.runner.Close()
	}
}

// why tells what the subscription waits for.
func (s *subscription) why() (dispatch.Status, brokerv1.SubscriptionType) {
	s.attaching.Lock()
	runner, kind, connected := s.runner, s.kind, len(s.consumers)
	s.attaching.Unlock()
	if runner == nil {
		return dispatch.Status{
			Reason: dispatch.ReasonNoConsumers, Detail: "no consumer is connected", Next: s.NextUnacked(s.floor()), End: s.t.log.Next(),
		}, brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_UNSPECIFIED
	}
	if connected == 0 {
		kind = brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_UNSPECIFIED
	}
	return runner.Why(), kind
}

func kindText(k brokerv1.SubscriptionType) string {
	switch k {
	case brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_FAILOVER:
		return "failover"
	case brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_SHARED:
		return "shared"
	case brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_UNSPECIFIED, brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_EXCLUSIVE:
	}
	return "exclusive"
}

// core makes the dispatch of a type, with the namespace's limits.
func (t *servedTopic) core(kind brokerv1.SubscriptionType) dispatch.Core {
	shared := kind == brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_SHARED
	cfg := dispatch.DefaultConfig(shared)
	limit := func(to *uint64, set *int) {
		if set != nil {
			*to = uint64(*set)
		}
	}
	policies := t.u.b.policies(t.name.NamespaceName())
	limit(&cfg.MaxUnackedPerConsumer, policies.MaxUnackedPerConsumer)
	limit(&cfg.MaxUnackedPerSubscription, policies.MaxUnackedPerSubscription)
	switch {
	case shared:
		return dispatch.NewShared(cfg)
	case kind == brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_FAILOVER:
		return dispatch.NewFailover(cfg)
	}
	return dispatch.NewExclusive(cfg)
}

func newCursor(name string, at entry.Offset) (*cursor.Cursor, error) {
	return cursor.New(cursor.Meta{UUID: meta.NewUUID(), Name: name, Initial: at, Created: time.Now().UnixMilli()})
}
