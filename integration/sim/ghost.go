package sim

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// ghost knows what nobody in the cluster knows: everything that was ever said, and by whom. It holds each new word against
// it. The numbers of invariants are listed in docs/testing.md.
type ghost struct {
	w       *world
	bodies  map[entryKey]bodyGhost
	seed    maphash.Seed
	disks   map[entry.StorageUUID]*diskGhost
	ledgers map[entry.LedgerID]*ledgerGhost
	appends map[uint64]*producerAppend
	order   []*producerAppend
	owners  map[int]*ownerGhost // by topic
	retired map[entry.StorageUUID]bool
	// deleting are the ledgers that are being deleted, or were.
	deleting []entry.LedgerID
	// intents are the ledgers with intents of repairs, but for those that are being deleted.
	intents map[entry.LedgerID]bool
	swaps   int
	boots   int
	checked int // entries found again after a boot
}

type entryKey struct {
	ledger entry.LedgerID
	entry  entry.EntryID
}

// bodyGhost is what was written as an entry.
type bodyGhost struct {
	whole []byte // nil: its ledger was deleted, and the sum is all that is known
	sum   uint64
}

// is reports whether an entry was written with that body.
func (g *ghost) is(k entryKey, body []byte) bool {
	known, ok := g.bodies[k]
	switch {
	case !ok:
		return false
	case known.whole == nil:
		return known.sum == maphash.Bytes(g.seed, body)
	}
	return bytes.Equal(known.whole, body)
}

// forget lets go of the bodies of a deleted ledger, which are most of what a long run wrote.
func (g *ghost) forget(id entry.LedgerID) {
	for k := (entryKey{ledger: id}); ; k.entry++ {
		known, ok := g.bodies[k]
		if !ok {
			return
		}
		if known.whole != nil {
			g.bodies[k] = bodyGhost{sum: maphash.Bytes(g.seed, known.whole)}
		}
	}
}

// diskGhost is what an identity has promised.
type diskGhost struct {
	stored map[entryKey]bool
	sorted []entryKey // of stored, in the order promised
	found  int        // how many of sorted were looked for after a start
	denied map[entryKey]bool
	// terms are durable by its word; shut are the ledgers of which it told a recovery that no writer gets in any more.
	terms map[entry.LedgerID]entry.Term
	shut  map[entry.LedgerID]bool
	// gone are the ledgers that it was told to delete: nothing that it says of them is held against it.
	gone map[entry.LedgerID]bool
}

// ledgerGhost is what was said of a ledger.
type ledgerGhost struct {
	record meta.Ledger
	first  meta.Ledger   // its first record
	acked  entry.EntryID // with quorum or all
	served entry.EntryID // to any reader
	// claimed is the highest LAC that its writer has told anybody.
	claimed entry.EntryID
	admits  admitGhost
	held    *held // what its writer has proposed, if anything
}

// producerAppend is one append of the workload.
type producerAppend struct {
	number     uint64
	topic      *topic
	level      ledger.AckLevel
	span       uint32
	ownerEpoch entry.Epoch
	by         *broker
	life       int
	outcome    outcome
	position   entry.Position
	then       func(outcome)
}

// durable reports whether it was acknowledged, and not by fewer than a quorum.
func (a *producerAppend) durable() bool {
	return a.outcome == stored && a.level != ledger.AckNone && a.level != ledger.AckOne
}

type outcome uint8

const (
	pending outcome = iota
	stored
	notWritten
	unknown
)

func newGhost(w *world) *ghost {
	return &ghost{
		w: w, bodies: map[entryKey]bodyGhost{}, seed: maphash.MakeSeed(), disks: map[entry.StorageUUID]*diskGhost{},
		owners: map[int]*ownerGhost{}, retired: map[entry.StorageUUID]bool{}, ledgers: map[entry.LedgerID]*ledgerGhost{}, intents: map[entry.LedgerID]bool{}, appends: map[uint64]*producerAppend{},
	}
}

