package ledgerstore

import (
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func usedBytes(tb testing.TB, fs vfs.FS) uint64 {
	tb.Helper()
	u, err := fs.Usage("/data")
	must(tb, err)
	return u.Total - u.Free
}

// fillDisk adds n entries to ledger 1, leaves no byte on the disk, and adds more until they are refused.
func fillDisk(tb testing.TB, s *Store, fs *vfs.Mem, n entry.EntryID) (stored entry.EntryID) {
	tb.Helper()
	must(tb, s.fillReserve())
	fill(tb, s, 1, 0, n, 100)
	waitSealed(s)
	fs.SetCapacity(usedBytes(tb, fs))
	for stored = n; ; stored++ {
		if err := add(s, 1, stored); err != nil {
			wantCode(tb, err, bookiewire.ReadOnly)
			return stored
		}
		if stored > n+5000 {
			tb.Fatal("the disk is never full")
		}
	}
}

// Recovery's writes use the reserve up. Then they are refused, and do not wait; fences, LACs and deletion go on in what
// they have left over; and a store that is restarted so, again and again, without a free byte and without a spare file,
// starts, serves, and gets out of it by deletion.
func TestRestartWithoutAFreeByte(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.Spares = 2
	cfg.SegmentSize = 256 << 10
	s := openStore(t, cfg, fs)
	stored := fillDisk(t, s, fs, 4000) // more than a segment is the ledger's alone
	recovered := entry.EntryID(0)
	for ; ; recovered++ {
		if err := add(s, 2, recovered, recoveryAdd(1)); err != nil {
			wantCode(t, err, bookiewire.ReadOnly)
			break
		}
		if recovered > 5000 {
			t.Fatal("recovery's writes are never refused")
		}
	}
	if recovered == 0 {
		t.Fatal("recovery's writes have no reserve")
	}
	check := func() {
		t.Helper()
		for e := range stored {
			wantEntry(t, s, 1, e, body(1, e, 100))
		}
		for e := range recovered {
			wantEntry(t, s, 2, e, body(2, e, 100))
		}
	}
	for l := entry.LedgerID(10); l < 14; l++ {
		_, err := fence(s, l, 1)
		must(t, err)
	}
	must(t, writeLAC(s, 2, recovered))
	check()
	for restart := range 20 {
		closeStore(t, s)
		names, err := fs.List("/data")
		must(t, err)
		for _, n := range names {
			if _, ok := parseSpareName(n); ok && restart > 0 {
				must(t, fs.Remove("/data/"+n)) // the worst case: the reserve is gone
			}
		}
		fs.SetCapacity(usedBytes(t, fs))
		s = openStore(t, cfg, fs)
		_, err = fence(s, 20+entry.LedgerID(restart), 1)
		must(t, err)
		if s.State() != Full {
			t.Errorf("state is %v", s.State())
		}
		check()
		compactAll(t, s) // control records alone keep no segment
	}
	for l := entry.LedgerID(20); l < 40; l++ {
		if in, ok := s.Ledger(l); !ok || in.Term != 1 {
			t.Fatalf("fence of ledger %d is lost: %+v", l, in)
		}
	}
	must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
	if compactAll(t, s) <= 0 {
		t.Error("compaction frees nothing on a full disk")
	}
	fs.SetCapacity(usedBytes(t, fs) + uint64(4*cfg.SegmentSize))
	s.look()
	s.look()
	must(t, add(s, 3, 0))
	if in, ok := s.Ledger(39); !ok || in.Term != 1 {
		t.Fatalf("fence of ledger 39 is lost: %+v", in)
	}
}

// Urgent adds use the reserve up, all but what a restart and compaction need. Then they are refused, and do not wait;
// fences go on, the store starts again, and deletion gives them room.
func TestUrgentAddsUseTheReserve(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.Spares = 2
	s := openStore(t, cfg, fs)
	stored := fillDisk(t, s, fs, 4000)
	exhaust := func(l entry.LedgerID) (n entry.EntryID) {
		t.Helper()
		for ; n < 5000; n++ {
			if err := add(s, l, n, urgent); err != nil {
				wantCode(t, err, bookiewire.ReadOnly)
				return n
			}
			wantCode(t, add(s, 1, stored), bookiewire.ReadOnly)
		}
		t.Fatal("urgent adds are never refused")
		return 0
	}
	written := exhaust(2)
	if written < 20 {
		t.Fatalf("the reserve takes %d urgent adds", written)
	}
	if got := s.spareCount(); got != 1 {
		t.Errorf("%d spare files are left for the start and for compaction, want 1", got)
	}
	_, err := fence(s, 3, 1)
	must(t, err)
	s = reopen(t, s)
	for e := range written {
		wantEntry(t, s, 2, e, body(2, e, 100))
	}
	_, err = fence(s, 4, 1)
	must(t, err)
	must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
	if compactAll(t, s) <= 0 {
		t.Error("compaction frees nothing on a full disk")
	}
	s.look()
	must(t, add(s, 2, written, urgent))
}

// The reserve is filled up whatever the watermarks say, as soon as the disk has room.
func TestReserveIsFilledAgain(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.Spares = 2
	s := openStore(t, cfg, fs)
	fill(t, s, 1, 0, 600, 100)
	fs.SetCapacity(usedBytes(t, fs) + uint64(3*cfg.SegmentSize) + mib)
	s.cfg.LowRatio, s.cfg.HighRatio = 0.01, 0.02
	s.look()
	if got := s.spareCount(); got != 2 {
		t.Fatalf("%d spare files on a disk that is full by ratio alone, want 2", got)
	}
}

// A compaction that finds no room gives back what it took from the reserve.
func TestFailedCompactionGivesTheReserveBack(t *testing.T) {
	t.Parallel()
	mem := vfs.NewMem()
	fs := vfs.NewFaulty(mem)
	cfg := small()
	cfg.Spares = 2
	s := openStore(t, cfg, fs)
	must(t, s.fillReserve())
	for e := range entry.EntryID(200) {
		must(t, add(s, 1, e))
		if e%4 == 0 {
			must(t, add(s, 2, e/4))
		}
	}
	waitSealed(s)
	must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
	mem.SetCapacity(usedBytes(t, fs))
	spares := s.spareCount()
	rule := fs.Add(vfs.Rule{Op: vfs.OpWrite, Path: "*-0001.seg", Err: syscall.ENOSPC, After: 1, Times: 1}) // the header passes
	for range 3 {
		if _, err := s.CompactOnce(t.Context()); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("compaction: %v", err)
		}
		if got := s.spareCount(); got != spares {
			t.Fatalf("%d spare files are left of %d", got, spares)
		}
		s.look()
		rule.Remove()
		rule = fs.Add(vfs.Rule{Op: vfs.OpWrite, Path: "*-0001.seg", Err: syscall.ENOSPC, After: 1, Times: 1})
	}
	rule.Remove()
	if compactAll(t, s) <= 0 {
		t.Error("compaction frees nothing afterwards")
	}
	for e := range entry.EntryID(50) {
		wantEntry(t, s, 2, e, body(2, e, 100))
	}
}

