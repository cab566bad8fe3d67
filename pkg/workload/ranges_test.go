package workload

import (
	"math/rand/v2"
	"testing"
)

// The ranges are compared with a plain set.
func TestRangesModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 0))
		build := func() (ranges, map[uint64]bool) {
			var r ranges
			set := make(map[uint64]bool)
			for range 1 + rng.IntN(60) {
				n := rng.Uint64N(48)
				if r.add(n) == set[n] {
					t.Fatalf("seed %d: adding %d: new is %v", seed, n, !set[n])
				}
				set[n] = true
			}
			return r, set
		}
		a, as := build()
		b, bs := build()
		minus, and := a.minus(b), a.and(b)
		if a.count() != uint64(len(as)) {
			t.Fatalf("seed %d: count %d of %v", seed, a.count(), a)
		}
		for n := range uint64(50) {
			if a.has(n) != as[n] || minus.has(n) != (as[n] && !bs[n]) || and.has(n) != (as[n] && bs[n]) {
				t.Fatalf("seed %d: %d in %v, %v: minus %v, and %v", seed, n, a, b, minus, and)
			}
		}
		for i := 1; i < len(a); i++ {
			if a[i-1].last+1 >= a[i].first {
				t.Fatalf("seed %d: ranges touch: %v", seed, a)
			}
		}
		first := rng.Uint64N(48)
		last := first + rng.Uint64N(4)
		want := true
		for n := first; n <= last; n++ {
			want = want && as[n]
		}
		if a.covers(first, last) != want {
			t.Fatalf("seed %d: %v covers %d–%d: %v", seed, a, first, last, !want)
		}
	}
}
