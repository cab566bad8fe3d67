package quorum

import (
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// zoneMaps calls f with every map of e slots to up to three zones and "unknown", up to renaming of zones.
func zoneMaps(e int, f func(zones []string)) {
	zones := make([]string, e)
	var fill func(i, used int)
	fill = func(i, used int) {
		if i == e {
			f(zones)
			return
		}
		zones[i] = ""
		fill(i+1, used)
		for z := range min(used+1, 3) {
			zones[i] = string(rune('a' + z))
			fill(i+1, max(used, z+1))
		}
	}
	fill(0, 0)
}

// validByHand is the ack predicate as the protocol words it: enough copies, in enough known zones.
func validByHand(s Set, zones []string, qa, minZones int) bool {
	copies, seen := 0, map[string]bool{}
	for i, z := range zones {
		if s.Has(i) {
			copies++
			if z != "" {
				seen[z] = true
			}
		}
	}
	return copies >= qa && (minZones <= 1 || len(seen) >= minZones)
}

// TestB4CoverageAgainstBruteForce: a change of the write path once broke the coverage arithmetic. So all of it is compared
// with brute force: every E ≤ 6, Qw, Qa, MinZones and map of zones. A set covers a write set if and only if it meets every subset of
// the write set that could have acknowledged an entry.
func TestB4CoverageAgainstBruteForce(t *testing.T) {
	t.Parallel()
	for e := 1; e <= 6; e++ {
		t.Run(fmt.Sprint("E=", e), func(t *testing.T) {
			t.Parallel()
			zoneMaps(e, func(zones []string) {
				for qw := 1; qw <= e; qw++ {
					for qa := 1; qa <= qw; qa++ {
						for mz := 0; mz <= qa; mz++ {
							if mz <= 1 && !allUnknown(zones) {
								continue // zones do not matter: one map is enough
							}
							compare(t, Config{e, qw, qa, mz}, zones)
						}
					}
				}
			})
		})
	}
}

func allUnknown(zones []string) bool {
	for _, z := range zones {
		if z != "" {
			return false
		}
	}
	return true
}

func compare(t *testing.T, cfg Config, zones []string) {
	t.Helper()
	q, err := New(cfg, zones)
	if err != nil {
		t.Fatal(err)
	}
	n := Set(1) << cfg.Ensemble
	valid := make([]bool, n)
	for s := range n {
		valid[s] = validByHand(s, zones, cfg.AckQuorum, cfg.MinZones)
		if q.Valid(s) != valid[s] {
			t.Fatalf("%+v zones %q: Valid(%b) = %t", cfg, zones, s, !valid[s])
		}
	}
	sets := make([]Set, cfg.Ensemble)
	for i := range sets {
		for k := range cfg.WriteQuorum {
			sets[i] |= 1 << ((i + k) % cfg.Ensemble)
		}
		for _, e := range []entry.EntryID{entry.EntryID(i), entry.EntryID(i + cfg.Ensemble*1000)} {
			if q.WriteSet(e) != sets[i] {
				t.Fatalf("%+v: WriteSet(%d) = %b, want %b", cfg, e, q.WriteSet(e), sets[i])
			}
		}
	}
	for x := range n {
		all := true
		for _, w := range sets {
			covers := true
			rest := w &^ x
			for s := rest; ; s = (s - 1) & rest { // every subset of w that x does not meet
				covers = covers && !valid[s]
				if s == 0 {
					break
				}
			}
			if q.Covers(w, x) != covers {
				t.Fatalf("%+v zones %q: Covers(%b, %b) = %t", cfg, zones, w, x, !covers)
			}
			all = all && covers
		}
		if q.FenceCovers(x) != all {
			t.Fatalf("%+v zones %q: FenceCovers(%b) = %t", cfg, zones, x, !all)
		}
		always := true
		for _, w := range sets {
			always = always && valid[w&^x]
		}
		if q.AlwaysValid(x) != always {
			t.Fatalf("%+v zones %q: AlwaysValid(%b) = %t", cfg, zones, x, !always)
		}
	}
}

// A zone that is gone leaves the other one able to decide: two negatives are enough where counting wants three.
func TestCoverageSurvivesAZoneOutage(t *testing.T) {
	t.Parallel()
	q := MustNew(Config{4, 4, 2, 2}, []string{"a", "a", "b", "b"})
	if !q.Covers(All(4), Of(0, 1)) {
		t.Error("the surviving zone's two negatives do not decide")
	}
	if q.Covers(All(4), Of(0, 2)) {
		t.Error("one negative per zone decides, though the other two could have acknowledged")
	}
	if MustNew(Config{4, 4, 2, 0}, nil).Covers(All(4), Of(0, 1)) {
		t.Error("without zones two negatives decide, though the other two could have acknowledged")
	}
}

func TestWriteSetOfTheLargestEnsemble(t *testing.T) {
	t.Parallel()
	q := MustNew(Config{64, 3, 2, 0}, nil)
	if got := q.WriteSet(63); got != Of(63, 0, 1) {
		t.Errorf("write set %b", got)
	}
	if got := MustNew(Config{64, 64, 2, 0}, nil).WriteSet(5); got != ^Set(0) {
		t.Errorf("write set %b", got)
	}
}

func TestConfigIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []Config{{3, 3, 0, 0}, {3, 2, 3, 0}, {2, 3, 2, 0}, {65, 3, 2, 0}, {3, 3, 2, 3}, {3, 3, 2, -1}} {
		if c.Validate() == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
	if _, err := New(Config{3, 3, 2, 2}, []string{"a"}); err == nil {
		t.Error("too few zones are accepted")
	}
}
