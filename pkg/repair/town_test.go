package repair_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
	"github.com/penstock-mq/penstock/pkg/repair"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

var quiet = slog.New(slog.DiscardHandler)

// nonce is the writer's of every ledger here.
const nonce = 7

// patience bounds every wait.
const patience = 2 * time.Minute

// town is real bookies, on real files, around real etcd, and ledgers that were written to them by hand, so that what each bookie has is
// the test's choice.
type town struct {
	t       *testing.T
	ctx     context.Context //nolint:containedctx // of the test, with an end
	meta    *meta.Store
	cache   *meta.Cache
	guard   meta.Guard
	chain   meta.ChainID
	dir     string
	client  *bookieclient.Client
	control *bookieclient.Control
	bookies []*bookie.Bookie // nil: not running
	uuids   []entry.StorageUUID
	ledgers []entry.LedgerID
}

func newTown(t *testing.T, bookies int) *town {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	w := &town{t: t, ctx: ctx, meta: meta.New(etcd.Client(), uniqueCluster(), nil), dir: t.TempDir()}
	cluster, err := w.meta.EnsureCluster(ctx)
	w.check(err)
	grant, err := etcd.Client().Grant(ctx, 600)
	w.check(err)
	const bundle = meta.BundleID("public/default/3")
	owner, err := w.meta.TakeBundle(ctx, bundle, meta.BrokerInfo{ID: "broker", URL: "penstock://broker:7650"}, grant.ID, meta.ExpectNone())
	w.check(err)
	w.guard = meta.Guard{Bundle: bundle, Epoch: owner.Epoch}
	topic, err := w.meta.CreateTopic(ctx, "public/default/orders", 0)
	w.check(err)
	w.chain = meta.DataChain(topic.UUID, 0)
	w.cache = meta.NewCache(context.WithoutCancel(ctx), w.meta)
	t.Cleanup(w.cache.Close)
	w.check(w.cache.Synced(ctx))
	w.client = bookieclient.New(bookieclient.Config{Cluster: cluster.UUID, BackoffMin: time.Millisecond, BackoffMax: time.Millisecond},
		func(u entry.StorageUUID) (string, bool) {
			info, ok := w.cache.Bookie(u)
			return info.Data, ok
		}, quiet, nil)
	t.Cleanup(w.client.Close)
	w.control = bookieclient.NewControl(func(u entry.StorageUUID) (string, bool) {
		info, ok := w.cache.Bookie(u)
		return info.GRPC, ok
	})
	t.Cleanup(w.control.Close)
	w.bookies, w.uuids = make([]*bookie.Bookie, bookies), make([]entry.StorageUUID, bookies)
	for i := range bookies {
		w.start(i)
	}
	return w
}

func (w *town) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *town) start(i int) {
	w.t.Helper()
	id := fmt.Sprintf("bookie-%d", i)
	b, err := bookie.Start(w.ctx, bookie.Config{
		ID: id, DataDir: filepath.Join(w.dir, id), Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", HostLabel: id, Version: "test",
		Store:                ledgerstore.Config{SegmentSize: 64 << 10, CompactBytesPerSecond: -1, LowRatio: 0.9999, HighRatio: 0.9999},
		RegistrationInterval: 20 * time.Millisecond, ScrubBytesPerSecond: -1,
	}, bookie.Env{
		Meta: w.meta, FS: vfs.OS(), Log: quiet,
		NewSession: func(ctx context.Context) (*lease.Session, error) {
			return lease.NewSession(ctx, etcd.Client(), 20*time.Second, quiet)
		},
	})
	w.check(err)
	w.bookies[i], w.uuids[i] = b, b.Storage()
	w.t.Cleanup(func() { _ = b.Shutdown(context.Background()) })
	w.until("the bookie is registered", func() bool { k, ok := w.cache.Bookie(w.uuids[i]); return ok && k.Data == b.DataAddr() })
}

func (w *town) stop(i int) {
	w.t.Helper()
	w.check(w.bookies[i].Shutdown(w.ctx))
	w.bookies[i] = nil
	w.until("the registration is gone", func() bool { _, ok := w.cache.Bookie(w.uuids[i]); return !ok })
}

