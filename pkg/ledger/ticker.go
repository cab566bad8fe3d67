package ledger

import (
	"sync"
	"time"
)

// Ticker drives the deadlines of many writers from one goroutine, which exists only while some writer has a
// deadline: a thousand idle ledgers cost neither a goroutine nor a timer. The rejected alternative, a timer per
// ledger (or per entry), costs a heap operation for every append at full load.
type Ticker struct {
	interval time.Duration

	mu      sync.Mutex
	users   map[tickUser]struct{}
	running bool
	closed  bool
	stop    chan struct{}
	wg      sync.WaitGroup
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
	return &Ticker{interval: interval, users: map[tickUser]struct{}{}, stop: make(chan struct{})}
}

// Close stops the ticker and waits for its goroutine. Deadlines no longer pass.
func (t *Ticker) Close() {
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.stop)
	}
	t.mu.Unlock()
	t.wg.Wait()
}

// add registers u until its tick returns false. Registering twice is registering once.
func (t *Ticker) add(u tickUser) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.users[u] = struct{}{}
	if !t.running {
		t.running = true
		t.wg.Go(t.run)
	}
}

func (t *Ticker) run() {
	ticker := time.NewTicker(t.interval)
	defer ticker.Stop()
	var users []tickUser
	for {
		select {
		case <-t.stop:
			return
		case now := <-ticker.C:
			t.mu.Lock()
			users = users[:0]
			for u := range t.users {
				users = append(users, u)
			}
			t.mu.Unlock()
			for i, u := range users {
				// A user that leaves and registers again in between keeps its place: it is removed under the
				// lock, after its own word.
				t.mu.Lock()
				if !u.tick(now) {
					delete(t.users, u)
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
}
