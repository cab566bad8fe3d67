package ledger

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
)

// Metrics counts what the ledgers of a process do. One value serves all of them; nil counts nothing.
type Metrics struct {
	confirmed       prometheus.Counter
	confirmedBytes  prometheus.Counter
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
		confirmed:       counter("confirmed_entries_total", "Entries that became confirmed: stored by their ack quorum, with all before them."),
		confirmedBytes:  counter("confirmed_bytes_total", "Bytes of their bodies."),
		ensembleChanges: counter("ensemble_changes_total", "Ensemble changes acknowledged by the metadata store."),
		suspects:        counter("suspects_total", "Times that a bookie of an ensemble became suspect."),
		withdrawals:     counter("withdrawals_total", "Writers that withdrew: fenced, or their ledger taken over."),
		hints:           counter("hints_total", "Copies handed to repair, as ranges."),
		dropped:         counter("dropped_entries_total", "Entries reported early that did not become part of their ledger."),
		stalls:          counter("stalls_total", "Times that appends had no possible quorum without changing the ensemble."),
		recoveries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "penstock", Subsystem: "ledger", Name: "recoveries_total", Help: "Recoveries by result: closed, adopted or failed.",
		}, []string{"result"}),
		recoverySeconds: prometheus.NewHistogram(measure.Histogram("penstock_ledger_recovery_seconds", "Time to recover a ledger.", measure.Duration)),
		recoveredBytes:  counter("recovered_bytes_total", "Bytes of bodies written back by recoveries."),
		speculative:     counter("speculative_reads_total", "Reads that asked another bookie before the first had answered."),
	}
	for _, result := range []string{"closed", "adopted", "failed"} {
		m.recoveries.WithLabelValues(result)
	}
	if reg != nil {
		reg.MustRegister(m.confirmed, m.confirmedBytes, m.ensembleChanges, m.suspects, m.withdrawals, m.hints, m.dropped, m.stalls,
			m.recoveries, m.recoverySeconds, m.recoveredBytes, m.speculative)
	}
	return m
}

func (m *Metrics) confirm(entries, bytes int64) {
	if m != nil && entries > 0 {
		m.confirmed.Add(float64(entries))
		m.confirmedBytes.Add(float64(bytes))
	}
}
