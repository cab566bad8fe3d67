package ledger_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"
)

// defaultSeeds is how many seeds run without -sim.seeds.
var defaultSeeds uint64 = 1000

var (
	simSeeds = flag.Uint64("sim.seeds", 0, "how many seeds the simulation runs; 0: 1000, with the race detector 100")
	simSeed  = flag.Uint64("sim.seed", 0, "run one seed of the simulation, and print what happens")
	simCount = flag.Bool("sim.count", false, "go on after a seed that fails, and print how many do: to see what finds a fault that was planted")
)

// TestSimulation runs the cores against bookies, metadata and repair that delay, reorder, lose and fail, and checks the
// protocol's invariants. A failure prints its seed; -sim.seed=N shows the story.
func TestSimulation(t *testing.T) {
	t.Parallel()
	if *simSeed != 0 {
		s := newSim(*simSeed)
		s.verbose = true
		err := s.run()
		t.Logf("\n%s", strings.Join(s.trace, "\n"))
		if err != nil {
			t.Fatalf("seed %d %+v: %v", *simSeed, s.r, err)
		}
		return
	}
	seeds := *simSeeds
	if seeds == 0 {
		seeds = defaultSeeds
	}
	const shards = 4
	var total [shards]tally
	var failed [shards]map[string]int
	t.Run("shards", func(t *testing.T) {
		for shard := range uint64(shards) {
			failed[shard] = map[string]int{}
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for seed := 1 + shard; seed <= seeds; seed += shards {
					s, err := runSim(seed)
					switch {
					case err == nil:
						total[shard].add(s)
					case *simCount:
						kind, _, _ := strings.Cut(err.Error(), ":")
						failed[shard][kind]++
					default:
						t.Fatalf("seed %d %+v: %v", seed, s.r, err)
					}
				}
			})
		}
	})
	if *simCount {
		kinds, n := map[string]int{}, 0
		for _, f := range failed {
			for kind, k := range f {
				kinds[kind] += k
				n += k
			}
		}
		t.Logf("%d of %d seeds fail: %v", n, seeds, kinds)
		if n > 0 {
			t.FailNow()
		}
	}
	var sum tally
	for _, k := range total {
		sum.merge(k)
	}
	t.Logf("%+v", sum)
	// A simulation in which nothing happens proves nothing.
	if sum.Changes == 0 || sum.Pulled == 0 || sum.Recovered == 0 || sum.Closed == 0 || sum.Repairs == 0 || sum.All == 0 || sum.Dropped == 0 || sum.LostWrites == 0 {
		t.Errorf("some story never happened: %+v", sum)
	}
}

// runSim runs a seed. What the cores assert is a failure like another.
func runSim(seed uint64) (s *sim, err error) {
	s = newSim(seed)
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return s, s.run()
}
