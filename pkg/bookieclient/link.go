package bookieclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// exchange is what travels over a link: adds or requests. It keeps what is queued and what is in flight, and
// answers each exactly once.
type exchange interface {
	// empty reports whether nothing awaits an answer.
	empty() bool
	// encode moves queued requests to those in flight and appends their frames; false if there were none.
	encode(e *bookiewire.Encoder, now time.Time) bool
	// handle takes an answer and calls done. An error breaks the connection.
	handle(f bookiewire.Frame) error
	// overdue looks for answers that are late. An error breaks the connection.
	overdue(now time.Time) error
	// fail answers everything, queued or in flight.
	fail(err *bookiewire.Error)
	// end is the last fail: what is submitted afterwards is refused with the same error, for nobody would answer it.
	end(err *bookiewire.Error)
}

// link is a connection to one bookie for one use, when there is one.
type link struct {
	c    *Client
	to   entry.StorageUUID
	use  bookiewire.Use
	ex   exchange
	wake chan struct{}

	state linkState

	// Owned by run.
	backoff   time.Duration
	notBefore time.Time
	lastErr   *bookiewire.Error
	logged    time.Time // when lastErr was
}

// newLink makes a link for requests that is not connected.
func newLink(c *Client, to entry.StorageUUID, ex exchange, wake chan struct{}) *link {
	l := &link{c: c, to: to, use: bookiewire.UseRequests, ex: ex, wake: wake}
	l.state.set("not connected")
	return l
}

// linkState is what a link is doing, for the errors of requests that are given up meanwhile.
type linkState struct {
	mu    sync.Mutex
	doing string
	since time.Time
}

func (s *linkState) set(doing string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doing, s.since = doing, time.Now()
}

func (s *linkState) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("%s for %v", s.doing, time.Since(s.since).Round(time.Millisecond))
}

const (
	// batchBytes is how much is encoded for one writev; what is queued meanwhile makes the next.
	batchBytes = 1 << 20
	addSlab    = 8 << 10
	replySlab  = 64 << 10
	// replyAtOnce is more than the answer to a read of 1 MiB, which is what readers ask for: its memory is taken at once, and
	// not doubled, cleared and copied until it is large enough.
	replyAtOnce = 1<<20 + 128<<10
)

func (l *link) run(ctx context.Context) {
	for {
		l.state.set("not connected")
		select {
		case <-ctx.Done():
			l.ex.end(disconnected("client is closed"))
			return
		case <-l.wake:
		}
		if l.ex.empty() {
			continue
		}
		if time.Now().Before(l.notBefore) {
			l.ex.fail(l.lastErr)
			continue
		}
		conn, err := l.connect(ctx)
		if err != nil {
			l.failed(err)
			l.ex.fail(err)
			continue
		}
		if l.lastErr != nil {
			l.c.log.Info("bookie reached again", slog.String("storage", l.to.String()), slog.String("addr", conn.RemoteAddr().String()))
		}
		l.lastErr = nil
		l.c.metrics.connections.Inc()
		l.state.set("connected to " + conn.RemoteAddr().String())
		answered, cause := l.serve(ctx, conn)
		l.c.metrics.connections.Dec()
		l.c.metrics.disconnects.Inc()
		err = disconnected("connection lost: " + cause.Error())
		if answered {
			l.backoff = 0
		} else {
			l.failed(err)
		}
		l.ex.fail(err)
	}
}

// repeatLog is after how long a bookie that still cannot be reached is logged again.
const repeatLog = 30 * time.Second

// failed makes the next attempt wait, and logs the first failure of a row, and one now and then.
func (l *link) failed(err *bookiewire.Error) {
	l.backoff = min(max(2*l.backoff, l.c.cfg.BackoffMin), l.c.cfg.BackoffMax)
	jittered := l.backoff/2 + rand.N(l.backoff/2+1) //nolint:gosec // jitter
	l.notBefore = time.Now().Add(jittered)
	if now := time.Now(); (l.lastErr == nil || now.Sub(l.logged) >= repeatLog) && l.c.ctx.Err() == nil {
		l.logged = now
		l.c.log.Warn("bookie cannot be reached", slog.String("storage", l.to.String()), slog.String("error", err.Detail))
	}
	l.lastErr = err
}

