// Package faults is the matrix: faults times workloads, over real processes, seen from outside. Each cell is a cluster of
// its own that one kind of fault befalls again and again while all workloads run on it; afterwards everything that was
// sent, acknowledged, delivered and stored is compared.
//
//	go test ./integration/faults                                  # a few cells, 10 s each
//	go test ./integration/faults -run Matrix/F4 -full -for 2m -v  # chosen ones of all, for longer
//	make test-faults                                              # all, 60 s each, written to docs/results/faults.md
//
// The table of cells is matrix.go; what their faults do is beside it, one function each. A cell fails when something
// acknowledged is lost, changed, or delivered out of order, when something is stored twice in spite of deduplication or was
// never sent, when a bookie holds fewer copies than it acknowledged, when a process panics, and when something hangs. How
// long publishing stands still, against the goal for it, is told beside the verdict: it depends on the machine. So does how
// soon all go on after a fault has ended: 30 s is the aim, without which no goal is met; a cell fails after minutes.
package faults
