package sim

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// membership is what makes a broker's process one of the cluster's: the product's session, cache and ownership. It is of
// one life.
type membership struct {
	cache    *meta.Cache
	session  *lease.Session    // nil until there is a lease
	owner    *ownership.Runner // nil likewise
	draining bool
}

var quiet = slog.New(slog.DiscardHandler)

// join starts what the product's node starts, in its order.
func (b *broker) join() {
	b.membership = membership{cache: meta.NewCacheOver(context.Background(), b.meta, b.etcd.watch, b.sched)}
	b.sched.Go(func() {
		ctx := context.Background()
		if err := b.cache.Synced(ctx); err != nil {
			panic(err)
		}
		session, err := lease.NewSessionOver(ctx, b.etcd, b.sched, leaseTTL, nil)
		if err != nil {
			panic(err)
		}
		self := meta.BrokerInfo{ID: b.name, URL: "penstock://" + b.name, Peer: b.name, Started: b.sched.Now()}
		b.session = session
		b.owner = ownership.New(ownership.Config{
			Self: self, Meta: b.meta, View: b.cache, Session: session, Host: host{b}, Sched: b.sched,
			Probe: func(_ context.Context, holder meta.BrokerInfo) ownership.Presence {
				if holder.Peer != self.Peer {
					panic("sim: a broker moves")
				}
				return ownership.PresenceGone // the port is this process's now
			},
		})
		peers := &ownership.Peers{Self: b.name, View: b.cache, Listener: b.owner, Pinger: b.ping, Sched: b.sched, Log: quiet}
		b.sched.Go(func() { peers.Run(ctx) })
		b.sched.Go(func() {
			_, _ = b.sched.Wait(ctx, sched.Channels{b.owner.Failed()})
			b.w.fail("I16", subject{}, "%s gives up: %v", b.name, b.owner.Err())
		})
		b.owner.Run(ctx)
	})
}

// leaseHolds is what acknowledgements that need no transaction go by.
func (b *broker) leaseHolds() bool {
	if b.session == nil || !b.session.Alive() {
		return false
	}
	if id := int64(b.session.ID()); !b.w.etcd.model.Leased(b.w.clock(), id) {
		b.w.fail("lease", subject{}, "%s goes by lease %d, which has run out", b.name, id)
	}
	return true
}

// candidates are the bookies that are registered, as far as the broker has heard.
func (b *broker) candidates() []ledger.Candidate {
	bookies := b.cache.Bookies()
	all := make([]ledger.Candidate, len(bookies))
	for i, k := range bookies {
		all[i] = ledger.Candidate{
			UUID: k.UUID, Host: k.Host, Zone: k.Zone, FreeBytes: k.FreeBytes,
			Writable: k.State == meta.BookieWritable, Draining: k.Draining, Full: k.State == meta.BookieFull,
		}
		if i >= b.w.replication.WriteQuorum-1 && b.w.now < b.w.scarce && !b.w.healed {
			all[i].Writable = false
		}
	}
	return all
}

// host serves the bundles that the broker holds: each is a topic.
type host struct{ b *broker }

func (h host) topic(id meta.BundleID) *topic {
	i := slices.IndexFunc(h.b.w.topics, func(tp *topic) bool { return tp.bundle == id })
	return h.b.w.topics[i]
}

// Serve implements ownership.Host.
func (h host) Serve(g meta.Guard) {
	b, tp := h.b, h.topic(g.Bundle)
	b.w.trace(b.name, topicSubject(tp), "owns topic %d with epoch %d", tp.index, g.Epoch)
	b.w.ghost.served(b, tp, g.Epoch)
	if b.owned[tp.index] != nil {
		b.w.fail("I9", topicSubject(tp), "%s serves topic %d with epoch %d before it has stopped with %d", b.name, tp.index, g.Epoch, b.owned[tp.index].epoch)
	}
	b.own(tp, g.Epoch)
}

// Stop implements ownership.Host.
func (h host) Stop(ctx context.Context, g meta.Guard, why ownership.Reason, next string) {
	b, tp := h.b, h.topic(g.Bundle)
	b.w.trace(b.name, topicSubject(tp), "stops topic %d with epoch %d: %s, next is %s", tp.index, g.Epoch, why, next)
	held := b.owned[tp.index]
	if held == nil || held.epoch != g.Epoch {
		return // it was closed in the end
	}
	held.cancel()
	sched.Until(b.sched, held.ended) //nolint:contextcheck // it ends with what was just canceled
	if s := held.served; s != nil {
		if why == ownership.ReasonHandOver {
			ctx, cancel := b.sched.WithTimeout(ctx, handOverPatience)
			err := s.close(ctx)
			cancel()
			b.w.trace(b.name, topicSubject(tp), "hands topic %d over, error %v", tp.index, err != nil)
		}
		s.shutdown()
	}
	delete(b.owned, tp.index)
}

