package ownership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

const (
	tickEvery = 100 * time.Millisecond
	// txnPatience bounds one attempt of a transaction; what it did not settle is tried again by the next step.
	txnPatience = 2 * time.Second
	// releasePatience bounds the attempt to release a bundle, which a broker makes when it ends: its session's end does
	// the same for all of them.
	releasePatience = time.Second
)

// View is what a watch cache tells of the cluster; *meta.Cache is one.
type View interface {
	Revision() int64
	Brokers() []meta.BrokerInfo
	Broker(id string) (meta.BrokerInfo, bool)
	Owners() map[meta.BundleID]meta.Owner
	Changed(k meta.Kind) <-chan struct{}
}

// Host serves bundles.
type Host interface {
	// Serve allows the bundle's topics to be opened under the guard. It must not block.
	Serve(g meta.Guard)
	// Stop ends that: when it returns, nothing more is served under the guard. next is the URL that clients should
	// turn to, "" if none is known. Stops of several bundles run side by side.
	Stop(ctx context.Context, g meta.Guard, why Reason, next string)
}

// Presence is what became of the process that a registration names.
type Presence uint8

// The kinds of presence.
const (
	// PresenceUnknown: it may live, or is about to end. Its lease decides.
	PresenceUnknown Presence = iota
	// PresenceGone: nobody is there any more, or somebody else is.
	PresenceGone
	// PresenceAlive: it answers.
	PresenceAlive
)

// IDTakenError says that another process has this broker's id. There is nothing to do but to end: brokers and clients
// could not tell one from the other.
type IDTakenError struct {
	ID, Peer string // Peer is where the other process is
}

// Error says what to do.
func (e *IDTakenError) Error() string {
	return fmt.Sprintf("another process is broker %q, at %s: stop one of the two, or give each its own --broker-id", e.ID, e.Peer)
}

// Config is what a [Runner] works with; all fields but Probe, Sched and Log are required.
type Config struct {
	Self    meta.BrokerInfo
	Meta    *meta.Store
	View    View
	Session *lease.Session
	Host    Host
	// Probe finds out what became of the process of a registration under this broker's id; nil never knows.
	Probe func(ctx context.Context, b meta.BrokerInfo) Presence
	Sched sched.Scheduler // nil: the real one
	Log   *slog.Logger
}

// Runner drives a [Core]: it announces the broker, follows the watch cache and the lease, and carries actions out.
//
// One mutex guards the core, so that lookups are answered without waiting for a goroutine. Transactions and stops run
// beside the loop, one goroutine each, and all have ended when Run returns.
type Runner struct {
	cfg   Config
	sched sched.Scheduler

	mu      sync.Mutex
	core    *Core
	queue   []Action      // to be carried out by the loop, in order
	changed chan struct{} // closed and replaced whenever the core has taken a step
	wake    chan struct{}
	err     error // why failed is closed
	failed  chan struct{}

	start time.Time
	work  *sched.Group
}

// New makes a runner that holds nothing yet.
func New(cfg Config) *Runner {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Probe == nil {
		cfg.Probe = func(context.Context, meta.BrokerInfo) Presence { return PresenceUnknown }
	}
	s := sched.OrReal(cfg.Sched)
	return &Runner{
		cfg: cfg, sched: s, core: NewCore(cfg.Self.ID, LifeOf(cfg.Self)), changed: make(chan struct{}), wake: make(chan struct{}, 1),
		failed: make(chan struct{}), start: s.Now(), work: sched.NewGroup(s),
	}
}

// Run announces the broker and keeps deciding until ctx ends. It then returns without handing anything over; call
// Drain before to do that.
func (r *Runner) Run(ctx context.Context) {
	r.work.Go(func() { r.announce(ctx) })
	r.work.Go(func() { r.follow(ctx) })
	tick, stop := sched.After(r.sched, tickEvery)
	for {
		r.carryOut(ctx)
		switch i, err := r.sched.Wait(ctx, sched.Channels{r.wake, tick}); {
		case err != nil:
			stop()
			r.work.Wait()
			return
		case i == 1:
			tick, stop = sched.After(r.sched, tickEvery)
			r.step(Tick{Now: r.sched.Now().Sub(r.start)})
		}
	}
}

