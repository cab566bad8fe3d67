package statelog

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
)

// Metrics counts what the state logs of a process do. One value serves all of them; nil counts nothing.
type Metrics struct {
	records   prometheus.Counter
	rewritten prometheus.Counter
	replay    prometheus.Histogram
}

// NewMetrics registers the metrics at reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		records: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_statelog_records_total", Help: "Records stored in state logs.",
		}),
		rewritten: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_statelog_rewritten_records_total",
			Help: "Live records written again at the tail, so that old ledgers can go.",
		}),
		replay: prometheus.NewHistogram(measure.Histogram(
			"penstock_statelog_replay_seconds", "Time to read a state log when its bundle is taken over.", measure.Duration)),
	}
	if reg != nil {
		reg.MustRegister(m.records, m.rewritten, m.replay)
	}
	return m
}

func (m *Metrics) stored(records int) {
	if m != nil {
		m.records.Add(float64(records))
	}
}

func (m *Metrics) rewrote(records int) {
	if m != nil {
		m.rewritten.Add(float64(records))
	}
}

func (m *Metrics) replayed(took time.Duration) {
	if m != nil {
		m.replay.Observe(took.Seconds())
	}
}
