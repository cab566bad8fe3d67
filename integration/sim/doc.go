// Package sim runs a small Penstock cluster under a seed: brokers, bookies and etcd in one goroutine, in simulated
// time, over a simulated network and disks that lose what was not synced.
//
//	err := sim.Run(sim.Options{Seed: 12345}) // nil, or a *Failure that tells the story
//
// Every decision is drawn from the seed: shapes and quorums, delays, losses, reorderings, crashes, power cuts, who
// does what and when. The same seed gives the same trace, byte for byte. Nothing reads a clock, starts a goroutine
// that runs beside another one, or walks a map where order could show.
//
//	  workload            faults
//	     │ append            │ crash, pause, cut, power cut, disk full, …
//	     ▼                   ▼
//	┌─ broker ────────┐   ┌─ kernel ─┐      ┌─ bookie ──────────────┐
//	│ chain.Chain     │   │ heap of  │      │ bookie.Admit          │
//	│ ledger.Writer   │──►│ events,  │─────►│ ledgerstore.Core      │
//	│ ledger.Recover  │◄──│ network, │◄─────│ segments on vfs.Mem   │
//	│ meta.Store      │   │ sched    │      │ meta.Store            │
//	└───────┬─────────┘   └──────────┘      └──────────┬────────────┘
//	        └── transactions ──┴── etcdmodel ──────────┘
//	                               │ each applied change
//	                               ▼
//	                            checks: what was acknowledged, served, denied, promised
//
// What is real: topics with deduplication, subscriptions, dispatch and state logs; chains with their writers,
// recoveries and readers, quorum arithmetic and placement; the bookies' stores and segment files with their recovery,
// compaction, admission, garbage collection; who owns what, by leases, registrations, watch caches and pings; and all
// of package meta down to etcd's wire types. What stands in for something: the bookies' and brokers' servers (but for who lets adds in), and the
// connections to them (in order, answered or broken as a whole), and etcd, by the model in etcdmodel, which a test
// compares with the real one.
//
// Repairs are the simulation's, of the product's transactions, reader and adds (repairer.go, repair.go).
//
// The ghost holds each word against all that was said before: what a bookie acknowledged, denied or fenced, what a writer
// confirmed, what readers were served, how records may change. The numbers of its checks are listed in docs/testing.md.
// After the faults everything is healed: each topic must be served again within 30 simulated seconds, or go on delivering what
// it has until then, and each acknowledged entry must lie where it was acknowledged, on the disks that its record names.
//
// The product's runners run as they are, over the scheduler of their process (package sched), one step at a time: what they
// start is a coroutine that begins a moment later, a wait gives way to others, and what has become ready goes on after a
// delay drawn from the seed. Each request to etcd can be lost before or after it was applied.
//
//	b.sched                          // of a process's present life, for the Sched of a product's environment
//	b.do(func() { c.Append(…) })     // the world calls into a process: whoever that wakes is looked for
//	b.sched.Go(func() { … })         // for calls that wait
//
// What the simulation itself closes (timers, ends of timeouts, answers) it tells those who wait for it. Other channels are
// the product's: all that are waited for are looked at after each delivery, which is what many waits in one process cost.
//
// Once the process is killed, its tasks are unwound through their deferred calls, and nothing of that life happens any
// more. What is delivered to a process (messages, timers) is not in a task, and must not wait.
//
// The alternative, the product's own goroutines under testing/synctest, was rejected: time is simulated there, but the order
// in which goroutines run is not, so a seed does not come back.
package sim
