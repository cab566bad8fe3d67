//go:build linux

package faults

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload"
)

// resultsHead is above the tables.
const resultsHead = `# Fault matrix

Real processes: etcd (one, or three where it is the victim), %d bookies, %d brokers, and clients in the test. Every workload runs
in every cell while its fault comes and goes; then everything sent, acknowledged, delivered and stored is compared, and
every copy of every entry is read from its bookie. Written by ` + "`make test-faults`" + `; ` + "`integration/faults`" + ` tells how to run one.
"Duplicated" messages are stored twice: allowed in W1, which does not ask for deduplication, when a broker dies before it can
answer. The goals are for machines that do nothing else; these had two cores, shared. Beside its goal each cell has to go on within
%v of a fault's end, or the goal is not met; it fails, whatever the machine, if it has not within %v. The commit is what the
brokers and bookies say they were built from.

Workloads: %s.

`

const (
	rowsTitle  = "## What came out\n\n"
	goalsTitle = "\n## Availability\n\n"
	// weakerTitle is above a list, whose lines are not taken for rows.
	weakerTitle = "\n## Goals that are weaker than designed\n\n"
)

var (
	rowColumns  = append(append([]string{"fault", "workload"}, workload.Columns...), "longest stall", "slowest delivery", "verdict")
	goalColumns = []string{"fault", "what happens", "goal", "measured", "", "seconds", "commit", "notes"}
)

func tableHead(columns []string) string {
	return "| " + strings.Join(columns, " | ") + " |\n|" + strings.Repeat("-|", len(columns)) + "\n"
}

func tableRow(cells ...string) string {
	for i := range cells {
		cells[i] = strings.ReplaceAll(strings.ReplaceAll(cells[i], "\n", " "), "|", "/")
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}

// key is how a cell is named in a table.
func (c cell) key() string { return c.fault + " " + c.name }

// writeResults writes the tables of all cells to a file. Rows of cells that were not run are taken from the file, unless
// this is a run of all of them: then the page is of one run.
func writeResults(path string, results []result, all bool) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write results: %w", err)
	}
	if all {
		old = nil
	}
	oldRows, oldGoals, _ := strings.Cut(string(old), goalsTitle)
	kept := func(text string, c cell) string {
		var found strings.Builder
		for row := range strings.Lines(text) {
			if strings.HasPrefix(row, "| "+c.key()+" |") {
				found.WriteString(row)
			}
		}
		return found.String()
	}
	ran := make(map[string]result)
	for _, r := range results {
		ran[r.cell.key()] = r
	}
	var names []string
	for _, k := range kinds {
		names = append(names, k.name+" "+k.title)
	}
	for _, k := range notBuilt {
		names = append(names, k.name+" "+k.title+" (not built)")
	}
	var out strings.Builder
	fmt.Fprintf(&out, resultsHead, bookies, brokers, soon, patience, strings.Join(names, ", "))
	out.WriteString(rowsTitle + tableHead(rowColumns))
	for _, c := range matrix {
		out.WriteString(rowsOf(c, ran, kept(oldRows, c)))
	}
	out.WriteString(goalsTitle + tableHead(goalColumns))
	for _, c := range matrix {
		r, ok := ran[c.key()]
		switch row := kept(oldGoals, c); {
		case c.strike == nil:
			out.WriteString(tableRow(c.key(), c.what, "", "", "not built", "", "", c.why))
		case ok:
			met := "met"
			if !r.met {
				met = "NOT MET"
			}
			out.WriteString(tableRow(c.key(), c.what, c.goal, r.goal, met, fmt.Sprintf("%.0f", r.took.Seconds()), r.commit, strings.Join(r.notes, "; ")))
		case row != "":
			out.WriteString(row)
		default:
			out.WriteString(tableRow(c.key(), c.what, c.goal, "", "not run", "", "", ""))
		}
	}
	out.WriteString(weakerTitle)
	for _, c := range matrix {
		if c.designed != "" {
			fmt.Fprintf(&out, "- %s: designed is \"%s\". Here it is \"%s\": %s.\n", c.key(), c.designed, c.goal, c.weaker)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil { //nolint:gosec // a page of the documentation
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// rowsOf are a cell's rows: of this run, or else those there were.
func rowsOf(c cell, ran map[string]result, kept string) string {
	var out strings.Builder
	empty := make([]string, len(workload.Columns)+2)
	r, ok := ran[c.key()]
	switch {
	case c.strike == nil:
		return tableRow(append(append([]string{c.key(), "all"}, empty...), "not built: "+c.why)...)
	case !ok && kept != "":
		return kept
	case !ok:
		return tableRow(append(append([]string{c.key(), "all"}, empty...), "not run")...)
	}
	for _, l := range r.rows {
		cells := append([]string{c.key(), l.workload}, l.report.Cells()...)
		out.WriteString(tableRow(append(cells, seconds(l.stall), seconds(l.delay), l.verdict())...))
	}
	for _, k := range notBuilt {
		out.WriteString(tableRow(append(append([]string{c.key(), k.name}, empty...), "not built")...))
	}
	return out.String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
