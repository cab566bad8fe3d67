package broker

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// pubsub carries messages.
type pubsub struct {
	brokerv1.UnimplementedPubSubServer
	b *Broker
}

// Ping answers a peer's pings, until the peer goes or this broker has handed everything over. That it begins to is told
// unasked: whoever is to take the bundles must not wait for the next ping.
func (p *pubsub) Ping(stream brokerv1.PubSub_PingServer) error {
	answers := &pinged{self: p.b.cfg.Self.ID, stream: stream}
	defer answers.end()
	ended := make(chan error, 1)
	if !p.b.spawn(func() { ended <- answers.serve(p.b.draining.Load) }) {
		return nil
	}
	draining := p.b.drains
	for {
		select {
		case err := <-ended:
			return err
		case <-draining:
			draining = nil
			if err := answers.answer(0, true); err != nil {
				return err
			}
		case <-p.b.drained:
			return nil
		}
	}
}

// publisher is one producer's stream. Two goroutines serve it: the receiver takes batches in, and waits for memory
// when bookies are slow, which is the producer's back-pressure; the sender, which is the stream's handler, sends what
// becomes of them. Receipts wait in a list that is bounded by the batches in flight, and those by the memory budget.
type publisher struct {
	t        *servedTopic
	stream   brokerv1.PubSub_PublishServer
	name     string
	level    ledger.AckLevel
	producer *topic.Producer

	mu    sync.Mutex
	out   []*brokerv1.PublishResponse
	ended error // why the receiver ended; io.EOF when the client is done
	over  bool  // ended is set
	open  int   // batches taken in and not answered
	wake  chan struct{}
}

var levels = map[brokerv1.AckLevel]ledger.AckLevel{
	brokerv1.AckLevel_ACK_LEVEL_UNSPECIFIED: ledger.AckQuorum,
	brokerv1.AckLevel_ACK_LEVEL_NONE:        ledger.AckNone,
	brokerv1.AckLevel_ACK_LEVEL_ONE:         ledger.AckOne,
	brokerv1.AckLevel_ACK_LEVEL_QUORUM:      ledger.AckQuorum,
	brokerv1.AckLevel_ACK_LEVEL_ALL:         ledger.AckAll,
}

// levelNumbers tells the known levels to whoever wrote the protocol by hand.
var levelNumbers = func() string {
	var known []string
	for n := range int32(len(levels)) {
		name := strings.TrimPrefix(brokerv1.AckLevel(n).String(), "ACK_LEVEL_")
		if n == 0 {
			name = "the default, quorum"
		}
		known = append(known, fmt.Sprintf("%d (%s)", n, strings.ToLower(name)))
	}
	return strings.Join(known, ", ")
}()

// Publish serves one producer.
func (p *pubsub) Publish(stream brokerv1.PubSub_PublishServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err //nolint:wrapcheck // gRPC's own
	}
	s, err := p.openPublisher(stream, first.GetOpen())
	if err != nil {
		return sendPublishEnd(stream, err)
	}
	defer s.t.detach(s)
	defer s.producer.Close()
	if !p.b.spawn(s.receive) {
		return sendPublishEnd(stream, s.t.movedError())
	}
	return s.send()
}

