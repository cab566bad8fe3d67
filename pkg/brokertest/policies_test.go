package brokertest_test

import (
	"bytes"
	"context"
	"errors"
	"regexp"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// tidyCluster looks after its topics all the time, and rolls ledgers after a few messages.
func tidyCluster(t *testing.T, policies *brokerv1.Policies) *client.Client {
	t.Helper()
	return policedCluster(t, policies, 5*time.Millisecond)
}

func policedCluster(t *testing.T, policies *brokerv1.Policies, every time.Duration) *client.Client {
	t.Helper()
	k := brokertest.Start(t, brokertest.WithBrokerConfig(broker.Config{RollBytes: 4 << 10, HousekeepingEvery: every})).Client()
	if policies != nil {
		_, err := k.Admin().UpdateNamespace(t.Context(), &brokerv1.UpdateNamespaceRequest{Namespace: "public/default", Policies: policies})
		if err != nil {
			t.Fatal(err)
		}
	}
	return k
}

// eventually looks until ok, which other goroutines bring about, or until the test's time is up.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for !ok() {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func fill(t *testing.T, p *client.Producer, n int) {
	t.Helper()
	for range n {
		if _, err := p.Publish(t.Context(), &client.Message{Value: bytes.Repeat([]byte("x"), 1024)}); err != nil {
			t.Fatal(err)
		}
	}
}

func describe(t *testing.T, k *client.Client, topic string) *brokerv1.DescribeTopicResponse {
	t.Helper()
	d, err := k.Admin().DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: topic})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestWhatEveryoneAcknowledgedIsTrimmed(t *testing.T) {
	t.Parallel()
	k := tidyCluster(t, nil)
	fast, slow := subscribe(t, k, "orders", "fast"), subscribe(t, k, "orders", "slow")
	fill(t, producer(t, k, "orders"), 40)
	receive := func(c *client.Consumer, n int) {
		t.Helper()
		for range n {
			d, err := c.Receive(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Ack(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	receive(fast, 40)
	receive(slow, 20)
	eventually(t, func() bool { return describe(t, k, "orders").GetEarliestOffset() > 0 })
	if d := describe(t, k, "orders"); d.GetEarliestOffset() > 20 {
		t.Fatalf("trimmed below offset %d, one subscription stands at 20", d.GetEarliestOffset())
	}
	receive(slow, 20) // what it had not acknowledged is still there
	eventually(t, func() bool { return describe(t, k, "orders").GetEarliestOffset() > 20 })
}

func TestRetentionKeepsWhatIsAcknowledged(t *testing.T) {
	t.Parallel()
	k := tidyCluster(t, &brokerv1.Policies{RetentionTime: durationpb.New(time.Hour)})
	fill(t, producer(t, k, "kept"), 20) // no subscription: acknowledged by everyone there is
	fill(t, producer(t, k, "kept"), 20)
	if d := describe(t, k, "kept"); d.GetEarliestOffset() != 0 {
		t.Fatalf("trimmed below offset %d", d.GetEarliestOffset())
	}
	r, err := k.Reader(t.Context(), "kept", client.Earliest())
	if err != nil {
		t.Fatal(err)
	}
	if d, err := r.Receive(t.Context()); err != nil || d.ID.Offset != 0 {
		t.Fatalf("read %v, %v", d, err)
	}
}

func TestExpiredMessagesAreAcknowledgedUnread(t *testing.T) {
	t.Parallel()
	k := tidyCluster(t, &brokerv1.Policies{MessageTtl: durationpb.New(10 * time.Millisecond)})
	if _, err := k.Admin().CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: "news"}); err != nil {
		t.Fatal(err)
	}
	_, err := k.Admin().CreateSubscription(t.Context(), &brokerv1.CreateSubscriptionRequest{Topic: "news", Subscription: "s", Start: client.Earliest().Start()})
	if err != nil {
		t.Fatal(err)
	}
	fill(t, producer(t, k, "news"), 10)
	eventually(t, func() bool {
		d, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "news", Subscription: "s"})
		if err != nil {
			t.Fatal(err)
		}
		return d.GetSubscription().GetBacklog() == 0
	})
}

