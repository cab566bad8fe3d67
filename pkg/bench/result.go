package bench

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Result is what a run measured. Its JSON is an interface: fields are only added.
type Result struct {
	Driver   string    `json:"driver"`
	Scenario Scenario  `json:"scenario"`
	Started  time.Time `json:"started"`
	Machine  Machine   `json:"machine"`
	Setup    Setup     `json:"setup"`
	// Phases are what was measured, in order: "steady"; or "build", while a backlog is published, and "catch-up", while it
	// is consumed. Fewer if the run was interrupted.
	Phases []Phase `json:"phases"`
	// Series has a point for each second, warm-up included.
	Series []Point `json:"series"`
	// Lateness is by how much the engine itself was late to wake a producer, at a given rate. It is in the latencies.
	Lateness *Latency  `json:"lateness,omitempty"`
	Verified Verified  `json:"verified"`
	Failures []Failure `json:"failures,omitempty"`
	// Unobserved says what could not be measured, which nothing depends on: syncs, the disk probe.
	Unobserved []string `json:"unobserved,omitempty"`
	// Interrupted says why the run ended before its time.
	Interrupted string `json:"interrupted,omitempty"`
}

// Machine is where it was measured.
type Machine struct {
	CPUs int    `json:"cpus"`
	OS   string `json:"os"`
	Arch string `json:"arch"`
	Go   string `json:"go"`
	// Load is the load average over a minute before the run; above a few hundredths somebody else was at work.
	Load float64 `json:"load"`
}

// Setup is how long it took until everything was there.
type Setup struct {
	TopicsSeconds    float64 `json:"topicsSeconds"`
	ConsumersSeconds float64 `json:"consumersSeconds"`
	ProducersSeconds float64 `json:"producersSeconds"`
}

// Phase is a stretch of time that was measured.
type Phase struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
	// Published counts acknowledgements, and Received first deliveries over all subscriptions, that came in this time.
	Published Flow `json:"published"`
	Received  Flow `json:"received"`
	// Failed counts messages that failed in this time.
	Failed uint64 `json:"failed"`
	// Publish and EndToEnd are latencies of messages that were due in this time. EndToEnd is absent where consumers do not
	// run from the start.
	Publish  *Latency `json:"publish,omitempty"`
	EndToEnd *Latency `json:"endToEnd,omitempty"`
	// Processes are the measuring process and those that were named.
	Processes []Cost `json:"processes,omitempty"`
	// Syncs of all bookies, and how many of them a message took: absent if their metrics were not given.
	Syncs *Syncs `json:"syncs,omitempty"`
	// DiskProbe is the latency of 4 KiB fdatasyncs to the same disk, one every few milliseconds: absent if not asked for.
	DiskProbe *Latency `json:"diskProbe,omitempty"`
}

// Flow is messages over time.
type Flow struct {
	Messages       uint64  `json:"messages"`
	PerSecond      float64 `json:"perSecond"`
	BytesPerSecond float64 `json:"bytesPerSecond"`
}

// Latency summarizes latencies, in milliseconds.
type Latency struct {
	Count  int64   `json:"count"`
	MeanMs float64 `json:"meanMs"`
	P50Ms  float64 `json:"p50Ms"`
	P90Ms  float64 `json:"p90Ms"`
	P99Ms  float64 `json:"p99Ms"`
	P999Ms float64 `json:"p999Ms"`
	MaxMs  float64 `json:"maxMs"`
	// Distribution is for plots: some percentiles, ever closer to 100.
	Distribution []Percentile `json:"distribution,omitempty"`
}

// Percentile is one point of a distribution.
type Percentile struct {
	Percent float64 `json:"percent"`
	Ms      float64 `json:"ms"`
}

// Cost is what a process used in a phase.
type Cost struct {
	Name string `json:"name"`
	PID  int    `json:"pid"`
	// CPUSeconds is user and system time. Per message counts what the phase is about: what was published; in a catch-up what
	// was received.
	CPUSeconds          float64 `json:"cpuSeconds"`
	CPUPerMessageMicros float64 `json:"cpuPerMessageMicros"`
	RSSBytes            int64   `json:"rssBytes"` // the most that was seen, once a second
	WrittenBytes        *int64  `json:"writtenBytes,omitempty"`
	WrittenPerByte      float64 `json:"writtenPerByte,omitempty"` // for each byte published
	Gone                bool    `json:"gone,omitempty"`           // it ended meanwhile
}

// Syncs are fdatasyncs of bookies.
type Syncs struct {
	Count      uint64  `json:"count"`
	PerMessage float64 `json:"perMessage"`
}

