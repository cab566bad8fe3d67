package broker

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
	"github.com/penstock-mq/penstock/pkg/statelog"
)

// metrics count what no lower package can: bundles, topics, clients, and what is done for each namespace.
type metrics struct {
	openFailures, takeovers, seriesDropped, acks prometheus.Counter
	takeoverSeconds, topicOpenSeconds            prometheus.Histogram
	ackSeconds                                   prometheus.Histogram
	handovers, lookups                           *prometheus.CounterVec

	names          measure.Names // of namespaces
	published      *prometheus.CounterVec
	publishedBytes *prometheus.CounterVec
	receipts       *prometheus.CounterVec
	publishSeconds *prometheus.HistogramVec
	delivered      *prometheus.CounterVec
	deliveredBytes *prometheus.CounterVec
}

// outcome is what became of a batch.
type outcome uint8

const (
	outcomeStored outcome = iota
	outcomeDuplicate
	outcomeRefused
	outcomeFailed
	outcomeLost
	outcomes
)

func (o outcome) String() string {
	return [outcomes]string{"stored", "duplicate", "refused", "failed", "lost"}[o]
}

// namespaceMetrics are those of one namespace, looked up once for each topic that is opened.
type namespaceMetrics struct {
	published, publishedBytes, delivered, deliveredBytes prometheus.Counter
	publishSeconds                                       prometheus.Observer
	receipts                                             [outcomes]prometheus.Counter
}

// What a lookup found.
const (
	lookupHere      = "here"
	lookupElsewhere = "elsewhere"
	lookupUnserved  = "unserved"
)

const brokerPrefix = "penstock_broker_"

func newMetrics(reg prometheus.Registerer, b *Broker) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_" + name, Help: help})
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: brokerPrefix + name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(measure.Histogram("penstock_"+name, help, buckets))
	}
	const namespace = "namespace"
	m := &metrics{
		openFailures:     counter("broker_open_failures_total", "Attempts to open a topic or a state log that failed."),
		takeovers:        counter("broker_takeovers_total", "Bundles whose state log this broker opened, whoever had them before."),
		seriesDropped:    counter("broker_topic_series_dropped_total", "Series left out of answers of /metrics/topics, by its top and by its limit."),
		acks:             counter("cursor_acks_total", "Acknowledgements received from consumers."),
		ackSeconds:       histogram("cursor_ack_seconds", "Time until an acknowledgement whose consumer waits for it is durable.", measure.Latency),
		takeoverSeconds:  histogram("broker_takeover_seconds", "From taking a bundle to its state log being open.", measure.Duration),
		topicOpenSeconds: histogram("broker_topic_open_seconds", "Time to open a topic, with the recovery of its ledger.", measure.Duration),
		handovers:        counters("handovers_total", "Bundles that this broker stopped serving: hand-over, replaced or fenced.", "reason"),
		lookups:          counters("lookups_total", "Lookups answered: here, elsewhere, or unserved, of a topic that nobody serves yet.", "outcome"),

		published:      counters("published_messages_total", "Messages that producers were told to be stored.", namespace),
		publishedBytes: counters("published_bytes_total", "Bytes of their batches.", namespace),
		receipts:       counters("receipts_total", "Batches answered: stored, duplicate, refused, failed or lost.", namespace, "outcome"),
		publishSeconds: prometheus.NewHistogramVec(
			measure.Histogram(brokerPrefix+"publish_seconds", "Time from a batch's arrival to its receipt.", measure.Latency), []string{namespace}),
		delivered:      counters("delivered_messages_total", "Messages handed to consumers and readers, redeliveries included.", namespace),
		deliveredBytes: counters("delivered_bytes_total", "Bytes of their batches.", namespace),
	}
	for _, reason := range []ownership.Reason{ownership.ReasonHandOver, ownership.ReasonReplaced, ownership.ReasonFenced} {
		m.handovers.WithLabelValues(string(reason))
	}
	for _, found := range []string{lookupHere, lookupElsewhere, lookupUnserved} {
		m.lookups.WithLabelValues(found)
	}
	if reg == nil {
		return m
	}
	reg.MustRegister(
		m.openFailures, m.takeovers, m.seriesDropped, m.acks, m.ackSeconds, m.takeoverSeconds, m.topicOpenSeconds, m.handovers, m.lookups,
		m.published, m.publishedBytes, m.receipts, m.publishSeconds, m.delivered, m.deliveredBytes,
	)
	reg.MustRegister(b.gauges()...)
	return m
}

