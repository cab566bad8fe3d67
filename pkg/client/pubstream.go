package client

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	framev1 "github.com/penstock-mq/penstock/api/penstock/frame/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// reopenAfter is the number of failed batches in a row after which the producer is opened anew.
const reopenAfter = 64

// pubStream runs the window of one partition: one goroutine that connects and sends, and, while connected, one
// that receives.
type pubStream struct {
	p         *Producer
	c         *Client
	topic     string
	partition int

	life   context.Context // ends when the producer closes
	cancel context.CancelFunc
	done   chan struct{} // closed when run has returned
	ready  chan struct{} // closed at the first success, or when run ends
	wake   chan struct{} // capacity 1: the window has something to do

	mu    sync.Mutex
	w     window
	err   error // why the producer ended; nothing is added any more
	last  error // why the latest attempt to open failed
	name  string
	epoch uint64
	// incarnation tells the broker, until it has given an epoch, that a request comes from whom an earlier one did.
	incarnation uint64
	maxMessage  int
	retry       backoff // of batches that failed for now
	failures    int     // of batches, since the last receipt or open
	answers     int64   // receipts and refusals
	serving     bool    // a stream is open, and ends in good order when the producer leaves
	leaving     bool

	payload []byte // scratch of the sending goroutine
	tried   owner  // by the latest attempt to open, if that found one; run's
}

func newPubStream(p *Producer, n topicname.Name) *pubStream {
	s := &pubStream{
		p: p, c: p.c, topic: n.String(), partition: n.Partition,
		done: make(chan struct{}), ready: make(chan struct{}), wake: make(chan struct{}, 1),
		name: p.cfg.name, maxMessage: frame.DefaultMaxMessage, retry: newBackoff(), incarnation: rand.Uint64(), //nolint:gosec // it keeps no secret
	}
	if n.Partition == topicname.NoPartition {
		s.partition = NoPartition
	}
	s.life, s.cancel = context.WithCancel(p.c.life)
	s.w = newWindow(s.topic, p.cfg.batching, p.cfg.dedup)
	s.w.allCopies = p.cfg.ack == AckAll
	return s
}

func (s *pubStream) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// apply runs one event under the lock, and its effects after it.
func (s *pubStream) apply(event func(w *window)) {
	s.mu.Lock()
	event(&s.w)
	e := s.w.take()
	s.mu.Unlock()
	s.carryOut(e)
}

func (s *pubStream) carryOut(e effects) {
	for _, stop := range e.stops {
		stop()
	}
	s.p.release(e.messages, e.bytes)
	for i := range e.outcomes {
		e.outcomes[i].deliver()
	}
	for _, f := range e.flushed {
		close(f.done)
	}
}

// add hands a message over. An error means that it was not taken.
func (s *pubStream) add(r *Receipt) error {
	s.mu.Lock()
	if s.err != nil {
		defer s.mu.Unlock()
		return s.err
	}
	if len(r.msg.Value) > s.maxMessage {
		defer s.mu.Unlock()
		return invalidError("publish", s.topic, "message of %d bytes, the limit is %d: split it, or raise --max-message-kib of all brokers", len(r.msg.Value), s.maxMessage)
	}
	b := s.w.add(r, time.Now())
	if done := r.ctx.Done(); done != nil && b.watch != done {
		ctx := r.ctx
		b.watch = done
		b.stops = append(b.stops, context.AfterFunc(ctx, func() {
			s.apply(func(w *window) { w.expire(done, causeOf(ctx)) })
			s.nudge()
		}))
	}
	// Between the first message of a batch and the one that fills it there is nothing to do.
	busy := len(b.receipts) == 1 || s.w.open == nil
	s.mu.Unlock()
	if busy {
		s.nudge()
	}
	return nil
}

func (s *pubStream) flush() *flushWait {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.nudge()
	return s.w.flush()
}

func (s *pubStream) waitReady(ctx context.Context) error {
	select {
	case <-s.ready:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.err
	case <-ctx.Done():
		return gaveUp("open producer", s.topic, causeOf(ctx), s.lastError())
	}
}

// lastError says why the latest attempt to open failed.
func (s *pubStream) lastError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// run connects, serves and reconnects until the producer is closed or cannot go on.
func (s *pubStream) run() {
	defer close(s.done)
	pace := newPace(s.c, s.topic)
	var hint owner
	avoid := ""
	for s.life.Err() == nil {
		began := time.Now()
		st, err := s.open(hint, avoid)
		if err == nil {
			s.markReady()
			err = s.serve(st)
			st.close()
			if st.useful {
				pace.fresh()
			}
			s.apply((*window).broken)
		}
		if s.life.Err() != nil || s.isLeaving() {
			break
		}
		e := asError(err)
		if !e.Retryable {
			s.end(e)
			return
		}
		s.mu.Lock()
		s.last = e
		s.mu.Unlock()
		s.c.cfg.log.DebugContext(s.life, "producer reconnects", "topic", s.topic, "error", e)
		hint, avoid = pace.next(s.life, e, st != nil && time.Since(began) > time.Second, s.tried), e.Broker
	}
	s.end(closedError("publish", s.topic))
}

