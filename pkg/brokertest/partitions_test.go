package brokertest_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// Messages of one key stay in order, and none is lost or stored twice, while partitions change hands.
func TestPartitionsUnderFailover(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokers(3),
		brokertest.WithBrokerConfig(broker.Config{HousekeepingEvery: time.Hour})) // all of it is counted at the end
	k := cluster.Client()
	const partitions, keys, n = 6, 11, 2200
	if _, err := k.Admin().CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: "orders", Partitions: partitions}); err != nil {
		t.Fatal(err)
	}
	p := producer(t, k, "orders", client.WithProducerName("p"), client.WithDedup())
	c := subscribe(t, k, "orders", "s", client.WithType(client.Failover))
	var receipts []*client.Receipt
	for i := range n {
		receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Key: fmt.Sprintf("k%d", i%keys), Value: fmt.Appendf(nil, "%d", i/keys)}))
		switch i {
		case n / 3:
			cluster.KillBroker(ownerOf(t, k, "orders-partition-0"))
		case 2 * n / 3:
			cluster.StopBroker(ownerOf(t, k, "orders-partition-1"))
		}
	}
	for i, r := range receipts {
		if _, err := r.Wait(t.Context()); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	next, left := map[string]int{}, n
	for left > 0 {
		d, err := c.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		d.AckAsync()
		switch at, err := strconv.Atoi(string(d.Value)); {
		case err != nil || at > next[d.Key]:
			t.Fatalf("key %s: received %s, want %d", d.Key, d.Value, next[d.Key])
		case at == next[d.Key]: // others come again, if a partition moves meanwhile
			next[d.Key]++
			left--
		}
	}
	for i := range partitions {
		topic := fmt.Sprintf("orders-partition-%d", i)
		if stored := len(stored(t, k, topic)); uint64(stored) != describe(t, k, topic).GetNextOffset() {
			t.Errorf("%s has %d messages up to offset %d", topic, stored, describe(t, k, topic).GetNextOffset())
		}
	}
}

func TestSeekToEveryKindOfPlace(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	p := producer(t, k, "orders", client.WithBatching(client.Batching{MaxMessages: 7}))
	publish(t, p, 0, 50)
	ids := make([]client.MessageID, 0, 10)
	var before time.Time
	for i := 50; i < 60; i++ {
		before = time.Now()
		id, err := p.Publish(t.Context(), &client.Message{Value: fmt.Appendf(nil, "%d", i)})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	c := subscribe(t, k, "orders", "s")
	consume(t, c, 0, 60)
	for what, to := range map[string]struct {
		p    client.Position
		from int
	}{
		"earliest": {client.Earliest(), 0}, "offset": {client.AtOffset(33), 33}, "position": {client.At(ids[4]), 54},
		"far past": {client.AtTime(time.Unix(0, 0)), 0}, "latest": {client.Latest(), 60}, "future": {client.AtTime(time.Now().Add(time.Hour)), 60},
	} {
		if err := c.Seek(t.Context(), to.p); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if to.from < 60 {
			consume(t, c, to.from, 60)
		}
		d, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
		if err != nil || d.GetSubscription().GetAckFloor() != 60 {
			t.Fatalf("%s: %v, %v", what, d, err)
		}
	}
	if err := c.Seek(t.Context(), client.AtTime(before)); err != nil {
		t.Fatal(err)
	}
	d, err := c.Receive(t.Context())
	if err != nil || d.ID.Offset > ids[9].Offset {
		t.Fatalf("%v, %v", d, err)
	}
	// Places that never were are the nearest that is; no place is none.
	position := func(ledger uint64, entry int64, batch int32) *brokerv1.Start {
		return &brokerv1.Start{At: &brokerv1.Start_Position{Position: &brokerv1.Position{Ledger: ledger, Entry: entry, Batch: batch}}}
	}
	ledger := uint64(ids[0].Position.Ledger)
	for what, to := range map[string]struct {
		at   *brokerv1.Start
		want uint64
	}{
		"unknown ledger": {position(1<<40, 3, 0), 60}, "negative entry": {position(ledger, -5, 0), 0},
		"far offset": {&brokerv1.Start{At: &brokerv1.Start_Offset{Offset: ^uint64(0)}}, 60},
	} {
		r, err := k.Admin().SeekSubscription(t.Context(), &brokerv1.SeekSubscriptionRequest{Topic: "orders", Subscription: "s", To: to.at})
		if err != nil || r.GetOffset() != to.want {
			t.Errorf("%s: %v, %v, want offset %d", what, r, err, to.want)
		}
	}
	for _, to := range []*brokerv1.Start{nil, {}} {
		_, err := k.Admin().SeekSubscription(t.Context(), &brokerv1.SeekSubscriptionRequest{Topic: "orders", Subscription: "s", To: to})
		if e := (*client.Error)(nil); !asClient(err, &e) || e.Code != client.CodeInvalid {
			t.Errorf("seek to nowhere: %v", err)
		}
	}
}
