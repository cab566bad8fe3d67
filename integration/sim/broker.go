package sim

import (
	"context"
	"errors"
	"time"

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

	membership
	owned  map[int]*holding // by topic
	client *bookieClient
	env    chain.Env // for all chains of the process
}

// holding is a bundle that the broker owns, or believes to own.
type holding struct {
	epoch  entry.Epoch
	ctx    context.Context //nolint:containedctx // ends with the holding
	cancel context.CancelFunc
	served service       // nil while it is being opened
	ended  chan struct{} // closed when it is not opened any more
}

const (
	leaseTTL     = 4 * time.Second
	blockOfIDs   = 4
	openPatience = 10 * time.Second
)

func (b *broker) boot() {
	b.start()
	b.meta = meta.NewOver(b.etcd, b.sched, clusterName, nil)
	b.owned = map[int]*holding{}
	b.client = newBookieClient(b)
	b.env = chain.Env{
		Ledger: ledger.Env{
			Bookies: b.client, Candidates: b.candidates, Ticker: ledger.NewTicker(0), MayAckEarly: b.leaseHolds,
			Config: b.w.ledgerConfig(), Sched: b.sched,
		},
		Meta: b.meta, IDs: chain.NewIDs(b.meta, blockOfIDs), Sched: b.sched,
	}
	b.w.trace(b.name, subject{}, "up")
	b.join()
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

// own serves a topic with a new epoch.
func (b *broker) own(tp *topic, epoch entry.Epoch) {
	h := &holding{epoch: epoch, ended: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	b.owned[tp.index] = h
	b.sched.Go(func() {
		defer close(h.ended)
		b.serve(tp, h)
	})
}

// serve opens a topic, and again whenever it is lost while the bundle is held.
func (b *broker) serve(tp *topic, h *holding) {
	guard := meta.Guard{Bundle: tp.bundle, Epoch: h.epoch}
	for h.ctx.Err() == nil && !b.w.closed[tp.index] {
		s, err := tp.kind.open(h.ctx, b, tp, guard)
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
			b.owner.Fenced(guard)
			return // and is stopped
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
	highest := lac
	rises := func() {
		if now := r.LAC(); now < highest {
			w.fail("23", entrySubject(l.ID, highest), "to a reader of ledger %d on %s entries up to %d are confirmed, and then up to %d", l.ID, b.name, highest, now)
		}
		highest = max(highest, r.LAC())
	}
	defer rises()
	switch g := w.ghost.ledgers[l.ID]; {
	case lac >= 0:
	case w.chance(2) && g != nil:
		got, _, err := r.WaitLAC(ctx, g.served)
		if err != nil {
			return
		}
		lac = got
		rises()
	default: // it goes on where others got to, and has nobody's word for what is confirmed
		first := entry.EntryID(0)
		if g != nil {
			first = max(0, g.served+1-entry.EntryID(w.rng.IntN(3)))
		}
		entries, err := r.Read(ctx, first, ledger.AskLAC, 1<<10)
		if err != nil {
			return
		}
		b.tailServed(l.ID, entries)
		rises()
		lac = r.LAC()
	}
	if lac < 0 {
		return
	}
	entries, err := r.Read(ctx, max(0, lac-entry.EntryID(w.rng.IntN(4))), lac, 1<<10)
	if err != nil {
		return
	}
	b.tailServed(l.ID, entries)
}

// tailServed holds what a reader elsewhere was given against what was written, and against what the writer has told anybody
// to be confirmed: a reader has nothing else to go by, before the ledger is closed.
func (b *broker) tailServed(id entry.LedgerID, entries []ledger.Entry) {
	w := b.w
	for _, e := range entries {
		w.served++
		if !w.ghost.is(entryKey{id, e.ID}, e.Body) {
			w.fail("I5", entrySubject(id, e.ID), "a reader gets other bytes for %d:%d", id, e.ID)
		}
		if g := w.ghost.ledger(id); g.record.State < meta.LedgerClosed && e.ID > g.claimed {
			w.fail("4", entrySubject(id, e.ID), "a reader gets %d:%d, the highest that its writer has told to be confirmed is %d", id, e.ID, g.claimed)
		}
		w.ghost.serve(id, e.ID, b.name+"'s reader")
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