// connect dials and shakes hands.
func (l *link) connect(ctx context.Context) (net.Conn, *bookiewire.Error) {
	addr, ok := l.c.resolve(l.to)
	if !ok {
		return nil, disconnected("no address known for storage " + l.to.String())
	}
	l.state.set("connecting to " + addr)
	dialCtx, cancel := context.WithTimeout(ctx, l.c.cfg.DialTimeout)
	defer cancel()
	conn, err := l.c.cfg.Dial(dialCtx, addr)
	if err != nil {
		return nil, disconnected(fmt.Sprintf("connect to %s: %v", addr, err))
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	l.state.set("shaking hands with " + addr)
	w, err := l.shakeHands(conn)
	if err != nil {
		_ = conn.Close()
		return nil, disconnected(fmt.Sprintf("shake hands with %s: %v", addr, err))
	}
	if w.Code == bookiewire.OK && (w.Storage != l.to || w.Cluster != l.c.cfg.Cluster) {
		w.Code, w.Detail = bookiewire.Unknown, fmt.Sprintf("%s is storage %s of cluster %s", addr, w.Storage, w.Cluster)
	}
	if w.Code != bookiewire.OK {
		_ = conn.Close()
		return nil, &bookiewire.Error{Code: w.Code, Detail: w.Detail}
	}
	return conn, nil
}

func (l *link) shakeHands(conn net.Conn) (bookiewire.Welcome, error) {
	if err := conn.SetDeadline(time.Now().Add(l.c.cfg.HandshakeTimeout)); err != nil {
		return bookiewire.Welcome{}, err
	}
	hello, err := bookiewire.AppendHello(nil, bookiewire.Hello{
		MinVersion: bookiewire.Version, MaxVersion: bookiewire.Version, Use: l.use, Cluster: l.c.cfg.Cluster, Storage: l.to,
	})
	if err != nil {
		return bookiewire.Welcome{}, err
	}
	if _, err := conn.Write(hello); err != nil {
		return bookiewire.Welcome{}, err
	}
	w, err := bookiewire.ReadWelcome(conn)
	if err != nil {
		return bookiewire.Welcome{}, err
	}
	if w.Code == bookiewire.OK && w.Version != bookiewire.Version {
		return bookiewire.Welcome{}, fmt.Errorf("bookie chose protocol version %d, offered was %d", w.Version, bookiewire.Version)
	}
	return w, conn.SetDeadline(time.Time{})
}

// errClosed is why a connection ends when the client is closed.
var errClosed = errors.New("client is closed")

// pulse is when a connection was last heard of.
type pulse struct {
	net.Conn
	start time.Time
	heard atomic.Int64 // nanoseconds since start
}

// Read notes each byte that comes: a long answer on its way is a sign of life, too.
func (p *pulse) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	if n > 0 {
		p.heard.Store(int64(time.Since(p.start)))
	}
	return n, err
}

// serve sends what is queued and hands over answers until the connection breaks. It reports whether the bookie
// answered anything, and why it ended. When it returns, nobody looks at the bodies in flight any more.
func (l *link) serve(ctx context.Context, conn net.Conn) (answered bool, cause error) {
	p := &pulse{Conn: conn, start: time.Now()}
	var frames, ping atomic.Bool
	readErr := make(chan error, 1)
	go func() { readErr <- l.receive(p, &frames) }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	ended, gaveUp := make(chan struct{}), make(chan error, 1)
	go func() { gaveUp <- l.watch(p, &ping, ended) }()

	var e bookiewire.Encoder
	for cause == nil {
		if ping.Swap(false) {
			e.Ping(0)
			cause = l.write(conn, &e)
		}
		for cause == nil && l.ex.encode(&e, time.Now()) {
			cause = l.write(conn, &e)
		}
		if cause != nil {
			break
		}
		select {
		case <-l.wake:
		case err := <-readErr:
			readErr <- err
			cause = err
		}
	}
	close(ended)
	_ = conn.Close()
	err, verdict := <-readErr, <-gaveUp
	switch {
	case ctx.Err() != nil:
		cause = errClosed
	case verdict != nil:
		cause = verdict
	case errors.Is(cause, net.ErrClosed), errors.Is(err, bookiewire.ErrMalformed):
		cause = err
	}
	return frames.Load(), cause
}

// watch looks after a connection until it has ended: asks for a sign of life while answers are awaited and nothing
// comes, and breaks it, saying why, when that has been in vain or an answer is late. It has a goroutine of its own
// because a peer that stands still also stops the one that writes.
func (l *link) watch(p *pulse, ping *atomic.Bool, ended <-chan struct{}) error {
	ticker := time.NewTicker(l.c.cfg.PingInterval)
	defer ticker.Stop()
	waiting := time.Duration(-1) // since when answers are awaited, since start; -1: none are
	for {
		var now time.Time
		select {
		case <-ended:
			return nil
		case now = <-ticker.C:
		}
		since := now.Sub(p.start)
		switch {
		case l.ex.empty():
			waiting = -1
		case waiting < 0:
			waiting = since
		default:
			silent := since - max(waiting, time.Duration(p.heard.Load()))
			if silent >= l.c.cfg.SilenceTimeout {
				_ = p.Close()
				return fmt.Errorf("silent for %v", silent.Round(time.Millisecond))
			}
			if silent >= l.c.cfg.PingInterval {
				ping.Store(true)
				wake(l.wake)
			}
		}
		if err := l.ex.overdue(now); err != nil {
			_ = p.Close()
			return err
		}
	}
}

func (l *link) write(conn net.Conn, e *bookiewire.Encoder) error {
	if err := conn.SetWriteDeadline(time.Now().Add(l.c.cfg.RequestTimeout)); err != nil {
		e.Reset()
		return err
	}
	_, err := e.WriteTo(conn)
	return err
}

// receive reads frames until the stream breaks.
func (l *link) receive(conn net.Conn, answered *atomic.Bool) error {
	slab := addSlab
	if l.use == bookiewire.UseRequests {
		slab = replySlab
	}
	r := bookiewire.NewReader(conn, slab)
	r.AtOnce = replyAtOnce
	for {
		f, err := r.Next()
		if err == nil {
			answered.Store(true)
			if f.Kind == bookiewire.KindPong {
				err = f.Empty()
			} else {
				err = l.ex.handle(f)
			}
		}
		if err != nil {
			_ = conn.Close() // a write under way ends
			return err
		}
	}
}

// expect checks a frame without payload.
func expect(f bookiewire.Frame, kind bookiewire.Kind) error {
	if f.Kind != kind {
		return fmt.Errorf("%w: answer of kind %d, want %d", bookiewire.ErrMalformed, f.Kind, kind)
	}
	return f.Empty()
}
