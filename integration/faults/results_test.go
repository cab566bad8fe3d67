//go:build linux

package faults

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload"
)

// What is wrong in either reading fails a workload, and is told.
func TestOutcome(t *testing.T) {
	t.Parallel()
	lost := []workload.Violation{{Kind: workload.Lost, Count: 3, Examples: []string{"4–6 of producer 0"}}}
	for name, c := range map[string]struct {
		o    outcome
		want string // cells; "" for a clean one
	}{
		"clean":     {outcome{delivered: workload.Report{Sent: 9, Received: 9}, stored: workload.Report{Sent: 9, StoredTwice: 2}}, "9 0 9 0 2 0 0"},
		"delivered": {outcome{delivered: workload.Report{Sent: 9, Violations: lost}}, "9 0 0 3 0 0 0"},
		"stored":    {outcome{delivered: workload.Report{Sent: 9, Received: 9}, stored: workload.Report{Violations: lost}}, "9 0 9 3 0 0 0"},
		"both": {outcome{
			delivered: workload.Report{Sent: 9, Violations: []workload.Violation{{Kind: workload.Reordered, Count: 1}}},
			stored:    workload.Report{Violations: lost},
		}, "9 0 0 3 0 1 0"},
	} {
		if got := strings.Join(c.o.report().Cells(), " "); got != c.want || (c.o.err() != nil) != (name != "clean") {
			t.Errorf("%s: %s, %v", name, got, c.o.err())
		}
	}
	sum := workload.Report{}
	sum.Add(workload.Report{Sent: 5, Acknowledged: 4, Received: 3, Violations: lost})
	sum.Add(workload.Report{Sent: 5, Acknowledged: 5, Received: 5, StoredTwice: 1, Violations: lost})
	if got := strings.Join(sum.Cells(), " "); got != "10 9 8 6 1 0 0" {
		t.Error(got)
	}
}

// The page has a row of every cell, whether it was run, or can be; what is not run again stays as it was.
func TestResults(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "results", "faults.md")
	cells := make(map[string]cell)
	for _, c := range matrix {
		if _, ok := cells[c.key()]; ok {
			t.Errorf("%s is there twice", c.key())
		}
		cells[c.key()] = c
	}
	read := func() string {
		t.Helper()
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	owner, bookie := cells["F1 kill-owner"], cells["F2 kill-bookie"]
	first := result{cell: owner, took: time.Minute, goal: "longest stall 300ms", met: true, rows: []line{
		{workload: "W1", report: workload.Report{Sent: 7, Acknowledged: 7, Received: 7}},
		{workload: "W2", err: errors.New("lost: 1 | of\nmany")},
	}}
	if err := writeResults(path, []result{first}, false); err != nil {
		t.Fatal(err)
	}
	before := read()
	for _, want := range []string{
		"| F1 kill-owner | W1 | 7 | 7 | 7 | 0 | 0 | 0 | 0 | 0.00 s | 0.00 s | ok |", "| FAILED: lost: 1 / of |", "| F1 kill-owner | W4 |",
		"| longest stall 300ms | met | 60 |", "| F21 decommission | all |", "not built: decommission is not built", "| F2 kill-bookie | all |", "| not run |",
	} {
		if !strings.Contains(before, want) {
			t.Errorf("%q is not in\n%s", want, before)
		}
	}
	if err := writeResults(path, []result{{cell: bookie, rows: []line{{workload: "W1"}}}}, false); err != nil {
		t.Fatal(err)
	}
	after := read()
	for row := range strings.Lines(before) {
		if strings.HasPrefix(row, "| F1 kill-owner |") && !strings.Contains(after, row) {
			t.Errorf("%q is gone", row)
		}
	}
	if strings.Contains(after, "| F2 kill-bookie | all |") || !strings.Contains(after, "| NOT MET |") {
		t.Error(after)
	}
	for key := range cells {
		if strings.Count(after, "| "+key+" |") < 2 {
			t.Errorf("%s is not in both tables", key)
		}
	}
	if err := writeResults(path, []result{{cell: bookie, commit: "0815", rows: []line{{workload: "W1"}}}}, true); err != nil {
		t.Fatal(err)
	}
	if one := read(); strings.Contains(one, "| F1 kill-owner | W1 |") || !strings.Contains(one, "| F1 kill-owner | all |") || !strings.Contains(one, "| 0815 |") {
		t.Errorf("a run of all cells leaves rows of another:\n%s", one)
	}
}
