// Package brokertest gives tests a real cluster in their own process: etcd, bookies, brokers, over loopback and in a
// temporary directory. It is for users' tests of their own programs, and for Penstock's.
//
//	func TestOrders(t *testing.T) {
//		cluster := brokertest.Start(t)
//		c, err := client.Connect(t.Context(), cluster.URL())
//		…
//	}
//
// A cluster is ready in well under a second and is gone when the test ends. Any number may run at once.
package brokertest

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/standalone"
)

const (
	// patience bounds what brings a cluster up or takes it down: far above what it takes, since machines may be busy.
	patience = 2 * time.Minute
	// leaseTTL is longer than a busy machine may keep a renewal waiting. Whoever is stopped or killed here gives its lease up.
	leaseTTL = 20 * time.Second
)

// Option changes a [Cluster].
type Option func(*config)

type config struct {
	standalone.Config
	log *slog.Logger
}

// WithBookies sets the number of bookies; 1 by default, which keeps one copy. Three keep three.
func WithBookies(n int) Option { return func(c *config) { c.Bookies = n } }

// WithBrokers sets the number of brokers; 1 by default.
func WithBrokers(n int) Option { return func(c *config) { c.Brokers = n } }

// WithBrokerConfig sets how brokers behave.
func WithBrokerConfig(b broker.Config) Option { return func(c *config) { c.Broker = b } }

// WithLog sends the cluster's log to w.
func WithLog(w io.Writer, level slog.Level) Option {
	return func(c *config) { c.log = slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})) }
}

// Cluster is a running cluster.
type Cluster struct {
	t  testing.TB
	sa *standalone.Cluster
}

// Start brings a cluster up, and takes it down when the test ends. It fails the test if that is not possible.
func Start(tb testing.TB, options ...Option) *Cluster {
	tb.Helper()
	cfg := config{
		Config: standalone.Config{Dir: tb.TempDir(), LeaseTTL: leaseTTL, Version: "test", SegmentSize: 8 << 20, UnsafeNoFsync: true},
		log:    slog.New(slog.DiscardHandler),
	}
	for _, o := range options {
		o(&cfg)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience) //nolint:usetesting // the cluster outlives t.Context in Cleanup
	defer cancel()
	sa, err := standalone.Start(ctx, cfg.Config, cfg.log)
	if err != nil {
		tb.Fatalf("start cluster: %v", err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience) //nolint:usetesting // t.Context has ended
		defer cancel()
		if err := sa.Close(ctx); err != nil {
			tb.Errorf("close cluster: %v", err)
		}
	})
	return &Cluster{t: tb, sa: sa}
}

// URL is how clients reach the cluster: all its brokers.
func (c *Cluster) URL() string {
	var hosts []string
	for _, n := range c.sa.Brokers() {
		hosts = append(hosts, strings.TrimPrefix(n.URL(), broker.URLScheme))
	}
	return broker.URLScheme + strings.Join(hosts, ",")
}

// BrokerURLs are the URLs of all brokers in the order of their start, those that were stopped or killed included.
func (c *Cluster) BrokerURLs() []string {
	brokers := c.sa.Brokers()
	urls := make([]string, len(brokers))
	for i, n := range brokers {
		urls[i] = n.URL()
	}
	return urls
}

// HTTP is the URL of probes and metrics.
func (c *Cluster) HTTP() string { return c.sa.HTTP() }

// Client connects to the cluster, and closes the connection when the test ends.
func (c *Cluster) Client(options ...client.Option) *client.Client {
	c.t.Helper()
	k, err := client.Connect(c.t.Context(), c.URL(), options...)
	if err != nil {
		c.t.Fatalf("connect to cluster: %v", err)
	}
	c.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := k.Close(ctx); err != nil {
			c.t.Errorf("close client: %v", err)
		}
	})
	return k
}

// StartBroker adds a broker and returns its URL.
func (c *Cluster) StartBroker() string {
	c.t.Helper()
	n, err := c.sa.StartBroker(c.t.Context())
	if err != nil {
		c.t.Fatalf("start broker: %v", err)
	}
	return n.URL()
}

// KillBroker stops the broker with that URL without handing anything over, as far as a process can do that to a part
// of itself.
func (c *Cluster) KillBroker(url string) { c.find(url).Kill() }

// StopBroker shuts the broker with that URL down in good order: its topics are handed over.
func (c *Cluster) StopBroker(url string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	if err := c.find(url).Shutdown(ctx); err != nil {
		c.t.Fatalf("stop broker %s: %v", url, err)
	}
}

// StopBookie stops bookie i; its data stays.
func (c *Cluster) StopBookie(i int) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	if err := c.sa.StopBookie(ctx, i); err != nil {
		c.t.Fatalf("stop bookie %d: %v", i, err)
	}
}

// StartBookie starts bookie i again, after StopBookie.
func (c *Cluster) StartBookie(i int) {
	c.t.Helper()
	if err := c.sa.StartBookie(c.t.Context(), i); err != nil {
		c.t.Fatalf("start bookie %d: %v", i, err)
	}
}

func (c *Cluster) find(url string) *broker.Node {
	c.t.Helper()
	for _, n := range c.sa.Brokers() {
		if n.URL() == url {
			return n
		}
	}
	c.t.Fatalf("there is no broker %s", url)
	return nil
}
