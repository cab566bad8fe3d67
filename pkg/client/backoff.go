package client

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff spaces attempts to find and reach a topic's owner. A takeover lasts 50 to 300 ms, so the first
// second is spent on quick attempts, 20 to 50 ms apart; after that the pause grows to a second, so that a
// cluster that is down for longer is not hammered by its clients when it comes back.
type backoff struct {
	attempt int
	rnd     func() float64 // in [0, 1)
}

const (
	backoffQuick    = 20 // attempts
	backoffFirst    = 20 * time.Millisecond
	backoffQuickMax = 50 * time.Millisecond
	backoffMax      = time.Second
)

func newBackoff() backoff { return backoff{rnd: rand.Float64} }

// next returns the pause before the next attempt, with jitter so that many clients do not come at once.
func (b *backoff) next() time.Duration {
	d := backoffFirst
	limit := backoffQuickMax
	if b.attempt >= backoffQuick {
		limit = backoffMax
	}
	for i := 0; i < b.attempt && d < limit; i++ {
		if i < backoffQuick {
			d = min(d*3/2, backoffQuickMax)
		} else {
			d = d * 3 / 2
		}
	}
	b.attempt++
	d = min(d, limit)
	return d*3/4 + time.Duration(b.rnd()*float64(d)/2)
}

func (b *backoff) reset() { b.attempt = 0 }

// pause waits for d, and reports false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
