package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// conflictPatience is how long a consumer that was connected before waits for the broker to notice that the
// place it wants back is its own.
const conflictPatience = 30 * time.Second

// subStream runs the inbox of one partition: one goroutine that connects and sends permits, acknowledgements and
// nacks, and, while connected, one that receives. Its state is guarded by the consumer's lock.
type subStream struct {
	c         *Consumer
	topic     string
	partition int

	life   context.Context // ends when the consumer closes
	cancel context.CancelFunc
	done   chan struct{} // closed when run has returned
	ready  chan struct{} // closed at the first success, or when run ends
	wake   chan struct{} // capacity 1: there is something to send
	drain  chan struct{} // capacity 1: room to read, or an acknowledgement waits

	// Guarded by c.mu.
	in       inbox
	nacks    []nackItem
	name     string
	start    Position
	last     error         // why the latest attempt to open failed
	paused   chan struct{} // not nil while a seek is under way; closed at its end
	breakOff context.CancelFunc
	serving  bool // a stream is open, and ends in good order when the consumer leaves
	// incarnation is the subscription's, on the latest stream: another one on the next says that it was moved between.
	incarnation []byte
	retry       backoff  // of acknowledgements that failed for now
	left        ackGroup // what was acknowledged and never confirmed when the consumer ended

	tried owner // by the latest attempt to open, if that found one; run's
}

type nackItem struct {
	offset entry.Offset
	delay  time.Duration
}

func newSubStream(c *Consumer, n topicname.Name) *subStream {
	s := &subStream{
		c: c, topic: n.String(), partition: n.Partition,
		done: make(chan struct{}), ready: make(chan struct{}), wake: make(chan struct{}, 1), drain: make(chan struct{}, 1),
		name: c.cfg.name, start: c.cfg.start, retry: newBackoff(),
	}
	if n.Partition == topicname.NoPartition {
		s.partition = NoPartition
	}
	s.life, s.cancel = context.WithCancel(c.c.life)
	s.in.reader = c.cfg.reader
	s.in.flow = flow{maxMessages: c.cfg.prefetch(), maxBytes: c.cfg.prefetchBytes}
	s.in.acks = acker{max: c.cfg.ackMax, delay: c.cfg.ackDelay}
	return s
}

func nudge(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// run connects, serves and reconnects until the consumer is closed or cannot go on.
func (s *subStream) run() {
	defer close(s.done)
	defer s.markReady()
	pace := newPace(s.c.c, s.topic)
	var hint owner
	var conflict time.Time
	avoid := ""
	for s.life.Err() == nil {
		if !s.waitUnpaused() {
			break
		}
		began := time.Now()
		st, err := s.open(hint, avoid)
		if err == nil {
			s.markReady()
			conflict = time.Time{}
			err = s.serve(st)
			st.close()
			if st.useful {
				pace.fresh()
			}
		}
		if s.life.Err() != nil {
			break
		}
		e := asError(err)
		s.lost(st != nil, e)
		if s.c.isLeaving() {
			break
		}
		if e.Code == CodeConflict && s.wasReady() {
			if conflict.IsZero() {
				conflict = time.Now()
			}
			e.Retryable = time.Since(conflict) < conflictPatience
		}
		if !e.Retryable {
			s.c.fail(e)
			break
		}
		s.c.c.cfg.log.DebugContext(s.life, "consumer reconnects", "topic", s.topic, "subscription", s.c.cfg.subscription, "error", e)
		hint, avoid = pace.next(s.life, e, st != nil && time.Since(began) > time.Second, s.tried), e.Broker
	}
	s.forget()
}

// lost takes back what the broken stream had.
func (s *subStream) lost(opened bool, e *Error) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.last = e
	if opened {
		s.in.broken(time.Now())
		s.nacks = nil // the broker gives everything unacknowledged back by itself
	}
}

