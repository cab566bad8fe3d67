package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const orders = "public/default/orders"

func connect(t *testing.T, url string, opts ...client.Option) *client.Client {
	t.Helper()
	c, err := client.Connect(t.Context(), url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 100*time.Millisecond)
		defer cancel()
		_ = c.Close(ctx) // a test that wants a clean close closes itself
	})
	return c
}

func openProducer(t *testing.T, c *client.Client, opts ...client.ProducerOption) *client.Producer {
	t.Helper()
	p, err := c.Producer(t.Context(), "orders", opts...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func subscribe(t *testing.T, c *client.Client, opts ...client.SubscribeOption) *client.Consumer {
	t.Helper()
	s, err := c.Subscribe(t.Context(), "orders", "sub", append([]client.SubscribeOption{client.WithStart(client.Earliest())}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func value(i int) []byte { return fmt.Appendf(nil, "message %d", i) }

func numbered(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = string(value(i))
	}
	return out
}

func mustCode(t *testing.T, err error, want client.Code) {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) || e.Code != want {
		t.Fatalf("got %v, want code %s", err, want)
	}
}

// TestPublishAndConsume is the way of a message, with each compression, batched and alone.
func TestPublishAndConsume(t *testing.T) {
	t.Parallel()
	for _, k := range []client.Compression{client.NoCompression, client.LZ4, client.Zlib, client.Zstd, client.Snappy} {
		t.Run(k.String(), func(t *testing.T) {
			t.Parallel()
			cl := newCluster(t, 1)
			c := connect(t, cl.urls())
			p := openProducer(t, c, client.WithCompression(k))
			event := time.UnixMilli(1700000000000)
			var receipts []*client.Receipt
			for i := range 100 {
				receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{
					Value: value(i), Key: "key\xff", OrderingKey: "o", Properties: map[string]string{"a": "b"}, EventTime: event,
				}))
			}
			if err := p.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			for i, r := range receipts {
				if id, err := r.Wait(t.Context()); err != nil || int(id.Offset) != i || id.Partition != client.NoPartition {
					t.Fatalf("message %d: %v, %v", i, id, err)
				}
			}
			s := subscribe(t, c)
			i := 0
			for d, err := range s.Messages(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				if string(d.Value) != string(value(i)) || d.Key != "key\xff" || d.OrderingKey != "o" || d.Properties["a"] != "b" ||
					!d.EventTime.Equal(event) || int(d.ID.Offset) != i || d.Topic != orders || d.Producer == "" {
					t.Fatalf("message %d came as %+v", i, d)
				}
				if err := d.Ack(t.Context()); err != nil {
					t.Fatal(err)
				}
				if i++; i == 100 {
					break
				}
			}
			if n := cl.ackedOf(orders, "sub"); n != 100 {
				t.Fatalf("%d acknowledged", n)
			}
			if err := c.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestOrderAcrossFailovers kills and moves the owner under load: with dedup everything is stored once and in
// order, and the consumer that runs all along sees it once and in order.
func TestOrderAcrossFailovers(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 3)
	c := connect(t, cl.urls())
	p := openProducer(t, c, client.WithProducerName("p"), client.WithDedup(), client.WithBatching(client.Batching{MaxMessages: 10}))
	s := subscribe(t, c)
	const n = 3000
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range n {
			switch i {
			case n / 4:
				cl.moveTo(cl.brokers[1]) // gracefully
			case n / 2:
				cl.moveTo(cl.brokers[2])
				cl.brokers[1].kill()
			case 3 * n / 4:
				b := cl.brokers[2] // dies, and is replaced a moment later
				b.kill()
				cl.moveTo(cl.brokers[0])
			}
			p.PublishAsync(t.Context(), &client.Message{Value: value(i)})
		}
		if err := p.Flush(t.Context()); err != nil {
			t.Error(err)
		}
	})
	for i := range n {
		d, err := s.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if string(d.Value) != string(value(i)) {
			t.Fatalf("received %q, want message %d", d.Value, i)
		}
		d.AckAsync()
	}
	wg.Wait()
	if got := cl.stored(orders); !slices.Equal(got, numbered(n)) {
		t.Fatalf("%d messages stored, first difference at %d", len(got), firstDifference(got, numbered(n)))
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := cl.ackedOf(orders, "sub"); got != n {
		t.Fatalf("closing left %d of %d acknowledged", got, n)
	}
}

func firstDifference(a, b []string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// TestStoppedOwner: the owner falls silent without breaking a connection, as a stopped process does, and another
// takes over. Publishing goes on there before the connection is given up.
func TestStoppedOwner(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls(), client.WithLiveness(time.Hour, time.Hour))
	p := openProducer(t, c)
	if _, err := p.Publish(t.Context(), &client.Message{Value: value(0)}); err != nil {
		t.Fatal(err)
	}
	cl.brokers[0].mute.Store(true)
	r := p.PublishAsync(t.Context(), &client.Message{Value: value(1)})
	cl.moveTo(cl.brokers[1])
	if _, err := r.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := cl.stored(orders); !slices.Equal(got, numbered(2)) {
		t.Fatalf("stored %q", got)
	}
}

// stuckConn is a connection whose other end takes no more, and breaks nothing, once that is set.
type stuckConn struct {
	net.Conn
	stuck *atomic.Bool
	freed chan struct{}
}

func (c *stuckConn) Write(b []byte) (int, error) {
	if c.stuck.Load() {
		<-c.freed
	}
	return c.Conn.Write(b)
}

// TestStuckConnection: what a producer sends gets nowhere, so that it waits in the middle of sending, and another broker
// takes over. Publishing goes on there before the connection is given up.
func TestStuckConnection(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	var stuck atomic.Bool
	freed := make(chan struct{})
	c := connect(t, cl.urls(), client.WithLiveness(time.Hour, time.Hour), client.WithDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		if err == nil && addr == cl.brokers[0].addr {
			conn = &stuckConn{Conn: conn, stuck: &stuck, freed: freed}
		}
		return conn, err
	}))
	p := openProducer(t, c)
	if _, err := p.Publish(t.Context(), &client.Message{Value: value(0)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(freed) }) // before the client is closed, which would wait for it
	stuck.Store(true)
	cl.brokers[0].mute.Store(true)
	const n = 200
	var receipts []*client.Receipt
	for range n { // more than a stream takes before it is written out
		receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Value: make([]byte, 4<<10)}))
	}
	cl.mu.Lock()
	cl.owner, cl.epoch = cl.brokers[1], cl.epoch+1
	cl.mu.Unlock()
	for _, r := range receipts {
		if _, err := r.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := cl.stored(orders); len(got) != n+1 {
		t.Fatalf("%d stored", len(got))
	}
}