func ledgerSubject(l entry.LedgerID) subject { return subject{ledger: uint64(l), entry: entryAny} }

func topicSubject(tp *topic) subject { return subject{topic: tp.index + 1} }

func entrySubject(l entry.LedgerID, e entry.EntryID) subject {
	return subject{ledger: uint64(l), entry: int64(e)}
}

func (g *ghost) disk(u entry.StorageUUID) *diskGhost {
	d := g.disks[u]
	if d == nil {
		d = &diskGhost{stored: map[entryKey]bool{}, denied: map[entryKey]bool{}, terms: map[entry.LedgerID]entry.Term{}, shut: map[entry.LedgerID]bool{}, gone: map[entry.LedgerID]bool{}}
		g.disks[u] = d
	}
	return d
}

func (g *ghost) ledger(id entry.LedgerID) *ledgerGhost {
	l := g.ledgers[id]
	if l == nil {
		l = &ledgerGhost{acked: entry.NoEntry, served: entry.NoEntry, claimed: entry.NoEntry}
		g.ledgers[id] = l
	}
	return l
}

// sent is an add on its way to a bookie, from a writer or a recovery.
func (g *ghost) sent(b *broker, a *bookiewire.Add) {
	k := entryKey{a.Ledger, a.Entry}
	if _, known := g.bodies[k]; !known {
		s := entrySubject(a.Ledger, a.Entry)
		if a.Recovery {
			g.w.fail("I4", s, "a recovery writes %d:%d, which nobody wrote before", a.Ledger, a.Entry)
		}
		g.bodies[k] = bodyGhost{whole: a.Body}
		if p, ok := parseBody(a.Body); ok {
			s.number = p.number
		}
		g.w.trace(b.name, s, "append %d as %d:%d", s.number, a.Ledger, a.Entry)
	} else if !g.is(k, a.Body) {
		g.w.fail("I5", entrySubject(a.Ledger, a.Entry), "%d:%d is written with another body", a.Ledger, a.Entry)
	}
	if !a.Recovery {
		g.confirms(b, a.Ledger, a.LAC)
		g.claimed(b.name, a.Ledger, a.LAC)
	}
}

// stored is a bookie's word that it has an entry.
func (g *ghost) stored(b *bookieProcess, a *bookiewire.Add) {
	g.copied(b, a)
	d, k := g.disk(b.uuid), entryKey{a.Ledger, a.Entry}
	if d.gone[k.ledger] {
		return
	}
	if !a.Recovery {
		if d.denied[k] {
			g.w.fail("8", entrySubject(k.ledger, k.entry), "%s acknowledges %d:%d, of which it told a recovery that it is not there", b.name, k.ledger, k.entry)
		}
		if d.shut[k.ledger] {
			g.w.fail("8", entrySubject(k.ledger, k.entry), "%s acknowledges %d:%d to a writer after it answered a fence", b.name, k.ledger, k.entry)
		}
	} else {
		g.term(b, a.Ledger, a.Term)
	}
	if !d.stored[k] {
		d.stored[k] = true
		d.sorted = append(d.sorted, k)
	}
}

// fenced is a bookie's word that a term is durable, and each add that it took before.
func (g *ghost) fenced(b *bookieProcess, l entry.LedgerID, term entry.Term) {
	g.term(b, l, term)
	g.disk(b.uuid).shut[l] = true
}

func (g *ghost) term(b *bookieProcess, l entry.LedgerID, term entry.Term) {
	d := g.disk(b.uuid)
	if term < d.terms[l] && !d.gone[l] && !b.rotten {
		g.w.fail("9", ledgerSubject(l), "%s takes term %d of ledger %d after term %d", b.name, term, l, d.terms[l])
	}
	d.terms[l] = max(d.terms[l], term)
}

