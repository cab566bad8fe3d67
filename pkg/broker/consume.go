package broker

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/subscription"
)

// Bounds of what one message of a stream holds.
const (
	maxDeliverBytes   = 1 << 20
	maxDeliverEntries = 512
)

// maxAckRanges bounds the ranges of one acknowledgement or give-back.
const maxAckRanges = 100_000

// consumer is one consumer's or reader's stream. Two goroutines serve it: the receiver takes permits and
// acknowledgements, the sender, which is the stream's handler, sends what dispatch queued. What is queued is bounded
// by permits, and those by bytes (credit).
type consumer struct {
	t          *servedTopic
	at         *subscription.Consumer
	stream     brokerv1.PubSub_ConsumeServer
	name, info string
	kind       subscription.Type

	mu      sync.Mutex
	out     []outgoing
	credit  credit
	over    bool
	ended   error // io.EOF when the client is done
	pending int   // acknowledgements not answered yet
	wake    chan struct{}
}

// outgoing is something to send: a delivery, or anything else.
type outgoing struct {
	delivery dispatch.Delivery
	other    *brokerv1.ConsumeResponse
}

// Consume serves one consumer or reader.
func (p *pubsub) Consume(stream brokerv1.PubSub_ConsumeServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err //nolint:wrapcheck // gRPC's own
	}
	c, err := p.openConsumer(stream, first.GetSubscribe())
	if err != nil {
		return sendConsumeEnd(stream, err)
	}
	defer c.at.Close()
	if !p.b.spawn(c.receive) {
		return sendConsumeEnd(stream, c.t.movedError())
	}
	return c.send()
}

func (p *pubsub) openConsumer(stream brokerv1.PubSub_ConsumeServer, open *brokerv1.Subscribe) (*consumer, error) {
	if open == nil {
		return nil, invalid("the first request of a consumer must be Subscribe")
	}
	if _, known := brokerv1.SubscriptionType_name[int32(open.GetType())]; !known {
		return nil, invalid("consumer on %s: unknown subscription type %d: want exclusive, failover or shared", open.GetTopic(), open.GetType())
	}
	if open.GetReader() != (open.GetSubscription() == "") {
		return nil, invalid("consumer on %s: a subscription needs a name, and a reader has none", open.GetTopic())
	}
	name := open.GetConsumerName()
	if name == "" {
		name = randomName("consumer")
	}
	if len(name) > subscription.MaxName {
		return nil, invalid("consumer on %s: name of %d bytes, at most %d are allowed", open.GetTopic(), len(name), subscription.MaxName)
	}
	ctx, stop := p.b.whileEtcdAnswers(stream.Context())
	defer stop()
	t, err := p.b.topicFor(ctx, open.GetTopic(), true, false)
	if err != nil {
		return nil, orEtcdAway(ctx, err, "open topic", open.GetTopic())
	}
	c := &consumer{
		t: t, stream: stream, kind: ownType(open.GetType()), name: name, info: clipText(open.GetClientInfo()), wake: make(chan struct{}, 1),
	}
	start, err := c.attach(ctx, open)
	if err != nil {
		if lost(t, err) {
			t.u.topicLost(t)
			return nil, t.movedError()
		}
		return nil, orEtcdAway(ctx, err, "subscribe to topic", open.GetTopic())
	}
	c.mu.Lock()
	// Before anything that dispatch may have queued already.
	c.out = append([]outgoing{{other: &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Subscribed{Subscribed: &brokerv1.Subscribed{
		ConsumerName: name, Bundle: string(t.u.guard.Bundle), Epoch: uint64(t.u.guard.Epoch), StartOffset: uint64(start),
		Incarnation: c.at.Incarnation(),
	}}}}}, c.out...)
	c.mu.Unlock()
	return c, nil
}

// attach joins the subscription, or makes a reader's own dispatch. It returns where delivery starts.
func (c *consumer) attach(ctx context.Context, open *brokerv1.Subscribe) (entry.Offset, error) {
	who := dispatch.Consumer{Name: c.name, Priority: open.GetPriority()}
	if open.GetReader() {
		from, err := startOffset(ctx, c.t.log, open.GetStart())
		if err == nil {
			c.at, err = c.t.subs.AttachReader(c, from, who)
		}
		return from, err
	}
	sub, _, err := c.t.subs.Ensure(ctx, open.GetSubscription(), c.t.starting(open.GetStart()))
	if err != nil {
		return 0, err //nolint:wrapcheck // it names the subscription
	}
	if c.at, err = sub.Attach(c, c.kind, who); err != nil {
		return 0, err //nolint:wrapcheck // likewise
	}
	return sub.Floor(), nil
}

