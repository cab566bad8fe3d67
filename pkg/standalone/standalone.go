// Package standalone is a whole cluster in one process: embedded etcd, bookies and brokers, the real ones, over
// loopback.
//
//	c, err := standalone.Start(ctx, standalone.Config{Dir: "penstock-data"}, log)   // returns once it serves
//	fmt.Println(c.URL())
//	err = c.Close(ctx)
//
// It is what `penstock standalone` runs, and what package brokertest gives to tests. Nothing of it is simpler than in
// production but the number of machines: with one bookie each entry has one copy.
package standalone

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/measure"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// ClusterName is the cluster's name in its etcd.
const ClusterName = "standalone"

// The namespace of the message that proves readiness.
const (
	systemTenant    = "penstock"
	systemNamespace = "penstock/system"
	probeTopic      = "penstock/system/ready"
)

// probePatience is how long one attempt to write and read a message may take before it is told and made again.
const probePatience = 5 * time.Second

// Config says what to run. Only Dir is required.
type Config struct {
	// Dir holds everything; it is made if missing.
	Dir string
	// Bookies is their number; 0 means 1. One keeps one copy, three or more the production defaults.
	Bookies int
	// Brokers is their number; 0 means 1.
	Brokers int
	// Listen and HTTPListen are the first broker's; empty: 127.0.0.1 with any port. Further ones take any port.
	Listen, HTTPListen string
	// LeaseTTL is after how long a dead process counts as gone, at the latest; 0 means 5 s.
	LeaseTTL time.Duration
	// SegmentSize is that of the bookies' files, of which each bookie allocates four at once; 0 means 16 MiB: a sixteenth of
	// what bookies with a disk of their own take.
	SegmentSize int64
	// Broker is how brokers behave; its Replication, when zero, follows from Bookies, and its CacheBytes is 16 MiB.
	Broker  broker.Config
	Version string
	// Collectors have metrics of the process that are served beside the cluster's.
	Collectors []prometheus.Collector
	// UnsafeNoFsync has etcd skip fsync: for tests, which throw the data away.
	UnsafeNoFsync bool
}

func (c Config) withDefaults() Config {
	c.Bookies, c.Brokers = max(c.Bookies, 1), max(c.Brokers, 1)
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.HTTPListen == "" {
		c.HTTPListen = "127.0.0.1:0"
	}
	if c.LeaseTTL == 0 {
		c.LeaseTTL = 5 * time.Second
	}
	if c.SegmentSize == 0 {
		c.SegmentSize = 16 << 20
	}
	if c.Broker.CacheBytes == 0 {
		c.Broker.CacheBytes = 16 << 20
	}
	if c.Broker.Replication == (meta.Replication{}) {
		copies := min(c.Bookies, 3)
		c.Broker.Replication = meta.Replication{Ensemble: copies, WriteQuorum: copies, AckQuorum: min(copies, 2)}
	}
	return c
}

// Cluster is a running cluster.
type Cluster struct {
	cfg      Config
	log      *slog.Logger
	registry *prometheus.Registry
	etcd     *embedetcd.Server
	meta     *meta.Store

	mu      sync.Mutex
	brokers []*broker.Node
	bookies []*bookie.Bookie // nil: not running
	closed  bool
	lock    io.Closer // of the directory
	failed  chan error
	watch   sync.WaitGroup
	done    chan struct{}
}

// Start brings a cluster up and returns once a message was written and read back. log may be nil. Errors: *broker.ListenError,
// *bookie.IdentityError, *[TooFewBookiesError], and whatever keeps etcd or a store from opening.
func Start(ctx context.Context, cfg Config, log *slog.Logger) (_ *Cluster, err error) {
	if cfg.Dir == "" {
		return nil, errors.New("start standalone cluster: no data directory")
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	cfg = cfg.withDefaults()
	for what, addr := range map[string]string{"clients": cfg.Listen, "http": cfg.HTTPListen} {
		if err := checkPort(ctx, what, addr); err != nil {
			return nil, err
		}
	}
	c := &Cluster{
		cfg: cfg, log: log, registry: prometheus.NewRegistry(), bookies: make([]*bookie.Bookie, cfg.Bookies),
		failed: make(chan error, 1), done: make(chan struct{}),
	}
	if c.lock, err = lockDir(cfg.Dir); err != nil {
		return nil, err
	}
	if err := c.checkBookies(); err != nil {
		_ = c.lock.Close()
		return nil, err
	}
	c.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	c.registry.MustRegister(cfg.Collectors...)
	defer func() {
		if err != nil {
			_ = c.Close(context.WithoutCancel(ctx))
		}
	}()
	c.etcd, err = embedetcd.Start(ctx, embedetcd.Config{Dir: filepath.Join(cfg.Dir, "etcd"), Log: log, UnsafeNoFsync: cfg.UnsafeNoFsync})
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the directory
	}
	c.mu.Lock()
	c.follow(c.etcd.Err())
	c.mu.Unlock()
	c.meta = meta.New(c.etcd.Client(), ClusterName, log)
	if err := errors.Join(c.meta.Register(c.registry), measure.RegisterBuild(c.registry, cfg.Version)); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	if _, err := c.meta.EnsureCluster(ctx); err != nil {
		return nil, fmt.Errorf("start standalone cluster: %w", err)
	}
	if err := c.startAll(ctx); err != nil {
		return nil, err
	}
	if err := c.becomeReady(ctx); err != nil {
		return nil, fmt.Errorf("write and read the first message: %w", err)
	}
	return c, nil
}