// read is a bookie's answer to a read.
func (g *ghost) read(b *bookieProcess, r bookiewire.Read, got bookiewire.ReadReply, err error) {
	d, k := g.disk(b.uuid), entryKey{r.Ledger, r.First}
	switch codeOf(err) { //nolint:exhaustive // the rest says nothing
	case bookiewire.OK:
		for _, e := range got.Entries {
			at := entryKey{r.Ledger, e.Entry}
			if !g.is(at, e.Body) || e.Checksum != entry.Checksum(r.Ledger, e.Entry, e.Body) {
				g.w.fail("I10", entrySubject(at.ledger, at.entry), "%s answers %d:%d with bytes that were never written", b.name, at.ledger, at.entry)
			}
		}
	case bookiewire.NoEntry, bookiewire.NoLedger:
		if d.stored[k] && !d.gone[k.ledger] {
			g.w.fail("11", entrySubject(k.ledger, k.entry), "%s says that %d:%d is not there, which it acknowledged", b.name, k.ledger, k.entry)
		}
		if r.Recovery {
			d.denied[k] = true
		}
	}
}

// booted holds a store after its recovery against what its disk has promised.
func (g *ghost) booted(b *bookieProcess, loss ledgerstore.Loss) {
	g.boots++
	d := g.disk(b.uuid)
	if b.rotten {
		return
	}
	if loss.All || len(loss.Ledgers) > 0 {
		g.w.fail("I10", subject{}, "%s finds a loss (all: %v, ledgers %v) where nothing was lost", b.name, loss.All, loss.Ledgers)
	}
	// What was promised since the last start is looked at, and of what was found then a sample; all of it at times.
	all := g.boots%8 == 0
	for i, k := range d.sorted {
		if d.gone[k.ledger] || !all && i < d.found && !g.w.chance(max(1, d.found/100)) {
			continue
		}
		g.checked++
		got, err := b.store.Read(context.Background(), bookiewire.Read{Ledger: k.ledger, First: k.entry, Stride: 1, MaxEntries: 1, MaxBytes: 1})
		if err != nil || !g.is(k, got.Entries[0].Body) {
			g.w.fail("10", entrySubject(k.ledger, k.entry), "%s acknowledged %d:%d, and after a restart it answers %v", b.name, k.ledger, k.entry, codeOf(err))
			return
		}
	}
	d.found = len(d.sorted)
	for _, l := range slices.Sorted(maps.Keys(d.terms)) {
		if in, ok := b.store.Ledger(l); !d.gone[l] && (!ok || in.Term < d.terms[l]) {
			g.w.fail("9", ledgerSubject(l), "%s answered a fence of ledger %d with term %d, and after a restart it has %d", b.name, l, d.terms[l], in.Term)
			return
		}
	}
}

// deleted is a bookie about to delete a ledger: the record must say that it goes, or that it is closed and not the bookie's.
func (g *ghost) deleted(b *bookieProcess, id entry.LedgerID) {
	l := g.ledger(id).record
	named := slices.ContainsFunc(l.Fragments, func(f meta.Fragment) bool {
		return slices.ContainsFunc(f.Slots, func(s meta.Slot) bool { return s.UUID == b.uuid })
	})
	right := l.State == meta.LedgerDeleting || l.State == meta.LedgerClosed && !named
	// What etcd said just before it was restored may be on its way yet, and was true.
	onItsWay := right && g.w.now-g.w.restoredAt <= 10*time.Millisecond
	switch {
	case g.w.restored && !onItsWay:
		g.w.fail("I11", ledgerSubject(id), "%s deletes ledger %d after etcd was restored from an older copy", b.name, id)
	case !right:
		invariant := "16"
		if b.lie != truthful {
			invariant = "I11"
		}
		g.w.fail(invariant, ledgerSubject(id), "%s deletes ledger %d, which is %s with %s", b.name, id, l.State, g.w.fragments(l.Fragments))
	}
	g.disk(b.uuid).gone[id] = true
}

// holders returns the slots of e's write set whose identities have acknowledged it.
func (g *ghost) holders(f meta.Fragment, q *quorum.Quorum, k entryKey) quorum.Set {
	var have quorum.Set
	q.WriteSet(k.entry).Each(func(i int) {
		if g.disk(f.Slots[i].UUID).stored[k] {
			have |= 1 << i
		}
	})
	return have
}

