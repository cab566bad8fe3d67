package broker

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
	"github.com/penstock-mq/penstock/pkg/repair"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// locateWait is how long a lookup waits for a bundle to be taken.
const locateWait = time.Second

// successorWait is how long a lookup of somebody who hears nothing of an owner waits for the next one.
const successorWait = 250 * time.Millisecond

// Broker is one serving process's state: who it is, the bundles it serves, and what they share.
//
// Ownership tells it which bundles to serve; it never decides that itself. The lock guards the map of bundles only,
// and is never held while anything is opened or closed.
type Broker struct {
	cfg  Config
	deps Deps
	log  *slog.Logger

	owner   *ownership.Runner
	peers   *ownership.Peers
	ticker  *ledger.Ticker
	repair  *repair.Runner
	control *bookieclient.Control

	topicEnv topic.Env
	stateEnv statelog.Env
	limits   frame.Limits
	reads    *budget.Budget
	dispatch *dispatch.Metrics
	metrics  *metrics
	latest   atomic.Pointer[figures] // of the latest look at the open topics

	draining atomic.Bool
	drains   chan struct{} // closed when Drain begins
	drained  chan struct{} // closed when Drain has ended
	drainEnd sync.Once
	life     context.Context //nolint:containedctx // everything that outlives a request ends with it
	end      context.CancelFunc
	work     sync.WaitGroup // receivers of streams, openings, flushes

	openings openings // of topics

	mu      sync.Mutex
	bundles map[meta.BundleID]*bundle
	serving chan struct{} // closed and replaced when a bundle is added
}

