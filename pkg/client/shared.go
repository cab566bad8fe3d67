package client

import (
	"context"
	"sync"
)

// shared has many callers wait for one call: when a broker dies, all of a client's streams there want to know the same. The
// call under way ends when nobody waits for it any more.
type shared[K comparable, T any] struct {
	mu    sync.Mutex
	calls map[K]*sharedCall[T]
}

type sharedCall[T any] struct {
	waiting int
	cancel  context.CancelFunc
	done    chan struct{} // closed once value and err are set
	value   T
	err     error
}

// do returns what the call of that key which is under way returns, or else what ask does; the error of ctx if that ends
// first. life ends all calls, wg counts them.
func (s *shared[K, T]) do(ctx, life context.Context, wg *sync.WaitGroup, key K, ask func(context.Context) (T, error)) (T, error) {
	s.mu.Lock()
	c := s.calls[key]
	if c == nil {
		callCtx, cancel := context.WithCancel(life)
		c = &sharedCall[T]{cancel: cancel, done: make(chan struct{})}
		if s.calls == nil {
			s.calls = make(map[K]*sharedCall[T])
		}
		s.calls[key] = c
		wg.Go(func() {
			defer cancel()
			c.value, c.err = ask(callCtx)
			s.forget(key, c)
			close(c.done)
		})
	}
	c.waiting++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if c.waiting--; c.waiting == 0 {
			if s.calls[key] == c {
				delete(s.calls, key)
			}
			c.cancel()
		}
	}()
	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
		var zero T
		return zero, causeOf(ctx)
	}
}

// forget has the next caller of the key ask anew.
func (s *shared[K, T]) forget(key K, c *sharedCall[T]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls[key] == c {
		delete(s.calls, key)
	}
}
