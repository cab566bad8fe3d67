package ledger

import (
	"context"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// Ticker drives the deadlines of many writers from one goroutine, which exists only while some writer has a
// deadline: a thousand idle ledgers cost neither a goroutine nor a timer. The rejected alternative, a timer per
// ledger (or per entry), costs a heap operation for every append at full load.
type Ticker struct {
	interval time.Duration

	mu      sync.Mutex
	users   []tickUser // in an order that nothing but their coming and going decides
	at      map[tickUser]int
	running bool
	runs    *sched.Group // of one at most; nil before the first
	closed  bool
	stop    chan struct{}
}

// tickUser is told the time while it is registered. Tick reports whether it wants to stay registered; it must
// not block.
type tickUser interface {
	tick(now time.Time) (stay bool)
}

// NewTicker returns a ticker with the given resolution; 0 means 50 ms. Close it once no writer uses it any more.
func NewTicker(interval time.Duration) *Ticker {
	if interval <= 0 {
		interval = 50 * time.Millisecond
	}
	return &Ticker{interval: interval, at: map[tickUser]int{}, stop: make(chan struct{})}
}

// Close stops the ticker and waits for its goroutine. Deadlines no longer pass.
func (t *Ticker) Close() {
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.stop)
	}
	runs := t.runs
	t.mu.Unlock()
	if runs != nil {
		runs.Wait()
	}
}

// add registers u until its tick returns false. Registering twice is registering once. The ticker runs under the scheduler of
// whoever comes first.
func (t *Ticker) add(s sched.Scheduler, u tickUser) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	if _, known := t.at[u]; !known {
		t.at[u] = len(t.users)
		t.users = append(t.users, u)
	}
	if t.runs == nil {
		t.runs = sched.NewGroup(s)
	}
	if !t.running {
		t.running = true
		t.runs.Go(func() { t.run(s) })
	}
}

// drop takes u out; the last one takes its place. mu is held.
func (t *Ticker) drop(u tickUser) {
	i, end := t.at[u], len(t.users)-1
	t.users[i] = t.users[end]
	t.at[t.users[i]] = i
	t.users[end] = nil
	t.users = t.users[:end]
	delete(t.at, u)
}

func (t *Ticker) run(s sched.Scheduler) {
	var users []tickUser
	for {
		passed, stop := sched.After(s, t.interval)
		if i, _ := s.Wait(context.Background(), sched.Channels{t.stop, passed}); i == 0 {
			stop()
			return
		}
		now := s.Now()
		t.mu.Lock()
		users = append(users[:0], t.users...)
		t.mu.Unlock()
		for i, u := range users {
			// A user that leaves and registers again in between keeps its place: it is removed under the
			// lock, after its own word.
			t.mu.Lock()
			if !u.tick(now) {
				t.drop(u)
			}
			if i == len(users)-1 && len(t.users) == 0 {
				t.running = false
				t.mu.Unlock()
				return
			}
			t.mu.Unlock()
		}
		clear(users)
	}
}
