package meta

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	txns    *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	retries prometheus.Counter
}

func newMetrics() *metrics {
	return &metrics{
		txns: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "penstock_meta_transactions_total",
			Help: "Metadata transactions by what they do and how they ended: applied, conflict, refused or unavailable.",
		}, []string{"op", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "penstock_meta_transaction_seconds",
			Help:    "Time of a metadata transaction, retries included.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30},
		}, []string{"op"}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_meta_retries_total",
			Help: "Attempts that etcd did not answer.",
		}),
	}
}

func (m *metrics) done(op, outcome string, begin time.Time) {
	m.txns.WithLabelValues(op, outcome).Inc()
	m.seconds.WithLabelValues(op).Observe(time.Since(begin).Seconds())
}

// Register adds the store's metrics to reg.
func (s *Store) Register(reg prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{s.metrics.txns, s.metrics.seconds, s.metrics.retries} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register metadata metrics: %w", err)
		}
	}
	return nil
}