// Failed is closed when the broker can take no bundles any more and should end, for the reason that Err gives.
func (r *Runner) Failed() <-chan struct{} { return r.failed }

// Err returns an *[IDTakenError] once Failed is closed.
func (r *Runner) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *Runner) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
		close(r.failed)
	}
}

// Drain hands every bundle over and returns when that is done, or with the context's error. Run must be running.
func (r *Runner) Drain(ctx context.Context) error {
	r.step(Drain{})
	for {
		r.mu.Lock()
		done, changed := r.core.Drained(), r.changed
		r.mu.Unlock()
		if done {
			return nil
		}
		if _, err := r.sched.Wait(ctx, sched.Channels{changed}); err != nil {
			return fmt.Errorf("hand bundles over: %w", err)
		}
	}
}

// Guard returns the proof of ownership of a bundle that may be served here.
func (r *Runner) Guard(id meta.BundleID) (meta.Guard, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	epoch, ok := r.core.Holds(id)
	return meta.Guard{Bundle: id, Epoch: epoch}, ok
}

// Route is where a bundle is, or will be, served.
type Route struct {
	Broker string
	URL    string // "" when no broker can be named
	Epoch  entry.Epoch
	Mine   bool // served here, now, under Epoch
}

// Locate says where a bundle is served. If nobody serves it and this broker should, it is taken first; Locate waits
// for that until ctx ends, then answers as far as it knows.
func (r *Runner) Locate(ctx context.Context, id meta.BundleID) Route {
	return r.LocateBeyond(ctx, id, 0)
}

// LocateBeyond is Locate for whoever hears nothing of the owner with an epoch: until ctx ends, it waits for a later one, too.
func (r *Runner) LocateBeyond(ctx context.Context, id meta.BundleID, beyond entry.Epoch) Route {
	r.step(Wanted{Bundle: id})
	for {
		r.mu.Lock()
		epoch, mine := r.core.Holds(id)
		broker, routed := r.core.Route(id)
		changed := r.changed
		r.mu.Unlock()
		switch {
		case mine:
			return Route{Broker: r.cfg.Self.ID, URL: r.cfg.Self.URL, Epoch: epoch, Mine: true}
		case broker != "" && broker != r.cfg.Self.ID && (routed > beyond || ctx.Err() != nil):
			return Route{Broker: broker, URL: r.url(broker), Epoch: routed}
		case ctx.Err() != nil:
			return Route{}
		}
		_, _ = r.sched.Wait(ctx, sched.Channels{changed}) // the loop asks ctx
	}
}

// Want has the bundle taken by whichever broker should, if that is this one and nobody owns it. It does not wait.
func (r *Runner) Want(id meta.BundleID) { r.step(Wanted{Bundle: id}) }

// Missing counts the bundles that somebody has used and that nobody owns, as far as this broker knows.
func (r *Runner) Missing() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.Missing()
}

// Fenced says that serving under g met a newer owner.
func (r *Runner) Fenced(g meta.Guard) { r.step(Fenced{Bundle: g.Bundle, Epoch: g.Epoch}) }

// LifeOf tells the process that a registration is of from others of its name. Registrations keep milliseconds.
func LifeOf(b meta.BrokerInfo) Life { return Life(b.Started.UnixMilli()) }

// PeerSuspected says that a broker does not answer, or that nobody listens at its address. It is to be said again and
// again as long as that is so.
func (r *Runner) PeerSuspected(peer meta.BrokerInfo, refused bool) {
	r.step(Suspected{ID: peer.ID, Life: LifeOf(peer), Refused: refused})
}

// PeerTrusted says that a broker answers.
func (r *Runner) PeerTrusted(peer meta.BrokerInfo) {
	r.step(Trusted{ID: peer.ID, Life: LifeOf(peer)})
}

// PeerDraining says that a broker is handing its bundles over. It too is to be said again.
func (r *Runner) PeerDraining(peer meta.BrokerInfo) {
	r.step(Draining{ID: peer.ID, Life: LifeOf(peer)})
}

func (r *Runner) url(broker string) string {
	info, ok := r.cfg.View.Broker(broker)
	if !ok {
		return ""
	}
	return info.URL
}