func (p *pubsub) openPublisher(stream brokerv1.PubSub_PublishServer, open *brokerv1.OpenProducer) (*publisher, error) {
	if open == nil {
		return nil, invalid("the first request of a producer must be OpenProducer")
	}
	level, ok := levels[open.GetAckLevel()]
	if !ok {
		return nil, invalid("producer on %q: unknown ack level %d: want %s", open.GetTopic(), open.GetAckLevel(), levelNumbers)
	}
	name := open.GetProducerName()
	if name == "" {
		if open.GetDedup() {
			return nil, invalid("producer on %q: deduplication needs a producer name, which tells its sequence ids from others'", open.GetTopic())
		}
		name = randomName("producer")
	}
	if len(name) > frame.MaxProducerName {
		return nil, invalid("producer on %q: name of %d bytes, at most %d are allowed", open.GetTopic(), len(name), frame.MaxProducerName)
	}
	ctx, stop := p.b.whileEtcdAnswers(stream.Context())
	defer stop()
	t, err := p.b.topicFor(ctx, open.GetTopic(), true, true)
	if err != nil {
		return nil, orEtcdAway(ctx, err, "open topic", open.GetTopic())
	}
	s := &publisher{t: t, stream: stream, name: name, level: level, wake: make(chan struct{}, 1)}
	epoch := open.GetProducerEpoch()
	switch {
	case epoch>>63 != 0:
		return nil, fmt.Errorf("producer on %q: epoch %d was never given: %w", open.GetTopic(), epoch, topic.ErrProducerFenced)
	case epoch == 0:
		epoch = topic.NewIncarnation(open.GetIncarnation())
	}
	if s.producer, err = t.log.OpenProducer(ctx, name, epoch, open.GetDedup()); err != nil {
		if lost(t, err) {
			t.u.topicLost(t)
			return nil, t.movedError()
		}
		return nil, orEtcdAway(ctx, err, "open producer on topic", open.GetTopic())
	}
	if err := t.attach(s); err != nil {
		s.producer.Close()
		return nil, err
	}
	s.out = append(s.out, &brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Ready{Ready: &brokerv1.ProducerReady{
		ProducerName: name, ProducerEpoch: s.producer.Epoch(), LastSequence: s.producer.LastSequence(),
		MaxMessageSize: uint32(p.b.cfg.MaxMessageSize), Bundle: string(t.u.guard.Bundle), Epoch: uint64(t.u.guard.Epoch),
	}}})
	return s, nil
}

// lost reports whether err says that the topic is of no more use, and not just at the moment.
func lost(t *servedTopic, err error) bool {
	if errors.Is(err, chain.ErrLost) || errors.Is(err, chain.ErrClosed) || errors.Is(err, topic.ErrClosed) || lostOwnership(err) {
		return true
	}
	select {
	case <-t.log.Lost():
		return true
	default:
		return false
	}
}

func randomName(kind string) string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return kind + "-" + hex.EncodeToString(b[:])
}

// sendPublishEnd ends a stream with its last word.
func sendPublishEnd(stream brokerv1.PubSub_PublishServer, err error) error {
	var moved *movedError
	if errors.As(err, &moved) {
		return stream.Send(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Moved{Moved: moved.wire()}})
	}
	return stream.Send(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Error{Error: wireError(err)}})
}

// receive takes batches in until the stream or the topic ends.
func (s *publisher) receive() {
	for {
		req, err := s.stream.Recv()
		if err == nil {
			err = s.take(req.GetBatch())
		}
		if err != nil {
			s.mu.Lock()
			s.over, s.ended = true, err
			s.mu.Unlock()
			s.signal()
			return
		}
	}
}

// take stores one batch. A batch that is refused gets its answer here; the error it returns ends the stream.
func (s *publisher) take(batch *brokerv1.Batch) error {
	if batch == nil {
		return invalid("a producer's request after the first must be a Batch")
	}
	err := s.append(batch)
	if err == nil {
		return nil
	}
	if lost(s.t, err) {
		s.t.metrics.receipts[outcomeLost].Inc()
		s.t.u.topicLost(s.t)
		return s.t.movedError()
	}
	s.t.metrics.receipts[outcomeRefused].Inc()
	if errors.Is(err, topic.ErrProducerFenced) || errors.Is(err, topic.ErrProducerReplaced) {
		return err
	}
	s.answer(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Failed{Failed: &brokerv1.PublishFailed{
		FirstSequence: batch.GetFirstSequence(), Error: wireError(err),
	}}}, 0)
	return nil
}

func (s *publisher) append(batch *brokerv1.Batch) error {
	began := clock()
	if err := s.t.admit(len(batch.GetFrame())); err != nil {
		return err
	}
	f, err := frame.Parse(batch.GetFrame(), s.t.u.b.limits)
	if err != nil {
		return fmt.Errorf("batch for %s: %w; %s", s.t.name, err, frameAdvice(err))
	}
	first, last := batch.GetFirstSequence(), batch.GetLastSequence()
	if f.Sequence != first || f.HighestSequence != last {
		return invalid("batch with sequences %d to %d, its frame says %d to %d", first, last, f.Sequence, f.HighestSequence)
	}
	messages, bytes := uint32(f.Count), uint32(len(batch.GetFrame()))
	s.mu.Lock()
	s.open++
	s.mu.Unlock()
	err = s.producer.Append(s.stream.Context(), topic.Batch{
		Frame: batch.GetFrame(), Parsed: &f, Level: s.level,
		Done: func(r topic.Receipt, err error) {
			s.count(began, messages, bytes, r.Duplicate, err)
			s.done(first, r, err)
		},
	})
	if err != nil {
		s.mu.Lock()
		s.open--
		s.mu.Unlock()
	}
	return err //nolint:wrapcheck // it says what failed
}

