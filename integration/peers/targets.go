package main

import "fmt"

// target is a promise about a figure that is taken within each round.
type target struct {
	what string
	// goal and farther, which is no promise, bound the median: from above if most is set, else from below.
	goal, farther float64
	most          bool
	unit          string
	value         func(f []figures) float64
	places        []place
}

// The ways that figures compare.
func rateOver(f []figures) float64 { return f[0].Rate / f[1].Rate }
func p50Over(f []figures) float64  { return f[0].P50 / f[1].P50 }
func p99Over(f []figures) float64  { return f[0].P99 / f[1].P99 }
func cpuOf(f []figures) float64    { return f[0].CPU[all] }

// copies of each message.
const copies = 3

func ofDisk(f []figures) float64 { return copies * f[0].Rate * messageBytes / f[1].DiskBytes }

// targets are what is promised, in the order of the results.
func targets() []target {
	return []target{
		{
			what: "three copies of what is published durably, batched, ÷ the bare disk (three new files, groups of 1 MiB, fdatasync)", goal: 0.6, farther: 0.75,
			value: ofDisk, places: []place{{batched, penstock}, {batched, disk}},
		},
		{
			what: "the same ÷ the bare disk in files that are used again", goal: 0.6, farther: 0.75,
			value: ofDisk, places: []place{{batched, penstock}, {batched, diskAgain}},
		},
		{
			what: "durable publishing, batched, ÷ JetStream's fast ingest, sync always", goal: 7, farther: 10, unit: "×",
			value: rateOver, places: []place{{batched, penstock}, {batched, jetstream}},
		},
		{
			what: "the same ÷ its PublishAsync", goal: 7, farther: 10, unit: "×",
			value: rateOver, places: []place{{batched, penstock}, {unbatched, jetstream}},
		},
		{
			what: "durable publishing, unbatched, ÷ JetStream's PublishAsync, sync always", goal: 3.5, farther: 5, unit: "×",
			value: rateOver, places: []place{{unbatched, penstock}, {unbatched, jetstream}},
		},
		{
			what: "durable publishing, batched, ÷ JetStream's fast ingest without sync", goal: 3, unit: "×",
			value: rateOver, places: []place{{batched, penstock}, {batched, jetstreamLax}},
		},
		{
			what: "the same ÷ its PublishAsync without sync", goal: 3, unit: "×",
			value: rateOver, places: []place{{batched, penstock}, {unbatched, jetstreamLax}},
		},
		{
			what: "publishing with fsync ÷ without (bookies acknowledge what the kernel has)", goal: 0.7,
			value: rateOver, places: []place{{batched, penstock}, {batched, penstockLazy}},
		},
		{
			what: "one message in flight, p50 ÷ JetStream's with sync always", goal: 0.6, most: true,
			value: p50Over, places: []place{{single, penstock}, {single, jetstream}},
		},
		{
			what: "publish p50 ÷ p50 of the probe beside the load", goal: 1.2, most: true,
			value: func(f []figures) float64 { return f[0].P50 / f[0].ProbeP50 }, places: []place{{paced, penstock}},
		},
		{
			what: "publish p99 ÷ p99 of the probe beside the load", goal: 1.5, most: true,
			value: func(f []figures) float64 { return f[0].P99 / f[0].ProbeP99 }, places: []place{{paced, penstock}},
		},
		{
			what: "64 synchronous publishers ÷ JetStream with sync always", goal: 3.5, unit: "×",
			value: rateOver, places: []place{{many, penstock}, {many, jetstream}},
		},
		{
			what: "their p99 ÷ JetStream's", goal: 1, most: true,
			value: p99Over, places: []place{{many, penstock}, {many, jetstream}},
		},
		{
			what: "CPU of all processes for a durable message, batched", goal: 10, most: true, unit: " µs",
			value: cpuOf, places: []place{{batched, penstock}},
		},
		{
			what: "the same, unbatched", goal: 25, most: true, unit: " µs",
			value: cpuOf, places: []place{{unbatched, penstock}},
		},
		{
			what: "end-to-end p50 less publish p50, at 2,000 messages a second", goal: 0.3, most: true, unit: " ms",
			value: func(f []figures) float64 { return f[0].EndToEndP50 - f[0].P50 }, places: []place{{paced, penstock}},
		},
		{
			what: "reading a backlog ÷ JetStream", goal: 4, farther: 6, unit: "×",
			value: rateOver, places: []place{{catchUp, penstock}, {catchUp, jetstreamLax}},
		},
		{
			what: "what publishing 50,000 messages a second loses while a backlog is read", goal: 10, most: true, unit: " %",
			value: func(f []figures) float64 { return 100 * (1 - f[0].PublishRate/f[0].BuildRate) }, places: []place{{live, penstock}},
		},
		{
			what: "bytes that bookies write for each byte of each copy, batched, in new files", goal: 1.05, most: true,
			value: func(f []figures) float64 { return f[0].Written / copies }, places: []place{{batched, penstock}},
		},
		{
			what: "what publishing as fast as it goes loses with ten subscriptions instead of one", goal: 25, most: true, unit: " %",
			value:  func(f []figures) float64 { return 100 * (1 - f[0].Rate/f[1].Rate) },
			places: []place{{fanOut, penstock + " 10"}, {fanOut, penstock + " 1"}},
		},
	}
}

// verdict is what the median says.
func (t target) verdict(median float64) string {
	reached := func(bound float64) bool {
		if t.most {
			return median <= bound
		}
		return median >= bound
	}
	switch {
	case !reached(t.goal):
		return "missed"
	case t.farther != 0 && reached(t.farther):
		return "met, and the farther one"
	}
	return "met"
}

func (t target) aim() string {
	sign := "≥"
	if t.most {
		sign = "≤"
	}
	text := fmt.Sprintf("%s %s", sign, number(t.goal, t.unit))
	if t.farther != 0 {
		text += "; farther " + number(t.farther, t.unit)
	}
	return text
}
