package sim

import (
	"context"
	"errors"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// exchange is a disk that stands in the place of a bookie's own.
type exchange struct {
	what string // "": its own is there
	own  *vfs.Mem
	disk *vfs.Faulty
	old  *vfs.Mem // a copy of its own, from when it did not run; nil: there is none
	used bool     // it has started since
}

// claims reports whether this run's bookies prove who they are when they start, as the product's do. Where that is not put to the
// test they are who they are, without the writes that it takes.
func (w *world) claims() bool { return w.disksToo.has(StrangeDisk) }

// claim is what a bookie does first on its disk. It returns nil if it may not start, or cannot.
func (b *bookieProcess) claim() *bookie.Claim {
	w := b.w
	if _, err := b.disk.Stat(dataDir); err != nil {
		if err := errors.Join(b.disk.MkdirAll(dataDir), b.disk.SyncDir("/")); err != nil {
			w.trace(b.name, subject{}, "does not start: %v", err)
			return nil
		}
	}
	c, err := bookie.Claimant{
		FS: b.disk, Dir: dataDir, ID: b.id, Cluster: w.cluster, Cookies: w.checker, Mint: func() entry.StorageUUID { return b.uuid },
	}.Claim(context.Background())
	var refusal *bookie.IdentityError
	refused := errors.As(err, &refusal)
	switch what := b.exchanged.what; {
	case err == nil && what != "":
		w.fail("identity", subject{}, "%s starts on %s", b.name, what)
	case err == nil && c.Who.Storage != b.uuid:
		w.fail("identity", subject{}, "%s starts as %v", b.name, c.Who)
	case refused && what == "" && !b.rotten && b.diskErrors() == b.hits:
		w.fail("identity", subject{}, "%s does not start on its own disk: %v", b.name, err)
	}
	if err != nil {
		w.trace(b.name, subject{}, "does not start on %q: refused %v", b.exchanged.what, refused)
		if !refused {
			b.notStarted(err)
		}
		return nil
	}
	return c
}

// proved is the end of that, once the store is open. It reports whether the bookie may serve.
func (b *bookieProcess) proved(c *bookie.Claim) bool {
	err := c.Opened()
	if err == nil {
		err = c.Count(context.Background())
	}
	if err != nil {
		b.w.trace(b.name, subject{}, "does not start: %v", err)
		b.notStarted(err)
		return false
	}
	b.exchanged.used = true
	return true
}

// exchangeDisk has a bookie start on a disk that is not its own, or not any more, and then on its own again. The first time,
// its own is copied.
func (b *bookieProcess) exchangeDisk() {
	w, d := b.w, &b.w.disksToo
	x := &b.exchanged
	if x.what != "" || b.powerIsOff() || b.fresh || b.readOnly || b.noFiles || b.full {
		return
	}
	b.crash("its disk is exchanged")
	if x.old == nil || d.rng.IntN(4) == 0 {
		x.old, x.used = b.mem.Clone(), false
		w.restart(b, d.between(0, 100*time.Millisecond))
		return
	}
	x.own, x.disk = b.mem, b.disk
	other := w.bookies[d.rng.IntN(len(w.bookies))]
	switch n := d.rng.IntN(4); {
	case n == 0:
		x.what, b.mem = "an empty disk", vfs.NewMem()
	case n == 1 && other != b && !other.powerIsOff() && !other.fresh:
		x.what, b.mem = "the disk of "+other.name, other.mem.Clone()
	case n == 2:
		x.what, b.mem = "its disk without its log", b.mem.Clone()
		b.loseLog()
	case x.used:
		x.what, b.mem = "an old copy of its disk", x.old.Clone()
	default: // it has not run since the copy was made, which is as good
		w.restart(b, d.between(0, 100*time.Millisecond))
		return
	}
	b.mem.Crash(nil)
	b.disk = vfs.NewFaulty(b.mem)
	w.trace(b.name, subject{}, "has %s", x.what)
	b.boot()
	w.unlessHealed(d.between(0, 2*time.Second), b.ownDisk)
}

// ownDisk brings a bookie's own disk back.
func (b *bookieProcess) ownDisk() {
	x := &b.exchanged
	if x.what == "" {
		return
	}
	b.crash("its own disk comes back")
	b.mem, b.disk, x.what = x.own, x.disk, ""
	x.own, x.disk = nil, nil
	b.w.restart(b, 0)
}

// loseLog takes the store's files off the disk.
func (b *bookieProcess) loseLog() {
	names, err := b.mem.List(storeDir)
	if err != nil {
		panic(err)
	}
	for _, n := range names {
		if err := b.mem.Remove(storeDir + "/" + n); err != nil {
			panic(err)
		}
	}
	if err := b.mem.SyncDir(storeDir); err != nil {
		panic(err)
	}
}
