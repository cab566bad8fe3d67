package sim

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// bookieProcess is a bookie's process over its disk: the server's rules of admission, and the store, driven by hand.
type bookieProcess struct {
	process
	w          *world
	index      int
	uuid       entry.StorageUUID
	zone       string
	mem        *vfs.Mem
	disk       *vfs.Faulty
	fresh      bool // no store was ever open on the disk
	store      *ledgerstore.ByHand
	meta       *meta.Store
	etcd       *etcdClient
	slow       int // one sync in so many takes long
	clients    []*link
	id         string // the bookie's, in its cookie: a new disk has another one
	admissions *bookie.Admissions
	waits      []*lacWait
	errors     []*vfs.Active // that the disk has yet to show
	rotten     bool          // some of the disk's bytes read as others
	lie        lie           // befalls its collector's reads of etcd
	hits       int           // errors that the disk had shown when this life began
	// What befalls the disk for a while.
	full, readOnly, noFiles bool
	refused, frozen         []*vfs.Active // writes and syncs of the log, and everything, while it is read-only
	exchanged               exchange
	freed                   time.Duration // when it last had room, or descriptors, again
	began                   bool          // once at least, on this disk
	// Of this life: adds, and bytes of those of recoveries that are not answered.
	arrived, answered int
	recovered         int64
	largest           int64 // body
}

const (
	dataDir      = "/data"
	storeDir     = "/data/ledgers"
	segmentSize  = 64 << 10
	registration = 3 * time.Second
)

func (b *bookieProcess) serving() bool { return b.up && b.store != nil }

func (b *bookieProcess) config() ledgerstore.Config {
	return ledgerstore.Config{
		Dir: storeDir, Cluster: clusterUUID, Storage: b.uuid, Fresh: b.fresh, SegmentSize: segmentSize, Spares: 1,
		PendingBytes: b.w.overload.pending, CacheBytes: 1 << 20, IndexBytes: 1 << 20, CompactBytesPerSecond: -1, Trash: b.w.trash, Sched: b.sched,
	}
}

// boot starts the process: the store recovers what the disk has, and what it says is held against what was promised.
func (b *bookieProcess) boot() {
	b.start()
	b.meta = meta.NewOver(b.etcd, b.sched, clusterName, nil)
	b.admissions = bookie.NewAdmissions(bookie.AdmissionConfig{Me: b.uuid, Store: admitted{b}, Ledgers: b.meta, Sched: b.sched})
	b.waits = nil
	b.arrived, b.answered, b.recovered = 0, 0, 0
	b.hits = b.diskErrors()
	var claim *bookie.Claim
	if b.w.claims() {
		if claim = b.claim(); claim == nil {
			b.kill()
			return
		}
		b.fresh = claim.Fresh
	}
	store, err := ledgerstore.OpenByHand(b.config(), b.disk)
	if err != nil {
		b.w.trace(b.name, subject{}, "does not start: %v", err)
		b.kill()
		b.notStarted(err)
		return
	}
	if claim != nil && !b.proved(claim) {
		store.Abandon()
		b.kill()
		return
	}
	b.store, b.fresh, b.began = store, false, true
	loss := store.Loss()
	b.w.trace(b.name, subject{}, "up, lost all %v ledgers %v", loss.All, loss.Ledgers)
	b.w.ghost.booted(b, loss)
	b.startedFull()
	if loss.All {
		b.sched.Go(b.endLoss)
	}
	collector := bookie.NewCollector(bookie.GCConfig{Interval: b.w.between(time.Second, 20*time.Second), Grace: 2 * time.Second, Sched: b.sched},
		bookie.Identity{Cluster: b.w.cluster, Storage: b.uuid}, collection{b}, meta.NewOver(&collectorReads{b.etcd, b}, b.sched, clusterName, nil), b.disk, "/etcd-revision", slog.New(slog.DiscardHandler), nil)
	b.sched.Go(func() { collector.Run(context.Background()) })
	b.look()
	b.sched.Go(func() { b.register(store.Store) })
	b.after(b.w.between(0, 3*time.Second), b.compact)
}