// Point is a second of a run.
type Point struct {
	// Seconds is when it ended, from the beginning of the warm-up; Phase what it was in: "warm-up", that of a [Phase], or "drain".
	Seconds float64 `json:"seconds"`
	Phase   string  `json:"phase"`
	// Rates, of this second.
	PublishedPerSecond float64 `json:"publishedPerSecond"`
	ReceivedPerSecond  float64 `json:"receivedPerSecond"`
	Failed             uint64  `json:"failed,omitempty"`
	// Latencies of what had its outcome in this second.
	PublishP50Ms  float64 `json:"publishP50Ms"`
	PublishP99Ms  float64 `json:"publishP99Ms"`
	PublishMaxMs  float64 `json:"publishMaxMs"`
	EndToEndP50Ms float64 `json:"endToEndP50Ms"`
	EndToEndP99Ms float64 `json:"endToEndP99Ms"`
	EndToEndMaxMs float64 `json:"endToEndMaxMs"`
	// Processes, in the order of [Phase.Processes]: cores in use, and bytes of memory.
	Cores    []float64 `json:"cores,omitempty"`
	RSSBytes []int64   `json:"rssBytes,omitempty"`
}

// Verified compares what was acknowledged with what came back, over the whole run, warm-up included.
type Verified struct {
	Sent         uint64 `json:"sent"`
	Acknowledged uint64 `json:"acknowledged"`
	Failed       uint64 `json:"failed"`
	// Unsettled were given to the driver, which never told their outcome.
	Unsettled uint64 `json:"unsettled,omitempty"`
	// Unsent were due and never given to the driver: the rate was higher than what is possible. The latencies are of those
	// that were sent, and too good by what these would have had.
	Unsent uint64 `json:"unsent,omitempty"`
	// Expected is each acknowledged message for each subscription of its topic; Received the first deliveries; Missing what
	// of Expected is not among them.
	Expected   uint64 `json:"expected"`
	Received   uint64 `json:"received"`
	Missing    uint64 `json:"missing"`
	Duplicates uint64 `json:"duplicates,omitempty"`
	Foreign    uint64 `json:"foreign,omitempty"`
}

// Failure is a way in which messages failed, and how many did.
type Failure struct {
	Error string `json:"error"`
	Count uint64 `json:"count"`
}

// Err says what of the result is not as it should be: messages that failed, are missing, or are nobody's. A rate that was not
// reached is no error: it is what was to be found out.
func (r *Result) Err() error {
	v := r.Verified
	var errs []error
	if v.Failed > 0 {
		why := ""
		if len(r.Failures) > 0 {
			why = ": " + r.Failures[0].Error
		}
		errs = append(errs, fmt.Errorf("%d of %d messages failed%s", v.Failed, v.Sent, why))
	}
	if v.Unsettled > 0 {
		errs = append(errs, fmt.Errorf("%d messages never had an outcome", v.Unsettled))
	}
	if v.Missing > 0 {
		errs = append(errs, fmt.Errorf("%d of %d acknowledged messages were not received", v.Missing, v.Expected))
	}
	if v.Foreign > 0 {
		errs = append(errs, fmt.Errorf("%d messages were received that were not published to their topic in this run", v.Foreign))
	}
	if v.Acknowledged == 0 {
		errs = append(errs, errors.New("nothing was acknowledged"))
	}
	return oneLine(errs)
}

// Phase returns the phase with that name, or nil.
func (r *Result) Phase(name string) *Phase {
	for i := range r.Phases {
		if r.Phases[i].Name == name {
			return &r.Phases[i]
		}
	}
	return nil
}

const millisecond = float64(time.Millisecond)

// Summarize returns what a histogram of nanoseconds holds; nil if that is nothing.
func Summarize(h *hdrhistogram.Histogram) *Latency {
	if h == nil || h.TotalCount() == 0 {
		return nil
	}
	at := func(percent float64) float64 { return float64(h.ValueAtQuantile(percent)) / millisecond }
	l := &Latency{
		Count: h.TotalCount(), MeanMs: h.Mean() / millisecond,
		P50Ms: at(50), P90Ms: at(90), P99Ms: at(99), P999Ms: at(99.9), MaxMs: float64(h.Max()) / millisecond,
	}
	for rest := 100.0; rest > 100/float64(h.TotalCount()); rest *= distributionStep {
		percent := math.Round((100-rest)*1e7) / 1e7
		l.Distribution = append(l.Distribution, Percentile{Percent: percent, Ms: at(percent)})
	}
	l.Distribution = append(l.Distribution, Percentile{Percent: 100 - 100/float64(h.TotalCount()), Ms: l.MaxMs})
	return l
}

// distributionStep makes six points for each further nine of a percentile.
const distributionStep = 0.6812920690579611 // the sixth root of 1/10
