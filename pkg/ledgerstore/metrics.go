package ledgerstore

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
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
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: "penstock_ledgerstore_" + name, Help: help, Buckets: buckets})
	}
	m := &metrics{
		groupEntries:   histogram("group_records", "Records written and synced together.", prometheus.ExponentialBuckets(1, 4, 8)),
		groupBytes:     histogram("group_size_bytes", "Bytes written and synced together.", prometheus.ExponentialBuckets(256, 4, 9)),
		syncSeconds:    histogram("sync_seconds", "Duration of fdatasync on the active segment.", prometheus.ExponentialBuckets(0.0001, 2, 16)),
		addsRefused:    counter("adds_refused_total", "Adds answered with an error."),
		readErrors:     counter("read_errors_total", "Reads that met a disk error or a wrong checksum, answered unknown."),
		damaged:        counter("damaged_entries_total", "Entries that scrubs found unreadable."),
		cacheHits:      counter("cache_hits_total", "Entries served from memory."),
		cacheMisses:    counter("cache_misses_total", "Entries read from the disk."),
		compactedBytes: counter("compacted_bytes_total", "Bytes of live entries rewritten by compaction."),
		freedBytes:     counter("freed_bytes_total", "Bytes of disk given back by compaction and by unlinking whole segments."),
		compactErrors:  counter("compaction_errors_total", "Compactions given up; the old segment is kept."),
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
	} {
		err = errors.Join(err, reg.Register(c))
	}
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}
