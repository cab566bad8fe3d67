//go:build linux

package faults

import (
	"flag"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

var (
	full    = flag.Bool("full", false, "run all cells; otherwise a few")
	howLong = flag.Duration("for", 10*time.Second, "how long each cell takes")
	results = flag.String("results", "", "file to write the tables to; rows of cells that are not run stay as they are, unless all are chosen")
	seed    = flag.Uint64("seed", 0, "what chance begins with; 0 is any")
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		removeSkewed()
		os.Exit(code)
	}))
}

// The matrix: nothing that was promised is broken, whatever happens.
func TestMatrix(t *testing.T) {
	programs, err := programDirectory()
	if err != nil {
		t.Fatal(err)
	}
	var all []result
	whole := *full && !strings.Contains(flag.Lookup("test.run").Value.String(), "/") && flag.Lookup("test.skip").Value.String() == ""
	for _, c := range chosen(*full) {
		t.Run(c.fault+"-"+c.name, func(t *testing.T) {
			from := *seed
			if from == 0 {
				from = rand.Uint64()
			}
			t.Logf("-seed %d", from)
			all = append(all, failed(c, programs)) // unless it comes to an end
			if *results != "" {
				defer func() { // after each, in case the next has no end
					if err := writeResults(*results, all, whole); err != nil {
						t.Error(err)
					}
				}()
			}
			r := run(t, programs, c, *howLong, from)
			all[len(all)-1] = r
			for _, l := range r.rows {
				t.Logf("%s: %v; longest stall %v, slowest delivery %v: %s", l.workload, l.report, l.stall, l.delay, l.verdict())
			}
			t.Logf("goal: %s; %s; met: %v; %v", c.goal, r.goal, r.met, r.notes)
		})
	}
}
