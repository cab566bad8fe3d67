package sim

import (
	"context"
	"errors"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// broker is a broker's process: its lease, the bundles it took, and their topics' chains.
type broker struct {
	process
	w     *world
	index int
	meta  *meta.Store
	etcd  *etcdClient

	lease    int64 // 0: none
	deadline time.Duration
	owned    map[int]entry.Epoch // by topic
	chains   map[int]*chainRun
	taking   map[int]bool
	links    map[linkKey]*link
	opened   []*link // all of links, in the order made
	ids      idBlock
	view     []ledger.Candidate // as of the last look
	viewAt   time.Duration
}

type linkKey struct {
	to   entry.StorageUUID
	adds bool
}

type idBlock struct {
	next entry.LedgerID
	left int
}

const (
	leaseTTL   = 4 * time.Second
	viewEvery  = 200 * time.Millisecond
	blockOfIDs = 4
)

func (b *broker) boot() {
	b.start()
	b.lease, b.deadline = 0, 0
	b.owned, b.chains, b.taking = map[int]entry.Epoch{}, map[int]*chainRun{}, map[int]bool{}
	b.links, b.opened, b.ids, b.view, b.viewAt = map[linkKey]*link{}, nil, idBlock{}, nil, -time.Hour
	b.w.trace(b.name, subject{}, "up")
	b.keepLease()
}

func (b *broker) crash(why string) {
	if !b.up {
		return
	}
	b.w.trace(b.name, subject{}, "dies: %s", why)
	for _, l := range b.opened {
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

func (b *broker) link(to entry.StorageUUID, adds bool) *link {
	k := linkKey{to, adds}
	l := b.links[k]
	if l == nil {
		l = &link{n: b.w.net, from: b, to: to, adds: adds}
		b.links[k] = l
		b.opened = append(b.opened, l)
	}
	return l
}

func (b *broker) request(to entry.StorageUUID, r *request) { b.link(to, false).ask(r) }

// nextLedger hands out ledger ids from blocks.
func (b *broker) nextLedger(ctx context.Context, above entry.LedgerID) (entry.LedgerID, error) {
	for b.ids.left == 0 || b.ids.next <= above {
		first, err := b.meta.ReserveLedgerIDs(ctx, blockOfIDs)
		if err != nil {
			return 0, err
		}
		b.ids = idBlock{first, blockOfIDs}
	}
	id := b.ids.next
	b.ids.next++
	b.ids.left--
	return id, nil
}

// take makes this broker the owner of a topic's bundle, in place of whoever is, and opens the topic's chain.
func (b *broker) take(tp *topic) {
	if !b.up || b.taking[tp.index] {
		return
	}
	b.taking[tp.index] = true
	b.spawn(func(t *task) {
		defer func() { delete(b.taking, tp.index) }()
		ctx := t.context(b.w.now+20*time.Second, nil)
		if b.lease == 0 {
			t.sleep(leaseTTL / 2)
		}
		cur, err := b.meta.GetOwner(ctx, tp.bundle)
		if err != nil {
			return
		}
		expect := meta.ExpectNone()
		if cur.Epoch > 0 {
			expect = meta.ExpectOwner(cur)
		}
		if cur.Broker == b.name && b.chains[tp.index] != nil && b.owned[tp.index] == cur.Epoch {
			return // it is ours, and served
		}
		owner, err := b.meta.TakeBundle(ctx, tp.bundle, meta.BrokerInfo{ID: b.name}, clientv3.LeaseID(b.lease), expect)
		if err != nil {
			var conflict *meta.OwnerConflictError
			if !errors.As(err, &conflict) {
				b.w.trace(b.name, subject{topic: tp.index + 1}, "takes topic %d: fails", tp.index)
			}
			return
		}
		b.w.trace(b.name, subject{topic: tp.index + 1}, "owns topic %d with epoch %d", tp.index, owner.Epoch)
		if old := b.chains[tp.index]; old != nil {
			old.shutdown()
			delete(b.chains, tp.index)
		}
		b.owned[tp.index] = owner.Epoch
		b.open(t, tp, meta.Guard{Bundle: tp.bundle, Epoch: owner.Epoch})
	})
}

func (b *broker) open(t *task, tp *topic, guard meta.Guard) {
	for b.owned[tp.index] == guard.Epoch {
		c, err := b.openChain(t, tp, guard)
		if err == nil {
			if b.owned[tp.index] == guard.Epoch {
				b.w.trace(b.name, subject{topic: tp.index + 1}, "serves topic %d with epoch %d from offset %d", tp.index, guard.Epoch, c.core.NextOffset())
				b.chains[tp.index] = c
			}
			return
		}
		if errors.Is(err, meta.ErrEpoch) {
			b.drop(tp, guard.Epoch)
			return
		}
		t.sleep(b.w.between(100*time.Millisecond, time.Second))
	}
}

func (b *broker) drop(tp *topic, epoch entry.Epoch) {
	if b.owned[tp.index] == epoch {
		delete(b.owned, tp.index)
	}
}

// onChainLost drops the chain. If the bundle is still this broker's, the topic is opened again.
func (b *broker) onChainLost(c *chainRun) {
	if b.chains[c.topic.index] != c {
		return
	}
	delete(b.chains, c.topic.index)
	b.after(b.w.between(10*time.Millisecond, 300*time.Millisecond), func() {
		if b.owned[c.topic.index] != c.guard.Epoch || b.chains[c.topic.index] != nil {
			return
		}
		b.spawn(func(t *task) { b.open(t, c.topic, c.guard) })
	})
}

// readEntry reads one entry from any bookie of its write set.
func (b *broker) readEntry(t *task, l meta.Ledger, e entry.EntryID) ([]byte, error) {
	f := ledger.FragmentOf(l.Fragments, e)
	q := quorumOf(l.Replication, f.Slots)
	var slots []int
	q.WriteSet(e).Each(func(i int) { slots = append(slots, i) })
	b.w.rng.Shuffle(len(slots), func(i, j int) { slots[i], slots[j] = slots[j], slots[i] })
	for _, i := range slots {
		got, err := b.readFrom(t, f.Slots[i].UUID, bookiewire.Read{Ledger: l.ID, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1})
		if err == nil && got.Entries[0].Checksum == entry.Checksum(l.ID, e, got.Entries[0].Body) {
			return got.Entries[0].Body, nil
		}
	}
	return nil, errNoCopy
}

var errNoCopy = errors.New("sim: no copy can be read")

func (b *broker) readFrom(t *task, from entry.StorageUUID, q bookiewire.Read) (bookiewire.ReadReply, error) {
	var reply bookiewire.ReadReply
	var failure error
	t.await(func(wake func()) {
		b.request(from, &request{
			limit: requestLimit,
			serve: func(k *bookieProcess, answer func(func())) {
				k.read(q, func(got bookiewire.ReadReply, err error) {
					answer(func() {
						reply, failure = got, err
						b.after(0, wake)
					})
				})
			},
			fail: func(e *bookiewire.Error) {
				failure = e
				b.after(0, wake)
			},
		})
	})
	return reply, failure
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
