package monitoring

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	testTimeout  = 4 * time.Minute
	pollInterval = 200 * time.Millisecond
	topic        = "orders"
	along        = "billing" // reads along
	behind       = "audit"   // is never read
)

// watched is a cluster under load, and the Prometheus that watches it.
type watched struct {
	*testing.T
	ctx context.Context //nolint:containedctx // the test's, with an end
	c   *process.Cluster
	s   *server
	k   *client.Client
	run *workload.Run
}

func watch(t *testing.T) *watched {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	t.Cleanup(cancel)
	dir := t.TempDir()
	c, err := process.New(ctx, process.Config{
		Programs: bin(t), Dir: dir, Bookies: 4, Brokers: 2,
		// Small segments and ledgers, so that they roll and go; how full this machine's disk is must not matter.
		BookieArgs: []string{"--segment-mib", "16", "--low-watermark", "0.98", "--high-watermark", "0.99", "--gc-interval", "1s"},
		BrokerArgs: []string{"--roll-mib", "1", "--housekeeping-interval", "1s", "--repair-delay", "2s", "--repair-mib", "1"},
	})
	check(t, err)
	t.Cleanup(func() {
		c.Close()
		if t.Failed() {
			for _, p := range c.All() {
				t.Logf("the end of the log of %s:\n%s", p.Name, p.LogTail())
			}
		}
	})
	check(t, c.StartAll(ctx))
	w := &watched{T: t, ctx: ctx, c: c, s: scrape(ctx, t, c, dir)}

	k, err := client.Connect(ctx, c.URL())
	check(t, err)
	w.k = k
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = k.Close(ctx) // brokers may be gone
	})
	_, err = k.Admin().CreateTopic(ctx, &brokerv1.CreateTopicRequest{Topic: topic})
	check(t, err)
	_, err = k.Admin().CreateSubscription(ctx, &brokerv1.CreateSubscriptionRequest{Topic: topic, Subscription: behind})
	check(t, err)
	w.run, err = workload.Start(ctx, k, workload.Config{Topic: topic, Subscription: along, Rate: 300, Size: 1024, Dedup: true})
	check(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		w.run.StopProducing()
		_, _ = w.run.Wait(ctx)
	})
	check(t, w.run.AwaitAcknowledged(ctx, 100))
	return w
}

// until polls a condition, which says what is missing from it.
func (w *watched) until(what string, missing func() string) {
	w.Helper()
	for {
		last := missing()
		if last == "" {
			return
		}
		select {
		case <-w.ctx.Done():
			w.Fatalf("waited for: %s: %s", what, last)
		case <-time.After(pollInterval):
		}
	}
}

// A cluster under load is watched: alerts fire when bookies are killed, and end when that is mended; and every query has data.
func TestWatched(t *testing.T) {
	t.Parallel()
	w := watch(t)
	w.fail()
	runPages(w.ctx, t, []string{
		"PENSTOCK_URL=" + w.c.URL(), "TOPIC=" + topic, "SUBSCRIPTION=" + behind, "NAMESPACE=public/default", "BOOKIE=" + w.c.Bookies[0].Name,
	})
	w.alerts()
	w.data()
}

// fail kills the broker that serves the topic, once Prometheus has seen both, and has the other one read what it has not in memory.
func (w *watched) fail() {
	w.Helper()
	w.until("brokers are scraped", func() string {
		n, err := w.s.samples(w.ctx, `count(penstock_broker_takeovers_total) == 2`)
		if n < 2 {
			return fmt.Sprintf("%d times, %v", n, err)
		}
		return ""
	})
	described, err := w.k.Admin().DescribeTopic(w.ctx, &brokerv1.DescribeTopicRequest{Topic: topic})
	check(w.T, err)
	b := w.c.Broker(described.GetBrokerUrl())
	check(w.T, b.Kill())
	_, acked, _ := w.run.Counts()
	check(w.T, w.run.AwaitAcknowledged(w.ctx, acked+100))
	r, err := w.k.Reader(w.ctx, topic, client.Earliest())
	check(w.T, err)
	for range 100 {
		_, err := r.Receive(w.ctx)
		check(w.T, err)
	}
	check(w.T, r.Close(w.ctx))
	check(w.T, b.Start(w.ctx))
}

