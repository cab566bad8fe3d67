package statelog

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what the state logs of a process do. One value serves all of them; nil counts nothing.
type Metrics struct {
	rewritten prometheus.Counter
}

// NewMetrics registers the metrics at reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{rewritten: prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: "penstock", Subsystem: "statelog", Name: "rewritten_records_total",
		Help: "Live records written again at the tail, so that old ledgers can go.",
	})}
	if reg != nil {
		reg.MustRegister(m.rewritten)
	}
	return m
}

func (m *Metrics) rewrote(records int) {
	if m != nil {
		m.rewritten.Add(float64(records))
	}
}