func (r *Runner) step(events ...Event) {
	r.mu.Lock()
	r.core.At(r.sched.Now().Sub(r.start))
	for _, e := range events {
		r.queue = append(r.queue, r.core.Step(e)...)
	}
	close(r.changed)
	r.changed = make(chan struct{})
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Runner) carryOut(ctx context.Context) {
	r.mu.Lock()
	actions := r.queue
	r.queue = nil
	r.mu.Unlock()
	for _, a := range actions {
		switch a := a.(type) {
		case Take:
			r.work.Go(func() { r.take(ctx, a) })
		case Reacquire:
			r.work.Go(func() { r.reacquire(ctx, a) })
		case Serve:
			r.cfg.Log.Info("bundle is served here", "bundle", a.Bundle, "epoch", a.Epoch)
			r.cfg.Host.Serve(meta.Guard{Bundle: a.Bundle, Epoch: a.Epoch})
		case Stop:
			r.cfg.Log.Info("bundle is no longer served here", "bundle", a.Bundle, "epoch", a.Epoch, "why", string(a.Reason), "next", a.Next)
			next := ""
			if a.Next != "" {
				next = r.url(a.Next)
			}
			r.work.Go(func() {
				r.cfg.Host.Stop(ctx, meta.Guard{Bundle: a.Bundle, Epoch: a.Epoch}, a.Reason, next)
				r.step(Stopped{Bundle: a.Bundle})
			})
		case Release:
			r.work.Go(func() { r.release(ctx, a) })
		}
	}
}

func (r *Runner) take(ctx context.Context, a Take) {
	done := Taken{Bundle: a.Bundle}
	defer func() { r.step(done) }()
	txn, cancel := r.sched.WithTimeout(ctx, txnPatience)
	defer cancel()
	grant, err := r.cfg.Session.Wait(txn)
	if err != nil {
		return // no lease: the lease's own log says so
	}
	expect := meta.ExpectNone()
	if a.Owner != "" {
		expect = meta.ExpectOwner(meta.Owner{Bundle: a.Bundle, Broker: a.Owner, Epoch: a.Epoch})
	}
	owner, err := r.cfg.Meta.TakeBundle(txn, a.Bundle, r.cfg.Self, grant.ID, expect)
	switch {
	case errors.Is(err, meta.ErrNotFound):
		done.NoSuch = true
		r.cfg.Log.Debug("bundle is gone with its namespace", "bundle", a.Bundle)
		return
	case err != nil:
		if ctx.Err() == nil && !errors.Is(err, meta.ErrConflict) {
			r.cfg.Log.Warn("bundle could not be taken; trying again", "bundle", a.Bundle, "error", err)
		}
		return
	}
	done.OK, done.Epoch, done.Rev = true, owner.Epoch, owner.Rev
}

func (r *Runner) reacquire(ctx context.Context, a Reacquire) {
	done := Reacquired{Bundle: a.Bundle, Outcome: ReacquireUnavailable}
	defer func() { r.step(done) }()
	txn, cancel := r.sched.WithTimeout(ctx, txnPatience)
	defer cancel()
	grant, err := r.cfg.Session.Wait(txn)
	if err != nil {
		return
	}
	owner, err := r.cfg.Meta.ReacquireBundle(txn, a.Bundle, r.cfg.Self, grant.ID, a.Epoch)
	switch {
	case err == nil:
		done.Outcome, done.Rev = ReacquireOK, owner.Rev
		r.cfg.Log.Info("bundle is kept under a new lease", "bundle", a.Bundle, "epoch", a.Epoch)
	case errors.Is(err, meta.ErrEpoch), errors.Is(err, meta.ErrNotFound):
		done.Outcome = ReacquireLost
	}
}

func (r *Runner) release(ctx context.Context, a Release) {
	defer r.step(Released{Bundle: a.Bundle})
	if !r.cfg.Session.Alive() {
		return // its key is gone, or will go with the lease
	}
	txn, cancel := r.sched.WithTimeout(ctx, releasePatience)
	defer cancel()
	err := r.cfg.Meta.ReleaseBundle(txn, meta.Guard{Bundle: a.Bundle, Epoch: a.Epoch}, r.cfg.Self.ID)
	if err != nil && !errors.Is(err, meta.ErrEpoch) && ctx.Err() == nil {
		r.cfg.Log.Warn("bundle could not be released; its lease will end", "bundle", a.Bundle, "error", err)
	}
}

