package sim

import (
	"context"
	"iter"
	"slices"
	"time"
)

// process is something that can be killed and paused: what is due for it is dropped once it is dead, and waits while it
// is paused, as signals STOP and CONT do. A restart is another life.
type process struct {
	k       *kernel
	name    string
	up      bool
	paused  bool
	life    int
	backlog []func()
	tasks   []*task
}

func (p *process) start() {
	p.life++
	p.up, p.paused, p.backlog = true, false, nil
}

// kill ends the life. It must not be called from one of the process's own tasks.
func (p *process) kill() {
	p.up, p.paused, p.backlog = false, false, nil
	p.life++
	tasks := p.tasks
	p.tasks = nil
	for _, t := range tasks {
		t.stop()
	}
}

func (p *process) pause() { p.paused = true }

func (p *process) resume() {
	if !p.paused {
		return
	}
	p.paused = false
	backlog := p.backlog
	p.backlog = nil
	life := p.life
	for _, f := range backlog {
		p.k.after(0, func() { p.deliver(life, f) })
	}
}

// deliver runs f in the life that it was meant for.
func (p *process) deliver(life int, f func()) {
	switch {
	case !p.up || p.life != life:
	case p.paused:
		p.backlog = append(p.backlog, f)
	default:
		f()
	}
}

// after has f run in this life.
func (p *process) after(d time.Duration, f func()) {
	life := p.life
	p.k.after(d, func() { p.deliver(life, f) })
}

// task is straight-line code of a process with waits in it, as a coroutine: it runs until it waits, and goes on when what
// it waits for comes. Nothing else runs meanwhile.
type task struct {
	p     *process
	next  func() (func(wake func()), bool)
	stop  func()
	yield func(func(wake func())) bool
}

type killed struct{}

// spawn starts f now.
func (p *process) spawn(f func(t *task)) {
	t := &task{p: p}
	t.next, t.stop = iter.Pull(func(yield func(func(wake func())) bool) {
		defer func() {
			if r := recover(); r != nil {
				if _, ok := r.(killed); !ok {
					panic(r)
				}
			}
		}()
		t.yield = yield
		f(t)
	})
	p.tasks = append(p.tasks, t)
	t.step()
}

func (t *task) step() {
	begin, ok := t.next()
	if !ok {
		t.p.tasks = slices.DeleteFunc(t.p.tasks, func(o *task) bool { return o == t })
		return
	}
	life, woken := t.p.life, false
	begin(func() {
		if woken {
			panic("sim: a task is woken twice")
		}
		woken = true
		t.p.deliver(life, t.step)
	})
}

// await gives begin the way to wake the task, and waits until that is called. It must not be called before begin has
// returned.
func (t *task) await(begin func(wake func())) {
	if !t.yield(begin) {
		panic(killed{})
	}
}

func (t *task) sleep(d time.Duration) { t.await(func(wake func()) { t.p.k.after(d, wake) }) }

// taskContext is the context of what a task calls: it knows the task, and ends at a simulated time or when the caller
// says so.
type taskContext struct {
	context.Context //nolint:containedctx // an empty one, for what is not overridden
	t               *task
	until           time.Duration // 0: never
	ended           func() bool   // may be nil
}

type taskKey struct{}

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

// Value implements context.Context.
func (c *taskContext) Value(key any) any {
	if _, ok := key.(taskKey); ok {
		return c.t
	}
	return nil
}

// taskOf returns the task that a context is of.
func taskOf(ctx context.Context) *task {
	t, ok := ctx.Value(taskKey{}).(*task)
	if !ok {
		panic("sim: not the context of a task")
	}
	return t
}

// sleepIn is meta's way to wait.
func sleepIn(ctx context.Context, d time.Duration) {
	t := taskOf(ctx)
	t.sleep(t.p.k.between(d/2, d))
}
