package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// started returns a process of a kernel of its own.
func started(seed uint64) (*kernel, *process) {
	k := newKernel(seed)
	p := &process{k: k, name: "p"}
	p.start()
	return k, p
}

func (k *kernel) runFor(d time.Duration) { k.run(k.now+d, func() bool { return false }) }

// The order of what a seed runs comes back with it; others have another one.
func TestSchedulerIsRepeatable(t *testing.T) {
	t.Parallel()
	order := func(seed uint64) []int {
		k, p := started(seed)
		var order []int
		g, open := sched.NewGroup(p.sched), make(chan struct{})
		for i := range 20 {
			g.Go(func() {
				_, _ = p.sched.Wait(t.Context(), sched.Channels{open, open})
				order = append(order, i)
			})
		}
		p.sched.AfterFunc(time.Second, func() { close(open) })
		k.runFor(time.Minute)
		if len(order) != 20 {
			t.Errorf("%d of 20 have run", len(order))
		}
		return order
	}
	if a, b, c := order(1), order(1), order(2); !slices.Equal(a, b) || slices.Equal(a, c) {
		t.Errorf("seed 1: %v, then %v; seed 2: %v", a, b, c)
	}
}

func TestSchedulerTimes(t *testing.T) {
	t.Parallel()
	k, p := started(1)
	s := p.sched
	var said []string
	note := func(what string, err error) {
		said = append(said, fmt.Sprintf("%s %v: %v", what, k.now.Round(time.Second), err))
	}
	s.Go(func() {
		ctx, cancel := s.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		child, cancelChild := context.WithCancel(ctx)
		defer cancelChild()
		note("sleeps", sched.Sleep(child, s, time.Second))
		inner, cancelInner := s.WithTimeout(child, time.Hour)
		defer cancelInner()
		note("sleeps", sched.Sleep(inner, s, time.Hour))
		note("child", child.Err())
		note("inner", inner.Err())
		late, cancelLate := s.WithTimeout(child, time.Hour)
		defer cancelLate()
		note("late", late.Err())
	})
	stop := s.AfterFunc(time.Second, func() { note("runs though it was stopped", nil) })
	if !stop() || stop() {
		t.Error("stopped twice")
	}
	k.runFor(time.Hour)
	want := []string{
		"sleeps 1s: <nil>", "sleeps 2s: context deadline exceeded", "child 2s: context deadline exceeded",
		"inner 2s: context deadline exceeded", "late 2s: context deadline exceeded",
	}
	if !slices.Equal(said, want) {
		t.Errorf("%q", said)
	}
}

// A canceled context ends waits, and timeouts that were made of it, as a canceled one.
func TestSchedulerCancels(t *testing.T) {
	t.Parallel()
	k, p := started(1)
	s := p.sched
	ctx, cancel := context.WithCancel(t.Context())
	var got []error
	for range 3 {
		s.Go(func() {
			ctx, cancel := s.WithTimeout(ctx, time.Minute)
			defer cancel()
			ctx, cancel = context.WithCancel(ctx)
			defer cancel()
			got = append(got, sched.Sleep(ctx, s, time.Hour))
		})
	}
	s.AfterFunc(time.Second, cancel)
	k.runFor(2 * time.Second)
	if len(got) != 3 || !errors.Is(got[0], context.Canceled) || !errors.Is(got[2], context.Canceled) {
		t.Errorf("%v", got)
	}
}

// What ends a wait is taken by it: a token wakes one.
func TestSchedulerTokens(t *testing.T) {
	t.Parallel()
	k, p := started(1)
	token := make(chan struct{}, 1)
	woken := 0
	for range 3 {
		p.sched.Go(func() {
			for {
				if i, err := p.sched.Wait(t.Context(), sched.Channels{1: token}); i != 1 || err != nil {
					t.Errorf("%d, %v", i, err)
				}
				woken++
			}
		})
	}
	for range 5 {
		p.sched.AfterFunc(time.Second, func() {
			select {
			case token <- struct{}{}:
			default:
			}
		})
		k.runFor(2 * time.Second)
	}
	if woken != 5 {
		t.Errorf("woken %d times", woken)
	}
	p.kill()
}

// Whoever waits for a timer, or for the end of a timeout, goes on then, at once or in a moment; a timer that is stopped wakes nobody.
func TestSchedulerTellsWhoWaits(t *testing.T) {
	t.Parallel()
	k, p := started(1)
	s := p.sched
	passed, _ := sched.After(s, time.Second)
	never, stop := sched.After(s, time.Second)
	if !stop() || stop() {
		t.Error("stopped twice")
	}
	outer, cancel := s.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	inner, cancelInner := s.WithTimeout(context.WithValue(outer, 1, 2), 2*time.Hour) //nolint:staticcheck // any key does
	defer cancelInner()
	woken := 0
	for range 3 {
		s.Go(func() {
			for _, c := range []<-chan struct{}{passed, passed} {
				if i, err := s.Wait(inner, sched.Channels{2: c}); i != 2 || err != nil {
					t.Errorf("%d, %v", i, err)
				}
				woken++
			}
			if _, err := s.Wait(inner, sched.Channels{never}); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			woken++
		})
	}
	k.runFor(2 * time.Second)
	if woken != 6 {
		t.Errorf("woken %d times of 6", woken)
	}
	s.Go(cancel)
	k.runFor(time.Second)
	if woken != 9 || inner.Err() == nil {
		t.Errorf("woken %d times of 9, %v", woken, inner.Err())
	}
	if len(p.parked)+len(p.looked)+len(p.own)+len(p.tasks) != 0 {
		t.Error("something is left")
	}
}

// A kill unwinds what waits, and nothing of that life happens any more. What is paused waits.
func TestSchedulerKill(t *testing.T) {
	t.Parallel()
	k, p := started(1)
	s := p.sched
	var said []string
	s.Go(func() {
		defer func() {
			said = append(said, "unwound")
			s.Go(func() { said = append(said, "goes on") })
			_ = sched.Sleep(t.Context(), s, time.Second)
			said = append(said, "waits on")
		}()
		_ = sched.Sleep(t.Context(), s, time.Hour)
		said = append(said, "woken")
	})
	s.AfterFunc(2*time.Second, func() { said = append(said, "timer") })
	k.runFor(time.Second)
	p.pause()
	k.runFor(2 * time.Second)
	if said != nil {
		t.Errorf("while it is paused: %q", said)
	}
	p.resume()
	k.runFor(0)
	k.runFor(time.Second)
	s.AfterFunc(2*time.Second, func() { said = append(said, "timer") })
	p.kill()
	p.start()
	k.runFor(time.Hour)
	if want := []string{"timer", "unwound"}; !slices.Equal(said, want) {
		t.Errorf("%q", said)
	}
}

func TestSchedulerWaitsInTasksAlone(t *testing.T) {
	t.Parallel()
	_, p := started(1)
	defer func() {
		if recover() == nil {
			t.Error("waited outside of tasks")
		}
	}()
	_, _ = p.sched.Wait(t.Context(), sched.Channels{})
}