// leave ends the stream in good order, once nothing is in flight on it.
func (s *pubStream) leave() {
	s.mu.Lock()
	s.leaving = true
	if !s.serving {
		s.cancel()
	}
	s.mu.Unlock()
	s.nudge()
}

func (s *pubStream) isLeaving() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaving
}

// answered counts what the brokers answered.
func (s *pubStream) answered() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answers
}

// unsettled counts the messages without an outcome that were sent, and those that were not.
func (s *pubStream) unsettled() (sent, unsent int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.unsettled()
}

func (s *pubStream) markReady() {
	select {
	case <-s.ready:
	default:
		close(s.ready)
	}
}

// end settles everything with err, and refuses what comes.
func (s *pubStream) end(err *Error) {
	s.mu.Lock()
	s.err = err
	s.mu.Unlock()
	s.apply(func(w *window) { w.abort(err) })
	s.markReady()
}

// openStream is an accepted publish stream.
type openStream struct {
	stream brokerv1.PubSub_PublishClient
	conn   *conn
	use    *use
	cancel context.CancelFunc
	ctx    context.Context // the stream's own
	owner  owner
	useful bool // something came of it; the receiver's, until it has ended
}

func (st *openStream) close() {
	_ = st.stream.CloseSend()
	st.cancel()
	st.conn.release(st.use)
}

// open finds the owner, unless hint names it, and opens a stream there.
func (s *pubStream) open(hint owner, avoid string) (*openStream, error) {
	o, former := hint, s.tried
	s.tried = owner{}
	if o.url == "" {
		var err error
		if o, err = s.c.findAgain(s.life, s.topic, avoid, former); err != nil {
			return nil, err
		}
	}
	s.tried = o
	conn, err := s.c.pool.get(o.url)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(s.life)
	st := &openStream{conn: conn, use: conn.hold(s.topic, cancel), cancel: cancel, ctx: ctx, owner: o}
	newer := owner{}
	leave, err := conn.gate.pass(ctx, s.waits, s.wake)
	if err == nil {
		newer, err = awaitOpen(ctx, cancel, s.c, s.topic, o, func() error { return s.handshake(ctx, st) })
		leave()
	}
	if err != nil {
		cancel()
		conn.release(st.use)
		if newer.url != "" {
			return nil, fromMoved("open producer", s.topic, o.url, newer.wire())
		}
		return nil, fromStatus("open producer", s.topic, o.url, err)
	}
	s.tried = st.owner
	return st, nil
}

// waits tells since when the oldest message waits; zero if there is none.
func (s *pubStream) waits() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.waits()
}

func (s *pubStream) handshake(ctx context.Context, st *openStream) error {
	stream, err := st.conn.pubsub.Publish(ctx)
	if err != nil {
		return err
	}
	st.stream = stream
	s.mu.Lock()
	req := &brokerv1.OpenProducer{
		Topic: s.topic, ProducerName: s.name, AckLevel: brokerv1.AckLevel(s.p.cfg.ack), Dedup: s.p.cfg.dedup,
		ProducerEpoch: s.epoch, Incarnation: s.incarnation, ClientInfo: s.c.cfg.info,
	}
	s.mu.Unlock()
	if err := stream.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Open{Open: req}}); err != nil {
		return sendError(stream, new(brokerv1.PublishResponse), err)
	}
	resp, err := stream.Recv()
	if err != nil {
		return err
	}
	st.conn.hear()
	switch k := resp.GetKind().(type) {
	case *brokerv1.PublishResponse_Ready:
		o := owner{url: st.owner.url, bundle: k.Ready.GetBundle(), epoch: k.Ready.GetEpoch()}
		if !s.c.dir.learn(o) {
			return fromMoved("open producer", s.topic, o.url, nil)
		}
		st.owner = o
		s.apply(func(w *window) {
			s.name, s.epoch = k.Ready.GetProducerName(), k.Ready.GetProducerEpoch()
			if n := k.Ready.GetMaxMessageSize(); n > 0 {
				s.maxMessage = int(n)
			}
			s.failures = 0
			w.opened(k.Ready.GetLastSequence())
		})
		return nil
	case *brokerv1.PublishResponse_Moved:
		return fromMoved("open producer", s.topic, st.owner.url, k.Moved)
	case *brokerv1.PublishResponse_Error:
		return fromWire("open producer", s.topic, st.owner.url, k.Error)
	}
	return invalidError("open producer", s.topic, "the broker answered with %T", resp.GetKind())
}

