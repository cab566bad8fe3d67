package sim_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/integration/sim"
)

var (
	seeds   = flag.Uint64("seeds", 0, "how many seeds to run, from -from on; 0: a short set")
	from    = flag.Uint64("from", 1, "the first seed")
	until   = flag.Bool("until", false, "stop at the first seed that fails, and print it in one line")
	whole   = flag.Bool("whole", false, "tell a failure's whole story")
	minutes = flag.Float64("minutes", 0, "simulated minutes of faults per seed; 0: a third of one")
)

// shortSet is how many seeds run among all other tests; race_test.go has its share under the race detector.
var shortSet uint64 = 40

func options(seed uint64) sim.Options {
	return sim.Options{Seed: seed, Whole: *whole, Faulty: time.Duration(*minutes * float64(time.Minute))}
}

// TestSeed runs seeds. -run Seed/N runs seed N, whichever the set is.
func TestSeed(t *testing.T) {
	n := *seeds
	if n == 0 {
		n = shortSet
	}
	var wanted uint64
	if _, err := fmt.Sscanf(strings.TrimPrefix(flag.Lookup("test.run").Value.String(), "Test"), "Seed/%d", &wanted); err == nil {
		t.Run(strconv.FormatUint(wanted, 10), func(t *testing.T) { runSeed(t, wanted) })
		return
	}
	// Little lives, and much is thrown away.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(256 << 20)
	began, cpuBegan := time.Now(), cpuTime()
	var total sim.Result
	for seed := *from; seed < *from+n; seed++ {
		r, err := sim.Run(options(seed))
		if err != nil {
			var f *sim.Failure
			if *until && errors.As(err, &f) {
				fmt.Printf("found after %d seeds: %s: %s\n", seed-*from+1, f.Invariant, f.Detail)
				return
			}
			fmt.Fprintln(os.Stderr, err)
			t.Errorf("seed %d fails", seed)
			continue
		}
		if done := seed - *from + 1; n >= 1000 && done%50 == 0 {
			fmt.Fprintf(os.Stderr, "%d seeds, up to %d: %.1f simulated h, %v, %v of processors\n",
				done, seed, total.Simulated.Hours(), time.Since(began).Round(time.Second), (cpuTime() - cpuBegan).Round(time.Second))
		}
		total.Simulated += r.Simulated
		total.Events += r.Events
		total.Closed += r.Closed
		total.Boots += r.Boots
		total.Checked += r.Checked
		total.Served += r.Served
		total.Trimmed += r.Trimmed
		total.Deleted += r.Deleted
		total.Compactions += r.Compactions
		for i, v := range r.Appends {
			total.Appends[i] += v
		}
	}
	if *seeds == 0 { // what happens in none of them is checked by none of them
		for what, n := range map[string]int{
			"appends stored": total.Appends[1], "appends of unknown outcome": total.Appends[3], "ledgers closed": total.Closed,
			"ledgers trimmed": total.Trimmed, "ledgers deleted from disks": total.Deleted, "compactions": total.Compactions,
			"starts": total.Boots, "entries checked after starts": total.Checked, "entries served": total.Served,
		} {
			if n == 0 {
				t.Errorf("no %s in %d seeds", what, shortSet)
			}
		}
	}
	took, cpu := time.Since(began), cpuTime()-cpuBegan
	t.Logf("%d seeds: %.0f simulated s, %d events, appends %d (stored %d, not written %d, unknown %d), %d ledgers closed, %d trimmed, %d deleted from disks, %d compactions, %d boots, %d entries checked after them, %d served; %.3f s a seed, %.3f core-s, %.2f of them per simulated half hour",
		n, total.Simulated.Seconds(), total.Events, total.Appends[0], total.Appends[1], total.Appends[2], total.Appends[3], total.Closed, total.Trimmed, total.Deleted, total.Compactions, total.Boots, total.Checked, total.Served,
		took.Seconds()/float64(n), cpu.Seconds()/float64(n), cpu.Seconds()/total.Simulated.Hours()/2)
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestMain(m *testing.M) {
	if sim.Commit == "" {
		sim.Commit = "unknown"
		if out, err := exec.CommandContext(context.Background(), "git", "describe", "--always", "--dirty", "--abbrev=12").Output(); err == nil {
			sim.Commit = strings.TrimSpace(string(out))
		}
	}
	os.Exit(m.Run())
}

func runSeed(t *testing.T, seed uint64) {
	t.Helper()
	r, err := sim.Run(options(seed))
	t.Logf("%s: %x, %v simulated, %d events, appends %v, %d ledgers, %d boots", r.Shape, r.Sum[:8], r.Simulated, r.Events, r.Appends, r.Closed, r.Boots)
	if err != nil {
		t.Fatal(err)
	}
}

// TestTraceIsRepeatable runs seeds twice.
func TestTraceIsRepeatable(t *testing.T) {
	for seed := uint64(1); seed <= shortSet/6; seed++ {
		a, errA := sim.Run(options(seed))
		b, errB := sim.Run(options(seed))
		if a != b || (errA == nil) != (errB == nil) {
			t.Errorf("seed %d: %+v, then %+v", seed, a, b)
		}
	}
}

// TestPinned runs what testdata/pinned has: seeds that have found something, each with its minutes. They stay for ever,
// though each change of the simulation or the product gives them other runs.
func TestPinned(t *testing.T) {
	t.Parallel()
	list, err := os.ReadFile("testdata/pinned")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(list)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		var opt sim.Options
		var minutes float64
		if _, err := fmt.Sscan(line, &opt.Seed, &minutes); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		opt.Faulty = time.Duration(minutes * float64(time.Minute))
		if _, err := sim.Run(opt); err != nil {
			t.Error(err)
		}
	}
}
