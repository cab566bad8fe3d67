package main

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/bench"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// invented is a report whose figures meet every target that has a figure, but one.
func invented() report {
	r := report{Commit: "abc", Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Rounds: 3, Each: "3s", Machine: machine{CPUs: 2, Load: "0.1 0.2 0.3"}}
	add := func(workload, contestant string, f figures) {
		f.Workload, f.Contestant = workload, contestant
		for round := range r.Rounds { // each round is slower than the one before, for all alike
			slow := float64(round + 1)
			g := f
			g.Round, g.Rate, g.DiskBytes, g.P50, g.P99 = round+1, f.Rate/slow, f.DiskBytes/slow, f.P50*slow, f.P99*slow
			r.Runs = append(r.Runs, g)
		}
	}
	add(batched, disk, figures{Rate: 600, DiskBytes: 600e6, P50: 3, P99: 5})
	add(batched, penstock, figures{Rate: 150_000, P50: 9, P99: 20, CPU: map[string]float64{all: 9, "client": 2}, Written: 3.3})
	add(batched, jetstream, figures{Rate: 12_000})
	add(unbatched, jetstream, figures{Rate: 15_000})
	add(unbatched, penstock, figures{Rate: 60_000, CPU: map[string]float64{all: 20}})
	return r
}

// Ratios are taken within rounds, so that a machine that gets slower does not blur them, and each has its verdict.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	page := invented().page(workloads(time.Second))
	for _, want := range []string{
		"| ≥ 0.60; farther 0.75 | 0.77 (0.77 to 0.77) | met, and the farther one |",
		"fast ingest, sync always | ≥ 7.00×; farther 10.0× | 12.5× (12.5 to 12.5) | met, and the farther one |",
		"its PublishAsync | ≥ 7.00×; farther 10.0× | 10.0× (10.0 to 10.0) | met, and the farther one |",
		"| ≥ 3.50×; farther 5.00× | 4.00× (4.00 to 4.00) | met |",
		"| ≤ 10.0 µs | 9.00 µs (9.00 to 9.00) | met |",
		"| ≤ 1.05 | 1.10 (1.10 to 1.10) | missed |",
		"| ≤ 0.30 ms |  | not measured |",
		"| messages/s |  |  | 75,000 (50,000 to 150,000) | 6,000 (4,000 to 12,000) |",
		"| MB/s |  | 300 (200 to 600) |",
		"| of it client |  |  | 2.00 (2.00 to 2.00) |",
		"at commit abc", "Load average before: 0.1 0.2 0.3",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("there is no %q", want)
		}
	}
	if t.Failed() {
		t.Log(page)
	}
}

func TestVerdictBounds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		target target
		median float64
		want   string
	}{
		{target{goal: 3}, 3, "met"},
		{target{goal: 3}, 2.99, "missed"},
		{target{goal: 3, farther: 4}, 4, "met, and the farther one"},
		{target{goal: 3, most: true}, 3, "met"},
		{target{goal: 3, most: true}, 3.01, "missed"},
	} {
		if got := c.target.verdict(c.median); got != c.want {
			t.Errorf("%v of %+v: %s, want %s", c.median, c.target, got, c.want)
		}
	}
}

// Whatever a target compares is run by some workload, and every figure that it takes exists.
func TestTargetsAreOfThePlan(t *testing.T) {
	t.Parallel()
	runs := make(map[place]bool)
	for _, w := range workloads(time.Second) {
		for _, e := range w.entries {
			if runs[place{w.name, e.key()}] {
				t.Errorf("%s runs %s twice in a round", w.name, e.key())
			}
			runs[place{w.name, e.key()}] = true
			if e.diskFiles == 0 {
				if err := e.scenario.WithDefaults().Validate(); err != nil {
					t.Errorf("%s, %s: %v", w.name, e.key(), err)
				}
			}
		}
	}
	for _, g := range targets() {
		for _, p := range g.places {
			if !runs[p] {
				t.Errorf("%q takes what nobody runs: %v", g.what, p)
			}
		}
		if v := g.value(make([]figures, len(g.places))); v != 0 && !math.IsNaN(v) && v != 1 && v != 100 {
			t.Errorf("%q of nothing is %v", g.what, v)
		}
	}
}

