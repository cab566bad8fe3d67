package bookie

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ops"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Config configures a bookie. ID and DataDir are required.
type Config struct {
	// ID is the bookie's name, unique in the cluster, and for good the name of what its disk holds.
	ID string
	// DataDir is the directory on the one disk of this bookie; it is made if missing.
	DataDir string
	// Listen is the address of the data path ("host:port", port 0 for any). GRPCListen and HTTPListen likewise;
	// empty switches those off.
	Listen, GRPCListen, HTTPListen string
	// Advertise is the host, or "host:port", under which others reach this bookie; empty takes the listener's host,
	// or HostLabel if that is all addresses. A port is that of the data path.
	Advertise string
	// Zone and HostLabel say where it stands; placement spreads over both.
	Zone, HostLabel string
	// Version is the program's.
	Version string

	// Store configures the log; its Dir, Cluster, Storage and Fresh are filled in.
	Store ledgerstore.Config
	// Server bounds the data path, GC the collection of garbage.
	Server ServerConfig
	GC     GCConfig
	// ScrubBytesPerSecond is how fast what is stored is read again, to find damage. Default 8 MiB; negative: not at all.
	ScrubBytesPerSecond int64
	// RegistrationInterval is how often the free bytes are looked at. Default 10 s.
	RegistrationInterval time.Duration
	// ProbeInterval is how often an idle disk is tried. Default 5 s.
	ProbeInterval time.Duration
}

// Env is what a bookie needs from outside. It stays the caller's, apart from sessions.
type Env struct {
	Meta *meta.Store
	// NewSession makes the session whose lease the registration is under; the bookie closes it.
	NewSession func(ctx context.Context) (*lease.Session, error)
	FS         vfs.FS
	// BootID names this run of the kernel, and what else keeps unsynced writes in it; nil asks it.
	BootID func() (string, error)
	Log    *slog.Logger
	// Registerer takes the metrics, Gatherer serves them at /metrics; either may be nil.
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer
}

const (
	// withdrawTimeout is how long a bookie that stops tries to withdraw its registration.
	withdrawTimeout = time.Second
	// controlTimeout is how long control calls have to end by themselves.
	controlTimeout = time.Second
	// maxControlCalls is how many control calls a connection may have at work.
	maxControlCalls = 16
)

// ListenError says that a port could not be had.
type ListenError struct {
	What, Addr string
	Err        error
}

// Error says which one and why.
func (e *ListenError) Error() string {
	return fmt.Sprintf("listen for %s on %s: %v", e.What, e.Addr, e.Err)
}

// Unwrap returns the cause.
func (e *ListenError) Unwrap() error { return e.Err }

// Bookie is a running storage node.
type Bookie struct {
	cfg Config
	env Env
	log *slog.Logger
	me  Identity

	data, control, probes net.Listener
	lock                  io.Closer
	store                 *ledgerstore.Store
	server                *Server
	collector             *Collector
	session               *lease.Session
	claim                 *Claim
	grpc                  *grpc.Server
	http                  *http.Server
	health                *health
	marked                bool // the disk says that entries may be unsynced

	failed chan error
	cancel context.CancelFunc
	wg     sync.WaitGroup // everything that ends with cancel, or when its listener closes
	once   sync.Once
	closed error
}

// Start brings a bookie up in the protocol's order and returns when it serves. It waits for etcd as long as ctx
// lives. Errors: [*ListenError], [*IdentityError], vfs.ErrLocked, the store's, ctx's.
func Start(ctx context.Context, cfg Config, env Env) (_ *Bookie, err error) {
	setDefault(&cfg.RegistrationInterval, 10*time.Second)
	setDefault(&cfg.ProbeInterval, 5*time.Second)
	setDefault(&cfg.ScrubBytesPerSecond, 8<<20)
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	b := &Bookie{cfg: cfg, env: env, log: env.Log.With(slog.String("bookie", cfg.ID)), failed: make(chan error, 1), cancel: cancel}
	defer func() {
		if err != nil {
			_ = b.Shutdown(context.WithoutCancel(ctx))
		}
	}()
	if err := b.listen(ctx); err != nil {
		return nil, err
	}
	b.health = newHealth(env.FS, cfg.DataDir, cfg.ProbeInterval, b.lastStored, b.log)
	if b.probes != nil {
		b.http = ops.New(ops.Probes{Live: b.health.live, Ready: b.health.ready}, env.Gatherer)
		b.wg.Go(func() {
			if err := b.http.Serve(b.probes); !errors.Is(err, http.ErrServerClosed) {
				b.fail(fmt.Errorf("serve http: %w", err))
			}
		})
	}
	b.log.Info("bookie starts, and waits for etcd if that is away", slog.String("data_dir", cfg.DataDir), slog.String("http", b.HTTPAddr()))
	if err := b.openStore(ctx); err != nil {
		return nil, err
	}
	if b.session, err = env.NewSession(ctx); err != nil {
		return nil, fmt.Errorf("get a lease: %w", err)
	}
	b.server = NewServer(cfg.Server, b.me, b.store, env.Meta, b.log, env.Registerer)
	b.collector = NewCollector(cfg.GC, b.me, b.store, env.Meta, env.FS, path.Join(cfg.DataDir, revisionName), b.log, env.Registerer)
	r := b.registrar()
	reg, err := r.Register(ctx)
	if err != nil {
		return nil, err
	}
	if err := b.claim.Count(ctx); err != nil {
		return nil, err
	}
	b.serve(life, r, reg)
	b.log.Info("bookie serves", slog.String("storage", b.me.Storage.String()), slog.String("data", reg.info.Data),
		slog.String("state", reg.info.State.String()), slog.Uint64("free_bytes", reg.info.FreeBytes))
	return b, nil
}

