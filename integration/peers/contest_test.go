package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bench"
)

// A small contest between all that there are, with real processes: every run has its figures, turns are taken, and
// nothing is left behind.
func TestContest(t *testing.T) {
	t.Parallel()
	programs, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"etcd", "bookie", "broker", "nats-server"} {
		if _, err := os.Stat(filepath.Join(programs, name)); err != nil {
			t.Fatalf("this test runs the programs in %s, and %s is not there: run `make build bin/nats-server` first", programs, name)
		}
	}
	brief := bench.Scenario{Subscriptions: 1, InFlight: 10, Rate: 500, WarmUp: -1, Duration: 200 * time.Millisecond}
	behind := bench.Scenario{Subscriptions: 1, InFlight: 10, WarmUp: -1, Backlog: 200, Duration: time.Second}
	plan := []workload{
		{name: paced, entries: []entry{
			{contestant: disk, diskFiles: 1, diskGroup: 4096, scenario: brief},
			{contestant: diskAgain, diskFiles: 2, diskGroup: 4096, scenario: brief},
			{contestant: penstock, scenario: brief, probe: true},
			{contestant: penstockLazy, scenario: brief},
			{contestant: jetstreamLax, scenario: brief},
		}},
		{name: catchUp, reads: true, entries: []entry{
			{contestant: penstock, scenario: behind},
			{contestant: jetstream, scenario: behind},
		}},
	}
	var said []string
	c := contest{programs: programs, dir: t.TempDir(), say: func(line string) { said = append(said, line) }}
	runs, problems := c.hold(t.Context(), plan, 1)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	if len(runs) != 7 || len(said) != 7 {
		t.Fatalf("%d runs; %s", len(runs), strings.Join(said, "\n"))
	}
	for _, f := range runs {
		broker := f.Contestant != disk && f.Contestant != diskAgain
		if f.Rate <= 0 || broker && f.CPU[all] < 0 || broker && f.RSS[all] <= 0 || f.Round != 1 || broker != (f.DiskBytes == 0) {
			t.Errorf("%+v", f)
		}
		if ours := f.Contestant == penstock; ours && (f.Workload == paced && (f.ProbeP50 <= 0 || f.EndToEndP50 <= 0 || f.Syncs <= 0) ||
			f.Workload == catchUp && f.BuildRate <= 0) {
			t.Errorf("%+v", f)
		}
	}
	left, err := os.ReadDir(c.dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// What fails is told of, and the rest goes on; turns turn around.
func TestContestGoesOn(t *testing.T) {
	t.Parallel()
	plan := []workload{{name: single, entries: []entry{
		{contestant: disk, variant: "a", diskFiles: 1},
		{contestant: disk, variant: "b", diskFiles: 1},
	}}}
	c := contest{dir: filepath.Join(t.TempDir(), "none"), say: func(string) {}}
	_, problems := c.hold(t.Context(), plan, 2)
	var order []string
	for _, p := range problems {
		name, _, _ := strings.Cut(p, ":")
		order = append(order, name[len(name)-1:])
	}
	if strings.Join(order, "") != "abba" {
		t.Error(problems)
	}
}
