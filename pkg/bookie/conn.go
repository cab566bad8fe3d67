package bookie

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/budget"
)

const (
	// addSlab is how much is read of adds at once, requestSlab of requests, which are small.
	addSlab     = 256 << 10
	requestSlab = 4 << 10
	// freeSlabs is how many slabs are kept for adds to come, over all connections.
	freeSlabs = 64
	// addOverhead is what an add takes beside its body.
	addOverhead = 512
	// maxUntold is how many refusals, or ranges of acknowledged adds, may wait to be told before the connection is read no
	// further.
	maxUntold = 1024
)

// conn is one connection. Its reader runs in run, its writer beside it. What was read is counted in flight until
// its answer is marked; run returns when nothing is.
type conn struct {
	s       *Server
	nc      net.Conn
	surplus bool
	ctx     context.Context
	cancel  context.CancelFunc
	wake    chan struct{}
	slots   chan struct{}
	reads   *budget.Budget // this connection's share of the server's

	// Of the frame being read; the reader's own.
	partial bool  // there is a deadline for the rest of it
	large   int64 // bytes charged to the server's frames

	mu       sync.Mutex
	changed  *sync.Cond // inFlight, acks, failures, broken
	acks     []ackRange
	failures []failure
	replies  []reply
	inFlight int
	draining bool
	readDone bool // nothing more will be read
	broken   bool // nothing more can be written
}

type ackRange struct{ first, last uint64 }

type failure struct {
	seq uint64
	err *bookiewire.Error
}

// reply is an answer to a request. release is called when it is written or cannot be.
type reply struct {
	encode  func(*bookiewire.Encoder)
	release func()
}

// pendingAdd is an add between the socket and its answer. They are pooled: the store is done with one when it
// calls Done.
type pendingAdd struct {
	Arrival
	c     *conn
	seq   uint64
	size  int64
	bytes bookiewire.Retained
}

func newConn(s *Server, nc net.Conn) *conn {
	c := &conn{s: s, nc: nc, wake: make(chan struct{}, 1), slots: make(chan struct{}, s.cfg.MaxRequests)}
	c.reads = budget.New(max(s.cfg.ReadBytes/4, 1))
	c.ctx, c.cancel = context.WithCancel(s.ctx)
	c.changed = sync.NewCond(&c.mu)
	return c
}

