package sim

import (
	"context"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// scheduler is what a process's product code starts and waits by, for one life. What it is asked for when that life is
// over does not happen; what waits then is unwound.
type scheduler struct {
	p    *process
	life int
	skew time.Duration // of the clock, which does not follow the machine's
}

var (
	_ sched.Scheduler = (*scheduler)(nil)
	_ sched.Timers    = (*scheduler)(nil)
)

func (s *scheduler) over() bool { return s.life != s.p.life || !s.p.up }

// Now implements sched.Scheduler.
func (s *scheduler) Now() time.Time { return s.p.k.clock().Add(s.skew) }

// Uint64 implements sched.Scheduler.
func (s *scheduler) Uint64() uint64 { return s.p.k.rng.Uint64() }

// Go implements sched.Scheduler: f is a task that starts in a moment.
func (s *scheduler) Go(f func()) { s.start(s.p.k.wakeDelay(), f, nil) }

// AfterFunc implements sched.Scheduler.
func (s *scheduler) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	ended := false
	s.start(max(d, 0)+s.p.k.wakeDelay(), f, &ended)
	return func() bool {
		first := !ended
		ended = true
		return first
	}
}

// Timer implements sched.Timers: who waits for the channel goes on when it is closed, and no task closes it.
func (s *scheduler) Timer(d time.Duration) (_ <-chan struct{}, stop func() bool) {
	t := &timer{p: s.p, c: make(chan struct{}, ownCapacity)}
	if !s.over() {
		s.p.after(max(d, 0)+s.p.k.wakeDelay(), t.fire)
	}
	return t.c, t.stop
}

type timer struct {
	p     *process
	c     chan struct{}
	ended bool
}

func (t *timer) fire() {
	if t.ended {
		t.p.idle = true
		return
	}
	t.ended = true
	t.p.idle = !t.p.fire(t.c)
}

func (t *timer) stop() (first bool) {
	first, t.ended = !t.ended, true
	return first
}

// start has f run as a task, unless *ended, which is set then.
func (s *scheduler) start(d time.Duration, f func(), ended *bool) {
	if s.over() {
		return
	}
	s.p.after(d, func() {
		if ended != nil {
			if *ended {
				s.p.idle = true
				return
			}
			*ended = true
		}
		s.p.spawn(func(*task) { f() })
	})
}

// Wait implements sched.Scheduler, for tasks. Even where nothing is to be waited for, others may come first.
func (s *scheduler) Wait(ctx context.Context, channels sched.Channels) (int, error) {
	t := s.task()
	t.ctx, t.channels, t.index, t.err = ctx, channels, -1, nil
	switch {
	case !t.ready():
		t.park()
	case s.p.k.chance(8):
		t.sleep(s.p.k.wakeDelay())
	}
	i, err := t.index, t.err
	t.ctx, t.channels, t.err = nil, sched.Channels{}, nil
	return i, err
}

// task returns the one that runs, which must be of this process.
func (s *scheduler) task() *task {
	t := s.p.k.running
	switch {
	case t == nil:
		panic("sim: a wait outside of tasks")
	case t.p != s.p:
		panic("sim: a task of " + t.p.name + " waits in " + s.p.name)
	case t.dead || s.over():
		panic(killed{})
	}
	return t
}

// WithTimeout implements sched.Scheduler.
func (s *scheduler) WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	c := &deadlineContext{p: s.p, parent: ctx, deadline: s.Now().Add(d), done: make(chan struct{}, ownCapacity)}
	if before, ok := ctx.Deadline(); ok && before.Before(c.deadline) {
		c.deadline = before
	}
	c.ends = s.p.onEnd(ctx, c.end)
	if !s.over() {
		s.p.after(max(d, 0), func() {
			s.p.idle = c.err != nil // as nearly always
			c.end(context.DeadlineExceeded)
		})
	}
	if err := ctx.Err(); err != nil {
		c.end(err)
	}
	return c, func() { c.end(context.Canceled) }
}

// deadlineContext is what context.WithTimeout returns, by simulated time. Contexts of package context that are made of it
// end with it, with its error.
type deadlineContext struct {
	p        *process
	parent   context.Context //nolint:containedctx // as package context has it
	deadline time.Time
	done     chan struct{}
	err      error
	ends     *ender // of parent
	after    []*func()
	enders   []*ender // made of it
}

// deadlineKey is what a deadlineContext has itself as a value of.
type deadlineKey struct{}

func (c *deadlineContext) end(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	close(c.done)
	c.ends.forget()
	after := c.after
	c.after = nil
	for _, f := range after {
		(*f)()
	}
	if len(c.enders) > 0 { // which poll tells: whoever ends c may hold what they need
		c.p.due = append(c.p.due, c.enders...)
		c.enders = nil
	}
	c.p.wakeWaiters(c.done)
}

// Deadline implements context.Context.
func (c *deadlineContext) Deadline() (time.Time, bool) { return c.deadline, true }

// Done implements context.Context.
func (c *deadlineContext) Done() <-chan struct{} {
	_ = c.Err()
	return c.done
}

// Err implements context.Context.
func (c *deadlineContext) Err() error {
	if c.err == nil {
		if err := c.parent.Err(); err != nil {
			c.end(err)
		}
	}
	return c.err
}

// Value implements context.Context.
func (c *deadlineContext) Value(key any) any {
	if key == (deadlineKey{}) {
		return c
	}
	return c.parent.Value(key)
}

// AfterFunc is how package context ends the contexts that it makes of this one.
func (c *deadlineContext) AfterFunc(f func()) (stop func() bool) {
	if c.err != nil {
		panic("sim: a context is made of one that has ended, and does not know it")
	}
	c.after = append(c.after, &f)
	return func() bool {
		n := len(c.after)
		c.after = slices.DeleteFunc(c.after, func(o *func()) bool { return o == &f })
		return len(c.after) < n
	}
}
