package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// server is a Prometheus that scrapes a cluster.
type server struct {
	http *http.Client
	url  string
	from time.Time
}

// scrape starts a Prometheus as prometheus.yaml says, with the processes of c in the place of the example's and all intervals a second.
func scrape(ctx context.Context, t *testing.T, c *process.Cluster, dir string) *server {
	t.Helper()
	addr, err := process.FreeAddress(ctx)
	check(t, err)
	configure(t, c, dir)
	g, err := process.NewGroup(bin(t), dir)
	check(t, err)
	t.Cleanup(g.Close)
	s := &server{http: &http.Client{Timeout: time.Minute, Transport: &http.Transport{}}, url: "http://" + addr, from: time.Now()}
	t.Cleanup(s.http.CloseIdleConnections)
	check(t, g.Add(process.Program{
		Program: "prometheus", Name: "prometheus", Ready: s.url + "/-/ready",
		Args: []string{"--config.file=" + filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path=" + filepath.Join(dir, "tsdb"), "--web.listen-address=" + addr, "--log.level=warn"},
	}))
	check(t, g.Start(ctx))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of prometheus:\n%s", g.Processes[0].LogTail())
		}
	})
	return s
}

// configure writes the configuration and the rules.
func configure(t *testing.T, c *process.Cluster, dir string) {
	t.Helper()
	var cfg map[string]any
	check(t, yaml.Unmarshal(read(t, prometheusDir, "prometheus.yaml"), &cfg))
	targets := func(ps []*process.Process, addr func(*process.Process) string, labels map[string]string) (out []any) {
		for _, p := range ps {
			all := map[string]string{"instance": p.Name}
			maps.Copy(all, labels)
			out = append(out, map[string]any{"targets": []string{addr(p)}, "labels": all})
		}
		return out
	}
	ours := func(p *process.Process) string { return p.HTTP }
	cfg["global"] = map[string]string{"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
	for _, s := range cfg["scrape_configs"].([]any) {
		s := s.(map[string]any)
		switch s["job_name"] {
		case "penstock":
			s["static_configs"] = slices.Concat(
				targets(slices.Concat(c.Brokers, c.Bookies), ours, nil),
				targets(c.Etcds, func(p *process.Process) string { return p.Addr }, nil))
		case "penstock-topics":
			delete(s, "scrape_interval")
			s["static_configs"] = targets(c.Brokers, ours, map[string]string{"job": job, "endpoint": "topics"})
		default:
			t.Fatalf("prometheus.yaml has a job %v, of which this test knows nothing", s["job_name"])
		}
	}
	text, err := yaml.Marshal(cfg)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(dir, "prometheus.yaml"), text, 0o600))
	rules := regexp.MustCompile(`(?m)^( *for:) .*$`).ReplaceAll(read(t, prometheusDir, rulesName), []byte("$1 1s"))
	rules = regexp.MustCompile(`\[\d+m\]`).ReplaceAll(rules, []byte("["+window+"]"))
	check(t, os.WriteFile(filepath.Join(dir, rulesName), rules, 0o600))
}

// get asks Prometheus' API, and decodes the data of its answer.
func (s *server) get(ctx context.Context, path string, values url.Values, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/api/v1/"+path+"?"+values.Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("read answer of prometheus: %w", err)
	}
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return fmt.Errorf("read answer of prometheus: %w: %s", err, body)
	}
	if answer.Status != "success" {
		return errors.New(answer.Error)
	}
	return json.Unmarshal(answer.Data, into)
}

type series struct {
	Metric map[string]string
	Values [][2]any
}

// samples counts what a query has returned since s was started, second by second; what is no number does not count.
func (s *server) samples(ctx context.Context, query string) (int, error) {
	all, err := s.since(ctx, query)
	n := 0
	for _, one := range all {
		for _, v := range one.Values {
			if f, err := strconv.ParseFloat(fmt.Sprint(v[1]), 64); err == nil && !math.IsNaN(f) {
				n++
			}
		}
	}
	return n, err
}

func (s *server) since(ctx context.Context, query string) ([]series, error) {
	var answer struct{ Result []series }
	stamp := func(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }
	err := s.get(ctx, "query_range", url.Values{"query": {query}, "start": {stamp(s.from)}, "end": {stamp(time.Now())}, "step": {"1"}}, &answer)
	return answer.Result, err
}

// selectors are the selectors of series in a query, without ranges and offsets.
func (s *server) selectors(ctx context.Context, query string) ([]string, error) {
	var tree any
	if err := s.get(ctx, "parse_query", url.Values{"query": {query}}, &tree); err != nil {
		return nil, err
	}
	found := map[string]bool{}
	walk(tree, func(node map[string]any) {
		if kind := node["type"]; kind != "vectorSelector" && kind != "matrixSelector" {
			return
		}
		var matchers []string
		for _, m := range node["matchers"].([]any) {
			m := m.(map[string]any)
			if m["name"] != "__name__" {
				matchers = append(matchers, fmt.Sprintf("%s%s%q", m["name"], m["type"], m["value"]))
			}
		}
		found[fmt.Sprintf("%s{%s}", node["name"], strings.Join(matchers, ","))] = true
	})
	return slices.Sorted(maps.Keys(found)), nil
}

func walk(v any, visit func(map[string]any)) {
	switch v := v.(type) {
	case map[string]any:
		visit(v)
		for _, child := range v {
			walk(child, visit)
		}
	case []any:
		for _, child := range v {
			walk(child, visit)
		}
	}
}

type firing struct {
	Labels, Annotations map[string]string
	State               string
}

// firing are the alerts that fire, by name and instance.
func (s *server) firing(ctx context.Context) (map[string]firing, error) {
	var answer struct{ Alerts []firing }
	if err := s.get(ctx, "alerts", nil, &answer); err != nil {
		return nil, err
	}
	out := map[string]firing{}
	for _, a := range answer.Alerts {
		if a.State == "firing" {
			out[strings.TrimSpace(a.Labels["alertname"]+" "+a.Labels["instance"])] = a
		}
	}
	return out, nil
}

// rules fails the test for each rule that Prometheus could not evaluate, and returns how many there are.
func (s *server) rules(ctx context.Context, t *testing.T) int {
	t.Helper()
	var answer struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	check(t, s.get(ctx, "rules", nil, &answer))
	n := 0
	for _, g := range answer.Groups {
		for _, r := range g.Rules {
			n++
			if r.Health != "ok" {
				t.Errorf("%s is %s: %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	return n
}
