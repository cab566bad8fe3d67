package bookieclient

import "github.com/prometheus/client_golang/prometheus"

// metrics are a client's, over all bookies.
type metrics struct {
	connections prometheus.Gauge
	disconnects prometheus.Counter
	pending     prometheus.Gauge
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	m := &metrics{
		connections: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "penstock_bookieclient_connections",
			Help: "Connections to bookies, two per bookie in use.",
		}),
		disconnects: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookieclient_disconnects_total",
			Help: "Connections to bookies that ended.",
		}),
		pending: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "penstock_bookieclient_pending_bytes",
			Help: "Bytes of adds that bookies have not answered.",
		}),
	}
	if registerer != nil {
		registerer.MustRegister(m.connections, m.disconnects, m.pending)
	}
	return m
}
