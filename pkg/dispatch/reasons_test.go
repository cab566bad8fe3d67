package dispatch

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every reason to wait is explained to people, and nothing that cannot happen is.
func TestReasonsAreDocumented(t *testing.T) {
	t.Parallel()
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	all := func(text, pattern string) []string {
		var out []string
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			out = append(out, m[1])
		}
		slices.Sort(out)
		return out
	}
	declared := read("core.go")
	_, table, _ := strings.Cut(read("../../docs/cli.md"), "## Reasons")
	table, _, _ = strings.Cut(table, "\n## ")
	var told []string
	for line := range strings.Lines(table) {
		cell, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " |")
		told = append(told, all(cell, "`([a-z-]+)`")...)
	}
	slices.Sort(told)
	if want := all(declared, `Reason = "([a-z-]+)"`); !slices.Equal(told, want) {
		t.Fatalf("docs/cli.md tells of\n%v, there are\n%v", told, want)
	}
	// Each is what some core or the runner answers.
	code := read("base.go") + read("ordered.go") + read("shared.go") + read("runner.go") + read("exclusive.go") + read("failover.go")
	for _, name := range all(declared, `\t(Reason\w+)\s+Reason = `) {
		if !regexp.MustCompile(`(return |Reason: |Reason = |, )` + name + `\b`).MatchString(code) {
			t.Errorf("nothing answers %s", name)
		}
	}
}
