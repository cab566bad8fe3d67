// Package budget bounds the bytes that a process holds in buffers that grow with load.
//
// One [Budget] is made at the roof and handed down; whoever takes bytes in (a broker's publish stream, a
// bookie's connection, a cache) acquires before it holds, and releases when the buffer is gone:
//
//	if err := b.Acquire(ctx, int64(len(frame))); err != nil {
//		return err // the caller gave up waiting: back-pressure
//	}
//	defer b.Release(int64(len(frame)))
//
// Waiters are served first come, first served, so that a large request is not starved by small ones.
package budget

import (
	"container/list"
	"context"
	"fmt"
	"sync"
)

// Budget is a number of bytes to share. It is safe for concurrent use.
type Budget struct {
	capacity int64
	wait     func(ctx context.Context, ready <-chan struct{}) error

	mu      sync.Mutex
	used    int64
	waiters list.List // of *waiter, oldest first; nobody waits while the head fits
}

type waiter struct {
	n     int64
	ready chan struct{} // closed with the bytes already granted
}

// New makes a budget of capacity bytes. capacity must be positive.
func New(capacity int64) *Budget { return NewWaiting(capacity, wait) }

// NewWaiting is New with another way to wait, for those whose time is simulated: wait receives from ready, or returns
// the error of ctx.
func NewWaiting(capacity int64, wait func(ctx context.Context, ready <-chan struct{}) error) *Budget {
	if capacity <= 0 {
		panic(fmt.Sprintf("budget: capacity %d is not positive", capacity))
	}
	return &Budget{capacity: capacity, wait: wait}
}

func wait(ctx context.Context, ready <-chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // as a context says it
	}
}

// Acquire takes n bytes, waiting for its turn until ctx ends; then it returns the context's error and has
// taken nothing. A request above the whole capacity is granted when nothing else is held, so that one large
// message can always pass.
func (b *Budget) Acquire(ctx context.Context, n int64) error {
	b.mu.Lock()
	if b.waiters.Len() == 0 && b.fits(n) {
		b.used += n
		b.mu.Unlock()
		return nil
	}
	w := &waiter{n: n, ready: make(chan struct{})}
	place := b.waiters.PushBack(w)
	b.mu.Unlock()

	err := b.wait(ctx, w.ready)
	if err == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-w.ready: // granted in the meantime: give it back
		b.used -= n
	default:
		b.waiters.Remove(place)
	}
	b.grant() // the head may have been the one that did not fit
	return err
}

// TryAcquire takes n bytes if that needs no waiting, and reports whether it did.
func (b *Budget) TryAcquire(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiters.Len() > 0 || !b.fits(n) {
		return false
	}
	b.used += n
	return true
}

// Exceed takes n bytes at once, beyond the capacity if need be, and before all who wait: for bytes that turned out to be
// held already. Others wait until the budget is within its capacity again.
func (b *Budget) Exceed(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used += n
}

// Release gives n bytes back. Giving back more than is held is a broken assumption and panics.
func (b *Budget) Release(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.used < 0 {
		panic(fmt.Sprintf("budget: %d bytes given back that nobody holds", -b.used))
	}
	b.grant()
}

// Used returns the bytes held now.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// Capacity returns the size of the budget in bytes.
func (b *Budget) Capacity() int64 { return b.capacity }

func (b *Budget) fits(n int64) bool { return b.used == 0 || b.used+n <= b.capacity }

func (b *Budget) grant() {
	for head := b.waiters.Front(); head != nil; head = b.waiters.Front() {
		w, ok := head.Value.(*waiter)
		if !ok {
			panic("budget: foreign value in the waiters' list")
		}
		if !b.fits(w.n) {
			return
		}
		b.waiters.Remove(head)
		b.used += w.n
		close(w.ready)
	}
}
