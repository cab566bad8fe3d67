package integration

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	testTimeout  = 5 * time.Minute // of one test: far above what it takes on a busy machine, so that a hang has an end
	pollInterval = 10 * time.Millisecond
	topic        = "load"
)

// town is a cluster of real processes with a client, for one test. What fails, fails the test.
type town struct {
	*testing.T
	ctx    context.Context //nolint:containedctx // the test's, with an end
	c      *process.Cluster
	client *client.Client

	damaged *process.Process // a bookie that does not know what it had
}

// prepare makes a town in which nothing runs yet.
func prepare(t *testing.T, cfg process.Config) *town {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	t.Cleanup(cancel)
	cfg.Programs, cfg.Dir = programs(t), t.TempDir()
	if cfg.Brokers == 0 {
		cfg.Brokers = 2
	}
	// Small segments and ledgers make many of them; without housekeeping, what was consumed is still there to be read again.
	// How full this machine's disk is must not matter.
	cfg.BookieArgs = append([]string{"--segment-mib", "16", "--low-watermark", "0.98", "--high-watermark", "0.99"}, cfg.BookieArgs...)
	cfg.BrokerArgs = append([]string{"--roll-mib", "1", "--housekeeping-interval", "1h"}, cfg.BrokerArgs...)
	c, err := process.New(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &town{T: t, ctx: ctx, c: c}
	t.Cleanup(func() {
		c.Close()
		if t.Failed() {
			for _, p := range c.All() {
				t.Logf("the end of the log of %s:\n%s", p.Name, p.LogTail())
			}
		}
	})
	return w
}

// settle makes a town and starts all of it.
func settle(t *testing.T, cfg process.Config) *town {
	t.Helper()
	w := prepare(t, cfg)
	w.check(w.c.StartAll(w.ctx))
	w.connect()
	return w
}

func programs(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../bin")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"etcd", "bookie", "broker", "penstock"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Fatalf("these tests run the programs in %s, and %s is not there: run `make build` first", dir, name)
		}
	}
	return dir
}

func (w *town) connect() {
	w.Helper()
	k, err := client.Connect(w.ctx, w.c.URL())
	w.check(err)
	w.client = k
	w.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := k.Close(ctx); err != nil {
			w.Logf("close client: %v", err)
		}
	})
}

