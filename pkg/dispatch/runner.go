package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Source reads a topic's entries. It is called by one goroutine at a time.
type Source interface {
	// Read returns entries in order: from the one that holds from on, or the first after it if that is no longer
	// stored, up to but not including the first that starts at or after until. It returns at least one, if
	// there is one, then no more than maxBytes of frames. next is where reading goes on: past the last entry
	// returned, or past what is no longer stored. Frames are shared and must not be changed.
	Read(ctx context.Context, from, until entry.Offset, maxBytes int) (entries []Entry, next entry.Offset, err error)
}

// Acks tells what is acknowledged. It is called by one goroutine at a time, and never under the runner's lock.
type Acks interface {
	// NextUnacked returns the lowest unacknowledged offset ≥ o.
	NextUnacked(o entry.Offset) entry.Offset
	// Missing appends what of r is not acknowledged, in order.
	Missing(dst []cursor.Range, r cursor.Range) []cursor.Range
}

// Sink is one consumer's way out. It is called by one goroutine at a time, never under the runner's lock, and
// possibly once more after RemoveConsumer has returned; it must not block.
type Sink interface {
	// Send queues entries for the consumer. Permits bound what is queued. The slice is the runner's again
	// when Send returns; frames and skips stay as they are.
	Send(deliveries []Delivery)
	// Active tells a Failover consumer whether entries come to it.
	Active(active bool)
}

// Env is what a runner works with.
type Env struct {
	Source Source
	Acks   Acks // nil for a reader
	// OnRetries, if set, hears what is to be delivered again, to remember it under the generation in which it was
	// delivered. The slice is the runner's.
	OnRetries func(cursor.Generation, []Retry)
	// Budget, if set, bounds the frames that all runners of the process have read and not sent.
	Budget  *budget.Budget
	Metrics *Metrics // nil: none
	Log     *slog.Logger
	Sched   sched.Scheduler // nil: sched.Real
}

// Refusals of a runner.
var (
	// ErrClosed refuses consumers of a closed runner.
	ErrClosed = errors.New("subscription is closed")
)

// Runner drives the core of one subscription. All methods but Close return at once and may be called from
// anywhere, also from a Sink.
//
// One mutex guards the core. Events enter under it directly, so that a refusal or a status never waits for
// storage; reads and sends are done by the runner's goroutine without it. Feeding events through a channel
// to the goroutine instead would make both wait for a read in flight.
//
// The goroutine lives as long as there is something to do, and an event begins it anew. One that waited would keep its stack
// for each subscription whose consumers wait, which most do most of the time.
type Runner struct {
	env    Env
	ctx    context.Context // ends with the runner
	cancel context.CancelFunc
	group  *sched.Group

	mu         sync.Mutex
	core       Core
	sinks      map[ConsumerID]Sink
	lastID     ConsumerID
	running    bool
	alarm      alarm
	closed     bool
	held       int64 // of the budget
	forBudget  bool  // waiting for it
	read       uint64
	cancelRead context.CancelFunc
}