// A compaction that fails at its last step leaves the tombstones in force: a later one, of other segments, must not
// drop what keeps the dead dead.
func TestTombstoneOutlivesAFailedCompaction(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	cfg := small()
	cfg.Spares = 0
	s := openStore(t, cfg, fs)
	fill(t, s, 1, 0, 600, 100)
	must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
	fill(t, s, 2, 0, 600, 100)
	waitSealed(s)
	rule := fs.Add(vfs.Rule{Op: vfs.OpCreate, Path: manifestTemp, Err: syscall.ENOSPC})
	if _, err := s.CompactOnce(t.Context()); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("compaction: %v", err)
	}
	rule.Remove()
	if !s.Tombstoned(1) {
		t.Fatal("the tombstone is forgotten while its ledger's records are still listed")
	}
	compactAll(t, s)
	if s.Tombstoned(1) {
		t.Error("the tombstone outlives the last record of its ledger")
	}
	s = reopen(t, s)
	if _, ok := s.Ledger(1); ok {
		t.Fatal("the deleted ledger is back")
	}
	for _, g := range s.segments.list() {
		if _, found := slices.BinarySearch(g.ledgers, 1); found && g.live.Load() <= 0 {
			t.Error("a dead segment was kept")
		}
	}
}

// While the disk is full, and whatever a start gives back is taken by something else, a store may be started any number of
// times, after stops and after power cuts: everything is served, what it takes between is kept, and it goes on by itself
// when there is room.
func TestAnyNumberOfStartsOnAFullDisk(t *testing.T) {
	t.Parallel()
	for _, spares := range []int{1, 2} {
		fs := vfs.NewMem()
		cfg := small()
		cfg.Spares = spares
		cfg.SegmentSize = 128 << 10 // of which all lives together take a part
		s := openStore(t, cfg, fs)
		stored := fillDisk(t, s, fs, 600)
		rng := newRand(uint64(spares))
		terms := entry.Term(0)
		for start := range 45 {
			if start%3 == 2 {
				cut := fs.Clone()
				cut.Crash(rng)
				closeStore(t, s)
				fs = cut
			} else {
				closeStore(t, s)
			}
			fs.SetCapacity(usedBytes(t, fs))
			if start%5 == 4 { // a start that the power ends
				cut := fs.Clone()
				cut.CutPowerAfter(rng.IntN(12))
				if half, err := Open(t.Context(), cfg, cut, quiet, nil); err == nil {
					closeStore(t, half)
				}
				cut.Crash(rng)
				fs = cut
			}
			s = openStore(t, cfg, fs)
			if loss := s.Loss(); loss.All || len(loss.Ledgers) > 0 {
				t.Fatalf("start %d loses %+v", start, loss)
			}
			if err := add(s, 1, stored); err == nil { // the reserve counts as free, and the segment has room
				stored++
			} else {
				wantCode(t, err, bookiewire.ReadOnly)
			}
			for e := entry.EntryID(start % 50); e < stored; e += 50 {
				wantEntry(t, s, 1, e, body(1, e, 100))
			}
			wantEntry(t, s, 1, stored-1, body(1, stored-1, 100))
			if start%4 == 0 {
				terms++
				_, err := fence(s, 2, terms)
				must(t, err)
			}
			if in, ok := s.Ledger(2); !ok || in.Term != terms {
				t.Fatalf("start %d: the fence is %+v, want term %d", start, in, terms)
			}
			if start%7 == 0 { // it has looked for room
				s.look()
			}
		}
		if s.spareCount() != spares {
			t.Errorf("%d spare files are left of %d", s.spareCount(), spares)
		}
		fs.SetCapacity(usedBytes(t, fs) + uint64(8*cfg.SegmentSize) + 8*mib)
		s.look()
		s.look()
		must(t, add(s, 1, stored))
		s = reopen(t, s)
		if in, ok := s.Ledger(2); !ok || in.Term != terms {
			t.Fatalf("afterwards the fence is %+v, want term %d", in, terms)
		}
		for e := range stored + 1 {
			wantEntry(t, s, 1, e, body(1, e, 100))
		}
	}
}

