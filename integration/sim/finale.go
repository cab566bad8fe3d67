package sim

import (
	"context"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

const healWithin = 30 * time.Second

// What has much to deliver in the end takes longer, as long as in each stretch it delivers so many messages.
const (
	stretch  = 5 * time.Second
	goesOnBy = 100
)

// finale checks that everything comes back: each topic is taken, its ledgers recovered, something served; then what was
// promised is looked for on the disks.
func (w *world) finale() {
	began := w.now
	for _, tp := range w.topics {
		w.after(0, func() { w.probe(tp) })
	}
	done := func() bool { return w.failed() || len(w.probed) == len(w.topics) }
	w.run(began+healWithin-stretch, done)
	for {
		left := w.backlogs()
		w.run(w.now+stretch, done)
		if done() || !w.delivers(left) {
			break
		}
	}
	if w.failed() {
		return
	}
	settled := func() bool {
		return w.failed() || !slices.ContainsFunc(w.topics, func(tp *topic) bool { return !w.checkOwner(tp) })
	}
	w.run(max(w.now, began+healWithin), settled)
	for _, tp := range w.topics {
		if !settled() && !w.checkOwner(tp) {
			w.fail("I16", topicSubject(tp), "topic %d has no owner that everybody knows within %v after everything was healed", tp.index, healWithin)
			return
		}
		if !w.probed[tp.index] {
			w.fail("I16", topicSubject(tp), "topic %d is not served %v after everything was healed; %d messages are to be delivered", tp.index, w.now-began, w.backlogs()[tp.index])
			return
		}
	}
	w.trace("sim", subject{}, "every topic is served after %v", w.now-began)
	// The topics are closed in good order.
	w.ending = true
	for _, tp := range w.topics {
		w.close(tp)
	}
	w.run(w.now+healWithin, func() bool { return w.failed() || len(w.closed) == len(w.topics) })
	if len(w.closed) < len(w.topics) {
		w.fail("I16", subject{}, "a topic is not closed within %v", healWithin)
	}
	w.endRepairs()
	w.run(w.now+2*time.Second, w.failed) // what is under way comes to its end
	for _, tp := range w.topics {
		if w.failed() {
			return
		}
		tp.kind.check(tp)
	}
	w.answerAll()
	if w.chance(4) && !w.failed() {
		w.vanish()
	}
	w.forget()
}

// backlogs returns how many messages are to be delivered yet of each topic that lacks nothing else.
func (w *world) backlogs() []int {
	left := make([]int, len(w.topics))
	for i, tp := range w.topics {
		if m, ok := tp.kind.(*messaging); ok && !w.probed[i] {
			left[i] = m.backlog()
		}
	}
	return left
}

// delivers reports whether every topic that is not served yet has delivered enough since its backlog was left.
func (w *world) delivers(left []int) bool {
	for i, n := range w.backlogs() {
		if !w.probed[i] && (n == 0 || n > left[i]-goesOnBy) {
			return false
		}
	}
	return true
}

// forget puts an older copy in etcd's place, in some runs, or an etcd that was set up anew. Nothing holds after that, but that
// bookies, which have seen it at a later revision, or are another cluster's, delete nothing any more, whatever it says, and though
// ledgers get the numbers of forgotten ones; and that brokers, which get nowhere then, do not wear etcd out.
func (w *world) forget() {
	if w.failed() || w.copied == nil || !w.chance(5) {
		return
	}
	w.run(w.now+20*time.Second, w.failed) // each bookie looks at etcd
	if w.failed() || w.etcd.model.Revision()-w.copied.Revision() < 100 {
		return
	}
	w.trace("sim", subject{}, "etcd is at revision %d, and restored from a copy of revision %d", w.etcd.model.Revision(), w.copied.Revision())
	if w.chance(3) {
		w.copied = w.another()
	}
	w.etcd.restore(w.copied)
	w.restored, w.restoredAt = true, w.now
	w.strain = strain{changes: map[entry.LedgerID]int{}, fruitless: map[meta.ChainID]int{}, closed: map[entry.LedgerID]bool{}}
	w.run(w.now+10*time.Second, w.failed) // and again
	for _, k := range w.bookies {
		if w.chance(2) {
			k.crash("killed")
			k.boot()
		}
	}
	w.ending = false
	clear(w.closed)
	for _, b := range w.brokers {
		b.crash("killed")
		b.boot()
	}
	for _, tp := range w.topics {
		w.produce(tp)
	}
	w.run(w.now+afterRestore, w.failed)
}

// What a restored etcd may be asked to do in afterRestore. Ledgers get numbers whose entries bookies hold already: no change of
// their ensembles helps, and the next ledger may fare no better. Without pauses, either goes on as fast as etcd answers, some
// thousands of times.
const (
	afterRestore = 30 * time.Second
	// maxChanges is of one ledger: those of a writer that never gets anywhere double their pauses until it rolls, and one
	// that does has maxFragments.
	maxChanges = 40
	// maxFruitless counts the ledgers of one chain in a row that are closed with nothing in them, by rolls or takeovers. One in
	// which something was stored ends the row: whoever stores asks for rolls, too.
	maxFruitless = 20
)

// strain counts what is done to ledgers after etcd was restored.
type strain struct {
	changes   map[entry.LedgerID]int
	fruitless map[meta.ChainID]int
	closed    map[entry.LedgerID]bool // seen so; repair goes on changing them
}

// restoredChanged takes what a broker has changed of a ledger.
func (w *world) restoredChanged(id entry.LedgerID) {
	l, err := w.checker.GetLedger(context.Background(), id)
	if err != nil {
		return // it is gone, or was never whole
	}
	switch {
	case l.State == meta.LedgerOpen:
		if w.strain.changes[id]++; w.strain.changes[id] > maxChanges {
			w.fail("pace", ledgerSubject(id), "ledger %d is changed more than %d times within %v after etcd was restored: %s", id, maxChanges, afterRestore, w.fragments(l.Fragments))
		}
	case l.State != meta.LedgerClosed || w.strain.closed[id]:
	case l.Last != entry.NoEntry:
		w.strain.closed[id] = true
		w.strain.fruitless[l.Chain] = 0
	default:
		w.strain.closed[id] = true
		if w.strain.fruitless[l.Chain]++; w.strain.fruitless[l.Chain] > maxFruitless {
			w.fail("pace", ledgerSubject(id), "more than %d ledgers of %s in a row are closed with nothing in them within %v after etcd was restored", maxFruitless, l.Chain, afterRestore)
		}
	}
}

// another makes the etcd of another cluster of the same name, which may have gone further than this one's.
func (w *world) another() *etcdmodel.Model {
	now := w.etcd.model.Revision()
	e := &etcd{kernel: w.kernel, model: etcdmodel.New()}
	if _, err := meta.NewOver(direct{e: e}, sched.Real, clusterName, nil).EnsureCluster(context.Background()); err != nil {
		panic(err)
	}
	further := w.chance(2)
	for further && e.model.Revision() <= now {
		if _, err := e.model.Put(context.Background(), &pb.PutRequest{Key: []byte("other")}); err != nil {
			panic(err)
		}
	}
	w.trace("sim", subject{}, "that is another cluster's, which has gone further: %v", further)
	return e.model
}

// close closes a topic in good order, where it is served, and again if that was in vain.
func (w *world) close(tp *topic) {
	if w.closed[tp.index] {
		return
	}
	w.after(time.Second, func() { w.close(tp) }) // the broker may die, and with it what it is told here
	b, s := w.serving(tp)
	if s == nil || w.closing[tp.index] == s {
		return
	}
	if bundle, ok := s.(*servedBundle); ok && !bundle.whole() { // it has just moved
		return
	}
	w.closing[tp.index] = s
	b.sched.Go(func() {
		h := b.owned[tp.index]
		if h == nil || h.served != s {
			w.closing[tp.index] = nil
			return
		}
		delete(b.owned, tp.index)
		h.cancel()
		sched.Until(b.sched, h.ended)
		if err := s.close(context.Background()); err != nil {
			w.trace(b.name, topicSubject(tp), "topic %d cannot be closed: %v", tp.index, err)
			if _, held := b.owner.Guard(tp.bundle); held && b.owned[tp.index] == nil {
				b.own(tp, h.epoch)
			}
			w.closing[tp.index] = nil
			return
		}
		w.closed[tp.index] = true
	})
}

// serving returns what serves a topic by the word of etcd, and where.
func (w *world) serving(tp *topic) (*broker, service) {
	owner, err := w.checker.GetOwner(context.Background(), tp.bundle)
	if err != nil {
		return nil, nil
	}
	for _, b := range w.brokers {
		if h := b.owned[tp.index]; h != nil && h.epoch == owner.Epoch {
			return b, b.serving(tp)
		}
	}
	return nil, nil
}

// probe uses a topic until that works.
func (w *world) probe(tp *topic) {
	if w.probed[tp.index] {
		return
	}
	w.after(2*time.Second, func() { w.probe(tp) })
	b, s := w.serving(tp)
	if s == nil {
		return
	}
	b.do(func() { s.probe(func() { w.probed[tp.index] = true }) })
}

// check reads a chain from its first entry to its last, from each disk that should have it.
func (k *chains) check(tp *topic) {
	w := k.w
	rec, err := w.checker.GetChain(context.Background(), tp.chain)
	if err != nil {
		w.fail("I1", topicSubject(tp), "chain of topic %d: %v", tp.index, err)
		return
	}
	seen := map[uint64]entry.Position{}
	newest := map[entry.Epoch]uint64{}
	var offset entry.Offset
	if len(rec.Runs) > 0 {
		offset = rec.Runs[0].First
	}
	for _, run := range rec.Runs {
		l := w.ghost.ledger(run.Ledger).record
		if !w.checkClosed(run) {
			return
		}
		for e := entry.EntryID(0); e <= l.Last; e++ {
			s := entrySubject(run.Ledger, e)
			p, ok := parseBody(w.ghost.bodies[entryKey{run.Ledger, e}].whole)
			if !ok {
				w.fail("I4", s, "%d:%d is part of its ledger and was never written", run.Ledger, e)
				return
			}
			a := w.ghost.appends[p.number]
			s.number = p.number
			switch {
			case a == nil || a.topic != tp:
				w.fail("I4", s, "%d:%d has append %d, which is not of topic %d", run.Ledger, e, p.number, tp.index)
				return
			case a.outcome == notWritten:
				w.fail("19", s, "append %d is %d:%d, and was told not to be written", p.number, run.Ledger, e)
				return
			case p.base != offset:
				w.fail("20", s, "append %d at %d:%d says offset %d, before it lie %d", p.number, run.Ledger, e, p.base, offset)
				return
			}
			if at, twice := seen[p.number]; twice {
				w.fail("I3", s, "append %d is at %v and at %d:%d", p.number, at, run.Ledger, e)
				return
			}
			seen[p.number] = entry.Position{Ledger: run.Ledger, Entry: e}
			if p.number < newest[a.ownerEpoch] {
				w.fail("20", s, "append %d comes after %d of the same owner", p.number, newest[a.ownerEpoch])
				return
			}
			newest[a.ownerEpoch] = p.number
			offset += entry.Offset(p.span)
			if !w.onDisk(l, e) {
				return
			}
		}
		if run.End != offset {
			w.fail("20", ledgerSubject(run.Ledger), "run of ledger %d ends at offset %d, its entries at %d", run.Ledger, run.End, offset)
			return
		}
	}
	for _, a := range w.ghost.order {
		if a.topic != tp || !a.durable() {
			continue
		}
		if w.ghost.ledger(a.position.Ledger).record.State == meta.LedgerDeleting {
			continue // trimmed
		}
		at, ok := seen[a.number]
		s := subject{ledger: uint64(a.position.Ledger), entry: int64(a.position.Entry), number: a.number, topic: tp.index + 1}
		switch {
		case !ok:
			w.fail("I1", s, "append %d (%s) was acknowledged at %d:%d, and is lost", a.number, a.level, a.position.Ledger, a.position.Entry)
			return
		case at.Ledger != a.position.Ledger || at.Entry != a.position.Entry:
			w.fail("I1", s, "append %d was acknowledged at %d:%d, and is at %d:%d", a.number, a.position.Ledger, a.position.Entry, at.Ledger, at.Entry)
			return
		}
	}
}

// checkClosed reports whether the ledger of a run is closed, as all are in the end.
func (w *world) checkClosed(run meta.Run) bool {
	l := w.ghost.ledger(run.Ledger).record
	if !run.Closed || l.State != meta.LedgerClosed {
		w.fail("I16", ledgerSubject(run.Ledger), "ledger %d is %s in the end", run.Ledger, l.State)
		return false
	}
	return true
}

// onDisk reads an entry from each disk of its write set: at least as many as must have it do, but for those that are gone.
func (w *world) onDisk(l meta.Ledger, e entry.EntryID) bool {
	f, body := ledger.FragmentOf(l.Fragments, e), w.ghost.bodies[entryKey{l.ID, e}].whole
	copies, gone, lost := 0, 0, ""
	quorumOf(l.Replication, f.Slots).WriteSet(e).Each(func(i int) {
		b := w.bookieOf(f.Slots[i].UUID)
		switch {
		case b == nil:
			gone++
		case b.has(l.ID, e, body):
			copies++
		case b.rotten:
			gone++
		case b.store != nil && w.ghost.keeps(b.uuid, entryKey{l.ID, e}):
			lost = b.name
		}
	})
	if lost != "" {
		w.fail("10", entrySubject(l.ID, e), "%s acknowledged %d:%d, and does not have it in the end", lost, l.ID, e)
		return false
	}
	if copies < l.AckQuorum-min(gone, w.harmed) || copies == 0 {
		w.fail("I1", entrySubject(l.ID, e), "%d:%d lies on %d disks of %s, %d are gone", l.ID, e, copies, w.fragments([]meta.Fragment{f}), gone)
		return false
	}
	return true
}