// TestContextsEndWhileTheStreamIsFull: a broker takes nothing more, so that sending waits for it. The contexts of what is
// in that send, and of everything behind it, end all the same, and so does closing, before anything is answered.
func TestContextsEndWhileTheStreamIsFull(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls(), client.WithLiveness(time.Hour, time.Hour))
	p := openProducer(t, c, client.WithoutBatching())
	if _, err := p.Publish(t.Context(), &client.Message{Value: value(0)}); err != nil {
		t.Fatal(err)
	}
	cl.brokers[0].mute.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var receipts []*client.Receipt
	for range 40 { // more than flow control lets through
		receipts = append(receipts, p.PublishAsync(ctx, &client.Message{Value: make([]byte, 256<<10)}))
	}
	cancel()
	for _, r := range receipts {
		if _, err := r.Wait(t.Context()); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestStoppedOwnerOfConsumer: a consumer that owes nothing has only the connection's liveness to notice by.
func TestStoppedOwnerOfConsumer(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls(), client.WithLiveness(20*time.Millisecond, time.Hour)) // it does not wait for an answer
	s := subscribe(t, c)
	cl.brokers[0].mute.Store(true)
	// The stopped broker knows nothing of its replacement: it holds its streams.
	other := connect(t, cl.brokers[1].url())
	cl.mu.Lock()
	cl.owner, cl.epoch = cl.brokers[1], cl.epoch+1
	cl.mu.Unlock()
	p := openProducer(t, other)
	if _, err := p.Publish(t.Context(), &client.Message{Value: value(0)}); err != nil {
		t.Fatal(err)
	}
	if d, err := s.Receive(t.Context()); err != nil || string(d.Value) != string(value(0)) {
		t.Fatal(d, err)
	}
}

