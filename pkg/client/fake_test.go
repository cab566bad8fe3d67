package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/frame"
)

// cluster is what the fake brokers share: ownership and stored entries. It plays the broker's side of the
// protocol faithfully; durability is a slice.
type cluster struct {
	t      testing.TB
	forget bool // store nothing, for benchmarks

	mu         sync.Mutex
	changed    *sync.Cond
	brokers    []*broker
	owner      *broker
	epoch      uint64
	partitions uint32
	topics     map[string]*fakeTopic
	// Scripts, consulted by publish streams under mu.
	onBatch func(b *brokerv1.Batch) verdict
	onOpen  func()
	holdAck bool // acknowledgements are stored, not answered
	// holdSeek: subscriptions are moved, and that is not answered.
	holdSeek bool
	starts   []*brokerv1.Subscribe
	fatal    *brokerv1.Error // answer to opens
	// breakOff ends one consume stream.
	breakOff *brokerv1.Error
	streams  int // open
}

// verdict scripts what a broker does with a batch.
type verdict struct {
	fail   *brokerv1.Error // answer PublishFailed
	silent bool            // store, answer nothing
	lose   bool            // neither store nor answer
}

type fakeTopic struct {
	entries   []fakeEntry
	next      uint64
	last      map[string]int64 // dedup
	epochs    map[string]uint64
	subs      map[string]*fakeSub
	producers int
}

type fakeEntry struct {
	offset, span uint64
	frame        []byte
}

type fakeSub struct {
	acked    map[uint64]bool
	holder   map[uint64]*consumer // of delivered, unacknowledged messages
	counts   map[uint64]uint32
	attached *consumer // of exclusive
	kicked   int
	low      int // entries before this one are all acknowledged or held
}

type consumer struct{ permits int64 }

type broker struct {
	brokerv1.UnimplementedPubSubServer
	brokerv1.UnimplementedLookupServer
	brokerv1.UnimplementedAdminServer
	c    *cluster
	addr string
	srv  *grpc.Server
	life context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup
	mute atomic.Bool // answers nothing, as a stopped process
	// stale, when not 0, is the epoch up to which this broker believes to own everything: what it serves
	// stands still. Guarded by the cluster's mu.
	stale  uint64
	listed chan struct{} // if set, told of each ListSubscriptions
	// waits, if set, holds back lookups of who hears nothing of the owner until there is a later one, and is told of each.
	waits chan struct{}
}

func newCluster(tb testing.TB, brokers int) *cluster {
	tb.Helper()
	c := &cluster{t: tb, topics: make(map[string]*fakeTopic), epoch: 1}
	c.changed = sync.NewCond(&c.mu)
	for range brokers {
		b := &broker{c: c}
		b.start(tb, "127.0.0.1:0")
		c.brokers = append(c.brokers, b)
	}
	c.owner = c.brokers[0]
	tb.Cleanup(func() {
		for _, b := range c.brokers {
			b.kill()
		}
	})
	return c
}

func (b *broker) url() string { return "penstock://" + b.addr }

func (b *broker) start(tb testing.TB, addr string) {
	tb.Helper()
	l, err := new(net.ListenConfig).Listen(tb.Context(), "tcp", addr)
	for errors.Is(err, syscall.EADDRINUSE) { // somebody's connection has had the port meanwhile: not for long
		l, err = new(net.ListenConfig).Listen(tb.Context(), "tcp", addr)
	}
	if err != nil {
		tb.Fatal(err)
	}
	b.addr = l.Addr().String()
	b.srv = grpc.NewServer(grpc.MaxRecvMsgSize(16 << 20))
	b.life, b.end = context.WithCancel(context.WithoutCancel(tb.Context()))
	brokerv1.RegisterPubSubServer(b.srv, b)
	brokerv1.RegisterLookupServer(b.srv, b)
	brokerv1.RegisterAdminServer(b.srv, b)
	b.wg.Go(func() { _ = b.srv.Serve(l) })
}

// kill ends the broker as kill -9 does: its connections reset, nothing is said.
func (b *broker) kill() {
	b.end()
	b.c.mu.Lock()
	b.c.changed.Broadcast()
	b.c.mu.Unlock()
	b.srv.Stop()
	b.wg.Wait()
}

func (c *cluster) urls() string {
	var urls []string
	for _, b := range c.brokers {
		urls = append(urls, b.addr)
	}
	return strings.Join(urls, ",")
}

