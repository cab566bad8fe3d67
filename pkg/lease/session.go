package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// Etcd is what a session needs of etcd; clientv3.Lease is one.
type Etcd interface {
	Grant(ctx context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error)
	KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error)
	Revoke(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error)
}

// Session keeps one lease alive at a time, and gets a new one when etcd says that the old one is gone.
//
// It renews by single calls, each with its own timeout, three to a TTL, instead of etcd's keep-alive stream:
// the stream reports a loss by going silent, and knows no local deadline. An etcd without a leader answers
// with errors, which say nothing of the lease, so the session asks on, past its deadline if need be: the lease
// may well be there when a leader is back, since a new leader extends all leases.
//
// It is safe for concurrent use.
type Session struct {
	etcd   Etcd
	sched  sched.Scheduler
	ttl    time.Duration
	log    *slog.Logger
	cancel context.CancelFunc
	run    *sched.Group
	ended  context.Context //nolint:containedctx // ends when Close begins

	losses atomic.Int64

	mu      sync.Mutex
	current *Grant        // nil between a loss and the next grant
	granted chan struct{} // closed when current is set
	closed  bool
}

// Grant is one lease.
type Grant struct {
	// ID is the lease's id, to put keys under.
	ID clientv3.LeaseID

	ctx    context.Context //nolint:containedctx // the lease's life is what it stands for
	cancel context.CancelFunc

	mu       sync.Mutex
	deadline time.Time
}

// ErrClosed is returned by a session that was closed.
var ErrClosed = errors.New("session is closed")

// Lost is closed when etcd has said that the lease is gone, or the session was closed.
func (g *Grant) Lost() <-chan struct{} { return g.ctx.Done() }

// Context ends when Lost is closed.
func (g *Grant) Context() context.Context { return g.ctx }

// Deadline is when the lease ends unless it is renewed, by the local monotonic clock, reckoned from before the
// last renewal was sent: etcd ends it later, never earlier.
func (g *Grant) Deadline() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.deadline
}

func (g *Grant) extend(to time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.deadline = to
}

// NewSession gets a first lease, trying until ctx ends, and keeps it from then on. ttl is rounded up to a
// second. The caller closes what it returns.
func NewSession(ctx context.Context, cli *clientv3.Client, ttl time.Duration, log *slog.Logger) (*Session, error) {
	return NewSessionOver(ctx, cli, sched.Real, ttl, log)
}

// NewSessionOver is NewSession over any connection, by any clock.
func NewSessionOver(ctx context.Context, etcd Etcd, sc sched.Scheduler, ttl time.Duration, log *slog.Logger) (*Session, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Session{
		etcd: etcd, sched: sc, ttl: max((ttl + time.Second - 1).Truncate(time.Second), time.Second), log: log,
		cancel: cancel, ended: life, run: sched.NewGroup(sc), granted: make(chan struct{}),
	}
	s.run.Go(func() { s.keepOne(life) })
	if _, err := s.Wait(ctx); err != nil {
		s.cancel()
		s.run.Wait()
		return nil, err
	}
	return s, nil
}

// TTL is the lease's time to live.
func (s *Session) TTL() time.Duration { return s.ttl }

// Losses is how many leases have ended while the session lived.
func (s *Session) Losses() int64 { return s.losses.Load() }

// Wait returns the lease of now, waiting for one between a loss and the next grant. It returns ErrClosed, or
// the context's error.
func (s *Session) Wait(ctx context.Context) (*Grant, error) {
	for {
		s.mu.Lock()
		g, granted, closed := s.current, s.granted, s.closed
		s.mu.Unlock()
		switch {
		case closed:
			return nil, ErrClosed
		case g != nil:
			return g, nil
		}
		switch i, err := s.sched.Wait(ctx, sched.Channels{granted, s.ended.Done()}); {
		case err != nil:
			return nil, fmt.Errorf("wait for a lease: %w", err)
		case i == 1:
			return nil, ErrClosed
		}
	}
}

