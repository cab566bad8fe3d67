package topic

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what the topics of a process do. One value serves all of them; nil counts nothing.
type Metrics struct {
	entries, messages, bytes prometheus.Counter
	duplicates               prometheus.Counter
	missed                   prometheus.Counter
	trimmedBytes             prometheus.Counter
	snapshots                prometheus.Counter
}

// NewMetrics registers the metrics at reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "penstock", Subsystem: "topic", Name: name, Help: help})
		if reg != nil {
			reg.MustRegister(c)
		}
		return c
	}
	return &Metrics{
		entries:      counter("appended_entries_total", "Batches handed to a ledger."),
		messages:     counter("appended_messages_total", "Messages in them."),
		bytes:        counter("appended_bytes_total", "Bytes of envelopes and frames in them."),
		duplicates:   counter("duplicates_total", "Batches recognised as duplicates."),
		missed:       counter("read_through_entries_total", "Entries read from bookies because the cache did not have them."),
		snapshots:    counter("snapshots_total", "Snapshots of producers' sequences."),
		trimmedBytes: counter("trimmed_bytes_total", "Bytes of deleted ledgers."),
	}
}

func (m *Metrics) appended(bytes, messages int) {
	if m != nil {
		m.entries.Inc()
		m.messages.Add(float64(messages))
		m.bytes.Add(float64(bytes))
	}
}

func (m *Metrics) duplicate() {
	if m != nil {
		m.duplicates.Inc()
	}
}

func (m *Metrics) readThrough(entries int) {
	if m != nil {
		m.missed.Add(float64(entries))
	}
}

func (m *Metrics) trimmed(bytes int64) {
	if m != nil {
		m.trimmedBytes.Add(float64(bytes))
	}
}

func (m *Metrics) snapshot() {
	if m != nil {
		m.snapshots.Inc()
	}
}
