package sim_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
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
	o := outing{began: time.Now(), cpuBegan: cpuTime(), next: *from, end: *from + n}
	workers := runtime.GOMAXPROCS(0)
	if *until {
		workers = 1 // the first one is the lowest
	}
	var running sync.WaitGroup
	for range workers {
		running.Go(func() { o.run(t) })
	}
	running.Wait()
	if o.found {
		return
	}
	total := &o.total
	if *seeds == 0 { // what happens in none of them is checked by none of them
		for what, n := range map[string]int{
			"appends stored": total.Appends[1], "appends of unknown outcome": total.Appends[3], "ledgers closed": total.Closed,
			"ledgers trimmed": total.Trimmed, "ledgers deleted from disks": total.Deleted, "topics deleted": total.Deletions, "compactions": total.Compactions, "swaps by repairs": total.Swaps,
			"starts": total.Boots, "entries checked after starts": total.Checked, "entries served": total.Served,
		} {
			if n == 0 {
				t.Errorf("no %s in %d seeds", what, shortSet)
			}
		}
	}
	took, cpu := time.Since(o.began), cpuTime()-o.cpuBegan
	t.Logf("%d seeds, %d fail: %.0f simulated s, %d events, appends %d (stored %d, not written %d, unknown %d), %d ledgers closed, %d trimmed, %d deleted from disks, %d topics deleted, %d compactions, %d swaps, %d boots, %d entries checked after them, %d served; %.3f s a seed, %.3f core-s, %.2f of them per simulated half hour",
		n, o.failed, total.Simulated.Seconds(), total.Events, total.Appends[0], total.Appends[1], total.Appends[2], total.Appends[3], total.Closed, total.Trimmed, total.Deleted, total.Deletions, total.Compactions, total.Swaps, total.Boots, total.Checked, total.Served,
		took.Seconds()/float64(n), cpu.Seconds()/float64(n), cpu.Seconds()/total.Simulated.Hours()/2)
}

// outing is a run of many seeds, as many at a time as there are processors.
type outing struct {
	mu       sync.Mutex
	began    time.Time
	cpuBegan time.Duration
	next     uint64
	end      uint64
	done     int
	failed   int
	found    bool // -until has what it wanted
	total    sim.Result
}

// run takes seeds until there are none left.
func (o *outing) run(t *testing.T) {
	t.Helper()
	for {
		o.mu.Lock()
		seed := o.next
		if seed >= o.end || o.found {
			o.mu.Unlock()
			return
		}
		o.next++
		o.mu.Unlock()
		opt := options(seed)
		opt.Brief = *seeds > 0
		r, err := sim.Run(opt)
		o.ran(t, seed, r, err)
	}
}

// ran counts a seed. A failure is told at once.
func (o *outing) ran(t *testing.T, seed uint64, r sim.Result, err error) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.done++
	if err != nil {
		o.failed++
		if f := (*sim.Failure)(nil); *until && errors.As(err, &f) {
			fmt.Printf("found after %d seeds: %s: %s\n", o.done, f.Invariant, f.Detail)
			o.found = true
			return
		}
		fmt.Fprintf(os.Stderr, "seed %d fails: %v\n", seed, err)
		t.Errorf("seed %d fails", seed)
	}
	total := &o.total
	total.Simulated += r.Simulated
	total.Events += r.Events
	total.Closed += r.Closed
	total.Boots += r.Boots
	total.Checked += r.Checked
	total.Served += r.Served
	total.Trimmed += r.Trimmed
	total.Deleted += r.Deleted
	total.Deletions += r.Deletions
	total.Compactions += r.Compactions
	total.Swaps += r.Swaps
	for i, v := range r.Appends {
		total.Appends[i] += v
	}
	if o.done%50 == 0 && *seeds >= 100 {
		fmt.Fprintf(os.Stderr, "%d seeds of %d, %d fail: %.1f simulated h, %v, %v of processors\n", o.done, *seeds, o.failed,
			total.Simulated.Hours(), time.Since(o.began).Round(time.Second), (cpuTime() - o.cpuBegan).Round(time.Second))
	}
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
	// Little lives, of a long run some hundred megabytes, and much is thrown away. What lives counts for more than it is,
	// so that a short run is not collected all the time.
	ballast := make([]byte, 32<<20) // never touched
	debug.SetGCPercent(300)
	debug.SetMemoryLimit(1200 << 20)
	if sim.Commit == "" {
		sim.Commit = "unknown"
		if out, err := exec.CommandContext(context.Background(), "git", "describe", "--always", "--dirty", "--abbrev=12").Output(); err == nil {
			sim.Commit = strings.TrimSpace(string(out))
		}
	}
	code := m.Run()
	runtime.KeepAlive(ballast)
	os.Exit(code)
}

func runSeed(t *testing.T, seed uint64) {
	t.Helper()
	r, err := sim.Run(options(seed))
	t.Logf("%s: %x, %v simulated, %d events, appends %v, %d ledgers, %d boots, %d swaps", r.Shape, r.Sum[:8], r.Simulated, r.Events, r.Appends, r.Closed, r.Boots, r.Swaps)
	if err != nil {
		t.Fatal(err)
	}
}

// TestTraceIsRepeatable runs seeds twice: one after the other, and all at once, since whoever runs many uses all processors.
func TestTraceIsRepeatable(t *testing.T) {
	type run struct {
		r   sim.Result
		err error
	}
	first, second := make([]run, shortSet/6), make([]run, shortSet/6)
	for i := range first {
		first[i].r, first[i].err = sim.Run(options(uint64(i + 1)))
	}
	var running sync.WaitGroup
	for i := range second {
		running.Go(func() { second[i].r, second[i].err = sim.Run(options(uint64(i + 1))) })
	}
	running.Wait()
	for i, a := range first {
		if b := second[i]; a.r != b.r || (a.err == nil) != (b.err == nil) {
			t.Errorf("seed %d: %+v, then %+v", i+1, a, b)
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
