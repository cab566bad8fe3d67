package broker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// start brings a cluster of one broker up, and connects to it.
func start(t *testing.T) (*standalone.Cluster, *client.Client) {
	t.Helper()
	return startWith(t, broker.Config{})
}

func startWith(t *testing.T, cfg broker.Config) (*standalone.Cluster, *client.Client) {
	t.Helper()
	cluster, err := standalone.Start(t.Context(), standalone.Config{
		Dir: t.TempDir(), LeaseTTL: 2 * time.Second, Version: "test", SegmentSize: 16 << 20, UnsafeNoFsync: true, Broker: cfg,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Close(context.WithoutCancel(t.Context())) })
	k, err := client.Connect(t.Context(), cluster.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.Close(context.WithoutCancel(t.Context())) })
	return cluster, k
}

// A stream of before a topic was closed must not change what the topic's subscriptions have in the state log since: its
// cursor knows nothing of theirs.
func TestASubscriptionOfAClosedTopicTakesNoAcknowledgements(t *testing.T) {
	t.Parallel()
	cluster, k := start(t)
	p, err := k.Producer(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	admin := k.Admin()
	_, err = admin.CreateSubscription(t.Context(), &brokerv1.CreateSubscriptionRequest{Topic: "orders", Subscription: "s", Start: client.Earliest().Start()})
	if err != nil {
		t.Fatal(err)
	}
	ackers := make([]func(entry.Offset) error, 2)
	for i := range ackers {
		ack, leave, err := cluster.Brokers()[0].Acker(t.Context(), "orders", "s")
		if err != nil {
			t.Fatal(err)
		}
		defer leave()
		ackers[i] = func(o entry.Offset) error { return ack(t.Context(), o) }
		if err := ackers[i](entry.Offset(3 + 2*i)); err != nil {
			t.Fatal(err)
		}
		if _, err := admin.UnloadTopic(t.Context(), &brokerv1.UnloadTopicRequest{Topic: "orders"}); err != nil {
			t.Fatal(err)
		}
	}
	for i, ack := range ackers {
		if err := ack(7); !errors.Is(err, topic.ErrClosed) {
			t.Errorf("acknowledgement %d of before the topic was closed: %v, want %v", i, err, topic.ErrClosed)
		}
	}
	d, err := admin.DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
	if err != nil || d.GetSubscription().GetBacklog() != 8 {
		t.Fatalf("subscription %v, %v, want a backlog of 8", d, err)
	}
}

// What was found before a topic was deleted must not open it afterwards: messages would go where nobody finds them.
func TestADeletedTopicIsNotOpenedAgain(t *testing.T) {
	t.Parallel()
	cluster, k := start(t)
	admin := k.Admin()
	if _, err := admin.CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: "orders"}); err != nil {
		t.Fatal(err)
	}
	var open []func(context.Context) error
	for range 2 {
		if _, err := admin.DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: "orders"}); err != nil {
			t.Fatal(err)
		}
		o, err := cluster.Brokers()[0].Opener(t.Context(), "orders")
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, o)
		if _, err := admin.DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: "orders", Force: true}); err != nil {
			t.Fatal(err)
		}
		for i, o := range open {
			if err := o(t.Context()); err == nil {
				t.Fatalf("topic %d was opened after it was deleted", i)
			}
		}
		if _, err := admin.CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: "orders"}); err != nil {
			t.Fatal(err)
		}
		for i, o := range open {
			if err := o(t.Context()); err == nil {
				t.Fatalf("topic %d was opened after another one took its name", i)
			}
		}
	}
}

// A broker that hears late of the end of a deletion does not delete the topic that was created in the place of the other.
func TestALateDeletionSparesTheNextTopic(t *testing.T) {
	t.Parallel()
	cluster, k := start(t)
	const name = "public/default/orders"
	node := cluster.Brokers()[0]
	publish := func() *client.Producer {
		p, err := k.Producer(t.Context(), name)
		if err == nil {
			_, err = p.Publish(t.Context(), &client.Message{Value: []byte("x")})
		}
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := publish()
	gone, err := node.Record(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Admin().DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: name}); err != nil {
		t.Fatal(err)
	}
	publish()
	gone.Deleting = true
	if err := node.FinishDeletion(t.Context(), gone); !errors.Is(err, meta.ErrConflict) {
		t.Errorf("the deletion of a topic that is gone: %v", err)
	}
	r, err := k.Reader(t.Context(), name, client.Earliest())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := r.Receive(ctx); err != nil {
		t.Fatalf("what was stored is not there: %v", err)
	}
}

// A subscription that is made on a topic is not one of the topic that had its name before and is open still.
func TestATopicThatIsGoneIsNotServedInThePlaceOfTheNext(t *testing.T) {
	t.Parallel()
	cluster, k := start(t)
	const name = "public/default/orders"
	node := cluster.Brokers()[0]
	subscribe := func(sub string) {
		t.Helper()
		c, err := k.Subscribe(t.Context(), name, sub, client.WithStart(client.Earliest()))
		if err == nil {
			err = c.Close(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := k.Admin().CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: name}); err != nil {
		t.Fatal(err)
	}
	subscribe("first")
	if err := node.Replace(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	subscribe("s")
	if _, err := k.Admin().UnloadTopic(t.Context(), &brokerv1.UnloadTopicRequest{Topic: name}); err != nil {
		t.Fatal(err)
	}
	got, err := k.Admin().ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: name})
	if err != nil {
		t.Fatal(err)
	}
	if all := got.GetSubscriptions(); len(all) != 1 || all[0].GetName() != "s" {
		t.Fatalf("subscriptions %v", all)
	}
}

// What may be retained is not deleted while nobody can tell, since the namespace's record cannot be read.
func TestNothingIsTrimmedByPoliciesThatAreNotKnown(t *testing.T) {
	t.Parallel()
	cluster, k := startWith(t, broker.Config{RollBytes: 4 << 10, HousekeepingEvery: time.Hour})
	const name = "public/default/orders"
	p, err := k.Producer(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	describe := func() *brokerv1.DescribeTopicResponse {
		d, err := k.Admin().DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: name})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for len(describe().GetLedgers()) < 3 {
		if _, err := p.Publish(t.Context(), &client.Message{Value: make([]byte, 1024)}); err != nil {
			t.Fatal(err)
		}
	}
	node := cluster.Brokers()[0]
	for _, known := range []bool{false, true} {
		if err := node.Tidy(t.Context(), name, known); err != nil {
			t.Fatal(err)
		}
		if at := describe().GetEarliestOffset(); at > 0 != known {
			t.Errorf("policies known: %v, and the topic begins at offset %d", known, at)
		}
	}
}

// Whoever takes a topic over replays what was appended since the last snapshot of its producers: it must not wait for the rest of the
// housekeeping.
func TestSnapshotsDoNotWaitForTheHousekeeping(t *testing.T) {
	t.Parallel()
	cluster, k := startWith(t, broker.Config{HousekeepingEvery: time.Hour})
	p, err := k.Producer(t.Context(), "orders", client.WithProducerName("a"), client.WithDedup())
	if err != nil {
		t.Fatal(err)
	}
	for range 5000 {
		p.PublishAsync(t.Context(), &client.Message{Value: []byte("x")})
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for {
		due, err := cluster.Brokers()[0].SnapshotDue(t.Context(), "orders")
		if err != nil {
			t.Fatal(err)
		}
		if !due {
			return
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("the test ended first")
		}
	}
}
