package client

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"
)

// passed returns which entrants have passed, by name.
func passed(all map[string]*entrant, names ...string) string {
	var out []string
	for _, n := range names {
		select {
		case <-all[n].turn:
			out = append(out, n)
		default:
		}
	}
	return strings.Join(out, " ")
}

// A bounded number of streams are opened at once; of those that wait, producers pass whose messages wait, the oldest first, then
// producers, then consumers.
func TestGateInOrder(t *testing.T) {
	t.Parallel()
	var g gate
	begun := time.Unix(1000, 0)
	enter := func(producer bool, since int) *entrant {
		e := &entrant{producer: producer, turn: make(chan struct{})}
		if since > 0 {
			e.since = begun.Add(time.Duration(since) * time.Second)
		}
		g.enter(e)
		return e
	}
	var open []*entrant
	for range openingsAtOnce {
		e := enter(false, 0)
		select {
		case <-e.turn:
		default:
			t.Fatal("it has to wait, and few are open")
		}
		open = append(open, e)
	}
	all := map[string]*entrant{
		"consumer": enter(false, 0), "idle": enter(true, 0), "new": enter(true, 3), "old": enter(true, 2), "late": enter(true, 0),
		"another consumer": enter(false, 0), "gone": enter(true, 1),
	}
	g.leave(all["gone"])
	g.change(all["late"], begun.Add(time.Second)) // its application publishes
	names := []string{"consumer", "idle", "new", "old", "late", "another consumer", "gone"}
	for i, want := range []string{
		"", "late", "old late", "new old late", "idle new old late", "consumer idle new old late", "consumer idle new old late another consumer",
	} {
		if got := passed(all, names...); got != want {
			t.Fatalf("after %d have left %q have passed, want %q", i, got, want)
		}
		g.leave(open[i])
	}
}

// Who gives up leaves its place; who takes too long to be opened, too.
func TestGatePass(t *testing.T) {
	t.Parallel()
	var g gate
	var leaves []func()
	for range openingsAtOnce {
		leave, err := g.pass(t.Context(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, leave)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.pass(ctx, nil, nil); err == nil {
		t.Fatal("passed a full gate")
	}
	ctx, cancel = context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	leave, err := g.pass(ctx, func() time.Time { return time.Time{} }, nil) // when one of the others is late
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(leaves, leave) {
		f()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != 0 || len(g.waiting) != 0 {
		t.Errorf("%d are open, %d wait", g.open, len(g.waiting))
	}
}

// Callers of the same key share one call; it ends when the last of them has gone; the next one asks anew.
func TestShared(t *testing.T) {
	t.Parallel()
	var s shared[int, string]
	var wg sync.WaitGroup
	defer wg.Wait()
	life, end := context.WithCancel(t.Context())
	defer end()
	asked, answer := make(chan context.Context, 3), make(chan string)
	ask := func(ctx context.Context) (string, error) {
		asked <- ctx
		select {
		case a := <-answer:
			return a, nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	type result struct {
		value string
		err   error
	}
	results := make(chan result)
	do := func(ctx context.Context, key int) {
		wg.Go(func() {
			v, err := s.do(ctx, life, &wg, key, ask)
			results <- result{v, err}
		})
	}
	waiting := func(n int) {
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
			s.mu.Lock()
			c := s.calls[1]
			ok := c != nil && c.waiting == n
			s.mu.Unlock()
			if ok {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("there are never %d waiting", n)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	do(ctx, 1)
	do(t.Context(), 1)
	waiting(2)
	<-asked
	cancel()
	if r := <-results; !errors.Is(r.err, context.Canceled) {
		t.Errorf("one that gave up got %+v", r)
	}
	answer <- "a"
	if r := <-results; r.value != "a" || r.err != nil {
		t.Errorf("got %+v, want a", r)
	}
	ctx, cancel = context.WithCancel(t.Context())
	do(ctx, 1)
	called := <-asked
	cancel()
	<-results
	<-called.Done() // nobody waits for it any more
	if len(asked) != 0 {
		t.Error("asked more than once for all")
	}
}
