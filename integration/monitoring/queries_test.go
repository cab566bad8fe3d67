package monitoring

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const (
	job    = "penstock"
	window = "10s" // of rates, where dashboards and rules have minutes

	grafanaDir    = "deploy/grafana"
	prometheusDir = "deploy/prometheus"
	runbooksDir   = "docs/runbooks"
	chartDir      = "deploy/helm/penstock"
	rulesName     = "penstock.rules.yaml"
)

// query is a query, and where it stands.
type query struct{ where, expr string }

// dashboard is what these tests look at of one.
type dashboard struct {
	UID, Title string
	Panels     []struct {
		Type, Title, Description string
		Targets                  []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
}

func dashboards(t *testing.T) []dashboard {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", grafanaDir, "*.json"))
	check(t, err)
	if len(files) != 5 {
		t.Fatalf("%d dashboards in %s, want 5", len(files), grafanaDir)
	}
	out := make([]dashboard, len(files))
	for i, f := range files {
		check(t, json.Unmarshal(read(t, grafanaDir, filepath.Base(f)), &out[i]))
	}
	return out
}

// chosen stands for what Grafana puts in the place of variables, when all is chosen.
var chosen = strings.NewReplacer("$__rate_interval", window, "$job", job, "$instance", ".*", "$topic", ".*")

// panels are the queries of panels, and those that variables take their values from, as series whose label they list.
func panels(t *testing.T) (out []query) {
	t.Helper()
	values := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`)
	for _, d := range dashboards(t) {
		n := len(out)
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				out = append(out, query{d.Title + ": " + p.Title, chosen.Replace(target.Expr)})
			}
		}
		if len(out) == n {
			t.Errorf("%s has no queries", d.Title)
		}
		for _, v := range d.Templating.List {
			if v.Type != "query" {
				continue
			}
			m := values.FindStringSubmatch(v.Definition)
			if m == nil {
				t.Fatalf("%s takes %s from %q, which this test does not understand", d.Title, v.Name, v.Definition)
			}
			out = append(out, query{d.Title + ": $" + v.Name, fmt.Sprintf("count by (%s) (%s) * on (%s) group by (%s) (%s)", m[2], chosen.Replace(m[1]), m[2], m[2], withLabel(chosen.Replace(m[1]), m[2]))})
		}
	}
	return out
}

// withLabel narrows a selector to series that have a label.
func withLabel(selector, label string) string {
	if rest, ok := strings.CutSuffix(selector, "}"); ok {
		return rest + "," + label + `!=""}`
	}
	return selector + "{" + label + `!=""}`
}

type rule struct {
	Alert, Expr         string
	For                 string
	Labels, Annotations map[string]string
}

// rules are those of the file.
func rules(t *testing.T) []rule {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	check(t, yaml.Unmarshal(read(t, prometheusDir, rulesName), &file))
	if len(file.Groups) != 1 {
		t.Fatalf("%d groups", len(file.Groups))
	}
	return file.Groups[0].Rules
}

// chartRules are those of the chart, in which it puts matchers and numbers.
func chartRules(t *testing.T) []rule {
	t.Helper()
	var out []rule
	text := strings.NewReplacer("$of", `job="messages/penstock"`, "$bookies", "3", "$brokers", "2").Replace(string(read(t, chartDir, "files", "rules.yaml")))
	check(t, yaml.Unmarshal([]byte(text), &out))
	return out
}

// alerts are the expressions of rules.
func alerts(t *testing.T) (out []query) {
	t.Helper()
	for _, r := range rules(t) {
		out = append(out, query{r.Alert, regexp.MustCompile(`\[\d+m\]`).ReplaceAllString(r.Expr, "["+window+"]")})
	}
	return out
}

// asked are the queries in the pages of runbooks, one a line.
func asked(t *testing.T) (out []query) {
	t.Helper()
	for _, p := range pages(t) {
		for _, b := range p.blocks("promql") {
			for line := range strings.Lines(b) {
				out = append(out, query{p.name, strings.TrimSpace(line)})
			}
		}
	}
	return out
}
