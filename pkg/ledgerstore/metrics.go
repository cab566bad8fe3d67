package ledgerstore

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
)

// metrics are what a store tells about itself. A nil registerer leaves them unregistered.
type metrics struct {
	groupEntries   prometheus.Histogram
	groupBytes     prometheus.Histogram
	syncSeconds    prometheus.Histogram
	addsRefused    prometheus.Counter
	readErrors     prometheus.Counter
	damaged        prometheus.Counter
	cacheHits      prometheus.Counter
	cacheMisses    prometheus.Counter
	compactedBytes prometheus.Counter
	freedBytes     prometheus.Counter
	compactErrors  prometheus.Counter
	compactions    prometheus.Counter
	diskFree       prometheus.Gauge
	diskTotal      prometheus.Gauge
	lowWatermark   prometheus.Gauge
	highWatermark  prometheus.Gauge
	live           prometheus.Gauge
	dead           prometheus.Gauge
	state          prometheus.Gauge
	segments       prometheus.Gauge
	syncInterval   prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_ledgerstore_" + name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "penstock_ledgerstore_" + name, Help: help})
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(measure.Histogram("penstock_ledgerstore_"+name, help, buckets))
	}
	m := &metrics{
		groupEntries:   histogram("group_records", "Records written and synced together.", prometheus.ExponentialBuckets(1, 4, 8)),
		groupBytes:     histogram("group_size_bytes", "Bytes written and synced together.", prometheus.ExponentialBuckets(256, 4, 9)),
		syncSeconds:    histogram("sync_seconds", "Duration of fdatasync on the active segment.", measure.Latency),
		addsRefused:    counter("adds_refused_total", "Adds answered with an error."),
		readErrors:     counter("read_errors_total", "Reads that met a disk error or a wrong checksum, answered unknown."),
		damaged:        counter("damaged_entries_total", "Entries that scrubs found unreadable."),
		cacheHits:      counter("cache_hits_total", "Entries served from memory."),
		cacheMisses:    counter("cache_misses_total", "Entries read from the disk."),
		compactedBytes: counter("compacted_bytes_total", "Bytes of live entries rewritten by compaction."),
		freedBytes:     counter("freed_bytes_total", "Bytes of disk given back by compaction and by unlinking whole segments."),
		compactErrors:  counter("compaction_errors_total", "Compactions given up; the old segment is kept."),
		compactions:    counter("compactions_total", "Compactions that went through."),
		diskFree:       gauge("disk_free_bytes", "Bytes free on the disk, spare segments included."),
		diskTotal:      gauge("disk_total_bytes", "Size of the disk."),
		lowWatermark:   gauge("low_watermark_ratio", "Share of the disk in use from which on no new ledgers are taken."),
		highWatermark:  gauge("high_watermark_ratio", "Share of the disk in use from which on only recovery writes."),
		live:           gauge("live_bytes", "Bytes of entries of ledgers that exist here."),
		dead:           gauge("dead_bytes", "Bytes that compaction or unlinking will free."),
		state:          gauge("state", "What the store takes: 0 everything, 1 no new ledgers, 2 recovery only."),
		segments:       gauge("segments", "Segment files, spares excluded."),
		syncInterval:   gauge("sync_interval_seconds", "How long acknowledged entries may be lost to a power cut; 0: they are synced before they are acknowledged."),
	}
	if reg == nil {
		return m, nil
	}
	var err error
	for _, c := range []prometheus.Collector{
		m.groupEntries, m.groupBytes, m.syncSeconds, m.addsRefused, m.readErrors, m.damaged, m.cacheHits, m.cacheMisses,
		m.compactedBytes, m.freedBytes, m.compactErrors, m.state, m.segments, m.syncInterval,
		m.compactions, m.diskFree, m.diskTotal, m.lowWatermark, m.highWatermark, m.live, m.dead,
	} {
		err = errors.Join(err, reg.Register(c))
	}
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}

// used tells how the disk is used.
func (m *metrics) used(u *Usage) {
	m.segments.Set(float64(u.Segments))
	m.diskFree.Set(float64(u.Free))
	m.diskTotal.Set(float64(u.Total))
	m.live.Set(float64(u.Live))
	m.dead.Set(float64(u.Dead))
}

// registerLedgers has the ledgers of a table that is complete counted whenever somebody asks.
func registerLedgers(reg prometheus.Registerer, t *table) error {
	if reg == nil {
		return nil
	}
	gauge := func(name, help string, count func(*ledger) bool) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "penstock_ledgerstore_" + name, Help: help}, func() float64 {
			return float64(t.count(count))
		})
	}
	err := errors.Join(
		reg.Register(gauge("ledgers", "Ledgers stored.", func(*ledger) bool { return true })),
		reg.Register(gauge("limbo_ledgers", "Ledgers of which acknowledged entries may have been lost here.", func(l *ledger) bool { return l.limbo })),
	)
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	return nil
}
