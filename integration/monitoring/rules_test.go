package monitoring

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const unitTests = "penstock.rules.test.yaml"

func promtool(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(bin(t), "promtool"), args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// The unit tests hold, each alert is fired by one of them, and the example's configuration is one.
func TestRules(t *testing.T) {
	t.Parallel()
	dir := filepath.Join("..", "..", prometheusDir)
	promtool(t, dir, "check", "config", "--lint=all", "--lint-fatal", "prometheus.yaml")
	promtool(t, dir, "test", "rules", unitTests)
	fired := string(read(t, prometheusDir, unitTests))
	for _, r := range rules(t) {
		if !regexp.MustCompile(`labels: 'ALERTS\{alertname="` + r.Alert + `"`).MatchString(fired) {
			t.Errorf("no unit test has %s fire", r.Alert)
		}
	}
}

// The chart's rules do the same, and those that it has besides do what they should.
func TestRulesOfTheChart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "penstock", "rules": wire(chartRules(t))}}})
	check(t, err)
	check(t, os.WriteFile(filepath.Join(dir, "all.yaml"), text, 0o600))
	promtool(t, dir, "check", "rules", "--lint=all", "--lint-fatal", "all.yaml")

	own := map[string]bool{}
	for _, r := range rules(t) {
		own[r.Alert] = true
	}
	var shared, more []rule
	for _, r := range chartRules(t) {
		if own[r.Alert] {
			shared = append(shared, r)
		} else {
			more = append(more, r)
		}
	}
	if len(shared) != len(own) || len(more) != 2 {
		t.Errorf("the chart has %d of %d rules, and %d more", len(shared), len(own), len(more))
	}
	for name, rs := range map[string][]rule{rulesName: shared, "chart.rules.yaml": more} {
		text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "penstock", "rules": wire(rs)}}})
		check(t, err)
		check(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	check(t, os.WriteFile(filepath.Join(dir, unitTests), read(t, prometheusDir, unitTests), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "chart.test.yaml"), read(t, "integration/monitoring/testdata/chart.test.yaml"), 0o600))
	promtool(t, dir, "test", "rules", unitTests, "chart.test.yaml")
}

// wire are rules under the names that Prometheus knows.
func wire(rs []rule) (out []map[string]any) {
	for _, r := range rs {
		out = append(out, map[string]any{"alert": r.Alert, "expr": r.Expr, "for": r.For, "labels": r.Labels, "annotations": r.Annotations})
	}
	return out
}

// Every metric of ours that anything names stands in docs/metrics.md.
func TestNames(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(penstock_\\w+)` \\| (\\w+) \\|").FindAllStringSubmatch(string(read(t, "docs/metrics.md")), -1) {
		known[m[1]] = true
		if m[2] == "histogram" {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				known[m[1]+suffix] = true
			}
		}
	}
	for _, all := range [][]query{panels(t), alerts(t), asked(t)} {
		for _, q := range all {
			for _, name := range regexp.MustCompile(`penstock_\w+`).FindAllString(q.expr, -1) {
				if !known[name] {
					t.Errorf("%s names %s, which docs/metrics.md does not", q.where, name)
				}
			}
		}
	}
}
