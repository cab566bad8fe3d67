package sched_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/sched"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWait(t *testing.T) {
	t.Parallel()
	s := sched.OrReal(nil)
	ready := make(chan struct{})
	close(ready)
	const n = len(sched.Channels{})
	for i := range n {
		var c sched.Channels
		c[i] = ready
		if got, err := s.Wait(t.Context(), c); got != i || err != nil {
			t.Fatalf("channel %d: %d, %v", i, got, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := s.Wait(ctx, sched.Channels{}); got != -1 || !errors.Is(err, context.Canceled) {
		t.Fatalf("ended context: %d, %v", got, err)
	}
}

// Waiting allocates nothing of its own: the data path waits.
func TestWaitAllocatesNothing(t *testing.T) { //nolint:paralleltest // it counts allocations
	ready := make(chan struct{})
	close(ready)
	ctx := t.Context()
	if allocs := testing.AllocsPerRun(100, func() { _, _ = sched.Real.Wait(ctx, sched.Channels{ready}) }); allocs != 0 {
		t.Fatalf("%v allocations a wait", allocs)
	}
}

// What the clock shows goes on as its differences do: a machine whose clock is set, or swings, makes nothing older.
func TestTheClockShowsWhatHasPassed(t *testing.T) {
	t.Parallel()
	began := sched.Real.Now()
	if off := time.Since(began.Round(0)); off < -time.Hour || off > time.Hour {
		t.Fatalf("the clock is off by %v", off)
	}
	for range 1000 {
		now := sched.Real.Now()
		if passed, shown := now.Sub(began), time.Duration(now.UnixNano()-began.UnixNano()); passed != shown {
			t.Fatalf("%v have passed, the clock shows %v", passed, shown)
		}
	}
}

func TestSleep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := sched.Real.Now()
		if err := sched.Sleep(t.Context(), sched.Real, time.Hour); err != nil || sched.Real.Now().Sub(began) != time.Hour {
			t.Fatalf("slept %v: %v", sched.Real.Now().Sub(began), err)
		}
		ctx, cancel := sched.Real.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := sched.Sleep(ctx, sched.Real, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("slept on: %v", err)
		}
	})
}

// timers is a scheduler with timers of its own.
type timers struct {
	sched.Scheduler
	asked time.Duration
}

func (s *timers) Timer(d time.Duration) (_ <-chan struct{}, stop func() bool) {
	s.asked = d
	passed := make(chan struct{})
	close(passed)
	return passed, func() bool { return false }
}

func TestSleepGoesByTheTimersOfAScheduler(t *testing.T) {
	t.Parallel()
	s := &timers{Scheduler: sched.Real}
	if err := sched.Sleep(t.Context(), s, time.Hour); err != nil || s.asked != time.Hour {
		t.Fatalf("%v, asked for %v", err, s.asked)
	}
}

func TestGroupWaitsForItsMembers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := sched.NewGroup(sched.Real)
		g.Wait()
		var ended atomic.Int32
		for i := range 3 {
			g.Go(func() {
				_ = sched.Sleep(t.Context(), sched.Real, time.Duration(i)*time.Second)
				if i == 1 {
					g.Go(func() { ended.Add(1) })
				}
				ended.Add(1)
			})
		}
		g.Wait()
		if n := ended.Load(); n != 4 {
			t.Fatalf("%d of 4 have ended", n)
		}
		g.Wait()
	})
}

func TestTurnHasOneHolder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var turn sched.Turn
		g := sched.NewGroup(sched.Real)
		var inside, took atomic.Int32
		for range 10 {
			g.Go(func() {
				if err := turn.Take(t.Context(), sched.Real); err != nil {
					t.Error(err)
					return
				}
				defer turn.Give()
				if inside.Add(1) != 1 {
					t.Error("two have the turn")
				}
				_ = sched.Sleep(t.Context(), sched.Real, time.Second)
				inside.Add(-1)
				took.Add(1)
			})
		}
		g.Wait()
		if took.Load() != 10 {
			t.Fatalf("%d of 10 had the turn", took.Load())
		}
		if err := turn.Take(t.Context(), sched.Real); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := sched.Real.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := turn.Take(ctx, sched.Real); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("took a turn that another has: %v", err)
		}
		turn.Give()
	})
}

func TestDoubled(t *testing.T) {
	t.Parallel()
	for n, want := range []time.Duration{50, 100, 200, 250, 250} {
		if got := sched.Doubled(50, n, 250); got != want {
			t.Errorf("after %d: %d, want %d", n, got, want)
		}
	}
	if got := sched.Doubled(time.Second, 1_000_000, time.Minute); got != time.Minute {
		t.Errorf("after a million: %v", got)
	}
}