func TestCompareLeavesOutRoundsThatLackARun(t *testing.T) {
	t.Parallel()
	r := table{"w": {"a": {1: {Rate: 2}, 2: {Rate: 9}}, "b": {1: {Rate: 1}}}}
	if s := r.compare(rateOver, place{"w", "a"}, place{"w", "b"}); len(s) != 1 || s[0] != 2 {
		t.Error(s)
	}
	if s := r.compare(rateOver, place{"w", "c"}, place{"w", "b"}); len(s) != 0 {
		t.Error(s)
	}
	for median, s := range map[float64]spread{0: {}, 3: {3}, 2.5: {2, 3}, 5: {1, 5, 6}} {
		if s.median() != median {
			t.Errorf("median of %v is %v", s, s.median())
		}
	}
}

func TestSummarize(t *testing.T) {
	t.Parallel()
	r := &bench.Result{Phases: []bench.Phase{
		{Name: bench.PhaseBuild, Published: bench.Flow{PerSecond: 100}, Publish: &bench.Latency{P99Ms: 8}},
		{
			Name: bench.PhaseCatchUp, Published: bench.Flow{PerSecond: 90}, Received: bench.Flow{PerSecond: 5000}, Publish: &bench.Latency{P50Ms: 1, P99Ms: 9, P999Ms: 20},
			Syncs: &bench.Syncs{PerMessage: 0.5}, DiskProbe: &bench.Latency{P50Ms: 3, P99Ms: 4},
			Processes: []bench.Cost{
				{Name: "client", CPUPerMessageMicros: 1, RSSBytes: mebibyte, WrittenPerByte: 7},
				{Name: "bookie-1", CPUPerMessageMicros: 2, RSSBytes: mebibyte, WrittenPerByte: 1},
				{Name: "bookie-2", CPUPerMessageMicros: 3, RSSBytes: mebibyte, WrittenPerByte: 1.5},
			},
		},
	}}
	f := summarize(r, true)
	if f.Rate != 5000 || f.PublishRate != 90 || f.BuildRate != 100 || f.BuildP99 != 8 || f.P999 != 20 || f.ProbeP99 != 4 || f.Syncs != 0.5 ||
		f.CPU["bookie"] != 5 || f.CPU[all] != 6 || f.RSS[all] != 3 || f.Written != 2.5 {
		t.Errorf("%+v", f)
	}
}

// The figures of every run lie beside the page, as JSON with a line each.
func TestFiles(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "bench.md")
	r := invented()
	r.Problems = []string{"round 1 of 3, batched, disk: full"}
	if err := r.write(path, workloads(time.Second)); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(page), "- round 1 of 3, batched, disk: full\n") {
		t.Errorf("%v\n%s", err, page)
	}
	text, err := os.ReadFile(strings.TrimSuffix(path, ".md") + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var back report
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if len(back.Runs) != len(r.Runs) || back.Runs[3].CPU[all] != 9 || back.Machine.CPUs != 2 || strings.Count(string(text), "\n") != len(r.Runs)+2 {
		t.Errorf("%s", text)
	}
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for want, v := range map[string]float64{"0.12": 0.123, "1.23": 1.234, "12.3": 12.34, "123": 123.4, "1,234": 1234, "1,234,568": 1234567.8, "-1,234": -1234, "-0.50": -0.5} {
		if got := number(v, ""); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}

func TestMachine(t *testing.T) {
	t.Parallel()
	m := describeMachine(t.Context(), t.TempDir(), t.TempDir())
	if m.CPUs == 0 || m.Kernel == "" || m.MemoryMiB == 0 || m.FileSystem == "" || m.Load == "" || m.NATS != "" {
		t.Errorf("%+v", m)
	}
}

func TestWrongFlags(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"no workload": {"-only", "none"},
		"0 rounds":    {"-rounds", "0"},
		"not exist":   {"-dir", filepath.Join(t.TempDir(), "none")},
	} {
		if err := run(t.Context(), args); err == nil || !strings.Contains(err.Error(), want) && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