// until waits for what nothing announces to a test.
func (w *town) until(what string, holds func() bool) {
	w.t.Helper()
	for !holds() {
		select {
		case <-w.ctx.Done():
			w.t.Fatalf("waited in vain until %s", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func body(l entry.LedgerID, e entry.EntryID) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%d:%d.", l, e), 50)
}

// plan is a ledger to be written: fragments by bookie, and how many entries.
type plan struct {
	replication meta.Replication
	fragments   []meta.Fragment
	entries     entry.EntryID
	open        bool
	// without leaves out the copy of an entry on a bookie.
	without func(e entry.EntryID, u entry.StorageUUID) bool
}

func (w *town) fragment(first entry.EntryID, bookies ...int) meta.Fragment {
	f := meta.Fragment{First: first}
	for _, i := range bookies {
		f.Slots = append(f.Slots, meta.Slot{UUID: w.uuids[i], Host: meta.HostHash(fmt.Sprintf("bookie-%d", i))})
	}
	return f
}

var three = meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}

// write writes a ledger of entries on bookies 0, 1 and 2.
func (w *town) write(entries entry.EntryID) entry.LedgerID {
	w.t.Helper()
	return w.writeAs(plan{replication: three, fragments: []meta.Fragment{w.fragment(0, 0, 1, 2)}, entries: entries})
}

func (w *town) writeAs(p plan) entry.LedgerID {
	w.t.Helper()
	id, err := w.meta.ReserveLedgerIDs(w.ctx, 1)
	w.check(err)
	c, err := w.meta.GetChain(w.ctx, w.chain)
	w.check(err)
	first := p.fragments[0]
	c, l, err := w.meta.OpenLedger(w.ctx, w.guard, c, meta.Ledger{ID: id, Nonce: nonce, Replication: p.replication, Fragments: []meta.Fragment{first}}, nil)
	w.check(err)
	for i, f := range p.fragments {
		if i > 0 {
			l, err = w.meta.ChangeEnsemble(w.ctx, l, p.fragments[:i+1])
			w.check(err)
		}
		last := p.entries - 1
		if i+1 < len(p.fragments) {
			last = p.fragments[i+1].First - 1
		}
		w.add(l, f, last, p.without)
	}
	w.ledgers = append(w.ledgers, id)
	if p.open {
		return id
	}
	begin := c.Runs[len(c.Runs)-1].First
	_, _, err = w.meta.CloseLedger(w.ctx, w.guard, c, meta.Closing{
		Ledger: l, Last: p.entries - 1, Length: int64(p.entries) * int64(len(body(id, 0))), End: begin + entry.Offset(p.entries), MaxTime: 1,
	})
	w.check(err)
	return id
}

// add stores a fragment's entries up to last where they belong.
func (w *town) add(l meta.Ledger, f meta.Fragment, last entry.EntryID, without func(entry.EntryID, entry.StorageUUID) bool) {
	w.t.Helper()
	var wg sync.WaitGroup
	for e := f.First; e <= last; e++ {
		b := body(l.ID, e)
		writeSet(l, f, e, func(s meta.Slot) {
			if without != nil && without(e, s.UUID) {
				return
			}
			wg.Add(1)
			w.client.Add(s.UUID, &bookiewire.Add{
				Ledger: l.ID, Entry: e, LAC: e - 1, Nonce: nonce, Checksum: entry.Checksum(l.ID, e, b), Body: b,
			}, func(err error) {
				if err != nil {
					w.t.Errorf("add entry %d of ledger %d: %v", e, l.ID, err)
				}
				wg.Done()
			})
		})
	}
	wg.Wait()
}

func writeSet(l meta.Ledger, f meta.Fragment, e entry.EntryID, each func(meta.Slot)) {
	r := l.Replication
	q := quorum.MustNew(quorum.Config{Ensemble: r.Ensemble, WriteQuorum: r.WriteQuorum, AckQuorum: r.AckQuorum}, make([]string, r.Ensemble))
	q.WriteSet(e).Each(func(slot int) { each(f.Slots[slot]) })
}

// copiesOn reads all that one bookie gives of the entries first … last.
func (w *town) copiesOn(u entry.StorageUUID, l entry.LedgerID, first, last entry.EntryID) map[entry.EntryID][]byte {
	all := map[entry.EntryID][]byte{}
	for next := first; next <= last; next++ {
		got := make(chan []bookiewire.ReadEntry, 1)
		w.client.Read(w.ctx, u, bookiewire.Read{
			Ledger: l, First: next, Stride: 1, MaxEntries: uint32(last - next + 1), MaxBytes: 1 << 20,
		}, func(r bookiewire.ReadReply, err error) {
			if err != nil && bookiewire.AsError(err).Code != bookiewire.NoEntry {
				w.t.Logf("entry %d of ledger %d on %s: %v", next, l, u, err)
			}
			got <- r.Entries
		})
		for _, e := range <-got {
			all[e.Entry] = e.Body
			next = e.Entry
		}
	}
	return all
}

// audit demands that each entry of each ledger lies, with the bytes that were written, on every bookie that its record names, that
// those run, and that no intent is left.
func (w *town) audit() {
	w.t.Helper()
	for _, id := range w.ledgers {
		l, err := w.meta.GetLedger(w.ctx, id)
		w.check(err)
		if len(l.Pending) > 0 {
			w.t.Errorf("ledger %d has intents: %+v", id, l.Pending)
		}
		for i, f := range l.Fragments {
			last := l.Last
			if i+1 < len(l.Fragments) {
				last = l.Fragments[i+1].First - 1
			}
			if i+1 == len(l.Fragments) && l.State != meta.LedgerClosed {
				continue
			}
			for _, s := range f.Slots {
				if _, ok := w.cache.Bookie(s.UUID); !ok {
					w.t.Errorf("ledger %d names storage %s, which is gone", id, s.UUID)
				}
			}
			copies := map[entry.StorageUUID]map[entry.EntryID][]byte{}
			for _, s := range f.Slots {
				copies[s.UUID] = w.copiesOn(s.UUID, id, f.First, last)
			}
			for e := f.First; e <= last; e++ {
				writeSet(l, f, e, func(s meta.Slot) {
					if got := copies[s.UUID][e]; !bytes.Equal(got, body(id, e)) {
						w.t.Errorf("entry %d of ledger %d on %s has %d bytes, or others than were written", e, id, s.UUID, len(got))
					}
				})
			}
		}
	}
	if w.t.Failed() {
		w.t.FailNow()
	}
}

// brisk is a config that does not wait.
func brisk(worker string) repair.Config {
	return repair.Config{
		Worker: worker, Delay: -1, ScanEvery: 20 * time.Millisecond, PollEvery: 10 * time.Millisecond,
		RetryFirst: 5 * time.Millisecond, RetryMost: 50 * time.Millisecond, DamageEvery: 20 * time.Millisecond, CompareEvery: time.Millisecond, CompareRound: time.Millisecond,
		BytesPerSecond: 1 << 30,
	}
}

// noOwners is for towns whose ledgers are all closed.
type noOwners struct{}

func (noOwners) Release(context.Context, meta.Ledger) error { return errNoOwner }

var errNoOwner = errors.New("nobody owns it")

func (w *town) session() *lease.Session {
	w.t.Helper()
	s, err := lease.NewSession(w.ctx, etcd.Client(), 20*time.Second, quiet)
	w.check(err)
	return s
}

func (w *town) env(s repair.Session) repair.Env {
	return repair.Env{
		Meta: w.meta, Topology: w.cache, Session: s, Control: w.control, Owners: noOwners{}, Log: quiet,
		Ledger: ledger.Env{Bookies: w.client, Metadata: w.meta},
	}
}

// run starts a runner; stop ends it as a crash does, but that its lease goes at once.
func (w *town) run(cfg repair.Config, change func(*repair.Env)) (r *repair.Runner, stop func()) {
	w.t.Helper()
	s := w.session()
	env := w.env(s)
	if change != nil {
		change(&env)
	}
	r = repair.New(cfg, env)
	ctx, cancel := context.WithCancel(w.ctx)
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		_ = s.Close(context.Background())
	})
	w.t.Cleanup(stop)
	return r, stop
}

