package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/pkg/bench"
)

// figures are what one run measured. Its JSON is a line of the results.
type figures struct {
	Workload   string `json:"workload"`
	Contestant string `json:"contestant"`
	Round      int    `json:"round"`
	// Rate is messages a second: acknowledged, or received where the workload reads; of the disk, syncs.
	Rate float64 `json:"rate"`
	// BuildRate is what was acknowledged each second while a backlog was made, PublishRate while it was read.
	BuildRate   float64 `json:"buildRate,omitempty"`
	PublishRate float64 `json:"publishRate,omitempty"`
	// Latencies in milliseconds.
	P50         float64 `json:"p50,omitempty"`
	P99         float64 `json:"p99,omitempty"`
	P999        float64 `json:"p999,omitempty"`
	BuildP99    float64 `json:"buildP99,omitempty"`
	EndToEndP50 float64 `json:"endToEndP50,omitempty"`
	EndToEndP99 float64 `json:"endToEndP99,omitempty"`
	ProbeP50    float64 `json:"probeP50,omitempty"`
	ProbeP99    float64 `json:"probeP99,omitempty"`
	// CPU in microseconds a message, and RSS in MiB, by kind of process and over all of them.
	CPU map[string]float64 `json:"cpu,omitempty"`
	RSS map[string]float64 `json:"rss,omitempty"`
	// Written is bytes that the storing processes wrote, for each byte published.
	Written float64 `json:"written,omitempty"`
	// Syncs of all bookies, for each message.
	Syncs float64 `json:"syncs,omitempty"`
	// ReadThrough is entries that brokers read from bookies, for each that was appended.
	ReadThrough float64 `json:"readThrough,omitempty"`
	// DiskBytes a second, of the disk alone.
	DiskBytes float64 `json:"diskBytes,omitempty"`
}

// all is the sum over every process.
const all = "all"

// kind of a process, by its name: "bookie-2" is a bookie.
func kind(process string) string {
	k, _, _ := strings.Cut(process, "-")
	return k
}

// stores tells which kinds of processes have messages on their disks.
func stores(kind string) bool { return kind == "bookie" || kind == "nats" }

const mebibyte = 1 << 20

// summarize takes out of a result what counts.
func summarize(r *bench.Result, reads bool) figures {
	f := figures{CPU: make(map[string]float64), RSS: make(map[string]float64)}
	phase := r.Phase(bench.PhaseSteady)
	if reads {
		phase = r.Phase(bench.PhaseCatchUp)
		build := r.Phase(bench.PhaseBuild)
		f.BuildRate, f.PublishRate = build.Published.PerSecond, phase.Published.PerSecond
		if build.Publish != nil {
			f.BuildP99 = build.Publish.P99Ms
		}
	}
	f.Rate = phase.Published.PerSecond
	if reads {
		f.Rate = phase.Received.PerSecond
	}
	f.publish(phase.Publish)
	if l := phase.EndToEnd; l != nil && !reads {
		f.EndToEndP50, f.EndToEndP99 = l.P50Ms, l.P99Ms
	}
	if l := phase.DiskProbe; l != nil {
		f.ProbeP50, f.ProbeP99 = l.P50Ms, l.P99Ms
	}
	if phase.Syncs != nil {
		f.Syncs = phase.Syncs.PerMessage
	}
	for _, p := range phase.Processes {
		for _, k := range []string{kind(p.Name), all} {
			f.CPU[k] += p.CPUPerMessageMicros
			f.RSS[k] += float64(p.RSSBytes) / mebibyte
		}
		if stores(kind(p.Name)) {
			f.Written += p.WrittenPerByte
		}
	}
	return f
}

func (f *figures) publish(l *bench.Latency) {
	if l != nil {
		f.P50, f.P99, f.P999 = l.P50Ms, l.P99Ms, l.P999Ms
	}
}

func (f figures) String() string {
	if f.DiskBytes > 0 {
		return fmt.Sprintf("%.0f MB/s, %.0f syncs/s, p50 %.2f ms, p99 %.2f ms", f.DiskBytes/1e6, f.Rate, f.P50, f.P99)
	}
	return fmt.Sprintf("%.0f messages/s, p50 %.2f ms, p99 %.2f ms, %.1f µs of CPU a message", f.Rate, f.P50, f.P99, f.CPU[all])
}

// spread is what some rounds gave, in order of size.
type spread []float64

func (s spread) median() float64 {
	n := len(s)
	if n == 0 {
		return 0
	}
	return (s[(n-1)/2] + s[n/2]) / 2
}

// table holds runs by workload, contestant and round.
type table map[string]map[string]map[int]figures

func tabulate(runs []figures) table {
	t := make(table)
	for _, f := range runs {
		if t[f.Workload] == nil {
			t[f.Workload] = make(map[string]map[int]figures)
		}
		if t[f.Workload][f.Contestant] == nil {
			t[f.Workload][f.Contestant] = make(map[int]figures)
		}
		t[f.Workload][f.Contestant][f.Round] = f
	}
	return t
}

// of gathers a figure of a contestant over the rounds.
func (t table) of(workload, contestant string, value func(figures) float64) (s spread) {
	for _, f := range t[workload][contestant] {
		s = append(s, value(f))
	}
	slices.Sort(s)
	return s
}

// place names a run of each round.
type place struct{ workload, contestant string }

// compare gathers a figure of several runs, taken within each round that has them all.
func (t table) compare(value func(f []figures) float64, places ...place) (s spread) {
	first := places[0]
	for round := range t[first.workload][first.contestant] {
		var row []figures
		for _, p := range places {
			if f, ok := t[p.workload][p.contestant][round]; ok {
				row = append(row, f)
			}
		}
		if len(row) == len(places) {
			s = append(s, value(row))
		}
	}
	slices.SortFunc(s, cmp.Compare)
	return s
}
