//go:build linux && !noroot

package powercut

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// The child's surroundings.
const (
	envDir   = "PENSTOCK_TEST_POWERCUT_DIR"
	envSeed  = "PENSTOCK_TEST_POWERCUT_SEED"
	envFirst = "PENSTOCK_TEST_POWERCUT_LEDGER"
	envSize  = "PENSTOCK_TEST_POWERCUT_SEGMENT"
	notePipe = 3 // descriptor
)

// storeConfig makes everything happen often.
func storeConfig(dir string, segment int64) ledgerstore.Config {
	return ledgerstore.Config{
		Dir: dir, Cluster: entry.UUID{1}, Storage: entry.StorageUUID{2}, Fresh: true,
		SegmentSize: segment, Spares: 1, CacheBytes: 256 << 10, IndexBytes: 64 << 10, Trash: time.Millisecond,
		CompactBelow: 0.8, LowRatio: 0.98, HighRatio: 0.99,
	}
}

// body is the one value of an entry: mostly short, now and then larger than a segment may be.
func body(l entry.LedgerID, e entry.EntryID) []byte {
	rng := rand.New(rand.NewPCG(uint64(l), uint64(e)))
	size := 20 + rng.IntN(1000)
	switch rng.IntN(200) {
	case 0:
		size = 100 << 10
	case 1, 2, 3, 4, 5:
		size = 12 << 10
	}
	b := fmt.Appendf(nil, "%d:%d:", l, e)
	return append(b, bytes.Repeat([]byte{byte(rng.Uint32()), byte(e), byte(l)}, size/3)...)[:size]
}

const workers = 4

// child works on a store until it is killed.
type child struct {
	*teller
	store *ledgerstore.Store
	ctx   context.Context //nolint:containedctx // the process's
}

