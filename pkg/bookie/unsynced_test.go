package bookie

import (
	"errors"
	"slices"
	"testing"
	"time"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// boot starts a bookie whose store syncs by an interval that does not end, if lazy, on a kernel that was booted under a name.
func (w *town) boot(fs vfs.FS, boot string, lazy bool) *Bookie {
	w.t.Helper()
	cfg := w.config("data")
	if lazy {
		cfg.Store.Sync.Interval = 1000 * time.Hour
	}
	env := w.env(fs)
	env.BootID = func() (string, error) { return boot, nil }
	b, err := Start(w.t.Context(), cfg, env)
	w.check(err)
	w.t.Cleanup(func() { _ = b.Shutdown(w.t.Context()) })
	return b
}

func (w *town) storeAdd(b *Bookie, l entry.LedgerID, e entry.EntryID) bookiewire.Code {
	a := &ledgerstore.Add{Add: *makeAdd(l, e, "x")}
	_, a.Generation = b.store.Admission(l)
	done := make(chan error, 1)
	a.Done = func(err error) { done <- err }
	b.store.Add(a)
	return code(<-done)
}

func (w *town) storeRead(b *Bookie, l entry.LedgerID, e entry.EntryID) bookiewire.Code {
	_, err := b.store.Read(w.t.Context(), bookiewire.Read{Ledger: l, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	return code(err)
}

func (w *town) want(what string, got, want bookiewire.Code) {
	w.t.Helper()
	if got != want {
		w.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// cutPower returns the disk as it is after a power cut, without what was not synced.
func cutPower(fs *vfs.Mem) *vfs.Mem {
	c := fs.Clone()
	c.Crash(nil)
	return c
}

// A bookie that syncs by an interval: a kill loses nothing, and a power cut puts in limbo what is not closed, until an
// operator ends that. A clean stop leaves nothing to fear.
func TestUnsyncedEntriesMeanLimboAfterAPowerCut(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	fs := vfs.NewMem()
	b := w.boot(fs, "first", true)
	w.await(b.Storage(), func(i meta.BookieInfo, ok bool) bool { return ok && i.Sync == "every 1000h0m0s" })
	closed := w.open(b.Storage())
	w.want("add", w.storeAdd(b, closed.ID, 0), bookiewire.OK)
	w.close(closed, 1)
	open := w.open(b.Storage())
	w.want("add", w.storeAdd(b, open.ID, 0), bookiewire.OK)

	// Killed: what was acknowledged is there, and nobody is shut out.
	killed := fs.Clone()
	w.check(b.Shutdown(t.Context()))
	b = w.boot(killed, "first", true)
	w.want("read after a kill", w.storeRead(b, open.ID, 0), bookiewire.OK)
	w.want("read after a kill", w.storeRead(b, open.ID, 5), bookiewire.NoEntry)
	w.want("add after a kill", w.storeAdd(b, open.ID, 1), bookiewire.OK)

	// A power cut: the last entry is gone, and that is not denied.
	lost := cutPower(killed)
	w.check(b.Shutdown(t.Context()))
	again := lost.Clone()
	env := w.env(again)
	env.BootID = func() (string, error) { return "", errors.New("no such file") }
	cfg := w.config("data")
	cfg.Store.Sync.Interval = time.Hour
	if _, err := Start(t.Context(), cfg, env); err == nil {
		t.Error("it starts, and cannot tell a kill from a power cut")
	}
	for _, mem := range []*vfs.Mem{lost, again} { // a start that failed forgets nothing
		if _, there, err := onDisk(mem).loadMark(); err != nil || !there {
			t.Fatalf("the mark: %t, %v", there, err)
		}
	}
	b = w.boot(again, "second", true)
	w.want("read in limbo", w.storeRead(b, open.ID, 1), bookiewire.Unknown)
	w.want("read in limbo", w.storeRead(b, open.ID, 5), bookiewire.Unknown)
	w.want("add in limbo", w.storeAdd(b, open.ID, 6), bookiewire.Fenced)
	if in, _ := b.store.Ledger(closed.ID); in.Limbo {
		t.Error("a closed ledger is in limbo")
	}

	// Limbo survives whatever comes, until it is ended by hand.
	after := cutPower(again)
	w.check(b.Shutdown(t.Context()))
	b = w.boot(after, "third", false)
	w.want("read in limbo", w.storeRead(b, open.ID, 5), bookiewire.Unknown)
	control := w.control(b)
	if _, err := control.EndLimbo(t.Context(), &bookiev1.EndLimboRequest{}); err == nil {
		t.Error("limbo of nothing in particular was ended")
	}
	reply, err := control.EndLimbo(t.Context(), &bookiev1.EndLimboRequest{Ledgers: []uint64{uint64(open.ID), 4711}})
	if err != nil || !slices.Equal(reply.GetLedgers(), []uint64{uint64(open.ID)}) {
		t.Fatalf("end limbo: %v, %v", reply, err)
	}
	w.want("read after limbo", w.storeRead(b, open.ID, 5), bookiewire.NoEntry)
	w.want("add after limbo", w.storeAdd(b, open.ID, 7), bookiewire.Fenced)
}

func onDisk(fs vfs.FS) disk { return disk{fs: fs, dir: "data"} }

// After a clean stop, and with a sync before each acknowledgement, another boot of the kernel means nothing.
func TestNothingUnsyncedMeansNoLimbo(t *testing.T) {
	t.Parallel()
	for _, lazy := range []bool{true, false} {
		w := newTown(t)
		fs := vfs.NewMem()
		b := w.boot(fs, "first", lazy)
		l := w.open(b.Storage())
		w.want("add", w.storeAdd(b, l.ID, 0), bookiewire.OK)
		if lazy {
			w.check(b.Shutdown(t.Context()))
		}
		after := cutPower(fs)
		w.check(b.Shutdown(t.Context()))
		b = w.boot(after, "second", lazy)
		w.want("read", w.storeRead(b, l.ID, 0), bookiewire.OK)
		w.want("read", w.storeRead(b, l.ID, 1), bookiewire.NoEntry)
		w.want("add", w.storeAdd(b, l.ID, 1), bookiewire.OK)
	}
}

// A sync fails after entries were acknowledged: what the kernel's cache says is not believed, although it is the same kernel's.
func TestFailedSyncOfAcknowledgedEntriesMeansLimbo(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	mem := vfs.NewMem()
	fs := vfs.NewFaulty(mem)
	b := w.boot(fs, "first", true)
	l := w.open(b.Storage())
	w.want("add", w.storeAdd(b, l.ID, 0), bookiewire.OK)
	rule := fs.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Err: errors.New("boom"), LoseUnsynced: true})
	done := make(chan error, 1)
	b.store.Fence(bookiewire.Fence{Ledger: 4711, Term: 1}, func(_ bookiewire.FenceReply, err error) { done <- err })
	w.want("fence", code(<-done), bookiewire.Unknown)
	if err := <-b.Failed(); err == nil {
		t.Error("no reason")
	}
	rule.Remove()
	_ = b.Shutdown(t.Context())
	after := cutPower(mem)
	b = w.boot(after, "first", true)
	w.want("read", w.storeRead(b, l.ID, 0), bookiewire.Unknown)
	w.want("add", w.storeAdd(b, l.ID, 0), bookiewire.Fenced)
}

// A bookie that syncs by an interval starts on a full disk, after a stop, a kill and a power cut, any number of times: what it
// notes about itself takes no more space than it has.
func TestUnsyncedStartsOnAFullDisk(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	fs := vfs.NewMem()
	b := w.boot(fs, "first", true)
	l := w.open(b.Storage())
	w.want("add", w.storeAdd(b, l.ID, 0), bookiewire.OK)
	boots := []string{"first", "another", "a third that has a longer name"}
	for start := range 12 {
		u, err := fs.Usage("data")
		w.check(err)
		fs.SetCapacity(u.Total - u.Free)
		switch start % 3 {
		case 0: // a clean stop; the machine is started anew as well
			w.check(b.Shutdown(t.Context()))
			boots = append(boots[1:], boots[0])
		default: // a kill
			killed := fs.Clone()
			w.check(b.Shutdown(t.Context()))
			fs = killed
		}
		b = w.boot(fs, boots[0], true)
		w.want("read", w.storeRead(b, l.ID, 0), bookiewire.OK)
		w.want("read", w.storeRead(b, l.ID, 1), bookiewire.NoEntry)
	}
	cut := cutPower(fs)
	w.check(b.Shutdown(t.Context()))
	b = w.boot(cut, boots[1], true)
	w.want("read after a power cut", w.storeRead(b, l.ID, 1), bookiewire.Unknown)
}

func FuzzMark(f *testing.F) {
	f.Add(encodeMark(mark{boot: "b"}))
	f.Add(encodeMark(mark{lost: true}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := decodeMark(b)
		if again := decodeMark(encodeMark(m)); !m.lost && again != m {
			t.Fatalf("%x is %+v", b, m)
		}
	})
}
