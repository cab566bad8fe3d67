package brokertest_test

import (
	"context"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// A broker ends, in good order or not, while what it is opening, or looks after, cannot go on for lack of bookies.
func TestABrokerEndsWithoutBookies(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"kill", "stop"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokers(2),
				brokertest.WithBrokerConfig(broker.Config{RollBytes: 4 << 10, HousekeepingEvery: 5 * time.Millisecond}))
			k := cluster.Client()
			publish(t, producer(t, k, "orders", client.WithProducerName("p"), client.WithDedup()), 0, 100)
			first := ownerOf(t, k, "orders")
			for i := range 3 {
				cluster.StopBookie(i)
			}
			cluster.KillBroker(first)
			next := cluster.BrokerURLs()[0]
			if next == first {
				next = cluster.BrokerURLs()[1]
			}
			// The last owner's ledger cannot be recovered now.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if d, err := k.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: "orders"}); err == nil {
				t.Fatalf("opened without bookies: %v", d)
			}
			if how == "kill" {
				cluster.KillBroker(next)
			} else {
				cluster.StopBroker(next)
			}
			for i := range 3 {
				cluster.StartBookie(i)
			}
		})
	}
}

// Whoever asks why nothing is delivered is answered while storage is away.
func TestWhyIsAnsweredWithoutBookies(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokerConfig(broker.Config{CacheBytes: 1}))
	k := cluster.Client()
	publish(t, producer(t, k, "orders"), 0, 100)
	if _, err := k.Admin().CreateSubscription(t.Context(), &brokerv1.CreateSubscriptionRequest{
		Topic: "orders", Subscription: "s", Start: &brokerv1.Start{At: &brokerv1.Start_Earliest{Earliest: true}},
	}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		cluster.StopBookie(i)
	}
	go func() { _, _ = k.Subscribe(t.Context(), "orders", "s") }()
	eventually(t, func() bool {
		d, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
		if err != nil {
			t.Fatal(err)
		}
		return d.GetSubscription().GetBacklog() == 100 && (d.GetWaitingReason() == "reading" || d.GetWaitingReason() == "read-failed")
	})
	all, err := k.Admin().ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: "orders"})
	if err != nil || len(all.GetSubscriptions()) != 1 {
		t.Fatal(all, err)
	}
	for i := range 3 {
		cluster.StartBookie(i)
	}
}

// A broker that is told to stop does not wait for bookies to answer what is on its way to them: it gives the hand-over
// up, and the next owner recovers.
func TestABrokerEndsWithUnansweredBatches(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokers(2))
	k := cluster.Client()
	p := producer(t, k, "orders", client.WithProducerName("p"), client.WithDedup())
	publish(t, p, 0, 100)
	for i := range 3 {
		cluster.StopBookie(i)
	}
	waiting := p.PublishAsync(t.Context(), &client.Message{Value: []byte("100")})
	select {
	case <-waiting.Done():
		t.Fatal("answered without bookies")
	case <-time.After(50 * time.Millisecond): // for the batch to be on its way
	}
	cluster.StopBroker(ownerOf(t, k, "orders"))
	for i := range 3 {
		cluster.StartBookie(i)
	}
	if _, err := waiting.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	consume(t, subscribe(t, k, "orders", "sub"), 0, 101)
}
