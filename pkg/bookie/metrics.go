package bookie

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/measure"
)

// serverMetrics are the data path's.
type serverMetrics struct {
	connections    prometheus.Gauge
	acceptErrors   prometheus.Counter
	refused        prometheus.Counter
	malformed      prometheus.Counter
	slowPeers      prometheus.Counter
	admissionReads prometheus.Counter
	addBytes       prometheus.Counter
	addSeconds     prometheus.Histogram
	readBytes      prometheus.Counter
	readSeconds    prometheus.Histogram
	adds           [256]prometheus.Counter // by code; those that can occur
	requests       *prometheus.CounterVec
}

func newServerMetrics(registerer prometheus.Registerer, adds *budget.Budget) *serverMetrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_bookie_" + name, Help: help})
	}
	m := &serverMetrics{
		connections: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "penstock_bookie_connections", Help: "Open data connections.",
		}),
		acceptErrors:   counter("accept_errors_total", "Connections that could not be accepted."),
		refused:        counter("refused_connections_total", "Connections refused in the handshake."),
		malformed:      counter("malformed_connections_total", "Connections closed for bytes that break the protocol."),
		slowPeers:      counter("slow_peers_total", "Connections closed because the peer did not read its answers."),
		admissionReads: counter("admission_reads_total", "Metadata reads for adds of unknown ledgers."),
		addBytes:       counter("add_bytes_total", "Bytes of bodies stored."),
		addSeconds: prometheus.NewHistogram(
			measure.Histogram("penstock_bookie_add_seconds", "Time from an add's arrival to its answer.", measure.Latency)),
		readBytes: counter("read_bytes_total", "Bytes of bodies read."),
		readSeconds: prometheus.NewHistogram(
			measure.Histogram("penstock_bookie_read_seconds", "Time from a read's arrival to its answer.", measure.Latency)),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "penstock_bookie_requests_total", Help: "Reads, fences and LACs answered, by operation and code.",
		}, []string{"op", "code"}),
	}
	answers := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "penstock_bookie_adds_total", Help: "Adds answered, by code.",
	}, []string{"code"})
	for c := bookiewire.OK; c <= bookiewire.BadRequest; c++ {
		m.adds[c] = answers.WithLabelValues(c.String())
	}
	if registerer != nil {
		registerer.MustRegister(m.connections, m.acceptErrors, m.refused, m.malformed, m.slowPeers, m.admissionReads,
			m.addBytes, m.addSeconds, m.readBytes, m.readSeconds, m.requests, answers,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "penstock_bookie_add_in_flight_bytes", Help: "Bytes of adds that are not answered.",
			}, func() float64 { return float64(adds.Used()) }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "penstock_bookie_add_in_flight_limit_bytes", Help: "How many there may be; then connections are read no further.",
			}, func() float64 { return float64(adds.Capacity()) }))
	}
	return m
}

// registerHealth tells of the disk when it last synced something.
func registerHealth(registerer prometheus.Registerer, h *health) {
	if registerer == nil {
		return
	}
	registerer.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "penstock_bookie_last_sync_timestamp_seconds", Help: "When something was last synced to the disk, as Unix time.",
	}, func() float64 {
		at := h.lastSync()
		if at.IsZero() {
			return 0
		}
		return float64(at.UnixMilli()) / 1000
	}))
}

func (m *serverMetrics) added(err *bookiewire.Error, bytes int, took time.Duration) {
	code := bookiewire.OK
	if err != nil {
		code = err.Code
	} else {
		m.addBytes.Add(float64(bytes))
		m.addSeconds.Observe(took.Seconds())
	}
	if c := m.adds[code]; c != nil {
		c.Inc()
	}
}

// read counts a read that was answered with data.
func (m *serverMetrics) read(bytes int64, took time.Duration) {
	m.readBytes.Add(float64(bytes))
	m.readSeconds.Observe(took.Seconds())
}

func (m *serverMetrics) answered(op string, code bookiewire.Code) {
	m.requests.WithLabelValues(op, code.String()).Inc()
}