func TestBacklogQuota(t *testing.T) {
	t.Parallel()
	quota := uint64(8 << 10)
	for name, action := range map[string]brokerv1.BacklogAction{
		"refuse": brokerv1.BacklogAction_BACKLOG_ACTION_REFUSE,
		"evict":  brokerv1.BacklogAction_BACKLOG_ACTION_EVICT,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			every := 5 * time.Millisecond
			if action == brokerv1.BacklogAction_BACKLOG_ACTION_REFUSE {
				every = time.Hour // refusing does not wait for housekeeping
			}
			k := policedCluster(t, &brokerv1.Policies{BacklogBytes: &quota, BacklogAction: action}, every)
			s := subscribe(t, k, "jobs", "s")
			p := producer(t, k, "jobs")
			if action == brokerv1.BacklogAction_BACKLOG_ACTION_EVICT {
				fill(t, p, 40)
				eventually(t, func() bool {
					d, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "jobs", Subscription: "s"})
					if err != nil {
						t.Fatal(err)
					}
					return d.GetSubscription().GetAckFloor() >= 20
				})
				return
			}
			var failed *client.Error
			published := 0
			for ; ; published++ {
				_, err := p.Publish(t.Context(), &client.Message{Value: bytes.Repeat([]byte("x"), 1024)})
				if err != nil {
					if !errors.As(err, &failed) || failed.Code != client.CodeBacklogExceeded {
						t.Fatalf("publish beyond the quota: %v", err)
					}
					break
				}
			}
			if published > 16 {
				t.Fatalf("%d KiB were taken, the quota is %d bytes", published, quota)
			}
			for range published { // consuming makes room
				d, err := s.Receive(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := d.Ack(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, func() bool {
				_, err := p.Publish(t.Context(), &client.Message{Value: []byte("y")})
				return err == nil
			})
		})
	}
}

func TestAckLevels(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	k := cluster.Client()
	for name, level := range map[string]client.AckLevel{
		"none": client.AckNone, "one": client.AckOne, "quorum": client.AckQuorum, "all": client.AckAll,
	} {
		publish(t, producer(t, k, "level-"+name, client.WithAckLevel(level)), 0, 100)
		consume(t, subscribe(t, k, "level-"+name, "s"), 0, 100)
	}
	// With one of three gone, quorum goes on and all cannot be met.
	quorum, all := producer(t, k, "level-quorum"), producer(t, k, "level-all", client.WithAckLevel(client.AckAll))
	cluster.StopBookie(2)
	publish(t, quorum, 100, 110)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if id, err := all.Publish(ctx, &client.Message{Value: []byte("100")}); err == nil {
		t.Fatalf("%v was acknowledged as on all three with one gone", id)
	}
	cluster.StartBookie(2)
}

// What cannot be opened is counted, so that somebody can be told.
func TestFailuresToOpenAreCounted(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	k := cluster.Client()
	cluster.StopBookie(1)
	cluster.StopBookie(2)
	ctx, cancel := context.WithCancel(t.Context())
	opening := make(chan error, 1)
	go func() {
		_, err := k.Producer(ctx, "stuck")
		opening <- err
	}()
	counted := regexp.MustCompile(`(?m)^penstock_broker_open_failures_total\{[^}]*\} [1-9]`)
	eventually(t, func() bool { return counted.MatchString(get(t, cluster.HTTP()+"/metrics")) })
	cancel()
	if err := <-opening; err == nil {
		t.Fatal("a producer was opened with one bookie of three")
	}
}

func TestNackedMessagesComeAgain(t *testing.T) {
	t.Parallel()
	k := brokertest.Start(t).Client()
	publish(t, producer(t, k, "work", client.WithoutBatching()), 0, 3)
	s := subscribe(t, k, "work", "s", client.WithType(client.Shared))
	seen := map[string]int{}
	for len(seen) < 3 || seen["1"] < 2 {
		d, err := s.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		v := string(d.Value)
		seen[v]++
		if v == "1" && seen[v] == 1 {
			d.Nack(time.Millisecond)
			continue
		}
		if v == "1" && d.RedeliveryCount != 1 {
			t.Errorf("redelivery count %d, want 1", d.RedeliveryCount)
		}
		if err := d.Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
