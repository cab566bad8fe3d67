package sim

import (
	"context"
	"iter"
	"runtime/debug"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// process is something that can be killed and paused: what is due for it is dropped once it is dead, and waits while it
// is paused, as signals STOP and CONT do. A restart is another life.
type process struct {
	k       *kernel
	name    string
	up      bool
	paused  bool
	skew    time.Duration // of what the machine's clock shows
	life    int
	backlog []func()
	tasks   []*task
	parked  []*task  // those of tasks that wait for channels
	ends    []*ender // what is told when a context ends
	sched   *scheduler
	idle    bool // what is delivered turns out to be nothing, and has woken nobody
}

func (p *process) start() {
	p.life++
	p.up, p.paused, p.backlog = true, false, nil
	p.sched = &scheduler{p: p, life: p.life, skew: p.skew}
}

// kill ends the life. It must not be called from one of the process's own tasks.
func (p *process) kill() {
	p.up, p.paused, p.backlog = false, false, nil
	p.life++
	tasks := p.tasks
	p.tasks, p.parked, p.ends = nil, nil, nil
	for _, t := range tasks {
		t.kill()
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
		p.idle = false
		f()
		if !p.idle {
			p.poll()
		}
		p.idle = false
	}
}

// do runs f, which is of the process, now, paused or not. Whatever calls into a process from outside of its own tasks and
// deliveries goes through here.
func (p *process) do(f func()) {
	f()
	p.poll()
}

// poll looks for whom what has just happened has woken. It is where most of a run's time goes: what waits is looked at after
// each delivery.
func (p *process) poll() {
	for again := true; again; {
		again = false
		gone := false
		var last <-chan struct{} // known not to have ended
		for i := range len(p.ends) {
			e := p.ends[i]
			if !e.gone && e.done != last {
				if !isClosed(e.done) {
					last = e.done
					continue
				}
				e.gone, again, last = true, true, nil
				e.f(e.ctx.Err())
			}
			gone = gone || e.gone
		}
		if gone {
			p.ends = slices.DeleteFunc(p.ends, func(e *ender) bool { return e.gone })
		}
	}
	for i, t := range p.parked {
		if t.mayGoOn() {
			p.wake(i)
			return
		}
	}
}

// wake has those of parked that are ready go on; none is before the i-th.
func (p *process) wake(i int) {
	kept := p.parked[:i]
	for _, t := range p.parked[i:] {
		if !t.mayGoOn() || !t.ready() {
			kept = append(kept, t)
			continue
		}
		p.after(p.k.wakeDelay(), t.step)
	}
	clear(p.parked[len(kept):])
	p.parked = kept
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// after has f run in this life.
func (p *process) after(d time.Duration, f func()) {
	life := p.life
	p.k.after(d, func() { p.deliver(life, f) })
}

// wakeDelay is how long what can go on is kept waiting for a processor.
func (k *kernel) wakeDelay() time.Duration {
	r := k.rng.Uint32()
	if r&63 == 0 {
		return time.Duration(r >> 6 & (1<<21 - 1)) // up to 2 ms
	}
	return time.Duration(r >> 6 & (1<<13 - 1)) // up to 8 µs
}

// ender is told when a context ends.
type ender struct {
	ctx  context.Context //nolint:containedctx // it is what is watched
	done <-chan struct{} // of ctx
	f    func(err error)
	gone bool
}

// onEnd calls f with the error of ctx once that has ended, unless forget is called first.
func (p *process) onEnd(ctx context.Context, f func(err error)) (forget func()) {
	done := ctx.Done()
	if done == nil {
		return func() {}
	}
	e := &ender{ctx: ctx, done: done, f: f}
	p.ends = append(p.ends, e)
	return func() { e.gone = true }
}

// task is straight-line code of a process with waits in it, as a coroutine: it runs until it waits, and goes on when what
// it waits for comes. Nothing else runs meanwhile.
type task struct {
	p     *process
	w     *worker
	f     func(t *task)
	ended bool
	dead  bool   // it is being unwound
	after func() // if set, it is called each time when it has run until a wait

	// What Wait waits for, and what came of it.
	ctx      context.Context //nolint:containedctx // of the wait
	channels sched.Channels
	index    int
	err      error
	// watched are what it is woken by, while it is parked: those of channels, and that of ctx.
	watched [len(sched.Channels{}) + 1]struct {
		c      <-chan struct{}
		queued bool // things wait in it, it need not be closed
	}
	watches int
}

// worker is a coroutine that runs one task after the other.
type worker struct {
	t     *task
	next  func() (func(wake func()), bool)
	stop  func()
	yield func(func(wake func())) bool
}

type killed struct{}

func (k *kernel) newWorker() *worker {
	w := &worker{}
	w.next, w.stop = iter.Pull(func(yield func(func(wake func())) bool) {
		w.yield = yield
		for {
			w.t.run()
			if w.t.dead || !yield(nil) {
				return
			}
		}
	})
	return w
}

// run runs the task to its end. That of its process is the end of the task, and of nothing else.
func (t *task) run() {
	defer func() {
		t.ended = true
		if r := recover(); r != nil {
			if _, ok := r.(killed); !ok {
				t.p.k.panicked = debug.Stack()
				panic(r)
			}
		}
	}()
	t.f(t)
}

// spawn starts f now.
func (p *process) spawn(f func(t *task)) {
	t := &task{p: p, f: f}
	p.tasks = append(p.tasks, t)
	t.step()
}

func (t *task) step() {
	k := t.p.k
	if t.w == nil {
		if n := len(k.workers); n > 0 {
			t.w, k.workers = k.workers[n-1], k.workers[:n-1]
		} else {
			t.w = k.newWorker()
		}
		t.w.t = t
	}
	outer := k.running
	k.running = t
	begin, _ := t.w.next()
	k.running = outer
	if t.after != nil {
		t.after()
	}
	if t.ended {
		t.w.t = nil
		k.workers = append(k.workers, t.w)
		if i := slices.Index(t.p.tasks, t); i >= 0 {
			t.p.tasks = slices.Delete(t.p.tasks, i, i+1)
		}
		return
	}
	if begin == nil {
		t.watch()
		t.p.parked = append(t.p.parked, t)
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

// kill unwinds the task: its deferred calls run, and what they do is of no consequence.
func (t *task) kill() {
	if t.w == nil {
		return
	}
	k := t.p.k
	t.dead = true
	outer := k.running
	k.running = t
	t.w.stop()
	k.running = outer
}

// await gives begin the way to wake the task, and waits until that is called. It must not be called before begin has
// returned.
func (t *task) await(begin func(wake func())) {
	if t.dead || !t.w.yield(begin) {
		panic(killed{})
	}
}

// park waits until poll finds one of the channels or the context ready.
func (t *task) park() { t.await(nil) }

// watch gathers what a parked task is woken by.
func (t *task) watch() {
	t.watches = 0
	add := func(c <-chan struct{}) {
		if c != nil {
			t.watched[t.watches].c, t.watched[t.watches].queued = c, cap(c) > 0
			t.watches++
		}
	}
	for _, c := range t.channels {
		add(c)
	}
	add(t.ctx.Done())
}

// mayGoOn reports whether ready would say so. It takes nothing out of a channel.
func (t *task) mayGoOn() bool {
	for i := range t.watched[:t.watches] {
		w := &t.watched[i]
		if w.queued && len(w.c) > 0 {
			return true
		}
		// An empty one is closed, or not ready: nobody sends on the others.
		select {
		case <-w.c:
			return true
		default:
		}
	}
	return false
}

// ready reports whether the wait is over. If several things are ready, one is drawn.
func (t *task) ready() bool {
	n, drawn := 0, 0
	draw := func(i int) {
		if n++; n == 1 || t.p.k.rng.IntN(n) == 0 {
			drawn = i
		}
	}
	for i, c := range t.channels {
		if c == nil {
			continue
		}
		if len(c) > 0 {
			draw(i)
			continue
		}
		select {
		case <-c: // closed
			draw(i)
		default:
		}
	}
	err := t.ctx.Err()
	if err != nil {
		draw(-1)
	}
	switch {
	case n == 0:
		return false
	case drawn < 0:
		t.err = err
	case len(t.channels[drawn]) > 0:
		<-t.channels[drawn]
	}
	t.index = drawn
	return true
}

func (t *task) sleep(d time.Duration) { t.await(func(wake func()) { t.p.k.after(d, wake) }) }