// moveTo gives every topic to b, under a higher epoch.
func (c *cluster) moveTo(b *broker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.owner = b
	c.epoch++
	c.changed.Broadcast()
}

// connected counts streams, opened the consume streams ever.
func (c *cluster) connected() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams
}

func (c *cluster) opened() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.starts)
}

func (c *cluster) count(by int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams += by
}

func (c *cluster) script(f func(b *brokerv1.Batch) verdict) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onBatch = f
}

func (c *cluster) topic(name string) *fakeTopic {
	t, ok := c.topics[name]
	if !ok {
		t = &fakeTopic{last: make(map[string]int64), epochs: make(map[string]uint64), subs: make(map[string]*fakeSub)}
		c.topics[name] = t
	}
	return t
}

func (c *cluster) sub(topic, name string) *fakeSub {
	t := c.topic(topic)
	s, ok := t.subs[name]
	if !ok {
		s = &fakeSub{acked: make(map[uint64]bool), holder: make(map[uint64]*consumer), counts: make(map[uint64]uint32)}
		t.subs[name] = s
	}
	return s
}

// stored returns the values of a topic, in order.
func (c *cluster) stored(topic string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, e := range c.topic(topic).entries {
		f, err := frame.Parse(e.frame, frame.Limits{})
		if err != nil {
			c.t.Fatal(err)
		}
		for m, err := range f.Messages(f.Payload) {
			if err != nil {
				c.t.Fatal(err)
			}
			out = append(out, string(m.Value))
		}
	}
	return out
}

func (c *cluster) ackedOf(topic, sub string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.sub(topic, sub).acked)
}

// until waits for a condition over the cluster's state.
func (c *cluster) until(what string, cond func() bool) {
	c.t.Helper()
	stop := context.AfterFunc(c.t.Context(), func() {
		c.mu.Lock()
		c.changed.Broadcast()
		c.mu.Unlock()
	})
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for !cond() {
		if c.t.Context().Err() != nil {
			c.t.Fatalf("the test ended before: %s", what)
		}
		c.changed.Wait()
	}
}

func (b *broker) silence(ctx context.Context) error {
	if !b.mute.Load() {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-b.life.Done():
		return status.Error(codes.Unavailable, "killed")
	}
}

func (b *broker) LookupTopic(ctx context.Context, r *brokerv1.LookupTopicRequest) (*brokerv1.LookupTopicResponse, error) {
	if err := b.silence(ctx); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() {
		b.c.mu.Lock()
		defer b.c.mu.Unlock()
		b.c.changed.Broadcast()
	})
	defer stop()
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	if b.waits != nil && r.GetBeyondEpoch() >= b.c.epoch {
		select {
		case b.waits <- struct{}{}:
		default:
		}
		for r.GetBeyondEpoch() >= b.c.epoch && ctx.Err() == nil {
			b.c.changed.Wait()
		}
	}
	if b.stale > 0 {
		return &brokerv1.LookupTopicResponse{BrokerUrl: b.url(), Bundle: "public/default/0", Epoch: b.stale}, nil
	}
	answer := &brokerv1.LookupTopicResponse{BrokerUrl: b.c.owner.url(), Bundle: "public/default/0", Epoch: b.c.epoch}
	for _, other := range b.c.brokers {
		if other.life.Err() == nil {
			answer.Brokers = append(answer.Brokers, other.url())
		}
	}
	return answer, nil
}

func (b *broker) GetTopic(ctx context.Context, r *brokerv1.GetTopicRequest) (*brokerv1.GetTopicResponse, error) {
	if err := b.silence(ctx); err != nil {
		return nil, err
	}
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	return &brokerv1.GetTopicResponse{Topic: r.GetTopic(), Partitions: b.c.partitions}, nil
}

