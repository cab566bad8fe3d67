package main

import (
	"fmt"
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
)

type prometheusQuery = variants.Dataquery

// process are the labels that tell where a series comes from: broker and bookie tell parts of one process apart.
const process = "instance, broker, bookie"

// who is the legend for them.
const who = "{{instance}} {{broker}}{{bookie}}"

// sum adds up a gauge by labels.
func sum(metric, by string) string { return fmt.Sprintf("sum%s (%s{$of})", grouped(by), metric) }

// largest is the largest of a gauge by labels.
func largest(metric, by string) string { return fmt.Sprintf("max%s (%s{$of})", grouped(by), metric) }

// rate is what a counter grows by each second, by labels.
func rate(metric, by string) string {
	return fmt.Sprintf("sum%s (rate(%s{$of}[$__rate_interval]))", grouped(by), metric)
}

// quantile is a quantile of a histogram, by labels.
func quantile(q float64, metric, by string) string {
	if by != "" {
		by += ", "
	}
	return fmt.Sprintf("histogram_quantile(%v, %s)", q, rate(metric+"_bucket", by+"le"))
}

// mean is a histogram's mean, by labels.
func mean(metric, by string) string {
	return rate(metric+"_sum", by) + " / " + rate(metric+"_count", by)
}

func grouped(by string) string {
	if by == "" {
		return ""
	}
	return " by (" + by + ")"
}

// quantiles are the median and the slow end of a histogram, over all its series.
func quantiles(metric string) []line {
	var out []line
	for _, q := range []float64{0.5, 0.99, 0.999} {
		out = append(out, line{quantile(q, metric, ""), strings.TrimSuffix(fmt.Sprintf("p%g", q*100), "0")})
	}
	return out
}

// each is one line a process.
func each(expr func(metric, by string) string, metric string) []line {
	return []line{{expr(metric, process), who}}
}

// machine are the panels about the processes themselves.
func machine() row {
	return row{"Processes", []panel{
		{title: "CPU", about: "Cores in use.", unit: "short", lines: each(rate, "process_cpu_seconds_total")},
		{title: "Memory", about: "Resident memory.", unit: "bytes", lines: each(sum, "process_resident_memory_bytes")},
		{title: "Goroutines", about: "A number that only grows is a leak.", unit: "short", lines: each(sum, "go_goroutines")},
		{title: "Open files", about: "Descriptors, connections included; the line above is the limit.", unit: "short", lines: []line{
			{sum("process_open_fds", process), who}, {largest("process_max_fds", ""), "limit"},
		}},
		{title: "Log lines", about: "Warnings and errors a second; what they say is in the logs.", unit: "ops", lines: []line{
			{"sum by (instance, level) (rate(penstock_log_lines_total{$of,level=~\"WARN|ERROR\"}[$__rate_interval]))", "{{instance}} {{level}}"},
		}},
		{title: "Started", about: "Time since the process was started.", unit: "s", lines: []line{
			{"time() - " + largest("process_start_time_seconds", process), who},
		}},
	}}
}