// New makes a broker that owns nothing yet. Close ends it.
func New(cfg Config, deps Deps) (*Broker, error) {
	cfg = cfg.withDefaults()
	if cfg.Self.ID == "" || cfg.Self.URL == "" || cfg.Self.Peer == "" {
		return nil, fmt.Errorf("create broker: id %q, URL %q and peer address %q are all needed", cfg.Self.ID, cfg.Self.URL, cfg.Self.Peer)
	}
	if err := cfg.Replication.Validate(); err != nil {
		return nil, fmt.Errorf("create broker: %w", err)
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	b := &Broker{
		cfg: cfg, deps: deps, log: deps.Log, ticker: ledger.NewTicker(0),
		limits: frame.Limits{MaxMessage: cfg.MaxMessageSize}, reads: budget.New(cfg.ReadBytes),
		dispatch: dispatch.NewMetrics(deps.Registerer), bundles: map[meta.BundleID]*bundle{}, serving: make(chan struct{}), drains: make(chan struct{}), drained: make(chan struct{}),
	}
	b.life, b.end = context.WithCancel(context.Background())
	b.owner = ownership.New(ownership.Config{
		Self: cfg.Self, Meta: deps.Meta, View: deps.Cache, Session: deps.Session, Host: b, Log: deps.Log,
		Probe: func(ctx context.Context, k meta.BrokerInfo) ownership.Presence { return presence(ctx, cfg.Self, k) },
	})
	b.peers = &ownership.Peers{
		Self: cfg.Self.ID, View: deps.Cache, Listener: b.owner, Pinger: pinger{self: cfg.Self.ID, log: deps.Log}.converse, Log: deps.Log,
	}
	b.latest.Store(&figures{})
	b.topicEnv, b.stateEnv = b.environments()
	b.repair = b.newRepair()
	b.metrics = newMetrics(deps.Registerer, b)
	return b, nil
}

func (b *Broker) environments() (topic.Env, statelog.Env) {
	ledgers := ledger.Env{
		Bookies: b.deps.Bookies, Candidates: b.candidates, Ticker: b.ticker, Log: b.log,
		Metrics: ledger.NewMetrics(b.deps.Registerer), Config: b.cfg.Ledger,
		MayAckEarly: b.deps.Session.Alive, OnHint: func(h ledger.Hint) { b.repair.Hint(h) },
	}
	chains := chain.Env{
		Ledger: ledgers, Meta: b.deps.Meta, IDs: chain.NewIDs(b.deps.Meta, 0), Log: b.log,
		Metrics: chain.NewMetrics(b.deps.Registerer),
	}
	topics := topic.Env{
		Chain: chains, Cache: topic.NewCache(b.cfg.CacheBytes), Budget: budget.New(b.cfg.PublishBytes), Log: b.log,
		Metrics: topic.NewMetrics(b.deps.Registerer),
	}
	states := statelog.Env{Chain: chains, Log: b.log, Metrics: statelog.NewMetrics(b.deps.Registerer)}
	return topics, states
}

// candidates lists the live bookies for placement, and those that are marked: an open ledger must leave them, also when
// they are down.
func (b *Broker) candidates() []ledger.Candidate {
	bookies := b.deps.Cache.Bookies()
	out := make([]ledger.Candidate, len(bookies))
	alive := make(map[entry.StorageUUID]bool, len(bookies))
	for i, k := range bookies {
		out[i] = ledger.Candidate{
			UUID: k.UUID, Host: k.Host, Zone: k.Zone, FreeBytes: k.FreeBytes,
			Writable: k.State == meta.BookieWritable, Draining: k.Draining, Full: k.State == meta.BookieFull,
		}
		alive[k.UUID] = true
	}
	for _, m := range b.deps.Cache.Marks() {
		if !alive[m.UUID] {
			out = append(out, ledger.Candidate{UUID: m.UUID, Draining: true, Absent: true})
		}
	}
	return out
}

// Register offers the broker's services.
func (b *Broker) Register(s grpc.ServiceRegistrar) {
	brokerv1.RegisterPubSubServer(s, &pubsub{b: b})
	brokerv1.RegisterLookupServer(s, &lookup{b: b})
	brokerv1.RegisterAdminServer(s, &admin{b: b})
}

// Run owns bundles, pings peers and keeps house until ctx ends; then nothing is served any more, and nothing was
// handed over unless Drain was called before.
func (b *Broker) Run(ctx context.Context) {
	var loops sync.WaitGroup
	loops.Go(func() { b.peers.Run(ctx) })
	loops.Go(func() { b.keepHouse(ctx) })
	loops.Go(func() { b.look(ctx) })
	loops.Go(func() { b.followDeletions(ctx) })
	loops.Go(func() { b.runRepair(ctx) })
	loops.Go(func() { b.followMarks(ctx) })
	loops.Go(func() { b.runOperations(ctx) })
	b.owner.Run(ctx)
	loops.Wait()
	b.end()
	b.mu.Lock()
	bundles := b.bundles
	b.bundles = map[meta.BundleID]*bundle{}
	b.mu.Unlock()
	for _, u := range bundles {
		u.drop("")
	}
	b.work.Wait()
	b.ticker.Close()
}

// Drain hands every bundle over to other brokers and tells clients where to go. Run goes on meanwhile. When it returns,
// nil or the context's error, the process may end.
func (b *Broker) Drain(ctx context.Context) error {
	if !b.draining.Swap(true) {
		close(b.drains)
	}
	defer b.drainEnd.Do(func() { close(b.drained) })
	if err := b.owner.Drain(ctx); err != nil {
		return fmt.Errorf("drain broker: %w", err)
	}
	return nil
}

// Ready reports whether the broker can serve: nil, or what it lacks.
func (b *Broker) Ready() error {
	switch {
	case b.draining.Load():
		return refuse(brokerv1.Code_CODE_UNAVAILABLE, "broker is draining")
	case !b.deps.Session.Alive(): // it may have a lease that it cannot renew
		return refuse(brokerv1.Code_CODE_UNAVAILABLE, "broker has no lease that lasts: etcd does not answer")
	}
	return b.registered()
}

func (b *Broker) registered() error {
	if k, ok := b.deps.Cache.Broker(b.cfg.Self.ID); !ok || ownership.LifeOf(k) != ownership.LifeOf(b.cfg.Self) {
		return refuse(brokerv1.Code_CODE_UNAVAILABLE, "broker is not registered yet")
	}
	return nil
}

// Serve opens a bundle for its topics. It is called by ownership.
func (b *Broker) Serve(g meta.Guard) {
	u := newBundle(b, g)
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, twice := b.bundles[g.Bundle]; twice {
		panic("broker: bundle is served twice")
	}
	b.bundles[g.Bundle] = u
	close(b.serving)
	b.serving = make(chan struct{})
}

// Stop ends what Serve began. It is called by ownership.
func (b *Broker) Stop(ctx context.Context, g meta.Guard, why ownership.Reason, next string) {
	b.mu.Lock()
	u := b.bundles[g.Bundle]
	delete(b.bundles, g.Bundle)
	b.mu.Unlock()
	if u == nil || u.guard != g {
		return // Run has ended
	}
	b.metrics.handovers.WithLabelValues(string(why)).Inc()
	if why == ownership.ReasonHandOver {
		u.handOver(ctx, next)
	} else {
		u.drop(next)
	}
}

// served returns the bundle if it is served here, and otherwise a channel that is closed when another one is.
func (b *Broker) served(id meta.BundleID) (*bundle, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bundles[id], b.serving
}

// all returns the bundles served now.
func (b *Broker) all() []*bundle {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]*bundle, 0, len(b.bundles))
	for _, u := range b.bundles {
		out = append(out, u)
	}
	return out
}

// spawn runs f on a goroutine that Run waits for. It reports false when the broker has ended.
func (b *Broker) spawn(f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.life.Err() != nil {
		return false
	}
	b.work.Go(f)
	return true
}
