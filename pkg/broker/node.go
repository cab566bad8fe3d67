package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ops"
)

// URLScheme is how brokers' URLs begin.
const URLScheme = "penstock://"

// NodeConfig says where a broker listens, and who it is.
type NodeConfig struct {
	// ID is the broker's name, unique among live brokers; empty: made of the advertised address.
	ID string
	// Listen is the address of gRPC, HTTPListen that of probes and metrics ("host:port", port 0 for any); an empty
	// HTTPListen switches it off.
	Listen, HTTPListen string
	// Advertise is the host, or "host:port", under which clients and other brokers reach this one; empty takes the
	// listener's host, or the host's name if that is all addresses.
	Advertise string
	Version   string
	// Broker is how it behaves; Self is filled in.
	Broker Config
	// Bookies bounds connections to bookies; Cluster is filled in.
	Bookies bookieclient.Config
}

// NodeEnv is what a broker's process needs from outside. It stays the caller's, apart from sessions.
type NodeEnv struct {
	Meta *meta.Store
	// NewSession makes the session whose lease the registration and the bundles are under; the node closes it.
	NewSession func(ctx context.Context) (*lease.Session, error)
	Log        *slog.Logger
	// Registerer takes the metrics, Gatherer serves them at /metrics; either may be nil.
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer
}

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

// Node is a running broker: its ports, its lease, its watch cache, its connections to bookies.
type Node struct {
	cfg    NodeConfig
	env    NodeEnv
	log    *slog.Logger
	broker *Broker

	grpcListener, httpListener net.Listener
	grpc                       *grpc.Server
	http                       *http.Server
	cache                      *meta.Cache
	session                    *lease.Session
	bookies                    *bookieclient.Client

	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
	failed chan error
	ended  error
	// started is broker, for the probes, which are answered before there is one.
	started atomic.Pointer[Broker]
}

// StartNode brings a broker up and returns when it takes requests and others know of it. It waits for etcd as long as ctx lives. Errors:
// *[ListenError], *ownership.IDTakenError, *meta.FeatureLevelError, ctx's.
func StartNode(ctx context.Context, cfg NodeConfig, env NodeEnv) (_ *Node, err error) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	n := &Node{cfg: cfg, env: env, log: env.Log, cancel: cancel, failed: make(chan error, 1)}
	defer func() {
		if err != nil {
			_ = n.Shutdown(context.WithoutCancel(ctx))
		}
	}()
	self, err := n.listen(ctx)
	if err != nil {
		return nil, err
	}
	n.serveHTTP()
	n.log.Info("broker starts, and waits for etcd if that is away", "broker", self.ID, "url", self.URL, "http", self.HTTP)
	cluster, err := env.Meta.EnsureCluster(ctx)
	if err != nil {
		return nil, fmt.Errorf("join cluster: %w", err)
	}
	n.cache = meta.NewCache(life, env.Meta)
	if env.Registerer != nil {
		if err := n.cache.Register(env.Registerer); err != nil {
			return nil, fmt.Errorf("start broker: %w", err)
		}
	}
	if err := n.cache.Synced(ctx); err != nil {
		return nil, fmt.Errorf("start broker: %w", err)
	}
	if n.session, err = env.NewSession(ctx); err != nil {
		return nil, fmt.Errorf("get a lease: %w", err)
	}
	bookies := cfg.Bookies
	bookies.Cluster = cluster.UUID
	n.bookies = bookieclient.New(bookies, n.resolve, n.log, env.Registerer) //nolint:contextcheck // closed by Shutdown
	cfg.Broker.Self = self
	n.broker, err = New(cfg.Broker, Deps{
		Meta: env.Meta, Cache: n.cache, Session: n.session, Bookies: n.bookies, Log: n.log, Registerer: env.Registerer,
	})
	if err != nil {
		return nil, err
	}
	n.started.Store(n.broker)
	n.serve(life)
	if err := n.announced(ctx); err != nil {
		return nil, err
	}
	n.log.Info("broker is up", "broker", self.ID, "url", self.URL, "http", self.HTTP)
	return n, nil
}

// announced waits until the broker is registered, so that others can be sent to it.
func (n *Node) announced(ctx context.Context) error {
	for {
		changed := n.cache.Changed(meta.KindBrokers)
		if n.broker.registered() == nil {
			return nil
		}
		select {
		case <-changed:
		case err := <-n.failed:
			return err
		case <-ctx.Done():
			return fmt.Errorf("register broker: %w", ctx.Err())
		}
	}
}

// listen opens the ports, so that one that is taken is known before anything else is done.
func (n *Node) listen(ctx context.Context) (meta.BrokerInfo, error) {
	var lc net.ListenConfig
	var err error
	if n.grpcListener, err = lc.Listen(ctx, "tcp", n.cfg.Listen); err != nil {
		return meta.BrokerInfo{}, &ListenError{What: "clients", Addr: n.cfg.Listen, Err: err}
	}
	address, err := advertised(n.cfg.Advertise, n.grpcListener.Addr())
	if err != nil {
		return meta.BrokerInfo{}, err
	}
	self := meta.BrokerInfo{ID: n.cfg.ID, URL: URLScheme + address, Peer: address, Version: n.cfg.Version, Started: time.Now()}
	if self.ID == "" {
		self.ID = "broker-" + strings.NewReplacer(":", "-", "[", "", "]", "").Replace(address)
	}
	if n.cfg.HTTPListen != "" {
		if n.httpListener, err = lc.Listen(ctx, "tcp", n.cfg.HTTPListen); err != nil {
			return meta.BrokerInfo{}, &ListenError{What: "http", Addr: n.cfg.HTTPListen, Err: err}
		}
		host, _, _ := net.SplitHostPort(address)
		_, port, _ := net.SplitHostPort(n.httpListener.Addr().String())
		self.HTTP = "http://" + net.JoinHostPort(host, port)
	}
	return self, nil
}

