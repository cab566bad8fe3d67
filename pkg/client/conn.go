package client

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	gbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// DefaultPort is the port of a broker whose URL names none.
const DefaultPort = "7650"

// maxReceive bounds one message from a broker in bytes: a delivery of several entries.
const maxReceive = 64 << 20

// brokerAddr returns the host:port of a broker's URL: penstock://host[:port], or the bare pair.
func brokerAddr(url string) (string, error) {
	rest := url
	if scheme, r, ok := strings.Cut(url, "://"); ok {
		if scheme != "penstock" {
			return "", fmt.Errorf("parse broker URL %q: scheme %q, want penstock", url, scheme)
		}
		rest = r
	}
	rest = strings.TrimSuffix(rest, "/")
	if rest == "" || strings.ContainsAny(rest, "/@?# ") {
		return "", fmt.Errorf("parse broker URL %q: want penstock://host:port", url)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		host, port = strings.Trim(rest, "[]"), DefaultPort
	}
	if host == "" {
		return "", fmt.Errorf("parse broker URL %q: no host", url)
	}
	if port == "" {
		port = DefaultPort
	}
	return net.JoinHostPort(host, port), nil
}

// bootstrapURLs splits a list of brokers: penstock://a:7650,b:7650 or full URLs, with commas between.
func bootstrapURLs(list string) ([]string, error) {
	var urls []string
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		addr, err := brokerAddr(part)
		if err != nil {
			return nil, err
		}
		urls = append(urls, "penstock://"+addr)
	}
	if len(urls) == 0 {
		return nil, fmt.Errorf("parse broker URL %q: no broker named", list)
	}
	return urls, nil
}

// pool holds one connection per broker, shared by everything that the client does there.
type pool struct {
	cfg  clientConfig
	life context.Context // the client's
	wg   *sync.WaitGroup
	find func(ctx context.Context, topic, avoid string) (owner, error)

	mu     sync.Mutex
	conns  map[string]*conn // by address
	closed bool
}

// conn is a connection to one broker. While streams use it and nothing is heard, a watch asks the broker for a
// sign of life; without one the connection is given up, which ends every stream on it at once.
type conn struct {
	url, addr string
	pool      *pool
	cc        *grpc.ClientConn
	pubsub    brokerv1.PubSubClient
	lookup    brokerv1.LookupClient
	gate      gate // of streams that are to be opened

	heard atomic.Int64 // Unix nanoseconds of the last sign of life
	asked time.Time    // when the connection was last asked for; guarded by the pool's lock

	mu     sync.Mutex
	topics map[*use]struct{}
	watch  context.CancelFunc
}

// use is one stream's hold on a connection.
type use struct {
	topic string
	end   context.CancelFunc // breaks the stream
}

func newPool(life context.Context, cfg clientConfig, wg *sync.WaitGroup) *pool {
	return &pool{cfg: cfg, life: life, wg: wg, conns: make(map[string]*conn)}
}

// get returns the connection to a broker, making it if there is none. It does not wait for it to be up.
func (p *pool) get(url string) (*conn, error) {
	addr, err := brokerAddr(url)
	if err != nil {
		return nil, &Error{Code: CodeInvalid, Op: "connect", Broker: url, Err: err}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, closedError("connect", "")
	}
	now := time.Now()
	p.sweep(now)
	if c, ok := p.conns[addr]; ok {
		c.asked = now
		return c, nil
	}
	cc, err := grpc.NewClient("passthrough:///"+addr, p.dialOptions()...)
	if err != nil {
		return nil, &Error{Code: CodeInvalid, Op: "connect", Broker: url, Err: err}
	}
	c := &conn{
		url: url, addr: addr, pool: p, cc: cc, topics: make(map[*use]struct{}), asked: now,
		pubsub: brokerv1.NewPubSubClient(cc), lookup: brokerv1.NewLookupClient(cc),
	}
	p.conns[addr] = c
	return c, nil
}

// unusedAfter is how long a connection is kept that carries no stream and that nobody asks for. Brokers that are gone
// for good would be dialled for ever otherwise.
const unusedAfter = time.Minute

// sweep closes connections that are of no use. The lock is held.
func (p *pool) sweep(now time.Time) {
	for addr, c := range p.conns {
		if now.Sub(c.asked) > unusedAfter && c.anyUse() == nil {
			delete(p.conns, addr)
			_ = c.cc.Close()
		}
	}
}

func (p *pool) dialOptions() []grpc.DialOption {
	transport := insecure.NewCredentials()
	if p.cfg.tls != nil {
		transport = credentials.NewTLS(p.cfg.tls)
	}
	dial := p.cfg.dial
	if dial == nil {
		d := net.Dialer{
			Timeout:         3 * time.Second,
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3},
		}
		dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
	return []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithContextDialer(dial),
		grpc.WithUserAgent(p.cfg.info),
		// A broker that comes back is to be found again in tens of milliseconds, not after gRPC's minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           gbackoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.25, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: 3 * time.Second,
		}),
		// A connection that takes data and brings no acknowledgement is dead after this Timeout: gRPC hands it to TCP.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
		grpc.WithInitialWindowSize(4 << 20),
		grpc.WithInitialConnWindowSize(16 << 20),
		grpc.WithReadBufferSize(128 << 10),
		grpc.WithWriteBufferSize(128 << 10),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceive)),
		grpc.WithDisableServiceConfig(),
	}
}

