package bench

import (
	"math/rand/v2"
	"testing"
)

func TestTallyAgainstASet(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	const limit = 3*pageBits + 77
	var acked, received tally
	inAcked, inReceived := map[uint64]bool{}, map[uint64]bool{}
	check := func() {
		t.Helper()
		for _, below := range []uint64{0, 1, 63, 64, 65, pageBits, pageBits + 1, 2*pageBits - 1, limit, 10 * limit} {
			var want uint64
			for n := range inAcked {
				if n < below && !inReceived[n] {
					want++
				}
			}
			if got := acked.missingFrom(&received, below); got != want {
				t.Fatalf("%d missing below %d, want %d", got, below, want)
			}
		}
		if acked.size() != uint64(len(inAcked)) || received.size() != uint64(len(inReceived)) {
			t.Fatalf("sizes %d, %d; want %d, %d", acked.size(), received.size(), len(inAcked), len(inReceived))
		}
	}
	check()
	for range 5 * limit {
		n := r.Uint64N(limit)
		if acked.add(n) == inAcked[n] {
			t.Fatalf("add %d: it was in the set: %v", n, inAcked[n])
		}
		inAcked[n] = true
		n = r.Uint64N(limit)
		if received.add(n) == inReceived[n] {
			t.Fatalf("add %d: it was in the set: %v", n, inReceived[n])
		}
		inReceived[n] = true
	}
	check()
	for n := range uint64(limit) { // full pages
		acked.add(n)
		inAcked[n] = true
	}
	check()
	for n := range uint64(2 * pageBits) {
		received.add(n)
		inReceived[n] = true
	}
	check()
	if acked.add(5) || received.pages[0] != &fullPage {
		t.Fatal("a full page is not full")
	}
}

func BenchmarkTally(b *testing.B) {
	b.ReportAllocs()
	var set tally
	for n := range uint64(b.N) {
		set.add(n)
	}
}
