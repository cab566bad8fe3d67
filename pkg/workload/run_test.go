package workload_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Whole runs over a cluster: with partitions, shared among consumers, until told to stop.
func TestRuns(t *testing.T) {
	t.Parallel()
	c := brokertest.Start(t)
	k := c.Client()
	for name, cfg := range map[string]workload.Config{
		"exclusive":   {Topic: "a", Subscription: "s", Messages: 2000, Dedup: true, Size: 200},
		"shared":      {Topic: "b", Subscription: "s", Type: client.Shared, Consumers: 3, Producers: 2, Messages: 1000},
		"partitioned": {Topic: "c", Subscription: "s", Producers: 2, Messages: 1000, Dedup: true},
		"unread":      {Topic: "d", Messages: 1000},
		"until told":  {Topic: "e", Subscription: "s", Rate: 5000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "partitioned" {
				if _, err := k.Admin().CreateTopic(t.Context(), &brokerv1.CreateTopicRequest{Topic: cfg.Topic, Partitions: 3}); err != nil {
					t.Fatal(err)
				}
			}
			run, err := workload.Start(t.Context(), k, cfg)
			if err != nil {
				t.Fatal(err)
			}
			watch := run.Watch()
			if err := run.AwaitAcknowledged(t.Context(), 500); err != nil {
				t.Fatal(err)
			}
			if cfg.Messages == 0 {
				run.StopProducing()
			}
			report, err := run.Wait(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if watch.Stop() == 0 {
				t.Error("no stretch without an acknowledgement")
			}
			want := max(uint64(max(cfg.Producers, 1))*cfg.Messages, 500)
			if report.Err() != nil || report.Acknowledged < want || report.Sent != report.Acknowledged || cfg.Subscription != "" && report.Received != report.Sent {
				t.Fatalf("%v\n%v", report, report.Err())
			}
			again, err := run.Reread(t.Context())
			if err != nil || again.Err() != nil || again.Received != report.Sent {
				t.Fatalf("read again: %v\n%v\n%v", again, again.Err(), err)
			}
		})
	}
}

// A run whose context ends tells what there was, and why it is not all.
func TestRunCutShort(t *testing.T) {
	t.Parallel()
	c := brokertest.Start(t)
	k := c.Client()
	run, err := workload.Start(t.Context(), k, workload.Config{Topic: "cut", Subscription: "s", Rate: 1000, Timeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	watch, deliveries := run.Watch(), run.WatchDeliveries()
	if err := run.AwaitReceived(t.Context(), 50); err != nil {
		t.Fatal(err)
	}
	c.StopBookie(0)
	_, acked, _ := run.Counts()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	report, err := run.Wait(ctx)
	if err == nil || report.Acknowledged < acked || report.Err() != nil {
		t.Fatalf("%v, %v, %v", report, report.Err(), err)
	}
	if _, err := run.Reread(t.Context()); err == nil || run.Ended() {
		t.Fatal("read again although the run has no end")
	}
	if d := watch.Stop(); d < 200*time.Millisecond { // the life of a message that is not acknowledged any more
		t.Errorf("it stood still for %v", d)
	}
	d := deliveries.Stop()
	if _, longest := deliveries.Longest(); d < 200*time.Millisecond || longest != d {
		t.Errorf("nothing was delivered for %v, or for %v", d, longest)
	}
	c.StartBookie(0)
}

// Producers that are replaced all the time, while the topic's owner is, publish each message once; another subscription
// reads all of it, sought back in between.
func TestAttempts(t *testing.T) {
	t.Parallel()
	// What everybody has read is not to be trimmed before it is read again.
	c := brokertest.Start(t, brokertest.WithBrokers(2), brokertest.WithBrokerConfig(broker.Config{HousekeepingEvery: time.Hour}))
	k := c.Client()
	run, err := workload.Start(t.Context(), k, workload.Config{
		Topic: "again", Subscription: "s", Producers: 2, Messages: 1500, Dedup: true, Attempt: 5 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := k.Subscribe(t.Context(), "again", "other", client.WithStart(client.Earliest()))
	if err != nil {
		t.Fatal(err)
	}
	received := 0
	followed := make(chan error, 1)
	go func() {
		report, err := run.Follow(t.Context(), func(ctx context.Context) (*client.Delivery, error) {
			if received++; received == 500 {
				if err := s.Seek(ctx, client.Earliest()); err != nil {
					return nil, err
				}
			}
			d, err := s.Receive(ctx)
			if err == nil {
				d.AckAsync()
			}
			return d, err
		})
		if err == nil {
			err = report.Err()
		}
		if err == nil && (report.Received != 3000 || report.Redelivered < 400) {
			err = fmt.Errorf("%v", report)
		}
		followed <- err
	}()
	for n := uint64(500); n <= 2500; n += 500 {
		if err := run.AwaitAcknowledged(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if _, err := k.Admin().UnloadTopic(t.Context(), &brokerv1.UnloadTopicRequest{Topic: "again"}); err != nil {
			t.Logf("unload: %v", err)
		}
	}
	report, err := run.Wait(t.Context())
	if err != nil || report.Err() != nil || report.Acknowledged != 3000 || report.Received != 3000 {
		t.Fatalf("%v\n%v\n%v", report, report.Err(), err)
	}
	if report.Deduplicated == 0 {
		t.Log("nothing in doubt was published again")
	}
	if err := <-followed; err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again, err := run.Reread(t.Context()); err != nil || again.Err() != nil || again.Received != 3000 {
		t.Fatalf("%v\n%v\n%v", again, again.Err(), err)
	}
}
