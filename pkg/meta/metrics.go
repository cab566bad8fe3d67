package meta

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
)

// metrics are a store's.
type metrics struct {
	txns        *prometheus.CounterVec
	txnSeconds  *prometheus.HistogramVec
	reads       *prometheus.CounterVec
	readSeconds *prometheus.HistogramVec
	retries     prometheus.Counter
}

// watchMetrics are a cache's.
type watchMetrics struct {
	events, restarts, resyncs prometheus.Counter
	wait                      prometheus.Histogram
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_meta_" + name, Help: help})
}

func newMetrics() *metrics {
	counters := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "penstock_meta_" + name, Help: help}, []string{"op", "outcome"})
	}
	seconds := func(name, help string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(measure.Histogram("penstock_meta_"+name, help, measure.Latency), []string{"op"})
	}
	return &metrics{
		txns:        counters("transactions_total", "Metadata transactions by what they do and how they ended: applied, conflict, refused or unavailable."),
		txnSeconds:  seconds("transaction_seconds", "Time of a metadata transaction, retries included."),
		reads:       counters("reads_total", "Metadata reads by what they read and how they ended: ok, refused or unavailable."),
		readSeconds: seconds("read_seconds", "Time of a metadata read, retries included."),
		retries:     counter("retries_total", "Attempts that etcd did not answer."),
	}
}

func newWatchMetrics() *watchMetrics {
	return &watchMetrics{
		events:   counter("watch_events_total", "Changes that the watch has shown."),
		restarts: counter("watch_restarts_total", "Times that the watch ended and went on."),
		resyncs:  counter("watch_resyncs_total", "Times that everything was read again, the first one included."),
		wait: prometheus.NewHistogram(measure.Histogram(
			"penstock_meta_watch_wait_seconds", "Time until the watch showed what somebody waited for.", measure.Latency)),
	}
}

func (m *metrics) done(op, outcome string, begin time.Time) {
	m.txns.WithLabelValues(op, outcome).Inc()
	m.txnSeconds.WithLabelValues(op).Observe(time.Since(begin).Seconds())
}

func (m *metrics) read(op, outcome string, begin time.Time) {
	m.reads.WithLabelValues(op, outcome).Inc()
	m.readSeconds.WithLabelValues(op).Observe(time.Since(begin).Seconds())
}

// Register adds the store's metrics to reg.
func (s *Store) Register(reg prometheus.Registerer) error {
	m := s.metrics
	return register(reg,
		m.txns, m.txnSeconds, m.reads, m.readSeconds, m.retries,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "penstock_meta_away_seconds", Help: "How long etcd has not answered, as far as this process has asked; 0: it answers.",
		}, func() float64 { return s.Away().Seconds() }),
	)
}

// Register adds the cache's metrics to reg.
func (c *Cache) Register(reg prometheus.Registerer) error {
	m := c.metrics
	return register(reg, m.events, m.restarts, m.resyncs, m.wait)
}

func register(reg prometheus.Registerer, all ...prometheus.Collector) error {
	for _, c := range all {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register metadata metrics: %w", err)
		}
	}
	return nil
}
