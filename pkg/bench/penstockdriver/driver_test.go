package penstockdriver_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/bench/penstockdriver"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, cluster *brokertest.Cluster) *penstockdriver.Driver {
	t.Helper()
	d, err := penstockdriver.Open(t.Context(), cluster.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute) //nolint:usetesting // t.Context has ended
		defer cancel()
		if err := d.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return d
}

// Every shape of load comes back whole from a cluster, and leaves nothing.
func TestWorkloads(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	d, admin := open(t, cluster), cluster.Client().Admin()
	for name, s := range map[string]bench.Scenario{
		"batched":      {InFlight: 1000},
		"unbatched":    {InFlight: 100, Batching: bench.Batching{Messages: 1}, Rate: 500},
		"synchronous":  {InFlight: 1, Producers: 4, Ack: bench.AckAll},
		"partitions":   {Partitions: 3, Producers: 2, Keys: bench.KeysUniform, KeyCount: 50, InFlight: 500, Rate: 5000},
		"without keys": {Partitions: 3, Consumers: 2, InFlight: 500, Batching: bench.Batching{Messages: 10, Delay: time.Millisecond}, Ack: bench.AckOne},
		"fan-out":      {Topics: 2, Subscriptions: 3, Consumers: 2, InFlight: 200, Rate: 1000},
		"backlog":      {Backlog: 3000, Subscriptions: 2, InFlight: 1000},
		"live backlog": {Backlog: 3000, Live: true, Rate: 3000, InFlight: 1000},
		"not durable":  {Ack: bench.AckNone, InFlight: 500, Subscriptions: -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.WarmUp, s.Duration, s.Size = 50*time.Millisecond, 500*time.Millisecond, 200
			var r *bench.Result
			for r == nil || r.Phases[0].Published.Messages == 0 { // a machine may be too busy to get anywhere at first
				var err error
				r, err = bench.Run(t.Context(), d, s, bench.Options{Metrics: []string{cluster.HTTP() + "/metrics"}, Patience: time.Minute})
				if err != nil {
					t.Fatal(err)
				}
				s.Duration *= 2
			}
			if err := r.Err(); err != nil {
				t.Fatal(err)
			}
			v := r.Verified
			if v.Acknowledged == 0 || v.Received != v.Expected || v.Foreign != 0 {
				t.Fatalf("verified %+v", v)
			}
			if syncs := r.Phases[0].Syncs; syncs == nil || syncs.Count == 0 {
				t.Fatalf("syncs %+v", syncs)
			}
		})
	}
	t.Cleanup(func() {
		left, err := admin.ListTopics(context.Background(), &brokerv1.ListTopicsRequest{Namespace: "public/default"}) //nolint:usetesting // t.Context has ended
		if err != nil || len(left.GetTopics()) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	})
}

// A message that the broker refuses has that as its outcome.
func TestRefusedMessagesFail(t *testing.T) {
	t.Parallel()
	d := open(t, brokertest.Start(t))
	for _, inFlight := range []int{1, 3} {
		s := bench.Scenario{Size: 8 << 20, InFlight: inFlight, WarmUp: -1, Duration: 50 * time.Millisecond}
		r, err := &bench.Result{}, error(nil)
		for r.Verified.Sent == 0 && err == nil { // a machine may be too busy to publish anything in the time
			r, err = bench.Run(t.Context(), d, s, bench.Options{Patience: time.Minute})
			s.Duration *= 2
		}
		if err != nil {
			t.Fatal(err)
		}
		if v := r.Verified; v.Failed == 0 || v.Failed != v.Sent || len(r.Failures) == 0 || r.Err() == nil {
			t.Fatalf("%d in flight: verified %+v, %v", s.InFlight, v, r.Failures)
		}
	}
}

// Calls that a cluster refuses say why.
func TestRefusals(t *testing.T) {
	t.Parallel()
	d := open(t, brokertest.Start(t))
	if _, err := d.OpenProducer(t.Context(), "t", bench.ProducerConfig{Ack: "most", InFlight: 1}); !errors.Is(err, bench.ErrUnsupported) {
		t.Fatal(err)
	}
	if err := d.CreateTopic(t.Context(), "t", 2); err != nil {
		t.Fatal(err)
	}
	var failed *client.Error
	if err := d.CreateTopic(t.Context(), "t", 2); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if err := errors.Join(d.DeleteTopic(t.Context(), "t"), d.DeleteTopic(t.Context(), "t")); err != nil {
		t.Fatal(err)
	}
	if _, err := penstockdriver.Open(t.Context(), "http://x"); err == nil {
		t.Fatal("no URL of a cluster")
	}
}
