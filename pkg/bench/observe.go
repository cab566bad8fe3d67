package bench

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/penstock-mq/penstock/pkg/bench/rawdisk"
)

// observer takes a point of the series each second, and marks where phases begin and end.
type observer struct {
	run       *run
	processes []Process
	probe     *rawdisk.Probe // nil: none
	began     int64          // on the run's clock
	ending    chan struct{}
	ended     chan struct{}

	publish, endToEnd *hdrhistogram.Histogram // of the latest interval

	mu     sync.Mutex
	phase  string
	phases []observedPhase
	peak   []int64 // bytes of memory of each process, in this phase
	series []Point
	before mark // of the latest point
	// unobserved says what could not be measured.
	unobserved []string
}

// observedPhase is a phase between two marks.
type observedPhase struct {
	name       string
	begin, end mark
	peak       []int64
	probe      *Latency
}

// mark is what the counters said at one moment.
type mark struct {
	at                          int64
	published, received, failed uint64
	usage                       []usage
	gone                        []bool
	syncs                       float64
}

// newObserver finds out whether everything can be observed, and starts the probe.
func newObserver(ctx context.Context, r *run) (*observer, error) {
	o := &observer{
		run: r, processes: append([]Process{{Name: r.options.Self, PID: os.Getpid()}}, r.options.Processes...),
		ending: make(chan struct{}), ended: make(chan struct{}), publish: newHistogram(), endToEnd: newHistogram(), phase: phaseWarmUp,
	}
	for _, p := range o.processes[1:] {
		if _, err := readUsage("/proc", p.PID); err != nil {
			return nil, fmt.Errorf("measure %s: %w", p.Name, err)
		}
	}
	if _, err := CountSyncs(ctx, r.options.Metrics); err != nil {
		return nil, err
	}
	if r.options.ProbeDir != "" {
		probe, err := rawdisk.StartProbe(ctx, r.options.ProbeDir)
		if err != nil {
			return nil, fmt.Errorf("start disk probe: %w", err)
		}
		o.probe = probe
	}
	o.peak = make([]int64, len(o.processes))
	return o, nil
}

// start begins to take points.
func (o *observer) start() {
	o.before = o.counters()
	o.began = o.before.at
	go o.watch()
}

// stop ends what start began.
func (o *observer) stop() {
	close(o.ending)
	<-o.ended
}

// close ends the probe, and tells what could not be observed.
func (o *observer) close(to *Result) {
	if o.probe != nil {
		if err := o.probe.Close(); err != nil {
			o.unobserved = append(o.unobserved, fmt.Sprintf("disk probe: %v", err))
		}
	}
	to.Unobserved = o.unobserved
}

func (o *observer) watch() {
	defer close(o.ended)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			o.point()
		case <-o.ending:
			return
		}
	}
}

// counters reads everything but syncs. Those who call it do not do so at once.
func (o *observer) counters() mark {
	r := o.run
	m := mark{
		at: r.clock.now(), published: r.published.events(), received: r.received.events(),
		usage: make([]usage, len(o.processes)), gone: make([]bool, len(o.processes)),
	}
	for _, p := range r.producers {
		m.failed += p.failed.Load()
	}
	for i, p := range o.processes {
		u, err := readUsage("/proc", p.PID)
		m.usage[i], m.gone[i] = u, err != nil
	}
	return m
}

func (o *observer) point() {
	o.mu.Lock()
	now, before := o.counters(), o.before
	o.before = now
	o.run.published.take(o.publish)
	o.run.received.take(o.endToEnd)
	seconds := time.Duration(now.at - before.at).Seconds()
	p := Point{
		Seconds: time.Duration(now.at - o.began).Seconds(), Phase: o.phase,
		PublishedPerSecond: perSecond(now.published-before.published, seconds),
		ReceivedPerSecond:  perSecond(now.received-before.received, seconds),
		Failed:             now.failed - before.failed,
		PublishP50Ms:       quantile(o.publish, 50), PublishP99Ms: quantile(o.publish, 99), PublishMaxMs: quantile(o.publish, 100),
		EndToEndP50Ms: quantile(o.endToEnd, 50), EndToEndP99Ms: quantile(o.endToEnd, 99), EndToEndMaxMs: quantile(o.endToEnd, 100),
	}
	for i, u := range now.usage {
		p.Cores = append(p.Cores, max(0, (u.cpu-before.usage[i].cpu).Seconds()/seconds))
		p.RSSBytes = append(p.RSSBytes, u.rss)
		o.peak[i] = max(o.peak[i], u.rss)
	}
	o.series = append(o.series, p)
	o.mu.Unlock()
	if progress := o.run.options.Progress; progress != nil {
		progress(p)
	}
}