// A segment that goes on says that what was found in it is durable: when the disk loses the last of that, it is damage and not
// a torn tail.
func TestWhatGoesOnVouchesForWhatWasThere(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.SegmentSize = 128 << 10
	s := openStore(t, cfg, fs)
	must(t, s.fillReserve())
	fs.SetCapacity(usedBytes(t, fs))
	must(t, add(s, 1, 0, urgent))
	must(t, add(s, 1, 1, urgent))
	last := func() *Segment { return s.segments.list()[len(s.segments.list())-1] }
	active, size := last().path, last().size.Load()
	for range 3 {
		s = reopen(t, s)
		if last().path != active {
			t.Fatalf("%s goes on, not %s", last().path, active)
		}
	}
	closeStore(t, s)
	f, err := fs.Open(active)
	must(t, err)
	_, err = f.WriteAt([]byte{0xff, 0xff}, size-2) // the end of the second entry
	must(t, errors.Join(err, f.Sync(), f.Close()))
	s = openStore(t, cfg, fs)
	if loss := s.Loss(); !slices.Equal(loss.Ledgers, []entry.LedgerID{1}) {
		t.Errorf("loss is %+v", loss)
	}
	_, err = readOne(s, 1, 1)
	wantCode(t, err, bookiewire.Unknown)
}
