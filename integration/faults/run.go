//go:build linux

package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/integration/audit"
	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	warmUp    = 200 // messages of each workload before the first fault, and between two
	endWithin = 5 * time.Minute
)

// result is what came out of a cell.
type result struct {
	cell  cell
	took  time.Duration // of which faults took place
	rows  []line
	goal  string // what was measured
	met   bool
	notes []string
	// commit is what the programs were built from.
	commit string
}

// line is one workload's.
type line struct {
	workload string
	report   workload.Report
	stall    time.Duration
	delay    time.Duration
	err      error
}

// run runs a cell for so long, and fails the test where something is wrong.
func run(t *testing.T, programs string, c cell, long time.Duration, seed uint64) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), long+4*endWithin)
	defer cancel()
	s := &site{TB: t, ctx: ctx, long: long, rng: rand.New(rand.NewPCG(seed, 0))} //nolint:gosec // faults are to be told again
	cfg := process.Config{
		Programs: programs, Dir: t.ArtifactDir(), Etcds: max(c.etcds, 1), Bookies: bookies, Brokers: brokers,
		BookieArgs: []string{"--segment-mib", "16", "--low-watermark", "0.98", "--high-watermark", "0.99", "--gc-interval", "1s", "--gc-grace", "5s"},
		BrokerArgs: []string{"--roll-mib", "1", "--housekeeping-interval", "500ms", "--lease-ttl", leaseTTL.String()},
	}
	if c.prepare != nil {
		c.prepare(s, &cfg)
	}
	var err error
	if s.c, err = process.New(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.c.Close()
		if t.Failed() {
			for _, p := range s.c.All() {
				t.Logf("the end of the log of %s:\n%s", p.Name, p.LogTail())
			}
			return
		}
		if err := os.RemoveAll(cfg.Dir); err != nil { // artifacts are kept of what failed
			t.Error(err)
		}
	})
	starting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.c.StartAll(starting); err != nil {
		t.Fatal(err)
	}
	if s.client, err = client.Connect(ctx, s.c.URL()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Second)
		defer cancel()
		_ = s.client.Close(ctx) // with whatever a failed test left
	})
	if err := s.makeNamespaces(); err != nil {
		t.Fatal(err)
	}
	for _, k := range kinds {
		l, err := k.begin(s)
		if err != nil {
			t.Fatalf("%s: %v", k.name, err)
		}
		s.loads = append(s.loads, l)
	}
	out := result{cell: c, commit: figures.BuiltFrom(programs)}
	err = s.strikes(&out)
	if err != nil {
		t.Error(err)
	}
	s.end(&out)
	if err != nil {
		for i := range out.rows {
			out.rows[i].err = errors.Join(out.rows[i].err, err)
		}
	}
	out.notes = s.notes
	return out
}

// strikes brings the fault about, again and again, for as long as the cell takes.
func (s *site) strikes(out *result) error {
	if err := s.advance("before the first fault"); err != nil {
		return err
	}
	var watches []func() time.Duration
	for _, l := range s.loads {
		watches = append(watches, l.watch())
	}
	began, n, slowest := time.Now(), 0, time.Duration(0)
	defer func() {
		out.took = time.Since(began)
		longest := time.Duration(0)
		for i, w := range watches {
			d := w()
			out.rows = append(out.rows, line{workload: kinds[i].name, stall: d})
			longest = max(longest, d)
		}
		if out.cell.stall > 0 {
			s.measure("longest stall", longest, out.cell.stall)
		}
		s.expect(slowest < soon, "all workloads went on only %v after a fault had ended", slowest.Round(time.Second))
		if s.goal == "" {
			s.goal = fmt.Sprintf("all go on %v after the fault's end", slowest.Round(10*time.Millisecond))
		}
		s.note("struck %d times", n)
		out.goal, out.met = s.goal, !s.unmet
	}()
	for time.Since(began) < s.long {
		for n++; ; n++ {
			if s.target = s.loads[n%len(s.loads)]; s.target.topic() != "" {
				break
			}
		}
		if err := out.cell.strike(s); err != nil {
			return fmt.Errorf("%s: %w", out.cell.name, err)
		}
		healed := time.Now()
		if err := s.advance("after a fault's end"); err != nil {
			return err
		}
		slowest = max(slowest, time.Since(healed))
	}
	return nil
}

// measure tells how long publishing stood still, where that is the goal.
func (s *site) measure(what string, d, limit time.Duration) {
	s.goal = fmt.Sprintf("%s %v", what, d.Round(10*time.Millisecond))
	if d > limit {
		s.unmet = true
	}
}

// advance waits until every workload has made progress.
func (s *site) advance(when string) error {
	before := make([]uint64, len(s.loads))
	for i, l := range s.loads {
		before[i] = l.progress()
	}
	for i, l := range s.loads {
		err := s.until(kinds[i].name+" goes on "+when, func(context.Context) bool { return l.progress() >= before[i]+warmUp })
		if err != nil {
			return err
		}
	}
	return nil
}

// end ends the workloads, and judges everything.
func (s *site) end(out *result) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, endWithin)
	defer cancel()
	for _, l := range s.loads {
		l.stop()
	}
	for i, l := range s.loads {
		o, err := l.finish(ctx)
		for _, n := range o.notes {
			s.note("%s: %s", kinds[i].name, n)
		}
		if err = errors.Join(o.err(), err); err != nil {
			s.Errorf("%s: %v\ndelivered: %v\nstored: %v", kinds[i].name, err, o.delivered, o.stored)
		}
		if i == len(out.rows) { // the first fault has not come
			out.rows = append(out.rows, line{workload: kinds[i].name})
		}
		row := &out.rows[i]
		row.report, row.delay, row.err = o.report(), o.delay, err
	}
	var wrong []error
	for _, p := range s.c.All() {
		if !p.Running() {
			wrong = append(wrong, fmt.Errorf("%s died: exit code %d", p.Name, p.ExitCode()))
		}
	}
	sum, err := audit.Run(ctx, s.c, func(p *process.Process) bool { return p == s.rotten })
	wrong = append(wrong, err)
	s.note("%v", sum)
	for _, text := range s.panics() {
		wrong = append(wrong, errors.New(text))
	}
	if err := errors.Join(wrong...); err != nil {
		s.Error(err)
		for i := range out.rows {
			out.rows[i].err = errors.Join(out.rows[i].err, err)
		}
	}
}

// verdict is one line.
func (l line) verdict() string {
	if l.err == nil {
		return "ok"
	}
	text, _, _ := strings.Cut(l.err.Error(), "\n")
	return "FAILED: " + text
}

// failed is the result of a cell that came to no end.
func failed(c cell, programs string) result {
	return result{cell: c, commit: figures.BuiltFrom(programs), rows: []line{{workload: "all", err: errors.New("it came to no end: see the test's output")}}}
}

// programDirectory is where `make build` leaves the programs.
func programDirectory() (string, error) { return filepath.Abs("../../bin") }

// chosen are the cells to run.
func chosen(full bool) []cell {
	return slices.DeleteFunc(slices.Clone(matrix), func(c cell) bool {
		return !full && !c.short || c.strike == nil || c.root && !rooted
	})
}
