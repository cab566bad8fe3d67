package client

import (
	"context"
	"errors"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// Client is a connection to a cluster. It is safe for concurrent use; one per process is enough.
//
// A client holds at most one connection per broker, shared by all its producers and consumers, and finds topics
// by asking any broker it knows: those of the URL and every owner it has met. It reads no metadata store:
// brokers answer from their caches, and an epoch beside each answer tells old news from new.
type Client struct {
	cfg  clientConfig
	life context.Context // ends with Close
	end  context.CancelFunc
	wg   sync.WaitGroup // every goroutine of the client
	pool *pool
	dir  directory

	mu     sync.Mutex
	open   map[closer]struct{} // producers, consumers, readers
	closed bool
	met    time.Time // when the list of brokers was asked for
}

const meetEvery = 30 * time.Second

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
	c.dir.brokers = urls
	return c, nil
}

// Close closes every producer, consumer and reader, waiting until what was published is answered and what was
// acknowledged is durable, bounded by ctx; then it drops the connections. It returns once every goroutine of
// the client is gone, with the first error met.
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

// meetBrokers asks for the list of live brokers in the background, now and then, so that a client that was
// given one URL survives the loss of that broker.
func (c *Client) meetBrokers() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || time.Since(c.met) < meetEvery {
		return
	}
	c.met = time.Now()
	c.wg.Go(func() {
		r, err := askAny(c.life, c, "list brokers", "", "", func(ctx context.Context, conn *conn) (*brokerv1.ListBrokersResponse, error) {
			return brokerv1.NewAdminClient(conn.cc).ListBrokers(ctx, &brokerv1.ListBrokersRequest{})
		})
		if err != nil {
			c.cfg.log.DebugContext(c.life, "list of brokers not known", "error", err)
			return
		}
		for _, b := range r.GetBrokers() {
			if _, err := brokerAddr(b.GetUrl()); err == nil {
				c.dir.learn(owner{url: b.GetUrl()})
			}
		}
	})
}

func (c *Client) forget(o closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, o)
}
