package brokertest_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

func unload(t *testing.T, k *client.Client, topic string) {
	t.Helper()
	if _, err := k.Admin().UnloadTopic(t.Context(), &brokerv1.UnloadTopicRequest{Topic: topic}); err != nil {
		t.Fatal(err)
	}
}

// The epoch of a bundle does not rise because one of its topics goes: a client that believed so would take every later
// answer for an old one.
func TestDeletingATopicInUseLeavesItsBundleInReach(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	p := producer(t, k, "doomed")
	publish(t, p, 0, 10)
	if _, err := k.Admin().DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: "doomed", Force: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := k.Producer(ctx, "doomed", client.WithProducerName("next")); err != nil {
		t.Fatal(err)
	}
	_, _ = p.Publish(ctx, &client.Message{Value: []byte("x")})
	if err := ctx.Err(); err != nil {
		t.Fatal(err)
	}
}

// Who is connected to a topic that is deleted by force is told so, and does not bring it back; who comes later may.
func TestADeletedTopicEndsWhoeverIsConnected(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	idle, busy, s := producer(t, k, "doomed"), producer(t, k, "doomed"), subscribe(t, k, "doomed", "s")
	publish(t, busy, 0, 10)
	for range 10 {
		if _, err := s.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	publishing := make(chan error, 1)
	go func() {
		for {
			if _, err := busy.Publish(t.Context(), &client.Message{Value: []byte("x")}); err != nil && !client.OutcomeUnknown(err) {
				publishing <- err
				return
			}
		}
	}()
	consuming := make(chan error, 1)
	go func() {
		for {
			if _, err := s.Receive(t.Context()); err != nil {
				consuming <- err
				return
			}
		}
	}()
	if _, err := k.Admin().DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: "doomed", Force: true}); err != nil {
		t.Fatal(err)
	}
	mustBeGone := func(what string, err error) {
		t.Helper()
		if e := (*client.Error)(nil); !asClient(err, &e) || e.Code != client.CodeNotFound || e.Retryable {
			t.Fatalf("%s: %v", what, err)
		}
	}
	mustBeGone("publishing", <-publishing)
	mustBeGone("consuming", <-consuming)
	for {
		_, err := idle.Publish(t.Context(), &client.Message{Value: []byte("x")})
		if err != nil && !client.OutcomeUnknown(err) {
			mustBeGone("publishing later", err)
			break
		}
	}
	_, err := k.Admin().DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: "doomed"})
	mustBeGone("describing", err)
	publish(t, producer(t, k, "doomed"), 0, 10)
}

// What was acknowledged and confirmed stays so, whatever else was on its way when the topic was closed.
func TestUnloadingKeepsConfirmedAcknowledgements(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	const n = 4000
	publish(t, producer(t, k, "work", client.WithoutBatching()), 0, n)
	c := subscribe(t, k, "work", "s", client.WithType(client.Shared), client.WithPrefetch(n, 64<<20))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	acked := map[string]bool{}
	var acks sync.WaitGroup
	for range 8 {
		acks.Go(func() {
			for {
				d, err := c.Receive(ctx)
				if err != nil {
					return
				}
				if d.ID.Offset%3 == 0 {
					continue // leaves holes
				}
				if d.Ack(ctx) == nil {
					mu.Lock()
					acked[string(d.Value)] = true
					mu.Unlock()
				}
			}
		})
	}
	for range 20 {
		unload(t, k, "work")
	}
	cancel()
	acks.Wait()
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	unload(t, k, "work")
	left, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "work", Subscription: "s"})
	if err != nil {
		t.Fatal(err)
	}
	again := subscribe(t, k, "work", "s", client.WithType(client.Shared), client.WithPrefetch(n, 64<<20))
	seen := map[string]bool{}
	for uint64(len(seen)) < left.GetSubscription().GetBacklog() {
		d, err := again.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if acked[string(d.Value)] {
			t.Fatalf("message %s was confirmed as acknowledged and came again", d.Value)
		}
		seen[string(d.Value)] = true
	}
}

// A subscription is forgotten whole, also while acknowledgements come in.
func TestDeletingASubscriptionInUse(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	const n = 600
	publish(t, producer(t, k, "work", client.WithoutBatching()), 0, n)
	for round := range 10 {
		name := fmt.Sprintf("s%d", round)
		c := subscribe(t, k, "work", name, client.WithType(client.Shared), client.WithPrefetch(n, 64<<20))
		some := make(chan struct{})
		var acks sync.WaitGroup
		acks.Go(func() {
			for i := 0; ; i++ {
				d, err := c.Receive(t.Context())
				if err != nil {
					return
				}
				if d.ID.Offset%3 > 0 {
					d.AckAsync()
				}
				if i == n/2 {
					close(some)
				}
			}
		})
		<-some
		_, err := k.Admin().DeleteSubscription(t.Context(), &brokerv1.DeleteSubscriptionRequest{Topic: "work", Subscription: name, Force: true})
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close(t.Context()) // it may have been told already that its subscription is gone
		acks.Wait()
		unload(t, k, "work")
		r, err := k.Admin().ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: "work"})
		if err != nil || len(r.GetSubscriptions()) != 0 {
			t.Fatalf("subscriptions left: %v, %v", r, err)
		}
		_, err = k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "work", Subscription: "other"})
		if e := (*client.Error)(nil); !asClient(err, &e) || e.Code != client.CodeNotFound {
			t.Fatalf("an unknown subscription: %v", err)
		}
	}
}
