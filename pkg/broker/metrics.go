package broker

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metrics count what no lower package can: bundles, topics, and connected clients.
type metrics struct {
	openFailures prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, b *Broker) *metrics {
	m := &metrics{openFailures: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "penstock_broker_open_failures_total", Help: "Attempts to open a topic or a state log that failed.",
	})}
	if reg == nil {
		return m
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "penstock_broker_" + name, Help: help}, value)
	}
	perTopic := func(count func(*servedTopic) int) func() float64 {
		return func() float64 {
			n := 0
			for _, u := range b.all() {
				for _, t := range u.opened() {
					n += count(t)
				}
			}
			return float64(n)
		}
	}
	reg.MustRegister(
		m.openFailures,
		gauge("bundles", "Bundles served here.", func() float64 { return float64(len(b.all())) }),
		gauge("topics", "Topics and partitions open here.", perTopic(func(*servedTopic) int { return 1 })),
		gauge("producers", "Connected producers.", perTopic(func(t *servedTopic) int { return len(t.producerNames()) })),
		gauge("consumers", "Connected consumers and readers.", perTopic(func(t *servedTopic) int { return t.subs.Connected() })),
		gauge("publish_memory_bytes", "Bytes of batches on their way to bookies.", func() float64 { return float64(b.topicEnv.Budget.Used()) }),
		gauge("cache_memory_bytes", "Bytes of the newest entries kept for readers.", func() float64 { return float64(b.topicEnv.Cache.Used()) }),
		gauge("read_memory_bytes", "Bytes read for consumers and not sent yet.", func() float64 { return float64(b.reads.Used()) }),
	)
	return m
}