// listen takes the ports before anything else: a port in use is known at once, and connections that come early wait.
func (b *Bookie) listen(ctx context.Context) error {
	var lc net.ListenConfig
	for _, l := range []struct {
		what, addr string
		to         *net.Listener
	}{{"data", b.cfg.Listen, &b.data}, {"gRPC", b.cfg.GRPCListen, &b.control}, {"HTTP", b.cfg.HTTPListen, &b.probes}} {
		if l.addr == "" && l.to != &b.data {
			continue
		}
		listener, err := lc.Listen(ctx, "tcp", l.addr)
		if err != nil {
			return &ListenError{What: l.what, Addr: l.addr, Err: err}
		}
		*l.to = listener
	}
	return nil
}

// openStore establishes the identity and recovers the log.
func (b *Bookie) openStore(ctx context.Context) error {
	fs, dir := b.env.FS, b.cfg.DataDir
	if err := makeDirs(fs, dir); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	var err error
	if b.lock, err = fs.Lock(path.Join(dir, lockName)); err != nil {
		return fmt.Errorf("lock data directory %s: %w", dir, err)
	}
	cluster, err := b.env.Meta.EnsureCluster(ctx)
	if err != nil {
		return fmt.Errorf("read cluster: %w", err)
	}
	b.claim, err = Claimant{FS: fs, Dir: dir, ID: b.cfg.ID, Cluster: cluster.UUID, Cookies: b.env.Meta}.Claim(ctx)
	if err != nil {
		return err
	}
	b.me = b.claim.Who
	cfg := b.cfg.Store
	cfg.Dir, cfg.Cluster, cfg.Storage, cfg.Fresh = b.claim.StoreDir, b.me.Cluster, b.me.Storage, b.claim.Fresh
	store, err := ledgerstore.Open(ctx, cfg, fs, b.log, b.env.Registerer)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	b.store = store
	if err := b.settleLoss(ctx); err != nil {
		return err
	}
	if err := b.settleUnsynced(ctx); err != nil {
		return err
	}
	return b.claim.Opened()
}

// settleLoss puts every ledger that this disk may have held in limbo, if it cannot be told which of them lost entries.
func (b *Bookie) settleLoss(ctx context.Context) error {
	loss := b.store.Loss()
	if len(loss.Ledgers) > 0 {
		b.log.Warn("acknowledged entries may have been lost: ledgers are in limbo until they are repaired", slog.Int("ledgers", len(loss.Ledgers)))
	}
	if !loss.All {
		return nil
	}
	ids, err := b.env.Meta.LedgersOn(ctx, b.me.Storage)
	if err != nil {
		return fmt.Errorf("list ledgers that may have lost entries: %w", err)
	}
	b.log.Warn("acknowledged entries may have been lost: every ledger of this bookie is in limbo until it is repaired", slog.Int("ledgers", len(ids)))
	if err := b.store.SetLimbo(ctx, ids...); err != nil {
		return fmt.Errorf("put ledgers in limbo: %w", err)
	}
	return b.store.EndLoss(ctx)
}

func (b *Bookie) registrar() *Registrar {
	base := b.registration()
	return &Registrar{
		Meta: b.env.Meta, Session: b.session, Store: b.store, Base: base, Interval: b.cfg.RegistrationInterval, Sched: sched.Real, Log: b.log,
		Holder: func(ctx context.Context, addr string) Presence { return presence(ctx, b.me, base.Data, addr) },
	}
}

