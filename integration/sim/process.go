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
	looked  []looked // what poll has to look at for them
	own     []owned  // what the simulation itself tells them
	waking  bool     // parked is being gone through
	ends    []*ender // what is told when a context ends
	due     []*ender // those of timeouts that have ended
	sched   *scheduler
	measure func() // called after what is delivered, unless that was nothing; may be nil
	idle    bool   // what is delivered turns out to be nothing, and has woken nobody
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
	p.tasks, p.parked, p.looked, p.own, p.ends = nil, nil, nil, nil, nil
	for _, t := range tasks {
		t.kill()
	}
	p.due = nil
}

func (p *process) pause() { p.paused = true }

func (p *process) resume() {
	if !p.paused {
		return
	}
	p.paused = false
	backlog := p.backlog
	p.backlog = nil
	for _, f := range backlog {
		p.after(0, f)
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
			if p.measure != nil {
				p.measure()
			}
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
		for len(p.due) > 0 {
			due := p.due
			p.due = nil
			for _, e := range due {
				if !e.gone {
					e.gone = true
					e.f(e.ctx.Err())
				}
			}
		}
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
	for i := range p.looked {
		if mayBeReady(p.looked[i].c) {
			p.wake()
			return
		}
	}
}

// wake has those of parked that are ready go on.
func (p *process) wake() {
	p.waking = true
	kept := p.parked[:0]
	for _, t := range p.parked {
		if !t.mayGoOn() || !t.ready() {
			kept = append(kept, t)
			continue
		}
		p.unwatch(t)
		p.after(p.k.wakeDelay(), t.goOn)
	}
	clear(p.parked[len(kept):])
	p.parked, p.waking = kept, false
}

// looked is a channel that parked tasks wait for, so many of them.
type looked struct {
	c     <-chan struct{}
	tasks int
}

// owned is a channel of the simulation's own that a parked task waits for.
type owned struct {
	c <-chan struct{}
	t *task
}

// ownCapacity is what channels have that the simulation itself closes, which says so with fire: poll does not look at them.
// Nothing is sent on them.
const ownCapacity = 7

// fire closes a channel of the simulation's own, and whoever waits for it goes on: the first at once. It is called in a
// delivery, and reports whether anybody did.
func (p *process) fire(c chan struct{}) bool {
	close(c)
	first := p.waiter(c)
	if first == nil {
		return false
	}
	p.wakeWaiters(c)
	first.step()
	return true
}

// wakeWaiters has those go on who wait for a channel of the simulation's own that was just closed.
func (p *process) wakeWaiters(c <-chan struct{}) {
	if p.waking {
		panic("sim: a context has ended, and poll did not know")
	}
	for t := p.waiter(c); t != nil; t = p.waiter(c) {
		p.after(p.k.wakeDelay(), t.goOn)
	}
}

// waiter takes out of parked one that waits for a channel that was just closed; nil: nobody does.
func (p *process) waiter(c <-chan struct{}) *task {
	for i := range p.own {
		if p.own[i].c != c {
			continue
		}
		t := p.own[i].t
		p.unwatch(t)
		at := slices.Index(p.parked, t)
		p.parked = slices.Delete(p.parked, at, at+1)
		if !t.ready() {
			panic("sim: a wait is not over when its channel is closed")
		}
		return t
	}
	return nil
}

// watch notes what a task that is parked from now on is woken by.
func (p *process) watch(t *task) {
	t.watches = 0
	for _, c := range t.channels {
		p.watchOne(t, c)
	}
	p.watchOne(t, t.ctx.Done())
}

func (p *process) watchOne(t *task, c <-chan struct{}) {
	if c == nil {
		return
	}
	t.watched[t.watches] = c
	t.watches++
	if cap(c) == ownCapacity {
		p.own = append(p.own, owned{c, t})
		return
	}
	for i := range p.looked {
		if p.looked[i].c == c {
			p.looked[i].tasks++
			return
		}
	}
	p.looked = append(p.looked, looked{c, 1})
}

// unwatch forgets what watch has noted.
func (p *process) unwatch(t *task) {
	for _, c := range t.watched[:t.watches] {
		if cap(c) == ownCapacity {
			for i := range p.own {
				if p.own[i].t == t && p.own[i].c == c {
					n := len(p.own) - 1
					p.own[i], p.own[n] = p.own[n], owned{}
					p.own = p.own[:n]
					break
				}
			}
			continue
		}
		for i := range p.looked {
			if p.looked[i].c != c {
				continue
			}
			if p.looked[i].tasks--; p.looked[i].tasks == 0 {
				n := len(p.looked) - 1
				p.looked[i], p.looked[n] = p.looked[n], looked{}
				p.looked = p.looked[:n]
			}
			break
		}
	}
}

// mayBeReady reports whether something waits in a channel, or it is closed. It takes nothing out.
func mayBeReady(c <-chan struct{}) bool {
	if cap(c) > 0 && len(c) > 0 {
		return true
	}
	// An empty one is closed, or not ready: nobody sends on those that hold nothing.
	select {
	case <-c:
		return true
	default:
		return false
	}
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
	p.k.push(event{at: p.k.now + d, run: f, p: p, life: p.life})
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

// onEnd calls f with the error of ctx once that has ended, unless the ender is told to forget first. It returns nil for a
// context that never ends.
func (p *process) onEnd(ctx context.Context, f func(err error)) *ender {
	done := ctx.Done()
	if done == nil {
		return nil
	}
	e := &ender{ctx: ctx, done: done, f: f}
	if c, ok := ctx.Value(deadlineKey{}).(*deadlineContext); ok && c.done == done {
		if len(c.enders) == cap(c.enders) {
			c.enders = slices.DeleteFunc(c.enders, func(e *ender) bool { return e.gone })
		}
		c.enders = append(c.enders, e)
		return e
	}
	p.ends = append(p.ends, e)
	return e
}

func (e *ender) forget() {
	if e != nil {
		e.gone, e.f = true, nil
	}
}

// task is straight-line code of a process with waits in it, as a coroutine: it runs until it waits, and goes on when what
// it waits for comes. Nothing else runs meanwhile.
type task struct {
	p     *process
	w     *worker
	f     func(t *task)
	at    int // in p.tasks
	ended bool
	dead  bool   // it is being unwound
	goOn  func() // step
	after func() // if set, it is called each time when it has run until a wait

	// What Wait waits for, and what came of it.
	ctx      context.Context //nolint:containedctx // of the wait
	channels sched.Channels
	index    int
	err      error
	// watched are what it is woken by, while it is parked: those of channels, and that of ctx.
	watched [len(sched.Channels{}) + 1]<-chan struct{}
	watches int
}

// worker is a coroutine that runs one task after the other.
type worker struct {
	t     task // the one of now
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
	k := p.k
	var w *worker
	if n := len(k.workers); n > 0 {
		w, k.workers = k.workers[n-1], k.workers[:n-1]
	} else {
		w = k.newWorker()
		w.t.goOn = w.t.step
	}
	t := &w.t
	*t = task{p: p, w: w, f: f, at: len(p.tasks), goOn: t.goOn}
	p.tasks = append(p.tasks, t)
	t.step()
}

func (t *task) step() {
	k := t.p.k
	outer := k.running
	k.running = t
	begin, _ := t.w.next()
	k.running = outer
	if t.after != nil {
		t.after()
	}
	if t.ended {
		k.workers = append(k.workers, t.w)
		if all := t.p.tasks; t.at < len(all) && all[t.at] == t {
			n := len(all) - 1
			last := all[n]
			all[t.at], last.at, all[n] = last, t.at, nil
			t.p.tasks = all[:n]
		}
		t.f = nil
		return
	}
	if begin == nil {
		t.p.watch(t)
		t.p.parked = append(t.p.parked, t)
		return
	}
	life, woken := t.p.life, false
	begin(func() {
		if woken {
			panic("sim: a task is woken twice")
		}
		woken = true
		t.p.deliver(life, t.goOn)
	})
}

// kill unwinds the task: its deferred calls run, and what they do is of no consequence.
func (t *task) kill() {
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

// mayGoOn reports whether ready would say so. It takes nothing out of a channel.
func (t *task) mayGoOn() bool { return slices.ContainsFunc(t.watched[:t.watches], mayBeReady) }

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
