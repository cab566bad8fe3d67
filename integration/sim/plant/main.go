// Plant proves that the simulation finds bugs: it builds the simulation with one bug at a time in it, laid over the
// source, runs seeds until one fails, and prints how many that took. A seed that fails without any bug counts for none:
// it is reported, and the bug's count goes on after it.
//
//	go run ./integration/sim/plant               # all of them, as a table
//	go run ./integration/sim/plant -write        # and puts the table in docs/testing.md
//	go run ./integration/sim/plant -list
//	go run ./integration/sim/plant -only fence   # those whose name has the word
//
// Laying bugs over the source, with the go command's -overlay, keeps them out of the product: a build tag in each place
// would put a wrong line beside a right one in the code that must be read most closely.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/integration/overlay"
)

func main() {
	var o options
	flag.IntVar(&o.seeds, "seeds", 1000, "seeds to try for each bug")
	flag.StringVar(&o.only, "only", "", "a word of the names of the bugs to plant")
	flag.IntVar(&o.atOnce, "parallel", runtime.NumCPU(), "bugs at a time")
	flag.BoolVar(&o.write, "write", false, "put the table in docs/testing.md")
	list := flag.Bool("list", false, "print the bugs")
	flag.Parse()
	if *list {
		for _, p := range plants {
			fmt.Printf("%s: %s\n", p.Package, p.Name)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "plant:", err)
		os.Exit(1)
	}
}

type options struct {
	seeds, atOnce int
	only          string
	write         bool
}

var (
	errMissed = errors.New("not found")
	errPart   = errors.New("-write takes all bugs, -only has some left out")
)

func run(ctx context.Context, o options) error {
	if o.write && o.only != "" {
		return errPart
	}
	began := time.Now()
	root, err := overlay.Root(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	describe := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12")
	describe.Dir = root
	commit, err := describe.Output()
	if err != nil {
		return fmt.Errorf("find the version: %w", err)
	}
	dir, err := os.MkdirTemp("", "plant-")
	if err != nil {
		return fmt.Errorf("make room: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	f := &field{ctx: ctx, root: root, dir: dir, seeds: o.seeds, turns: make(chan struct{}, max(1, o.atOnce))}
	for _, p := range plants {
		if strings.Contains(p.Name, o.only) {
			f.rows = append(f.rows, &row{plant: p})
		}
	}
	if err := f.harvest(); err != nil {
		return err
	}
	text := f.table() + "\n" + f.summary(strings.TrimSpace(string(commit)), time.Since(began)) + "\n"
	fmt.Print(text)
	failures := f.failures()
	if o.write {
		failures = append(failures, write(filepath.Join(root, "docs", "testing.md"), text))
	}
	return errors.Join(failures...)
}
