// Command peers measures Penstock beside NATS JetStream and the bare disk, on one machine and one disk, and writes what
// came out with a verdict for each target. `make bench-peers` builds what it needs and runs it.
//
// Contestants take turns, A B A B, in an order that turns around with each round, so that what the machine does meanwhile
// befalls all of them alike; figures are medians of the rounds, and ratios are taken within a round. Each run begins with
// new processes on an empty directory, which is removed after it. The alternative, keeping every cluster and letting it idle
// while the others run, was rejected: idle servers sync in the background, elect leaders and hold memory, and the second run
// of each would find what the first one left.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// commit is what was built, set by the linker.
var commit = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to be put off
	}
}

// settings of the command.
type settings struct {
	rounds        int
	programs, dir string
	out           string
	only          string
	duration      time.Duration
}

// leastFreeMiB is what a run may take for a while, and as much again, so that no bookie nears its watermark.
const leastFreeMiB = 8 << 10

func run(ctx context.Context, args []string) error {
	var s settings
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	f.IntVar(&s.rounds, "rounds", 5, "how often each run is repeated")
	f.StringVar(&s.programs, "programs", "bin", "directory of broker, bookie, etcd and nats-server")
	f.StringVar(&s.dir, "dir", "bin", "directory on the disk to be measured, for data of the clusters; some 5 GB for a while")
	f.StringVar(&s.out, "out", "", "file for the results, with the same name and .json beside it for the figures of every run; empty: standard output alone")
	f.StringVar(&s.only, "only", "", "the one workload to run; empty: all")
	f.DurationVar(&s.duration, "duration", 2*time.Second, "how long each run is measured")
	if err := f.Parse(args); err != nil {
		return err //nolint:wrapcheck // it says which flag
	}
	if s.rounds < 1 || s.duration <= 0 {
		return fmt.Errorf("%d rounds of %v: want at least 1, and more than 0", s.rounds, s.duration)
	}
	plan := workloads(s.duration)
	if s.only != "" {
		if plan = chosen(plan, s.only); plan == nil {
			return fmt.Errorf("there is no workload %q", s.only)
		}
	}
	dir, err := os.MkdirTemp(s.dir, "peers-")
	if err != nil {
		return fmt.Errorf("make directory for data: %w", err)
	}
	defer os.RemoveAll(dir)
	if dir, err = filepath.Abs(dir); err != nil {
		return fmt.Errorf("make directory for data: %w", err)
	}
	report := report{Commit: commit, Machine: describeMachine(ctx, dir, s.programs), Started: time.Now().UTC(), Rounds: s.rounds, Each: s.duration.String()}
	if report.Machine.FreeMiB < leastFreeMiB {
		return fmt.Errorf("%s has %d MiB free: want %d, or another -dir", s.dir, report.Machine.FreeMiB, leastFreeMiB)
	}
	c := contest{programs: s.programs, dir: dir, say: func(line string) { fmt.Fprintln(os.Stderr, line) }}
	report.Runs, report.Problems = c.hold(ctx, plan, s.rounds)
	report.Minutes = time.Since(report.Started).Minutes()
	if err := report.write(s.out, plan); err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("interrupted: %w", err)
	}
	if n := len(report.Problems); n > 0 {
		return fmt.Errorf("%d runs failed, the first: %w", n, errors.New(report.Problems[0]))
	}
	return nil
}