// announce keeps the broker registered under the lease of the moment, and reports the lease's losses.
func (r *Runner) announce(ctx context.Context) {
	for {
		grant, err := r.register(ctx)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, lease.ErrClosed) {
				r.fail(err)
			}
			return
		}
		r.step(LeaseRenewed{})
		if _, err := r.sched.Wait(ctx, sched.Channels{grant.Lost()}); err != nil {
			return
		}
		r.cfg.Log.Warn("lease is lost; bundles are kept until another broker takes them")
		r.step(LeaseLost{})
	}
}

// register registers under the lease of now, until that is done or ctx ends, or another process turns out to have the
// id, an *[IDTakenError]. A process that is started again within the TTL of its predecessor's lease meets that one's
// registration, and does not wait for its end unless it may still live.
func (r *Runner) register(ctx context.Context) (*lease.Grant, error) {
	var gone meta.BrokerRegisteredError // a registration whose process is
	told := false
	for {
		grant, err := r.cfg.Session.Wait(ctx)
		if err != nil {
			return nil, fmt.Errorf("wait for a lease: %w", err)
		}
		err = r.cfg.Meta.RegisterBroker(ctx, r.cfg.Self, grant.ID, gone.Lease)
		var taken *meta.BrokerRegisteredError
		switch {
		case err == nil:
			return grant, nil
		case ctx.Err() != nil:
			return nil, err //nolint:wrapcheck // the end
		case errors.As(err, &taken):
			switch r.cfg.Probe(ctx, taken.Info) {
			case PresenceGone:
				gone = *taken
				continue
			case PresenceAlive:
				return nil, &IDTakenError{ID: r.cfg.Self.ID, Peer: taken.Info.Peer}
			case PresenceUnknown:
				if !told {
					told = true
					r.cfg.Log.Warn("this broker's id is registered by a process that does not answer: waiting for its lease to end",
						"broker", r.cfg.Self.ID, "addr", taken.Info.Peer)
				}
			}
		case !errors.Is(err, meta.ErrLease):
			r.cfg.Log.Warn("broker could not be registered; trying again", "error", err)
		}
		if err := sched.Sleep(ctx, r.sched, tickEvery); err != nil {
			return nil, err //nolint:wrapcheck // the end
		}
	}
}

// follow turns what the watch cache shows into events. It reports the whole picture each time; the core knows by
// revisions what is news. Owners are read before brokers, and told after them: an owner that is registered is never
// taken for one that is not.
func (r *Runner) follow(ctx context.Context) {
	live := map[string]bool{}
	known := map[meta.BundleID]bool{}
	registered := false
	for {
		brokersChanged, ownersChanged := r.cfg.View.Changed(meta.KindBrokers), r.cfg.View.Changed(meta.KindOwners)
		rev := r.cfg.View.Revision()
		owners := r.cfg.View.Owners()
		var events []Event
		before := live
		live = map[string]bool{}
		for _, b := range r.cfg.View.Brokers() {
			live[b.ID] = true
			events = append(events, BrokerSeen{ID: b.ID, Life: LifeOf(b)})
			if b.ID == r.cfg.Self.ID {
				// An earlier life's registration may be there before ours, but none after it.
				mine := LifeOf(b) == LifeOf(r.cfg.Self)
				if registered && !mine {
					r.fail(&IDTakenError{ID: b.ID, Peer: b.Peer})
				}
				registered = registered || mine
			}
		}
		for _, id := range slices.Sorted(maps.Keys(before)) {
			if !live[id] {
				events = append(events, BrokerGone{ID: id})
			}
		}
		for _, id := range slices.Sorted(maps.Keys(owners)) {
			o := owners[id]
			known[id] = true
			events = append(events, OwnerSeen{Bundle: id, Owner: o.Broker, Epoch: o.Epoch, Rev: o.Rev})
		}
		for _, id := range slices.Sorted(maps.Keys(known)) {
			if _, owned := owners[id]; !owned {
				events = append(events, OwnerGone{Bundle: id, Rev: rev})
			}
		}
		r.step(events...)
		if _, err := r.sched.Wait(ctx, sched.Channels{brokersChanged, ownersChanged}); err != nil {
			return
		}
	}
}
