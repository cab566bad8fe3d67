package bookieclient

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
)

// request is a read, a fence, or a LAC written or waited for.
type request struct {
	recovery bool // it goes with those of recoveries

	extra  time.Duration // what it may take beyond the timeout
	encode func(*bookiewire.Encoder, uint64)
	decode func(bookiewire.Frame) (any, error)
	finish func(any, error)

	id       uint64 // 0: not sent
	deadline time.Time
	ended    bool
	stop     func() bool
}

// requests are those on their way to one bookie, answered in any order.
type requests struct {
	max     int
	timeout time.Duration
	late    *refusals
	wake    chan struct{}
	link    fmt.Stringer // what the link is doing

	mu     sync.Mutex
	next   uint64
	queued []*request
	flight map[uint64]*request
	live   int
	over   *bookiewire.Error // once the link has ended
}

func newRequests(c *Client) *requests {
	return &requests{
		max: c.cfg.MaxRequests, timeout: c.cfg.RequestTimeout, late: &c.refusals,
		wake: make(chan struct{}, 1), flight: make(map[uint64]*request),
	}
}

// submit queues a request, or returns why not; the error is untyped nil or a *bookiewire.Error.
func (x *requests) submit(ctx context.Context, r *request) error {
	if ctx.Err() != nil {
		return disconnected(context.Cause(ctx).Error())
	}
	x.mu.Lock()
	if x.over != nil {
		defer x.mu.Unlock()
		return x.over
	}
	if x.live >= x.max {
		x.mu.Unlock()
		return &bookiewire.Error{Code: bookiewire.Overloaded, Detail: fmt.Sprintf("%d requests to this bookie are not answered", x.max)}
	}
	x.live++
	x.queued = append(x.queued, r)
	if ctx.Done() != nil {
		r.stop = context.AfterFunc(ctx, func() {
			x.mu.Lock() // until it is passed on: a Close that comes meanwhile waits for its answer
			defer x.mu.Unlock()
			if x.claimLocked(r) {
				given := fmt.Sprintf("given up (%v) while %s; link: %s", context.Cause(ctx), r.progress(), x.link)
				x.late.add(func() { r.finish(nil, disconnected(given)) })
			}
		})
	}
	x.mu.Unlock()
	wake(x.wake)
	return nil
}

// progress is how far a request has come that has ended. Its id does not change any more.
func (r *request) progress() string {
	if r.id == 0 {
		return "not sent"
	}
	return "not answered"
}

// claim is the right to answer r, which is given once.
func (x *requests) claim(r *request) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.claimLocked(r)
}

func (x *requests) claimLocked(r *request) bool {
	if r.ended {
		return false
	}
	r.ended = true
	x.live--
	if r.id != 0 {
		delete(x.flight, r.id)
	}
	if r.stop != nil {
		r.stop()
	}
	return true
}

func (x *requests) empty() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.live == 0
}

func (x *requests) encode(e *bookiewire.Encoder, now time.Time) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	found := false
	for _, r := range x.queued {
		if r.ended {
			continue
		}
		x.next++
		r.id = x.next
		r.deadline = now.Add(x.timeout + r.extra)
		x.flight[r.id] = r
		r.encode(e, r.id)
		found = true
	}
	clear(x.queued)
	x.queued = x.queued[:0]
	return found
}

func (x *requests) handle(f bookiewire.Frame) error {
	x.mu.Lock()
	r := x.flight[f.Seq]
	x.mu.Unlock()
	if r == nil {
		return nil // given up before
	}
	var reply any
	var err error
	if f.Kind == bookiewire.KindFailed {
		var failure *bookiewire.Error
		if failure, err = f.Failed(); err != nil {
			return err
		}
		err = failure
	} else if reply, err = r.decode(f); err != nil {
		return err // breaks the connection, which answers r
	}
	if x.claim(r) {
		r.finish(reply, err)
	}
	return nil
}

func (x *requests) overdue(now time.Time) error {
	var late []*request
	x.mu.Lock()
	for _, r := range x.flight {
		if now.After(r.deadline) && x.claimLocked(r) {
			late = append(late, r)
		}
	}
	x.mu.Unlock()
	for _, r := range late {
		r.finish(nil, disconnected(fmt.Sprintf("not answered after %v", x.timeout+r.extra)))
	}
	return nil
}

func (x *requests) end(err *bookiewire.Error) {
	x.mu.Lock()
	x.over = err
	x.mu.Unlock()
	x.fail(err)
}

func (x *requests) fail(err *bookiewire.Error) {
	var all []*request
	x.mu.Lock()
	for _, r := range x.flight {
		all = append(all, r)
	}
	all = append(all, x.queued...)
	x.queued = nil
	n := 0
	for _, r := range all {
		if x.claimLocked(r) {
			all[n] = r
			n++
		}
	}
	x.mu.Unlock()
	for _, r := range all[:n] {
		r.finish(nil, err)
	}
}
