package ledgerstore

import (
	"slices"
	"syscall"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// damage flips one byte of a file at rest.
func damage(tb testing.TB, fs vfs.FS, path string, off int64) {
	tb.Helper()
	f, err := fs.Open(path)
	must(tb, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], off)
	must(tb, err)
	b[0] ^= 0x55
	_, err = f.WriteAt(b[:], off)
	must(tb, err)
	must(tb, f.Sync())
	must(tb, f.Close())
}

// crashedStore leaves a directory as a killed process does: acknowledged entries of ledgers 1 and 2, one by one, in a
// segment that is not sealed, and ledger 3 in one that is. Ledger 1 is fenced.
func crashedStore(tb testing.TB) (fs *vfs.Mem, unsealed, sealed *Segment) {
	tb.Helper()
	fs = vfs.NewMem()
	s := openStore(tb, small(), fs)
	fill(tb, s, 3, 0, 200, 100)
	waitSealed(s)
	for range 3 { // what is written last says that what was before is durable
		for e := range entry.EntryID(4) {
			must(tb, add(s, 1, e))
			must(tb, add(s, 2, e))
		}
	}
	segs := s.segments.list()
	sealed = segs[0]
	unsealed = s.core.active
	closeStore(tb, s)
	return fs, unsealed, sealed
}

// place returns where an entry of an unsealed segment is.
func place(tb testing.TB, fs vfs.FS, l entry.LedgerID, e entry.EntryID) (path string, offset int64) {
	tb.Helper()
	s := openStore(tb, small(), fs)
	places, _ := s.locate(l, e)
	if len(places) != 1 || !places[0].footer {
		tb.Fatalf("places %+v", places)
	}
	r, err := places[0].seg.handle.acquireReader(s.fs, places[0].seg.path)
	must(tb, err)
	loc, found, err := r.Find(l, e)
	if err != nil || !found {
		tb.Fatalf("find: %v %v", found, err)
	}
	places[0].seg.handle.release()
	closeStore(tb, s)
	return places[0].seg.path, loc.Offset
}

// #2908: bytes that were acknowledged are damaged in a segment that a crash left unsealed. The ledger's misses are
// unknown from then on, and its writer is shut out; both across restarts. The others are not touched.
func TestB21DamageBelowDurableMeansLimbo(t *testing.T) {
	t.Parallel()
	fs, _, _ := crashedStore(t)
	path, offset := place(t, fs.Clone(), 1, 1)
	damage(t, fs, path, offset+56+20) // in the body
	s := openStore(t, small(), fs)
	if l := s.Loss(); l.All || !slices.Equal(l.Ledgers, []entry.LedgerID{1}) {
		t.Fatalf("loss %+v, want ledger 1", l)
	}
	check := func() {
		t.Helper()
		_, err := readOne(s, 1, 1)
		wantCode(t, err, bookiewire.Unknown)
		_, err = readOne(s, 1, 9) // not even this is denied
		wantCode(t, err, bookiewire.Unknown)
		wantCode(t, recoveryRead(s, 1, 9, 2), bookiewire.Unknown)
		wantCode(t, add(s, 1, 9), bookiewire.Fenced)
		for e := range entry.EntryID(4) {
			wantEntry(t, s, 2, e, body(2, e, 100))
			if e != 1 {
				wantEntry(t, s, 1, e, body(1, e, 100))
			}
		}
		_, err = readOne(s, 2, 9)
		wantCode(t, err, bookiewire.NoEntry)
	}
	check()
	s = reopen(t, s)
	check()
	// Repair: the entry is written again, and limbo ends. The fence stays.
	must(t, add(s, 1, 1, recoveryAdd(2)))
	must(t, s.ClearLimbo(t.Context(), 1))
	s = reopen(t, s)
	wantEntry(t, s, 1, 1, body(1, 1, 100))
	_, err := readOne(s, 1, 9)
	wantCode(t, err, bookiewire.NoEntry)
	wantCode(t, add(s, 1, 9), bookiewire.Fenced)
}

// The restart that finds damage is cut short at each of its changes: the limbo is durable before anything else.
func TestLimboBeforeTheSeal(t *testing.T) {
	t.Parallel()
	before, _, _ := crashedStore(t)
	path, offset := place(t, before.Clone(), 1, 1)
	damage(t, before, path, offset+56+20)
	for n := 0; ; n++ {
		fs := before.Clone()
		fs.CutPowerAfter(n)
		s, err := Open(t.Context(), small(), fs, quiet, nil)
		done := err == nil
		if done {
			_ = s.Close()
		}
		fs.Crash(newRand(uint64(n)))
		fs.CutPowerAfter(-1)
		s = openStore(t, small(), fs)
		_, err = readOne(s, 1, 9)
		if codeOf(err) != bookiewire.Unknown || codeOf(add(s, 1, 9)) != bookiewire.Fenced {
			t.Fatalf("cut after %d changes: %v", n, err)
		}
		closeStore(t, s)
		if done {
			return
		}
	}
}

