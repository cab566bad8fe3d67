package bookieclient

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Resolver tells where the bookie with an identity listens for data ("host:port"), as far as is known now. It must
// not block, and is asked at each attempt to connect.
type Resolver func(entry.StorageUUID) (addr string, ok bool)

// Config configures a [Client]. Zero values become the defaults.
type Config struct {
	// Cluster is the cluster's UUID; a bookie of another one is not talked to.
	Cluster entry.UUID
	// MaxPending is the limit of bytes of adds per bookie that are not answered, beyond which Add answers
	// Overloaded. Default 64 MiB.
	MaxPending int64
	// MaxRequests is the limit of other requests per bookie that are not answered. Default 4096.
	MaxRequests int
	// DialTimeout bounds connecting, HandshakeTimeout the hello and welcome after it. Defaults 2 s and 5 s.
	DialTimeout, HandshakeTimeout time.Duration
	// RequestTimeout is how long an answer may take (a WaitLAC: beyond its own timeout). A late add breaks the
	// connection, another late request fails alone. Default 10 s.
	RequestTimeout time.Duration
	// PingInterval is after how much silence a ping is sent while answers are awaited, SilenceTimeout after how
	// much the connection is given up. Defaults 1 s and 5 s.
	PingInterval, SilenceTimeout time.Duration
	// BackoffMin and BackoffMax bound the pause after a failed attempt to connect, within which requests fail at
	// once. Defaults 20 ms and 1 s.
	BackoffMin, BackoffMax time.Duration
	// Dial connects; default is TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// WithDefaults fills in what is zero.
func (c Config) WithDefaults() Config {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&c.DialTimeout, 2*time.Second)
	set(&c.HandshakeTimeout, 5*time.Second)
	set(&c.RequestTimeout, 10*time.Second)
	set(&c.PingInterval, time.Second)
	set(&c.SilenceTimeout, 5*time.Second)
	set(&c.BackoffMin, 20*time.Millisecond)
	set(&c.BackoffMax, time.Second)
	if c.MaxPending == 0 {
		c.MaxPending = 64 << 20
	}
	if c.MaxRequests == 0 {
		c.MaxRequests = 4096
	}
	if c.Dial == nil {
		c.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	return c
}

// Client carries requests to bookies. Per bookie it has three links, each with at most one connection: one for adds, one
// for the fences and reads of recoveries, one for everything else, so that the bytes of a long read never stand before an
// acknowledgement, and what readers have asked for never before the next owner of a topic. A link
// connects when there is something to send, and never by itself: a bookie that is down costs nothing until
// somebody wants it, and then an error at once while the pause after the last failure lasts.
//
// A link has one goroutine that connects, encodes whatever was queued since its last write into one writev, and
// on loss fails what is pending; and, while connected, one that reads answers and calls done. Nothing is resent:
// whether an add may be sent again, and where, only the ledger's writer can tell.
//
// A pool of connections per bookie was rejected: one connection keeps the adds of a ledger in order, which the
// cumulative acknowledgement rests on.
type Client struct {
	cfg     Config
	resolve Resolver
	log     *slog.Logger
	metrics *metrics

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.RWMutex
	closed bool
	peers  map[entry.StorageUUID]*peer

	refusals refusals
}

type peer struct {
	adds                 *adds
	requests, recoveries *requests
}

// New returns a Client that is connected to nobody yet. registerer may be nil.
func New(cfg Config, resolve Resolver, log *slog.Logger, registerer prometheus.Registerer) *Client {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{
		cfg:     cfg.WithDefaults(),
		resolve: resolve,
		log:     log,
		metrics: newMetrics(registerer),
		ctx:     ctx,
		cancel:  cancel,
		peers:   make(map[entry.StorageUUID]*peer),
	}
	c.refusals.wake, c.refusals.late = make(chan struct{}, 1), sched.NewGroup(sched.Real)
	c.wg.Go(func() { c.refusals.run(ctx) })
	return c
}

// Close fails everything pending with Disconnected and waits until each done has returned. Requests made later
// are answered with Disconnected, too.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.wg.Wait()
	c.refusals.late.Wait()
}

// Add stores an entry. It never blocks. done is called once, from another goroutine, and must not block; a.Body must
// not change before.
func (c *Client) Add(to entry.StorageUUID, a *bookiewire.Add, done func(error)) {
	p, err := c.peer(to)
	if err == nil && len(a.Body) > bookiewire.MaxBody {
		err = &bookiewire.Error{Code: bookiewire.BadRequest, Detail: "body over the limit"}
	}
	if err == nil {
		err = p.adds.submit(a, done)
	}
	if err != nil {
		c.refusals.add(func() { done(err) })
	}
}

