package sim

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"syscall"
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
	w       *world
	index   int
	uuid    entry.StorageUUID
	zone    string
	mem     *vfs.Mem
	disk    *vfs.Faulty
	fresh   bool // no store was ever open on the disk
	store   *ledgerstore.ByHand
	meta    *meta.Store
	etcd    *etcdClient
	slow    int // one sync in so many takes long
	clients []*link
	id      string // the bookie's, in its cookie: a new disk has another one
	waiting map[entry.LedgerID][]*pendingAdd
	waits   []*lacWait
	errors  []*vfs.Active // that the disk has yet to show
	rotten  bool          // some of the disk's bytes read as others
	lie     lie           // befalls its collector's reads of etcd
}

type pendingAdd struct {
	ledgerstore.Add
	retries int
	reply   func(error)
}

const (
	storeDir      = "/data"
	segmentSize   = 64 << 10
	admissionTime = 5 * time.Second
	maxRetries    = 3 // of an add whose admission a fence or deletion voided
	registration  = 3 * time.Second
)

func (b *bookieProcess) serving() bool { return b.up && b.store != nil }

func (b *bookieProcess) config() ledgerstore.Config {
	return ledgerstore.Config{
		Dir: storeDir, Cluster: clusterUUID, Storage: b.uuid, Fresh: b.fresh, SegmentSize: segmentSize, Spares: 1,
		CacheBytes: 1 << 20, IndexBytes: 1 << 20, CompactBytesPerSecond: -1, Trash: b.w.trash, Sched: b.sched,
	}
}

// boot starts the process: the store recovers what the disk has, and what it says is held against what was promised.
func (b *bookieProcess) boot() {
	b.start()
	b.meta = meta.NewOver(b.etcd, b.sched, clusterName, nil)
	b.waiting, b.waits = map[entry.LedgerID][]*pendingAdd{}, nil
	hits := b.diskErrors()
	store, err := ledgerstore.OpenByHand(b.config(), b.disk)
	if err != nil {
		b.w.trace(b.name, subject{}, "does not start: %v", err)
		b.kill()
		if empty := b.fresh && errors.Is(err, syscall.ENOSPC); !b.powerIsOff() && b.diskErrors() == hits && !empty { // a new disk has nothing to serve
			b.w.fail("I10", subject{}, "%s does not start: %v", b.name, err)
		}
		return
	}
	b.store, b.fresh = store, false
	loss := store.Loss()
	b.w.trace(b.name, subject{}, "up, lost all %v ledgers %v", loss.All, loss.Ledgers)
	b.w.ghost.booted(b, loss)
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
		d := w.between(100*time.Microsecond, 4*time.Millisecond)
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

// add is the server's: an add of a ledger that the store knows goes there, another one waits for admission.
func (b *bookieProcess) add(a bookiewire.Add, reply func(error)) {
	x := &pendingAdd{Add: ledgerstore.Add{Add: a}, reply: reply}
	x.Done = func(err error) { b.stored(x, err) }
	b.admit(x)
	b.work()
}

func (b *bookieProcess) admit(x *pendingAdd) {
	var known bool
	if known, x.Generation = b.store.Admission(x.Ledger); known {
		b.store.Add(&x.Add)
		return
	}
	_, running := b.waiting[x.Ledger]
	b.waiting[x.Ledger] = append(b.waiting[x.Ledger], x)
	if !running {
		ledger := x.Ledger
		b.sched.Go(func() { b.runAdmission(ledger) })
	}
}

// runAdmission reads a ledger's record, once for all adds that came before the read began.
func (b *bookieProcess) runAdmission(ledger entry.LedgerID) {
	for {
		round := b.waiting[ledger]
		if len(round) == 0 {
			delete(b.waiting, ledger)
			return
		}
		b.waiting[ledger] = nil
		ctx, cancel := b.sched.WithTimeout(context.Background(), admissionTime)
		l, err := b.meta.GetLedger(ctx, ledger)
		cancel()
		for _, x := range round {
			switch {
			case errors.Is(err, meta.ErrNotFound):
				x.reply(&bookiewire.Error{Code: bookiewire.NotAdmitted})
			case err != nil:
				x.reply(&bookiewire.Error{Code: bookiewire.Unknown})
			default:
				if refusal := bookie.Admit(l, b.uuid, &x.Add.Add); refusal != nil {
					x.reply(refusal)
				} else {
					b.store.Add(&x.Add)
				}
			}
		}
		b.work()
	}
}

// stored is the store's last word about an add.
func (b *bookieProcess) stored(x *pendingAdd, err error) {
	if e := bookiewire.AsError(err); err != nil && e.Code == bookiewire.NotAdmitted && x.retries < maxRetries {
		x.retries++
		_, x.Generation = b.store.Admission(x.Ledger)
		_, running := b.waiting[x.Ledger]
		b.waiting[x.Ledger] = append(b.waiting[x.Ledger], x)
		if !running {
			ledger := x.Ledger
			b.sched.Go(func() { b.runAdmission(ledger) })
		}
		return
	}
	if err == nil {
		b.w.ghost.stored(b, &x.Add.Add)
	}
	b.w.trace(b.name, entrySubject(x.Ledger, x.Entry), "add %d:%d term %d: %v", x.Ledger, x.Entry, x.Term, codeOf(err))
	x.reply(err)
	b.wakeWaits(x.Ledger)
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