// mended waits until nothing is damaged as far as the census knows, once it has looked since.
func (w *town) mended() {
	w.t.Helper()
	begin := time.Now()
	w.until("every ledger is mended", func() bool {
		c, err := w.meta.GetRepairCensus(w.ctx)
		w.check(err)
		list, err := w.meta.ListRepairs(w.ctx, 0, 10)
		w.check(err)
		return c.ComparedAll.After(begin.Add(50*time.Millisecond)) && list.Total == 0 && c.Waiting == 0
	})
}

// bookieClient reaches a bookie's control calls.
func (w *town) bookieClient(i int) bookiev1.BookieClient {
	w.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+w.bookies[i].GRPCAddr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	w.check(err)
	w.t.Cleanup(func() { conn.Close() })
	return bookiev1.NewBookieClient(conn)
}

func (w *town) scrub(i int) *bookiev1.ScrubResponse {
	w.t.Helper()
	sum, err := w.bookieClient(i).Scrub(w.ctx, &bookiev1.ScrubRequest{})
	w.check(err)
	return sum
}

// rot damages bytes here and there in the sealed segments of a bookie, which runs.
func (w *town) rot(i int) {
	w.t.Helper()
	paths, err := filepath.Glob(filepath.Join(w.dir, fmt.Sprintf("bookie-%d", i), "*", "*.seg"))
	w.check(err)
	slices.Sort(paths)
	for _, path := range paths[:2] {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		w.check(err)
		for at := int64(8 << 10); at < 40<<10; at += 9000 {
			var b [1]byte
			_, err = f.ReadAt(b[:], at)
			w.check(err)
			b[0] ^= 0x55
			_, err = f.WriteAt(b[:], at)
			w.check(err)
		}
		w.check(f.Close())
	}
}

// limbo has a bookie come back with a ledger in limbo.
func (w *town) limbo(i int, l entry.LedgerID) {
	w.t.Helper()
	u := w.uuids[i]
	cluster, err := w.meta.GetCluster(w.ctx)
	w.check(err)
	w.stop(i)
	paths, err := filepath.Glob(filepath.Join(w.dir, fmt.Sprintf("bookie-%d", i), "*", "MANIFEST"))
	w.check(err)
	s, err := ledgerstore.Open(w.ctx, ledgerstore.Config{
		Dir: filepath.Dir(paths[0]), Cluster: cluster.UUID, Storage: u, SegmentSize: 64 << 10, CompactBytesPerSecond: -1,
	}, vfs.OS(), quiet, nil)
	w.check(err)
	w.check(s.SetLimbo(w.ctx, l))
	w.check(s.Close())
	w.start(i)
}