// handOverPatience is the product's.
const handOverPatience = 2 * time.Second

// lookUp has clients look for a topic.
func (w *world) lookUp(tp *topic) {
	w.after(w.between(50*time.Millisecond, time.Second), func() { w.lookUp(tp) })
	if b := pick(w.kernel, w.brokers); b.up && !b.paused && b.owner != nil {
		b.do(func() { b.owner.Want(tp.bundle) })
	}
}

// leave ends a broker in good order: it hands its bundles over first. It ends by itself if that takes too long.
func (b *broker) leave(patience time.Duration) {
	if !b.up || b.draining || b.owner == nil {
		return
	}
	b.draining = true
	b.sched.Go(func() {
		ctx, cancel := b.sched.WithTimeout(context.Background(), patience)
		defer cancel()
		err := b.owner.Drain(ctx)
		b.w.trace(b.name, subject{}, "has handed over, error %v", err != nil)
		if err == nil {
			for _, tp := range b.w.topics {
				if b.owned[tp.index] != nil {
					b.w.fail("I9", topicSubject(tp), "%s has handed everything over, and serves topic %d", b.name, tp.index)
				}
			}
			_ = b.session.Close(ctx)
		}
		b.w.after(0, func() {
			b.crash("it was told to")
			b.w.after(b.w.between(0, 2*time.Second), func() {
				if !b.up {
					b.boot()
				}
			})
		})
	})
}

// ping is an ownership.Pinger: one stream after the other to whoever is at the peer's address.
func (b *broker) ping(ctx context.Context, peer meta.BrokerInfo, pong func(draining bool), refused func(error)) {
	to := b.w.brokers[slices.IndexFunc(b.w.brokers, func(o *broker) bool { return o.name == peer.Peer })]
	for ctx.Err() == nil {
		s := &pingStream{from: b, to: to, life: b.life, server: to.life, pong: pong, refused: refused, broke: make(chan struct{}, ownCapacity)}
		s.there.way, s.back.way = way{b.name, to.name}, way{to.name, b.name}
		s.ping()
		_, _ = b.sched.Wait(ctx, sched.Channels{s.broke})
		s.there.broken, s.back.broken = true, true
		_ = sched.Sleep(ctx, b.sched, ownership.PingEvery)
	}
}

// pingStream is a stream of pings, as a chain of events.
type pingStream struct {
	from, to     *broker
	life, server int // of from and of to
	there, back  pipe
	pong         func(draining bool)
	refused      func(error)
	broke        chan struct{}
}

// ping sends one, and the next one in a while.
func (s *pingStream) ping() {
	if s.back.broken {
		return
	}
	w := s.from.w
	s.from.after(ownership.PingEvery+w.wakeDelay(), func() {
		s.from.idle = true // this wakes nobody
		s.ping()
	})
	if s.to.up && !s.to.paused && s.to.life == s.server && s.there.last <= w.now && w.net.isOpen(s.there.way) && w.net.isOpen(s.back.way) {
		// As if it took no time to get there, and the answer both ways' time.
		s.back.last = max(s.back.last, w.now+w.net.delay())
		s.answer()
		return
	}
	w.net.send(&s.there, s.arrived)
}

func (s *pingStream) arrived() {
	if s.to.up && s.to.life == s.server {
		s.to.deliver(s.server, func() {
			s.to.idle = true
			s.answer()
		})
		return
	}
	s.there.broken = true
	s.from.w.net.send(&s.back, func() {
		s.from.deliver(s.life, s.breaks)
		s.back.broken = true
	})
}

// breaks is the end of a stream that whoever is there now does not know, or refuses.
func (s *pingStream) breaks() {
	s.there.broken, s.back.broken = true, true
	if !s.to.up {
		s.refused(errors.New("connection refused"))
	}
	s.from.fire(s.broke)
}

func (s *pingStream) answer() {
	draining := s.to.draining
	s.from.w.net.send(&s.back, func() { s.from.deliver(s.life, func() { s.pong(draining) }) })
}

// unrest has brokers stop hearing each other, or leave in good order, every now and then in all runs, so that
// topics move.
func (w *world) unrest() {
	if w.healed {
		return
	}
	pause := w.between(500*time.Millisecond, 6*time.Second)
	pause = calmer(w, pause, 10)
	w.after(pause, w.unrest)
	br, o := pick(w.kernel, w.brokers), pick(w.kernel, w.brokers)
	span := w.between(500*time.Millisecond, 3*time.Second)
	switch {
	case w.chance(6):
		w.inject(BrokerLeave, span)
	case br != o:
		w.trace("sim", subject{}, "%s does not hear %s for %v", br.name, o.name, span)
		w.block(o.name, br.name, span)
		if w.chance(2) {
			w.block(br.name, o.name, span)
		}
	}
}

