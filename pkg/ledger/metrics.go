package ledger

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what the ledgers of a process do. One value serves all of them; nil counts nothing.
type Metrics struct {
	ensembleChanges prometheus.Counter
	suspects        prometheus.Counter
	withdrawals     prometheus.Counter
	hints           prometheus.Counter
	dropped         prometheus.Counter
	stalls          prometheus.Counter
	recoveries      *prometheus.CounterVec
	recoverySeconds prometheus.Histogram
	recoveredBytes  prometheus.Counter
	speculative     prometheus.Counter
}

// NewMetrics registers the metrics at reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "penstock", Subsystem: "ledger", Name: name, Help: help})
	}
	m := &Metrics{
		ensembleChanges: counter("ensemble_changes_total", "Ensemble changes acknowledged by the metadata store."),
		suspects:        counter("suspects_total", "Times that a bookie of an ensemble became suspect."),
		withdrawals:     counter("withdrawals_total", "Writers that withdrew: fenced, or their ledger taken over."),
		hints:           counter("hints_total", "Copies handed to repair, as ranges."),
		dropped:         counter("dropped_entries_total", "Entries reported early that did not become part of their ledger."),
		stalls:          counter("stalls_total", "Times that appends had no possible quorum without changing the ensemble."),
		recoveries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "penstock", Subsystem: "ledger", Name: "recoveries_total", Help: "Recovery attempts by result.",
		}, []string{"result"}),
		recoverySeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "penstock", Subsystem: "ledger", Name: "recovery_seconds", Help: "Time to recover a ledger.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 16), NativeHistogramBucketFactor: 1.1,
		}),
		recoveredBytes: counter("recovered_bytes_total", "Bytes of bodies written back by recoveries."),
		speculative:    counter("speculative_reads_total", "Reads that asked another bookie before the first had answered."),
	}
	if reg != nil {
		reg.MustRegister(m.ensembleChanges, m.suspects, m.withdrawals, m.hints, m.dropped, m.stalls,
			m.recoveries, m.recoverySeconds, m.recoveredBytes, m.speculative)
	}
	return m
}
