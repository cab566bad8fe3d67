package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestACloseWithoutDeadlineGivesUpWhenNothingIsAnswered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var answers atomic.Int64
		ctx, cancel := patient(context.WithoutCancel(t.Context()), answers.Load)
		defer cancel()
		for range 5 {
			time.Sleep(closePatience - time.Second)
			answers.Add(1)
		}
		if ctx.Err() != nil {
			t.Fatal("gave up although answers came")
		}
		time.Sleep(2 * closePatience)
		if !errors.Is(causeOf(ctx), errNoProgress) {
			t.Fatalf("ended with %v", causeOf(ctx))
		}
		bounded, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		ctx, cancel = patient(bounded, answers.Load)
		time.Sleep(time.Hour - time.Second)
		if ctx.Err() != nil {
			t.Fatal("gave up before its context")
		}
		cancel()
	})
}

func TestDirectoryKeepsTheLiveAndTheBootstrap(t *testing.T) {
	t.Parallel()
	d := directory{bootstrap: []string{"penstock://boot:1"}}
	d.live([]string{"penstock://a:1", "penstock://b:1", "nonsense://x"})
	d.answered("penstock://b:1")
	want := []string{"penstock://b:1", "penstock://boot:1", "penstock://a:1"}
	if got := d.candidates(""); !slices.Equal(got, want) {
		t.Fatalf("candidates %q, want %q", got, want)
	}
	d.live([]string{"penstock://c:1"})
	d.live(nil)
	if got, want := d.candidates("penstock://c:1"), []string{"penstock://boot:1", "penstock://c:1"}; !slices.Equal(got, want) {
		t.Fatalf("candidates %q, want %q", got, want)
	}
	for i := range 1000 {
		d.learn(owner{url: fmt.Sprintf("penstock://x%d:1", i)})
		d.answered(fmt.Sprintf("penstock://y%d:1", i))
	}
	if n := len(d.candidates("")); n > maxBrokers+1 {
		t.Fatalf("%d brokers are remembered", n)
	}
}

func TestConnectionsThatNobodyUsesAreClosed(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	life, end := context.WithCancel(t.Context())
	p := newPool(life, defaultClientConfig(), &wg)
	defer func() { end(); p.close(); wg.Wait() }()
	var used *use
	for i := range 3 {
		c, err := p.get(fmt.Sprintf("penstock://127.0.0.1:%d", i+1))
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			used = c.hold("orders", func() {})
			defer c.release(used)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sweep(time.Now().Add(unusedAfter + time.Second))
	if _, ok := p.conns["127.0.0.1:1"]; !ok || len(p.conns) != 1 {
		t.Fatalf("connections left: %v", p.conns)
	}
}

// What one consumer of a Shared subscription has fetched, no other one gets; a consumer alone must follow a producer's batches.
func TestPrefetchByType(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		opts []SubscribeOption
		want int
	}{
		{nil, 10_000},
		{[]SubscribeOption{WithType(Failover)}, 10_000},
		{[]SubscribeOption{WithType(Shared)}, 1000},
		{[]SubscribeOption{WithType(Shared), WithPrefetch(7, 1<<20)}, 7},
	} {
		cfg := defaultConsumerConfig()
		for _, o := range c.opts {
			o(&cfg)
		}
		if got := cfg.prefetch(); got != c.want {
			t.Errorf("type %v fetches %d messages ahead, want %d", cfg.kind, got, c.want)
		}
	}
}

// Attempts after a stream that was of use begin with the short pauses of the first.
func TestPausesBeginAnewAfterAUsefulStream(t *testing.T) {
	t.Parallel()
	p := newPace(nil, "orders")
	for range 2 * backoffQuick {
		p.b.next()
	}
	long := p.b.next()
	p.fresh()
	if short := p.b.next(); short > 5*backoffFirst/4 || long <= backoffQuickMax {
		t.Errorf("pauses of %v, then of %v", long, short)
	}
}
