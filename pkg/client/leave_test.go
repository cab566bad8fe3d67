package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
)

// TestMovedWhileAway: a seek while a consumer has no stream is told to nobody, and yet what was delivered before it
// cannot be acknowledged afterwards.
func TestMovedWhileAway(t *testing.T) {
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
	old, err := s.ReceiveBatch(t.Context(), 3, time.Minute)
	if err != nil || len(old) != 3 {
		t.Fatal(old, err)
	}
	cl.mu.Lock()
	cl.sub(orders, "sub").seek(0)
	cl.owner, cl.epoch = cl.brokers[1], cl.epoch+1
	cl.mu.Unlock()
	cl.brokers[0].kill()
	again, err := s.Receive(t.Context())
	if err != nil || again.ID.Offset != 0 {
		t.Fatalf("got %+v, %v; want the first message again", again, err)
	}
	mustCode(t, old[2].Ack(t.Context()), client.CodeSubscriptionMoved)
	if n := cl.ackedOf(orders, "sub"); n != 0 {
		t.Fatalf("%d acknowledged", n)
	}
	if err := again.Ack(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestRetryableErrorIsNoSeek: a broker that ends a stream for another reason does not cost the consumer what it holds.
func TestRetryableErrorIsNoSeek(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	for i := range 2 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: value(i)}); err != nil {
			t.Fatal(err)
		}
	}
	s := subscribe(t, c)
	held, err := s.Receive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cl.mu.Lock()
	cl.breakOff = &brokerv1.Error{Code: brokerv1.Code_CODE_UNAVAILABLE, Message: "bookies are away", Retryable: true}
	cl.changed.Broadcast()
	cl.mu.Unlock()
	for cl.opened() < 2 {
		time.Sleep(time.Millisecond)
	}
	if err := held.Ack(t.Context()); err != nil {
		t.Fatal(err)
	}
	next, err := s.Receive(t.Context())
	if err != nil || next.ID.Offset != 1 {
		t.Fatalf("got %+v, %v; want the second message", next, err)
	}
}

// TestCloseWaitsForTheBroker: when Close returns, the broker has let the consumer, and the producer, go.
func TestCloseWaitsForTheBroker(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	for i := range 20 {
		p := openProducer(t, c)
		if _, err := p.Publish(t.Context(), &client.Message{Value: value(i)}); err != nil {
			t.Fatal(err)
		}
		s := subscribe(t, c, client.WithPrefetch(10, 1)) // more comes than it takes in
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := cl.connected(); n != 0 {
			t.Fatalf("%d streams are open after Close", n)
		}
	}
}

// TestCloseSaysWhatIsUnanswered: it ends with its context, and with what became of the messages.
func TestCloseSaysWhatIsUnanswered(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	cl.script(func(*brokerv1.Batch) verdict { return verdict{lose: true} })
	r := p.PublishAsync(t.Context(), &client.Message{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := c.Close(ctx)
	mustCode(t, err, client.CodeOutcomeUnknown)
	if !strings.Contains(err.Error(), "1 messages were sent and are not confirmed") {
		t.Fatal(err)
	}
	if _, err := r.Wait(t.Context()); !client.OutcomeUnknown(err) {
		t.Fatal(err)
	}
}

// TestCloseSaysWhatWasNotAcknowledged: a consumer that ended by itself does not pass for one whose acknowledgements are durable.
func TestCloseSaysWhatWasNotAcknowledged(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	p := openProducer(t, c)
	for i := range 3 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: value(i)}); err != nil {
			t.Fatal(err)
		}
	}
	cl.mu.Lock()
	cl.holdAck = true
	cl.mu.Unlock()
	s := subscribe(t, c)
	held, err := s.ReceiveBatch(t.Context(), 3, time.Minute)
	if err != nil || len(held) != 3 {
		t.Fatal(held, err)
	}
	held[0].AckAsync()
	cl.mu.Lock()
	cl.breakOff = &brokerv1.Error{Code: brokerv1.Code_CODE_NOT_FOUND, Message: "deleted"}
	cl.changed.Broadcast()
	cl.mu.Unlock()
	_, err = s.Receive(t.Context())
	mustCode(t, err, client.CodeNotFound)
	held[2].AckAsync()
	err = s.Close(t.Context())
	mustCode(t, err, client.CodeOutcomeUnknown)
	if !strings.Contains(err.Error(), "not confirmed: offsets 0, 2: ") {
		t.Fatal(err)
	}
}

// TestASeekThatIsNotAnsweredMayBeDone: a call that changes something and is repeated until its context ends does not pass for
// one that was never made.
func TestASeekThatIsNotAnsweredMayBeDone(t *testing.T) {
	t.Parallel()
	cl := newCluster(t, 1)
	c := connect(t, cl.urls())
	s := subscribe(t, c)
	cl.mu.Lock()
	cl.holdSeek = true
	cl.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Seek(ctx, client.Earliest()) }()
	cl.until("the subscription is moved", func() bool { return cl.sub(orders, "sub").kicked > 0 })
	cancel()
	err := <-done
	mustCode(t, err, client.CodeOutcomeUnknown)
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

// TestAChangeThatFindsNoBrokerIsNotDone: a connection that is never ready carried nothing.
func TestAChangeThatFindsNoBrokerIsNotDone(t *testing.T) {
	t.Parallel()
	dialed := make(chan struct{}, 16)
	c := connect(t, "penstock://brokers.example:7650", client.WithDialer(func(context.Context, string) (net.Conn, error) {
		here, there := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, there) }() // until the client closes its end
		select {
		case dialed <- struct{}{}:
		default:
		}
		return here, nil
	}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := c.Admin().CreateTopic(ctx, &brokerv1.CreateTopicRequest{Topic: orders})
		done <- err
	}()
	<-dialed
	cancel()
	if err := <-done; err == nil || client.OutcomeUnknown(err) || !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

// TestEveryBrokerReplaced: all brokers that a client has met are gone at once, under addresses that never come back;
// the name in its URL leads to others.
func TestEveryBrokerReplaced(t *testing.T) {
	t.Parallel()
	first, second := newCluster(t, 2), newCluster(t, 2)
	var resolved atomic.Pointer[string]
	resolved.Store(&first.brokers[0].addr)
	c := connect(t, "penstock://brokers.example:7650", client.WithDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		if strings.HasPrefix(addr, "brokers.example:") {
			addr = *resolved.Load()
		}
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}))
	p := openProducer(t, c)
	if _, err := p.Publish(t.Context(), &client.Message{}); err != nil {
		t.Fatal(err)
	}
	second.mu.Lock()
	second.epoch = 7
	second.mu.Unlock()
	resolved.Store(&second.brokers[1].addr)
	for _, b := range first.brokers {
		b.kill()
	}
	if _, err := p.Publish(t.Context(), &client.Message{}); err != nil {
		t.Fatal(err)
	}
}
