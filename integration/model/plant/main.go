// Plant proves that the model finds bugs in the product's state machines: it builds the model with one bug at a time in
// it, laid over the source, searches one cluster, and prints after how many states a rule broke.
//
//	go run ./integration/model/plant               # all of them, as a table
//	go run ./integration/model/plant -only fence   # those whose name has the word
//	go run ./integration/model/plant -story        # with the shortest story of each
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"

	"github.com/penstock-mq/penstock/integration/overlay"
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
	root, err := overlay.Root(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
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

func (p plant) bug() overlay.Bug { return overlay.Bug{Package: p.Package, Old: p.Old, New: p.New} }

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
	program, err := p.bug().Build(ctx, root, dir, "./integration/model")
	if err != nil {
		return f, err //nolint:wrapcheck // it says what failed
	}
	//nolint:gosec // its arguments are this program's
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