// ID is the id of the lease of now; 0, which etcd takes for "no lease" and no transaction should, between a
// loss and the next grant.
func (s *Session) ID() clientv3.LeaseID {
	if g := s.grant(); g != nil {
		return g.ID
	}
	return clientv3.NoLease
}

// Deadline is that of the lease of now; the zero time without one.
func (s *Session) Deadline() time.Time {
	if g := s.grant(); g != nil {
		return g.Deadline()
	}
	return time.Time{}
}

// Alive reports whether there is a lease whose local deadline has not passed.
func (s *Session) Alive() bool { return s.sched.Now().Before(s.Deadline()) }

// Lost is closed when the lease of now is gone. Without one it is closed already.
func (s *Session) Lost() <-chan struct{} {
	if g := s.grant(); g != nil {
		return g.Lost()
	}
	return alreadyClosed
}

var alreadyClosed = func() chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}()

func (s *Session) grant() *Grant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Close ends the session, and revokes its lease so that the keys under it go at once; if etcd does not answer
// before ctx ends they go with the TTL. It may be called again.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.run.Wait()
	g := s.grant() // the last one
	if g == nil || !first {
		return nil
	}
	g.cancel()
	if _, err := s.etcd.Revoke(ctx, g.ID); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("revoke lease: %w", err)
	}
	return nil
}

// keepOne grants and renews until ctx ends.
func (s *Session) keepOne(ctx context.Context) {
	for ctx.Err() == nil {
		g := s.obtain(ctx)
		if g == nil {
			return
		}
		s.set(g)
		s.keep(ctx, g)
		if ctx.Err() != nil {
			return // Close takes it from here
		}
		s.set(nil)
		g.cancel()
		s.losses.Add(1)
		s.log.Warn("lease is gone, getting another", "lease", int64(g.ID))
	}
}

func (s *Session) set(g *Grant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current = g
	if g != nil {
		close(s.granted)
		return
	}
	s.granted = make(chan struct{})
}

// interval is the time between renewals: two may fail before the deadline passes.
func (s *Session) interval() time.Duration { return s.ttl / 3 }

// retryInterval is the time between attempts that were not answered.
func (s *Session) retryInterval() time.Duration { return min(s.ttl/10, 500*time.Millisecond) }

// obtain gets a lease, or returns nil when ctx ends.
func (s *Session) obtain(ctx context.Context) *Grant {
	failing := false
	for {
		sent := s.sched.Now()
		attempt, cancel := s.sched.WithTimeout(ctx, s.ttl)
		resp, err := s.etcd.Grant(attempt, int64(s.ttl/time.Second))
		cancel()
		if err == nil {
			// A grant whose reply was lost ends by itself after its TTL: nothing is under it.
			ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
			return &Grant{ID: resp.ID, ctx: ctx, cancel: cancel, deadline: sent.Add(s.ttl)}
		}
		if ctx.Err() != nil {
			return nil
		}
		if !failing {
			failing = true
			s.log.Warn("can't get a lease, trying again", "error", err)
		}
		if sched.Sleep(ctx, s.sched, s.retryInterval()) != nil {
			return nil
		}
	}
}

// keep renews g until etcd says that it is gone, or ctx ends.
func (s *Session) keep(ctx context.Context, g *Grant) {
	failing := false
	next := s.interval()
	for sched.Sleep(ctx, s.sched, next) == nil {
		sent := s.sched.Now()
		attempt, cancel := s.sched.WithTimeout(ctx, s.interval())
		resp, err := s.etcd.KeepAliveOnce(attempt, g.ID)
		cancel()
		switch {
		case err == nil && resp.TTL > 0:
			g.extend(sent.Add(s.ttl))
			if failing {
				s.log.Info("lease is renewed again", "lease", int64(g.ID))
			}
			failing = false
			next = s.interval()
		case err == nil, errors.Is(err, rpctypes.ErrLeaseNotFound):
			return
		default:
			if !failing && ctx.Err() == nil {
				s.log.Warn("can't renew lease, trying again", "lease", int64(g.ID), "error", err)
			}
			failing = true
			next = s.retryInterval()
		}
	}
}

// ID names a lease.
type ID = clientv3.LeaseID
