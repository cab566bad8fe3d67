package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// report is all that came out. Its JSON lies beside the page.
type report struct {
	Commit   string    `json:"commit"`
	Started  time.Time `json:"started"`
	Minutes  float64   `json:"minutes"`
	Rounds   int       `json:"rounds"`
	Each     string    `json:"each"`
	Machine  machine   `json:"machine"`
	Problems []string  `json:"problems,omitempty"`
	Runs     []figures `json:"runs"`
}

// write prints the page, and writes it and the figures of every run to files, if one is named.
func (r report) write(path string, plan []workload) error {
	page := r.page(plan)
	fmt.Println(page)
	if path == "" {
		return nil
	}
	if err := os.WriteFile(path, []byte(page), 0o600); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	text, err := r.lines()
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.WriteFile(strings.TrimSuffix(path, filepath.Ext(path))+".json", text, 0o600); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// lines is the report as JSON, with a line for each run.
func (r report) lines() ([]byte, error) {
	runs := r.Runs
	r.Runs = nil
	head, err := json.Marshal(r)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller says what for
	}
	var b bytes.Buffer
	b.Write(bytes.TrimSuffix(head, []byte("null}")))
	b.WriteString("[\n")
	for i, f := range runs {
		line, err := json.Marshal(f)
		if err != nil {
			return nil, err //nolint:wrapcheck // likewise
		}
		b.Write(line)
		if i < len(runs)-1 {
			b.WriteByte(',')
		}
		b.WriteByte('\n')
	}
	b.WriteString("]}\n")
	return b.Bytes(), nil
}

// number prints three digits that count.
func number(v float64, unit string) string {
	switch magnitude := max(v, -v); {
	case magnitude >= 1000:
		return thousands(v) + unit
	case magnitude >= 100:
		return fmt.Sprintf("%.0f%s", v, unit)
	case magnitude >= 10:
		return fmt.Sprintf("%.1f%s", v, unit)
	}
	return fmt.Sprintf("%.2f%s", v, unit)
}

func thousands(v float64) string {
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// text prints a median with its least and most.
func (s spread) text(unit string) string {
	switch len(s) {
	case 0:
		return ""
	case 1:
		return number(s[0], unit)
	}
	return fmt.Sprintf("%s (%s to %s)", number(s.median(), unit), number(s[0], ""), number(s[len(s)-1], ""))
}

func (r report) page(plan []workload) string {
	var b strings.Builder
	t := tabulate(r.Runs)
	fmt.Fprintf(&b, "# Penstock beside JetStream and the bare disk\n\n")
	fmt.Fprintf(&b, "Written by `make bench-peers` on %s at commit %s, in %.0f minutes: %d rounds, each run measured for %s. Medians, and in "+
		"parentheses the least and the most of the rounds; ratios are taken within a round. [How to read it](../benchmarks.md#beside-peers).\n\n",
		r.Started.Format("2006-01-02 15:04 MST"), r.Commit, r.Minutes, r.Rounds, r.Each)
	b.WriteString(r.Machine.text())
	b.WriteString("\nPenstock: etcd, three bookies and two brokers, three copies of which two are on disk (fdatasync) before a message is acknowledged. JetStream: three " +
		"servers, streams of three replicas. Messages are of 1 KiB. All processes, the measuring client among them, run on this machine and its one disk.\n")
	if len(r.Problems) > 0 {
		b.WriteString("\n**Runs that failed, and are left out:**\n\n")
		for _, p := range r.Problems {
			fmt.Fprintf(&b, "- %s\n", strings.ReplaceAll(p, "\n", " "))
		}
	}
	r.targets(&b, t)
	for _, w := range plan {
		w.section(&b, t)
	}
	return b.String()
}

func (r report) targets(b *strings.Builder, t table) {
	b.WriteString("\n## Targets\n\n| | target | measured | |\n|---|---|---|---|\n")
	for _, g := range targets() {
		s := t.compare(g.value, g.places...)
		verdict := "not measured"
		if len(s) > 0 {
			verdict = g.verdict(s.median())
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", g.what, g.aim(), s.text(g.unit), verdict)
	}
}

// column is a figure of a workload's table.
type column struct {
	head  string
	value func(figures) float64
}

// columns are all that a table may have: those without a figure are left out.
var columns = []column{
	{"messages/s", func(f figures) float64 { return f.messages() }},
	{"MB/s", func(f figures) float64 { return f.megabytes() }},
	{"syncs/s", func(f figures) float64 { return f.diskSyncs() }},
	{"published/s meanwhile", func(f figures) float64 { return f.PublishRate }},
	{"published/s before", func(f figures) float64 { return f.BuildRate }},
	{"p50 ms", func(f figures) float64 { return f.P50 }},
	{"p99 ms", func(f figures) float64 { return f.P99 }},
	{"p99.9 ms", func(f figures) float64 { return f.P999 }},
	{"p99 ms before", func(f figures) float64 { return f.BuildP99 }},
	{"end-to-end p50 ms", func(f figures) float64 { return f.EndToEndP50 }},
	{"end-to-end p99 ms", func(f figures) float64 { return f.EndToEndP99 }},
	{"probe p50 ms", func(f figures) float64 { return f.ProbeP50 }},
	{"probe p99 ms", func(f figures) float64 { return f.ProbeP99 }},
	{"CPU µs/message", func(f figures) float64 { return f.CPU[all] }},
	{"of it client", func(f figures) float64 { return f.CPU["client"] }},
	{"brokers", func(f figures) float64 { return f.CPU["broker"] }},
	{"bookies", func(f figures) float64 { return f.CPU["bookie"] }},
	{"etcd", func(f figures) float64 { return f.CPU["etcd"] }},
	{"servers", func(f figures) float64 { return f.CPU["nats"] }},
	{"RSS MiB, without the client", func(f figures) float64 { return f.RSS[all] - f.RSS["client"] }},
	{"written/byte published", func(f figures) float64 { return f.Written }},
	{"syncs/message", func(f figures) float64 { return f.Syncs }},
	{"read again/entry", func(f figures) float64 { return f.ReadThrough }},
}

func (f figures) messages() float64 {
	if f.DiskBytes > 0 {
		return 0
	}
	return f.Rate
}

func (f figures) diskSyncs() float64 {
	if f.DiskBytes > 0 {
		return f.Rate
	}
	return 0
}

func (f figures) megabytes() float64 {
	if f.DiskBytes > 0 {
		return f.DiskBytes / 1e6
	}
	return f.Rate * messageBytes / 1e6
}

// section prints a workload: contestants are columns, as there are fewer of them than figures.
func (w workload) section(b *strings.Builder, t table) {
	fmt.Fprintf(b, "\n## %s\n\n%s\n\n|", strings.ToUpper(w.name[:1])+w.name[1:], w.about)
	for _, e := range w.entries {
		fmt.Fprintf(b, " | %s", e.key())
	}
	b.WriteString(" |\n|---" + strings.Repeat("|---", len(w.entries)) + "|\n")
	for _, c := range columns {
		var cells []string
		some := false
		for _, e := range w.entries {
			s := t.of(w.name, e.key(), c.value)
			if len(s) == 0 || s[len(s)-1] == 0 {
				cells = append(cells, "")
				continue
			}
			some = true
			cells = append(cells, s.text(""))
		}
		if some {
			fmt.Fprintf(b, "| %s | %s |\n", c.head, strings.Join(cells, " | "))
		}
	}
}
