package budget_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/penstock-mq/penstock/pkg/budget"
)

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := budget.New(10)
		if err := b.Acquire(t.Context(), 8); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var served []int64
		for _, n := range []int64{9, 1} { // 1 would fit at once, but 9 came first
			go func() {
				if err := b.Acquire(t.Context(), n); err != nil {
					t.Error(err)
				}
				mu.Lock()
				served = append(served, n)
				mu.Unlock()
			}()
			synctest.Wait()
		}
		if b.TryAcquire(1) {
			t.Fatal("TryAcquire overtook a waiter")
		}
		if len(served) != 0 {
			t.Fatalf("served %v while 8 of 10 are held", served)
		}
		b.Release(8)
		synctest.Wait()
		if len(served) != 2 || b.Used() != 10 {
			t.Fatalf("served %v with %d used, want both and 10", served, b.Used())
		}
	})
}

func TestGivingUpTakesNothingAndLetsOthersPass(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := budget.New(10)
		if err := b.Acquire(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var large, small error
		go func() { large = b.Acquire(ctx, 9) }()
		synctest.Wait()
		go func() { small = b.Acquire(t.Context(), 3) }()
		synctest.Wait()
		cancel()
		synctest.Wait()
		if !errors.Is(large, context.Canceled) || small != nil || b.Used() != 8 {
			t.Fatalf("large %v, small %v, used %d; want canceled, granted, 8", large, small, b.Used())
		}
	})
}

func TestOneRequestAboveCapacityPassesAlone(t *testing.T) {
	t.Parallel()
	b := budget.New(10)
	if !b.TryAcquire(25) {
		t.Fatal("a lone request above capacity was refused")
	}
	if b.TryAcquire(1) {
		t.Fatal("granted beyond capacity")
	}
	b.Release(25)
	if b.Used() != 0 {
		t.Fatalf("%d used after release", b.Used())
	}
}

func TestReleasingTooMuchPanics(t *testing.T) {
	t.Parallel()
	defer func() {
		if recover() == nil {
			t.Fatal("no panic")
		}
	}()
	budget.New(10).Release(1)
}

// What turned out to be held already is counted, and paid back before anybody else gets something.
func TestExceedIsPaidBackFirst(t *testing.T) {
	t.Parallel()
	b := budget.New(10)
	if !b.TryAcquire(6) {
		t.Fatal("not granted")
	}
	b.Exceed(20)
	if b.Used() != 26 || b.TryAcquire(1) {
		t.Fatalf("%d bytes used, and more was granted", b.Used())
	}
	granted := make(chan error, 1)
	go func() { granted <- b.Acquire(t.Context(), 5) }()
	b.Release(20)
	select {
	case err := <-granted:
		t.Fatalf("granted above the capacity, %v", err)
	default:
	}
	b.Release(1)
	if err := <-granted; err != nil || b.Used() != 10 {
		t.Fatalf("%v, %d bytes used", err, b.Used())
	}
}