// endLoss puts what this disk may have lost in limbo: what the metadata place here and is not closed.
func (b *bookieProcess) endLoss() {
	store, ctx := b.store, context.Background()
	ids, err := b.meta.LedgersOn(ctx, b.uuid)
	if err != nil {
		return
	}
	var open []entry.LedgerID
	for _, id := range ids {
		l, err := b.meta.GetLedger(ctx, id)
		if err != nil {
			return
		}
		if l.State < meta.LedgerClosed {
			open = append(open, id)
		}
	}
	if b.store != store {
		return
	}
	store.AtOnce(func() {
		if err = store.SetLimbo(ctx, open...); err == nil {
			err = store.EndLoss(ctx)
		}
	})
	b.w.trace(b.name, subject{}, "limbo of %d ledgers: error %v", len(open), err != nil)
	b.work()
}

// compact compacts every now and then.
func (b *bookieProcess) compact() {
	b.store.AtOnce(func() {
		if freed, err := b.store.CompactOnce(context.Background()); freed > 0 || err != nil {
			b.w.compactions++
			b.w.trace(b.name, subject{}, "compaction: %d bytes, error %v", freed, err != nil)
		}
	})
	b.work()
	pause := b.w.between(500*time.Millisecond, 4*time.Second)
	pause = calmer(b.w, pause, 5)
	b.after(pause, b.compact)
}

// collection is the store as garbage collection uses it.
type collection struct{ b *bookieProcess }

func (c collection) Ledgers(yield func(ledgerstore.LedgerInfo) bool) { c.b.store.Ledgers(yield) }

func (c collection) Ledger(id entry.LedgerID) (ledgerstore.LedgerInfo, bool) {
	return c.b.store.Ledger(id)
}

func (c collection) Mark(id entry.LedgerID) uint64 { return c.b.store.Mark(id) }

func (c collection) DeleteLedger(ctx context.Context, id entry.LedgerID, mark uint64) (err error) {
	b := c.b
	b.store.AtOnce(func() { err = b.store.DeleteLedger(ctx, id, mark) })
	if !errors.Is(err, ledgerstore.ErrMarked) {
		b.w.ghost.deleted(b, id)
		b.w.deleted++
	}
	b.w.trace(b.name, ledgerSubject(id), "deletes %d: %v", id, err != nil)
	b.work()
	return err
}

// diskErrors counts the errors that the disk has shown.
func (b *bookieProcess) diskErrors() (n int) {
	for _, e := range b.errors {
		n += e.Hits()
	}
	return n
}

func (b *bookieProcess) look() {
	b.store.Look()
	b.work()
	b.after(time.Second, b.look)
}

// crash ends the process without notice.
func (b *bookieProcess) crash(why string) {
	if !b.up {
		return
	}
	b.w.trace(b.name, subject{}, "dies: %s", why)
	if b.store != nil {
		b.store.Abandon()
	}
	b.store = nil
	b.kill()
	clients := b.clients
	b.clients = nil
	for _, l := range clients {
		if c := l.conn; c != nil && c.server == b {
			if !b.w.net.blocked[c.back.way] {
				l.reset(b.w.net.delay())
			}
		}
	}
}

// powerCut ends the process, and loses what the disk may lose.
func (b *bookieProcess) powerCut() {
	b.crash("power cut")
	b.mem.Crash(b.w.rng)
}

// wipe puts an empty disk, with an identity of its own, in the place of what there was.
func (b *bookieProcess) wipe() {
	b.crash("disk is gone")
	b.w.retire(b.id, b.uuid)
	b.w.newDisk(b)
}

// retire has an operator declare that a disk is gone for good, which is refused as long as a ledger names it.
func (w *world) retire(id string, u entry.StorageUUID) {
	w.after(w.between(100*time.Millisecond, 3*time.Second), func() {
		before := w.etcd.model.Revision()
		if err := w.checker.RetireStorage(context.Background(), id, u); err != nil {
			w.retire(id, u)
			return
		}
		w.trace("sim", subject{}, "disk %s is retired", w.names[u])
		w.ghost.retired[u] = true
		w.changed(nil, before+1)
		w.etcd.pump()
	})
}

