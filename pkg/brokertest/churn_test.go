package brokertest_test

import (
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// stored reads a topic from its beginning to its end.
func stored(t *testing.T, k *client.Client, topic string) []string {
	t.Helper()
	d := describe(t, k, topic)
	r, err := k.Reader(t.Context(), topic, client.Earliest())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close(t.Context()) }()
	var out []string
	for o := d.GetEarliestOffset(); o < d.GetNextOffset(); {
		m, err := r.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		o = uint64(m.ID.Offset) + 1
		out = append(out, string(m.Value))
	}
	return out
}

// trouble moves a topic about while work is under way.
func trouble(t *testing.T, cluster *brokertest.Cluster, k *client.Client, topic string, kill bool, progress <-chan struct{}) {
	t.Helper()
	for round := range 3 {
		for range 10 {
			<-progress
			<-progress
			unload(t, k, topic)
		}
		<-progress
		<-progress
		owner := ownerOf(t, k, topic)
		if kill && round%2 == 0 {
			cluster.KillBroker(owner)
		} else {
			cluster.StopBroker(owner)
		}
	}
}

func TestChurnLosesNothing(t *testing.T) {
	t.Parallel()
	for _, dedup := range []bool{true, false} {
		t.Run(fmt.Sprintf("dedup=%v", dedup), func(t *testing.T) {
			t.Parallel()
			cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokers(4))
			k := cluster.Client()
			options := []client.ProducerOption{client.WithProducerName("p"), client.WithBatching(client.Batching{MaxMessages: 5})}
			if dedup {
				options = append(options, client.WithDedup())
			}
			p := producer(t, k, "orders", options...)
			// Somebody has to want the messages: if this takes longer than housekeeping waits, they were trimmed otherwise.
			if _, err := k.Admin().CreateSubscription(t.Context(), &brokerv1.CreateSubscriptionRequest{
				Topic: "orders", Subscription: "keeper", Start: client.Earliest().Start(),
			}); err != nil {
				t.Fatal(err)
			}
			stop := make(chan struct{})
			var work sync.WaitGroup
			sent := 0
			progress := make(chan struct{})
			work.Go(func() {
				defer close(progress)
				for {
					select {
					case <-stop:
						return
					case progress <- struct{}{}:
					default:
					}
					var receipts []*client.Receipt
					for range 50 {
						receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Value: fmt.Appendf(nil, "%d", sent)}))
						sent++
					}
					for _, r := range receipts {
						if _, err := r.Wait(t.Context()); err != nil {
							t.Error(err)
							return
						}
					}
				}
			})
			trouble(t, cluster, k, "orders", dedup, progress)
			close(stop)
			work.Wait()
			next, twice := 0, 0
			for i, v := range stored(t, k, "orders") {
				n, err := strconv.Atoi(v)
				switch {
				case err != nil:
					t.Fatal(err)
				case n == next:
					next++
				case n < next && !dedup:
					twice++
				default:
					t.Fatalf("message %d at place %d, want %d", n, i, next)
				}
			}
			if next != sent {
				t.Fatalf("%d messages of %d are stored", next, sent)
			}
			t.Logf("%d sent, %d twice", sent, twice)
		})
	}
}

// Whatever is trimmed, expired from deduplication's memory, or moved meanwhile: a subscription gets every message, in order.
func TestTrimmingUnderChurn(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokers(4),
		brokertest.WithBrokerConfig(broker.Config{RollBytes: 2 << 10, HousekeepingEvery: 3 * time.Millisecond}))
	k := cluster.Client()
	p := producer(t, k, "orders", client.WithProducerName("p"), client.WithDedup(), client.WithBatching(client.Batching{MaxMessages: 5}))
	c := subscribe(t, k, "orders", "s")
	stop, progress := make(chan struct{}), make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for n, more := 0, true; more; {
			var receipts []*client.Receipt
			for range 50 {
				receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Value: fmt.Appendf(nil, "%d", n)}))
				n++
			}
			select {
			case <-stop:
				more = false
				receipts = append(receipts, p.PublishAsync(t.Context(), &client.Message{Value: []byte("end")}))
			default:
			}
			for _, r := range receipts {
				if _, err := r.Wait(t.Context()); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	work.Go(func() {
		defer close(progress)
		for next := 0; ; {
			d, err := c.Receive(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if string(d.Value) == "end" && next%50 == 0 {
				return
			}
			n, err := strconv.Atoi(string(d.Value))
			if err != nil || n > next {
				t.Errorf("received %s, want %d", d.Value, next)
				return
			}
			if n == next {
				next++
			}
			if n%10 == 9 {
				if err := d.AckCumulative(t.Context()); err != nil {
					t.Error(err)
				}
			} else if n%3 == 0 {
				d.AckAsync()
			}
			select {
			case progress <- struct{}{}:
			default:
			}
		}
	})
	trouble(t, cluster, k, "orders", true, progress)
	close(stop)
	work.Wait()
	if describe(t, k, "orders").GetEarliestOffset() == 0 {
		t.Error("nothing was trimmed")
	}
}

// Streams that come and go leave nothing behind in the broker.
func TestStreamsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k := cluster.Client()
	p := producer(t, k, "orders")
	publish(t, p, 0, 10)
	round := func() {
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				q, err := k.Producer(t.Context(), "orders")
				if err != nil {
					t.Error(err)
					return
				}
				c, err := k.Subscribe(t.Context(), "orders", fmt.Sprintf("s%d", i%4), client.WithType(client.Shared), client.WithStart(client.Earliest()))
				if err != nil {
					t.Error(err)
					return
				}
				r, err := k.Reader(t.Context(), "orders", client.Earliest())
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := r.Receive(t.Context()); err != nil {
					t.Error(err)
				}
				for _, err := range []error{q.Close(t.Context()), c.Close(t.Context()), r.Close(t.Context())} {
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
	}
	for range 10 {
		round()
	}
	eventually(t, func() bool {
		d := describe(t, k, "orders")
		return d.GetConsumers() == 0 && len(d.GetProducers()) == 1
	})
}

func TestRedeliverySurvivesFailover(t *testing.T) {
	t.Parallel()
	for _, kind := range []client.SubscriptionType{client.Shared, client.Failover, client.Exclusive} {
		t.Run(strconv.Itoa(int(kind)), func(t *testing.T) {
			t.Parallel()
			cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokers(2))
			k := cluster.Client()
			const n = 300
			c := subscribe(t, k, "orders", "s", client.WithType(kind))
			// A busy machine may move the topic meanwhile.
			publish(t, producer(t, k, "orders", client.WithoutBatching(), client.WithProducerName("p"), client.WithDedup()), 0, n)
			confirmed := map[string]bool{}
			count := map[string]uint32{}
			for i := 0; len(confirmed) < n; i++ {
				d, err := c.Receive(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				v := string(d.Value)
				if confirmed[v] {
					t.Fatalf("%s came again after its acknowledgement was confirmed", v)
				}
				switch {
				case d.ID.Offset%7 == 3 && d.RedeliveryCount == 0 && count[v] < 3:
					count[v]++
					d.Nack(5 * time.Millisecond)
				default:
					if err := d.Ack(t.Context()); err != nil {
						t.Fatal(err)
					}
					confirmed[v] = true
				}
				switch i {
				case 100:
					cluster.KillBroker(ownerOf(t, k, "orders"))
				case 200:
					unload(t, k, "orders")
				}
			}
			s, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
			if err != nil || s.GetSubscription().GetBacklog() != 0 {
				t.Fatalf("%v, %v", s, err)
			}
		})
	}
}
