package bench

import (
	"cmp"
	"slices"
	"sync"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Latencies are kept in nanoseconds to three digits, from about a microsecond to an hour; what is longer counts as an hour.
const (
	histogramUnit   = 1_000
	histogramMax    = int64(3_600_000_000_000)
	histogramDigits = 3
)

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(histogramUnit, histogramMax, histogramDigits)
}

func recordInto(h *hdrhistogram.Histogram, latency int64) {
	_ = h.RecordValue(min(max(latency, 0), histogramMax)) // fails only beyond its range
}

// span is the time of a phase, on the run's clock. A message belongs to the phase that it was due in, whenever its outcome
// comes: a phase that ends while messages are late has their lateness, too.
type span struct{ from, to int64 }

func (s span) holds(due int64) bool { return due >= s.from && due < s.to }

// recorder gathers the latencies of one kind. Whoever records has a shard, shared with some others: a histogram each would
// be gigabytes for ten thousand producers, one for all a lock that everybody waits for.
type recorder struct {
	shards []*recorderShard
	spare  *hdrhistogram.Histogram // of the one who takes intervals
}

const recorderShards = 4

type recorderShard struct {
	mu       sync.Mutex
	events   uint64
	interval *hdrhistogram.Histogram // of outcomes since they were last taken
	phases   []phaseLatency
}

type phaseLatency struct {
	span
	latency *hdrhistogram.Histogram
}

func newRecorder(users int) *recorder {
	r := &recorder{spare: newHistogram()}
	for range max(1, min(users, recorderShards)) {
		r.shards = append(r.shards, &recorderShard{interval: newHistogram()})
	}
	return r
}

// shard is what user i records into.
func (r *recorder) shard(i int) *recorderShard { return r.shards[i%len(r.shards)] }

// record counts an outcome that came now, of a message that was due then.
func (s *recorderShard) record(now, due int64) {
	s.mu.Lock()
	s.events++
	recordInto(s.interval, now-due)
	for i := range s.phases {
		if p := &s.phases[i]; p.holds(due) {
			recordInto(p.latency, now-due)
		}
	}
	s.mu.Unlock()
}

// open begins a phase, whose end is not known yet.
func (r *recorder) open(from int64) {
	for _, s := range r.shards {
		s.mu.Lock()
		s.phases = append(s.phases, phaseLatency{span{from, 1<<63 - 1}, newHistogram()})
		s.mu.Unlock()
	}
}

// end ends the latest phase. What was due later and recorded already stays: it is of the moment between the two.
func (r *recorder) end(to int64) {
	for _, s := range r.shards {
		s.mu.Lock()
		s.phases[len(s.phases)-1].to = to
		s.mu.Unlock()
	}
}

// phase adds up the latencies of the i-th phase.
func (r *recorder) phase(i int) *hdrhistogram.Histogram {
	sum := newHistogram()
	for _, s := range r.shards {
		s.mu.Lock()
		sum.Merge(s.phases[i].latency)
		s.mu.Unlock()
	}
	return sum
}

// events is how many outcomes there were.
func (r *recorder) events() (n uint64) {
	for _, s := range r.shards {
		s.mu.Lock()
		n += s.events
		s.mu.Unlock()
	}
	return n
}

// take adds the latencies of outcomes since the last take to sum, which it empties before. One goroutine takes.
func (r *recorder) take(sum *hdrhistogram.Histogram) {
	sum.Reset()
	for _, s := range r.shards {
		s.mu.Lock()
		s.interval, r.spare = r.spare, s.interval
		s.mu.Unlock()
		sum.Merge(r.spare)
		r.spare.Reset()
	}
}

// failures keeps the errors of messages: how many, and some examples.
type failures struct {
	mu     sync.Mutex
	counts map[string]uint64
	other  uint64
}

// maxFailures bounds the texts that are kept apart.
const maxFailures = 10

func (f *failures) add(err error) {
	text := err.Error()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.counts == nil {
		f.counts = map[string]uint64{}
	}
	if _, known := f.counts[text]; known || len(f.counts) < maxFailures {
		f.counts[text]++
		return
	}
	f.other++
}

// list returns the errors, the most frequent first.
func (f *failures) list() []Failure {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []Failure
	for text, n := range f.counts {
		all = append(all, Failure{Error: text, Count: n})
	}
	slices.SortFunc(all, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Error, b.Error))
	})
	if f.other > 0 {
		all = append(all, Failure{Error: "others", Count: f.other})
	}
	return all
}