// work hands the store's tasks to the disk.
func (b *bookieProcess) work() {
	for {
		tasks := b.store.Tasks()
		if err := b.store.Failed(); err != nil {
			b.w.trace(b.name, subject{}, "store stops: %v", err)
			b.stopped(err)
			b.after(0, func() {
				b.crash("store has stopped")
				if !b.powerIsOff() || b.w.healed { // whoever cut the power brings it back
					b.w.after(b.w.between(100*time.Millisecond, 2*time.Second), func() {
						if !b.up {
							b.bootAgain()
						}
					})
				}
			})
			return
		}
		if len(tasks) == 0 {
			b.measureStore()
			return
		}
		for _, t := range tasks {
			b.carryOut(t)
		}
	}
}

func (b *bookieProcess) carryOut(t *ledgerstore.Task) {
	w, store := b.w, b.store
	finish := func() {
		if b.store != store {
			return
		}
		store.Do(t)
		b.work()
	}
	switch t.Kind {
	case ledgerstore.TaskWrite:
		t.Start()
		b.after(w.between(0, 50*time.Microsecond), finish)
	case ledgerstore.TaskSync:
		d := max(b.slowSync(), w.between(100*time.Microsecond, 4*time.Millisecond))
		if !w.healed && w.chance(b.slow) {
			d = w.between(10*time.Millisecond, 800*time.Millisecond)
		}
		if w.chance(2) {
			t.Start() // on the disk now, told later
		}
		b.after(d, finish)
	default:
		b.after(w.between(50*time.Microsecond, 3*time.Millisecond), finish)
	}
}

// arrival is an add at the server.
type arrival struct {
	bookie.Arrival
	b       *bookieProcess
	at      time.Duration // when it arrived
	unknown bool          // of a ledger that was not known then
	reply   func(error)
}

var _ bookie.Answerer = (*arrival)(nil)

// add is the server's: an add of a ledger that the store knows goes there, another one waits for admission.
func (b *bookieProcess) add(a bookiewire.Add, reply func(error)) {
	x := &arrival{b: b, at: b.w.now, reply: reply}
	x.Add.Add, x.For = a, x
	known, _ := b.store.Admission(a.Ledger)
	x.unknown = !known
	b.arrived++
	b.largest = max(b.largest, int64(len(a.Body)))
	if a.Recovery {
		b.recovered += int64(len(a.Body))
	}
	b.admissions.Take(&x.Arrival)
	b.work()
}

// Own implements bookie.Answerer.
func (x *arrival) Own() {}

// Answer implements bookie.Answerer.
func (x *arrival) Answer(refusal *bookiewire.Error) {
	b := x.b
	var err error
	b.answered++
	if x.Recovery {
		b.recovered -= int64(len(x.Body))
	}
	if refusal != nil {
		err = refusal
		b.refuses(x, refusal)
	} else {
		if b.wroteInVain() {
			b.w.fail("I1", entrySubject(x.Ledger, x.Entry), "%s acknowledges %d:%d after its file system has refused a write of the log", b.name, x.Ledger, x.Entry)
		}
		b.w.ghost.stored(b, &x.Add.Add)
		if x.unknown {
			b.w.ghost.letIn(b, x)
		}
	}
	b.w.trace(b.name, entrySubject(x.Ledger, x.Entry), "add %d:%d term %d: %v", x.Ledger, x.Entry, x.Term, codeOf(err))
	x.reply(err)
	b.wakeWaits(x.Ledger)
}

// admitted is the store, as admission uses it.
type admitted struct{ b *bookieProcess }

func (s admitted) Admission(id entry.LedgerID) (known bool, generation uint64) {
	return s.b.store.Admission(id)
}

