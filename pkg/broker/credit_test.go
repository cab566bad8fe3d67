package broker

import (
	"math/rand/v2"
	"testing"
)

// A client that gives endless permits and reads slowly bounds what waits for it.
func TestCreditBoundsBytesInTheStream(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var c credit
		size := int64(1) << (4 + rng.IntN(19)) // 16 B to 4 MiB
		allowed := int64(c.add(1 << 30))
		var queue []int64
		for range 5000 {
			if allowed > 0 && rng.IntN(3) > 0 {
				allowed--
				c.queued(1, size)
				queue = append(queue, size)
			} else if len(queue) > 0 {
				allowed += int64(c.sent(queue[0]))
				queue = queue[1:]
			}
			if limit := max(sendWindow, firstPermits*size) + size; c.waiting > limit {
				t.Fatalf("seed %d: %d bytes of %d-byte messages wait in the stream", seed, c.waiting, size)
			}
		}
		// Everything drains, and the client's permits are not lost.
		for len(queue) > 0 {
			allowed += int64(c.sent(queue[0]))
			queue = queue[1:]
		}
		if allowed < 1 {
			t.Fatalf("seed %d: stuck with %d permits held", seed, c.held)
		}
	}
}

func TestCreditPassesSmallPermitsOn(t *testing.T) {
	t.Parallel()
	var c credit
	passed := int64(0)
	for i := range 1000 {
		passed += int64(c.add(1))
		if passed > 0 {
			passed--
			c.queued(1, 100)
			passed += int64(c.sent(100))
		}
		if c.held+passed > 1 {
			t.Fatalf("after %d permits %d are held back although nothing waits", i+1, c.held)
		}
	}
}