// claimed is a writer's word, which goes with what it sends to bookies and with the fragments that it begins, that entries up to
// lac are confirmed: they lie on bookies that the record names, as many and in as many zones as needed.
func (g *ghost) claimed(who string, id entry.LedgerID, lac entry.EntryID) {
	l := g.ledger(id)
	if l.record.ID == 0 {
		g.w.fail("14", ledgerSubject(id), "ledger %d is written and has no record", id)
		return
	}
	for ; l.claimed < lac; l.claimed++ {
		if l.record.State != meta.LedgerOpen {
			continue
		}
		k := entryKey{id, l.claimed + 1}
		f := ledger.FragmentOf(l.record.Fragments, k.entry)
		q := quorumOf(l.record.Replication, f.Slots)
		if have := g.holders(f, q, k); !q.Valid(have) {
			g.w.fail("3", entrySubject(id, k.entry), "%s confirms %d:%d, which lies on slots %b of %s", who, id, k.entry, have, g.w.fragments([]meta.Fragment{f}))
		}
	}
}

// serve is an entry that a reader gets to see.
func (g *ghost) serve(id entry.LedgerID, e entry.EntryID, who string) {
	l := g.ledger(id)
	l.served = max(l.served, e)
	if l.record.State == meta.LedgerClosed && e > l.record.Last {
		g.w.fail("4", entrySubject(id, e), "%s serves %d:%d, the ledger ends at %d", who, id, e, l.record.Last)
	}
}

// finished is a chain's word on an append.
func (g *ghost) finished(b *broker, a *producerAppend, at entry.Position, o outcome) {
	s := subject{ledger: uint64(at.Ledger), entry: int64(at.Entry), topic: a.topic.index + 1, number: a.number}
	g.w.trace(b.name, s, "append %d (%s) at %d:%d: outcome %d", a.number, a.level, at.Ledger, at.Entry, o)
	if a.outcome != pending {
		g.w.fail("19", s, "append %d is done twice", a.number)
	}
	a.outcome = o
	a.position = at
	g.w.tally[a.outcome]++
	if a.then != nil {
		a.then(a.outcome)
	}
	if o != stored || a.level == ledger.AckNone || a.level == ledger.AckOne || g.w.restored {
		return
	}
	l := g.ledger(at.Ledger)
	l.acked = max(l.acked, at.Entry)
	g.confirms(b, at.Ledger, at.Entry)
	if l.record.State == meta.LedgerClosed && at.Entry > l.record.Last {
		g.w.fail("1", s, "append %d is acknowledged at %d:%d, the ledger ends at %d", a.number, at.Ledger, at.Entry, l.record.Last)
	}
	if a.level == ledger.AckAll && l.record.State == meta.LedgerOpen {
		f := ledger.FragmentOf(l.record.Fragments, at.Entry)
		q := quorumOf(l.record.Replication, f.Slots)
		if have := g.holders(f, q, entryKey{at.Ledger, at.Entry}); have != q.WriteSet(at.Entry) {
			g.w.fail("3", s, "append %d is acknowledged by all, and lies on slots %b of %s", a.number, have, g.w.fragments([]meta.Fragment{f}))
		}
	}
}

// brokerGone ends what a broker has not told: nobody will hear.
func (g *ghost) brokerGone(b *broker) {
	for _, a := range g.order {
		if a.by == b && a.life < b.life && a.outcome == pending {
			a.outcome = unknown
			g.w.tally[unknown]++
		}
	}
}

const keyPrefix = "/penstock/" + clusterName + "/"