func (b *broker) notOwner() error {
	s, err := status.New(codes.FailedPrecondition, "not the owner").WithDetails(
		&brokerv1.Error{Code: brokerv1.Code_CODE_NOT_OWNER, Message: "not the owner", Retryable: true},
		&brokerv1.Moved{BrokerUrl: b.c.owner.url(), Bundle: "public/default/0", Epoch: b.c.epoch},
	)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func (b *broker) ListSubscriptions(ctx context.Context, r *brokerv1.ListSubscriptionsRequest) (*brokerv1.ListSubscriptionsResponse, error) {
	if b.listed != nil {
		b.listed <- struct{}{}
	}
	if err := b.silence(ctx); err != nil {
		return nil, err
	}
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	if b.c.owner != b {
		return nil, b.notOwner()
	}
	out := &brokerv1.ListSubscriptionsResponse{}
	for name := range b.c.topic(r.GetTopic()).subs {
		out.Subscriptions = append(out.Subscriptions, &brokerv1.Subscription{Name: name})
	}
	return out, nil
}

func (b *broker) SeekSubscription(ctx context.Context, r *brokerv1.SeekSubscriptionRequest) (*brokerv1.SeekSubscriptionResponse, error) {
	answer, hold, err := b.seek(r)
	if hold {
		<-ctx.Done()
		err = ctx.Err()
	}
	return answer, err
}

func (b *broker) seek(r *brokerv1.SeekSubscriptionRequest) (answer *brokerv1.SeekSubscriptionResponse, hold bool, err error) {
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	if b.c.owner != b {
		return nil, false, b.notOwner()
	}
	t := b.c.topic(r.GetTopic())
	s := b.c.sub(r.GetTopic(), r.GetSubscription())
	to := startOf(r.GetTo(), t)
	s.seek(to)
	b.c.changed.Broadcast()
	return &brokerv1.SeekSubscriptionResponse{Offset: to}, b.c.holdSeek, nil
}

// seek moves a subscription.
func (s *fakeSub) seek(to uint64) {
	s.acked, s.holder = make(map[uint64]bool), make(map[uint64]*consumer)
	for o := range to {
		s.acked[o] = true
	}
	s.low = 0
	s.kicked++
}

func startOf(s *brokerv1.Start, t *fakeTopic) uint64 {
	switch at := s.GetAt().(type) {
	case *brokerv1.Start_Earliest:
		return 0
	case *brokerv1.Start_Offset:
		return at.Offset
	}
	return t.next
}

func (b *broker) Publish(stream brokerv1.PubSub_PublishServer) error {
	b.c.count(1)
	defer b.c.count(-1)
	if err := b.silence(stream.Context()); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	open := first.GetOpen()
	c := b.c
	c.mu.Lock()
	if c.fatal != nil {
		defer c.mu.Unlock()
		return stream.Send(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Error{Error: c.fatal}})
	}
	if c.owner != b {
		defer c.mu.Unlock()
		return stream.Send(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Moved{Moved: &brokerv1.Moved{
			BrokerUrl: c.owner.url(), Bundle: "public/default/0", Epoch: c.epoch,
		}}})
	}
	t := c.topic(open.GetTopic())
	name := open.GetProducerName()
	if name == "" {
		t.producers++
		name = fmt.Sprintf("producer-%d", t.producers)
	}
	if c.onOpen != nil {
		c.onOpen()
	}
	t.epochs[name]++
	mine := t.epochs[name]
	last := int64(-1)
	if l, ok := t.last[name]; ok && open.GetDedup() {
		last = l
	}
	ready := &brokerv1.ProducerReady{ProducerName: name, ProducerEpoch: mine, LastSequence: last, MaxMessageSize: 1 << 20, Bundle: "public/default/0", Epoch: c.epoch}
	c.mu.Unlock()
	if err := stream.Send(&brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Ready{Ready: ready}}); err != nil {
		return err
	}
	failed := int64(-1)
	for {
		req, err := stream.Recv()
		if err != nil {
			return nil
		}
		if err := b.silence(stream.Context()); err != nil {
			return err
		}
		// A batch that failed for now must not be overtaken: whatever follows fails too, until it comes again.
		batch := req.GetBatch()
		if failed >= 0 && batch.GetFirstSequence() > uint64(failed) {
			if err := stream.Send(failure(batch, &brokerv1.Error{Code: brokerv1.Code_CODE_UNAVAILABLE, Message: "an earlier batch failed", Retryable: true})); err != nil {
				return err
			}
			continue
		}
		failed = -1
		resp, err := b.store(open, name, mine, batch)
		if resp.GetFailed().GetError().GetRetryable() {
			failed = int64(batch.GetFirstSequence())
		}
		if err != nil {
			return err
		}
		if resp != nil {
			if err := stream.Send(resp); err != nil {
				return err
			}
			if resp.GetMoved() != nil || resp.GetError() != nil {
				return nil
			}
		}
	}
}

