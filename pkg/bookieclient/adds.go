package bookieclient

import (
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
)

// adds are the entries on their way to one bookie. They are numbered in the order sent; an acknowledgement covers
// a range of numbers.
type adds struct {
	max     int64
	timeout time.Duration
	metrics *metrics
	wake    chan struct{}

	mu     sync.Mutex
	queued []pendingAdd
	// flight[head:] are sent and not answered, numbered first, first+1, …; an answered one has no done.
	flight []pendingAdd
	head   int
	first  uint64
	bytes  int64
	// taken and ended are spare slices.
	taken []pendingAdd

	over *bookiewire.Error // once the link has ended

	ended []endedAdd // of handle, which the reading goroutine alone calls
}

type pendingAdd struct {
	add  *bookiewire.Add
	done func(error)
	sent time.Time
}

type endedAdd struct {
	done func(error)
	err  error
}

func newAdds(c *Client) *adds {
	return &adds{max: c.cfg.MaxPending, timeout: c.cfg.RequestTimeout, metrics: c.metrics, wake: make(chan struct{}, 1), first: 1}
}

// overhead is what an add takes beside its body.
const overhead = 128

func cost(a *bookiewire.Add) int64 { return int64(len(a.Body)) + overhead }

// submit queues an add, or returns why not; the error is untyped nil or a *bookiewire.Error.
func (x *adds) submit(a *bookiewire.Add, done func(error)) error {
	n := cost(a)
	x.mu.Lock()
	if x.over != nil {
		defer x.mu.Unlock()
		return x.over
	}
	if x.bytes+n > x.max && x.bytes > 0 {
		x.mu.Unlock()
		return &bookiewire.Error{Code: bookiewire.Overloaded, Detail: fmt.Sprintf("%d bytes to this bookie are not acknowledged", x.max)}
	}
	x.bytes += n
	x.queued = append(x.queued, pendingAdd{add: a, done: done})
	x.mu.Unlock()
	x.metrics.pending.Add(float64(n))
	wake(x.wake)
	return nil
}

func (x *adds) empty() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.queued) == 0 && x.head == len(x.flight)
}

func (x *adds) encode(e *bookiewire.Encoder, now time.Time) bool {
	x.mu.Lock()
	if len(x.queued) == 0 {
		x.mu.Unlock()
		return false
	}
	n, size := 0, 0
	for n < len(x.queued) && size < batchBytes {
		size += len(x.queued[n].add.Body) + overhead
		n++
	}
	if x.head > len(x.flight)/2 {
		kept := copy(x.flight, x.flight[x.head:])
		clear(x.flight[kept:])
		x.flight, x.head = x.flight[:kept], 0
	}
	seq := x.first + uint64(len(x.flight)-x.head)
	x.taken = append(x.taken[:0], x.queued[:n]...)
	for i := range x.taken {
		x.taken[i].sent = now
	}
	x.flight = append(x.flight, x.taken...)
	rest := copy(x.queued, x.queued[n:])
	clear(x.queued[rest:])
	x.queued = x.queued[:rest]
	x.mu.Unlock()
	for i := range x.taken {
		e.Add(seq+uint64(i), x.taken[i].add)
	}
	clear(x.taken)
	return true
}

func (x *adds) handle(f bookiewire.Frame) error {
	var failure *bookiewire.Error
	first, last := f.Seq, f.Seq
	var err error
	if f.Kind == bookiewire.KindFailed {
		failure, err = f.Failed()
	} else {
		first, last, err = f.AddAck()
	}
	if err != nil {
		return err
	}
	if err := x.settle(first, last, failure); err != nil {
		return err
	}
	for i := range x.ended {
		x.ended[i].done(x.ended[i].err)
	}
	clear(x.ended)
	x.ended = x.ended[:0]
	return nil
}

// settle moves the adds numbered first to last to ended.
func (x *adds) settle(first, last uint64, failure *bookiewire.Error) error {
	var freed int64
	x.mu.Lock()
	next := x.first + uint64(len(x.flight)-x.head)
	if last >= next || first == 0 {
		x.mu.Unlock()
		return fmt.Errorf("%w: answer to adds %d to %d, sent are those before %d", bookiewire.ErrMalformed, first, last, next)
	}
	for seq := max(first, x.first); seq <= last; seq++ {
		p := &x.flight[x.head+int(seq-x.first)]
		if p.done == nil {
			continue // failed before, within the range of a later acknowledgement
		}
		ended := endedAdd{done: p.done}
		if failure != nil {
			ended.err = failure
		}
		x.ended = append(x.ended, ended)
		freed += cost(p.add)
		*p = pendingAdd{}
	}
	for x.head < len(x.flight) && x.flight[x.head].done == nil {
		x.head++
		x.first++
	}
	x.bytes -= freed
	x.mu.Unlock()
	x.metrics.pending.Sub(float64(freed))
	return nil
}

func (x *adds) overdue(now time.Time) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	// The first unanswered one is the oldest.
	if x.head < len(x.flight) && now.Sub(x.flight[x.head].sent) >= x.timeout {
		return fmt.Errorf("an add is not answered after %v", x.timeout)
	}
	return nil
}

func (x *adds) end(err *bookiewire.Error) {
	x.mu.Lock()
	x.over = err
	x.mu.Unlock()
	x.fail(err)
}

func (x *adds) fail(err *bookiewire.Error) {
	x.mu.Lock()
	all := append(x.flight[x.head:len(x.flight):len(x.flight)], x.queued...)
	freed := x.bytes
	x.flight, x.queued, x.head, x.first, x.bytes = nil, nil, 0, 1, 0
	x.mu.Unlock()
	x.metrics.pending.Sub(float64(freed))
	for _, p := range all {
		if p.done != nil {
			p.done(err)
		}
	}
}
