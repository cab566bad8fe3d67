package sim

import (
	"context"
	"time"
)

// taskContext is the context of what a task calls: it ends at a simulated time or when the caller says so.
type taskContext struct {
	context.Context //nolint:containedctx // an empty one, for what is not overridden
	t               *task
	until           time.Duration // 0: never
	ended           func() bool   // may be nil
}

func (t *task) context(until time.Duration, ended func() bool) context.Context {
	return &taskContext{Context: context.Background(), t: t, until: until, ended: ended}
}

// Err implements context.Context.
func (c *taskContext) Err() error {
	switch {
	case c.ended != nil && c.ended():
		return context.Canceled
	case c.until != 0 && c.t.p.k.now >= c.until:
		return context.DeadlineExceeded
	}
	return nil
}