// changed looks at what a transaction has changed in etcd.
func (w *world) changed(actor *broker, from int64) {
	events, err := w.etcd.model.Since(from)
	if err != nil {
		panic(err)
	}
	for _, e := range events {
		key, ours := strings.CutPrefix(string(e.KV.Key), keyPrefix)
		if !ours {
			continue
		}
		if id, ok := strings.CutPrefix(key, "ledgers/"); ok {
			n, err := strconv.ParseUint(id[1:], 16, 64)
			if err != nil {
				panic(err)
			}
			if w.restored {
				w.restoredChanged(entry.LedgerID(n))
				continue
			}
			w.ghost.ledgerChanged(actor, entry.LedgerID(n))
		}
		if !w.restored {
			w.topicsChanged(key)
		}
	}
	if w.restored { // what was known of ledgers, topics and owners is not true any more
		return
	}
	for _, tp := range w.topics {
		if slices.ContainsFunc(events, func(e etcdmodel.Event) bool {
			return string(e.KV.Key) == keyPrefix+"view/owners/"+string(tp.bundle) || string(e.KV.Key) == keyPrefix+"view/epochs/"+string(tp.bundle)
		}) {
			w.ghost.ownerChanged(tp)
		}
	}
	for _, e := range events {
		id, ours := strings.CutPrefix(string(e.KV.Key), keyPrefix+"chains/")
		if !ours {
			continue
		}
		for _, tp := range w.topics {
			if meta.ChainID(id) == tp.chain || tp.more[meta.ChainID(id)] {
				w.ghost.chainChanged(actor, tp, meta.ChainID(id))
				if k, ok := tp.kind.(chainWatcher); ok {
					k.chainChanged(actor, meta.ChainID(id))
				}
			}
		}
	}
}

// chainWatcher is a kind that wants to know what becomes of its chains.
type chainWatcher interface {
	chainChanged(actor *broker, id meta.ChainID)
}

func (g *ghost) ledgerChanged(actor *broker, id entry.LedgerID) {
	w := g.w
	now, err := w.checker.GetLedger(context.Background(), id)
	s := ledgerSubject(id)
	if err != nil {
		w.fail("6", s, "record of ledger %d: %v", id, err)
		return
	}
	l := g.ledger(id)
	old := l.record
	l.record = now
	l.admits.lapses(old, w.now)
	who := "?"
	if actor != nil {
		who = actor.name
	}
	w.trace("etcd", s, "%s: ledger %d is %s, term %d, %s, last %d", who, id, now.State, now.Term, w.fragments(now.Fragments), now.Last)
	if n := len(now.Fragments); n > 1 && now.State < meta.LedgerClosed {
		g.claimed(who, id, now.Fragments[n-1].First-1) // whoever recovers it begins there, and tells bookies so
	}
	for i := 1; i < len(now.Fragments); i++ {
		if now.Fragments[i].First <= now.Fragments[i-1].First {
			w.fail("7", s, "fragments of ledger %d: %s", id, w.fragments(now.Fragments))
		}
	}
	for _, f := range now.Fragments {
		// The record of a deleted ledger goes on naming the disks, of which one may be gone since.
		if now.State != meta.LedgerDeleting && slices.ContainsFunc(f.Slots, func(s meta.Slot) bool { return g.retired[s.UUID] }) {
			w.fail("retired", s, "ledger %d is placed on a disk that is retired: %s", id, w.fragments(now.Fragments))
		}
	}
	if old.ID == 0 {
		l.first = now
		return
	}
	if now.State < old.State || now.Term < old.Term || now.Nonce != old.Nonce && now.State != meta.LedgerDeleting {
		w.fail("6", s, "ledger %d goes from %s term %d to %s term %d", id, old.State, old.Term, now.State, now.Term)
	}
	if now.State == meta.LedgerInRecovery && now.Term > old.Term && actor != nil {
		w.provoke(actor)
	}
	if now.State == meta.LedgerDeleting {
		delete(g.intents, id)
		g.forget(id)
		if old.State != meta.LedgerDeleting {
			w.trimmed++
			g.deleting = append(g.deleting, id)
		}
		if old.State < meta.LedgerClosed {
			w.fail("6", s, "ledger %d is deleted while it is %s", id, old.State)
		}
		return
	}
	if old.State >= meta.LedgerClosed && now.Last != old.Last {
		w.fail("6", s, "the end of ledger %d moves from %d to %d", id, old.Last, now.Last)
	}
	g.fragmentsChanged(old, now)
	if now.State == meta.LedgerOpen {
		settled := len(old.Fragments) - 1
		// An entry that is acknowledged may move to a new fragment if it counts there too.
		for e := now.Fragments[settled].First; e <= l.acked; e++ {
			f := ledger.FragmentOf(now.Fragments, e)
			q := quorumOf(now.Replication, f.Slots)
			if have := g.holders(f, q, entryKey{id, e}); !q.Valid(have) {
				w.fail("3", entrySubject(id, e), "ensembles of ledger %d: %s; %d is acknowledged and lies on slots %b", id, w.fragments(now.Fragments), e, have)
			}
		}
	}
	if now.State == meta.LedgerClosed && old.State < meta.LedgerClosed {
		g.closed(l)
	}
}

