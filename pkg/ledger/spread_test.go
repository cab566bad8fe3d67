package ledger_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// zonesOf returns the known zones of the write set with the fewest, of all write sets together, and of the ensemble.
func zonesOf(r meta.Replication, zones []string) [3]int {
	distinct := func(first, n int) int {
		seen := map[string]bool{}
		for k := range n {
			if z := zones[(first+k)%len(zones)]; z != "" {
				seen[z] = true
			}
		}
		return len(seen)
	}
	s := [3]int{0: r.WriteQuorum, 2: distinct(0, r.Ensemble)}
	for i := range zones {
		n := distinct(i, r.WriteQuorum)
		s[0], s[1] = min(s[0], n), s[1]+n
	}
	return s
}

// bestSpread tries every arrangement of the candidates in the open slots; false when none has enough zones.
func bestSpread(r meta.Replication, list []ledger.Candidate, keep []meta.Slot) (best [3]int, ok bool) {
	zones, hosts := make([]string, r.Ensemble), map[string]bool{}
	for i, s := range keep {
		zones[i] = s.Zone
		if at := slices.IndexFunc(list, func(c ledger.Candidate) bool { return c.UUID == s.UUID }); at >= 0 {
			hosts[list[at].Host] = true
		}
	}
	var fill func(i int)
	fill = func(i int) {
		switch {
		case i == r.Ensemble:
			if s := zonesOf(r, zones); s[0] >= r.MinZones && (!ok || slices.Compare(s[:], best[:]) > 0) {
				best, ok = s, true
			}
		case keep != nil && !keep[i].UUID.IsZero():
			fill(i + 1)
		default:
			for _, c := range list {
				if !hosts[c.Host] {
					hosts[c.Host], zones[i] = true, c.Zone
					fill(i + 1)
					hosts[c.Host] = false
				}
			}
		}
	}
	fill(0)
	return best, ok
}

// Every placement, of new ensembles and of replacements, is spread as well as any could be.
func TestPlaceSpreadsAsFarAsThereAreZones(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(11, 4))
	for n := range 3000 {
		e := 1 + rng.IntN(5)
		qw := min(e, 1+rng.IntN(e)+rng.IntN(2))
		qa := 1 + rng.IntN(qw)
		r := replication(e, qw, qa, 0)
		if qa > 1 && qw > 1 && rng.IntN(3) == 0 {
			r.MinZones = 2
		}
		labels := 1 + rng.IntN(4)
		var words strings.Builder
		for i := range e + rng.IntN(3) {
			zone, host := "", i
			if z := rng.IntN(labels + 1); z > 0 || rng.IntN(3) > 0 {
				zone = string(rune('a' + z%labels))
			}
			if rng.IntN(8) == 0 {
				host = rng.IntN(i + 1) // shared, and maybe with one in another zone
			}
			fmt.Fprintf(&words, "h%d:%s ", host, zone)
		}
		spec := words.String()
		list := bookies(spec)
		rand := rand.New(rand.NewPCG(uint64(n), 1))
		check := func(keep []meta.Slot) []meta.Slot {
			t.Helper()
			slots, err := ledger.Place(ledger.PlaceRequest{Replication: r, Candidates: list, Keep: keep, Rand: rand})
			want, ok := bestSpread(r, list, keep)
			var pe *ledger.PlacementError
			if ok != (err == nil) || err != nil && !errors.As(err, &pe) {
				t.Fatalf("%+v of %s kept %v: %v, though it is %t that there is an arrangement", r, spec, keep, err, ok)
			}
			if !ok {
				return nil
			}
			var zones []string
			for i, s := range slots {
				zones = append(zones, s.Zone)
				if keep != nil && !keep[i].UUID.IsZero() && keep[i] != s {
					t.Fatalf("slot %d is not kept", i)
				}
			}
			hosts := map[string]bool{}
			for _, s := range slots {
				hosts[list[slices.IndexFunc(list, func(c ledger.Candidate) bool { return c.UUID == s.UUID })].Host] = true
			}
			equal(t, e, len(hosts))
			if got := zonesOf(r, zones); got != want && (qw > 1 || got[2] != want[2]) {
				t.Fatalf("%+v of %s kept %v: zones %q, spread %v, and %v is possible", r, spec, keep, zones, got, want)
			}
			return slots
		}
		if slots := check(nil); slots != nil {
			for range 1 + rng.IntN(2) {
				slots[rng.IntN(e)] = meta.Slot{}
			}
			check(slots)
		}
	}
}