// serve starts everything that runs until Shutdown.
func (b *Bookie) serve(ctx context.Context, r *Registrar, reg Registration) {
	b.wg.Go(func() {
		if err := b.server.Serve(b.data); err != nil {
			b.fail(err)
		}
	})
	b.wg.Go(func() {
		if err := r.Run(ctx, reg); err != nil {
			b.fail(err)
		}
	})
	b.wg.Go(func() { b.collector.Run(ctx) })
	scrubs := &scrubber{store: b.store, rate: rate.Limit(b.cfg.ScrubBytesPerSecond), log: b.log}
	if b.cfg.ScrubBytesPerSecond > 0 {
		b.wg.Go(func() { scrubs.run(ctx) })
	}
	b.health.setServing(true)
	b.health.note(time.Now(), nil) // the store has just been opened, which syncs
	b.wg.Go(func() { b.health.run(ctx) })
	registerHealth(b.env.Registerer, b.health)
	b.wg.Go(func() {
		select {
		case err := <-b.store.Fatal():
			b.noteStop(err)
			b.fail(fmt.Errorf("the store has stopped: %w", err))
		case <-ctx.Done():
		}
	})
	if b.control != nil {
		b.grpc = grpc.NewServer(grpc.WaitForHandlers(true), grpc.MaxConcurrentStreams(maxControlCalls), grpc.ConnectionTimeout(5*time.Second))
		bookiev1.RegisterBookieServer(b.grpc, &control{me: b.me, version: b.cfg.Version, store: b.store, collector: b.collector, scrubber: scrubs, log: b.log})
		b.wg.Go(func() {
			if err := b.grpc.Serve(b.control); err != nil {
				b.fail(fmt.Errorf("serve grpc: %w", err))
			}
		})
	}
}

// fail reports the first failure; the bookie's owner ends the process.
func (b *Bookie) fail(err error) {
	b.health.setFatal(err)
	select {
	case b.failed <- err:
	default:
	}
}

// Failed delivers what only a restart of the process can mend: a failed sync, an identity that is not valid any more.
func (b *Bookie) Failed() <-chan error { return b.failed }

func (b *Bookie) lastStored() time.Time {
	if b.server == nil {
		return time.Time{}
	}
	return b.server.LastStored()
}

// registration is what stays the same of it.
func (b *Bookie) registration() meta.BookieInfo {
	return meta.BookieInfo{
		ID: b.cfg.ID, UUID: b.me.Storage, Zone: b.cfg.Zone, Host: b.cfg.HostLabel, Version: b.cfg.Version, Started: time.Now(),
		Sync: b.cfg.Store.Sync.String(),
		Data: b.DataAddr(), GRPC: b.GRPCAddr(), HTTP: b.HTTPAddr(),
	}
}

// Storage is the identity of its disk.
func (b *Bookie) Storage() entry.StorageUUID { return b.me.Storage }

// DataAddr is the address of the data path that others use; the next two are empty if they are switched off.
func (b *Bookie) DataAddr() string { return b.advertised(b.data, true) }

// GRPCAddr is the address of control calls.
func (b *Bookie) GRPCAddr() string { return b.advertised(b.control, false) }

// HTTPAddr is the address of probes and metrics.
func (b *Bookie) HTTPAddr() string { return b.advertised(b.probes, false) }

func (b *Bookie) advertised(l net.Listener, data bool) string {
	if l == nil {
		return ""
	}
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return l.Addr().String()
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = b.cfg.HostLabel
	}
	if b.cfg.Advertise != "" {
		if h, p, err := net.SplitHostPort(b.cfg.Advertise); err != nil {
			host = b.cfg.Advertise
		} else {
			host = h
			if data {
				port = p
			}
		}
	}
	return net.JoinHostPort(host, port)
}

// Shutdown withdraws the registration, answers what was read, closes the store and waits for everything. When ctx
// ends first connections are broken; if the disk does not answer either, it returns an error after some seconds more,
// with goroutines left behind: the process has to end.
func (b *Bookie) Shutdown(ctx context.Context) error {
	b.once.Do(func() {
		done := make(chan error, 1)
		go func() { done <- b.shutdown(ctx) }()
		const grace = 5 * time.Second
		select {
		case b.closed = <-done:
			return
		case <-ctx.Done():
		}
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case b.closed = <-done:
		case <-timer.C:
			b.closed = errors.New("stop bookie: the disk does not answer")
		}
	})
	return b.closed
}

func (b *Bookie) shutdown(ctx context.Context) error {
	if b.health != nil {
		b.health.setServing(false)
	}
	var errs []error
	b.cancel()
	if b.session != nil {
		// etcd may be away: that must not take the time that answers need.
		withdraw, cancel := context.WithTimeout(ctx, withdrawTimeout)
		if err := b.session.Close(withdraw); err != nil {
			b.log.Warn("registration stays until its lease ends", slog.Any("error", err))
		}
		cancel()
	}
	if b.server != nil {
		b.server.Shutdown(ctx)
	}
	if b.grpc != nil {
		// A pass of collection or compaction may take longer than there is time.
		graceful, cancel := context.WithTimeout(ctx, controlTimeout)
		stop := context.AfterFunc(graceful, b.grpc.Stop)
		b.grpc.GracefulStop()
		stop()
		cancel()
	}
	if b.http != nil {
		if err := b.http.Shutdown(ctx); err != nil {
			_ = b.http.Close()
		}
	}
	for _, l := range []net.Listener{b.data, b.control, b.probes} {
		if l != nil {
			_ = l.Close()
		}
	}
	b.wg.Wait()
	if b.store != nil {
		err := b.store.Close()
		if err != nil {
			errs = append(errs, fmt.Errorf("close store: %w", err))
		}
		b.noteStop(err)
	}
	if b.lock != nil {
		errs = append(errs, b.lock.Close())
	}
	return errors.Join(errs...)
}