// TestLookupsWaitForTheNextOwner: whoever finds its owner dead has the others answer as soon as there is another.
func TestLookupsWaitForTheNextOwner(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	heir := cl.brokers[1]
	heir.waits = make(chan struct{}, 1)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	s := subscribe(t, c)
	cl.brokers[0].kill()
	r := p.PublishAsync(t.Context(), &client.Message{Value: value(0)})
	for range 2 { // of the producer or the consumer, which go on asking
		select {
		case <-heir.waits:
		case <-t.Context().Done():
			t.Fatal("nobody waits for the next owner")
		}
	}
	cl.moveTo(heir)
	if _, err := r.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d, err := s.Receive(t.Context()); err != nil || string(d.Value) != string(value(0)) {
		t.Fatal(d, err)
	}
}

// TestBrokerDown: nothing hangs longer than its context, and everything works again once the broker is back.
func TestBrokerDown(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	s := subscribe(t, c)
	b := cl.brokers[0]
	b.kill()
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := p.Publish(short, &client.Message{Value: []byte("never sent")})
	if err == nil || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("publishing to nobody gave %v", err)
	}
	if _, err := c.Producer(short, "orders"); err == nil {
		t.Fatal("a producer opened with the broker down")
	}
	if _, err := s.Receive(short); err == nil {
		t.Fatal("a message came from nowhere")
	}
	r := p.PublishAsync(t.Context(), &client.Message{Value: value(0)})
	b.start(t, b.addr)
	if _, err := r.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d, err := s.Receive(t.Context()); err != nil || string(d.Value) != string(value(0)) {
		t.Fatal(d, err)
	}
}