// forget ends the acknowledgements that nobody will answer.
func (s *subStream) forget() {
	s.c.mu.Lock()
	all := s.in.acks.outstanding()
	s.left.note(&all)
	waiters := s.in.acks.reset()
	var err error = closedError("acknowledge", s.topic)
	if s.c.err != nil {
		err = s.c.err
	}
	s.c.mu.Unlock()
	s.tell(waiters, err)
}

func (s *subStream) tell(waiters []chan error, err error) {
	for _, w := range waiters {
		w <- err
	}
}

func (s *subStream) markReady() {
	select {
	case <-s.ready:
	default:
		close(s.ready)
	}
}

func (s *subStream) wasReady() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

func (s *subStream) waitUnpaused() bool {
	s.c.mu.Lock()
	paused := s.paused
	s.c.mu.Unlock()
	if paused == nil {
		return true
	}
	select {
	case <-paused:
		return true
	case <-s.life.Done():
		return false
	}
}

// openSub is an accepted consume stream.
type openSub struct {
	stream brokerv1.PubSub_ConsumeClient
	conn   *conn
	use    *use
	cancel context.CancelFunc
	ctx    context.Context // the stream's own
	owner  owner
	gen    uint64 // of the inbox
	useful bool   // something came of it; the receiver's, until it has ended
}

func (st *openSub) close() {
	_ = st.stream.CloseSend()
	st.cancel()
	st.conn.release(st.use)
}

// open finds the owner, unless hint names it, and subscribes there.
func (s *subStream) open(hint owner, avoid string) (*openSub, error) {
	o, former := hint, s.tried
	s.tried = owner{}
	if o.url == "" {
		var err error
		if o, err = s.c.c.findAgain(s.life, s.topic, avoid, former); err != nil {
			return nil, err
		}
	}
	s.tried = o
	conn, err := s.c.c.pool.get(o.url)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(s.life)
	st := &openSub{conn: conn, use: conn.hold(s.topic, cancel), cancel: cancel, ctx: ctx, owner: o}
	newer := owner{}
	leave, err := conn.gate.pass(ctx, nil, nil)
	if err == nil {
		newer, err = awaitOpen(ctx, cancel, s.c.c, s.topic, o, func() error { return s.handshake(ctx, st) })
		leave()
	}
	if err != nil {
		cancel()
		conn.release(st.use)
		if newer.url != "" {
			return nil, fromMoved("subscribe", s.topic, o.url, newer.wire())
		}
		return nil, fromStatus("subscribe", s.topic, o.url, err)
	}
	s.tried = st.owner
	return st, nil
}

func (s *subStream) request() *brokerv1.Subscribe {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	start := s.start
	if s.in.reader && s.in.started {
		start = AtOffset(s.in.next)
	}
	cfg := &s.c.cfg
	return &brokerv1.Subscribe{
		Topic: s.topic, Subscription: cfg.subscription, Type: brokerv1.SubscriptionType(cfg.kind), ConsumerName: s.name,
		Start: start.Start(), Reader: cfg.reader, Priority: cfg.priority, ClientInfo: s.c.c.cfg.info,
	}
}

func (s *subStream) handshake(ctx context.Context, st *openSub) error {
	stream, err := st.conn.pubsub.Consume(ctx)
	if err != nil {
		return err
	}
	st.stream = stream
	err = stream.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Subscribe{Subscribe: s.request()}})
	if err != nil {
		return sendError(stream, new(brokerv1.ConsumeResponse), err)
	}
	resp, err := stream.Recv()
	if err != nil {
		return err
	}
	st.conn.hear()
	switch k := resp.GetKind().(type) {
	case *brokerv1.ConsumeResponse_Subscribed:
		o := owner{url: st.owner.url, bundle: k.Subscribed.GetBundle(), epoch: k.Subscribed.GetEpoch()}
		if !s.c.c.dir.learn(o) {
			return fromMoved("subscribe", s.topic, o.url, nil)
		}
		st.owner = o
		return s.subscribed(st, k.Subscribed)
	case *brokerv1.ConsumeResponse_Moved:
		return fromMoved("subscribe", s.topic, st.owner.url, k.Moved)
	case *brokerv1.ConsumeResponse_Error:
		return fromWire("subscribe", s.topic, st.owner.url, k.Error)
	}
	return invalidError("subscribe", s.topic, "the broker answered with %T", resp.GetKind())
}