// data waits until every query has returned data, and every series that is asked about was there.
func (w *watched) data() {
	w.Helper()
	open := map[query]bool{}
	for _, q := range slices.Concat(panels(w.T), asked(w.T)) {
		open[q] = true
		w.named(q, open)
	}
	for _, q := range alerts(w.T) {
		w.named(q, open)
	}
	w.Logf("%d queries and series", len(open))
	w.until("data of every query", func() string {
		for q := range open {
			n, err := w.s.samples(w.ctx, q.expr)
			if err != nil && w.ctx.Err() == nil {
				w.Fatalf("%s: %s: %v", q.where, q.expr, err)
			}
			if n > 0 {
				delete(open, q)
			}
		}
		var out []string
		for q := range open {
			out = append(out, q.where+": "+q.expr)
		}
		slices.Sort(out)
		return strings.Join(out, "\n")
	})
	w.show("Penstock / Overview")
	if n := w.s.rules(w.ctx, w.T); n != len(rules(w.T)) {
		w.Errorf("prometheus has %d rules, and the file %d", n, len(rules(w.T)))
	}
}

// show logs the newest data of a dashboard's queries.
func (w *watched) show(title string) {
	w.Helper()
	var out strings.Builder
	for _, q := range panels(w.T) {
		if !strings.HasPrefix(q.where, title+": ") {
			continue
		}
		all, err := w.s.since(w.ctx, q.expr)
		check(w.T, err)
		fmt.Fprintf(&out, "\n%s\n  %s\n", strings.TrimPrefix(q.where, title+": "), q.expr)
		for _, one := range all {
			newest := one.Values[len(one.Values)-1]
			fmt.Fprintf(&out, "    %v %v\n", newest[1], one.Metric)
		}
	}
	w.Logf("%s:%s", title, out.String())
}

// named adds what a query selects.
func (w *watched) named(q query, to map[query]bool) {
	w.Helper()
	selectors, err := w.s.selectors(w.ctx, q.expr)
	if err != nil {
		w.Fatalf("%s: %s: %v", q.where, q.expr, err)
	}
	for _, s := range selectors {
		to[query{q.where, s}] = true
	}
}

// alerts kills a bookie and another one, so that too few are left for repair to go on. One of them comes back: copies of what the other
// one had are made. Then that one is back, too.
func (w *watched) alerts() {
	w.Helper()
	first, second := w.c.Bookies[0], w.c.Bookies[1]
	w.fires()
	check(w.T, first.Kill())
	w.fires("PenstockDown " + first.Name)
	check(w.T, second.Kill())
	w.fires("PenstockDown "+first.Name, "PenstockDown "+second.Name, "PenstockTooFewBookies", "PenstockUnderReplicated")
	check(w.T, second.Start(w.ctx))
	w.fires("PenstockDown " + first.Name)
	check(w.T, first.Start(w.ctx))
	w.fires()
}

// slowness are alerts that fire or not, by how busy this machine is.
var slowness = []string{"PenstockSlowDisk", "PenstockPublishingStandsStill", "PenstockTopicsDoNotOpen", "PenstockBundleUnowned", "PenstockEtcdAway", "PenstockRepairStuck"}

// fires waits until these alerts fire and no others, such apart as may be the machine's own doing.
func (w *watched) fires(want ...string) {
	w.Helper()
	w.until(fmt.Sprintf("alerts %q", want), func() string {
		all, err := w.s.firing(w.ctx)
		if err != nil {
			return err.Error()
		}
		for name, a := range all {
			for _, text := range a.Annotations {
				if strings.Contains(text, "<no value>") || strings.Contains(text, "<error") {
					w.Errorf("%s says %q", name, text)
				}
			}
		}
		is := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(name string) bool {
			alert, _, _ := strings.Cut(name, " ")
			return slices.Contains(slowness, alert) && !slices.Contains(want, name)
		})
		slices.Sort(want)
		if !slices.Equal(is, want) {
			return fmt.Sprintf("fire: %q", is)
		}
		return ""
	})
}

// runPages runs the blocks that are marked for it against a cluster, where the names are given.
func runPages(ctx context.Context, t *testing.T, env []string) {
	t.Helper()
	n := 0
	for _, p := range pages(t) {
		for _, b := range p.blocks("sh run") {
			n++
			cmd := exec.CommandContext(ctx, "sh", "-euc", b)
			cmd.Env = append(env, "PATH="+bin(t)+":"+os.Getenv("PATH"), "HOME="+t.TempDir())
			if out, err := cmd.CombinedOutput(); err != nil || len(out) == 0 {
				t.Errorf("%s: %v\n%s\n%s", p.name, err, b, out)
			}
		}
	}
	if n < 10 {
		t.Errorf("the pages have %d blocks to run", n)
	}
}