// New makes a runner for a core that it owns from now on.
func New(core Core, env Env) *Runner {
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	if env.Metrics == nil {
		env.Metrics = NewMetrics(nil)
	}
	env.Sched = sched.OrReal(env.Sched)
	r := &Runner{env: env, core: core, sinks: map[ConsumerID]Sink{}, group: sched.NewGroup(env.Sched)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// event changes the core under the lock and lets the goroutine have a look.
func (r *Runner) event(f func(now time.Time)) {
	r.mu.Lock()
	f(r.env.Sched.Now())
	r.changed()
	r.mu.Unlock()
}

// changed starts the goroutine unless it runs, and stops a read whose answer nobody wants. Under the lock.
func (r *Runner) changed() {
	if r.cancelRead != nil && r.core.InFlight() != r.read {
		r.cancelRead()
	}
	if !r.closed && !r.running {
		r.running = true
		r.group.Go(r.run)
	}
}

// Loaded says where to start: the cursor's generation and floor, the topic's end, and what is remembered of redeliveries.
func (r *Runner) Loaded(g cursor.Generation, from, end entry.Offset, retries []Retry) {
	r.event(func(now time.Time) {
		r.core.Loaded(g, from, end, retries, now)
	})
}

// AddConsumer lets a consumer in; c.ID is ignored. Errors are [*BusyError] and [ErrClosed].
func (r *Runner) AddConsumer(c Consumer, sink Sink) (ConsumerID, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, fmt.Errorf("add consumer %q: %w", c.Name, ErrClosed)
	}
	c.ID = r.lastID + 1
	if err := r.core.ConsumerAdded(c, r.env.Sched.Now()); err != nil {
		return 0, fmt.Errorf("add consumer %q: %w", c.Name, err)
	}
	r.lastID = c.ID
	r.sinks[c.ID] = sink
	r.changed()
	return c.ID, nil
}

// RemoveConsumer takes a consumer out; what it did not acknowledge is delivered again.
func (r *Runner) RemoveConsumer(id ConsumerID) {
	r.event(func(now time.Time) {
		delete(r.sinks, id)
		r.core.ConsumerRemoved(id, now)
	})
}

// Permits allows n more messages to a consumer.
func (r *Runner) Permits(id ConsumerID, n uint32) {
	r.event(func(time.Time) { r.core.Permits(id, n) })
}

// Withdraw takes back what a consumer has not used of its permits, and returns how many those are.
func (r *Runner) Withdraw(id ConsumerID) (n uint64) {
	r.event(func(time.Time) { n = r.core.Withdraw(id) })
	return n
}

// Acked says that ranges were acknowledged in the cursor's generation g; id is by whom, 0 if by none of the consumers.
func (r *Runner) Acked(g cursor.Generation, id ConsumerID, ranges ...cursor.Range) {
	r.event(func(time.Time) { r.core.Acked(g, id, ranges...) })
}

// Nacked gives back what of ranges the consumer holds, to be delivered again after delay.
func (r *Runner) Nacked(id ConsumerID, delay time.Duration, ranges ...cursor.Range) {
	r.event(func(now time.Time) { r.core.Nacked(id, now.Add(delay), now, ranges...) })
}

// Seek says that the cursor was moved, which began generation g.
func (r *Runner) Seek(g cursor.Generation, to entry.Offset) {
	r.event(func(time.Time) { r.core.SeekDone(g, to) })
}

// Notify says that the topic goes on until end.
func (r *Runner) Notify(end entry.Offset) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.DataAvailable(end)
	if len(r.sinks) > 0 {
		r.changed()
	}
}

// Why tells what the subscription waits for and how it stands.
func (r *Runner) Why() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.core.Status(r.env.Sched.Now())
	if r.forBudget && s.Reason == ReasonReading {
		s.Reason = ReasonReadMemory
		s.Detail = fmt.Sprintf("%d of the %d bytes for reads of this process are in use", r.env.Budget.Used(), r.env.Budget.Capacity())
	}
	return s
}

// Close stops the runner and waits for its goroutine, which tells of what was given back before. It must not be called
// from a Sink.
func (r *Runner) Close() {
	r.mu.Lock()
	r.closed = true
	r.alarm.clear()
	r.cancel()
	r.mu.Unlock()
	r.group.Wait()
}

// run is the goroutine. It ends when there is nothing to do, or with the runner.
func (r *Runner) run() {
	var missing []cursor.Range
	for {
		r.mu.Lock()
		a := r.core.Next(r.env.Sched.Now())
		if r.closed && a.Kind != ActionRetries || a.Kind == ActionWait {
			r.rest(a.Until)
			r.mu.Unlock()
			return
		}
		r.release(r.core.Buffered())
		sink := r.sinks[a.Consumer]
		ctx := r.ctx
		if a.Kind == ActionRead {
			ctx, r.cancelRead = context.WithCancel(r.ctx)
			r.read = a.Read.ID
		}
		r.mu.Unlock()

		switch a.Kind {
		case ActionWait: // is seen above
		case ActionRead:
			missing = r.fetch(ctx, a.Read, missing[:0])
		case ActionSend:
			if sink != nil {
				sink.Send(a.Deliveries)
				r.env.Metrics.sent(a.Deliveries)
			}
		case ActionActivate, ActionDeactivate:
			if sink != nil {
				sink.Active(a.Kind == ActionActivate)
			}
		case ActionRetries:
			if r.env.OnRetries != nil {
				r.env.OnRetries(a.Generation, a.Retries)
			}
		}
	}
}