// subscribed starts a stream that the broker has accepted.
func (s *subStream) subscribed(st *openSub, ok *brokerv1.Subscribed) error {
	s.c.mu.Lock()
	if s.paused != nil {
		s.c.mu.Unlock()
		return fromMoved("subscribe", s.topic, st.owner.url, nil) // a seek is under way: what this stream brings is of before
	}
	var waiters []chan error
	if s.incarnation != nil && !bytes.Equal(s.incarnation, ok.GetIncarnation()) {
		waiters = s.in.moved() // by somebody's seek, while there was no stream to tell
	}
	s.incarnation = ok.GetIncarnation()
	s.breakOff = st.cancel
	s.name = ok.GetConsumerName()
	s.in.connected(entry.Offset(ok.GetStartOffset()))
	st.gen = s.in.streamGen
	s.c.mu.Unlock()
	s.tell(waiters, s.movedError())
	return nil
}

// movedError refuses acknowledgements of what was delivered before a seek.
func (s *subStream) movedError() *Error {
	return &Error{Code: CodeSubscriptionMoved, Op: "acknowledge", Topic: s.topic, Err: errors.New("the subscription was moved since the message was delivered")}
}

// serve sends what the inbox wants sent until the stream ends, and returns why.
func (s *subStream) serve(st *openSub) error {
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer st.cancel()
	wg.Go(func() { // ends with the stream
		ended <- s.receive(st)
		st.cancel()
	})
	watch := newSuspicion(st.ctx, s.c.c, &wg, s.topic, st.owner)
	timer := time.NewTimer(0)
	defer timer.Stop()
	s.c.mu.Lock()
	s.serving = true
	s.c.mu.Unlock()
	defer func() {
		s.c.mu.Lock()
		s.serving = false
		s.c.mu.Unlock()
	}()
	var asked time.Time // when the oldest acknowledgement in flight was sent, about
	for {
		out, wake, waiting := s.collect(time.Now())
		for _, req := range out {
			if err := st.stream.Send(req); err != nil {
				return <-ended
			}
		}
		if s.c.isLeaving() { // the broker ends the stream when it has let the consumer go
			_ = st.stream.CloseSend()
			return <-ended
		}
		switch {
		case !waiting:
			asked = time.Time{}
		case asked.IsZero() || st.conn.heardSince(asked):
			asked = sched.Real.Now()
		}
		if at := watch.since(asked, time.Now()); !at.IsZero() && (wake.IsZero() || at.Before(wake)) {
			wake = at
		}
		timer.Stop()
		if !wake.IsZero() {
			timer.Reset(max(0, time.Until(wake)))
		}
		select {
		case <-s.wake:
		case <-timer.C:
		case err := <-ended:
			return err
		case n := <-watch.newer:
			return fromMoved("consume", s.topic, st.owner.url, n.wire())
		}
	}
}