func (s admitted) Add(a *ledgerstore.Add) {
	s.b.store.Add(a)
	s.b.work()
}

func (b *bookieProcess) fence(f bookiewire.Fence, reply func(bookiewire.FenceReply, error)) {
	b.store.Fence(f, func(r bookiewire.FenceReply, err error) {
		if err == nil {
			b.w.ghost.fenced(b, f.Ledger, f.Term)
		}
		b.w.trace(b.name, ledgerSubject(f.Ledger), "fence %d term %d: %v, lac %d", f.Ledger, f.Term, codeOf(err), r.LAC)
		reply(r, err)
	})
	b.work()
}

// read is Store.Read, whose fence is waited for here.
func (b *bookieProcess) read(r bookiewire.Read, reply func(bookiewire.ReadReply, error)) {
	answer := func() {
		plain := r
		plain.Recovery = false
		got, err := b.store.Read(context.Background(), plain)
		b.w.ghost.read(b, r, got, err)
		if r.Recovery {
			b.w.trace(b.name, entrySubject(r.Ledger, r.First), "recovery read %d:%d term %d: %v", r.Ledger, r.First, r.Term, codeOf(err))
		}
		reply(got, err)
	}
	if !r.Recovery {
		answer()
		return
	}
	b.store.Fence(bookiewire.Fence{Ledger: r.Ledger, Term: r.Term}, func(_ bookiewire.FenceReply, err error) {
		if err != nil {
			reply(bookiewire.ReadReply{}, err)
			return
		}
		b.w.ghost.fenced(b, r.Ledger, r.Term)
		store := b.store
		b.after(b.w.between(0, 200*time.Microsecond), func() {
			if b.store == store {
				answer()
			}
		})
	})
	b.work()
}

func (b *bookieProcess) writeLAC(r bookiewire.WriteLAC, reply func(error)) {
	b.store.WriteLAC(r, func(err error) {
		reply(err)
		b.wakeWaits(r.Ledger)
	})
	b.work()
}

// lacWait is a reader's wait for a LAC.
type lacWait struct {
	ledger entry.LedgerID
	after  entry.EntryID
	reply  func(entry.EntryID)
}

func (b *bookieProcess) waitLAC(r bookiewire.WaitLAC, reply func(entry.EntryID)) {
	x := &lacWait{ledger: r.Ledger, after: r.After, reply: reply}
	if b.tryWait(x) {
		return
	}
	b.waits = append(b.waits, x)
	b.after(r.Timeout, func() {
		if x.reply != nil {
			x.answer(b.lac(x.ledger))
		}
	})
}

func (x *lacWait) answer(lac entry.EntryID) {
	x.reply(lac)
	x.reply = nil
}

func (b *bookieProcess) lac(l entry.LedgerID) entry.EntryID {
	in, ok := b.store.Ledger(l)
	if !ok {
		return entry.NoEntry
	}
	return in.LAC
}

func (b *bookieProcess) tryWait(x *lacWait) bool {
	if x.reply == nil {
		return true
	}
	lac := b.lac(x.ledger)
	if lac > x.after {
		x.answer(lac)
		return true
	}
	return false
}

func (b *bookieProcess) wakeWaits(ledger entry.LedgerID) {
	kept := b.waits[:0]
	for _, x := range b.waits {
		if x.reply != nil && (x.ledger != ledger || !b.tryWait(x)) {
			kept = append(kept, x)
		}
	}
	b.waits = kept
}

// has reports whether the disk has an entry with that body.
func (b *bookieProcess) has(l entry.LedgerID, e entry.EntryID, body []byte) bool {
	if b.store == nil {
		return false
	}
	got, err := b.store.Read(context.Background(), bookiewire.Read{Ledger: l, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	return err == nil && bytes.Equal(got.Entries[0].Body, body)
}

// codeOf is the class of an answer.
func codeOf(err error) bookiewire.Code {
	if err == nil {
		return bookiewire.OK
	}
	var e *bookiewire.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return bookiewire.Disconnected
}