func TestLostSegmentMeansLimboForAll(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, lose := range []string{"missing", "header", "manifest", "no manifest"} {
		t.Run(lose, func(t *testing.T) {
			t.Parallel()
			fs, _, sealed := crashedStore(t)
			switch lose {
			case "missing":
				must(t, fs.Remove(sealed.path))
			case "header":
				for off := range int64(4096) {
					damage(t, fs, sealed.path, off)
				}
			case "manifest":
				damage(t, fs, "/data/MANIFEST", 70)
			case "no manifest":
				must(t, fs.Remove("/data/MANIFEST"))
			}
			s := openStore(t, small(), fs)
			check := func() {
				t.Helper()
				if !s.Loss().All {
					t.Fatal("the loss is not noticed")
				}
				for _, l := range []entry.LedgerID{1, 2, 77} { // 77 may have been in what was lost
					_, err := readOne(s, l, 9)
					wantCode(t, err, bookiewire.Unknown)
					wantCode(t, recoveryRead(s, l, 9, 5), bookiewire.Unknown)
				}
				wantCode(t, add(s, 1, 9), bookiewire.Fenced)
				wantCode(t, add(s, 78, 0), bookiewire.Unknown)
				wantEntry(t, s, 1, 1, body(1, 1, 100))
			}
			check()
			s = reopen(t, s)
			check()
			// The bookie asks the metadata what it may have held, marks that, and ends the loss.
			must(t, s.SetLimbo(ctx, 3, 78))
			must(t, s.EndLoss(ctx))
			for range 2 {
				_, err := readOne(s, 3, 500)
				wantCode(t, err, bookiewire.Unknown)
				wantCode(t, add(s, 78, 0), bookiewire.Fenced)
				_, err = readOne(s, 79, 0)
				wantCode(t, err, bookiewire.NoLedger)
				if s.Loss().All {
					t.Fatal("the loss has not ended")
				}
				s = reopen(t, s)
			}
			must(t, add(s, 79, 0))
		})
	}
}

// A killed process loses nothing at all. (What was being written when it was killed: TestB27TornTailDoesNotBlockReplay.)
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	fs, _, _ := crashedStore(t)
	s := openStore(t, small(), fs)
	if l := s.Loss(); l.All || len(l.Ledgers) > 0 {
		t.Fatalf("loss %+v", l)
	}
	for e := range entry.EntryID(4) {
		wantEntry(t, s, 1, e, body(1, e, 100))
		wantEntry(t, s, 2, e, body(2, e, 100))
	}
}

// Ledger-protocol §0.2: the negative answer to a recovery read comes after the fence is durable. Were it not, the
// power cut would forget the fence, and the writer's late add would follow the negative that closed the ledger.
func TestB2FenceIsDurableBeforeANegative(t *testing.T) {
	t.Parallel()
	for _, known := range []bool{true, false} {
		mem := vfs.NewMem()
		fs := vfs.NewFaulty(mem)
		s := openStore(t, small(), fs)
		if known {
			must(t, add(s, 1, 0))
		}
		gate := vfs.NewGate()
		fs.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Gate: gate})
		answer := make(chan error, 1)
		go func() { answer <- recoveryRead(s, 1, 5, 2) }()
		<-gate.Arrived()
		select {
		case err := <-answer:
			t.Fatalf("answered before the fence was synced: %v", err)
		default:
		}
		gate.Open()
		wantCode(t, <-answer, bookiewire.NoEntry)
		after := mem.Clone()
		after.Crash(newRand(3))
		r := openStore(t, small(), after)
		wantCode(t, add(r, 1, 5), bookiewire.Fenced)
		closeStore(t, r)
		closeStore(t, s)
	}
}

// What the next segment says to be durable counts when a segment ends too early.
func TestNextSegmentTellsWhatWasDurable(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0))
	closeStore(t, s)
	m, err := readManifest(fs, "/data")
	must(t, err)
	s.segments.manifest = m
	payload := make([]byte, 100)
	first, err := s.prepare(ordinary)
	must(t, err)
	locs, err := first.handle.writer.AppendBatch(benchRecords(0, payload)[:5], 0)
	must(t, err)
	damaged := locs[2].Offset + 60
	must(t, first.handle.writer.Sync())
	second, err := s.prepare(ordinary)
	must(t, err)
	second.handle.writer.SetPrevDurable(first.handle.writer.Size())
	_, err = second.handle.writer.AppendBatch(benchRecords(1000, payload)[:5], 0)
	must(t, err)
	must(t, second.handle.writer.Sync())
	first.handle.close()
	second.handle.close()
	without := fs.Clone()
	damage(t, fs, first.path, damaged)
	s = openStore(t, small(), fs)
	if l := s.Loss(); l.All || !slices.Equal(l.Ledgers, []entry.LedgerID{4}) {
		t.Fatalf("loss %+v, want ledger 4", l)
	}
	_, err = readOne(s, 4, 2)
	wantCode(t, err, bookiewire.Unknown)

	// Without the next segment's word it is a torn tail.
	must(t, without.Remove(second.path))
	m.remove(second.seq)
	m.add(manifestSegment{sequence: first.seq, uuid: first.uuid})
	must(t, writeManifest(without, "/data", m))
	damage(t, without, first.path, damaged)
	s = openStore(t, small(), without)
	if l := s.Loss(); l.All || len(l.Ledgers) > 0 {
		t.Fatalf("loss %+v, want none", l)
	}
}