func (c *conn) run() {
	defer c.cancel()
	defer c.nc.Close()
	h, err := c.shakeHands()
	if err != nil {
		c.s.metrics.refused.Inc()
		// A peer that speaks the protocol is one of the cluster's, and works with something that is not so.
		if refusal := new(bookiewire.Error); errors.As(err, &refusal) {
			c.s.tell(slog.LevelWarn, "peer refused", slog.String("peer", c.nc.RemoteAddr().String()), slog.Any("error", err))
		} else {
			c.s.log.Debug("connection refused", slog.String("peer", c.nc.RemoteAddr().String()), slog.Any("error", err))
		}
		return
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		c.write()
	}()
	err = c.read(h.Use)
	if errors.Is(err, bookiewire.ErrMalformed) {
		c.s.metrics.malformed.Inc()
	}

	c.mu.Lock()
	c.readDone = true
	graceful := c.draining && errors.Is(err, os.ErrDeadlineExceeded)
	if !graceful {
		c.broken = true
	}
	c.mu.Unlock()
	if !graceful {
		_ = c.nc.Close()
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !graceful {
		c.s.tell(slog.LevelInfo, "connection ended", slog.String("peer", c.nc.RemoteAddr().String()), slog.Any("error", err))
	}
	c.cancel() // ends waits
	c.wakeWriter()
	<-written
	c.mu.Lock()
	for c.inFlight > 0 {
		c.changed.Wait()
	}
	c.mu.Unlock()
}

// shakeHands gives a peer a bounded time and a bounded number of bytes to show what it is.
func (c *conn) shakeHands() (bookiewire.Hello, error) {
	if err := c.nc.SetDeadline(time.Now().Add(c.s.cfg.HandshakeTimeout)); err != nil {
		return bookiewire.Hello{}, err
	}
	h, err := bookiewire.ReadHello(c.nc)
	if err != nil {
		return h, err
	}
	w := c.s.hello(h, c.surplus)
	b, err := bookiewire.AppendWelcome(nil, w)
	if err != nil {
		return h, err
	}
	if _, err := c.nc.Write(b); err != nil {
		return h, err
	}
	if w.Code != bookiewire.OK {
		return h, &bookiewire.Error{Code: w.Code, Detail: w.Detail}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return h, net.ErrClosed
	}
	return h, c.nc.SetDeadline(time.Time{})
}

// addKinds and requestKinds are the frames that may come on the two uses of a connection.
var (
	addKinds     = []bookiewire.Kind{bookiewire.KindAdd, bookiewire.KindPing}
	requestKinds = []bookiewire.Kind{
		bookiewire.KindRead, bookiewire.KindFence, bookiewire.KindWriteLAC, bookiewire.KindWaitLAC, bookiewire.KindPing,
	}
)

// read takes frames in until the stream ends.
func (c *conn) read(use bookiewire.Use) error {
	var r *bookiewire.Reader
	if use == bookiewire.UseAdds {
		r = c.s.slabs.NewReader(c.nc)
		r.Kinds = addKinds
	} else {
		r = bookiewire.NewReader(c.nc, requestSlab)
		r.Kinds = requestKinds
	}
	r.Begun = c.begun
	defer func() { c.s.frames.Release(c.large) }()
	for {
		f, err := r.Next()
		if err == nil && c.partial {
			err = c.complete()
		}
		if err != nil {
			return err
		}
		switch {
		case f.Kind == bookiewire.KindPing:
			if err = f.Empty(); err == nil {
				err = c.begin()
			}
			if err == nil {
				seq := f.Seq
				c.reply(reply{encode: func(e *bookiewire.Encoder) { e.Pong(seq) }})
			}
		case use == bookiewire.UseAdds:
			err = c.add(f)
		default:
			err = c.request(f)
		}
		if err != nil {
			return err
		}
		c.s.frames.Release(c.large) // the frame is charged to somebody else now
		c.large = 0
	}
}

// begun gives a frame that has begun to come a time to be complete, and charges one that needs memory of its own.
func (c *conn) begun(own int) error {
	if own > 0 {
		if err := c.s.frames.Acquire(c.ctx, int64(own)); err != nil {
			return err
		}
		c.large = int64(own)
	}
	c.partial = true
	return c.setReadDeadline(time.Now().Add(c.s.cfg.FrameTimeout))
}

// complete ends what begun began.
func (c *conn) complete() error {
	c.partial = false
	return c.setReadDeadline(time.Time{})
}

// setReadDeadline sets one, unless the reading has been stopped by one already.
func (c *conn) setReadDeadline(at time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return nil
	}
	return c.nc.SetReadDeadline(at)
}

// add hands an entry to the store, once there is room in the budget.
func (c *conn) add(f bookiewire.Frame) error {
	x, _ := c.s.pool.Get().(*pendingAdd)
	if err := f.Add(&x.Add.Add); err != nil {
		return err
	}
	x.size = int64(len(x.Body)) + addOverhead
	if err := c.s.adds.Acquire(c.ctx, x.size); err != nil {
		return err
	}
	if err := c.begin(); err != nil {
		c.s.adds.Release(x.size)
		return err
	}
	x.c, x.seq = c, f.Seq
	x.bytes = f.Retain()
	c.s.admitted.Take(&x.Arrival)
	return nil
}

// Own gives an add that will wait for long bytes of its own: in place, its few would hold a whole slab, which is more
// than it is charged for.
func (x *pendingAdd) Own() {
	if x.bytes == (bookiewire.Retained{}) || len(x.Body) > addSlab/2 {
		return
	}
	x.Body = bytes.Clone(x.Body)
	x.bytes.Release()
	x.bytes = bookiewire.Retained{}
}

