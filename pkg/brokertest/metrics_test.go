package brokertest_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

func page(t *testing.T, url string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	check(t, err)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	check(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	check(t, err)
	return resp.StatusCode, string(text)
}

// linesOf returns the series of a metric.
func linesOf(body, name string) []string {
	var found []string
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, name+"{") || strings.HasPrefix(line, name+" ") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// The page of topics has the busiest ones, and the subscriptions furthest behind, as many as are asked for; what it leaves out is counted.
func TestMetricsOfTheTopTopics(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBrokerConfig(broker.Config{LookEvery: 20 * time.Millisecond}))
	k := cluster.Client()
	for i, n := range []int{1, 30, 2} {
		topic := fmt.Sprintf("topic-%d", i)
		s, err := k.Subscribe(t.Context(), topic, "s", client.WithStart(client.Earliest()))
		check(t, err)
		check(t, s.Close(t.Context()))
		p, err := k.Producer(t.Context(), topic)
		check(t, err)
		for range n {
			_, err := p.Publish(t.Context(), &client.Message{Value: make([]byte, 1000)})
			check(t, err)
		}
	}
	all := func() string {
		_, body := page(t, cluster.HTTP()+"/metrics/topics")
		return body
	}
	until(t, "three subscriptions are behind", func() bool {
		body := all()
		return strings.Contains(body, `penstock_subscription_backlog_messages{subscription="s",topic="public/default/topic-0"} 1`) &&
			strings.Contains(body, `penstock_subscription_backlog_messages{subscription="s",topic="public/default/topic-1"} 30`) &&
			strings.Contains(body, `penstock_subscription_backlog_messages{subscription="s",topic="public/default/topic-2"} 2`)
	})
	if n := linesOf(all(), "penstock_topic_published_messages_total"); len(n) < 3 {
		t.Errorf("topics: %q", n)
	}
	for _, line := range linesOf(all(), "penstock_subscription_oldest_unacked_age_seconds") {
		if strings.HasSuffix(line, " 0") {
			t.Errorf("a subscription with a backlog is behind by nothing: %s", line)
		}
	}
	before := linesOf(body(t, cluster), "penstock_broker_topic_series_dropped_total")
	_, one := page(t, cluster.HTTP()+"/metrics/topics?top=1")
	for _, name := range []string{"penstock_topic_stored_bytes", "penstock_subscription_backlog_bytes"} {
		if n := linesOf(one, name); len(n) != 1 {
			t.Errorf("top=1 gives %d series of %s, want 1: %q", len(n), name, n)
		}
	}
	if n := linesOf(one, "penstock_subscription_backlog_bytes"); len(n) == 1 && !strings.Contains(n[0], "topic-0") {
		t.Errorf("the first subscription is not the one that is furthest behind: %s", n[0])
	}
	if after := linesOf(body(t, cluster), "penstock_broker_topic_series_dropped_total"); after[0] == before[0] {
		t.Errorf("series were left out, and not counted: %s", after[0])
	}
	for _, top := range []string{"0", "-1", "many"} {
		if status, _ := page(t, cluster.HTTP()+"/metrics/topics?top="+top); status != http.StatusBadRequest {
			t.Errorf("top=%s is answered with %d, want %d", top, status, http.StatusBadRequest)
		}
	}
	if lines := linesOf(body(t, cluster), "penstock_cursor_backlog_messages"); len(lines) == 0 {
		t.Error("no backlog by namespace")
	}
	for line := range strings.Lines(body(t, cluster)) {
		if strings.Contains(line, "topic-") {
			t.Errorf("a topic's name is in a series of /metrics: %s", line)
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// until looks until ok, for two minutes.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within two minutes: %s", what)
		}
	}
}

func body(t *testing.T, c *brokertest.Cluster) string {
	t.Helper()
	_, text := page(t, c.HTTP()+"/metrics")
	return text
}
