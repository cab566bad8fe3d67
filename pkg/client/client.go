package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Client is a connection to a cluster. It is safe for concurrent use; one per process is enough.
//
// A client holds at most one connection per broker, shared by all its producers and consumers, and finds topics
// by asking any broker it knows: those of the URL, always, and the live ones that the latest lookup named. While
// it has a stream open it looks its topic up every few seconds, so it outlives the brokers it was given. It reads
// no metadata store: brokers answer from their caches, and an epoch beside each answer tells old news from new.
type Client struct {
	cfg  clientConfig
	life context.Context // ends with Close
	end  context.CancelFunc
	wg   sync.WaitGroup // every goroutine of the client
	pool *pool
	dir  directory
	// finds and searches are look-ups of owners, and of newer ones than those, that many streams wait for.
	finds, searches shared[owner, owner]

	mu     sync.Mutex
	open   map[closer]struct{} // producers, consumers, readers
	closed bool
}

// closePatience is how long a Close whose context has no deadline waits for answers that do not come.
const closePatience = 10 * time.Second

type closer interface {
	Close(ctx context.Context) error
}

// Connect makes a client of the cluster that url names: penstock://host:port, with more brokers after commas.
// It connects when first used, so it works while the cluster is down; each call's context bounds how long that
// call waits for the cluster. The error is of type [*Error].
func Connect(ctx context.Context, url string, opts ...Option) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, timeoutError("connect", "", causeOf(ctx))
	}
	urls, err := bootstrapURLs(url)
	if err != nil {
		return nil, &Error{Code: CodeInvalid, Op: "connect", Err: err}
	}
	cfg := defaultClientConfig()
	for _, o := range opts {
		o(&cfg)
	}
	// The client outlives the call that makes it.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	c := &Client{cfg: cfg, life: life, end: end, open: make(map[closer]struct{})}
	c.pool = newPool(life, cfg, &c.wg)
	c.pool.find = c.findOwner
	c.dir.bootstrap = urls
	return c, nil
}

// Close closes every producer, consumer and reader, waiting until what was published is answered and what was
// acknowledged is durable, bounded by ctx; then it drops the connections. Where ctx has no deadline it gives up
// when nothing was answered for 10 s. It returns once every goroutine of the client is gone, with what its
// producers' and consumers' Close returned, joined.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closed = true
	open := make([]closer, 0, len(c.open))
	for o := range c.open {
		open = append(open, o)
	}
	c.mu.Unlock()
	errs := make([]error, len(open))
	var wg sync.WaitGroup
	for i, o := range open {
		wg.Go(func() { errs[i] = o.Close(ctx) })
	}
	wg.Wait()
	c.end()
	c.pool.close()
	c.wg.Wait()
	return errors.Join(errs...)
}

// register keeps what Close must close, and starts its goroutines, for which Close waits. It reports false when
// the client is closed already.
func (c *Client) register(o closer, runs []func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.open[o] = struct{}{}
	for _, run := range runs {
		c.wg.Go(run)
	}
	return true
}

// patient returns a context for a Close: ctx itself where it has a deadline, otherwise one that ends when progress
// stands still for closePatience.
func patient(ctx context.Context, progress func() int64) (context.Context, context.CancelFunc) {
	if _, bounded := ctx.Deadline(); bounded || ctx.Done() != nil && ctx.Err() != nil {
		return context.WithCancel(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var mu sync.Mutex
	last, ended := progress(), false
	var timer *time.Timer
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(closePatience, func() {
		mu.Lock()
		defer mu.Unlock()
		switch now := progress(); {
		case ended:
		case now == last:
			cancel(errNoProgress)
		default:
			last = now
			timer.Reset(closePatience)
		}
	})
	return ctx, func() {
		mu.Lock()
		ended = true
		timer.Stop()
		mu.Unlock()
		cancel(context.Canceled)
	}
}

var errNoProgress = fmt.Errorf("nothing was answered for %v", closePatience)

func (c *Client) forget(o closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, o)
}