func (b *broker) store(open *brokerv1.OpenProducer, name string, epoch uint64, batch *brokerv1.Batch) (*brokerv1.PublishResponse, error) {
	c := b.c
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.topic(open.GetTopic())
	switch {
	case b.life.Err() != nil:
		return nil, status.Error(codes.Unavailable, "killed")
	case c.owner != b:
		return &brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Moved{Moved: &brokerv1.Moved{BrokerUrl: c.owner.url(), Bundle: "public/default/0", Epoch: c.epoch}}}, nil
	case t.epochs[name] != epoch:
		return &brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Error{Error: &brokerv1.Error{Code: brokerv1.Code_CODE_FENCED, Message: "a newer producer"}}}, nil
	}
	var v verdict
	if c.onBatch != nil {
		v = c.onBatch(batch)
	}
	if v.lose {
		return nil, nil
	}
	if v.fail != nil {
		return failure(batch, v.fail), nil
	}
	f, err := frame.Parse(batch.GetFrame(), frame.Limits{})
	if err != nil || uint64(f.Count) != batch.GetLastSequence()-batch.GetFirstSequence()+1 || f.Sequence != batch.GetFirstSequence() || string(f.Producer) != name {
		c.t.Errorf("batch %d-%d: %v, %+v", batch.GetFirstSequence(), batch.GetLastSequence(), err, f)
		return nil, status.Error(codes.InvalidArgument, "bad batch")
	}
	receipt := &brokerv1.Receipt{FirstSequence: batch.GetFirstSequence(), LastSequence: batch.GetLastSequence()}
	if l, ok := t.last[name]; open.GetDedup() && ok && int64(batch.GetLastSequence()) <= l {
		receipt.Duplicate = true
	} else {
		receipt.Offset = t.next
		receipt.Position = &brokerv1.Position{Ledger: 1, Entry: int64(len(t.entries))}
		if c.forget {
			t.entries = t.entries[:0]
		}
		t.entries = append(t.entries, fakeEntry{offset: t.next, span: uint64(f.Count), frame: slices.Clone(batch.GetFrame())})
		t.next += uint64(f.Count)
		t.last[name] = int64(batch.GetLastSequence())
		c.changed.Broadcast()
	}
	if v.silent {
		return nil, nil
	}
	return &brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Receipt{Receipt: receipt}}, nil
}

func failure(b *brokerv1.Batch, e *brokerv1.Error) *brokerv1.PublishResponse {
	return &brokerv1.PublishResponse{Kind: &brokerv1.PublishResponse_Failed{Failed: &brokerv1.PublishFailed{FirstSequence: b.GetFirstSequence(), Error: e}}}
}

func (b *broker) Consume(stream brokerv1.PubSub_ConsumeServer) error {
	b.c.count(1)
	defer b.c.count(-1)
	if err := b.silence(stream.Context()); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	sub := first.GetSubscribe()
	c := b.c
	c.mu.Lock()
	c.starts = append(c.starts, sub)
	if c.owner != b {
		defer c.mu.Unlock()
		return stream.Send(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Moved{Moved: &brokerv1.Moved{
			BrokerUrl: c.owner.url(), Bundle: "public/default/0", Epoch: c.epoch,
		}}})
	}
	t := c.topic(sub.GetTopic())
	me := &consumer{}
	s := &fakeSub{acked: make(map[uint64]bool), holder: make(map[uint64]*consumer), counts: make(map[uint64]uint32)}
	start := startOf(sub.GetStart(), t)
	if !sub.GetReader() {
		_, existed := t.subs[sub.GetSubscription()]
		s = c.sub(sub.GetTopic(), sub.GetSubscription())
		if existed {
			start = 0
		}
	}
	for o := range start {
		s.acked[o] = true
	}
	kicked := s.kicked
	if sub.GetType() == brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_EXCLUSIVE && !sub.GetReader() {
		if s.attached != nil {
			defer c.mu.Unlock()
			return stream.Send(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Error{Error: &brokerv1.Error{Code: brokerv1.Code_CODE_CONFLICT, Message: "has a consumer"}}})
		}
		s.attached = me
	}
	epoch := c.epoch
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if s.attached == me {
			s.attached = nil
		}
		for o, who := range s.holder {
			if who == me {
				delete(s.holder, o)
				s.counts[o]++
			}
		}
		s.low = 0
		c.changed.Broadcast()
	}()
	var sendMu sync.Mutex
	send := func(r *brokerv1.ConsumeResponse) error {
		sendMu.Lock()
		defer sendMu.Unlock()
		return stream.Send(r)
	}
	if err := send(&brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Subscribed{Subscribed: &brokerv1.Subscribed{
		ConsumerName: "consumer", Bundle: "public/default/0", Epoch: epoch, StartOffset: start,
		Incarnation: []byte{byte(kicked)},
	}}}); err != nil {
		return err
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer func() {
			close(done)
			c.mu.Lock()
			c.changed.Broadcast()
			c.mu.Unlock()
		}()
		for {
			req, err := stream.Recv()
			if err != nil {
				return
			}
			c.mu.Lock()
			answer := b.request(s, me, req)
			c.changed.Broadcast()
			c.mu.Unlock()
			if answer != nil && !b.mute.Load() {
				_ = send(answer)
			}
		}
	})
	ended := func() bool {
		select {
		case <-done:
			return true
		default:
			return stream.Context().Err() != nil || b.life.Err() != nil
		}
	}
	stop := context.AfterFunc(stream.Context(), func() {
		c.mu.Lock()
		c.changed.Broadcast()
		c.mu.Unlock()
	})
	defer stop()
	for {
		c.mu.Lock()
		var out *brokerv1.ConsumeResponse
		for !ended() && out == nil {
			switch {
			case b.stale > 0:
				c.changed.Wait()
			case c.owner != b:
				out = &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Moved{Moved: &brokerv1.Moved{BrokerUrl: c.owner.url(), Bundle: "public/default/0", Epoch: c.epoch}}}
			case c.breakOff != nil:
				out = &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Error{Error: c.breakOff}}
				c.breakOff = nil
			case s.kicked != kicked:
				out = &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Error{Error: &brokerv1.Error{Code: brokerv1.Code_CODE_SUBSCRIPTION_MOVED, Message: "moved by a seek", Retryable: true}}}
			default:
				if d := next(t, s, me); d != nil {
					out = &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_Deliver{Deliver: &brokerv1.Deliver{Entries: []*brokerv1.DeliveredEntry{d}}}}
				} else {
					c.changed.Wait()
				}
			}
		}
		c.mu.Unlock()
		if out == nil {
			if b.life.Err() != nil {
				return status.Error(codes.Unavailable, "killed")
			}
			return io.EOF
		}
		if err := send(out); err != nil {
			return err
		}
		if out.GetDeliver() == nil {
			return nil
		}
	}
}

