package integration

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// series is a metric as docs/metrics.md has it, or as processes serve it.
type series struct {
	kind   string
	labels string // sorted, with commas
}

// documentedMetrics reads the tables of the page.
func documentedMetrics(t *testing.T) map[string]series {
	t.Helper()
	page, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]series{}
	for line := range strings.Lines(string(page)) {
		if !strings.HasPrefix(line, "| `penstock_") {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 4 {
			t.Fatalf("a line of docs/metrics.md has %d cells, want 4: %s", len(cells), line)
		}
		var labels []string
		for label := range strings.SplitSeq(cells[2], ",") {
			if label = strings.Trim(label, " `"); label != "" {
				labels = append(labels, label)
			}
		}
		slices.Sort(labels)
		name := strings.Trim(cells[0], " `")
		if _, twice := found[name]; twice {
			t.Errorf("docs/metrics.md has %s twice", name)
		}
		found[name] = series{kind: strings.TrimSpace(cells[1]), labels: strings.Join(labels, ",")}
	}
	return found
}

// scrape reads a page of a process, and lints it.
func scrape(ctx context.Context, t *testing.T, url string) map[string]*dto.MetricFamily {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s, %v: %s", url, resp.Status, err, text)
	}
	problems, err := promlint.New(bytes.NewReader(text)).Lint()
	if err != nil {
		t.Fatalf("lint %s: %v", url, err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s: %s", url, p.Metric, p.Text)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		t.Fatalf("parse %s: %v", url, err)
	}
	return families
}

// Every metric that a cluster under load serves is in docs/metrics.md, with its type and labels, and every one that is there is served.
// `promtool check metrics` would find nothing: the rules are its library's.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	defer http.DefaultClient.CloseIdleConnections()
	w := settle(t, process.Config{})
	run := w.load(nil)
	_, err := w.client.Admin().CreateSubscription(w.ctx, &brokerv1.CreateSubscriptionRequest{Topic: topic, Subscription: "behind"})
	w.check(err)
	w.more(run, 1000)
	before := w.owner()
	w.check(before.Kill()) // another broker recovers what it had
	w.more(run, 1000)
	w.check(before.Start(w.ctx))
	documented := documentedMetrics(t)
	served := map[string]series{}
	missing := func() []string {
		var names []string
		for name := range documented {
			if _, ok := served[name]; !ok {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}
	look := func() bool {
		clear(served)
		for _, url := range metricPages(w) {
			for name, family := range scrape(w.ctx, t, url) {
				if !strings.HasPrefix(name, "penstock_") {
					continue
				}
				labels := map[string]bool{}
				for _, m := range family.GetMetric() {
					for _, l := range m.GetLabel() {
						labels[l.GetName()] = true
					}
				}
				served[name] = series{
					kind: strings.ToLower(family.GetType().String()), labels: strings.Join(slices.Sorted(maps.Keys(labels)), ","),
				}
			}
		}
		return len(missing()) == 0 || t.Failed()
	}
	// Some are there from the first look at the topics on, which brokers take every few seconds.
	for range 600 {
		if look() {
			break
		}
		w.more(run, 100)
	}
	for _, name := range missing() {
		t.Errorf("docs/metrics.md has %s, and no process serves it", name)
	}
	for _, name := range slices.Sorted(maps.Keys(served)) {
		want, ok := documented[name]
		switch {
		case !ok:
			t.Errorf("%s is served, and docs/metrics.md does not have it: | `%s` | %s | %s |", name, name, served[name].kind, served[name].labels)
		case want != served[name]:
			t.Errorf("%s is served as %+v, docs/metrics.md has %+v", name, served[name], want)
		}
	}
	w.finish(run)
}

func metricPages(w *town) []string {
	var urls []string
	for _, p := range w.c.Bookies {
		urls = append(urls, fmt.Sprintf("http://%s/metrics", p.HTTP))
	}
	for _, p := range w.c.Brokers {
		urls = append(urls, fmt.Sprintf("http://%s/metrics", p.HTTP), fmt.Sprintf("http://%s/metrics/topics?top=5", p.HTTP))
	}
	return urls
}