// closed holds the end of a ledger against what was said of it.
func (g *ghost) closed(l *ledgerGhost) {
	w, m := g.w, l.record
	w.closes++
	if l.acked > m.Last {
		w.fail("1", entrySubject(m.ID, l.acked), "ledger %d ends at %d, acknowledged is %d", m.ID, m.Last, l.acked)
	}
	if l.served > m.Last {
		w.fail("4", entrySubject(m.ID, l.served), "ledger %d ends at %d, a reader was served %d", m.ID, m.Last, l.served)
	}
	for e := entry.EntryID(0); e <= m.Last; e++ {
		k := entryKey{m.ID, e}
		f := ledger.FragmentOf(m.Fragments, e)
		q := quorumOf(m.Replication, f.Slots)
		if have := g.holders(f, q, k); have.Len() < m.AckQuorum {
			w.fail("2", entrySubject(m.ID, e), "ledger %d ends at %d, and entry %d lies on slots %b of %s", m.ID, m.Last, e, have, w.fragments([]meta.Fragment{f}))
			return
		}
	}
}

func (g *ghost) chainChanged(actor *broker, tp *topic, id meta.ChainID) {
	w := g.w
	if o, err := w.checker.GetOwner(context.Background(), tp.bundle); actor != nil && (err != nil || o.Broker != "" && o.Broker != actor.name) {
		w.fail("21", subject{topic: tp.index + 1}, "%s changes the chain of topic %d, which is %s's with epoch %d", actor.name, tp.index, o.Broker, o.Epoch)
	}
	c, err := w.checker.GetChain(context.Background(), id)
	s := subject{topic: tp.index + 1}
	if err != nil {
		w.fail("15", s, "chain of topic %d: %v", tp.index, err)
		return
	}
	for i, r := range c.Runs {
		l := g.ledger(r.Ledger).record
		s.ledger, s.entry = uint64(r.Ledger), entryAny
		switch {
		case !r.Closed && i != len(c.Runs)-1:
			w.fail("15", s, "ledger %d of topic %d is followed by %d, and open", r.Ledger, tp.index, c.Runs[i+1].Ledger)
		case r.Closed != (l.State == meta.LedgerClosed):
			w.fail("14", s, "ledger %d of topic %d is %s, its run closed: %v", r.Ledger, tp.index, l.State, r.Closed)
		case i > 0 && r.First != c.Runs[i-1].End:
			w.fail("20", s, "ledger %d of topic %d starts at offset %d, the one before ends at %d", r.Ledger, tp.index, r.First, c.Runs[i-1].End)
		}
	}
}

// fragments prints ensembles by the bookies' names.
func (w *world) fragments(all []meta.Fragment) string {
	var b []byte
	for _, f := range all {
		b = fmt.Appendf(b, "[%d:", f.First)
		for _, s := range f.Slots {
			b = fmt.Appendf(b, " %s", w.names[s.UUID])
		}
		b = append(b, ']')
	}
	return string(b)
}
