package bench

import "sync"

// pool is the messages of one producer that are not in flight. Its producer takes them, any goroutine gives them back.
type pool struct {
	local []*Message // of the producer alone

	mu      sync.Mutex
	back    []*Message
	waiting bool
	room    chan struct{} // capacity 1: something came back while the producer waited

	made, limit int
	make        func() *Message
}

func newPool(limit int, make_ func() *Message) *pool {
	return &pool{room: make(chan struct{}, 1), limit: limit, make: make_}
}

// take returns a message, or nil if all are in flight; then room says when one has come back.
func (p *pool) take() *Message {
	if len(p.local) == 0 {
		p.mu.Lock()
		p.local, p.back = p.back, p.local
		p.waiting = len(p.local) == 0 && p.made == p.limit
		p.mu.Unlock()
	}
	if n := len(p.local); n > 0 {
		m := p.local[n-1]
		p.local = p.local[:n-1]
		return m
	}
	if p.made < p.limit {
		p.made++
		return p.make()
	}
	return nil
}

// put gives a message back.
func (p *pool) put(m *Message) {
	p.mu.Lock()
	p.back = append(p.back, m)
	waiting := p.waiting
	p.waiting = false
	p.mu.Unlock()
	if waiting {
		select {
		case p.room <- struct{}{}:
		default: // the producer has not looked yet
		}
	}
}
