package bench

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"time"
)

//go:embed report.html
var reportText string

var reportTemplate = template.Must(template.New("report").Parse(reportText))

// WriteHTML writes a page about results, with plots. It needs nothing else: no script, no font, no picture from elsewhere.
func WriteHTML(w io.Writer, title string, results []*Result) error {
	page := reportPage{Title: title}
	for i := range colors {
		page.Colors = append(page.Colors, i)
	}
	for _, r := range results {
		page.Runs = append(page.Runs, newReportRun(r))
	}
	var out bytes.Buffer
	if err := reportTemplate.Execute(&out, page); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if _, err := w.Write(out.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

type reportPage struct {
	Title  string
	Colors []int
	Runs   []reportRun
}

type reportRun struct {
	Scenario, Driver, Machine, Started string
	Wrong                              string
	Flow, Cost                         [][]string
	Notes                              []string
	Charts                             []chart
}

func newReportRun(r *Result) reportRun {
	run := reportRun{
		Scenario: r.Scenario.String(), Driver: r.Driver, Machine: r.Machine.String(), Started: r.Started.UTC().Format(time.RFC3339),
		Flow: r.flowRows(), Cost: r.costRows(), Notes: r.Notes(),
	}
	if err := r.Err(); err != nil {
		run.Wrong = err.Error()
	}
	if len(r.Series) > 0 {
		run.Charts = append(run.Charts, r.seriesCharts()...)
	}
	if c, ok := r.distributionChart(); ok {
		run.Charts = append(run.Charts, c)
	}
	return run
}

// seriesCharts are what happened each second.
func (r *Result) seriesCharts() []chart {
	over := func(value func(Point) float64) (values []xy) {
		for _, p := range r.Series {
			values = append(values, xy{p.Seconds, value(p)})
		}
		return values
	}
	latency := func(value func(Point) float64) (values []xy) {
		for _, v := range over(value) {
			if v.y > 0 { // nothing had its outcome
				values = append(values, v)
			}
		}
		return values
	}
	x, bands := axis{high: r.Series[len(r.Series)-1].Seconds}, r.bands()
	charts := []chart{
		newChart("Messages", "a second", x, false, []curve{
			{name: "published", color: 0, values: over(func(p Point) float64 { return p.PublishedPerSecond })},
			{name: "received", color: 1, values: over(func(p Point) float64 { return p.ReceivedPerSecond })},
			{name: "failed", color: 3, values: failedValues(r.Series)},
		}, bands),
		newChart("Latency of what had its outcome in each second", "ms", x, true, []curve{
			{name: "publish p50", color: 0, values: latency(func(p Point) float64 { return p.PublishP50Ms })},
			{name: "publish p99", color: 0, dashed: true, values: latency(func(p Point) float64 { return p.PublishP99Ms })},
			{name: "end-to-end p50", color: 1, values: latency(func(p Point) float64 { return p.EndToEndP50Ms })},
			{name: "end-to-end p99", color: 1, dashed: true, values: latency(func(p Point) float64 { return p.EndToEndP99Ms })},
			{name: "publish max", color: 2, values: latency(func(p Point) float64 { return p.PublishMaxMs })},
		}, bands),
	}
	if len(r.Phases) == 0 {
		return charts
	}
	var cores, memory []curve
	for i, c := range r.Phases[0].Processes {
		cores = append(cores, curve{name: c.Name, color: i, values: over(func(p Point) float64 { return p.Cores[i] })})
		memory = append(memory, curve{name: c.Name, color: i, values: over(func(p Point) float64 { return float64(p.RSSBytes[i]) / (1 << 20) })})
	}
	return append(charts, newChart("CPU", "cores in use", x, false, cores, bands), newChart("Memory", "MiB", x, false, memory, bands))
}

// failedValues is empty where nothing failed: most runs need no such line.
func failedValues(series []Point) (values []xy) {
	some := false
	for _, p := range series {
		values = append(values, xy{p.Seconds, float64(p.Failed)})
		some = some || p.Failed > 0
	}
	if !some {
		return nil
	}
	return values
}

// bands are the phases, by the points that are in them.
func (r *Result) bands() (all []band) {
	from := 0.0
	for i, p := range r.Series {
		if i+1 == len(r.Series) || r.Series[i+1].Phase != p.Phase {
			all = append(all, band{From: from, Width: p.Seconds - from, Label: p.Phase})
			from = p.Seconds
		}
	}
	return all
}

// distributionChart shows percentiles, each further nine as wide as the one before.
func (r *Result) distributionChart() (chart, bool) {
	nines := func(percent float64) float64 { return -math.Log10(1 - percent/100) }
	var curves []curve
	most := 0.0
	add := func(name string, color int, dashed bool, l *Latency) {
		if l == nil {
			return
		}
		c := curve{name: name, color: color, dashed: dashed}
		for _, p := range l.Distribution {
			if p.Percent < 100 {
				c.values = append(c.values, xy{nines(p.Percent), p.Ms})
				most = max(most, nines(p.Percent))
			}
		}
		curves = append(curves, c)
	}
	for i, p := range r.Phases {
		add(p.Name+" publish", 0, i > 0, p.Publish)
		add(p.Name+" end-to-end", 1, i > 0, p.EndToEnd)
		add(p.Name+" 4 KiB disk probe", 2, i > 0, p.DiskProbe)
	}
	if len(curves) == 0 {
		return chart{}, false
	}
	c := newChart("Distribution of latencies", "ms", axis{high: most}, true, curves, nil)
	x := axis{high: most, from: chartLeft, to: chartRight}
	c.XTicks = nil
	for i, label := range []string{"0 %", "90 %", "99 %", "99.9 %", "99.99 %", "99.999 %", "99.9999 %", "99.99999 %"} {
		if float64(i) <= most {
			c.XTicks = append(c.XTicks, tick{round(x.at(float64(i))), label})
		}
	}
	return c, true
}