// collect returns the requests to send now, acknowledgements first: the broker should know them before it
// delivers. wake is when to ask again, waiting whether an answer to an acknowledgement is due.
func (s *subStream) collect(now time.Time) (out []*brokerv1.ConsumeRequest, wake time.Time, waiting bool) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	group, wake := s.in.acks.step(now)
	if group != nil {
		ack := &brokerv1.Ack{RequestId: group.id, Ranges: group.ranges.wire()}
		if group.cumulative != nil {
			upTo := uint64(*group.cumulative)
			ack.Cumulative = &upTo
		}
		out = append(out, &brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Ack{Ack: ack}})
	}
	var byDelay map[time.Duration]*rangeSet
	if len(s.nacks) > 0 {
		byDelay = make(map[time.Duration]*rangeSet)
	}
	for _, n := range s.nacks {
		if byDelay[n.delay] == nil {
			byDelay[n.delay] = new(rangeSet)
		}
		byDelay[n.delay].add(n.offset)
	}
	s.nacks = nil
	for delay, ranges := range byDelay {
		out = append(out, &brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Nack{Nack: &brokerv1.Nack{
			Ranges: ranges.wire(), DelayMs: uint64(max(0, delay.Milliseconds())),
		}}})
	}
	if n := s.in.flow.grant(); n > 0 {
		out = append(out, &brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Permits{Permits: &brokerv1.Permits{Messages: uint32(n)}}})
	}
	return out, wake, len(s.in.acks.inFlight) > 0
}

// receive takes what the broker sends until the stream ends, and returns why.
func (s *subStream) receive(st *openSub) error {
	for {
		resp, err := st.stream.Recv()
		if err != nil {
			return fromStatus("consume", s.topic, st.owner.url, err)
		}
		st.conn.hear()
		switch k := resp.GetKind().(type) {
		case *brokerv1.ConsumeResponse_Deliver:
			st.useful = true
			for _, e := range k.Deliver.GetEntries() {
				s.deliver(st, e)
			}
			nudge(s.wake)
			if !s.waitRoom(st.ctx) {
				return fromStatus("consume", s.topic, st.owner.url, causeOf(st.ctx))
			}
		case *brokerv1.ConsumeResponse_AckDone:
			s.answered(st, k.AckDone)
		case *brokerv1.ConsumeResponse_ActiveChanged:
			s.c.c.cfg.log.DebugContext(s.life, "failover consumer changed", "topic", s.topic, "active", k.ActiveChanged.GetActive())
		case *brokerv1.ConsumeResponse_Moved:
			return fromMoved("consume", s.topic, st.owner.url, k.Moved)
		case *brokerv1.ConsumeResponse_Error:
			e := fromWire("consume", s.topic, st.owner.url, k.Error)
			if e.Code == CodeSubscriptionMoved { // by somebody's seek
				s.c.reset(s)
				e.Retryable = true
			}
			return e
		default:
			s.c.c.cfg.log.WarnContext(s.life, "broker sent what this client does not know", "topic", s.topic, "broker", st.owner.url)
		}
	}
}

// deliver unpacks an entry and buffers what of it goes to the application.
func (s *subStream) deliver(st *openSub, e *brokerv1.DeliveredEntry) {
	messages, err := unpack(e, s.topic, s.partition)
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.in.streamGen != st.gen || s.c.leaving {
		return // of before a seek, or for nobody
	}
	kept := messages[:0]
	for _, d := range messages {
		if s.in.wanted(d.ID.Offset) {
			d.from = s
			kept = append(kept, d)
		}
	}
	s.in.delivered(charge(e), kept)
	for _, d := range kept {
		s.c.buffer = append(s.c.buffer, item{delivery: d})
	}
	if err != nil {
		s.c.buffer = append(s.c.buffer, item{err: &Error{
			Code: CodeInvalid, Op: "consume", Topic: s.topic,
			Err: fmt.Errorf("entry %d:%d at offset %d cannot be read and stays unacknowledged: %w",
				e.GetPosition().GetLedger(), e.GetPosition().GetEntry(), e.GetOffset(), err),
		}})
	}
	if len(kept) > 0 || err != nil {
		nudge(s.c.filled)
	}
}

