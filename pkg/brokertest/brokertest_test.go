package brokertest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func publish(t *testing.T, p *client.Producer, from, to int) {
	t.Helper()
	receipts := make([]*client.Receipt, 0, to-from)
	for i := from; i < to; i++ {
		receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Value: fmt.Appendf(nil, "%d", i)}))
	}
	for i, r := range receipts {
		if _, err := r.Wait(t.Context()); err != nil {
			t.Fatalf("publish %d: %v", from+i, err)
		}
	}
}

// consume receives messages in order and acknowledges them, confirmed at the end. Those of this call may come again before
// that: a busy machine may make a broker suspect, and the topic move.
func consume(t *testing.T, c *client.Consumer, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		d, err := c.Receive(t.Context())
		if err != nil {
			t.Fatalf("receive %d: %v", i, err)
		}
		switch n, err := strconv.Atoi(string(d.Value)); {
		case err != nil || n < from || n > i:
			t.Fatalf("received %s, want %d", d.Value, i)
		case n < i:
			d.AckAsync()
			i--
			continue
		}
		if i+1 == to {
			err = d.Ack(t.Context())
		} else {
			d.AckAsync()
		}
		if err != nil {
			t.Fatalf("acknowledge %d: %v", i, err)
		}
	}
}

func producer(t *testing.T, k *client.Client, topic string, options ...client.ProducerOption) *client.Producer {
	t.Helper()
	p, err := k.Producer(t.Context(), topic, options...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func subscribe(t *testing.T, k *client.Client, topic, name string, options ...client.SubscribeOption) *client.Consumer {
	t.Helper()
	c, err := k.Subscribe(t.Context(), topic, name, append([]client.SubscribeOption{client.WithStart(client.Earliest())}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func ownerOf(t *testing.T, k *client.Client, topic string) string {
	t.Helper()
	d, err := k.Admin().DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: topic})
	if err != nil {
		t.Fatal(err)
	}
	return d.GetBrokerUrl()
}

func TestPublishAndConsume(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	p := producer(t, k, "orders")
	publish(t, p, 0, 1000)
	consume(t, subscribe(t, k, "orders", "s"), 0, 1000)
}

// What was acknowledged stays so, what was published is there, whoever serves the topic and whatever died.
func TestFailover(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(4), brokertest.WithBrokers(2))
	k := cluster.Client()
	p := producer(t, k, "orders", client.WithProducerName("p"), client.WithDedup())
	c := subscribe(t, k, "orders", "s")
	publish(t, p, 0, 500)
	consume(t, c, 0, 300)
	cluster.KillBroker(ownerOf(t, k, "orders"))
	publish(t, p, 500, 1000)
	consume(t, c, 300, 700)
	cluster.StopBookie(0)
	publish(t, p, 1000, 1500)
	next := cluster.StartBroker()
	old := ownerOf(t, k, "orders")
	for brokers := 0; brokers < 2; { // until the old one's watch has seen the new one too
		r, err := k.Admin().ListBrokers(t.Context(), &brokerv1.ListBrokersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		brokers = len(slices.DeleteFunc(r.GetBrokers(), func(b *brokerv1.BrokerInfo) bool { return b.GetUrl() != old && b.GetUrl() != next }))
	}
	cluster.StopBroker(old)
	publish(t, p, 1500, 2000)
	if now := ownerOf(t, k, "orders"); now != next {
		t.Errorf("served by %s after the only other broker stopped, want %s", now, next)
	}
	consume(t, c, 700, 2000)
}

func TestUnknownTopicIsRefusedWhereNothingCreatesTopics(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	off := false
	_, err := k.Admin().UpdateNamespace(t.Context(), &brokerv1.UpdateNamespaceRequest{
		Namespace: "public/default", Policies: &brokerv1.Policies{AutoCreateTopics: &off},
	})
	if err != nil {
		t.Fatal(err)
	}
	for { // until the broker's watch has seen it
		_, err = k.Producer(t.Context(), fmt.Sprintf("new-%d", time.Now().UnixNano()))
		if err != nil {
			break
		}
	}
	var failed *client.Error
	if !errors.As(err, &failed) || failed.Code != client.CodeNotFound {
		t.Fatalf("error %v, want not found", err)
	}
}

func TestADeletedTopicIsGoneWithItsSubscriptions(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBrokers(2))
	k := cluster.Client()
	admin := k.Admin()
	if _, err := admin.CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: "doomed", Partitions: 5}); err != nil {
		t.Fatal(err)
	}
	p := producer(t, k, "doomed")
	publish(t, p, 0, 100)
	_, err := admin.DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: "doomed"})
	var failed *client.Error
	if !errors.As(err, &failed) || failed.Code != client.CodeRefused {
		t.Fatalf("deleting a topic in use: %v, want a refusal", err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.CreateSubscription(t.Context(), &brokerv1.CreateSubscriptionRequest{Topic: "doomed-partition-1", Subscription: "s"}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.DeleteTopic(t.Context(), &brokerv1.DeleteTopicRequest{Topic: "doomed", Force: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: "doomed", Partitions: 5}); err != nil {
		t.Fatal(err)
	}
	subs, err := admin.ListSubscriptions(t.Context(), &brokerv1.ListSubscriptionsRequest{Topic: "doomed-partition-1"})
	if err != nil || len(subs.GetSubscriptions()) != 0 {
		t.Fatalf("the new topic of that name has subscriptions %v, %v", subs, err)
	}
	d, err := admin.DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: "doomed-partition-0"})
	if err != nil || d.GetNextOffset() != 0 {
		t.Fatalf("the new topic of that name holds %v, %v", d, err)
	}
}

func TestSeekDeliversAgain(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	publish(t, producer(t, k, "orders"), 0, 100)
	c := subscribe(t, k, "orders", "s")
	consume(t, c, 0, 100)
	if err := c.Seek(t.Context(), client.AtOffset(40)); err != nil {
		t.Fatal(err)
	}
	consume(t, c, 40, 100)
}

func TestSharedConsumersDivideTheWork(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	a := subscribe(t, k, "work", "s", client.WithType(client.Shared), client.WithPrefetch(10, 1<<20))
	b := subscribe(t, k, "work", "s", client.WithType(client.Shared), client.WithPrefetch(10, 1<<20))
	publish(t, producer(t, k, "work", client.WithoutBatching()), 0, 200)
	seen := map[string]int{}
	for len(seen) < 200 {
		for _, c := range []*client.Consumer{a, b} {
			batch, err := c.ReceiveBatch(t.Context(), 10, time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range batch {
				seen[string(d.Value)]++
				if err := d.Ack(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for v, n := range seen {
		if n != 1 {
			t.Errorf("message %s was delivered %d times", v, n)
		}
	}
}

func TestProbesAnswer(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	for _, path := range []string{"/livez", "/readyz", "/metrics"} {
		get(t, cluster.HTTP()+path)
	}
}

// get returns what a URL answers with 200.
func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s, %v", url, resp.Status, err)
	}
	return string(body)
}

func TestTwoOfThreeBookiesGone(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	k := cluster.Client()
	p := producer(t, k, "orders")
	publish(t, p, 0, 10)
	cluster.StopBookie(0)
	cluster.StopBookie(1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if id, err := p.Publish(ctx, &client.Message{Value: []byte("10")}); err == nil {
		t.Fatalf("message %v was acknowledged by one bookie of three", id)
	}
	cluster.StartBookie(0)
	cluster.StartBookie(1)
	publish(t, p, 11, 20) // recovers by itself
}
