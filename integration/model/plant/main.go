// Plant proves that the model finds bugs in the product's state machines: it builds the model with one bug at a time in
// it, laid over the source, searches one cluster, and prints after how many states a rule broke.
//
//	go run ./integration/model/plant               # all of them, as a table
//	go run ./integration/model/plant -only fence   # those whose name has the word
//	go run ./integration/model/plant -story        # with the shortest story of each
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
	"strings"
)

func main() {
	only := flag.String("only", "", "a word of the names of the bugs to plant")
	story := flag.Bool("story", false, "print the shortest story of each")
	flag.Parse()
	if err := run(context.Background(), *only, *story); err != nil {
		fmt.Fprintln(os.Stderr, "plant:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, story bool) error {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return fmt.Errorf("find the module: %w", err)
	}
	root := strings.TrimSpace(string(out))
	missed := 0
	fmt.Println("| bug | where | cluster | states | invariant |\n|---|---|---|---|---|")
	for _, p := range plants {
		if !strings.Contains(p.Name, only) {
			continue
		}
		f, err := p.grow(ctx, root)
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		if f.states == "" {
			missed++
			f.states = "not found"
		}
		fmt.Printf("| %s | `%s` | %s | %s | %s |\n", p.Name, strings.TrimPrefix(p.Package, "pkg/"), p.Cluster, f.states, f.rule)
		if story {
			fmt.Println(f.story)
		}
	}
	if missed > 0 {
		return fmt.Errorf("%d bugs were not found", missed)
	}
	return nil
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

type finding struct{ states, rule, story string }

var (
	foundLine = regexp.MustCompile(`after (\d+) states:\n(?s:(.*?))  => ([^:\n]+):`)
	panicLine = regexp.MustCompile(`panic: [^\n]*`)
)

// grow builds the model with the bug and searches the cluster.
func (p plant) grow(ctx context.Context, root string) (f finding, err error) {
	dir, err := os.MkdirTemp("", "plant-")
	if err != nil {
		return f, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	at, bad, err := p.apply(root)
	if err != nil {
		return f, err
	}
	file, overlay, program := filepath.Join(dir, "planted.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "model.test")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{at: file}})
	if err != nil {
		return f, err
	}
	if err := errors.Join(os.WriteFile(file, []byte(bad), 0o600), os.WriteFile(overlay, replace, 0o600)); err != nil {
		return f, err
	}
	//nolint:gosec // its arguments are this program's
	build := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", program, "./integration/model")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return f, fmt.Errorf("build: %w\n%s", err, out)
	}
	//nolint:gosec // likewise
	test := exec.CommandContext(ctx, program, "-test.run", "^TestModel$", "-test.timeout", "1h", "-full", "-cluster", "^"+p.Cluster+"$")
	out, err := test.CombinedOutput()
	if m := foundLine.FindSubmatch(out); m != nil {
		return finding{string(m[1]), string(m[3]), string(m[2])}, nil
	}
	if m := panicLine.Find(out); m != nil {
		return f, fmt.Errorf("run: %s\n%s", m, out[max(0, len(out)-3000):])
	}
	return f, nil
}