// advertised completes the address under which others reach a listener.
func advertised(advertise string, bound net.Addr) (string, error) {
	host, port, err := net.SplitHostPort(bound.String())
	if err != nil {
		return "", fmt.Errorf("read address of listener: %w", err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("find a name to advertise: %w", err)
		}
	}
	if advertise == "" {
		return net.JoinHostPort(host, port), nil
	}
	if h, p, err := net.SplitHostPort(advertise); err == nil {
		if v, err := strconv.ParseUint(p, 10, 16); err != nil || v == 0 {
			return "", &ListenError{What: "clients", Addr: advertise, Err: errors.New("the advertised port is not a number above 0")}
		}
		return net.JoinHostPort(h, p), nil
	}
	return net.JoinHostPort(advertise, port), nil
}

// resolve tells where a bookie is.
func (n *Node) resolve(id entry.StorageUUID) (string, bool) {
	k, ok := n.cache.Bookie(id)
	return k.Data, ok
}

// serveHTTP answers probes from the start: a broker that waits for etcd lives, and is not ready.
func (n *Node) serveHTTP() {
	if n.httpListener == nil {
		return
	}
	ready := func() error {
		if b := n.started.Load(); b != nil {
			return b.Ready()
		}
		if n.env.Meta.Away() > 0 {
			return fmt.Errorf("starting: %w", errEtcdAway)
		}
		return errors.New("starting: not registered yet")
	}
	n.http = ops.New(ops.Probes{Live: func() error { return nil }, Ready: ready}, n.env.Gatherer,
		ops.Page{Path: "/metrics/topics", Serve: n.serveTopics})
	n.wg.Go(func() {
		if err := n.http.Serve(n.httpListener); !errors.Is(err, http.ErrServerClosed) {
			n.fail(fmt.Errorf("serve http: %w", err))
		}
	})
}

func (n *Node) serve(life context.Context) {
	n.grpc = grpc.NewServer(
		grpc.UnaryInterceptor(n.broker.answerInTime),
		grpc.MaxRecvMsgSize(n.broker.limits.MaxFrame()+64<<10),
		grpc.InitialWindowSize(4<<20), grpc.InitialConnWindowSize(16<<20),
		grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10),
		grpc.ConnectionTimeout(5*time.Second),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 500 * time.Millisecond, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 5 * time.Second, Timeout: 5 * time.Second}),
	)
	n.broker.Register(n.grpc)
	n.wg.Go(func() { n.broker.Run(life) })
	n.wg.Go(func() {
		select {
		case <-n.broker.owner.Failed():
			n.fail(n.broker.owner.Err())
		case <-life.Done():
		}
	})
	n.wg.Go(func() {
		if err := n.grpc.Serve(n.grpcListener); err != nil {
			n.fail(fmt.Errorf("serve clients: %w", err))
		}
	})
}

func (n *Node) fail(err error) {
	select {
	case n.failed <- err:
	default:
	}
}

// Failed receives the error after which the node cannot go on.
func (n *Node) Failed() <-chan error { return n.failed }

// URL is how clients reach the broker.
func (n *Node) URL() string { return n.broker.cfg.Self.URL }

// HTTP is the URL of probes and metrics; empty when switched off.
func (n *Node) HTTP() string { return n.broker.cfg.Self.HTTP }

// Shutdown hands the bundles over as long as ctx allows, tells clients where to go, and stops everything. It may be
// called again.
func (n *Node) Shutdown(ctx context.Context) error {
	n.once.Do(func() { n.ended = n.shutdown(ctx) })
	return n.ended
}

func (n *Node) shutdown(ctx context.Context) error {
	var failed error
	if n.grpc != nil {
		failed = n.broker.Drain(ctx)
		stopped := make(chan struct{})
		go func() { defer close(stopped); n.grpc.GracefulStop() }()
		select {
		case <-stopped:
		case <-ctx.Done():
			n.grpc.Stop()
		case <-time.After(time.Second): // streams end by themselves; whoever does not take the hint is cut off
			n.grpc.Stop()
		}
		<-stopped
	} else if n.grpcListener != nil {
		n.grpcListener.Close()
	}
	n.cancel()
	if n.http != nil {
		closing, cancel := context.WithTimeout(ctx, time.Second) // a profile under way may take long
		_ = n.http.Shutdown(closing)
		cancel()
		_ = n.http.Close()
	} else if n.httpListener != nil {
		n.httpListener.Close()
	}
	n.wg.Wait()
	if n.session != nil {
		patience := time.Second
		if !n.session.Alive() {
			patience = 100 * time.Millisecond // etcd has been away for so long that it hardly answers now
		}
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		_ = n.session.Close(closing) // the lease ends by itself
		cancel()
	}
	if n.bookies != nil {
		n.bookies.Close()
	}
	if n.cache != nil {
		n.cache.Close()
	}
	return failed
}

// Kill stops everything at once and hands nothing over, as far as that is possible within a process: what a crash
// would do.
func (n *Node) Kill() {
	n.once.Do(func() {
		n.cancel()
		n.grpc.Stop()
		if n.http != nil {
			_ = n.http.Close()
		}
		n.wg.Wait()
		n.bookies.Close()
		n.cache.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = n.session.Close(ctx)
	})
}