// rest says that the goroutine ends until something happens, or the time is there that is waited for; zero is none. Under
// the lock.
func (r *Runner) rest(until time.Time) {
	r.running = false
	if r.closed || len(r.sinks) == 0 {
		r.alarm.clear()
		r.release(0)
		return
	}
	r.release(r.core.Buffered())
	r.alarm.set(r.env.Sched, until, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.alarm.at.Equal(until) {
			r.alarm.clear()
		}
		r.changed()
	})
}

// alarm is a timer that stays as it is while what is waited for stays the same.
type alarm struct {
	at   time.Time
	stop func() bool
}

// set has it ring at a time, and at no other; the zero time is never.
func (a *alarm) set(s sched.Scheduler, at time.Time, ring func()) {
	if at.Equal(a.at) {
		return
	}
	a.clear()
	if !at.IsZero() {
		a.at, a.stop = at, s.AfterFunc(at.Sub(s.Now()), ring)
	}
}

// clear makes it silent. It may ring once more all the same.
func (a *alarm) clear() {
	if a.stop != nil {
		a.stop()
	}
	a.at, a.stop = time.Time{}, nil
}

// release gives back to the budget what is held of it beyond the bytes that are still needed. Under the lock.
func (r *Runner) release(needed int) {
	if extra := r.held - int64(needed); r.env.Budget != nil && extra > 0 {
		r.env.Budget.Release(extra)
		r.held -= extra
	}
}

// fetch does one read and feeds the core with its result. It returns scratch, grown.
func (r *Runner) fetch(ctx context.Context, req ReadRequest, scratch []cursor.Range) []cursor.Range {
	result, scratch, err := r.readEntries(ctx, req, scratch)
	r.mu.Lock()
	defer r.mu.Unlock()
	stale := r.core.InFlight() != req.ID
	r.cancelRead()
	r.cancelRead = nil
	r.forBudget = false
	switch {
	case err == nil:
		r.core.EntriesRead(result, r.env.Sched.Now())
	case !stale && r.ctx.Err() == nil:
		r.env.Metrics.readErrors.Inc()
		r.core.ReadFailed(req.ID, err, r.env.Sched.Now())
		r.env.Log.Warn("read for delivery failed", "from", uint64(req.From), "error", err)
	}
	return scratch
}

func (r *Runner) readEntries(ctx context.Context, req ReadRequest, scratch []cursor.Range) (ReadResult, []cursor.Range, error) {
	result := ReadResult{ID: req.ID}
	if r.env.Acks != nil {
		if from := r.env.Acks.NextUnacked(req.From); from > req.From {
			result.Next = from
			return result, scratch, nil // what lies between is acknowledged
		}
	}
	if r.env.Budget != nil {
		want := min(int64(req.MaxBytes), r.env.Budget.Capacity())
		r.mu.Lock()
		r.forBudget = true
		r.mu.Unlock()
		if err := r.env.Budget.Acquire(ctx, want); err != nil {
			return result, scratch, fmt.Errorf("wait for read memory: %w", err)
		}
		r.mu.Lock()
		r.forBudget = false
		r.held += want
		r.mu.Unlock()
	}
	entries, next, err := r.env.Source.Read(ctx, req.From, req.Until, req.MaxBytes)
	if err != nil {
		return result, scratch, fmt.Errorf("read entries: %w", err)
	}
	r.env.Metrics.reads.Inc()
	if r.env.Budget != nil {
		size := 0
		for i := range entries {
			size += len(entries[i].Frame)
		}
		r.mu.Lock()
		if extra := int64(size) - r.held; extra > 0 { // a single one may be larger than what was asked for
			r.env.Budget.Exceed(extra)
			r.held += extra
		}
		r.mu.Unlock()
	}
	result.Next = next
	result.Entries = make([]ReadEntry, 0, len(entries))
	for i := range entries {
		e := ReadEntry{Entry: entries[i]}
		if r.env.Acks != nil {
			scratch = r.env.Acks.Missing(scratch[:0], e.Range())
			switch {
			case len(scratch) == 0:
				continue
			case scratch[0] != e.Range():
				e.Missing = append([]cursor.Range(nil), scratch...)
			}
		}
		result.Entries = append(result.Entries, e)
	}
	return result, scratch, nil
}
