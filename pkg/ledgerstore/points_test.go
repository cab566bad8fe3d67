package ledgerstore

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Crash points, all of them. A store without goroutines goes through one history, the same each time, and the power is
// cut after each change of the disk that it makes; of what was not synced then, several subsets survive.

// site is where in the code a change of the disk is made.
type site string

const (
	inAppend     site = "append and sync of groups"
	inTombstone  site = "deletion: tombstone"
	inRoll       site = "roll: the next segment's file"
	inRollList   site = "roll: manifest"
	inFooter     site = "roll: footer of the old segment"
	inCopy       site = "compaction: copies and their footer"
	inCarry      site = "compaction: fences, LACs, limbo and tombstones carried on"
	inSwap       site = "compaction: manifest"
	inUnlink     site = "compaction: segments unlinked or kept for reuse"
	inReserve    site = "spare files"
	inStartClean site = "start: leftovers and empty segments removed"
	inStartScan  site = "start: scan, which syncs"
	inStartSeal  site = "start: footers that are missing"
	inStartList  site = "start: manifest"
	inStartFile  site = "start: the first segment's file"
	inStartDir   site = "start: directory and lock"
	elsewhere    site = "elsewhere"
)

// siteRules name sites by who is on the stack, the first that fits.
var siteRules = []struct {
	site site
	on   []string // functions, all of which are
}{
	{inStartList, []string{".(*recovery).", ".writeManifest"}},
	{inStartClean, []string{".(*recovery).cleanUp"}},
	{inStartClean, []string{".(*recovery).dropEmpty"}},
	{inStartClean, []string{".(*recovery).dropLost"}},
	{inStartScan, []string{".(*recovery).openSegment"}},
	{inStartSeal, []string{".(*recovery).", "segment.SealRecovered"}},
	{inStartFile, []string{".(*recovery).", ".(*Store).create"}},
	{inAppend, []string{".(*recovery).finish"}},
	{inSwap, []string{".(*Store).CompactOnce", ".writeManifest", "!.(*Store).prepare"}},
	{inUnlink, []string{".(*Store).replace", ".(*Store).discard"}},
	{inCopy, []string{".(*Store).rewrite"}},
	{inRollList, []string{".(*Store).prepare", ".writeManifest"}},
	{inRoll, []string{".(*Store).prepare"}},
	{inFooter, []string{".(*Store).seal"}},
	{inFooter, []string{"ledgerstore.(*ByHand)", "segment.(*Writer).Seal"}},
	{inCarry, []string{".(*Store).replace", ".(*ByHand).drive"}},
	{inUnlink, []string{".(*Store).replace"}},
	{inAppend, []string{"segment.(*Writer).AppendBatch"}},
	{inAppend, []string{"segment.(*Writer).Sync"}},
	{inReserve, []string{".(*Store).fillReserve"}},
	{inStartDir, []string{"ledgerstore.makeDir"}},
	{inStartDir, []string{"ledgerstore.open"}},
}

func siteNow() site {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	var stack strings.Builder
	for {
		f, more := frames.Next()
		fmt.Fprintln(&stack, f.Function)
		if !more {
			break
		}
	}
	for _, r := range siteRules {
		fits := !slices.ContainsFunc(r.on, func(fn string) bool {
			name, without := strings.CutPrefix(fn, "!")
			return strings.Contains(stack.String(), name) == without
		})
		if fits {
			return r.site
		}
	}
	return elsewhere
}

// watchedFS notes each change of the disk, and where it is made if that is asked for.
type watchedFS struct {
	*vfs.Mem
	made    []string // operation and path
	asked   bool
	at      []site
	burying bool // what is appended is a tombstone
}

func (w *watchedFS) note(before int, op, path string) {
	if w.Changes() == before {
		return
	}
	w.made = append(w.made, op+" "+path)
	if !w.asked {
		return
	}
	at := siteNow()
	if at == inAppend && w.burying {
		at = inTombstone
	}
	w.at = append(w.at, at)
}

func (w *watchedFS) Create(path string) (vfs.File, error) {
	defer w.note(w.Changes(), "Create", path)
	return w.wrap(path)(w.Mem.Create(path))
}

func (w *watchedFS) Open(path string) (vfs.File, error) { return w.wrap(path)(w.Mem.Open(path)) }

func (w *watchedFS) wrap(path string) func(vfs.File, error) (vfs.File, error) {
	return func(f vfs.File, err error) (vfs.File, error) {
		if err != nil {
			return nil, err
		}
		return &watchedFile{File: f, fs: w, path: path}, nil
	}
}

func (w *watchedFS) Rename(from, to string) error {
	defer w.note(w.Changes(), "Rename", from)
	return w.Mem.Rename(from, to)
}

func (w *watchedFS) Remove(path string) error {
	defer w.note(w.Changes(), "Remove", path)
	return w.Mem.Remove(path)
}

func (w *watchedFS) MkdirAll(dir string) error {
	defer w.note(w.Changes(), "MkdirAll", dir)
	return w.Mem.MkdirAll(dir)
}

