// Package measure is the shape of Penstock's metrics: what histograms look like, and how few series names may make.
//
//	seconds := prometheus.NewHistogram(measure.Histogram("penstock_bookie_add_seconds", "Time …", measure.Latency))
//
// Each package has its metrics as fields of what it measures, in a file metrics.go, and registers them itself; here is only what has to
// be the same everywhere. A registry of all metrics in one place was rejected: it would know every package, and no package its metrics.
// docs/metrics.md lists them, and a test compares it with live processes.
package measure

import (
	"runtime"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Buckets of what is measured, classic ones. Native ones need none.
var (
	// Latency is of what takes from a tenth of a millisecond to half a minute: disks, networks, their sums.
	Latency = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}
	// Duration is of work that takes from milliseconds to minutes.
	Duration = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
)

const (
	// nativeFactor is how much wider a native bucket is than the one before it, at most.
	nativeFactor = 1.1
	// nativeBuckets bounds the native buckets of a histogram: beyond them they become wider.
	nativeBuckets = 160
)

// Histogram describes a histogram with these classic buckets, and native ones for whoever scrapes them.
func Histogram(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: nativeFactor, NativeHistogramMaxBucketNumber: nativeBuckets,
	}
}

// MaxNames is how many values of a label that people choose, as a namespace's name, get series of their own.
const MaxNames = 1000

// Other stands for the values beyond them.
const Other = "other"

// Names bounds the values of a label that people choose. The zero value is ready.
type Names struct {
	mu    sync.Mutex
	known map[string]struct{}
}

// Label returns name, or Other once there are MaxNames others.
func (n *Names) Label(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.known[name]; ok {
		return name
	}
	if len(n.known) >= MaxNames {
		return Other
	}
	if n.known == nil {
		n.known = map[string]struct{}{}
	}
	n.known[name] = struct{}{}
	return name
}

// RegisterBuild registers what program this is.
func RegisterBuild(reg prometheus.Registerer, version string) error {
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "penstock_build_info", Help: "1, with the program's version and Go's.",
		ConstLabels: prometheus.Labels{"version": version, "go": runtime.Version()},
	})
	info.Set(1)
	return reg.Register(info) //nolint:wrapcheck // it names the metric
}