// becomeReady probes until that succeeds, a part fails or ctx ends, and says meanwhile what it waits for.
func (c *Cluster) becomeReady(ctx context.Context) error {
	for {
		patience, cancel := context.WithTimeout(ctx, probePatience)
		err := c.probe(patience)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
		select {
		case failure := <-c.failed:
			return failure
		default:
		}
		c.log.Warn("not ready yet; trying again", "error", err, "disk", c.diskText())
	}
}

// lockDir takes the directory for this process. etcd would wait in silence for the other one to end.
func lockDir(dir string) (io.Closer, error) {
	if err := vfs.OS().MkdirAll(dir); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	lock, err := vfs.OS().Lock(filepath.Join(dir, "LOCK"))
	if err != nil {
		return nil, fmt.Errorf("use data directory %s (stop the process that has it, or use another directory): %w", dir, err)
	}
	return lock, nil
}

// TooFewBookiesError says that a directory has data of more bookies than are to run. Each entry is on some of them,
// and a ledger that a crash left open can only be recovered with most of them.
type TooFewBookiesError struct {
	Dir           string
	Wanted, Exist int
}

// Error says what to do.
func (e *TooFewBookiesError) Error() string {
	return fmt.Sprintf("data directory %s has the data of %d bookies, and %d would run: run %d (--bookies %d), or use another directory", e.Dir, e.Exist, e.Wanted, e.Exist, e.Exist)
}

func (c *Cluster) checkBookies() error {
	n := c.cfg.Bookies
	for {
		_, err := vfs.OS().Stat(filepath.Join(c.cfg.Dir, bookieID(n)))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return fmt.Errorf("look into data directory: %w", err)
		}
		n++
	}
	if n > c.cfg.Bookies {
		return &TooFewBookiesError{Dir: c.cfg.Dir, Wanted: c.cfg.Bookies, Exist: n}
	}
	return nil
}

func bookieID(i int) string { return fmt.Sprintf("bookie-%d", i) }

// checkPort finds out that a port is taken before anything else is started.
func checkPort(ctx context.Context, what, addr string) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return &broker.ListenError{What: what, Addr: addr, Err: err}
	}
	return l.Close() //nolint:wrapcheck // nothing was accepted on it
}

// diskText tells how full the disk is: above nine tenths bookies take no new ledgers.
func (c *Cluster) diskText() string {
	u, err := vfs.OS().Usage(c.cfg.Dir)
	if err != nil || u.Total == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%d %% full, %d MiB free; from 90 %% on no ledgers are begun", 100-u.Free*100/u.Total, u.Free>>20)
}

// startAll starts the bookies side by side, and then the brokers: after a crash etcd still knows the bookies' last
// addresses, which brokers would try in vain.
func (c *Cluster) startAll(ctx context.Context) error {
	if err := sideBySide(c.cfg.Bookies, func(i int) error { return c.StartBookie(ctx, i) }); err != nil {
		return err
	}
	return sideBySide(c.cfg.Brokers, func(i int) error {
		listen, http := "127.0.0.1:0", ""
		if i == 0 {
			listen, http = c.cfg.Listen, c.cfg.HTTPListen
		}
		_, err := c.startBroker(ctx, fmt.Sprintf("broker-%d", i), listen, http)
		return err
	})
}

func sideBySide(n int, start func(i int) error) error {
	errs := make([]error, n)
	var starting sync.WaitGroup
	for i := range n {
		starting.Go(func() { errs[i] = start(i) })
	}
	starting.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) newSession(ctx context.Context) (*lease.Session, error) {
	return lease.NewSession(ctx, c.etcd.Client(), c.cfg.LeaseTTL, c.log)
}

