package main

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/bench"
)

// The contestants.
const (
	penstock     = "Penstock"
	penstockLazy = "Penstock, no fsync"
	jetstream    = "JetStream, sync always"
	jetstreamLax = "JetStream, default"
	disk         = "disk, new files"
	diskAgain    = "disk, files used again"
)

// The workloads.
const (
	batched   = "batched"
	unbatched = "unbatched"
	single    = "single"
	many      = "many"
	paced     = "paced"
	catchUp   = "catch-up"
	live      = "live"
	fanOut    = "fan-out"
)

// workload is a load and who carries it.
type workload struct {
	name  string
	about string // in the results
	// counts consumption, not publishing.
	reads   bool
	entries []entry
}

// entry is one contestant's run in each round.
type entry struct {
	contestant string
	variant    string // tells two runs of a contestant apart
	scenario   bench.Scenario
	probe      bool // a small write and sync beside the load, every few milliseconds
	// diskFiles and diskGroup are of the disk's runs, for as long as the scenario is measured: files written at once, and
	// bytes from sync to sync.
	diskFiles, diskGroup int
}

const (
	messageBytes  = 1024
	inFlight      = 10_000 // messages on their way, of a producer that goes as fast as it can
	ingestBatch   = 500    // messages to an acknowledgement, of JetStream's fast ingest: the most that servers grant
	manyPublisher = 64
	pacedRate     = 2000
	liveRate      = 50_000
	backlog       = 600_000
	peersBacklog  = 150_000 // which takes a peer about as long
	liveBacklog   = 250_000
	subscriptions = 10
)

// workloads returns what is run. Publishing has no subscription beside it unless that is what is measured.
func workloads(duration time.Duration) []workload {
	load := func(change func(*bench.Scenario)) bench.Scenario {
		s := bench.Scenario{
			Size: messageBytes, Subscriptions: -1, InFlight: inFlight, WarmUp: time.Second, Duration: duration,
		}
		change(&s)
		return s
	}
	ours := load(func(*bench.Scenario) {})
	theirs := load(func(s *bench.Scenario) { s.Batching.Messages = ingestBatch })
	alone := load(func(s *bench.Scenario) { s.Batching.Messages = 1 })
	one := load(func(s *bench.Scenario) { s.InFlight, s.Batching.Messages = 1, 1 })
	synchronous := load(func(s *bench.Scenario) { s.Producers, s.InFlight, s.Batching.Messages = manyPublisher, 1, 1 })
	slow := load(func(s *bench.Scenario) {
		s.Rate, s.Subscriptions, s.InFlight, s.Batching.Messages = pacedRate, 1, 1000, 1
	})
	behind := func(s *bench.Scenario) { s.WarmUp, s.Subscriptions, s.Backlog = -1, 1, backlog }
	ourBacklog := load(behind)
	theirBacklog := load(func(s *bench.Scenario) {
		behind(s)
		s.Backlog, s.Batching.Messages = peersBacklog, ingestBatch
	})
	besides := load(func(s *bench.Scenario) {
		behind(s)
		s.Backlog, s.Rate, s.Live = liveBacklog, liveRate, true
	})
	fan := func(n int) bench.Scenario { return load(func(s *bench.Scenario) { s.Subscriptions = n }) }
	return []workload{
		{name: batched, about: "One producer, 1 KiB, as fast as it goes, 10,000 in flight. Penstock's client batches as it does by default; JetStream's " +
			"uses fast ingest, one acknowledgement for 500. Disk: three files at once, groups of 1 MiB, fdatasync after each, in files that grow, as all " +
			"contestants' do here, and in files whose blocks were written before.", entries: []entry{
			{contestant: diskAgain, diskFiles: 3, diskGroup: 1 << 20, scenario: ours},
			{contestant: disk, diskFiles: 3, diskGroup: 1 << 20, scenario: ours},
			{contestant: penstock, scenario: ours},
			{contestant: jetstream, scenario: theirs},
			{contestant: penstockLazy, scenario: ours},
			{contestant: jetstreamLax, scenario: theirs},
		}},
		{name: unbatched, about: "The same with every message an entry of its own, acknowledged by itself.", entries: []entry{
			{contestant: penstock, scenario: alone},
			{contestant: jetstream, scenario: alone},
			{contestant: jetstreamLax, scenario: alone},
		}},
		{name: single, about: "One synchronous publisher: one message in flight. Disk: one file whose blocks were written before, 4 KiB and fdatasync, one after the other.", entries: []entry{
			{contestant: diskAgain, diskFiles: 1, diskGroup: 4 << 10, scenario: one},
			{contestant: penstock, scenario: one},
			{contestant: jetstream, scenario: one},
		}},
		{name: many, about: "64 synchronous publishers.", entries: []entry{
			{contestant: penstock, scenario: synchronous},
			{contestant: jetstream, scenario: synchronous},
		}},
		{name: paced, about: "2,000 messages a second, unbatched, with a subscription; beside it a probe that writes 4 KiB to the same disk and syncs them every 5 ms.", entries: []entry{
			{contestant: penstock, scenario: slow, probe: true},
		}},
		{name: catchUp, reads: true, about: "A backlog is read by one consumer while nothing is published: 600,000 messages of Penstock's, 150,000 of JetStream's, whose " +
			"servers do not sync here, as that makes no difference to reading.", entries: []entry{
			{contestant: penstock, scenario: ourBacklog},
			{contestant: jetstreamLax, scenario: theirBacklog},
		}},
		{name: live, reads: true, about: "A backlog of 250,000 is read while 50,000 messages a second are published to the same topic.", entries: []entry{
			{contestant: penstock, scenario: besides},
		}},
		{name: fanOut, about: "As batched, with consumers that read along and acknowledge: of one subscription, and of ten.", entries: []entry{
			{contestant: penstock, variant: "1", scenario: fan(1)},
			{contestant: penstock, variant: "10", scenario: fan(subscriptions)},
		}},
	}
}

// chosen is the workload with that name, nil if there is none.
func chosen(plan []workload, name string) []workload {
	for i, w := range plan {
		if w.name == name {
			return plan[i : i+1]
		}
	}
	return nil
}
