package repair

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// metrics are what repair tells about itself. Those of the whole cluster come from the auditor alone; from others they are 0, so that
// they can be added up.
type metrics struct {
	ledgers *prometheus.GaugeVec
	entries *prometheus.GaugeVec
	waiting prometheus.Gauge
	absent  prometheus.Gauge
	oldest  prometheus.Gauge
	auditor prometheus.Gauge

	copiedEntries, copiedBytes, stepsFailed, mended prometheus.Counter
	jobSeconds                                      prometheus.Histogram
}

var (
	states    = []string{"waiting", "working", "stuck"}
	shortages = []string{"below_write_quorum", "below_ack_quorum", "unavailable", "misplaced"}
)

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "penstock_repair_" + name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_repair_" + name, Help: help})
	}
	m := &metrics{
		ledgers: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "penstock_repair_ledgers", Help: "Ledgers that have a record of damage, by cause and state; one with several causes counts for each. Of the auditor.",
		}, []string{"cause", "state"}),
		entries: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "penstock_repair_entries", Help: "Entries of those ledgers with fewer copies than they should have, or misplaced ones. Of the auditor.",
		}, []string{"shortage"}),
		waiting:       gauge("ledgers_waiting", "Damaged ledgers beyond those that have a record. Of the auditor."),
		absent:        gauge("bookies_absent", "Bookies that are not registered and not retired. Of the auditor."),
		oldest:        gauge("oldest_seconds", "For how long the oldest damage has been known. Of the auditor."),
		auditor:       gauge("auditor", "1 where the census is kept."),
		copiedEntries: counter("copied_entries_total", "Copies of entries made."),
		copiedBytes:   counter("copied_bytes_total", "Bytes of copies made."),
		stepsFailed:   counter("failures_total", "Steps of repairs that failed; they are taken again."),
		mended:        counter("ledgers_mended_total", "Ledgers that are as they should be again."),
		jobSeconds:    prometheus.NewHistogram(measure.Histogram("penstock_repair_job_seconds", "How long a worker was at one ledger.", measure.Duration)),
	}
	m.forget()
	if reg != nil {
		reg.MustRegister(m.ledgers, m.entries, m.waiting, m.absent, m.oldest, m.auditor, m.copiedEntries, m.copiedBytes, m.stepsFailed, m.mended, m.jobSeconds)
	}
	return m
}

// forget shows nothing of the cluster: another process does.
func (m *metrics) forget() {
	m.show(meta.RepairList{}, meta.RepairCensus{})
	m.auditor.Set(0)
}

// show shows the census.
func (m *metrics) show(list meta.RepairList, c meta.RepairCensus) {
	counts := map[[2]string]int{}
	var sum meta.RepairCounts
	age := 0.0
	for _, r := range list.Repairs {
		state := "waiting"
		switch {
		case list.Claims[r.Ledger] != "":
			state = "working"
		case r.Stuck != "":
			state = "stuck"
		}
		for _, cause := range r.Causes.Each() {
			counts[[2]string{cause.String(), state}]++
		}
		sum.BelowWriteQuorum += r.Counts.BelowWriteQuorum
		sum.BelowAckQuorum += r.Counts.BelowAckQuorum
		sum.Unavailable += r.Counts.Unavailable
		sum.Misplaced += r.Counts.Misplaced
		age = max(age, c.At.Sub(r.Since).Seconds())
	}
	for _, cause := range meta.AllRepairCauses.Each() {
		for _, state := range states {
			m.ledgers.WithLabelValues(cause.String(), state).Set(float64(counts[[2]string{cause.String(), state}]))
		}
	}
	for i, n := range []uint64{sum.BelowWriteQuorum, sum.BelowAckQuorum, sum.Unavailable, sum.Misplaced} {
		m.entries.WithLabelValues(shortages[i]).Set(float64(n))
	}
	m.waiting.Set(float64(c.Waiting))
	m.absent.Set(float64(len(c.Absent)))
	m.oldest.Set(age)
	m.auditor.Set(1)
}
