package broker

import (
	"math"
	"sort"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// latencyOver is the time that the percentile of publishing is taken over, at least.
const latencyOver = 10 * time.Second

// latencyWindow tells the 99th percentile of a histogram over the last while: of what was observed since a look that is at
// least latencyOver old, by the classic buckets, so that it is the upper bound of the bucket it lies in. It is its caller's.
type latencyWindow struct {
	of    prometheus.Collector
	looks []latencyLook
}

// latencyLook is what a histogram had counted at a time: observations up to each bound.
type latencyLook struct {
	at     time.Time
	total  uint64
	counts map[float64]uint64
}

// p99 returns the percentile, 0 when nothing was observed, and the largest duration above the highest bound.
func (w *latencyWindow) p99(now time.Time) time.Duration {
	w.looks = append(w.looks, w.look(now))
	for len(w.looks) > 2 && now.Sub(w.looks[1].at) >= latencyOver {
		w.looks = w.looks[1:]
	}
	first, last := w.looks[0], w.looks[len(w.looks)-1]
	observed := last.total - first.total
	if observed == 0 {
		return 0
	}
	bounds := make([]float64, 0, len(last.counts))
	for b := range last.counts {
		bounds = append(bounds, b)
	}
	sort.Float64s(bounds)
	for _, b := range bounds {
		if float64(last.counts[b]-first.counts[b]) >= 0.99*float64(observed) {
			return time.Duration(b * float64(time.Second))
		}
	}
	return math.MaxInt64
}

// look sums the histogram over its labels.
func (w *latencyWindow) look(now time.Time) latencyLook {
	l := latencyLook{at: now, counts: map[float64]uint64{}}
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		w.of.Collect(all)
	}()
	for m := range all {
		var out dto.Metric
		if err := m.Write(&out); err != nil {
			continue // it has nothing to say
		}
		l.total += out.GetHistogram().GetSampleCount()
		for _, b := range out.GetHistogram().GetBucket() {
			if !math.IsInf(b.GetUpperBound(), 1) {
				l.counts[b.GetUpperBound()] += b.GetCumulativeCount()
			}
		}
	}
	return l
}