func (w *watchedFS) SyncDir(dir string) error {
	defer w.note(w.Changes(), "SyncDir", dir)
	return w.Mem.SyncDir(dir)
}

type watchedFile struct {
	vfs.File
	fs   *watchedFS
	path string
}

func (f *watchedFile) WriteAt(p []byte, off int64) (int, error) {
	defer f.fs.note(f.fs.Changes(), "WriteAt", f.path)
	return f.File.WriteAt(p, off)
}

func (f *watchedFile) Datasync() error {
	defer f.fs.note(f.fs.Changes(), "Datasync", f.path)
	return f.File.Datasync()
}

func (f *watchedFile) Sync() error {
	defer f.fs.note(f.fs.Changes(), "Sync", f.path)
	return f.File.Sync()
}

func (f *watchedFile) Truncate(size int64) error {
	defer f.fs.note(f.fs.Changes(), "Truncate", f.path)
	return f.File.Truncate(size)
}

func (f *watchedFile) Allocate(off, n int64) error {
	defer f.fs.note(f.fs.Changes(), "Allocate", f.path)
	return f.File.Allocate(off, n)
}

// historyRun is one run of the history.
type historyRun struct {
	*promises
	fs  *watchedFS
	h   *ByHand
	rng *rand.Rand // the same each time
}

// runHistory goes through it until the power goes, after so many changes; a negative number is no end.
func runHistory(cfg Config, changes int) *historyRun {
	r := &historyRun{promises: newPromises(), fs: &watchedFS{Mem: vfs.NewMem(), asked: changes < 0}, rng: newRand(1)}
	r.fs.CutPowerAfter(changes)
	var err error
	if r.h, err = OpenByHand(cfg, r.fs); err != nil {
		return r
	}
	defer r.h.Abandon()
	r.h.AtOnce(func() {
		_ = r.h.fillReserve() // of a disk with room, or without power
		r.workload(r.h.Store)
	})
	for round := range entry.EntryID(6) {
		r.round(round)
	}
	r.h.cfg.Trash = -1
	r.h.post(&Expire{Before: math.MaxInt64})
	r.h.AtOnce(func() {
		for range 6 {
			_, _ = r.h.CompactOnce(r.h.ctx)
		}
		r.fill(r.h.Store, 10, 60, 64)
	})
	return r
}

// round has many requests under way at once, whose writes and syncs are done in any order.
func (r *historyRun) round(n entry.EntryID) {
	r.h.cfg.Trash = []time.Duration{-1, time.Hour}[n%2]
	for e := 10 * n; e < 10*n+10; e++ {
		for _, l := range []entry.LedgerID{10, 11, entry.LedgerID(20 + n)} {
			r.submitAdd(l, e)
		}
		r.some(3)
	}
	if l := entry.LedgerID(20 + n); n > 1 {
		r.submitFence(l, entry.Term(n))
	}
	if n > 0 {
		l := entry.LedgerID(20 + n - 1)
		r.deleted[l] = false // asked
		r.fs.burying = true
		r.h.submit(&Delete{Ledger: l, Mark: r.h.Mark(l), At: r.h.deletionTime(), Done: func(err error) { r.deleted[l] = r.deleted[l] || err == nil }})
		r.some(1 << 20)
		r.fs.burying = false
	}
	r.some(1 << 20)
	r.h.AtOnce(func() { _, _ = r.h.CompactOnce(r.h.ctx) })
}

func (r *historyRun) submitAdd(l entry.LedgerID, e entry.EntryID) {
	if r.stored[l] == nil {
		r.stored[l] = map[entry.EntryID]bool{}
	}
	r.stored[l][e] = false
	r.h.Add(newAdd(r.h.Store, l, e, func(err error) {
		if err == nil {
			r.stored[l][e] = true
			if lac, ok := r.lac[l]; !ok || e-1 > lac {
				r.lac[l] = e - 1
			}
		}
	}, withBody(body(l, e, crashBody))))
}

func (r *historyRun) submitFence(l entry.LedgerID, term entry.Term) {
	r.asked[l] = max(r.asked[l], term)
	r.h.Fence(bookiewire.Fence{Ledger: l, Term: term}, func(_ bookiewire.FenceReply, err error) {
		if err == nil {
			r.term[l] = max(r.term[l], term)
		}
	})
}

// some does up to n of the tasks that are open, in any order.
func (r *historyRun) some(n int) {
	for ; n > 0; n-- {
		r.h.Tasks()
		if len(r.h.open) == 0 {
			return
		}
		r.h.Do(r.h.open[r.rng.IntN(len(r.h.open))])
	}
}

// seen is all that a store answers.
func seen(s *Store, p *promises) map[string]string {
	all := map[string]string{}
	s.Ledgers(func(in LedgerInfo) bool {
		all[fmt.Sprint(in.Ledger)] = fmt.Sprintf("%+v", in)
		return true
	})
	for l, entries := range p.stored {
		for e := range entries {
			b, err := readOne(s, l, e)
			all[fmt.Sprintf("%d:%d", l, e)] = fmt.Sprint(err, len(b))
		}
	}
	return all
}