// TestNoLeaks opens and closes everything with the broker down; goleak looks at the end of the package's tests.
func TestNoLeaks(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 125 {
				c, err := client.Connect(t.Context(), "penstock://127.0.0.1:1")
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
				if _, err := c.Producer(ctx, "orders-partition-1"); err == nil {
					t.Error("a producer opened with the broker down")
				}
				if _, err := c.Subscribe(ctx, "orders-partition-1", "sub"); err == nil {
					t.Error("a consumer opened with the broker down")
				}
				cancel()
				if err := c.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestOutcomeUnknown: what was sent and not answered when the context ends may be stored.
func TestOutcomeUnknown(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	cl.script(func(*brokerv1.Batch) verdict { return verdict{silent: true} })
	p := openProducer(t, connect(t, cl.urls()))
	ctx, cancel := context.WithCancel(t.Context())
	r := p.PublishAsync(ctx, &client.Message{Value: value(0)})
	cl.until("stored", func() bool { return cl.topic(orders).next == 1 })
	cancel()
	_, err := r.Wait(t.Context())
	if !client.OutcomeUnknown(err) || !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

// TestRetriedFailure: a batch that failed for now is sent again, before what came after it.
func TestRetriedFailure(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	failures := 3
	cl.script(func(*brokerv1.Batch) verdict {
		if failures > 0 {
			failures--
			return verdict{fail: &brokerv1.Error{Code: brokerv1.Code_CODE_UNAVAILABLE, Message: "bookies away", Retryable: true}}
		}
		return verdict{}
	})
	p := openProducer(t, connect(t, cl.urls()), client.WithoutBatching())
	for i := range 10 {
		p.PublishAsync(t.Context(), &client.Message{Value: value(i)})
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := cl.stored(orders); !slices.Equal(got, numbered(10)) {
		t.Fatalf("stored %q", got)
	}
	cl.script(func(*brokerv1.Batch) verdict {
		return verdict{fail: &brokerv1.Error{Code: brokerv1.Code_CODE_BACKLOG_EXCEEDED, Message: "quota"}}
	})
	_, err := p.Publish(t.Context(), &client.Message{})
	mustCode(t, err, client.CodeBacklogExceeded)
}

// TestDuplicates: a producer that starts again with its own sequence ids learns what is stored already.
func TestDuplicates(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	publish := func(from, to int) (duplicates int) {
		p := openProducer(t, c, client.WithProducerName("p"), client.WithDedup())
		var receipts []*client.Receipt
		for i := from; i < to; i++ {
			receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Value: value(i), SequenceID: uint64(i + 1)}))
		}
		for _, r := range receipts {
			if _, err := r.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if r.Duplicate() {
				duplicates++
			}
		}
		if err := p.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		return duplicates
	}
	if n := publish(0, 10); n != 0 {
		t.Fatalf("%d duplicates at first", n)
	}
	if n := publish(5, 15); n != 5 {
		t.Fatalf("%d duplicates of 5", n)
	}
	if got := cl.stored(orders); !slices.Equal(got, numbered(15)) {
		t.Fatalf("stored %q", got)
	}
}

// TestFenced: a newer producer of the same name ends the older one.
func TestFenced(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	old := openProducer(t, c, client.WithProducerName("p"))
	openProducer(t, c, client.WithProducerName("p"))
	_, err := old.Publish(t.Context(), &client.Message{})
	if !client.OutcomeUnknown(err) {
		t.Fatalf("the message that met the fence: %v", err)
	}
	_, err = old.Publish(t.Context(), &client.Message{})
	mustCode(t, err, client.CodeFenced)
}

// TestPartitions routes by key as Pulsar's clients do, and without a key to every partition.
func TestPartitions(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	cl.partitions = 3
	c := connect(t, cl.urls())
	p := openProducer(t, c, client.WithoutBatching())
	s := subscribe(t, c)
	byKey := make(map[string]int)
	for i := range 30 {
		id, err := p.Publish(t.Context(), &client.Message{Value: value(i), Key: strconv.Itoa(i % 5)})
		if err != nil {
			t.Fatal(err)
		}
		if at, ok := byKey[strconv.Itoa(i%5)]; ok && at != id.Partition {
			t.Fatalf("key %d went to partitions %d and %d", i%5, at, id.Partition)
		}
		byKey[strconv.Itoa(i%5)] = id.Partition
	}
	used := make(map[int]bool)
	for range 30 {
		id, err := p.Publish(t.Context(), &client.Message{})
		if err != nil {
			t.Fatal(err)
		}
		used[id.Partition] = true
	}
	if len(used) != 3 {
		t.Fatalf("messages without a key went to %v", used)
	}
	seen := make(map[client.MessageID]bool)
	for range 60 {
		d, err := s.Receive(t.Context())
		if err != nil || seen[d.ID] {
			t.Fatal(d, err)
		}
		seen[d.ID] = true
		d.AckAsync()
	}
}

// TestAckSurvivesReconnect: an acknowledgement that was stored but not answered when the owner died is sent
// again, and its message is not handed out twice.
func TestAckSurvivesReconnect(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	for i := range 3 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: value(i)}); err != nil {
			t.Fatal(err)
		}
	}
	s := subscribe(t, c)
	var got []*client.Delivery
	for range 3 {
		d, err := s.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, d)
	}
	cl.mu.Lock()
	cl.holdAck = true
	cl.mu.Unlock()
	acked := make(chan error, 1)
	go func() { acked <- got[0].Ack(t.Context()) }()
	cl.until("the acknowledgement came", func() bool { return len(cl.sub(orders, "sub").acked) == 1 })
	cl.mu.Lock()
	clear(cl.sub(orders, "sub").acked) // it was not durable
	cl.holdAck = false
	cl.mu.Unlock()
	cl.moveTo(cl.brokers[1])
	cl.brokers[0].kill()
	if err := <-acked; err != nil {
		t.Fatal(err)
	}
	if err := got[1].Ack(t.Context()); err != nil { // held over the reconnect
		t.Fatal(err)
	}
	got[2].Nack(0) // comes again, as the application asked
	d, err := s.Receive(t.Context())
	if err != nil || string(d.Value) != string(value(2)) || d.RedeliveryCount == 0 {
		t.Fatal(d, err)
	}
	d.AckAsync()
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := cl.ackedOf(orders, "sub"); n != 3 {
		t.Fatalf("%d of 3 acknowledged", n)
	}
}

