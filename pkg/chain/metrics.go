package chain

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what the chains of a process do. One value serves all of them; nil counts nothing.
type Metrics struct {
	opened     prometheus.Counter
	rolled     prometheus.Counter
	recovered  prometheus.Counter
	moved      prometheus.Counter
	lost       prometheus.Counter
	trimmed    prometheus.Counter
	refused    prometheus.Counter
	rollsRetry prometheus.Counter
}

// NewMetrics registers the metrics at reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "penstock", Subsystem: "chain", Name: name, Help: help})
		if reg != nil {
			reg.MustRegister(c)
		}
		return c
	}
	return &Metrics{
		opened:     counter("ledgers_opened_total", "Ledgers opened."),
		rolled:     counter("rolls_total", "Ledgers closed and followed by another."),
		recovered:  counter("recoveries_total", "Ledgers of a former owner recovered."),
		moved:      counter("moved_entries_total", "Entries sent to the next ledger because a roll closed the old one below them."),
		lost:       counter("lost_total", "Chains dropped because another owner took over."),
		trimmed:    counter("ledgers_trimmed_total", "Ledgers deleted."),
		refused:    counter("open_failures_total", "Times that no ledger could be opened."),
		rollsRetry: counter("roll_retries_total", "Rolls put off because etcd or bookies were away."),
	}
}

func (m *Metrics) add(pick func(*Metrics) prometheus.Counter, n int) {
	if m != nil && n > 0 {
		pick(m).Add(float64(n))
	}
}
