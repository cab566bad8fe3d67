package sim

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// broker is a broker's process: its lease, the bundles it took, and their topics. What is below the line is of one life.
type broker struct {
	process
	w     *world
	index int
	meta  *meta.Store
	etcd  *etcdClient

	lease    int64 // 0: none
	deadline time.Duration
	owned    map[int]*holding // by topic
	taking   map[int]bool
	client   *bookieClient
	env      chain.Env          // for all chains of the process
	view     []ledger.Candidate // as of the last look
	viewAt   time.Duration
}

// holding is a bundle that the broker owns, or believes to own.
type holding struct {
	epoch  entry.Epoch
	ctx    context.Context //nolint:containedctx // ends with the holding
	cancel context.CancelFunc
	served service // nil while it is being opened
}

const (
	leaseTTL     = 4 * time.Second
	viewEvery    = 200 * time.Millisecond
	blockOfIDs   = 4
	openPatience = 10 * time.Second
)

func (b *broker) boot() {
	b.start()
	b.meta = meta.NewOver(b.etcd, b.sleep, clusterName, nil)
	b.lease, b.deadline = 0, 0
	b.owned, b.taking = map[int]*holding{}, map[int]bool{}
	b.view, b.viewAt = nil, -time.Hour
	b.client = newBookieClient(b)
	b.env = chain.Env{
		Ledger: ledger.Env{
			Bookies: b.client, Candidates: b.candidates, Ticker: ledger.NewTicker(0), MayAckEarly: b.leaseHolds,
			Config: b.w.ledgerConfig(), Sched: b.sched,
		},
		Meta: b.meta, IDs: chain.NewIDs(b.meta, blockOfIDs), Sched: b.sched,
	}
	b.w.trace(b.name, subject{}, "up")
	b.keepLease()
}

func (b *broker) crash(why string) {
	if !b.up {
		return
	}
	b.w.trace(b.name, subject{}, "dies: %s", why)
	for _, l := range b.client.opened {
		if c := l.conn; c != nil {
			l.conn = nil
			c.back.broken = true
			b.w.after(b.w.between(0, 5*time.Millisecond), func() { c.there.broken = true })
		}
	}
	b.kill()
	b.w.ghost.brokerGone(b)
}

// keepLease renews the lease three times per TTL, and gets another one when it is gone.
func (b *broker) keepLease() {
	b.after(leaseTTL/3, b.keepLease)
	if b.etcd.lost() || b.w.etcd.away {
		return
	}
	sent := b.w.now
	b.after(b.w.etcd.delay(), func() {
		m := b.w.etcd.model
		id := b.lease
		if id != 0 {
			if _, err := m.KeepAlive(b.w.clock(), id); err != nil {
				id = 0
			}
		}
		if id == 0 {
			var err error
			if id, err = m.Grant(b.w.clock(), 0, int64(leaseTTL/time.Second)); err != nil {
				panic(err)
			}
		}
		if b.etcd.lost() {
			return
		}
		b.after(b.w.etcd.delay(), func() {
			b.lease, b.deadline = id, sent+leaseTTL
		})
	})
}

func (b *broker) leaseHolds() bool { return b.lease != 0 && b.w.now < b.deadline }

// candidates are the bookies as this broker has heard of them.
func (b *broker) candidates() []ledger.Candidate {
	if b.w.now-b.viewAt >= viewEvery && !b.etcd.cut {
		b.view, b.viewAt = b.w.registered(), b.w.now
	}
	return b.view
}

// take makes this broker the owner of a topic's bundle, in place of whoever is, and serves the topic.
func (b *broker) take(tp *topic) {
	if !b.up || b.taking[tp.index] {
		return
	}
	b.taking[tp.index] = true
	b.sched.Go(func() { b.takeBundle(tp) })
}

func (b *broker) takeBundle(tp *topic) {
	defer func() { delete(b.taking, tp.index) }()
	ctx, cancel := b.sched.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if b.lease == 0 {
		_ = sched.Sleep(ctx, b.sched, leaseTTL/2)
	}
	cur, err := b.meta.GetOwner(ctx, tp.bundle)
	if err != nil {
		return
	}
	expect := meta.ExpectNone()
	if cur.Epoch > 0 {
		expect = meta.ExpectOwner(cur)
	}
	old := b.owned[tp.index]
	if cur.Broker == b.name && old != nil && old.epoch == cur.Epoch {
		return // it is ours
	}
	owner, err := b.meta.TakeBundle(ctx, tp.bundle, meta.BrokerInfo{ID: b.name}, clientv3.LeaseID(b.lease), expect)
	if err != nil {
		var conflict *meta.OwnerConflictError
		if !errors.As(err, &conflict) {
			b.w.trace(b.name, topicSubject(tp), "takes topic %d: fails", tp.index)
		}
		return
	}
	b.w.trace(b.name, topicSubject(tp), "owns topic %d with epoch %d", tp.index, owner.Epoch)
	b.own(tp, owner.Epoch)
}

