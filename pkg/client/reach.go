package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// What the runners of producers and consumers share: how to reach an owner, and how to notice that it is none
// any more.

const (
	openTimeout  = 10 * time.Second       // for the answer to an open: the owner may have to recover the topic
	suspectAfter = 300 * time.Millisecond // of silence where an answer is due
	freeHops     = 3                      // redirects followed without a pause
)

// errNotReady ends the wait for an answer to an open.
var errNotReady = errors.New("no answer in time")

func (o owner) wire() *brokerv1.Moved {
	return &brokerv1.Moved{BrokerUrl: o.url, Bundle: o.bundle, Epoch: o.epoch}
}

// awaitOpen runs handshake, and gives it up when it takes too long or when its broker turns out to be replaced;
// then it returns the newer owner.
func awaitOpen(ctx context.Context, cancel context.CancelFunc, c *Client, topic string, o owner, handshake func() error) (owner, error) {
	var newer owner
	var late bool
	watch, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		if !pause(watch, suspectAfter) {
			return
		}
		limit, end := context.WithTimeout(watch, openTimeout)
		defer end()
		n, ok := c.suspect(limit, topic, o)
		if watch.Err() == nil {
			newer, late = n, !ok
			cancel()
		}
	})
	err := handshake()
	stop()
	wg.Wait()
	switch {
	case err == nil && (newer.url != "" || late):
		err = errNotReady // given up at the last moment
	case err != nil && late:
		err = &Error{Code: CodeUnavailable, Op: "open", Topic: topic, Broker: o.url, Retryable: true, Err: errNotReady}
	}
	return newer, err
}

// sendError returns why a send failed: gRPC says only io.EOF, and gives the reason to a receive.
func sendError(stream grpc.ClientStream, resp any, err error) error {
	if e := stream.RecvMsg(resp); e != nil {
		return e
	}
	return err
}

// pace spaces the attempts of one runner.
type pace struct {
	c     *Client
	topic string
	b     backoff
	hops  int
}

func newPace(c *Client, topic string) pace { return pace{c: c, topic: topic, b: newBackoff()} }

// fresh begins anew, after a stream that was of use.
func (p *pace) fresh() {
	p.b.reset()
	p.hops = 0
}

// next pauses before the attempt that follows an error of tried, but not after a stream that had lasted, nor before
// following a redirect, unless redirects go in a circle. If tried is gone, or not the owner any more, the pause is spent on
// asking for the next one, and ends when there is one. It returns whom to try, if that is known.
func (p *pace) next(ctx context.Context, e *Error, lasted bool, tried owner) owner {
	hint := p.c.follow(e.moved)
	if lasted {
		p.fresh()
		return hint
	}
	if hint.url != "" && p.hops < freeHops {
		p.hops++
		return hint
	}
	ctx, cancel := context.WithTimeout(ctx, p.b.next())
	defer cancel()
	if hint.url == "" && tried.url != "" && p.hops < freeHops && (e.Code == CodeUnavailable || e.Code == CodeNotOwner) {
		if next, ok := p.c.suspect(ctx, p.topic, tried); ok {
			p.hops++
			return next
		}
	}
	<-ctx.Done()
	p.hops = 0
	return hint
}

// suspicion looks for a newer owner while the present one owes an answer for too long.
type suspicion struct {
	c     *Client
	ctx   context.Context // the stream's
	wg    *sync.WaitGroup
	topic string
	owner owner
	newer chan owner // capacity 1
	stop  context.CancelFunc
}

func newSuspicion(ctx context.Context, c *Client, wg *sync.WaitGroup, topic string, o owner) *suspicion {
	return &suspicion{c: c, ctx: ctx, wg: wg, topic: topic, owner: o, newer: make(chan owner, 1)}
}

// since says from when on an answer is due; zero: none is. It returns when to ask again.
func (s *suspicion) since(due, now time.Time) time.Time {
	at := due.Add(suspectAfter)
	silent := !due.IsZero() && !now.Before(at)
	switch {
	case silent && s.stop == nil:
		ctx, stop := context.WithCancel(s.ctx)
		s.stop = stop
		s.wg.Go(func() {
			defer stop()
			if n, ok := s.c.suspect(ctx, s.topic, s.owner); ok {
				select {
				case s.newer <- n:
				default:
				}
			}
		})
	case !silent && s.stop != nil:
		s.stop()
		s.stop = nil
	}
	if due.IsZero() || silent {
		return time.Time{}
	}
	return at
}

// unblocker looks for a newer owner while a send is stuck, because the connection takes no more: the stream's runner,
// which waits in that send, cannot. It ends the stream if there is one.
type unblocker struct {
	s     *suspicion
	timer *time.Timer
	stuck chan context.Context

	mu      sync.Mutex
	sending bool
	stop    context.CancelFunc // of the search under way
}

func newUnblocker(s *suspicion, end func()) *unblocker {
	u := &unblocker{s: s, stuck: make(chan context.Context, 1)}
	u.timer = time.AfterFunc(time.Hour, u.expired)
	u.timer.Stop()
	s.wg.Go(func() {
		for {
			select {
			case ctx := <-u.stuck:
				if n, ok := s.c.suspect(ctx, s.topic, s.owner); ok {
					select {
					case s.newer <- n:
					default:
					}
					end()
				}
			case <-s.ctx.Done():
				return
			}
		}
	})
	return u
}

func (u *unblocker) expired() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.sending || u.stop != nil {
		return
	}
	ctx, stop := context.WithCancel(u.s.ctx)
	select {
	case u.stuck <- ctx:
		u.stop = stop
	default: // the search before has yet to end
		stop()
	}
}

// begin is called before something is sent, done once it is.
func (u *unblocker) begin() {
	u.mu.Lock()
	u.sending = true
	u.mu.Unlock()
	u.timer.Reset(suspectAfter)
}

func (u *unblocker) done() {
	u.timer.Stop()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.sending = false
	if u.stop != nil {
		u.stop()
		u.stop = nil
	}
}