// afterCut opens what a power cut left, compares it with what was promised, loses power again at once, to see whether
// what was answered stays, and goes on.
func (p *promises) afterCut(cfg Config, fs *vfs.Mem) (err error) {
	var before map[string]string
	for again := range 2 {
		h, err := OpenByHand(cfg, fs)
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		h.AtOnce(func() {
			if again == 0 {
				err = p.check(h.Store)
			}
			now := seen(h.Store, p)
			if again == 1 && !maps.Equal(now, before) {
				err = fmt.Errorf("what was answered after a power cut has changed in the next: %v, %v", before, now)
			}
			before = now
		})
		if err != nil || again == 1 {
			h.Abandon()
			return err
		}
		h.Abandon()
		fs.Crash(nil)
	}
	return nil
}

// goOn uses a store as before.
func (p *promises) goOn(cfg Config, fs *vfs.Mem) error {
	q := newPromises()
	for range 2 {
		h, err := OpenByHand(cfg, fs)
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		h.AtOnce(func() {
			if err = errors.Join(p.check(h.Store), q.check(h.Store)); err != nil {
				return
			}
			if _, err = h.CompactOnce(h.ctx); err == nil {
				q.fill(h.Store, 40, 0, 3)
				err = q.check(h.Store)
			}
		})
		h.Abandon()
		if err != nil {
			return err
		}
	}
	return nil
}

// subsets is how many subsets of what was not synced survive a cut in turn; the first is none of it. Names have more to
// be combined than batches.
func subsets(at site) uint64 {
	if at == inAppend {
		return 4
	}
	return 12
}

// Each start after a cut has some thirty changes of its own.
var everyRestart = flag.Bool("crash.restarts", false, "cut the power at each change of the start after each crash point, not of one in ten")

// The power is cut after each change of the disk.
func TestCrashPointsAtEachChange(t *testing.T) {
	t.Parallel()
	cfg := crashConfig()
	whole := runHistory(cfg, -1)
	if whole.h.Failed() != nil {
		t.Fatal(whole.h.Failed())
	}
	points := whole.fs.at
	if len(points) != whole.fs.Changes() {
		t.Fatalf("%d changes, %d were seen", whole.fs.Changes(), len(points))
	}
	states, restarts := 0, 0
	step := 1
	if sweepStep > 1 {
		step = 41 // under the race detector, to see that the test itself works
	}
	for n := 0; n <= len(points); n += step {
		r := runHistory(cfg, n)
		if !slices.Equal(r.fs.made, whole.fs.made[:n]) {
			t.Fatalf("the history is another one when it is cut after %d changes", n)
		}
		for subset := range subsets(lastOf(points[:n])) {
			states++
			var rng *rand.Rand
			if subset > 0 {
				rng = newRand(uint64(n)<<8 | subset)
			}
			fs := r.fs.Clone()
			fs.Crash(rng)
			err := r.afterCut(cfg, fs)
			if err == nil && subset == 0 {
				err = r.goOn(cfg, fs)
			}
			if err != nil {
				t.Fatalf("cut after %d of %d changes, in %q, subset %d: %v", n, len(points), lastOf(points[:n]), subset, err)
			}
		}
		if n%10 > 0 && !*everyRestart {
			continue
		}
		cuts, err := r.cutRestarts(cfg, n)
		restarts += cuts
		if err != nil {
			t.Fatalf("cut after %d of %d changes, in %q, %v", n, len(points), lastOf(points[:n]), err)
		}
	}
	reportPoints(t, points)
	t.Logf("%d points, %d states of the disk after them; %d more points while starting from one of these", len(points), states, restarts)
}

// cutRestarts cuts the power at each change of the start after a power cut.
func (r *historyRun) cutRestarts(cfg Config, n int) (cuts int, err error) {
	after := r.fs.Clone()
	after.Crash(newRand(uint64(n)))
	for done := false; !done; cuts++ {
		fs := after.Clone()
		fs.CutPowerAfter(cuts)
		h, err := OpenByHand(cfg, fs)
		if done = err == nil; done {
			h.Abandon()
		} else if !strings.Contains(err.Error(), vfs.ErrPowerCut.Error()) { // some steps hide what they wrap
			return cuts, fmt.Errorf("start: %w", err)
		}
		fs.Crash(newRand(uint64(cuts)))
		if err := r.afterCut(cfg, fs); err != nil {
			return cuts, fmt.Errorf("and after %d changes of the start: %w", cuts, err)
		}
	}
	return cuts, nil
}

func lastOf(points []site) site {
	if len(points) == 0 {
		return ""
	}
	return points[len(points)-1]
}

// reportPoints counts them by site; none may be missing.
func reportPoints(t *testing.T, points []site) {
	t.Helper()
	count := map[site]int{}
	for _, p := range points {
		count[p]++
	}
	for _, p := range []site{inAppend, inTombstone, inRoll, inRollList, inFooter, inCopy, inCarry, inSwap, inUnlink} {
		if count[p] == 0 {
			t.Errorf("the history has no point in %q", p)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(count)) {
		t.Logf("%5d %s", count[p], p)
	}
}