// next chooses the next entry for a consumer with permits.
func next(t *fakeTopic, s *fakeSub, me *consumer) *brokerv1.DeliveredEntry {
	if me.permits <= 0 {
		return nil
	}
	for i := s.low; i < len(t.entries); i++ {
		e := t.entries[i]
		var skip []*brokerv1.OffsetRange
		wanted := int64(0)
		count := uint32(0)
		for j := range e.span {
			o := e.offset + j
			if s.acked[o] || s.holder[o] != nil {
				skip = append(skip, &brokerv1.OffsetRange{First: j, Last: j})
				continue
			}
			s.holder[o] = me
			count = max(count, s.counts[o])
			wanted++
		}
		s.low = i + 1
		if wanted > 0 {
			me.permits -= wanted
			return &brokerv1.DeliveredEntry{
				Position: &brokerv1.Position{Ledger: 1, Entry: int64(i)}, Offset: e.offset, Span: uint32(e.span),
				RedeliveryCount: count, Skip: skip, Frame: e.frame,
			}
		}
	}
	return nil
}

func (b *broker) request(s *fakeSub, me *consumer, req *brokerv1.ConsumeRequest) *brokerv1.ConsumeResponse {
	switch k := req.GetKind().(type) {
	case *brokerv1.ConsumeRequest_Permits:
		me.permits += int64(k.Permits.GetMessages())
	case *brokerv1.ConsumeRequest_Ack:
		for _, r := range k.Ack.GetRanges() {
			for o := r.GetFirst(); o <= r.GetLast(); o++ {
				s.acked[o] = true
				delete(s.holder, o)
			}
		}
		if k.Ack.Cumulative != nil {
			for o := range k.Ack.GetCumulative() + 1 {
				s.acked[o] = true
				delete(s.holder, o)
			}
		}
		if k.Ack.GetRequestId() != 0 && !b.c.holdAck {
			return &brokerv1.ConsumeResponse{Kind: &brokerv1.ConsumeResponse_AckDone{AckDone: &brokerv1.AckDone{RequestId: k.Ack.GetRequestId()}}}
		}
	case *brokerv1.ConsumeRequest_Nack:
		s.low = 0
		for _, r := range k.Nack.GetRanges() {
			for o := r.GetFirst(); o <= r.GetLast(); o++ {
				if s.holder[o] == me {
					delete(s.holder, o)
					s.counts[o]++
				}
			}
		}
	}
	return nil
}
