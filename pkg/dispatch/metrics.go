package dispatch

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what all subscriptions of a process dispatch.
type Metrics struct {
	messages, redelivered, bytes prometheus.Counter
	reads, readErrors            prometheus.Counter
}

// NewMetrics makes and registers the metrics; reg may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "penstock", Subsystem: "dispatch", Name: name, Help: help})
	}
	m := &Metrics{
		messages:    counter("messages_total", "Messages handed to consumers, redeliveries included."),
		redelivered: counter("redelivered_entries_total", "Entries handed to consumers that had been delivered before."),
		bytes:       counter("sent_bytes_total", "Bytes of frames handed to consumers."),
		reads:       counter("reads_total", "Reads of entries for delivery."),
		readErrors:  counter("read_errors_total", "Reads of entries for delivery that failed."),
	}
	if reg != nil {
		reg.MustRegister(m.messages, m.redelivered, m.bytes, m.reads, m.readErrors)
	}
	return m
}

func (m *Metrics) sent(deliveries []Delivery) {
	messages, redelivered, bytes := 0, 0, 0
	for i := range deliveries {
		d := &deliveries[i]
		messages += int(d.Span)
		for _, skip := range d.Skip {
			messages -= int(skip.Len())
		}
		if d.Redelivered > 0 {
			redelivered++
		}
		bytes += len(d.Frame)
	}
	m.messages.Add(float64(messages))
	m.redelivered.Add(float64(redelivered))
	m.bytes.Add(float64(bytes))
}