// TestSeek moves a subscription back: what comes is from there, what came before can't be acknowledged.
func TestSeek(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	for i := range 5 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: value(i)}); err != nil {
			t.Fatal(err)
		}
	}
	s := subscribe(t, c)
	old, err := s.Receive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Seek(t.Context(), client.AtOffset(2)); err != nil {
		t.Fatal(err)
	}
	mustCode(t, old.Ack(t.Context()), client.CodeSubscriptionMoved)
	for i := 2; i < 5; i++ {
		d, err := s.Receive(t.Context())
		if err != nil || string(d.Value) != string(value(i)) {
			t.Fatal(d, err)
		}
		if i == 4 {
			if err := d.AckCumulative(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := cl.ackedOf(orders, "sub"); n != 5 {
		t.Fatalf("%d of 5 acknowledged", n)
	}
	if err := s.Seek(t.Context(), client.Earliest()); err != nil {
		t.Fatal(err)
	}
	batch, err := s.ReceiveBatch(t.Context(), 5, time.Minute)
	if err != nil || len(batch) != 5 || string(batch[0].Value) != string(value(0)) {
		t.Fatal(batch, err)
	}
}

// TestReaderGoesOn: a reader takes up behind the last message it handed out.
func TestReaderGoesOn(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	r, err := c.Reader(t.Context(), "orders", client.Latest())
	if err != nil {
		t.Fatal(err)
	}
	// Published while the reader is away: it started at the end as it was then.
	cl.moveTo(cl.brokers[1])
	for i := range 6 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: value(i)}); err != nil {
			t.Fatal(err)
		}
		if i == 2 {
			if d, err := r.Receive(t.Context()); err != nil || string(d.Value) != string(value(0)) {
				t.Fatal(d, err)
			}
			cl.moveTo(cl.brokers[0])
		}
	}
	for i := 1; i < 6; i++ {
		d, err := r.Receive(t.Context())
		if err != nil || string(d.Value) != string(value(i)) {
			t.Fatal(d, err)
		}
		mustCode(t, d.Ack(t.Context()), client.CodeInvalid)
	}
}

// TestRefusals: what retrying cannot mend is an error at once, also as a consumer's second.
func TestRefusals(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	subscribe(t, c)
	_, err := c.Subscribe(t.Context(), "orders", "sub")
	mustCode(t, err, client.CodeConflict)
	_, err = c.Producer(t.Context(), "bad name/with/too/many")
	mustCode(t, err, client.CodeInvalid)
	_, err = c.Producer(t.Context(), "orders", client.WithDedup())
	mustCode(t, err, client.CodeInvalid)
	p := openProducer(t, c)
	_, err = p.Publish(t.Context(), &client.Message{Value: make([]byte, 1<<20+1)})
	mustCode(t, err, client.CodeInvalid)
	cl.mu.Lock()
	cl.fatal = &brokerv1.Error{Code: brokerv1.Code_CODE_NOT_FOUND, Message: "no such topic"}
	cl.mu.Unlock()
	_, err = c.Producer(t.Context(), "orders")
	mustCode(t, err, client.CodeNotFound)
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = p.Publish(t.Context(), &client.Message{})
	mustCode(t, err, client.CodeClosed)
}

// TestBackPressure: more than may be pending waits for credit, bounded by its context.
func TestBackPressure(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	cl.script(func(*brokerv1.Batch) verdict { return verdict{silent: true} })
	p := openProducer(t, connect(t, cl.urls()), client.WithMaxPending(2, 1<<20))
	for range 2 {
		p.PublishAsync(t.Context(), &client.Message{})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := p.PublishAsync(ctx, &client.Message{}).Wait(t.Context())
	mustCode(t, err, client.CodeTimeout)
}

// TestAdminFollowsOwner: calls that only the owner answers find it, through a redirect too.
func TestAdminFollowsOwner(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.brokers[1].url())
	r, err := c.Admin().ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: orders})
	if err != nil || len(r.GetSubscriptions()) != 0 {
		t.Fatal(r, err)
	}
	cl.moveTo(cl.brokers[1])
	cl.brokers[0].kill()
	if _, err = c.Admin().ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: orders}); err != nil {
		t.Fatal(err)
	}
	_, err = c.Admin().DeleteTenant(t.Context(), &brokerv1.DeleteTenantRequest{})
	mustCode(t, err, client.CodeInvalid) // not implemented there
}

// TestAdminLeavesASilentOwner: the owner has a call and falls silent, its connection does not break, and another takes
// its place: the call goes on there.
func TestAdminLeavesASilentOwner(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls())
	cl.brokers[0].listed = make(chan struct{}, 1)
	cl.brokers[0].mute.Store(true)
	done := make(chan error, 1)
	go func() {
		_, err := c.Admin().ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: orders})
		done <- err
	}()
	<-cl.brokers[0].listed
	cl.mu.Lock()
	cl.owner, cl.epoch = cl.brokers[1], cl.epoch+1
	cl.mu.Unlock()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestMeetsOtherBrokers: a client that was given one URL outlives the broker behind it.
func TestMeetsOtherBrokers(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.brokers[0].url())
	p := openProducer(t, c)
	for len(c.Brokers()) < 2 { // the list is asked for in the background
		if _, err := p.Publish(t.Context(), &client.Message{}); err != nil {
			t.Fatal(err)
		}
	}
	cl.moveTo(cl.brokers[1])
	cl.brokers[0].kill()
	if _, err := p.Publish(t.Context(), &client.Message{}); err != nil {
		t.Fatal(err)
	}
}