// serve sends batches and takes answers until the stream ends, and returns why.
func (s *pubStream) serve(st *openStream) error {
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer st.cancel()
	wg.Go(func() { // ends with the stream
		ended <- s.receive(st)
		st.cancel() // a send that waits for flow control must not outlive the stream
	})
	watch := newSuspicion(st.ctx, s.c, &wg, s.topic, st.owner)
	patience := newUnblocker(watch, st.cancel)
	defer patience.done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	s.mu.Lock()
	s.serving = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.serving = false
		s.mu.Unlock()
	}()
	for {
		s.mu.Lock()
		now := time.Now()
		b, wake := s.w.step(now)
		oldest := s.w.oldest()
		leaving := s.leaving
		e := s.w.take()
		s.mu.Unlock()
		s.carryOut(e)
		if b != nil {
			patience.begin()
			err := s.send(st, b)
			patience.done()
			watch.since(oldest, now) // a broker that takes everything owes its answers all the same
			select {
			case n := <-watch.newer:
				return fromMoved("publish", s.topic, st.owner.url, n.wire())
			default:
			}
			if err != nil {
				return <-ended
			}
			continue
		}
		if leaving { // the broker ends the stream when it has let the producer go
			_ = st.stream.CloseSend()
			return <-ended
		}
		if at := watch.since(oldest, time.Now()); !at.IsZero() && (wake.IsZero() || at.Before(wake)) {
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
			return fromMoved("publish", s.topic, st.owner.url, n.wire())
		}
	}
}

func (s *pubStream) send(st *openStream, b *batch) error {
	if b.frame == nil {
		if e := s.encode(b); e != nil {
			s.apply(func(w *window) {
				w.encoded(b, []byte{}) // it can be found and settled now
				w.refused(b.first, e, time.Time{})
			})
			return nil //nolint:nilerr // its messages have the error as their outcome
		}
	}
	return st.stream.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Batch{Batch: &brokerv1.Batch{
		FirstSequence: b.first, LastSequence: b.last, Frame: b.frame,
	}}})
}

// encode builds the frame of a batch that has its sequence ids.
func (s *pubStream) encode(b *batch) *Error {
	msgs := b.receipts // nothing settles them before the batch has its frame
	h := frame.Header{Producer: s.name, Sequence: b.first, PublishTime: time.Now().UnixMilli()}
	s.payload = s.payload[:0]
	payload := s.payload
	if len(msgs) == 1 {
		m := msgs[0].msg.onFrame(b.first)
		h.Single, payload = &m, msgs[0].msg.Value
	} else {
		h.Count = len(msgs)
		key := msgs[0].msg.Key
		oneKey := key != ""
		for i, r := range msgs {
			m := r.msg.onFrame(b.first + uint64(i))
			payload = frame.AppendMessage(payload, &m)
			oneKey = oneKey && r.msg.Key == key && r.msg.OrderingKey == ""
		}
		if oneKey {
			h.Key = []byte(key)
		}
		s.payload = payload
	}
	h.UncompressedSize = len(payload)
	packed, kind, err := compress(s.p.cfg.compression, payload)
	if err != nil {
		return &Error{Code: CodeInvalid, Op: "publish", Topic: s.topic, Err: err}
	}
	h.Compression = framev1.CompressionType(kind)
	meta := 64 + len(h.Producer)
	if h.Single != nil {
		meta += msgs[0].msg.overhead()
	}
	encoded := frame.Append(make([]byte, 0, len(packed)+meta), &h, packed)
	s.apply(func(w *window) { w.encoded(b, encoded) })
	if cap(s.payload) > 2*maxBatchBytes {
		s.payload = nil
	}
	return nil
}

// receive takes the broker's answers until the stream ends, and returns why.
func (s *pubStream) receive(st *openStream) error {
	for {
		resp, err := st.stream.Recv()
		if err != nil {
			return fromStatus("publish", s.topic, st.owner.url, err)
		}
		st.conn.hear()
		known := true
		switch k := resp.GetKind().(type) {
		case *brokerv1.PublishResponse_Receipt:
			st.useful = true
			at := k.Receipt.GetPosition()
			position := entry.Position{Ledger: entry.LedgerID(at.GetLedger()), Entry: entry.EntryID(at.GetEntry()), Batch: at.GetBatch()}
			s.apply(func(w *window) {
				s.retry.reset()
				s.failures = 0
				s.answers++
				known = w.receipt(k.Receipt.GetFirstSequence(), entry.Offset(k.Receipt.GetOffset()), position, k.Receipt.GetDuplicate())
			})
		case *brokerv1.PublishResponse_Failed:
			e := fromWire("publish", s.topic, st.owner.url, k.Failed.GetError())
			if e.Code == CodeNotOwner {
				return e
			}
			reopen := false
			s.apply(func(w *window) {
				known = w.refused(k.Failed.GetFirstSequence(), e, time.Now().Add(s.retry.next()))
				if e.Retryable {
					s.failures++
					reopen = s.failures >= reopenAfter
				}
			})
			if reopen {
				// The broker may wait for a batch that this side has given up.
				return e
			}
		case *brokerv1.PublishResponse_Moved:
			return fromMoved("publish", s.topic, st.owner.url, k.Moved)
		case *brokerv1.PublishResponse_Error:
			return fromWire("publish", s.topic, st.owner.url, k.Error)
		default:
			known = false
		}
		if !known {
			s.c.cfg.log.WarnContext(s.life, "broker answered what was not asked", "topic", s.topic, "broker", st.owner.url)
		}
		s.nudge()
	}
}