// of returns the metrics of a namespace.
func (m *metrics) of(namespace string) *namespaceMetrics {
	label := m.names.Label(namespace)
	n := &namespaceMetrics{
		published: m.published.WithLabelValues(label), publishedBytes: m.publishedBytes.WithLabelValues(label),
		delivered: m.delivered.WithLabelValues(label), deliveredBytes: m.deliveredBytes.WithLabelValues(label),
		publishSeconds: m.publishSeconds.WithLabelValues(label),
	}
	for o := range outcomes {
		n.receipts[o] = m.receipts.WithLabelValues(label, o.String())
	}
	return n
}

// gauges look at the broker when somebody asks.
func (b *Broker) gauges() []prometheus.Collector {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "penstock_" + name, Help: help}, value)
	}
	count := func(name, help string, value func() int) prometheus.Collector {
		return gauge(name, help, func() float64 { return float64(value()) })
	}
	bytes := func(name, help string, value func() int64) prometheus.Collector {
		return gauge(name, help, func() float64 { return float64(value()) })
	}
	perTopic := func(count func(*servedTopic) int) func() int {
		return func() int {
			n := 0
			for _, u := range b.all() {
				for _, t := range u.opened() {
					n += count(t)
				}
			}
			return n
		}
	}
	perState := func(size func(*statelog.Log) int64) func() int64 {
		return func() int64 {
			n := int64(0)
			for _, u := range b.all() {
				select {
				case <-u.stateReady:
					n += size(u.state)
				default:
				}
			}
			return n
		}
	}
	const limit = "How many there may be"
	return []prometheus.Collector{
		count("broker_bundles", "Bundles served here.", func() int { return len(b.all()) }),
		count("broker_unowned_bundles", "Bundles that somebody has used and nobody owns, as this broker sees them.", func() int { return b.owner.Missing() }),
		count("broker_topics", "Topics and partitions open here.", perTopic(func(*servedTopic) int { return 1 })),
		count("broker_producers", "Connected producers.", perTopic(func(t *servedTopic) int { return t.connected() })),
		count("broker_consumers", "Connected consumers and readers.", perTopic(func(t *servedTopic) int { return t.subs.Connected() })),
		gauge("broker_lease_alive", "1 while the broker has a lease that it can renew.", func() float64 {
			if b.deps.Session.Alive() {
				return 1
			}
			return 0
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: brokerPrefix + "lease_losses_total", Help: "Leases that ended while the broker lived.",
		}, func() float64 { return float64(b.deps.Session.Losses()) }),
		count("broker_brokers", "Brokers that are registered, as this one sees them.", func() int { return len(b.deps.Cache.Brokers()) }),
		&bookieStates{cache: b.deps.Cache},
		count("broker_ensemble_size", "Bookies that a new ledger needs, where a namespace does not say otherwise.", func() int { return b.cfg.Replication.Ensemble }),
		bytes("broker_publish_memory_bytes", "Bytes of batches on their way to bookies.", func() int64 { return b.topicEnv.Budget.Used() }),
		bytes("broker_publish_memory_limit_bytes", limit+"; then producers wait.", func() int64 { return b.topicEnv.Budget.Capacity() }),
		bytes("broker_cache_memory_bytes", "Bytes of the newest entries kept for readers.", func() int64 { return b.topicEnv.Cache.Used() }),
		bytes("broker_cache_memory_limit_bytes", limit+".", func() int64 { return b.cfg.CacheBytes }),
		bytes("broker_read_memory_bytes", "Bytes read for consumers and not sent yet.", func() int64 { return b.reads.Used() }),
		bytes("broker_read_memory_limit_bytes", limit+"; then delivery waits.", func() int64 { return b.reads.Capacity() }),
		bytes("statelog_stored_bytes", "Bytes of the state logs of the bundles served here.", perState(func(l *statelog.Log) int64 {
			total, _ := l.Size()
			return total
		})),
		bytes("statelog_live_bytes", "Bytes of live records in them.", perState(func(l *statelog.Log) int64 {
			_, live := l.Size()
			return live
		})),
		&lagCollector{b: b},
	}
}

// bookieStates counts the registered bookies by state.
type bookieStates struct{ cache *meta.Cache }

var bookieStatesDesc = prometheus.NewDesc(brokerPrefix+"bookies", "Bookies that are registered, as this broker sees them, by state.", []string{"state"}, nil)

// Describe implements prometheus.Collector.
func (c *bookieStates) Describe(ch chan<- *prometheus.Desc) { ch <- bookieStatesDesc }

// Collect implements prometheus.Collector.
func (c *bookieStates) Collect(ch chan<- prometheus.Metric) {
	for state, count := range bookiesOf(c.cache.Bookies()) {
		ch <- prometheus.MustNewConstMetric(bookieStatesDesc, prometheus.GaugeValue, float64(count), state)
	}
}

// born is what times of batches count from: differences alone matter.
var born = time.Now()

// clock is the time since born.
func clock() time.Duration { return time.Since(born) }