// own serves a topic with a new epoch.
func (b *broker) own(tp *topic, epoch entry.Epoch) {
	if old := b.owned[tp.index]; old != nil {
		b.disown(tp, old)
	}
	h := &holding{epoch: epoch}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	b.owned[tp.index] = h
	b.sched.Go(func() { b.serve(tp, h) })
}

// disown drops a topic. It is called in a task, and may wait.
func (b *broker) disown(tp *topic, h *holding) {
	if b.owned[tp.index] == h {
		delete(b.owned, tp.index)
	}
	h.cancel()
	if h.served != nil {
		h.served.shutdown()
	}
}

// serve opens a topic, and again whenever it is lost while the bundle is held.
func (b *broker) serve(tp *topic, h *holding) {
	for h.ctx.Err() == nil {
		s, err := tp.kind.open(h.ctx, b, tp, meta.Guard{Bundle: tp.bundle, Epoch: h.epoch})
		switch {
		case err == nil:
			if h.ctx.Err() != nil {
				s.shutdown()
				return
			}
			h.served = s
			b.w.trace(b.name, topicSubject(tp), "serves topic %d with epoch %d", tp.index, h.epoch)
			_, _ = b.sched.Wait(h.ctx, sched.Channels{s.lost()})
			if h.ctx.Err() != nil {
				return // whoever ended it shuts the service down
			}
			b.w.trace(b.name, topicSubject(tp), "topic %d with epoch %d is lost", tp.index, h.epoch)
			h.served = nil
			s.shutdown()
		case errors.Is(err, meta.ErrEpoch):
			b.disown(tp, h)
			return
		}
		_ = sched.Sleep(h.ctx, b.sched, b.w.between(10*time.Millisecond, time.Second))
	}
}

// serving returns what serves the topic here, nil if nothing does.
func (b *broker) serving(tp *topic) service {
	h := b.owned[tp.index]
	if !b.up || h == nil || h.served == nil {
		return nil
	}
	select {
	case <-h.served.lost():
		return nil
	default:
		return h.served
	}
}

// tailRead is a reader elsewhere: it asks bookies for the LAC, waits for more at times, and reads a few entries up to it.
func (b *broker) tailRead(l meta.Ledger) {
	w := b.w
	ctx, cancel := b.sched.WithTimeout(context.Background(), openPatience)
	defer cancel()
	env := b.env.Ledger
	env.Metadata = b.meta
	r := ledger.NewReader(env, l)
	lac := r.LAC()
	switch g := w.ghost.ledgers[l.ID]; {
	case lac >= 0:
	case w.chance(2) && g != nil:
		got, _, err := r.WaitLAC(ctx, g.served)
		if err != nil {
			return
		}
		lac = got
	default:
		if _, err := r.Read(ctx, 0, ledger.AskLAC, 1); err != nil {
			return
		}
		lac = r.LAC()
	}
	if lac < 0 {
		return
	}
	entries, err := r.Read(ctx, max(0, lac-entry.EntryID(w.rng.IntN(4))), lac, 1<<10)
	if err != nil {
		return
	}
	for _, e := range entries {
		w.served++
		if !bytes.Equal(e.Body, w.ghost.bodies[entryKey{l.ID, e.ID}]) {
			w.fail("I5", entrySubject(l.ID, e.ID), "a reader gets other bytes for %d:%d", l.ID, e.ID)
		}
		w.ghost.serve(l.ID, e.ID, b.name+"'s reader")
	}
}

func quorumOf(r meta.Replication, slots []meta.Slot) *quorum.Quorum {
	zones := make([]string, len(slots))
	for i, s := range slots {
		zones[i] = s.Zone
	}
	return quorum.MustNew(quorum.Config{
		Ensemble: r.Ensemble, WriteQuorum: r.WriteQuorum, AckQuorum: r.AckQuorum, MinZones: r.MinZones,
	}, zones)
}

// registered lists the bookies that a watch would show.
func (w *world) registered() []ledger.Candidate {
	var all []ledger.Candidate
	for _, k := range w.bookies {
		if w.now < k.registeredTill {
			writable := k.store == nil || k.store.State() == 0
			all = append(all, ledger.Candidate{UUID: k.uuid, Host: k.name, Zone: k.zone, FreeBytes: 1 << 30, Writable: writable})
		}
	}
	return slices.Clip(all)
}
