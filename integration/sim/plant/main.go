// Plant proves that the simulation finds bugs: it builds the simulation with one bug at a time in it, laid over the
// source, runs seeds until one fails, and prints how many that took.
//
//	go run ./integration/sim/plant               # all of them, as a table
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
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"github.com/penstock-mq/penstock/integration/overlay"
)

func main() {
	seeds := flag.Int("seeds", 1000, "seeds to try for each bug")
	only := flag.String("only", "", "a word of the names of the bugs to plant")
	list := flag.Bool("list", false, "print the bugs")
	atOnce := flag.Int("parallel", runtime.NumCPU(), "bugs at a time")
	flag.Parse()
	if err := run(context.Background(), *seeds, *only, *list, *atOnce); err != nil {
		fmt.Fprintln(os.Stderr, "plant:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, seeds int, only string, list bool, atOnce int) error {
	root, err := overlay.Root(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	if list {
		for _, p := range plants {
			fmt.Printf("%s: %s\n", p.Package, p.Name)
		}
		return nil
	}
	fmt.Println("| bug | where | seeds | invariant |\n|---|---|---|---|")
	type result struct {
		row string
		err error
	}
	turns := make(chan struct{}, atOnce)
	var results []chan result // printed in the order of the bugs
	for _, p := range plants {
		if !strings.Contains(p.Name, only) {
			continue
		}
		done := make(chan result, 1)
		results = append(results, done)
		go func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			n, invariant, err := p.grow(ctx, root, seeds)
			found := strconv.Itoa(n)
			switch {
			case err != nil:
				err = fmt.Errorf("%s: %w", p.Name, err)
			case n == 0:
				found = "not in " + strconv.Itoa(seeds)
				err = fmt.Errorf("%s: %w", p.Name, errMissed)
			}
			r := result{fmt.Sprintf("| %s | `%s` | %s | %s |", p.Name, strings.TrimPrefix(p.Package, "pkg/"), found, invariant), err}
			fmt.Fprintln(os.Stderr, r.row)
			done <- r
		}()
	}
	var failures []error
	for _, done := range results {
		r := <-done
		if r.err != nil {
			failures = append(failures, r.err)
		}
		if r.err == nil || errors.Is(r.err, errMissed) {
			fmt.Println(r.row)
		}
	}
	return errors.Join(failures...)
}

var errMissed = errors.New("not found")

func (p plant) bug() overlay.Bug { return overlay.Bug{Package: p.Package, Old: p.Old, New: p.New} }

var foundLine = regexp.MustCompile(`found after (\d+) seeds: ([^:]+):`)

// grow builds the simulation with the bug and runs it. It returns after how many seeds it was found, 0 if it was not, and
// the invariant that it broke.
func (p plant) grow(ctx context.Context, root string, seeds int) (int, string, error) {
	dir, err := os.MkdirTemp("", "plant-")
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program, err := p.bug().Build(ctx, root, dir, "./integration/sim")
	if err != nil {
		return 0, "", err //nolint:wrapcheck // it says what failed
	}
	//nolint:gosec // its arguments are this program's
	test := exec.CommandContext(ctx, program, "-test.run", "^TestSeed$", "-test.timeout", "1h", "-until", "-seeds", strconv.Itoa(seeds))
	out, err := test.CombinedOutput()
	if m := foundLine.FindSubmatch(out); m != nil {
		n, convErr := strconv.Atoi(string(m[1]))
		return n, string(m[2]), convErr
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return 0, "", fmt.Errorf("run: %w\n%s", err, tail(out))
	}
	return 0, "", err
}

func tail(b []byte) []byte { return b[max(0, len(b)-2000):] }
