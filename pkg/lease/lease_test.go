package lease_test

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// longTTL is that of leases which are not to end by themselves: far longer than a busy machine may keep a renewal waiting.
const longTTL = time.Minute

func newSession(t *testing.T, cli *clientv3.Client, ttl time.Duration) *lease.Session {
	t.Helper()
	s, err := lease.NewSession(t.Context(), cli, ttl, nil)
	check(t, err)
	t.Cleanup(func() { check(t, s.Close(context.WithoutCancel(t.Context()))) })
	return s
}

func within(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(2 * time.Minute):
		t.Fatalf("%s: did not happen", what)
	}
}

// A lease that etcd has dropped is noticed, and another one takes its place.
func TestSessionGetsAnotherLease(t *testing.T) {
	t.Parallel()
	s := newSession(t, etcd.Client(), longTTL)
	first, err := s.Wait(t.Context())
	check(t, err)
	if !s.Alive() || s.ID() != first.ID {
		t.Fatalf("a new session has lease %d, alive %v", s.ID(), s.Alive())
	}
	_, err = etcd.Client().Revoke(t.Context(), first.ID)
	check(t, err)
	within(t, "the loss", first.Lost())
	second, err := s.Wait(t.Context())
	check(t, err)
	if second.ID == first.ID {
		t.Fatal("the old lease is back")
	}
	if first.Context().Err() == nil || second.Context().Err() != nil {
		t.Fatal("the wrong context ended")
	}
}

// Closing revokes: keys under the lease go at once, and waiters are told.
func TestCloseRevokes(t *testing.T) {
	t.Parallel()
	s, err := lease.NewSession(t.Context(), etcd.Client(), longTTL, nil)
	check(t, err)
	_, err = etcd.Client().Put(t.Context(), "close-revokes", "v", clientv3.WithLease(s.ID()))
	check(t, err)
	lost := s.Lost()
	check(t, s.Close(t.Context()))
	check(t, s.Close(t.Context()))
	within(t, "the end of the lease", lost)
	got, err := etcd.Client().Get(t.Context(), "close-revokes")
	check(t, err)
	if len(got.Kvs) != 0 {
		t.Fatal("the key outlived the session")
	}
	if _, err := s.Wait(t.Context()); !errors.Is(err, lease.ErrClosed) {
		t.Fatalf("got %v, want %v", err, lease.ErrClosed)
	}
}

// Etcd goes away and comes back with its data: the session keeps its lease, for a new leader extends it.
func TestSessionSurvivesEtcdRestart(t *testing.T) {
	t.Parallel()
	cfg := embedetcd.Config{Dir: t.TempDir(), UnsafeNoFsync: true}
	first, err := embedetcd.Start(t.Context(), cfg)
	check(t, err)
	cli, err := embedetcd.NewClient(first.Endpoints())
	check(t, err)
	t.Cleanup(func() { check(t, cli.Close()) })
	s := newSession(t, cli, 12*time.Second) // renewed every 4 s; a busy machine may take a while for the restart
	grant, err := s.Wait(t.Context())
	check(t, err)
	check(t, first.Close())

	cfg.Listen = first.Endpoints()[0]
	second, err := embedetcd.Start(t.Context(), cfg)
	for errors.Is(err, syscall.EADDRINUSE) { // somebody's connection has the port: not for long
		second, err = embedetcd.Start(t.Context(), cfg)
	}
	check(t, err)
	defer func() { check(t, second.Close()) }()
	// A renewal after the restart moves the deadline past anything from before it.
	restarted := time.Now()
	for grant.Deadline().Before(restarted.Add(s.TTL())) {
		select {
		case <-grant.Lost():
			t.Fatal("the lease was given up")
		case <-time.After(20 * time.Millisecond):
		}
	}
	check(t, s.Close(t.Context()))
	if s.ID() != grant.ID {
		t.Fatalf("lease %d became %d", grant.ID, s.ID())
	}
}

// No etcd at all: the wait ends with its context and leaves nothing behind.
func TestNewSessionGivesUp(t *testing.T) {
	t.Parallel()
	cli, err := embedetcd.NewClient([]string{"127.0.0.1:1"})
	check(t, err)
	defer func() { check(t, cli.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := lease.NewSession(ctx, cli, time.Second, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want the context's error", err)
	}
}

// One leads at a time; the next takes over when the first resigns, loses its lease, or loses its key.
func TestElection(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const key = "elections/test"
	type result struct {
		l   *lease.Leadership
		err error
	}
	campaign := func(ctx context.Context, name string) (<-chan result, *lease.Session) {
		s := newSession(t, etcd.Client(), longTTL)
		won := make(chan result, 1)
		go func() {
			l, err := lease.Campaign(ctx, etcd.Client(), s, key, name)
			won <- result{l, err}
		}()
		return won, s
	}
	win := func(name string, won <-chan result) *lease.Leadership {
		t.Helper()
		r := <-won
		check(t, r.err)
		got, err := etcd.Client().Get(ctx, key)
		check(t, err)
		if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != name {
			t.Fatalf("%s won, the key says %v", name, got.Kvs)
		}
		return r.l
	}

	aWon, _ := campaign(ctx, "a")
	a := win("a", aWon)
	bWon, bSession := campaign(ctx, "b")
	// A candidate that gives up gets its context's error and does not disturb.
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	quitter, _ := campaign(short, "quitter")
	if r := <-quitter; !errors.Is(r.err, context.DeadlineExceeded) {
		t.Fatalf("the quitter got %v", r.err)
	}
	select {
	case <-bWon:
		t.Fatal("two leaders")
	case <-a.Context().Done():
		t.Fatal("the leadership ended by itself")
	default:
	}
	check(t, a.Resign(ctx))
	check(t, a.Resign(ctx))
	if a.Context().Err() == nil {
		t.Fatal("resigned, but the context goes on")
	}

	b := win("b", bWon)
	cWon, _ := campaign(ctx, "c")
	_, err := etcd.Client().Revoke(ctx, bSession.ID())
	check(t, err)
	within(t, "the end with the lease", b.Context().Done())
	if !errors.Is(context.Cause(b.Context()), lease.ErrDeposed) {
		t.Fatalf("cause %v", context.Cause(b.Context()))
	}
	c := win("c", cWon)
	check(t, b.Resign(ctx)) // late, and harmless
	if c.Context().Err() != nil {
		t.Fatal("a late resignation ended another's leadership")
	}
	_, err = etcd.Client().Put(ctx, key, "usurper")
	check(t, err)
	within(t, "the end with the key", c.Context().Done())
	check(t, c.Resign(ctx))
	_, err = etcd.Client().Delete(ctx, key)
	check(t, err)
}
