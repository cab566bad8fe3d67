// Package relay carries TCP connections for tests that want to cut them.
package relay

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
)

// Relay carries TCP connections to one address, until it is cut.
type Relay struct {
	ctx      context.Context //nolint:containedctx // the test's
	listener net.Listener
	to       string
	done     sync.WaitGroup

	mu     sync.Mutex
	broken bool
	conns  map[net.Conn]bool
}

// New makes a relay to an address, for as long as the test runs.
func New(tb testing.TB, to string) *Relay {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p := &Relay{ctx: tb.Context(), listener: l, to: to, conns: make(map[net.Conn]bool)}
	p.done.Go(p.serve)
	tb.Cleanup(func() {
		_ = l.Close()
		p.Cut()
		p.done.Wait()
	})
	return p
}

// Addr is where it listens.
func (p *Relay) Addr() string { return p.listener.Addr().String() }

func (p *Relay) serve() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		out, err := (&net.Dialer{}).DialContext(p.ctx, "tcp", p.to)
		if err != nil {
			_ = in.Close()
			continue
		}
		if !p.keep(in, out) {
			continue
		}
		for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
			p.done.Go(func() {
				_, _ = io.Copy(pair[0], pair[1])
				p.drop(in, out)
			})
		}
	}
}

func (p *Relay) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.broken {
			_ = c.Close()
			continue
		}
		p.conns[c] = true
	}
	return !p.broken
}

func (p *Relay) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(p.conns, c)
	}
}

// Cut drops the connections there are, and refuses others.
func (p *Relay) Cut() {
	p.mu.Lock()
	p.broken = true
	var all []net.Conn
	for c := range p.conns {
		all = append(all, c)
	}
	p.mu.Unlock()
	p.drop(all...)
}

// Heal ends a cut.
func (p *Relay) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = false
}
