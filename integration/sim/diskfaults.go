package sim

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// The faults of disks that some seeds have beside the others. What is drawn for them comes from a stream of its own, so that
// seeds without them run as if there were none.
const (
	FullRestart  Fault = "full-restart"   // a disk is full, and its process starts anew [F16]
	ReadOnlyDisk Fault = "read-only-disk" // a file system turns read-only until it is mounted anew [F17]
	NoFiles      Fault = "no-files"       // no file can be made or opened for a while [F20]
	StrangeDisk  Fault = "strange-disk"   // a bookie starts on an old copy of its disk, an empty one, another's, or one without its log [F15]
)

var diskFaults = []Fault{FullRestart, ReadOnlyDisk, NoFiles, StrangeDisk}

// diskMischief is what injects them.
type diskMischief struct {
	rng    *rand.Rand
	faults []Fault // of this seed
}

func (d *diskMischief) has(f Fault) bool { return slices.Contains(d.faults, f) }

// addDiskFaults has two seeds in five have one or two of them.
func (w *world) addDiskFaults() {
	d := &w.disksToo
	d.rng = rand.New(rand.NewPCG(w.opt.Seed, 0x6469736b73)) //nolint:gosec // seeded on purpose
	n := max(0, d.rng.IntN(5)-2)
	order := d.rng.Perm(len(diskFaults))
	for _, i := range order[:n] {
		d.faults = append(d.faults, diskFaults[i])
	}
	w.opt.Faults = append(slices.Clone(w.opt.Faults), d.faults...)
}

// between is the kernel's, of the stream.
func (d *diskMischief) between(a, b time.Duration) time.Duration {
	return a + time.Duration(d.rng.Int64N(int64(b-a)+1))
}

func (w *world) harmDisks() {
	d := &w.disksToo
	if w.healed || len(d.faults) == 0 {
		return
	}
	w.after(calmer(w, d.between(200*time.Millisecond, 5*time.Second), 8), w.harmDisks)
	f, k, span := d.faults[d.rng.IntN(len(d.faults))], w.bookies[d.rng.IntN(len(w.bookies))], d.between(50*time.Millisecond, 4*time.Second)
	w.trace("sim", subject{}, "%s: %s for %v", f, k.name, span)
	switch f { //nolint:exhaustive // the others are injected elsewhere
	case FullRestart:
		if k.fill(uint64(d.rng.IntN(96<<10)), span) {
			w.unlessHealed(span/4, func() {
				if k.full {
					k.crash("killed, with a full disk")
					w.unlessHealed(d.between(time.Millisecond, 100*time.Millisecond), func() {
						if !k.up {
							k.bootAgain()
						}
					})
				}
			})
		}
	case ReadOnlyDisk:
		k.turnReadOnly()
		w.unlessHealed(span, k.remount)
	case NoFiles:
		if !k.rotten {
			k.exhaustFiles(span)
		}
	case StrangeDisk:
		k.exchangeDisk()
	}
}

// spaceLooks is how long a store may take to see that there is space again.
const spaceLooks = 5 * time.Second

// fill fills the disk but for so many bytes, for a while.
func (b *bookieProcess) fill(left uint64, span time.Duration) bool {
	u, err := b.mem.Usage("/")
	if err != nil {
		return false
	}
	b.mem.SetCapacity(u.Total - u.Free + left)
	b.full = true
	b.w.unlessHealed(span/2, func() { b.serves("I13", "with a full disk", func() bool { return b.full }) })
	b.w.unlessHealed(span, b.makeRoom)
	return true
}

// makeRoom ends a full disk.
func (b *bookieProcess) makeRoom() {
	b.mem.SetCapacity(diskSize)
	if b.full {
		b.full = false
		b.resumes("I13", "its disk has room")
	}
}

// resumes sees that the store takes new ledgers again soon, by itself.
func (b *bookieProcess) resumes(invariant, since string) {
	store, mem, at := b.store, b.mem, b.w.now
	b.freed = at
	b.w.after(spaceLooks, func() {
		switch {
		case b.freed != at: // it was short of something since, and is looked at later
		case store == nil || b.store != store || b.mem != mem || store.Failed() != nil || b.powerIsOff(): // a start looks anew
		case b.full || b.noFiles || b.readOnly:
		case b.paused:
			b.resumes(invariant, since)
		case store.State() != ledgerstore.Writable:
			b.w.fail(invariant, subject{}, "%s is %s, %v after %s again", b.name, store.State(), spaceLooks, since)
		}
	})
}

// serves reads some of what the disk has acknowledged.
func (b *bookieProcess) serves(invariant, how string, still func() bool) {
	if !still() || !b.serving() || b.rotten || b.noFiles || b.powerIsOff() || b.store.Failed() != nil {
		return
	}
	w, d := b.w, b.w.ghost.disk(b.uuid)
	for range min(10, len(d.sorted)) {
		k := d.sorted[w.disksToo.rng.IntN(len(d.sorted))]
		if d.gone[k.ledger] {
			continue
		}
		got, err := b.store.Read(context.Background(), bookiewire.Read{Ledger: k.ledger, First: k.entry, Stride: 1, MaxEntries: 1, MaxBytes: 1})
		if err != nil || !w.ghost.is(k, got.Entries[0].Body) {
			w.fail(invariant, entrySubject(k.ledger, k.entry), "%s, %s, answers %v to a read of %d:%d, which it acknowledged", b.name, how, codeOf(err), k.ledger, k.entry)
			return
		}
	}
}