// Read reads entries. When ctx ends first, done hears Disconnected. The bodies are the caller's.
func (c *Client) Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error)) {
	c.request(ctx, to, &request{
		recovery: r.Recovery,

		encode: func(e *bookiewire.Encoder, id uint64) { e.Read(id, r) },
		decode: func(f bookiewire.Frame) (any, error) { return f.Own().ReadReply() },
		finish: func(reply any, err error) {
			rr, _ := reply.(bookiewire.ReadReply)
			done(rr, err)
		},
	})
}

// Fence raises a ledger's term. When ctx ends first, done hears Disconnected.
func (c *Client) Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
	c.request(ctx, to, &request{
		recovery: true,

		encode: func(e *bookiewire.Encoder, id uint64) { e.Fence(id, r) },
		decode: func(f bookiewire.Frame) (any, error) { return f.FenceReply() },
		finish: func(reply any, err error) {
			fr, _ := reply.(bookiewire.FenceReply)
			done(fr, err)
		},
	})
}

// WriteLAC makes a LAC known.
func (c *Client) WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error {
	answer := make(chan error, 1)
	c.request(ctx, to, &request{
		encode: func(e *bookiewire.Encoder, id uint64) { e.WriteLAC(id, r) },
		decode: func(f bookiewire.Frame) (any, error) { return nil, expect(f, bookiewire.KindWriteLACReply) },
		finish: func(_ any, err error) { answer <- err },
	})
	return <-answer
}

// WaitLAC waits for a LAC above r.After, or r.Timeout.
func (c *Client) WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	type result struct {
		reply bookiewire.WaitLACReply
		err   error
	}
	answer := make(chan result, 1)
	c.request(ctx, to, &request{
		extra:  r.Timeout,
		encode: func(e *bookiewire.Encoder, id uint64) { e.WaitLAC(id, r) },
		decode: func(f bookiewire.Frame) (any, error) { return f.WaitLACReply() },
		finish: func(reply any, err error) {
			wr, _ := reply.(bookiewire.WaitLACReply)
			answer <- result{wr, err}
		},
	})
	a := <-answer
	return a.reply, a.err
}

func (c *Client) request(ctx context.Context, to entry.StorageUUID, r *request) {
	p, err := c.peer(to)
	switch {
	case err != nil:
	case r.recovery:
		err = p.recoveries.submit(ctx, r)
	default:
		err = p.requests.submit(ctx, r)
	}
	if err != nil {
		c.refusals.add(func() { r.finish(nil, err) })
	}
}

// peer returns the links to a bookie, new ones if there are none. The error is untyped nil or a *bookiewire.Error.
func (c *Client) peer(to entry.StorageUUID) (*peer, error) {
	c.mu.RLock()
	p, closed := c.peers[to], c.closed
	c.mu.RUnlock()
	if closed {
		return nil, disconnected("client is closed")
	}
	if p != nil {
		return p, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, disconnected("client is closed")
	}
	if p := c.peers[to]; p != nil {
		return p, nil
	}
	p = &peer{adds: newAdds(c), requests: newRequests(c), recoveries: newRequests(c)}
	c.peers[to] = p
	requests, recoveries := newLink(c, to, p.requests, p.requests.wake), newLink(c, to, p.recoveries, p.recoveries.wake)
	adds := newLink(c, to, p.adds, p.adds.wake)
	adds.use = bookiewire.UseAdds
	p.requests.link, p.recoveries.link = &requests.state, &recoveries.state
	for _, l := range []*link{adds, requests, recoveries} {
		c.wg.Go(func() { l.run(c.ctx) })
	}
	return p, nil
}

// refusals calls the done of requests that never reached a link, on a goroutine of its own: done is never
// called from within the request.
type refusals struct {
	wake chan struct{}
	late *sched.Group // not a sync.WaitGroup: requests may come while Close waits

	mu    sync.Mutex
	queue []func()
	over  bool
}

func (r *refusals) add(call func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		r.late.Go(call)
		return
	}
	r.queue = append(r.queue, call)
	wake(r.wake)
}

func (r *refusals) run(ctx context.Context) {
	for {
		r.mu.Lock()
		queue := r.queue
		r.queue = nil
		r.over = len(queue) == 0 && ctx.Err() != nil
		over := r.over
		r.mu.Unlock()
		for _, call := range queue {
			call()
		}
		if over {
			return
		}
		if len(queue) > 0 {
			continue
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
		}
	}
}

// wake makes sure that whoever receives from c, with room for one, looks again.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