// waitRoom holds the stream back while more bytes are buffered than allowed, unless the application waits for
// the answer to an acknowledgement: that comes down the same stream.
func (s *subStream) waitRoom(ctx context.Context) bool {
	for {
		s.c.mu.Lock()
		wait := s.in.flow.full() && !s.in.acks.waiting() && !s.c.leaving
		s.c.mu.Unlock()
		if !wait {
			return true
		}
		select {
		case <-s.drain:
		case <-ctx.Done():
			return false
		}
	}
}

func (s *subStream) answered(st *openSub, done *brokerv1.AckDone) {
	var e *Error
	if done.GetError() != nil {
		e = fromWire("acknowledge", s.topic, st.owner.url, done.GetError())
	}
	s.c.mu.Lock()
	at := time.Now()
	if e == nil {
		s.retry.reset()
	} else {
		at = at.Add(s.retry.next())
	}
	waiters := s.in.acks.answered(done.GetRequestId(), e, at)
	s.c.mu.Unlock()
	for _, w := range waiters {
		if e != nil {
			w <- e
		} else {
			w <- nil
		}
	}
	if e != nil && !e.Retryable && len(waiters) == 0 {
		s.c.c.cfg.log.WarnContext(s.life, "acknowledgement refused", "topic", s.topic, "error", e)
	}
	nudge(s.wake)
}

// ack puts an acknowledgement on its way; waiter, if not nil, is told of the outcome.
func (s *subStream) ack(d *Delivery, waiter chan error, cumulative bool) {
	s.c.mu.Lock()
	var err error
	changes := s.in.acks.changes(waiter)
	var now time.Time
	if changes {
		now = time.Now()
	}
	switch {
	case s.in.reader:
		err = &Error{Code: CodeInvalid, Op: "acknowledge", Topic: s.topic, Err: errReader}
	case s.c.err != nil:
		err = s.c.err
		if waiter == nil && d.epoch == s.in.epoch { // Close says it
			s.left.ranges.add(d.ID.Offset)
		}
	case s.life.Err() != nil:
		err = closedError("acknowledge", s.topic)
	case d.epoch != s.in.epoch:
		err = s.movedError()
	case cumulative && s.c.cfg.kind == Shared:
		err = invalidError("acknowledge", s.topic, "a Shared subscription has no order to acknowledge cumulatively in")
	case cumulative:
		s.in.held.removeUpTo(d.ID.Offset)
		s.in.acks.addCumulative(d.ID.Offset, waiter, now)
	default:
		s.in.held.remove(d.ID.Offset)
		s.in.acks.add(d.ID.Offset, waiter, now)
	}
	s.c.mu.Unlock()
	if err != nil {
		if waiter != nil {
			waiter <- err
		}
		return
	}
	if changes {
		nudge(s.wake)
	}
	if waiter != nil {
		nudge(s.drain)
	}
}

func (s *subStream) ackAndWait(ctx context.Context, d *Delivery, cumulative bool) error {
	waiter := make(chan error, 1)
	s.ack(d, waiter, cumulative)
	select {
	case err := <-waiter:
		return err
	case <-ctx.Done():
		return s.unconfirmed(causeOf(ctx))
	}
}

// unconfirmed says which acknowledgements are not confirmed when the wait for one ends, and why, as far as a broker or the
// way to one told.
func (s *subStream) unconfirmed(cause error) *Error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if offsets := s.in.acks.unanswered(); offsets != "" {
		cause = fmt.Errorf("not confirmed: offsets %s: %w", offsets, cause)
	}
	last := s.in.acks.refusal
	if last == nil && !s.serving {
		last = s.last
	}
	if last != nil {
		cause = fmt.Errorf("%w; last attempt: %w", cause, last)
	}
	return unknownOutcome("acknowledge", s.topic, cause)
}

func (s *subStream) nack(d *Delivery, delay time.Duration) {
	s.c.mu.Lock()
	if s.in.nacked(d) {
		s.nacks = append(s.nacks, nackItem{d.ID.Offset, delay})
	}
	s.c.mu.Unlock()
	nudge(s.wake)
}