// begin counts something in flight. It waits while too many answers are untold.
func (c *conn) begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for (len(c.failures) >= maxUntold || len(c.acks) >= maxUntold) && !c.broken {
		c.changed.Wait()
	}
	if c.broken {
		return net.ErrClosed
	}
	c.inFlight++
	return nil
}

// Answer marks the answer and gives everything back.
func (x *pendingAdd) Answer(answer *bookiewire.Error) {
	c, seq := x.c, x.seq
	now := time.Now()
	c.s.metrics.added(answer, len(x.Body), now.Sub(x.started))
	if answer == nil {
		c.s.stored.Store(int64(now.Sub(c.s.born)))
	}
	x.bytes.Release()
	c.s.adds.Release(x.size)
	*x = pendingAdd{Arrival: Arrival{For: x, done: x.done}}
	c.s.pool.Put(x)

	c.mu.Lock()
	switch {
	case c.broken:
	case answer != nil:
		c.failures = append(c.failures, failure{seq, answer})
	case len(c.acks) > 0 && c.acks[len(c.acks)-1].last+1 == seq:
		c.acks[len(c.acks)-1].last = seq
	default:
		c.acks = append(c.acks, ackRange{seq, seq})
	}
	c.end()
	c.mu.Unlock()
	c.wakeWriter()
}

// end counts something that is answered. c.mu is held.
func (c *conn) end() {
	c.inFlight--
	if c.inFlight < 0 {
		panic("bookie: answered twice")
	}
	if c.inFlight == 0 {
		c.changed.Broadcast()
	}
}

// reply marks a request's answer, which ends its being in flight.
func (c *conn) reply(r reply) {
	c.mu.Lock()
	dropped := c.broken
	if !dropped {
		c.replies = append(c.replies, r)
	}
	c.end()
	c.mu.Unlock()
	if dropped && r.release != nil {
		r.release()
	}
	c.wakeWriter()
}

func (c *conn) wakeWriter() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// write sends what is marked until nothing more can come, or can be sent.
func (c *conn) write() {
	var e bookiewire.Encoder
	var acks []ackRange
	var failures []failure
	var replies []reply
	for {
		c.mu.Lock()
		acks, c.acks = c.acks, acks[:0]
		failures, c.failures = c.failures, failures[:0]
		replies, c.replies = c.replies, replies[:0]
		nothing := len(acks) == 0 && len(failures) == 0 && len(replies) == 0
		over := c.broken || c.readDone && c.inFlight == 0 && nothing
		if len(failures) > 0 || len(acks) > 0 {
			c.changed.Broadcast()
		}
		broken := c.broken
		c.mu.Unlock()
		if !broken && !nothing {
			for _, r := range acks {
				e.AddAck(r.first, r.last)
			}
			for _, f := range failures {
				e.Failed(f.seq, f.err)
			}
			for _, r := range replies {
				r.encode(&e)
			}
			err := c.nc.SetWriteDeadline(time.Now().Add(c.s.cfg.WriteTimeout))
			if err == nil {
				_, err = e.WriteTo(c.nc)
			}
			if err != nil {
				e.Reset()
				if errors.Is(err, os.ErrDeadlineExceeded) {
					c.s.metrics.slowPeers.Inc()
					c.s.tell(slog.LevelWarn, "peer does not read its answers", slog.String("peer", c.nc.RemoteAddr().String()))
				}
				c.kill()
			}
		}
		for _, r := range replies {
			if r.release != nil {
				r.release()
			}
		}
		clear(failures)
		clear(replies)
		if over {
			return
		}
		if nothing {
			<-c.wake
		}
	}
}

// drain stops the reading; what was read is still answered.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.draining = true
	_ = c.nc.SetReadDeadline(time.Now())
}

// kill breaks the connection.
func (c *conn) kill() {
	c.mu.Lock()
	c.broken = true
	c.changed.Broadcast()
	c.mu.Unlock()
	c.cancel()
	_ = c.nc.Close()
	c.wakeWriter()
}
