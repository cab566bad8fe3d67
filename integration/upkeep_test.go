package integration

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// unharmed fails the test if a producer or a consumer was told of an error.
func (w *town) unharmed(run *workload.Run) {
	w.Helper()
	if err := errors.Join(run.Failures()...); err != nil {
		w.Fatalf("clients were told of errors: %v", err)
	}
}

// SIGTERM of the owner under load, there and back: it hands its bundles over. Nobody is told of an error, and nothing is
// delivered twice that was acknowledged.
func TestDrainedBroker(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	run := w.load(nil)
	w.more(run, 1000)
	for range 2 {
		owner := w.owner()
		watch := run.Watch()
		w.strike(run, func() error { return owner.Terminate(w.ctx) })
		w.more(run, 500)
		w.Logf("publish gap after SIGTERM of the owner: %v", watch.Stop())
		if w.owner() == owner {
			t.Fatal("a broker that has stopped owns the topic")
		}
		if code := owner.ExitCode(); code != 0 {
			t.Errorf("exit code %d", code)
		}
		w.check(owner.Start(w.ctx))
	}
	w.unharmed(run)
	w.finish(run)
}

// Every bookie and every broker is restarted, one after the other, under load.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	run := w.load(nil)
	shared := w.load(func(c *workload.Config) {
		c.Topic, c.Rate, c.Type, c.Consumers = "shared", 300, client.Shared, 2
	})
	watch := run.Watch()
	for _, p := range slices.Concat(w.c.Bookies, w.c.Brokers) {
		w.more(run, 300)
		w.check(p.Terminate(w.ctx))
		w.more(run, 300)
		w.check(p.Start(w.ctx))
	}
	w.more(run, 500)
	w.Logf("longest publish gap of a rolling restart: %v", watch.Stop())
	w.unharmed(run)
	w.unharmed(shared)
	w.finish(run)
	w.finish(shared)
}

// namesEtcd tries what cannot be done without etcd: whoever waits for it must be told what it waited for, after a while.
func (w *town) namesEtcd(what string, try func(context.Context) error) {
	w.Helper()
	var err error
	w.until(what+" is told of etcd", func() bool {
		ctx, cancel := context.WithTimeout(w.ctx, 3*time.Second)
		defer cancel()
		if err = try(ctx); err == nil {
			w.Fatalf("%s is had without etcd", what)
		}
		return strings.Contains(err.Error(), "etcd")
	})
	w.Logf("what %s is told: %v", what, err)
}

// etcd is away for longer than any lease lasts. Open ledgers go on, with another bookie lost meanwhile; a roll and a new
// topic wait, and say so; everything is taken up again when etcd is back.
func TestEtcdAway(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{Etcds: 3})
	run := w.load(nil)
	w.more(run, 1000)
	_, err := w.client.Admin().CreateTopic(w.ctx, &brokerv1.CreateTopicRequest{Topic: "not-opened-yet"})
	w.check(err)
	owner := w.owner()
	rolled := func() float64 { return w.metric(owner, "penstock_chain_rolls_total") }
	before := rolled()
	for _, p := range w.c.Etcds {
		w.check(p.Kill())
	}
	away := time.Now()
	watch := run.Watch()
	w.namesEtcd("a new topic", func(ctx context.Context) error {
		_, err := w.client.Admin().CreateTopic(ctx, &brokerv1.CreateTopicRequest{Topic: "created-without-etcd"})
		return err
	})
	w.namesEtcd("the producer of a new topic", func(ctx context.Context) error {
		_, err := w.client.Producer(ctx, "created-by-producing")
		return err
	})
	w.namesEtcd("the producer of a topic that is not open", func(ctx context.Context) error {
		_, err := w.client.Producer(ctx, "not-opened-yet")
		return err
	})
	w.namesEtcd("the consumer of a topic that is not open", func(ctx context.Context) error {
		_, err := w.client.Subscribe(ctx, "not-opened-yet", "s")
		return err
	})
	w.check(w.c.Bookies[0].Kill()) // two of three are enough for what is open
	for time.Since(away) < 10*time.Second {
		w.more(run, 500)
	}
	w.Logf("longest publish gap without etcd: %v", watch.Stop())
	if rolled() != before {
		t.Error("a ledger rolled without etcd")
	}
	if w.metric(owner, "penstock_chain_roll_retries_total") == 0 {
		t.Error("no roll waited: the load was too small to want one")
	}
	short, end := context.WithTimeout(w.ctx, 100*time.Millisecond)
	defer end()
	if owner.WaitReady(short) == nil {
		t.Error("a broker without etcd calls itself ready")
	}
	for _, p := range w.c.Etcds {
		w.check(p.Launch())
	}
	w.check(w.c.StartAll(w.ctx))
	w.until("the ledger rolls", func() bool { return rolled() > before })
	_, err = w.client.Admin().CreateTopic(w.ctx, &brokerv1.CreateTopicRequest{Topic: "created-with-etcd"})
	w.check(err)
	w.more(run, 500)
	w.unharmed(run)
	w.finish(run)
}
