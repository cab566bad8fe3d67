package brokertest_test

import (
	"fmt"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// Whoever closed a consumer, or a producer, is not in the way of what comes next.
func TestClosedClientsAreGone(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k := cluster.Client()
	for i := range 10 {
		topic := fmt.Sprint("orders", i)
		p := producer(t, k, topic)
		publish(t, p, 0, 100)
		s, err := k.Subscribe(t.Context(), topic, "sub", client.WithStart(client.Earliest()))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.ReceiveBatch(t.Context(), 10, time.Minute); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := k.Admin().DeleteSubscription(t.Context(), &brokerv1.DeleteSubscriptionRequest{Topic: topic, Subscription: "sub"}); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := k.Admin().DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: topic}); err != nil {
			t.Fatal(err)
		}
	}
}

// A seek while the consumer is on its way to another broker is not undone by acknowledgements of what it held.
func TestASeekDuringAMoveIsNotAcknowledgedAway(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k, other := cluster.Client(), cluster.Client()
	publish(t, producer(t, k, "orders"), 0, 3)
	s, err := k.Subscribe(t.Context(), "orders", "sub", client.WithStart(client.Earliest()))
	if err != nil {
		t.Fatal(err)
	}
	held, err := s.ReceiveBatch(t.Context(), 3, time.Minute)
	if err != nil || len(held) != 3 {
		t.Fatal(held, err)
	}
	if _, err := other.Admin().UnloadTopic(t.Context(), &brokerv1.UnloadTopicRequest{Topic: "orders"}); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Admin().SeekSubscription(t.Context(), &brokerv1.SeekSubscriptionRequest{
		Topic: "orders", Subscription: "sub", To: client.Earliest().Start(),
	}); err != nil {
		t.Fatal(err)
	}
	for want := range 3 {
		d, err := s.Receive(t.Context())
		if err != nil || int(d.ID.Offset) != want {
			t.Fatalf("got %+v, %v; want message %d again", d, err, want)
		}
	}
	for _, d := range held {
		if err := d.Ack(t.Context()); err == nil {
			t.Fatal("acknowledged what was delivered before the seek")
		}
	}
}
