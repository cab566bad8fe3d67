package embedetcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// Config says where an embedded etcd lives and how it behaves. Only Dir is required.
type Config struct {
	// Dir holds the data. It is created when missing; a later Start on it finds what was there.
	Dir string
	// Listen is the client address, host:port; empty means 127.0.0.1:0, port 0 lets the system choose.
	Listen string
	// Tick is raft's tick; 0 means 50 ms. An election takes 5 to 10 of them.
	Tick time.Duration
	// QuotaBytes bounds the backend; 0 means 1 GiB.
	QuotaBytes int64
	// KeepRevisions is how many revisions compaction leaves; 0 means 10,000. Compaction looks every 5 minutes.
	KeepRevisions int
	// UnsafeNoFsync skips fsync. A power cut may lose everything: for tests, which throw the data away.
	UnsafeNoFsync bool
	// Log gets etcd's warnings (as debug messages, they are many) and errors; nil discards them.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Tick == 0 {
		c.Tick = 50 * time.Millisecond
	}
	if c.QuotaBytes == 0 {
		c.QuotaBytes = 1 << 30
	}
	if c.KeepRevisions == 0 {
		c.KeepRevisions = 10_000
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Server is a running etcd member with one client. Its methods are safe for concurrent use.
type Server struct {
	etcd      *embed.Etcd
	client    *clientv3.Client
	endpoints []string
	failed    chan error
	watch     sync.WaitGroup
	done      chan struct{}
	closing   atomic.Bool
	closeOnce sync.Once
	closeErr  error
}

// logSegmentBytes is what etcd allocates for its log at once, twice: the present file and the next one. Its own default, 64 MB, is
// meant for a machine of its own.
const logSegmentBytes = 16 << 20

var setLogSegment = sync.OnceFunc(func() { wal.SegmentSizeBytes = logSegmentBytes })

// Start starts a member and waits until it serves, or until ctx ends. The caller closes what it returns.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.Dir == "" {
		return nil, errors.New("start etcd: no data directory")
	}
	cfg = cfg.withDefaults()
	setLogSegment()
	ec := embed.NewConfig()
	ec.Dir = cfg.Dir
	ec.Name = "embedded"
	listen := url.URL{Scheme: "http", Host: cfg.Listen}
	// A single member never dials its peer address; the listener is only there because etcd insists on one.
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	ec.ListenClientUrls = []url.URL{listen}
	ec.AdvertiseClientUrls = []url.URL{listen}
	ec.ListenPeerUrls = []url.URL{peer}
	ec.AdvertisePeerUrls = []url.URL{peer}
	ec.InitialCluster = ec.InitialClusterFromName(ec.Name)
	ec.TickMs = uint(max(cfg.Tick.Milliseconds(), 1))
	ec.ElectionMs = 5 * ec.TickMs
	ec.QuotaBackendBytes = cfg.QuotaBytes
	ec.SnapshotCount = 5_000
	ec.SnapshotCatchUpEntries = 500
	ec.MaxSnapFiles = 1
	ec.MaxWalFiles = 1
	ec.AutoCompactionMode = embed.CompactorModeRevision
	ec.AutoCompactionRetention = strconv.Itoa(cfg.KeepRevisions)
	ec.EnableGRPCGateway = false
	// Clients ping at a few seconds to notice a dead server; etcd's default would call that abuse.
	ec.GRPCKeepAliveMinTime = time.Second
	ec.WatchProgressNotifyInterval = 5 * time.Second
	ec.UnsafeNoFsync = cfg.UnsafeNoFsync
	s := &Server{failed: make(chan error, 1), done: make(chan struct{})}
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(&slogCore{log: cfg.Log, closing: &s.closing}))

	etcd, err := embed.StartEtcd(ec)
	if err != nil {
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	}
	s.etcd = etcd
	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		_ = s.Close()
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	case <-ctx.Done():
		_ = s.Close()
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, ctx.Err())
	}
	for _, l := range etcd.Clients {
		s.endpoints = append(s.endpoints, l.Addr().String())
	}
	s.client, err = NewClient(s.endpoints)
	if err != nil {
		_ = s.Close()
		return nil, err
	}
	if !cfg.UnsafeNoFsync {
		if err := reserve(filepath.Join(cfg.Dir, "member", "snap", "db")); err != nil {
			cfg.Log.Debug("no space is kept for etcd's database", "error", err) // it is only worse off on a full disk
		}
	}
	s.watch.Go(s.follow)
	return s, nil
}

// reserveBytes is what a small cluster's database does not outgrow.
const reserveBytes = 32 << 20

// reserve takes blocks for the growth of the database. etcd ends when it cannot write, and bookies next to it leave a
// disk that others fill nothing to write to. Its log takes its own blocks ahead.
func reserve(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("reserve space: %w", err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, reserveBytes); err != nil {
		return fmt.Errorf("reserve space in %s: %w", path, err)
	}
	return nil
}

// follow tells of an end that nobody asked for: of a listener, or of the member itself.
func (s *Server) follow() {
	var err error
	select {
	case <-s.done:
		return
	case err = <-s.etcd.Err():
	case <-s.etcd.Server.StopNotify():
		err = errors.New("the member has stopped")
	}
	s.failed <- fmt.Errorf("etcd in %s ended by itself: %w", s.etcd.Config().Dir, err)
}

// NewClient makes a client as the server's own: quiet, and quick to notice a dead connection. The caller
// closes it.
func NewClient(endpoints []string) (*clientv3.Client, error) {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		DialKeepAliveTime:    5 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		Logger:               zap.NewNop(),
		MaxCallSendMsgSize:   4 << 20,
		MaxCallRecvMsgSize:   math.MaxInt32,
	})
	if err != nil {
		return nil, fmt.Errorf("make etcd client: %w", err)
	}
	return client, nil
}

// Endpoints returns the client addresses, host:port.
func (s *Server) Endpoints() []string { return s.endpoints }

// Client returns the server's client, which Close closes.
func (s *Server) Client() *clientv3.Client { return s.client }

// Err receives an error, once, if the server stops by itself.
func (s *Server) Err() <-chan error { return s.failed }

// Halt stops the member as a fault of its own would: for tests of what follows. Close is still due.
func (s *Server) Halt() { s.etcd.Server.HardStop() }

// Close closes the client and stops the server, and waits for both. The data stays. It may be called again.
func (s *Server) Close() error {
	s.closeOnce.Do(func() {
		s.closing.Store(true)
		close(s.done)
		s.watch.Wait()
		if s.client != nil {
			s.closeErr = s.client.Close()
		}
		s.etcd.Close()
	})
	return s.closeErr
}