// drop closes a connection and forgets it; the next get makes a new one.
func (p *pool) drop(c *conn) {
	p.mu.Lock()
	if p.conns[c.addr] == c {
		delete(p.conns, c.addr)
	}
	p.mu.Unlock()
	for _, u := range c.allUses() { // gRPC would keep them for seconds, to say goodbye on a connection that is dead
		u.end()
	}
	_ = c.cc.Close()
}

func (p *pool) close() {
	p.mu.Lock()
	conns := p.conns
	p.conns, p.closed = nil, true
	p.mu.Unlock()
	for _, c := range conns {
		_ = c.cc.Close()
	}
}

// replacedEvery is the number of liveness intervals, about, between two questions to another broker.
const replacedEvery = 10

// endIfReplaced breaks a stream whose topic another broker serves under a newer epoch, and reports whether it
// did: the stream's runner then looks its topic up again.
func (c *conn) endIfReplaced(ctx context.Context, u *use) bool {
	o, err := c.pool.find(ctx, u.topic, c.url)
	if err != nil {
		return false
	}
	addr, err := brokerAddr(o.url)
	if err != nil || addr == c.addr {
		return false
	}
	c.pool.cfg.log.InfoContext(ctx, "topic is served elsewhere, stream ended", "topic", u.topic, "broker", c.url, "owner", o.url)
	u.end()
	return true
}

// hear notes a sign of life.
func (c *conn) hear() { c.heard.Store(sched.Real.Now().UnixNano()) }

// hold registers a stream of topic; release ends that.
func (c *conn) hold(topic string, end context.CancelFunc) *use {
	u := &use{topic: topic, end: end}
	c.hear()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.topics[u] = struct{}{}
	if c.watch == nil && c.pool.life.Err() == nil {
		ctx, cancel := context.WithCancel(c.pool.life)
		c.watch = cancel
		c.pool.wg.Go(func() { c.watchLife(ctx) })
	}
	return u
}

func (c *conn) release(u *use) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.topics, u)
	if len(c.topics) == 0 && c.watch != nil {
		c.watch()
		c.watch = nil
	}
}

func (c *conn) anyUse() *use {
	c.mu.Lock()
	defer c.mu.Unlock()
	for u := range c.topics {
		return u
	}
	return nil
}

func (c *conn) allUses() []*use {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.topics))
}

// watchLife probes a silent connection. TCP's own keepalive finds a vanished machine, not a stopped process.
//
// Now and then it asks another broker about a stream's topic as well: an owner that is cut off from the
// metadata store may go on in good faith, and a consumer with nothing to receive would stay with it for ever.
func (c *conn) watchLife(ctx context.Context) {
	silence := c.pool.cfg.probe
	for tick, wait := 1, silence; pause(ctx, wait); tick++ {
		if tick%replacedEvery == 0 {
			c.endReplaced(ctx)
		}
		if wait = silence - c.silent(); wait > 0 {
			continue
		}
		wait = silence
		u := c.anyUse()
		if u == nil {
			continue
		}
		err := c.probe(ctx, u)
		if ctx.Err() != nil {
			return
		}
		if code := status.Code(err); code != codes.DeadlineExceeded && code != codes.Unavailable {
			c.hear()
			continue
		}
		c.pool.cfg.log.WarnContext(ctx, "broker gives no sign of life, connection dropped", "broker", c.url, "error", err)
		c.pool.drop(c)
		return
	}
}

// silent returns for how long nothing was heard.
func (c *conn) silent() time.Duration {
	return time.Duration(sched.Real.Now().UnixNano() - c.heard.Load())
}

// endReplaced breaks the streams whose topics are served elsewhere, if one is.
func (c *conn) endReplaced(ctx context.Context) {
	if u := c.anyUse(); u == nil || !c.endIfReplaced(ctx, u) {
		return
	}
	for _, u := range c.allUses() {
		c.endIfReplaced(ctx, u)
	}
}

// probe asks the broker for a sign of life: a lookup of a topic that is served there is answered from memory, and any answer will
// do, an error too. While there is none, a stream whose topic is taken over is ended, as a producer that waits for an answer would
// see to: a consumer with nothing to receive waits for none.
func (c *conn) probe(ctx context.Context, u *use) error {
	ctx, cancel := context.WithTimeout(ctx, c.pool.cfg.answer)
	answered := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		_, err := c.lookup.LookupTopic(ctx, &brokerv1.LookupTopicRequest{Topic: u.topic})
		answered <- err
	})
	again := time.NewTicker(suspectAfter)
	defer again.Stop()
	for {
		select {
		case err := <-answered:
			return err
		case <-again.C:
			c.endReplaced(ctx)
		}
	}
}

// heardSince tells whether the broker gave a sign of life after t.
func (c *conn) heardSince(t time.Time) bool { return c.heard.Load() > t.UnixNano() }