// Send queues deliveries. It is called by dispatch, and does not block.
func (c *consumer) Send(deliveries []dispatch.Delivery) {
	handed, bytes := 0, 0
	c.mu.Lock()
	for _, d := range deliveries {
		messages := int64(d.Span)
		for _, r := range d.Skip {
			messages -= int64(r.Len())
		}
		handed += int(messages)
		bytes += len(d.Frame)
		c.credit.queued(messages, roomOf(&d))
		c.out = append(c.out, outgoing{delivery: d})
	}
	full := c.credit.full()
	c.mu.Unlock()
	c.signal()
	c.t.handed(handed, bytes)
	if full {
		back := c.at.Withdraw()
		c.mu.Lock()
		n := c.credit.withdrawn(back)
		c.mu.Unlock()
		c.permit(n)
	}
}

// roomOf is what a delivery that waits counts for.
func roomOf(d *dispatch.Delivery) int64 { return int64(len(d.Frame)) + entryRoom }

// Active tells a Failover consumer whether entries come to it.
func (c *consumer) Active(active bool) {
	c.push(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_ActiveChanged{ActiveChanged: &brokerv1.ActiveChanged{Active: active}}})
}

func (c *consumer) push(r *brokerv1.ConsumeResponse) {
	c.mu.Lock()
	c.out = append(c.out, outgoing{other: r})
	c.mu.Unlock()
	c.signal()
}

// Stop ends the stream with a last word.
func (c *consumer) Stop(why error) {
	c.mu.Lock()
	if !c.over {
		c.over, c.ended = true, why
	}
	c.mu.Unlock()
	c.signal()
}

func (c *consumer) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func sendConsumeEnd(stream brokerv1.PubSub_ConsumeServer, err error) error {
	var moved *movedError
	if errors.As(err, &moved) {
		return stream.Send(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Moved{Moved: moved.wire()}})
	}
	return stream.Send(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Error{Error: wireError(err)}})
}

// receive takes permits and acknowledgements until the stream ends.
func (c *consumer) receive() {
	for {
		req, err := c.stream.Recv()
		if err == nil {
			err = c.take(req)
		}
		if err != nil {
			c.Stop(err)
			return
		}
	}
}

func (c *consumer) take(req *brokerv1.ConsumeRequest) error {
	switch k := req.GetKind().(type) {
	case *brokerv1.ConsumeRequest_Permits:
		c.mu.Lock()
		n := c.credit.add(k.Permits.GetMessages())
		c.mu.Unlock()
		c.permit(n)
		return nil
	case *brokerv1.ConsumeRequest_Ack:
		return c.acknowledge(k.Ack)
	case *brokerv1.ConsumeRequest_Nack:
		return c.giveBack(k.Nack)
	}
	return invalid("a consumer's request after the first must be Permits, Ack or Nack")
}

func (c *consumer) permit(n uint32) {
	if n > 0 {
		c.at.Permits(n)
	}
}

// acknowledge applies an acknowledgement, and answers it once it is durable if the client asked for that.
func (c *consumer) acknowledge(ack *brokerv1.Ack) error {
	if c.at.Subscription() == nil {
		return invalid("a reader acknowledges nothing")
	}
	ranges, err := ownRanges(ack.GetRanges())
	if err != nil {
		return err
	}
	var upTo entry.Offset
	if ack.Cumulative != nil {
		if c.kind == subscription.Shared {
			return invalid("subscription %s is shared: cumulative acknowledgement would take other consumers' messages", c.at.Subscription().Name())
		}
		if ack.GetCumulative() == ^uint64(0) {
			return invalid("cumulative acknowledgement of offset %d, which no topic reaches", ack.GetCumulative())
		}
		upTo = entry.Offset(ack.GetCumulative()) + 1
	}
	m := c.t.u.b.metrics
	m.acks.Inc()
	var done func(error)
	if id := ack.GetRequestId(); id != 0 {
		c.mu.Lock()
		c.pending++
		c.mu.Unlock()
		began := clock()
		done = func(err error) {
			if err == nil {
				m.ackSeconds.Observe((clock() - began).Seconds())
			}
			c.acknowledged(id, err)
		}
	}
	if err = c.at.Ack(ranges, upTo, done); err != nil {
		if done != nil {
			done(err)
			return nil
		}
		if errors.Is(err, cursor.ErrBeyondEnd) {
			return err //nolint:wrapcheck // it says which
		}
		// Moved, deleted or lost meanwhile: the stream is about to end, and the messages come again.
	}
	return nil
}

func (c *consumer) acknowledged(id uint64, err error) {
	answer := &brokerv1.AckDone{RequestId: id}
	if err != nil {
		answer.Error = wireError(err)
	}
	c.mu.Lock()
	c.pending--
	c.out = append(c.out, outgoing{other: &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_AckDone{AckDone: answer}}})
	c.mu.Unlock()
	c.signal()
}

