package ledgerstore

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func trashConfig() Config {
	cfg := small()
	cfg.Trash = time.Hour
	return cfg
}

// onDisk counts the entries of a ledger in sealed segments, alive or not.
func onDisk(tb testing.TB, s *Store, l entry.LedgerID) (entries int) {
	tb.Helper()
	for _, g := range s.segments.list() {
		if !g.sealed.Load() {
			continue
		}
		r, err := g.handle.acquireReader(s.fs, g.path)
		must(tb, err)
		must(tb, r.IndexLedger(l, 0, func(e entry.EntryID, loc segment.Location) bool {
			rec, err := r.ReadAt(loc)
			must(tb, err)
			if string(rec.Body) != string(body(l, e, len(rec.Body))) {
				tb.Fatalf("entry %d:%d has other bytes", l, e)
			}
			entries++
			return true
		}))
		g.handle.release()
	}
	return entries
}

// What was deleted is gone for everybody at once, and on the disk for an hour, whatever is compacted and restarted
// meanwhile. Then its space is free.
func TestDeletedStaysOnTheDiskForAWhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, trashConfig(), vfs.NewMem())
		for e := range entry.EntryID(400) {
			must(t, add(s, 1, e))
			if e%8 == 0 {
				must(t, add(s, 2, e))
			}
		}
		fill(t, s, 1, 400, 1000, 100) // with nothing else beside it, which a rewrite would keep it with
		must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
		fill(t, s, 3, 0, 300, 100) // what has the tombstone is sealed too
		waitSealed(s)
		for range 3 {
			_, err := readOne(s, 1, 0)
			wantCode(t, err, bookiewire.NoLedger)
			wantCode(t, add(s, 1, 0), bookiewire.NotAdmitted)
			if victims, _ := s.chooseVictims(); len(victims) > 0 {
				t.Fatalf("%d segments are to be compacted, which keep their trash in force", len(victims))
			}
			compactAll(t, s)
			if n := onDisk(t, s, 1); n != 1000 {
				t.Fatalf("%d of 1000 entries are left on the disk", n)
			}
			s = reopen(t, s)
			time.Sleep(19 * time.Minute)
			s.look()
		}
		// Deleted again, which it is as often as somebody fences it: what there was stays.
		_, err := fence(s, 1, 2)
		must(t, err)
		must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
		fill(t, s, 3, 300, 600, 100)
		waitSealed(s)
		time.Sleep(59 * time.Minute)
		s = reopen(t, s)
		compactAll(t, s)
		if n := onDisk(t, s, 1); n != 1000 {
			t.Fatalf("%d of 1000 entries are left on the disk", n)
		}
		// The time is over, without and with a restart.
		time.Sleep(2 * time.Minute)
		s.look()
		if compactAll(t, s) <= 0 || onDisk(t, s, 1) > 100 { // a few, in a segment that is mostly alive
			t.Fatalf("%d entries are left on the disk", onDisk(t, s, 1))
		}
		for _, g := range s.segments.list() {
			if n := g.trash.Load(); n != 0 {
				t.Fatalf("segment %d has %d bytes of trash", g.seq, n)
			}
		}
		must(t, s.DeleteLedger(t.Context(), 3, s.Mark(3)))
		time.Sleep(2 * time.Hour)
		s = reopen(t, s)
		if compactAll(t, s) <= 0 || onDisk(t, s, 3) != 0 {
			t.Fatalf("%d entries are left on the disk", onDisk(t, s, 3))
		}
		for e := entry.EntryID(0); e < 400; e += 8 {
			wantEntry(t, s, 2, e, body(2, e, 100))
		}
		closeStore(t, s)
	})
}

// Where space is short the oldest goes first, and no more than is needed.
func TestTrashGoesWhenSpaceIsShort(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := &diskWith{FS: vfs.NewMem()}
		disk.set(500)
		s := openStore(t, trashConfig(), disk)
		must(t, s.fillReserve())
		for l := entry.LedgerID(1); l <= 3; l++ {
			fill(t, s, l, 0, 600, 100)
		}
		fill(t, s, 4, 0, 300, 100)
		waitSealed(s)
		for _, l := range []entry.LedgerID{2, 1, 3} {
			must(t, s.DeleteLedger(t.Context(), l, s.Mark(l)))
			time.Sleep(time.Minute)
		}
		// Between two looks of the store's own, and with compaction held: each would look at another state of the disk.
		time.Sleep(spaceEvery / 2)
		synctest.Wait()
		s.compact.Lock()
		defer s.compact.Unlock()
		disk.mu.Lock()
		disk.usage.Free = 100<<20 - 60<<10 // with a spare file, 28 KiB short of the low watermark
		disk.mu.Unlock()
		s.look()
		_ = writeLAC(s, 4, 299) // behind what look has told
		held := func(l entry.LedgerID) bool { return len(s.table.shard(l).tombs[l].runs) > 0 }
		if held(2) || !held(1) || !held(3) {
			t.Fatalf("in the trash: 1 %v, 2 %v, 3 %v; want all but 2, which was deleted first", held(1), held(2), held(3))
		}
		s.look() // compaction will do
		_ = writeLAC(s, 4, 300)
		if !held(1) || !held(3) {
			t.Fatal("more goes than is needed")
		}
	})
}

// A ledger that is deleted while a compaction is under way is in the trash of the copy, whether its entries are still to
// be copied or have been.
func TestDeletedDuringCompaction(t *testing.T) {
	t.Parallel()
	for name, writes := range map[string]int{"before copying": 0, "after copying": 1} { // the first write is the header
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testDeletedDuringCompaction(t, vfs.Rule{Op: vfs.OpWrite, Path: "*-0001.seg", After: writes, Times: 1})
		})
	}
}

func testDeletedDuringCompaction(t *testing.T, at vfs.Rule) {
	t.Helper()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, trashConfig(), fs)
	s.cfg.Trash = -1
	for e := range entry.EntryID(200) {
		must(t, add(s, 1, e))
		if e%10 == 0 {
			must(t, add(s, 2, e))
			must(t, add(s, 3, e))
		}
	}
	waitSealed(s)
	must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
	s.cfg.Trash = time.Hour
	before := onDisk(t, s, 2)
	gate := vfs.NewGate()
	at.Gate = gate
	fs.Add(at)
	freed := make(chan int64)
	go func() {
		n, err := s.CompactOnce(t.Context())
		if err != nil {
			t.Error(err)
		}
		freed <- n
	}()
	<-gate.Arrived()
	must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
	gate.Open()
	if <-freed <= 0 {
		t.Fatal("nothing was compacted")
	}
	for range 2 {
		if n := onDisk(t, s, 2); n < before { // a restart seals the rest
			t.Fatalf("%d of %d entries are left on the disk", n, before)
		}
		if !slices.ContainsFunc(s.segments.list(), func(g *Segment) bool { return g.gen > 0 && g.trash.Load() > 0 }) {
			t.Fatal("the copy holds no trash")
		}
		_, err := readOne(s, 2, 0)
		wantCode(t, err, bookiewire.NoLedger)
		for e := entry.EntryID(0); e < 200; e += 10 {
			wantEntry(t, s, 3, e, body(3, e, 100))
		}
		s = reopen(t, s)
	}
}
