package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/integration/overlay"
)

// field is where bugs are planted.
type field struct {
	ctx   context.Context //nolint:containedctx // of the whole run
	root  string
	dir   string // for programs
	seeds int    // tried for each bug
	turns chan struct{}
	rows  []*row

	// clean is how many seeds were run without any bug, bad those of them that fail.
	clean int
	bad   []finding
}

// row is what became of a bug.
type row struct {
	plant
	tried int // seeds
	found finding
	err   error
}

// finding is a seed that fails, and the invariant that it breaks. The zero value is none.
type finding struct {
	seed      int
	invariant string
}

// firstClean is how many seeds are run before anything is planted, when all is to be: where they fail, nothing is worth
// counting.
const firstClean = 100

// harvest grows all bugs, and whatever they were found by without them.
func (f *field) harvest() error {
	unplanted := filepath.Join(f.dir, "unplanted.test")
	if err := overlay.Build(f.ctx, f.root, unplanted, "./integration/sim"); err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	if len(f.rows) == len(plants) {
		if err := f.weed(unplanted, min(firstClean, f.seeds)); err != nil {
			return err
		}
	}
	for rows := f.rows; len(rows) > 0; {
		f.atOnce(len(rows), func(i int) {
			r := rows[i]
			f.grow(r)
			fmt.Fprintln(os.Stderr, r)
		})
		if f.ctx.Err() != nil {
			return fmt.Errorf("grow: %w", f.ctx.Err())
		}
		most := 0
		for _, r := range rows {
			most = max(most, r.found.seed)
		}
		if err := f.weed(unplanted, most); err != nil {
			return err
		}
		var again []*row
		for _, r := range rows {
			if slices.ContainsFunc(f.bad, func(b finding) bool { return r.err == nil && r.found.seed == b.seed }) {
				again = append(again, r)
			}
		}
		rows = again
	}
	return nil
}

// atOnce calls do with each number below n, as many at a time as there are turns.
func (f *field) atOnce(n int, do func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		f.turns <- struct{}{}
		all.Go(func() {
			defer func() { <-f.turns }()
			if f.ctx.Err() == nil {
				do(i)
			}
		})
	}
	all.Wait()
}

// weed runs the seeds up to the given one that were not run yet without any bug.
func (f *field) weed(unplanted string, upTo int) error {
	const atATime = 50
	from := f.clean + 1
	n := (upTo - f.clean + atATime - 1) / atATime
	if n <= 0 {
		return nil
	}
	bad, errs := make([][]finding, n), make([]error, n)
	f.atOnce(n, func(i int) {
		last := min(upTo, from+(i+1)*atATime-1)
		for next := from + i*atATime; next <= last; {
			got, err := f.until(unplanted, next, last)
			if err != nil || got.seed == 0 {
				errs[i] = err
				return
			}
			fmt.Fprintf(os.Stderr, "seed %d fails without any bug: %s\n", got.seed, got.invariant)
			bad[i] = append(bad[i], got)
			next = got.seed + 1
		}
	})
	f.clean, f.bad = upTo, append(f.bad, slices.Concat(bad...)...)
	return errors.Join(append(errs, f.ctx.Err())...)
}

