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
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
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
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
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

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// apply returns the file that is changed, from the module's root, and what it is with the bug in it.
func (p plant) apply(root string) (file, bad string, err error) {
	names, err := filepath.Glob(filepath.Join(root, p.Package, "*.go"))
	if err != nil {
		return "", "", fmt.Errorf("list %s: %w", p.Package, err)
	}
	found := 0
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		source, err := os.ReadFile(name)
		if err != nil {
			return "", "", fmt.Errorf("read what is to be changed: %w", err)
		}
		if n := strings.Count(string(source), p.Old); n > 0 {
			found += n
			file, bad = name, strings.Replace(string(source), p.Old, p.New, 1)
		}
	}
	if found != 1 {
		return "", "", fmt.Errorf("%s has the line %d times: %q", p.Package, found, p.Old)
	}
	return file, bad, nil
}

var foundLine = regexp.MustCompile(`found after (\d+) seeds: ([^:]+):`)

// grow builds the simulation with the bug and runs it. It returns after how many seeds it was found, 0 if it was not, and
// the invariant that it broke.
func (p plant) grow(ctx context.Context, root string, seeds int) (int, string, error) {
	dir, err := os.MkdirTemp("", "plant-")
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	at, bad, err := p.apply(root)
	if err != nil {
		return 0, "", err
	}
	file, overlay, program := filepath.Join(dir, "planted.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "sim.test")
	if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
		return 0, "", err
	}
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{at: file}})
	if err != nil {
		return 0, "", err
	}
	if err := os.WriteFile(overlay, replace, 0o600); err != nil {
		return 0, "", err
	}
	//nolint:gosec // its arguments are this program's
	build := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-ldflags", "-s -w", "-overlay", overlay, "-o", program, "./integration/sim")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return 0, "", fmt.Errorf("build: %w\n%s", err, out)
	}
	//nolint:gosec // likewise
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
