package broker

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/measure"
)

// The percentile is of the last while, over all namespaces, and forgets what was before.
func TestLatencyIsOfTheLastWhile(t *testing.T) {
	t.Parallel()
	h := prometheus.NewHistogramVec(measure.Histogram("publish_seconds", "A histogram.", measure.Latency), []string{"namespace"})
	w := &latencyWindow{of: h}
	now := time.UnixMilli(1_800_000_000_000)
	observe := func(namespace string, n int, seconds float64) {
		for range n {
			h.WithLabelValues(namespace).Observe(seconds)
		}
	}
	between := func(when string, low, high time.Duration) {
		t.Helper()
		if got := w.p99(now); got < low || got > high {
			t.Errorf("%s: %v, want %v to %v", when, got, low, high)
		}
		now = now.Add(time.Second)
	}
	observe("before", 1000, 9)
	between("at the first look", 0, 0)
	between("without an observation", 0, 0)
	observe("a", 980, 0.001)
	observe("b", 20, 0.2)
	between("two of a hundred are slow", 200*time.Millisecond, time.Second)
	observe("a", 9000, 0.001)
	between("two of a thousand are slow", time.Millisecond, 10*time.Millisecond)
	observe("b", 1000, 1e6)
	between("beyond every bound", time.Hour, 1<<63-1)
	for range 12 {
		observe("a", 10, 0.001)
		w.p99(now)
		now = now.Add(time.Second)
	}
	between("later", time.Millisecond, 10*time.Millisecond)
}