func quantile(h *hdrhistogram.Histogram, percent float64) float64 {
	if h.TotalCount() == 0 {
		return 0
	}
	return float64(h.ValueAtQuantile(percent)) / millisecond
}

// enter says what points are of from now on.
func (o *observer) enter(phase string) {
	o.mu.Lock()
	o.phase = phase
	o.mu.Unlock()
}

// open begins a phase now.
func (o *observer) open(ctx context.Context, name string) {
	syncs := o.syncs(ctx) // before: asking takes time, in which nothing is counted yet
	if o.probe != nil {
		o.probe.Take()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	begin := o.counters()
	begin.syncs = syncs
	o.run.published.open(begin.at)
	o.run.received.open(begin.at)
	o.phase = name
	o.phases = append(o.phases, observedPhase{name: name, begin: begin})
	for i, u := range begin.usage {
		o.peak[i] = u.rss
	}
}

// end ends the phase: what was due before at is its.
func (o *observer) end(ctx context.Context, at int64) {
	o.mu.Lock()
	end := o.counters()
	o.run.published.end(at)
	o.run.received.end(at)
	p := &o.phases[len(o.phases)-1]
	p.end = end
	p.end.at = at
	p.peak = make([]int64, len(end.usage))
	for i, u := range end.usage {
		p.peak[i] = max(o.peak[i], u.rss)
	}
	o.mu.Unlock()
	if o.probe != nil {
		p.probe = Summarize(o.probe.Take())
	}
	p.end.syncs = o.syncs(context.WithoutCancel(ctx))
}

// syncsPatience bounds how long a /metrics page may take.
const syncsPatience = 5 * time.Second

// syncs counts the bookies' syncs; below 0 where it could not.
func (o *observer) syncs(ctx context.Context) float64 {
	ctx, cancel := context.WithTimeout(ctx, syncsPatience)
	defer cancel()
	n, err := CountSyncs(ctx, o.run.options.Metrics)
	if err != nil {
		o.unobserved = append(o.unobserved, err.Error())
		return -1
	}
	return n
}

// report fills the result with what was observed. Everything has its outcome.
func (o *observer) report(to *Result) {
	to.Series = o.series
	for i := range o.phases {
		to.Phases = append(to.Phases, o.phases[i].result(o.run, i, o.processes))
	}
}

func (p *observedPhase) result(r *run, index int, processes []Process) Phase {
	b, e := p.begin, p.end
	seconds := time.Duration(e.at - b.at).Seconds()
	size := float64(r.scenario.Size)
	flow := func(n uint64) Flow {
		return Flow{Messages: n, PerSecond: perSecond(n, seconds), BytesPerSecond: perSecond(n, seconds) * size}
	}
	out := Phase{
		Name: p.name, Seconds: seconds, Published: flow(e.published - b.published), Received: flow(e.received - b.received),
		Failed: e.failed - b.failed, Publish: Summarize(r.published.phase(index)), DiskProbe: p.probe,
	}
	if p.name != PhaseBuild {
		out.EndToEnd = Summarize(r.received.phase(index))
	}
	messages := out.Published.Messages
	if p.name == PhaseCatchUp {
		messages = out.Received.Messages
	}
	for i, process := range processes {
		cost := Cost{Name: process.Name, PID: process.PID, RSSBytes: p.peak[i], Gone: b.gone[i] || e.gone[i]}
		if !cost.Gone {
			cost.CPUSeconds = (e.usage[i].cpu - b.usage[i].cpu).Seconds()
			cost.CPUPerMessageMicros = ratio(cost.CPUSeconds*1e6, float64(messages))
			if e.usage[i].written >= 0 && b.usage[i].written >= 0 {
				written := e.usage[i].written - b.usage[i].written
				cost.WrittenBytes = &written
				cost.WrittenPerByte = ratio(float64(written), float64(out.Published.Messages)*size)
			}
		}
		out.Processes = append(out.Processes, cost)
	}
	if n := e.syncs - b.syncs; len(r.options.Metrics) > 0 && b.syncs >= 0 && n >= 0 { // a bookie that was restarted counts anew
		out.Syncs = &Syncs{Count: uint64(n), PerMessage: ratio(n, float64(out.Published.Messages))}
	}
	return out
}

func perSecond(n uint64, seconds float64) float64 { return ratio(float64(n), seconds) }

// ratio is 0 where there is nothing to divide by.
func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}