func (w *town) check(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// load publishes to a topic without end, and reads along.
func (w *town) load(change func(*workload.Config)) *workload.Run {
	w.Helper()
	cfg := workload.Config{Topic: topic, Subscription: "along", Rate: 1000, Size: 512, Dedup: true}
	if change != nil {
		change(&cfg)
	}
	run, err := workload.Start(w.ctx, w.client, cfg)
	w.check(err)
	w.Cleanup(func() { // where the test failed before its end
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		run.StopProducing()
		_, _ = run.Wait(ctx)
	})
	return run
}

// more waits until n more messages are acknowledged.
func (w *town) more(run *workload.Run, n uint64) {
	w.Helper()
	_, acked, _ := run.Counts()
	w.check(run.AwaitAcknowledged(w.ctx, acked+n))
}

// finish ends a run in which every message had to be acknowledged in the end.
func (w *town) finish(run *workload.Run) workload.Report {
	w.Helper()
	report := w.end(run)
	if report.Acknowledged != report.Sent || report.Received != report.Sent {
		w.Fatalf("%v\n%v", report, errors.Join(run.Failures()...))
	}
	return report
}

// end ends a run: nothing that the checker knows may be wrong, neither with what was delivered nor with what is stored.
func (w *town) end(run *workload.Run) workload.Report {
	w.Helper()
	run.StopProducing()
	report, err := run.Wait(w.ctx)
	w.judge(report, err)
	again, err := run.Reread(w.ctx)
	w.judge(again, err)
	w.audit()
	w.Logf("delivered: %v; stored: %v", report, again)
	return report
}

// judge fails the test with all that is known: a reading that has no end is mostly one from which something is missing.
func (w *town) judge(report workload.Report, err error) {
	w.Helper()
	if err := errors.Join(err, report.Err()); err != nil {
		w.Fatalf("%v\n%v", report, err)
	}
}

// strike does something to the cluster at a moment when messages are under way.
func (w *town) strike(run *workload.Run, do func() error) {
	w.Helper()
	w.until("messages are under way", func() bool {
		sent, acked, _ := run.Counts()
		return sent > acked
	})
	w.check(do())
}

// owner is the broker that serves the topic that is used if nothing else is said.
func (w *town) owner() *process.Process { w.Helper(); return w.ownerOf(topic) }

// ownerOf asks the topic's owner, as often as it takes, which broker that is.
func (w *town) ownerOf(topic string) *process.Process {
	w.Helper()
	p, _ := w.served(topic)
	return p
}

// served tells which broker serves a topic, and under which epoch.
func (w *town) served(topic string) (by *process.Process, epoch uint64) {
	w.Helper()
	t, err := w.client.Admin().DescribeTopic(w.ctx, &brokerv1.DescribeTopicRequest{Topic: topic})
	w.check(err)
	p := w.c.Broker(t.GetBrokerUrl())
	if p == nil {
		w.Fatal("the topic's owner is none of this town's brokers")
	}
	return p, t.GetEpoch()
}

// suspected tells whether another broker has taken p for dead, ever. On a machine that is busy enough it may be right, and topics
// move without anything that a test has done.
func (w *town) suspected(p *process.Process) bool {
	w.Helper()
	for _, b := range w.c.Brokers {
		log, err := os.ReadFile(b.Log)
		w.check(err)
		if b != p && bytes.Contains(log, []byte(`msg="peer is suspect" peer=`+p.Name+" ")) {
			return true
		}
	}
	return false
}

// ownedBy makes sure that p owns the topic and not other, which has only joined.
func (w *town) ownedBy(p, other *process.Process) {
	w.Helper()
	for w.owner() != p {
		if !w.suspected(p) {
			w.Fatal("the topic moved to a broker that only joined")
		}
		w.check(other.Kill())
		w.until("the topic is back", func() bool { return w.owner() == p })
		w.check(other.Start(w.ctx))
	}
}

// openLedger returns the ledger that the topic is being written to, and its bookies.
func (w *town) openLedger() (ledger *brokerv1.Ledger, bookies []*process.Process) {
	w.Helper()
	w.until("the topic has an open ledger", func() bool {
		all, err := w.client.Admin().ListLedgers(w.ctx, &brokerv1.ListLedgersRequest{Topic: topic})
		w.check(err)
		for _, l := range all.GetLedgers() {
			if l.GetState() == "OPEN" && len(l.GetFragments()) > 0 {
				ledger = l
			}
		}
		return ledger != nil
	})
	for _, s := range ledger.GetFragments()[len(ledger.GetFragments())-1].GetSlots() {
		bookies = append(bookies, w.c.Bookie(s.GetBookie()))
	}
	return ledger, bookies
}

// until polls a condition that the processes bring about.
func (w *town) until(what string, ok func() bool) {
	w.Helper()
	for !ok() {
		select {
		case <-w.ctx.Done():
			w.Fatalf("waited for: %s", what)
		case <-time.After(pollInterval):
		}
	}
}

// throughout polls a condition that must hold for a time.
func (w *town) throughout(d time.Duration, what string, ok func() bool) {
	w.Helper()
	for until := time.Now().Add(d); time.Now().Before(until); {
		if !ok() {
			w.Fatalf("did not hold: %s", what)
		}
		select {
		case <-w.ctx.Done():
			w.Fatal(w.ctx.Err())
		case <-time.After(pollInterval):
		}
	}
}

// stalls waits until publishing has stood still for a time. What was on its way may be acknowledged before.
func (w *town) stalls(run *workload.Run, d time.Duration) {
	w.Helper()
	_, last, _ := run.Counts()
	since := time.Now()
	w.until("nothing is acknowledged", func() bool {
		if _, now, _ := run.Counts(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > d
	})
}

func (w *town) metric(p *process.Process, name string) float64 {
	w.Helper()
	for { // one attempt has a second, which a busy machine may take
		v, err := p.Metric(w.ctx, name)
		if err == nil {
			return v
		}
		if w.ctx.Err() != nil || !p.Running() {
			w.Fatal(err)
		}
	}
}