// frameAdvice tells what to do about a frame that was refused.
func frameAdvice(err error) string {
	var bad *frame.Error
	if !errors.As(err, &bad) {
		panic(fmt.Sprintf("broker: a frame was refused without a reason: %v", err))
	}
	switch bad.Reason {
	case frame.TooLarge:
		return "send less at once, or raise --max-message-kib of all brokers"
	case frame.BadChecksum:
		return "it was damaged on its way, or its CRC32C is not of all that follows it: encode and send it again"
	case frame.Unsupported:
		return "this broker is older than the client: update it, or send what it knows"
	case frame.Malformed:
	}
	return "docs/formats.md says what a frame looks like"
}

// count counts what became of a batch that was taken in.
func (s *publisher) count(began time.Duration, messages, bytes uint32, duplicate bool, err error) {
	m, became := s.t.metrics, outcomeStored
	switch {
	case err != nil && lost(s.t, err):
		became = outcomeLost
	case err != nil:
		became = outcomeFailed
	case duplicate:
		became = outcomeDuplicate
	default:
		s.t.stored(int(messages), int(bytes))
	}
	m.receipts[became].Inc()
	if err == nil {
		m.publishSeconds.Observe((clock() - began).Seconds())
	}
}

// done answers a batch that was taken in. A batch whose outcome is not known because the topic is lost gets no answer:
// the producer learns it from the next owner.
func (s *publisher) done(first uint64, r topic.Receipt, err error) {
	if err != nil {
		if lost(s.t, err) {
			s.answer(nil, 1)
			return
		}
		s.answer(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Failed{Failed: &brokerv1.PublishFailed{
			FirstSequence: first, Error: wireError(err),
		}}}, 1)
		return
	}
	receipt := &brokerv1.Receipt{FirstSequence: r.FirstSeq, LastSequence: r.LastSeq, Offset: uint64(r.Offset), Duplicate: r.Duplicate}
	if r.Position.Ledger != 0 {
		receipt.Position = wirePosition(r.Position)
	}
	s.answer(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Receipt{Receipt: receipt}}, 1)
}

func (s *publisher) answer(r *brokerv1.PublishResponse, settled int) {
	s.mu.Lock()
	s.open -= settled
	if r != nil {
		s.out = append(s.out, r)
	}
	s.mu.Unlock()
	s.signal()
}

func (s *publisher) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// send sends answers until the stream is over: the client has gone, or is done and everything is answered, or the
// topic is served elsewhere.
func (s *publisher) send() error {
	for {
		s.mu.Lock()
		out, over, ended, open := s.out, s.over, s.ended, s.open
		s.out = nil
		s.mu.Unlock()
		for _, r := range out {
			if err := s.stream.Send(r); err != nil {
				return err //nolint:wrapcheck // gRPC's own
			}
		}
		switch {
		case over && errors.Is(ended, io.EOF) && open == 0:
			return nil
		case over && !errors.Is(ended, io.EOF):
			return s.finish(ended)
		case len(out) > 0:
			continue
		}
		select {
		case <-s.wake:
		case <-s.stream.Context().Done():
			return s.stream.Context().Err() //nolint:wrapcheck // gRPC's own
		case <-s.t.log.Lost():
			s.t.u.topicLost(s.t)
			return sendPublishEnd(s.stream, s.waitMoved())
		case <-s.t.done:
			return s.finish(s.t.movedError())
		}
	}
}

// finish sends what is left to answer, and the last word.
func (s *publisher) finish(why error) error {
	s.mu.Lock()
	out := s.out
	s.out = nil
	s.mu.Unlock()
	for _, r := range out {
		if err := s.stream.Send(r); err != nil {
			return err //nolint:wrapcheck // gRPC's own
		}
	}
	if err := s.stream.Context().Err(); err != nil {
		return err //nolint:wrapcheck // the client has gone
	}
	return sendPublishEnd(s.stream, why)
}

// waitMoved gives the topic a moment to be told where it went.
func (s *publisher) waitMoved() error {
	ctx, cancel := context.WithTimeout(s.stream.Context(), locateWait)
	defer cancel()
	select {
	case <-s.t.done:
	case <-ctx.Done():
	}
	return s.t.movedError()
}