// grow builds the simulation with a bug and runs it until the next seed that fails.
func (f *field) grow(r *row) {
	dir, err := os.MkdirTemp(f.dir, "")
	if err != nil {
		r.err = fmt.Errorf("make room: %w", err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program, err := r.bug().Build(f.ctx, f.root, dir, "./integration/sim")
	if err != nil {
		r.err = err
		return
	}
	r.found, r.err = f.until(program, r.tried+1, f.seeds)
	r.tried = f.seeds
	switch {
	case r.found.seed > 0:
		r.tried = r.found.seed
	case r.err == nil:
		r.err = errMissed
	}
}

func (p plant) bug() overlay.Bug { return overlay.Bug{Package: p.Package, Old: p.Old, New: p.New} }

var foundLine = regexp.MustCompile(`found after (\d+) seeds: ([^:]+):`)

// until runs seeds until one fails.
func (f *field) until(program string, from, last int) (finding, error) {
	if from > last {
		return finding{}, nil
	}
	//nolint:gosec // its arguments are this program's
	test := exec.CommandContext(f.ctx, program, "-test.run", "^TestSeed$", "-test.timeout", "1h", "-until",
		"-from", strconv.Itoa(from), "-seeds", strconv.Itoa(last-from+1))
	test.Dir = filepath.Join(f.root, "integration", "sim")
	out, err := test.CombinedOutput()
	if m := foundLine.FindSubmatch(out); m != nil {
		n, err := strconv.Atoi(string(m[1]))
		return finding{from + n - 1, string(m[2])}, err //nolint:wrapcheck // cannot be
	}
	if err != nil {
		err = fmt.Errorf("run seeds from %d on: %w\n%s", from, err, out[max(0, len(out)-2000):])
	}
	return finding{}, err
}

func (r *row) String() string {
	found := strconv.Itoa(r.found.seed)
	switch {
	case errors.Is(r.err, errMissed):
		found = "not in " + strconv.Itoa(r.tried)
	case r.err != nil:
		found = "not run"
	}
	return fmt.Sprintf("| %s | `%s` | %s | %s |", r.Name, strings.TrimPrefix(r.Package, "pkg/"), found, r.found.invariant)
}

// table is what became of all bugs.
func (f *field) table() string {
	var b strings.Builder
	b.WriteString("| bug | where | seeds | invariant |\n|---|---|---|---|\n")
	for _, r := range f.rows {
		fmt.Fprintln(&b, r)
	}
	return b.String()
}

// summary says how the table came to be.
func (f *field) summary(commit string, took time.Duration) string {
	found, most := 0, 0
	for _, r := range f.rows {
		if r.err == nil {
			found, most = found+1, max(most, r.found.seed)
		}
	}
	bad := "all of which pass"
	for i, b := range f.bad {
		sep := ", "
		if i == 0 {
			bad, sep = "of which these fail, and do not count: ", ""
		}
		bad += sep + strconv.Itoa(b.seed)
	}
	return fmt.Sprintf("%d of %d are found, each by one of the first %d seeds. Without any bug, %d seeds were run, %s. Version `%s`, %v, %d at a time.",
		found, len(f.rows), most, f.clean, bad, commit, took.Round(time.Second), cap(f.turns))
}

// failures are the bugs that were not found and the seeds that fail by themselves.
func (f *field) failures() []error {
	var all []error
	for _, r := range f.rows {
		if r.err != nil {
			all = append(all, fmt.Errorf("%s: %w", r.Name, r.err))
		}
	}
	for _, b := range f.bad {
		all = append(all, fmt.Errorf("seed %d fails without any bug: %s", b.seed, b.invariant)) //nolint:err113 // for people
	}
	return all
}

// The table stands between these lines of the page.
const (
	beginMark = "<!-- planted: by go run ./integration/sim/plant -write -->\n"
	endMark   = "<!-- planted ends -->\n"
)

// write puts text in its place in the page.
func write(page, text string) error {
	b, err := os.ReadFile(page)
	if err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	out, err := splice(string(b), text)
	if err != nil {
		return fmt.Errorf("write the table in %s: %w", page, err)
	}
	if err := os.WriteFile(page, []byte(out), 0o644); err != nil { //nolint:gosec // a page of documentation
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}

var errMarks = errors.New("the lines that the table stands between are not there")

// splice puts text in the place of what is between the marks of a page.
func splice(page, text string) (string, error) {
	before, rest, ok := strings.Cut(page, beginMark)
	_, after, ended := strings.Cut(rest, endMark)
	if !ok || !ended {
		return "", errMarks
	}
	return before + beginMark + "\n" + text + "\n" + endMark + after, nil
}