// A file among the spares that is in use again, because the power went while it was being taken, is no spare.
func TestSpareInUseIsRemoved(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	must(t, s.fillReserve())
	live := s.segments.list()[0].path
	must(t, add(s, 1, 0))
	closeStore(t, s)
	copyOf := s.segments.spares[0]
	must(t, fs.Remove("/data/"+copyOf))
	src, err := fs.Open(live)
	must(t, err)
	size, err := src.Size()
	must(t, err)
	b := make([]byte, size)
	_, err = src.ReadAt(b, 0)
	must(t, err)
	must(t, src.Close())
	dst, err := fs.Create("/data/" + copyOf)
	must(t, err)
	_, err = dst.WriteAt(b, 0)
	must(t, err)
	must(t, dst.Close())
	s = openStore(t, small(), fs)
	if _, err := fs.Stat("/data/" + copyOf); err == nil {
		t.Fatalf("%s is still there", copyOf)
	}
	wantEntry(t, s, 1, 0, body(1, 0, 100))
}

// The restart that finds the manifest lost is cut short at each of its changes: the next one knows as well that it
// cannot be told what is missing.
func TestLostManifestIsNotForgotten(t *testing.T) {
	t.Parallel()
	for _, lose := range []string{"damaged", "gone"} {
		before, _, _ := crashedStore(t)
		if lose == "gone" {
			must(t, before.Remove("/data/MANIFEST"))
			must(t, before.SyncDir("/data"))
		} else {
			damage(t, before, "/data/MANIFEST", 70)
		}
		for n := 0; ; n++ {
			fs := before.Clone()
			fs.CutPowerAfter(n)
			s, err := Open(t.Context(), small(), fs, quiet, nil)
			done := err == nil
			if done {
				_ = s.Close()
			}
			fs.Crash(newRand(uint64(n)))
			s = openStore(t, small(), fs)
			if !s.Loss().All {
				t.Fatalf("%s: cut after %d changes: the loss is forgotten", lose, n)
			}
			for _, l := range []entry.LedgerID{1, 2, 77} {
				_, err = readOne(s, l, 9)
				wantCode(t, err, bookiewire.Unknown)
			}
			for _, l := range []entry.LedgerID{1, 2} {
				wantCode(t, add(s, l, 9), bookiewire.Fenced)
			}
			closeStore(t, s)
			if done {
				break
			}
		}
	}
}

// A failed sync of the directory stops the store, whoever asked for it and whatever the error, and is no loss to the
// next start.
func TestFailedDirectorySync(t *testing.T) {
	t.Parallel()
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC} {
		for after := range 12 {
			mem := vfs.NewMem()
			fs := vfs.NewFaulty(mem)
			s := openStore(t, small(), fs)
			must(t, add(s, 1, 0))
			rule := fs.Add(vfs.Rule{Op: vfs.OpSyncDir, Err: errno, After: after})
			for e := entry.EntryID(1); e < 2000 && rule.Hits() == 0; e++ {
				if add(s, 1, e) != nil {
					break
				}
			}
			for l := entry.LedgerID(1); l < 3 && rule.Hits() == 0; l++ {
				_ = s.DeleteLedger(t.Context(), 1, s.Mark(1))
				_, _ = s.CompactOnce(t.Context())
			}
			if rule.Hits() == 0 {
				t.Fatalf("after %d: no sync failed", after)
			}
			if err := <-s.Fatal(); err == nil {
				t.Fatal("stopped without a reason")
			}
			closeStore(t, s)
			for _, lost := range []bool{false, true} {
				left := mem.Clone()
				if lost {
					left.Crash(newRand(uint64(after)))
				} else {
					left.Crash(nil)
				}
				r := openStore(t, small(), left)
				if l := r.Loss(); l.All || len(l.Ledgers) > 0 {
					t.Fatalf("%v after %d: loss %+v", errno, after, l)
				}
				closeStore(t, r)
			}
		}
	}
}

// What was acknowledged last has nothing behind it that says so, until the store has been idle for a moment. Damage to
// it is not taken for a torn tail then.
func TestB21LastBatchIsVouchedFor(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0))
	must(t, add(s, 2, 0))
	size := s.core.active.size.Load()
	s.look()
	s.look() // once is enough
	closeStore(t, s)
	if grown := s.core.active.size.Load() - size; grown <= 0 || grown > 200 {
		t.Errorf("%d bytes are written while idle", grown)
	}
	path, offset := place(t, fs.Clone(), 2, 0)
	damage(t, fs, path, offset+56+20)
	s = openStore(t, small(), fs)
	if l := s.Loss(); l.All || !slices.Equal(l.Ledgers, []entry.LedgerID{2}) {
		t.Fatalf("loss %+v, want ledger 2", l)
	}
	_, err := readOne(s, 2, 0)
	wantCode(t, err, bookiewire.Unknown)
	wantEntry(t, s, 1, 0, body(1, 0, 100))
}
