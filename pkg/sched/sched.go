package sched

import (
	"context"
	"math/rand/v2"
	"time"
)

// Channels are what a wait ends with; nil ones never do. An array, since a slice would be allocated at each wait.
type Channels [4]<-chan struct{}

// Scheduler starts goroutines and lets them wait. It is safe for concurrent use.
type Scheduler interface {
	// Now is the clock. It begins with what the machine's clock shows when the process starts, and is monotonic from
	// then on: what a machine's clock does while the process runs changes no age and no timestamp.
	Now() time.Time
	// Uint64 is a random number, for spreading load; it guards nothing.
	Uint64() uint64
	// Go runs f beside the caller. Whoever must know when it has ended uses a [Group].
	Go(f func())
	// AfterFunc runs f beside everything else after d, unless stop is called first, which reports whether it kept f
	// from running.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
	// Wait receives from one of the channels and returns its index, or the error of ctx and -1. If several are ready,
	// which one it is, is open.
	Wait(ctx context.Context, channels Channels) (int, error)
	// WithTimeout is context.WithTimeout by this clock.
	WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc)
}

// Timers is what a [Scheduler] may be as well, if it has something better for [After] than a function beside everything else.
type Timers interface {
	// Timer is [After].
	Timer(d time.Duration) (_ <-chan struct{}, stop func() bool)
}

// Real is the product's scheduler: goroutines, the clock, select.
var Real Scheduler = realTime{}

// OrReal returns s, or Real if it is nil.
func OrReal(s Scheduler) Scheduler {
	if s == nil {
		return Real
	}
	return s
}

type realTime struct{}

// born is when the process began.
var born = time.Now()

func (realTime) Now() time.Time { return born.Add(time.Since(born)) }

func (realTime) Uint64() uint64 { return rand.Uint64() } //nolint:gosec // guards nothing

func (realTime) Go(f func()) { go f() }

func (realTime) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	return time.AfterFunc(d, f).Stop
}

func (realTime) Wait(ctx context.Context, c Channels) (int, error) {
	select {
	case <-c[0]:
		return 0, nil
	case <-c[1]:
		return 1, nil
	case <-c[2]:
		return 2, nil
	case <-c[3]:
		return 3, nil
	case <-ctx.Done():
		return -1, ctx.Err() //nolint:wrapcheck // as a context says it
	}
}

func (realTime) WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, d)
}

// N is a random number of 0 … n-1.
func N[T ~int | ~int64](s Scheduler, n T) T { return T(s.Uint64() % uint64(n)) }

// Doubled is the pause after n failures in a row beyond the first: first, doubled n times, at the most most.
func Doubled(first time.Duration, n int, most time.Duration) time.Duration {
	return min(first<<min(n, 20), most)
}

// After returns a channel that is closed after d, unless stop is called first.
func After(s Scheduler, d time.Duration) (_ <-chan struct{}, stop func() bool) {
	if t, ok := s.(Timers); ok {
		return t.Timer(d)
	}
	passed := make(chan struct{})
	return passed, s.AfterFunc(d, func() { close(passed) })
}

// Sleep waits for d, or returns the error of ctx.
func Sleep(ctx context.Context, s Scheduler, d time.Duration) error {
	passed, stop := After(s, d)
	defer stop()
	_, err := s.Wait(ctx, Channels{passed})
	return err //nolint:wrapcheck // as a context says it
}

// Until waits for c, which is closed for certain.
func Until(s Scheduler, c <-chan struct{}) {
	_, _ = s.Wait(context.Background(), Channels{c}) // never canceled
}