func (c *consumer) giveBack(nack *brokerv1.Nack) error {
	if c.at.Subscription() == nil {
		return invalid("a reader gives nothing back")
	}
	ranges, err := ownRanges(nack.GetRanges())
	if err != nil {
		return err
	}
	const most = 365 * 24 * time.Hour
	c.at.Nack(min(time.Duration(min(nack.GetDelayMs(), uint64(most/time.Millisecond)))*time.Millisecond, most), ranges)
	return nil
}

func ownRanges(wire []*brokerv1.OffsetRange) ([]cursor.Range, error) {
	if len(wire) > maxAckRanges {
		return nil, invalid("%d ranges of offsets in one request, at most %d are allowed", len(wire), maxAckRanges)
	}
	out := make([]cursor.Range, 0, len(wire)+1)
	for _, r := range wire {
		if r.GetLast() < r.GetFirst() || r.GetLast() == ^uint64(0) {
			return nil, invalid("range of offsets from %d to %d", r.GetFirst(), r.GetLast())
		}
		out = append(out, cursor.Range{First: entry.Offset(r.GetFirst()), End: entry.Offset(r.GetLast()) + 1})
	}
	return out, nil
}

// send sends what is queued until the stream is over.
func (c *consumer) send() error {
	for {
		c.mu.Lock()
		out, over, ended, pending := c.out, c.over, c.ended, c.pending
		c.out = nil
		c.mu.Unlock()
		if err := c.sendAll(out); err != nil {
			return err
		}
		switch {
		case over && errors.Is(ended, io.EOF) && pending == 0:
			return nil
		case over && !errors.Is(ended, io.EOF):
			return c.finish(ended)
		case len(out) > 0:
			continue
		}
		select {
		case <-c.wake:
		case <-c.stream.Context().Done():
			return c.stream.Context().Err() //nolint:wrapcheck // gRPC's own
		case <-c.t.log.Lost():
			c.t.u.topicLost(c.t)
			return c.finish(c.waitMoved())
		case <-c.t.done:
			return c.finish(c.t.movedError())
		}
	}
}

// finish sends what answers acknowledgements, and the last word. Deliveries are left out: they come again.
func (c *consumer) finish(why error) error {
	if err := c.stream.Context().Err(); err != nil {
		return err //nolint:wrapcheck // the client has gone
	}
	c.mu.Lock()
	out := c.out
	c.out = nil
	c.mu.Unlock()
	for _, o := range out {
		if o.other != nil {
			if err := c.stream.Send(o.other); err != nil {
				return err //nolint:wrapcheck // gRPC's own
			}
		}
	}
	return sendConsumeEnd(c.stream, why)
}

func (c *consumer) waitMoved() error {
	ctx, cancel := context.WithTimeout(c.stream.Context(), locateWait)
	defer cancel()
	select {
	case <-c.t.done:
	case <-ctx.Done():
	}
	return c.t.movedError()
}

// sendAll sends in order, many entries in one message.
func (c *consumer) sendAll(out []outgoing) error {
	for i := 0; i < len(out); {
		if out[i].other != nil {
			if err := c.stream.Send(out[i].other); err != nil {
				return err //nolint:wrapcheck // gRPC's own
			}
			i++
			continue
		}
		deliver := &brokerv1.Deliver{}
		bytes := int64(0)
		for ; i < len(out) && out[i].other == nil; i++ {
			d := &out[i].delivery
			if n := len(deliver.GetEntries()); n > 0 && (n == maxDeliverEntries || bytes+roomOf(d) > maxDeliverBytes) {
				break
			}
			bytes += roomOf(d)
			deliver.Entries = append(deliver.Entries, wireDelivery(d))
		}
		if err := c.stream.Send(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Deliver{Deliver: deliver}}); err != nil {
			return err //nolint:wrapcheck // gRPC's own
		}
		c.mu.Lock()
		n := c.credit.sent(bytes)
		c.mu.Unlock()
		c.permit(n)
	}
	return nil
}

func wireDelivery(d *dispatch.Delivery) *brokerv1.DeliveredEntry {
	e := &brokerv1.DeliveredEntry{
		Position: wirePosition(d.Position), Offset: uint64(d.Offset), Span: d.Span, BrokerTimeMs: uint64(d.BrokerTime),
		RedeliveryCount: d.Redelivered, Frame: d.Frame,
	}
	for _, r := range d.Skip {
		e.Skip = append(e.Skip, &brokerv1.OffsetRange{First: uint64(r.First - d.Offset), Last: uint64(r.End - d.Offset - 1)})
	}
	return e
}

// clipText bounds what a client says of itself.
func clipText(s string) string {
	const most = 256
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") // a character may be cut in two, which no answer could carry
	}
	return s
}