// ownerGhost is what was said of a bundle.
type ownerGhost struct {
	epoch  entry.Epoch
	record meta.Owner             // the last one in etcd
	by     map[entry.Epoch]string // which broker owned it, by epoch
	lives  map[entry.Epoch]int    // and in which life it served
}

func (g *ghost) bundle(tp *topic) *ownerGhost {
	o := g.owners[tp.index]
	if o == nil {
		o = &ownerGhost{by: map[entry.Epoch]string{}, lives: map[entry.Epoch]int{}}
		g.owners[tp.index] = o
	}
	return o
}

// served is a broker about to serve a topic: nobody else has, with that epoch.
func (g *ghost) served(b *broker, tp *topic, epoch entry.Epoch) {
	o := g.bundle(tp)
	life, before := o.lives[epoch]
	if o.by[epoch] != b.name || before && life != b.life {
		g.w.fail("I9", topicSubject(tp), "%s, in life %d, serves topic %d with epoch %d, which is %s's, in life %d", b.name, b.life, tp.index, epoch, o.by[epoch], life)
	}
	o.lives[epoch] = b.life
}

// ownerChanged looks at a bundle's owner and epoch after a change.
func (g *ghost) ownerChanged(tp *topic) {
	now, err := g.w.checker.GetOwner(context.Background(), tp.bundle)
	s := topicSubject(tp)
	if err != nil {
		g.w.fail("I9", s, "owner of topic %d: %v", tp.index, err)
		return
	}
	o := g.bundle(tp)
	g.w.trace("etcd", s, "topic %d is %q's, epoch %d", tp.index, now.Broker, now.Epoch)
	switch {
	case now.Epoch < o.epoch:
		g.w.fail("I9", s, "the epoch of topic %d falls from %d to %d", tp.index, o.epoch, now.Epoch)
	case now.Broker != "" && now.Epoch == o.epoch && o.by[now.Epoch] != now.Broker:
		g.w.fail("I9", s, "%s owns topic %d with epoch %d, which was %s's", now.Broker, tp.index, now.Epoch, o.by[now.Epoch])
	}
	o.epoch, o.record = now.Epoch, now
	if now.Broker != "" {
		o.by[now.Epoch] = now.Broker
	} else if g.w.chance(2) {
		g.w.etcd.letGo()
	}
}

// checkOwner reports whether a topic has an owner that is registered, whose lease lives, and who serves it, and whether all brokers know.
func (w *world) checkOwner(tp *topic) bool {
	now, err := w.checker.GetOwner(context.Background(), tp.bundle)
	if err != nil || now.Broker == "" {
		return false
	}
	for _, b := range w.brokers {
		known, ok := b.cache.Owner(tp.bundle)
		if !ok || known.Broker != now.Broker || known.Epoch != now.Epoch {
			return false
		}
		if _, ok := b.cache.Broker(now.Broker); !ok {
			return false
		}
		for _, k := range b.cache.Bookies() { // none that is gone
			if !slices.ContainsFunc(w.bookies, func(o *bookieProcess) bool { return o.uuid == k.UUID }) {
				return false
			}
		}
		if b.name == now.Broker && (b.serving(tp) == nil || b.owned[tp.index].epoch != now.Epoch || !b.leaseHolds()) {
			return false
		}
	}
	return true
}

// register keeps the bookie registered, as the product's does it.
func (b *bookieProcess) register(store *ledgerstore.Store) {
	ctx := context.Background()
	session, err := lease.NewSessionOver(ctx, b.etcd, b.sched, registration, nil)
	if err != nil {
		panic(err)
	}
	r := &bookie.Registrar{
		Meta: b.meta, Session: session, Store: store, Interval: 2 * time.Second, Sched: b.sched, Log: quiet,
		Base: meta.BookieInfo{ID: b.id, UUID: b.uuid, Host: b.name, Data: b.name, Zone: b.zone, Started: b.sched.Now()},
		Holder: func(_ context.Context, addr string) bookie.Presence {
			if addr != b.name {
				panic("sim: a bookie moves")
			}
			return bookie.PresenceGone // the port is this process's now
		},
	}
	reg, err := r.Register(ctx)
	if err == nil {
		err = r.Run(ctx, reg)
	}
	b.w.fail("I16", subject{}, "%s gives up: %v", b.name, err)
}
