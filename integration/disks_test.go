package integration

import (
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// village makes a town of which only the first bookies run at first; the others are disks to come. Their data is in the
// directories that it returns.
func village(t *testing.T, cfg process.Config, running int) (*town, []string) {
	t.Helper()
	var dirs []string
	for range cfg.Bookies {
		dirs = append(dirs, t.TempDir())
	}
	cfg.BookieDir = func(i int) string { return dirs[i] }
	w := prepare(t, cfg)
	first := slices.Concat(w.c.Etcds, w.c.Bookies[:running], w.c.Brokers)
	for _, p := range first {
		w.check(p.Launch())
	}
	for _, p := range first {
		w.check(p.WaitReady(w.ctx))
	}
	w.connect()
	return w, dirs
}

// destroy kills bookies, all at once, and removes what they stored.
func (w *town) destroy(dirs []string, bookies ...int) error {
	for _, i := range bookies {
		if err := w.c.Bookies[i].Kill(); err != nil {
			return err
		}
	}
	for _, i := range bookies {
		if err := os.RemoveAll(dirs[i]); err != nil {
			return err
		}
	}
	return nil
}

// A disk is lost for good in the middle of writing, and the owner of the topic dies with it, so that the end of the open
// ledger is found without that disk. A new bookie takes its place. Nothing acknowledged at quorum is lost.
func TestLostDisk(t *testing.T) {
	t.Parallel()
	w, dirs := village(t, process.Config{Bookies: 4}, 3)
	run := w.load(nil)
	w.more(run, 1500)
	owner := w.owner()
	watch := run.Watch()
	w.strike(run, func() error {
		if err := w.destroy(dirs, 1); err != nil {
			return err
		}
		return owner.Kill()
	})
	w.more(run, 500)
	w.Logf("publish gap after a disk and the owner are lost: %v", watch.Stop())
	w.check(w.c.Bookies[3].Start(w.ctx))
	w.until("the new bookie stores the topic's messages", func() bool {
		_, now := w.openLedger()
		return slices.Contains(now, w.c.Bookies[3])
	})
	w.more(run, 500)
	w.finish(run)
}

// Of messages acknowledged at `all`, two disks of three may be lost: the third has every one. What is in closed ledgers
// can be read; new bookies take what is published next.
func TestTwoLostDisksAtAll(t *testing.T) {
	t.Parallel()
	w, dirs := village(t, process.Config{Bookies: 5, Brokers: 1}, 3)
	run := w.load(func(c *workload.Config) {
		c.ProducerOptions = []client.ProducerOption{client.WithAckLevel(client.AckAll)}
		c.Subscription = ""
	})
	w.more(run, 2000)
	run.StopProducing()
	report, err := run.Wait(w.ctx)
	w.check(err)
	if report.Acknowledged != report.Sent {
		t.Fatalf("%v", report)
	}
	w.check(w.c.Brokers[0].Terminate(w.ctx)) // it closes its ledgers
	w.check(w.destroy(dirs, 0, 1))
	for _, p := range []*process.Process{w.c.Bookies[3], w.c.Bookies[4], w.c.Brokers[0]} {
		w.check(p.Start(w.ctx))
	}
	again, err := run.Reread(w.ctx)
	w.judge(again, err)
	if again.Received != report.Sent {
		t.Fatalf("%v", again)
	}
	other := w.load(func(c *workload.Config) { c.Topic = "other" })
	w.more(other, 200)
	w.finish(other)
}

const twoZones = "public/zones"

// Each message is on disks of two zones. One zone is lost for good, with the owner of the topic: everything acknowledged
// is there, nothing more is acknowledged, and publishing goes on once the zone has bookies again.
func TestLostZone(t *testing.T) {
	t.Parallel()
	w, dirs := village(t, process.Config{Bookies: 6, BookieFlags: func(i int) []string {
		return []string{"--zone", [...]string{"east", "west", "east", "west", "west", "west"}[i]}
	}}, 4)
	_, err := w.client.Admin().CreateNamespace(w.ctx, &brokerv1.CreateNamespaceRequest{Namespace: twoZones, Policies: &brokerv1.Policies{
		Ensemble: proto.Uint32(4), WriteQuorum: proto.Uint32(4), AckQuorum: proto.Uint32(2), MinZones: proto.Uint32(2),
	}})
	w.check(err)
	const zoned = twoZones + "/load"
	run := w.load(func(c *workload.Config) { c.Topic = zoned })
	w.more(run, 1000)
	owner := w.ownerOf(zoned)
	w.strike(run, func() error {
		if err := w.destroy(dirs, 1, 3); err != nil {
			return err
		}
		return owner.Kill()
	})
	w.stalls(run, 2*time.Second)
	_, before, _ := run.Counts()
	w.fewLedgers()
	w.readAll(zoned, before)
	for _, p := range []*process.Process{w.c.Bookies[4], w.c.Bookies[5], owner} {
		w.check(p.Start(w.ctx))
	}
	w.more(run, 500)
	w.finish(run)
}

// readAll reads so many messages from a topic's beginning.
func (w *town) readAll(topic string, n uint64) {
	w.Helper()
	r, err := w.client.Reader(w.ctx, topic, client.Earliest())
	w.check(err)
	for i := range n {
		d, err := r.Receive(w.ctx)
		if err != nil {
			w.Fatalf("read message %d of %d: %v", i, n, err)
		}
		if _, err := workload.ParseBody(d.Value); err != nil {
			w.Fatal(err)
		}
	}
	w.check(r.Close(w.ctx))
}
