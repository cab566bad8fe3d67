package sched

import (
	"context"
	"sync"
)

// Group is a sync.WaitGroup for what a scheduler runs.
type Group struct {
	s    Scheduler
	mu   sync.Mutex
	n    int
	none chan struct{} // closed when n falls to 0, if somebody waits
}

// NewGroup returns a group whose members s runs.
func NewGroup(s Scheduler) *Group { return &Group{s: s} }

// Go runs f as a member.
func (g *Group) Go(f func()) {
	g.mu.Lock()
	g.n++
	g.mu.Unlock()
	g.s.Go(func() {
		defer g.done()
		f()
	})
}

func (g *Group) done() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.none != nil {
		close(g.none)
		g.none = nil
	}
}

// Wait returns once the group has no members.
func (g *Group) Wait() {
	g.mu.Lock()
	if g.n == 0 {
		g.mu.Unlock()
		return
	}
	if g.none == nil {
		g.none = make(chan struct{})
	}
	none := g.none
	g.mu.Unlock()
	Until(g.s, none)
}

// Turn is a lock that is held across waits. It has one holder at a time, in no order.
type Turn struct {
	mu   sync.Mutex
	held bool
	free chan struct{} // closed when the turn is given up, if somebody waits
}

// Take waits for the turn, or returns the error of ctx.
func (t *Turn) Take(ctx context.Context, s Scheduler) error {
	for {
		t.mu.Lock()
		if !t.held {
			t.held = true
			t.mu.Unlock()
			return nil
		}
		if t.free == nil {
			t.free = make(chan struct{})
		}
		free := t.free
		t.mu.Unlock()
		if _, err := s.Wait(ctx, Channels{free}); err != nil {
			return err //nolint:wrapcheck // as a context says it
		}
	}
}

// Give ends the holder's turn.
func (t *Turn) Give() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.held {
		panic("sched: a turn is given up that nobody has")
	}
	t.held = false
	if t.free != nil {
		close(t.free)
		t.free = nil
	}
}