// runChild is the child's main.
func runChild(dir string) error {
	var n [3]uint64
	for i, name := range []string{envSeed, envFirst, envSize} {
		v, err := strconv.ParseUint(os.Getenv(name), 10, 64)
		if err != nil {
			return err
		}
		n[i] = v
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	ctx := context.Background()
	store, err := ledgerstore.Open(ctx, storeConfig(dir, int64(n[2])), vfs.OS(), log, nil)
	if err != nil {
		return err
	}
	c := &child{teller: &teller{pipe: os.NewFile(notePipe, "notes")}, store: store, ctx: ctx}
	c.tell(opened, 0, 0, 0)
	for i := range workers {
		w := &worker{
			child: c, rng: rand.New(rand.NewPCG(n[0], uint64(i))),
			room: make(chan struct{}, 256), next: entry.LedgerID(n[1]) + entry.LedgerID(i), ledgers: map[entry.LedgerID]*page{},
		}
		w.adopt(i)
		go w.run()
	}
	for {
		freed, err := store.CompactOnce(ctx)
		if err != nil {
			return fmt.Errorf("compact: %w", err) // the power is cut, or the parent finds it unexpected
		}
		c.tell(compacted, 0, freed, 0)
		time.Sleep(3 * time.Millisecond) // leaves the disk to the others
	}
}

// worker is the one user of some ledgers.
type worker struct {
	*child
	rng     *rand.Rand
	room    chan struct{} // adds on their way
	next    entry.LedgerID
	ledgers map[entry.LedgerID]*page
}

// page is what a worker knows of a ledger.
type page struct {
	next  entry.EntryID
	term  entry.Term
	limbo bool
	gone  bool
}

// adopt goes on with what is in the store.
func (w *worker) adopt(index int) {
	w.store.Ledgers(func(in ledgerstore.LedgerInfo) bool {
		if int(in.Ledger%workers) == index {
			w.ledgers[in.Ledger] = &page{next: in.Last + 1, term: in.Term, limbo: in.Limbo}
		}
		return true
	})
	w.next += (workers + entry.LedgerID(index) - w.next%workers) % workers
}

func (w *worker) run() {
	for {
		l, p := w.pick()
		switch n := w.rng.IntN(100); {
		case n < 70:
			w.add(l, p)
		case n < 78:
			w.fence(l, p)
		case n < 85 && p.next > 0:
			lac := w.rng.Int64N(int64(p.next))
			w.tell(askLAC, l, lac, 0)
			w.store.WriteLAC(bookiewire.WriteLAC{Ledger: l, LAC: entry.EntryID(lac)}, w.told(lacDone, l, lac, 0))
		case n < 90:
			w.limbo(l, p)
		case n < 96:
			w.remove(l, p)
		default:
			w.drain()
		}
	}
}

// pick returns a ledger, old or new.
func (w *worker) pick() (entry.LedgerID, *page) {
	writable := 0
	for _, p := range w.ledgers {
		if p.term == 0 && !p.gone {
			writable++
		}
	}
	if writable >= 3 || writable > 0 && w.rng.IntN(4) > 0 {
		n := w.rng.IntN(len(w.ledgers))
		for l, p := range w.ledgers { // in whatever order
			if n--; n < 0 {
				return l, p
			}
		}
	}
	l := w.next
	w.next += workers
	p := &page{}
	w.ledgers[l] = p
	return l, p
}

// told makes a Done that tells of success, and of errors but those of a store that has stopped: the power went.
func (w *worker) told(ev event, l entry.LedgerID, a, b int64) func(error) {
	return func(err error) {
		if err == nil {
			w.tell(ev, l, a, b)
			return
		}
		w.complain(ev, l, err)
	}
}

func (w *worker) complain(ev event, l entry.LedgerID, err error) {
	var e *bookiewire.Error
	if errors.As(err, &e) && e.Code == bookiewire.Unknown {
		return
	}
	fmt.Fprintf(os.Stderr, "event %d of ledger %d: %v\n", ev, l, err)
	w.tell(refused, l, int64(ev), 0)
}

// add stores some entries that follow each other, and waits for them or not.
func (w *worker) add(l entry.LedgerID, p *page) {
	n := entry.EntryID(1 + w.rng.IntN(32))
	w.tell(askAdd, l, int64(p.next), int64(p.next+n))
	for ; n > 0; n-- {
		a := &ledgerstore.Add{Add: bookiewire.Add{Ledger: l, Entry: p.next, LAC: p.next - 1, Nonce: 1, Body: body(l, p.next)}}
		a.Recovery, a.Term = p.term > 0, p.term
		a.Checksum = entry.Checksum(l, a.Entry, a.Body)
		_, a.Generation = w.store.Admission(l)
		recovery := int64(0)
		if a.Recovery {
			recovery = 1
		}
		w.room <- struct{}{}
		done := w.told(addDone, l, int64(p.next), recovery)
		a.Done = func(err error) {
			done(err)
			<-w.room
		}
		w.store.Add(a)
		p.next++
	}
	if w.rng.IntN(3) == 0 {
		w.drain()
	}
}

// drain waits for the adds under way.
func (w *worker) drain() {
	for range cap(w.room) {
		w.room <- struct{}{}
	}
	for range cap(w.room) {
		<-w.room
	}
}

// fence raises the term, behind adds that may be on their way.
func (w *worker) fence(l entry.LedgerID, p *page) {
	p.term += 1 + entry.Term(w.rng.IntN(2))
	term := int64(p.term)
	w.tell(askFence, l, term, 0)
	done := w.told(fenceDone, l, term, 0)
	w.store.Fence(bookiewire.Fence{Ledger: l, Term: p.term}, func(_ bookiewire.FenceReply, err error) { done(err) })
}

func (w *worker) limbo(l entry.LedgerID, p *page) {
	ask, done, change := askLimbo, limboDone, w.store.SetLimbo
	if p.limbo {
		ask, done, change = askClear, clearDone, w.store.ClearLimbo
	}
	w.drain() // an add that is overtaken would be refused
	p.limbo, p.term = !p.limbo, max(p.term, 1)
	w.tell(ask, l, 0, 0)
	w.told(done, l, 0, 0)(stoppedIs(change(w.ctx, l)))
}

func (w *worker) remove(l entry.LedgerID, p *page) {
	w.drain()
	p.gone = true
	delete(w.ledgers, l)
	w.tell(askDelete, l, 0, 0)
	err := w.store.DeleteLedger(w.ctx, l, w.store.Mark(l))
	for errors.Is(err, ledgerstore.ErrMarked) { // a fence that was on its way has made the ledger known since
		err = w.store.DeleteLedger(w.ctx, l, w.store.Mark(l))
	}
	w.told(deleteDone, l, 0, 0)(stoppedIs(err))
}

// stoppedIs unwraps what the waiting calls return.
func stoppedIs(err error) error {
	var e *bookiewire.Error
	if errors.As(err, &e) {
		return e
	}
	return err
}
