package repair

import (
	"context"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// clock is a scheduler for one caller whose waits pass at once.
type clock struct {
	sched.Scheduler
	now time.Time
}

func (c *clock) Now() time.Time { return c.now }

func (c *clock) Timer(d time.Duration) (_ <-chan struct{}, stop func() bool) {
	c.now = c.now.Add(d)
	passed := make(chan struct{})
	close(passed)
	return passed, func() bool { return false }
}

// What is taken takes its time at the rate of then, whatever the sizes; what was not taken is not saved up.
func TestPaceKeepsTheRate(t *testing.T) {
	t.Parallel()
	c := &clock{Scheduler: sched.Real, now: time.Unix(1000, 0)}
	rate := int64(1000)
	p := &pace{sched: c, rate: func() int64 { return rate }}
	begin := c.now
	for _, n := range []int{100, 900, 1, 1999, 5000} {
		if err := p.take(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	if got := c.now.Sub(begin); got != 3*time.Second { // the last one has begun
		t.Errorf("3000 bytes took %v before the last 5000", got)
	}
	rate = 10_000
	c.now = c.now.Add(time.Hour)
	begin = c.now
	for range 11 {
		if err := p.take(t.Context(), 1000); err != nil {
			t.Fatal(err)
		}
	}
	if got := c.now.Sub(begin); got != time.Second {
		t.Errorf("10000 bytes took %v at ten times the rate, after an hour's rest", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rate = 0
	if err := p.take(ctx, 1); err == nil {
		t.Error("a context that has ended is not noticed")
	}
}