// StartBookie starts bookie i on its directory. It panics if it runs already.
func (c *Cluster) StartBookie(ctx context.Context, i int) error {
	id := bookieID(i)
	b, err := bookie.Start(ctx, bookie.Config{
		ID: id, DataDir: filepath.Join(c.cfg.Dir, id), Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", HostLabel: id, Version: c.cfg.Version,
		// One process shares its memory between all of them. The disk is not theirs: others fill it to nine tenths for years.
		Store: ledgerstore.Config{
			SegmentSize: c.cfg.SegmentSize, CacheBytes: 16 << 20, IndexBytes: 16 << 20, LowRatio: 0.98, HighRatio: 0.99,
		},
	}, bookie.Env{
		Meta: c.meta, NewSession: c.newSession, FS: vfs.OS(), Log: c.log,
		Registerer: replacing{prometheus.WrapRegistererWith(prometheus.Labels{"bookie": id}, c.registry)},
	})
	if err != nil {
		return err //nolint:wrapcheck // it says what the bookie could not do
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bookies[i] != nil {
		panic("standalone: bookie is running already")
	}
	c.bookies[i] = b
	c.follow(b.Failed())
	return nil
}

// StopBookie stops bookie i; a second call does nothing.
func (c *Cluster) StopBookie(ctx context.Context, i int) error {
	c.mu.Lock()
	b := c.bookies[i]
	c.bookies[i] = nil
	c.mu.Unlock()
	if b == nil {
		return nil
	}
	return b.Shutdown(ctx) //nolint:wrapcheck // it says what went wrong
}

// StartBroker adds a broker on any port, and returns its URL.
func (c *Cluster) StartBroker(ctx context.Context) (*broker.Node, error) {
	c.mu.Lock()
	n := len(c.brokers)
	c.mu.Unlock()
	return c.startBroker(ctx, fmt.Sprintf("broker-%d", n), "127.0.0.1:0", "")
}

func (c *Cluster) startBroker(ctx context.Context, id, listen, http string) (*broker.Node, error) {
	n, err := broker.StartNode(ctx, broker.NodeConfig{
		ID: id, Listen: listen, HTTPListen: http, Version: c.cfg.Version, Broker: c.cfg.Broker,
	}, broker.NodeEnv{
		Meta: c.meta, NewSession: c.newSession, Log: c.log, Gatherer: c.registry,
		Registerer: replacing{prometheus.WrapRegistererWith(prometheus.Labels{"broker": id}, c.registry)},
	})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what the broker could not do
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.brokers = append(c.brokers, n)
	c.follow(n.Failed())
	return n, nil
}

// follow passes on the failure of a part. The lock is held.
func (c *Cluster) follow(failed <-chan error) {
	c.watch.Go(func() {
		select {
		case err := <-failed:
			select {
			case c.failed <- err:
			default:
			}
		case <-c.done:
		}
	})
}

// Failed receives the error of the first part that cannot go on.
func (c *Cluster) Failed() <-chan error { return c.failed }

// URL reaches the cluster by its first broker.
func (c *Cluster) URL() string { return c.Brokers()[0].URL() }

// HTTP is the URL of probes and metrics.
func (c *Cluster) HTTP() string { return c.Brokers()[0].HTTP() }

// Brokers returns the brokers in the order of their start, those that were shut down included.
func (c *Cluster) Brokers() []*broker.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*broker.Node(nil), c.brokers...)
}

// probe publishes a message and reads it back.
func (c *Cluster) probe(ctx context.Context) error {
	if err := c.meta.CreateTenant(ctx, systemTenant); err != nil && !errors.Is(err, meta.ErrExists) {
		return err //nolint:wrapcheck // it names the tenant
	}
	if _, err := c.meta.CreateNamespace(ctx, systemNamespace, meta.Policies{}, 1); err != nil && !errors.Is(err, meta.ErrExists) {
		return err //nolint:wrapcheck // it names the namespace
	}
	k, err := client.Connect(ctx, c.URL())
	if err != nil {
		return err //nolint:wrapcheck // the client says what it tried
	}
	defer func() { _ = k.Close(context.WithoutCancel(ctx)) }()
	p, err := k.Producer(ctx, probeTopic)
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	id, err := p.Publish(ctx, &client.Message{Value: []byte(time.Now().Format(time.RFC3339Nano))})
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	r, err := k.Reader(ctx, probeTopic, client.At(id))
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	d, err := r.Receive(ctx)
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	if d.ID.Offset != id.Offset {
		return fmt.Errorf("published message %v, read %v", id, d.ID)
	}
	return nil
}

// Close hands over, stops everything and waits for it, as long as ctx allows for the handing over.
func (c *Cluster) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	brokers, bookies := c.brokers, c.bookies
	c.mu.Unlock()
	var failed []error
	for _, n := range brokers {
		failed = append(failed, n.Shutdown(ctx))
	}
	for _, b := range bookies {
		if b != nil {
			failed = append(failed, b.Shutdown(ctx))
		}
	}
	close(c.done)
	c.watch.Wait()
	if c.etcd != nil {
		failed = append(failed, c.etcd.Close())
	}
	if c.lock != nil {
		failed = append(failed, c.lock.Close())
	}
	return errors.Join(failed...)
}

// replacing is a registerer for parts that are started again in one process: a new part's metrics take the place of
// the old one's.
type replacing struct{ prometheus.Registerer }

// Register registers k, in place of what is registered under its name.
func (r replacing) Register(k prometheus.Collector) error {
	err := r.Registerer.Register(k)
	var taken prometheus.AlreadyRegisteredError
	if errors.As(err, &taken) {
		r.Unregister(taken.ExistingCollector)
		err = r.Registerer.Register(k)
	}
	return err //nolint:wrapcheck // the registry's own
}

// MustRegister is Register, and panics on an error.
func (r replacing) MustRegister(all ...prometheus.Collector) {
	for _, k := range all {
		if err := r.Register(k); err != nil {
			panic(err)
		}
	}
}
