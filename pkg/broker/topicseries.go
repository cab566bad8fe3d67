package broker

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/measure"
)

// How many topics, and how many subscriptions, have series at /metrics/topics.
const (
	defaultTop = 100
	maxTop     = measure.MaxNames
)

// lagCollector tells of subscriptions, by namespace and by reason, what the latest look found.
type lagCollector struct{ b *Broker }

var (
	cursorDesc = func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("penstock_cursor_"+name, help, []string{"namespace"}, nil)
	}
	subscriptionsDesc = cursorDesc("subscriptions", "Subscriptions of the open topics.")
	backlogDesc       = cursorDesc("backlog_messages", "Messages that they have not acknowledged, each counted for each subscription.")
	backlogBytesDesc  = cursorDesc("backlog_bytes", "Bytes stored from their oldest unacknowledged messages on, likewise.")
	oldestDesc        = cursorDesc("oldest_unacked_age_seconds", "Age of the oldest message that one of them has not acknowledged.")
	waitingDesc       = prometheus.NewDesc("penstock_dispatch_waiting", "Subscriptions by what their delivery waits for.", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (c *lagCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{subscriptionsDesc, backlogDesc, backlogBytesDesc, oldestDesc, waitingDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *lagCollector) Collect(ch chan<- prometheus.Metric) {
	namespaces, waiting := c.b.latest.Load().lags(c.b.metrics.names.Label)
	gauge := func(d *prometheus.Desc, v float64, label string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, label)
	}
	for name, l := range namespaces {
		gauge(subscriptionsDesc, float64(l.subscriptions), name)
		gauge(backlogDesc, float64(l.backlog), name)
		gauge(backlogBytesDesc, float64(l.bytes), name)
		gauge(oldestDesc, l.oldest.Seconds(), name)
	}
	for _, r := range dispatch.Reasons {
		gauge(waitingDesc, float64(waiting[r]), string(r))
	}
}

// topicSeries has the series of the busiest topics and of the subscriptions furthest behind.
type topicSeries struct {
	b   *Broker
	top int
}

var (
	topicDesc = func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("penstock_topic_"+name, help, []string{"topic"}, nil)
	}
	subscriptionDesc = func(name, help string, more ...string) *prometheus.Desc {
		return prometheus.NewDesc("penstock_subscription_"+name, help, append([]string{"topic", "subscription"}, more...), nil)
	}
	topicPublished      = topicDesc("published_messages_total", "Messages stored since the topic was opened here.")
	topicPublishedBytes = topicDesc("published_bytes_total", "Bytes of their batches.")
	topicDelivered      = topicDesc("delivered_messages_total", "Messages handed to consumers and readers since then.")
	topicDeliveredBytes = topicDesc("delivered_bytes_total", "Bytes of their batches.")
	topicStored         = topicDesc("stored_bytes", "Bytes stored, each entry counted once.")
	topicProducers      = topicDesc("producers", "Connected producers.")
	topicConsumers      = topicDesc("consumers", "Connected consumers and readers.")
	topicDescs          = []*prometheus.Desc{
		topicPublished, topicPublishedBytes, topicDelivered, topicDeliveredBytes, topicStored, topicProducers, topicConsumers,
	}

	subBacklog      = subscriptionDesc("backlog_messages", "Messages that are not acknowledged.")
	subBacklogBytes = subscriptionDesc("backlog_bytes", "Bytes stored from the oldest of them on.")
	subOldest       = subscriptionDesc("oldest_unacked_age_seconds", "Age of the oldest of them; 0 without any.")
	subUnacked      = subscriptionDesc("unacked_messages", "Messages delivered, neither acknowledged nor given back.")
	subConsumers    = subscriptionDesc("consumers", "Connected consumers.")
	subWaiting      = subscriptionDesc("waiting", "1, with what delivery waits for.", "reason")
	subDescs        = []*prometheus.Desc{subBacklog, subBacklogBytes, subOldest, subUnacked, subConsumers, subWaiting}
)

// Describe implements prometheus.Collector.
func (c *topicSeries) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range topicDescs {
		ch <- d
	}
	for _, d := range subDescs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *topicSeries) Collect(ch chan<- prometheus.Metric) {
	f := c.b.latest.Load()
	topics := f.busiest(c.top)
	for _, t := range topics {
		for d, n := range map[*prometheus.Desc]uint64{
			topicPublished: t.totals.published, topicPublishedBytes: t.totals.publishedBytes,
			topicDelivered: t.totals.delivered, topicDeliveredBytes: t.totals.deliveredBytes,
		} {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), t.name)
		}
		for d, n := range map[*prometheus.Desc]float64{
			topicStored: float64(t.stored), topicProducers: float64(t.producers), topicConsumers: float64(t.consumers),
		} {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, n, t.name)
		}
	}
	subs, all := f.furthestBehind(c.top)
	for _, s := range subs {
		for d, n := range map[*prometheus.Desc]float64{
			subBacklog: float64(s.backlog), subBacklogBytes: float64(s.backlogBytes), subOldest: s.age.Seconds(),
			subUnacked: float64(s.unacked), subConsumers: float64(s.consumers),
		} {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, n, s.topic, s.name)
		}
		ch <- prometheus.MustNewConstMetric(subWaiting, prometheus.GaugeValue, 1, s.topic, s.name, string(s.reason))
	}
	dropped := (len(f.topics)-len(topics))*len(topicDescs) + (all-len(subs))*len(subDescs)
	c.b.metrics.seriesDropped.Add(float64(dropped))
}

// serveTopics answers /metrics/topics.
func (n *Node) serveTopics(w http.ResponseWriter, r *http.Request) {
	top := defaultTop
	if text := r.URL.Query().Get("top"); text != "" {
		v, err := strconv.Atoi(text)
		if err != nil || v < 1 {
			http.Error(w, fmt.Sprintf("top is %q: want a number from 1 to %d", text, maxTop), http.StatusBadRequest)
			return
		}
		top = min(v, maxTop)
	}
	b := n.started.Load()
	if b == nil {
		http.Error(w, "starting: no topics are served yet", http.StatusServiceUnavailable)
		return
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&topicSeries{b: b, top: top})
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
}
