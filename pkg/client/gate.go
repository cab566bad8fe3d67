package client

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/status"
)

// openingsAtOnce is how many streams are being opened on a connection at once, twice what a broker opens of topics.
const openingsAtOnce = 64

// openingHold is how long an opening counts among them, so that what is slow for reasons of its own holds nobody up.
const openingHold = 100 * time.Millisecond

// gate lets streams be opened on a connection in order. When a broker dies, thousands of them come to its heir at once; opened
// all at once, the one whose messages wait is served when the last of them is. So those producers come first whose messages
// wait, the oldest message first; then producers that have nothing to send; then consumers.
type gate struct {
	mu      sync.Mutex
	open    int // streams that are being opened
	count   uint64
	waiting entrants
}

// entrant is a stream that waits at a gate, or has passed it.
type entrant struct {
	producer bool
	since    time.Time // of the oldest message that waits; zero: none does
	number   uint64    // in order of arrival
	at       int       // in the heap; -1: it does not wait
	turn     chan struct{}
}

// before tells which of two is let through first.
func (e *entrant) before(o *entrant) bool {
	switch {
	case e.producer != o.producer:
		return e.producer
	case e.since.IsZero() != o.since.IsZero():
		return o.since.IsZero()
	case !e.since.Equal(o.since):
		return e.since.Before(o.since)
	}
	return e.number < o.number
}

// pass waits until a stream may be opened. The returned function must be called when it is, or failed to. One that takes
// longer than openingHold does not count: it keeps no other from being opened. waits, of a producer, tells since when
// its oldest message waits; it is asked again whenever wake has a token. The error is that of ctx, as a stream would return it.
func (g *gate) pass(ctx context.Context, waits func() time.Time, wake <-chan struct{}) (leave func(), err error) {
	e := &entrant{producer: waits != nil, turn: make(chan struct{})}
	if waits != nil {
		e.since = waits()
	}
	g.enter(e)
	for {
		select {
		case <-e.turn:
			leave := sync.OnceFunc(func() { g.leave(e) })
			late := time.AfterFunc(openingHold, leave)
			return func() { late.Stop(); leave() }, nil
		case <-wake:
			g.change(e, waits())
		case <-ctx.Done():
			g.leave(e)
			return nil, status.FromContextError(ctx.Err()).Err() //nolint:wrapcheck // as gRPC's own
		}
	}
}

func (g *gate) enter(e *entrant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.count++
	e.number = g.count
	heap.Push(&g.waiting, e)
	g.next()
}

// change puts an entrant in its place again.
func (g *gate) change(e *entrant, since time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if e.at >= 0 {
		e.since = since
		heap.Fix(&g.waiting, e.at)
	}
}

// leave takes an entrant out, wherever it is; the next one passes if it had.
func (g *gate) leave(e *entrant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if e.at >= 0 {
		heap.Remove(&g.waiting, e.at)
		return
	}
	g.open--
	g.next()
}

// next lets through whose turn it is. The lock is held.
func (g *gate) next() {
	for g.open < openingsAtOnce && len(g.waiting) > 0 {
		e, _ := heap.Pop(&g.waiting).(*entrant)
		g.open++
		close(e.turn)
	}
}

// entrants is a heap of those that wait.
type entrants []*entrant

func (h entrants) Len() int           { return len(h) }
func (h entrants) Less(i, j int) bool { return h[i].before(h[j]) }
func (h entrants) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push adds an entrant.
func (h *entrants) Push(x any) {
	e, _ := x.(*entrant)
	e.at = len(*h)
	*h = append(*h, e)
}

// Pop takes the last one off.
func (h *entrants) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	e.at = -1
	return e
}