// TestReplacedOwnerInGoodFaith: the owner was replaced and does not know, as when it is cut off from the metadata
// store. It answers its client, who has nothing to receive there.
func TestReplacedOwnerInGoodFaith(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 2)
	c := connect(t, cl.urls(), client.WithLiveness(10*time.Millisecond, time.Minute))
	s := subscribe(t, c)
	cl.mu.Lock()
	cl.owner, cl.epoch = cl.brokers[1], cl.epoch+1 // nobody tells the streams of the first
	cl.brokers[0].stale = 1
	cl.mu.Unlock()
	p := openProducer(t, connect(t, cl.brokers[1].url()))
	if _, err := p.Publish(t.Context(), &client.Message{Value: value(0)}); err != nil {
		t.Fatal(err)
	}
	if d, err := s.Receive(t.Context()); err != nil || string(d.Value) != string(value(0)) {
		t.Fatal(d, err)
	}
}

// freezer dials connections whose reads stop on demand: what comes over a network that swallows everything.
type freezer struct {
	mu     sync.Mutex
	frozen chan struct{} // closed: the connections made so far are dead
	dials  int
}

type frozenConn struct {
	net.Conn
	dead chan struct{}
}

func (c *frozenConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	select {
	case <-c.dead:
		if err == nil { // swallow it, and what follows, until closed
			_, err = io.Copy(io.Discard, c.Conn)
		}
		return 0, fmt.Errorf("closed: %w", err)
	default:
	}
	return n, err
}

func (f *freezer) dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dials++
	return &frozenConn{Conn: c, dead: f.frozen}, nil
}

func (f *freezer) freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.frozen)
	f.frozen = make(chan struct{})
}

// TestDeadConnection: a connection that has silently died is given up and made again, also when nobody else
// serves the topic.
func TestDeadConnection(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	f := &freezer{frozen: make(chan struct{})}
	c := connect(t, cl.urls(), client.WithDialer(f.dial), client.WithLiveness(20*time.Millisecond, 100*time.Millisecond))
	s := subscribe(t, c, client.WithType(client.Shared))
	f.freeze()
	p := openProducer(t, connect(t, cl.urls()))
	if _, err := p.Publish(t.Context(), &client.Message{Value: value(0)}); err != nil {
		t.Fatal(err)
	}
	if d, err := s.Receive(t.Context()); err != nil || string(d.Value) != string(value(0)) {
		t.Fatal(d, err)
	}
}

// TestPrefetchBytes: a consumer that was let have many small messages holds large ones back that it has no room
// for, and yet gets the answer to an acknowledgement, which comes down the same stream.
func TestPrefetchBytes(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	p := openProducer(t, c, client.WithoutBatching())
	s := subscribe(t, c, client.WithPrefetch(1000, 1<<20))
	publish := func(n, size int) {
		for range n {
			p.PublishAsync(t.Context(), &client.Message{Value: make([]byte, size)})
		}
		if err := p.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	receive := func() *client.Delivery {
		d, err := s.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	const size, n = 600 << 10, 12
	for range 20 {
		publish(1, 1)
		receive()
	}
	publish(n, size)
	for i := range n {
		if got := s.Buffered(); got > 1<<20+size+64 {
			t.Fatalf("%d bytes are buffered", got)
		}
		d := receive()
		if i == n/2 {
			if err := d.Ack(t.Context()); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
}

// TestGapAtBroker: the broker waits for a batch that the client has given up. The producer is opened anew.
func TestGapAtBroker(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	opened := 0
	cl.onOpen = func() { opened++ }
	cl.script(func(*brokerv1.Batch) verdict {
		if opened == 1 {
			return verdict{fail: &brokerv1.Error{Code: brokerv1.Code_CODE_UNAVAILABLE, Message: "an earlier batch is missing", Retryable: true}}
		}
		return verdict{}
	})
	p := openProducer(t, connect(t, cl.urls()), client.WithoutBatching())
	for i := range 100 {
		p.PublishAsync(t.Context(), &client.Message{Value: value(i)})
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := cl.stored(orders); !slices.Equal(got, numbered(100)) {
		t.Fatalf("stored %q", got)
	}
}