// startedFull holds the state of a store that starts on a full disk against what the disk has left: spare files count as space.
func (b *bookieProcess) startedFull() {
	u, err := b.mem.Usage("/")
	if err != nil || !b.full {
		return
	}
	if free := u.Free + 2*segmentSize; free*20 < u.Total && b.store.State() == ledgerstore.Writable {
		b.w.fail("I13", subject{}, "%s starts as writable, with %d bytes of %d left", b.name, u.Free, u.Total)
	}
	b.serves("I13", "started on a full disk", func() bool { return b.full })
}

// notStarted holds a start that has failed against what befell the disk. A full one that has never been started on has nothing to
// serve.
func (b *bookieProcess) notStarted(err error) {
	if b.powerIsOff() || b.diskErrors() > b.hits || !b.began && errors.Is(err, syscall.ENOSPC) {
		return
	}
	invariant := "I10"
	if b.full {
		invariant = "I13"
	}
	b.w.fail(invariant, subject{}, "%s does not start, full %v: %v", b.name, b.full, err)
}

// refuses holds a refusal against what a bookie may say of itself: whoever cannot write says so.
func (b *bookieProcess) refuses(x *arrival, refusal *bookiewire.Error) {
	if !b.full && !b.noFiles || refusal.Code != bookiewire.Unknown || x.unknown || b.rotten || b.store.Failed() != nil ||
		strings.HasPrefix(refusal.Detail, "metadata") {
		return
	}
	b.w.fail("I13", entrySubject(x.Ledger, x.Entry), "%s, full %v, out of files %v, answers an add with %v", b.name, b.full, b.noFiles, refusal)
}

// stopped holds the reason for which a store has stopped against what befell it.
func (b *bookieProcess) stopped(err error) {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		b.w.fail("I13", subject{}, "%s stops since its disk is full: %v", b.name, err)
	case errors.Is(err, syscall.EMFILE):
		b.w.fail("I15", subject{}, "%s stops for want of file descriptors: %v", b.name, err)
	case b.diskErrors() == b.hits && !b.powerIsOff():
		b.w.fail("I10", subject{}, "%s stops, and nothing befell its disk: %v", b.name, err)
	}
}

// writes are the operations that a read-only file system refuses.
var writes = []vfs.Op{vfs.OpCreate, vfs.OpRename, vfs.OpRemove, vfs.OpMkdir, vfs.OpSyncDir, vfs.OpLock, vfs.OpTruncate, vfs.OpAllocate}

// turnReadOnly is what a file system does that has found itself damaged.
func (b *bookieProcess) turnReadOnly() {
	if b.readOnly {
		return
	}
	b.readOnly = true
	rule := func(r vfs.Rule) *vfs.Active {
		r.Err = syscall.EROFS
		a := b.disk.Add(r)
		b.errors, b.frozen = append(b.errors, a), append(b.frozen, a)
		return a
	}
	b.refused = []*vfs.Active{
		rule(vfs.Rule{Op: vfs.OpWrite, Path: storeDir + "/*"}), rule(vfs.Rule{Op: vfs.OpSync, Path: storeDir + "/*", LoseUnsynced: true}),
	}
	for _, op := range append([]vfs.Op{vfs.OpWrite, vfs.OpSync}, writes...) {
		rule(vfs.Rule{Op: op})
	}
}

// remount ends that: what was not on the disk is gone, and the process starts anew.
func (b *bookieProcess) remount() {
	if !b.readOnly {
		return
	}
	b.serves("I13", "on a file system that is read-only", func() bool { return b.readOnly })
	b.crash("its file system is mounted anew")
	for _, e := range b.frozen {
		e.Remove()
	}
	b.readOnly, b.refused, b.frozen = false, nil, nil
	b.mem.Crash(b.w.disksToo.rng)
	b.w.restart(b, b.w.disksToo.between(10*time.Millisecond, time.Second))
}

// endErrors has the disk show no errors any more.
func (b *bookieProcess) endErrors() {
	for _, e := range b.errors {
		e.Remove()
	}
	b.noFiles = false
}

// wroteInVain reports whether the log could not be written, in this life.
func (b *bookieProcess) wroteInVain() bool {
	return slices.ContainsFunc(b.refused, func(a *vfs.Active) bool { return a.Hits() > 0 }) && b.diskErrors() > b.hits
}

// exhaustFiles has nothing be opened for a while.
func (b *bookieProcess) exhaustFiles(span time.Duration) {
	if b.noFiles {
		return
	}
	b.noFiles = true
	var rules []*vfs.Active
	for _, op := range []vfs.Op{vfs.OpCreate, vfs.OpOpen} {
		a := b.disk.Add(vfs.Rule{Op: op, Err: syscall.EMFILE})
		rules, b.errors = append(rules, a), append(b.errors, a)
	}
	b.w.after(span, func() {
		for _, a := range rules {
			a.Remove()
		}
		b.noFiles = false
		b.resumes("I15", "it can open files")
	})
}
