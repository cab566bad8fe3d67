package repair

import (
	"context"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// pace spreads bytes over time. It is safe for concurrent use.
type pace struct {
	sched sched.Scheduler
	// rate is bytes per second now; 0: no bound.
	rate func() int64

	mu   sync.Mutex
	free time.Time // when what was taken so far has had its time
}

// take waits until n bytes may be copied. What is taken at once may be more than a second's worth: the next one waits for it.
func (p *pace) take(ctx context.Context, n int) error {
	rate := p.rate()
	if rate <= 0 {
		return ctx.Err() //nolint:wrapcheck // as a context says it
	}
	now := p.sched.Now()
	p.mu.Lock()
	if p.free.Before(now) {
		p.free = now
	}
	wait := p.free.Sub(now)
	p.free = p.free.Add(time.Duration(float64(n) / float64(rate) * float64(time.Second)))
	p.mu.Unlock()
	if wait == 0 {
		return ctx.Err() //nolint:wrapcheck // likewise
	}
	return sched.Sleep(ctx, p.sched, wait) //nolint:wrapcheck // likewise
}
