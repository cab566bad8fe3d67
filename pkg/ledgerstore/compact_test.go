package ledgerstore

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// compactAll compacts until there is nothing to do, and returns what was freed.
func compactAll(tb testing.TB, s *Store) (freed int64) {
	tb.Helper()
	for range 100 {
		n, err := s.CompactOnce(tb.Context())
		must(tb, err)
		if n == 0 {
			return freed
		}
		freed += n
	}
	tb.Fatal("compaction does not end")
	return 0
}

func segmentFiles(tb testing.TB, fs vfs.FS, dir string) (segments, spares int) {
	tb.Helper()
	names, err := fs.List(dir)
	must(tb, err)
	for _, n := range names {
		switch _, _, ok := parseSegmentName(n); {
		case ok:
			segments++
		case strings.HasPrefix(n, "spare-"):
			spares++
		}
	}
	return segments, spares
}

func TestDeadSegmentsAreUnlinked(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	fill(t, s, 1, 0, 1500, 100)
	waitSealed(s)
	before, _ := segmentFiles(t, fs, "/data")
	must(t, s.DeleteLedger(ctx, 1, s.Mark(1)))
	_, err := readOne(s, 1, 0)
	wantCode(t, err, bookiewire.NoLedger)
	fill(t, s, 2, 0, 500, 100) // so that the segment with the last of ledger 1 is sealed
	waitSealed(s)
	if freed := compactAll(t, s); freed <= 0 {
		t.Fatalf("freed %d", freed)
	}
	after, spares := segmentFiles(t, fs, "/data")
	if after >= before || spares == 0 {
		t.Fatalf("%d segments before, %d after, %d spares", before, after, spares)
	}
	fill(t, s, 3, 0, 1500, 100) // into recycled files too
	s = reopen(t, s)
	for e := range entry.EntryID(500) {
		wantEntry(t, s, 2, e, body(2, e, 100))
	}
	for e := range entry.EntryID(1500) {
		wantEntry(t, s, 3, e, body(3, e, 100))
	}
	_, err = readOne(s, 1, 0)
	wantCode(t, err, bookiewire.NoLedger)
}

// interleave fills segments with one ledger that stays and one that goes.
func interleave(tb testing.TB, s *Store, stays, goes entry.LedgerID, n entry.EntryID) {
	tb.Helper()
	for e := entry.EntryID(0); e < n; e += 10 {
		fill(tb, s, stays, e, e+4, 100)
		fill(tb, s, goes, e, e+10, 100)
	}
	waitSealed(s)
}

func TestHalfDeadSegmentsAreRewritten(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	interleave(t, s, 1, 2, 1000)
	want := func() {
		t.Helper()
		for e := entry.EntryID(0); e < 1000; e++ {
			if e%10 < 4 {
				wantEntry(t, s, 1, e, body(1, e, 100))
			} else if _, err := readOne(s, 1, e); codeOf(err) != bookiewire.NoEntry {
				t.Fatalf("entry %d: %v", e, err)
			}
		}
		if in, _ := s.Ledger(1); in.Entries != 400 {
			t.Fatalf("%d entries", in.Entries)
		}
	}
	before, _ := segmentFiles(t, fs, "/data")
	must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
	if compactAll(t, s) <= 0 {
		t.Fatal("nothing freed")
	}
	after, _ := segmentFiles(t, fs, "/data")
	if after > before*2/3 {
		t.Fatalf("%d segments before, %d after", before, after)
	}
	want()
	must(t, add(s, 1, 0)) // a duplicate of a rewritten entry
	wantCode(t, add(s, 1, 0, withBody([]byte("x"))), bookiewire.BadRequest)
	s = reopen(t, s)
	want()
	compactAll(t, s)
	want()
}

// BOOKKEEPER-500, -815, #208: a fence survives restart, compaction of the segment it stands in, and a full disk.
func TestB20FenceSurvives(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	fill(t, s, 99, 0, 120, 100) // what goes, so that the segment with the fences is worth compacting
	must(t, add(s, 1, 0))
	_, err := fence(s, 1, 3) // known, lives on
	must(t, err)
	_, err = fence(s, 2, 4) // unknown: nothing but a fence
	must(t, err)
	must(t, s.SetLimbo(ctx, 3))
	must(t, s.SetLimbo(ctx, 4))
	must(t, s.ClearLimbo(ctx, 4))
	must(t, add(s, 5, 0))
	must(t, writeLAC(s, 5, 0))
	first := s.segments.list()[0].seq
	check := func() {
		t.Helper()
		for l, term := range map[entry.LedgerID]entry.Term{1: 3, 2: 4, 3: 1, 4: 1} {
			wantCode(t, add(s, l, 7), bookiewire.Fenced)
			if in, _ := s.Ledger(l); in.Term != term || in.Limbo != (l == 3) {
				t.Fatalf("ledger %d: %+v, want term %d", l, in, term)
			}
		}
		_, err := readOne(s, 3, 0)
		wantCode(t, err, bookiewire.Unknown)
		_, err = readOne(s, 4, 0)
		wantCode(t, err, bookiewire.NoEntry)
		if in, _ := s.Ledger(5); in.LAC != 0 {
			t.Fatalf("LAC %d", in.LAC)
		}
	}
	check()
	s = reopen(t, s)
	check()
	must(t, s.DeleteLedger(ctx, 99, s.Mark(99)))
	for round := range 3 {
		victim := entry.LedgerID(100 + round)
		fill(t, s, victim, 0, 600, 100)
		waitSealed(s)
		must(t, s.DeleteLedger(ctx, victim, s.Mark(victim)))
		compactAll(t, s)
		check()
		s = reopen(t, s)
		check()
	}
	if oldest := s.segments.list()[0]; oldest.seq == first && oldest.gen == 0 {
		t.Fatal("the segment with the fences was not compacted: the test proves nothing")
	}
}

// BOOKKEEPER-530, #1534: the old segments go only after the copies, their names and the manifest are durable. The
// sync of each is failed in turn; the old segment must be what a restart finds.
func TestB28OldSegmentsGoLast(t *testing.T) {
	t.Parallel()
	for _, rule := range []vfs.Rule{
		{Op: vfs.OpSync, Path: "*-0001.seg"},
		{Op: vfs.OpWrite, Path: "*-0001.seg", After: 1},
		{Op: vfs.OpWrite, Path: manifestTemp},
		{Op: vfs.OpSync, Path: manifestTemp},
		{Op: vfs.OpRename, Path: manifestTemp},
		{Op: vfs.OpSyncDir},
	} {
		t.Run(string(rule.Op)+rule.Path, func(t *testing.T) {
			t.Parallel()
			mem := vfs.NewMem()
			fs := vfs.NewFaulty(mem)
			s := openStore(t, small(), fs)
			interleave(t, s, 1, 2, 1000)
			must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
			removed := fs.Calls(vfs.OpRemove)
			rule.Err = errDisk
			fs.Add(rule)
			if _, err := s.CompactOnce(t.Context()); err == nil {
				t.Fatal("compacted in spite of the failure")
			}
			names, err := fs.List("/data")
			must(t, err)
			for _, seg := range s.segments.list() {
				if seg.gen == 0 && !slices.Contains(names, segmentName(seg.seq, 0)) {
					t.Errorf("segment %d is gone (%d removals)", seg.seq, fs.Calls(vfs.OpRemove)-removed)
				}
			}
			closeStore(t, s)
			mem.Crash(newRand(1))
			s = openStore(t, small(), mem)
			for e := entry.EntryID(0); e < 1000; e += 10 {
				wantEntry(t, s, 1, e, body(1, e, 100))
			}
		})
	}
}

// Files that cannot be got rid of at the end cost space until a restart, and nothing else: what was replaced is no victim
// of a later compaction, which would take the copy, of the same sequence number, from the manifest.
func TestReplacedSegmentsThatCannotGoAreNotReplacedAgain(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	interleave(t, s, 1, 2, 1000)
	must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
	victims, dead := s.chooseVictims()
	if dead || len(victims) < 2 {
		t.Fatalf("%d victims, dead %v: the test proves nothing", len(victims), dead)
	}
	rules := []*vfs.Active{
		fs.Add(vfs.Rule{Op: vfs.OpRemove, Path: "*.seg", Err: errDisk}),
		fs.Add(vfs.Rule{Op: vfs.OpRename, Path: "*.seg", Err: errDisk}), // to a spare file
	}
	if _, err := s.CompactOnce(t.Context()); !errors.Is(err, errDisk) {
		t.Fatalf("compaction: %v", err)
	}
	for _, r := range rules {
		r.Remove()
	}
	for _, v := range victims {
		if slices.Contains(s.segments.list(), v) {
			t.Errorf("segment %d is still in the list, which its copy has replaced", v.seq)
		}
	}
	compactAll(t, s)
	check := func() {
		t.Helper()
		for e := entry.EntryID(0); e < 1000; e += 10 {
			wantEntry(t, s, 1, e, body(1, e, 100))
		}
	}
	check()
	s = reopen(t, s)
	check()
	compactAll(t, s)
	check()
}

// A record that does not verify is not copied, and its segment stays.
func TestCompactionKeepsWhatItCannotRead(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	cfg := small()
	cfg.CacheBytes = 1
	s := openStore(t, cfg, fs)
	interleave(t, s, 1, 2, 300)
	must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
	victims, _ := s.chooseVictims()
	rule := fs.Add(vfs.Rule{Op: vfs.OpRead, Path: segmentName(victims[0].seq, 0), Flips: []vfs.Flip{{Offset: 4096 + 48 + 56 + 3, Mask: 4}}})
	if _, err := s.CompactOnce(t.Context()); err == nil {
		t.Fatal("copied damage")
	}
	rule.Remove()
	if again, _ := s.chooseVictims(); slices.Contains(again, victims[0]) {
		t.Error("the damaged segment is chosen again")
	}
	s = reopen(t, s)
	for e := entry.EntryID(0); e < 300; e += 10 {
		wantEntry(t, s, 1, e, body(1, e, 100))
	}
}

// #4462, pulsar #20094: fenced, deleted, collected; a zombie's add, admitted before, must not bring the ledger back.
func TestB32ZombieAfterDelete(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openStore(t, small(), vfs.NewMem())
	must(t, add(s, 1, 0))
	_, err := fence(s, 1, 1)
	must(t, err)
	_, admitted := s.Admission(1)
	_, unknownAdmitted := s.Admission(2)
	must(t, s.DeleteLedger(ctx, 1, s.Mark(1)))
	must(t, s.DeleteLedger(ctx, 2, s.Mark(2))) // never seen here
	wantCode(t, add(s, 1, 1, withGeneration(admitted)), bookiewire.NotAdmitted)
	wantCode(t, add(s, 2, 0, withGeneration(unknownAdmitted)), bookiewire.NotAdmitted)
	if known, now := s.Admission(1); known || now == admitted {
		t.Errorf("admission after deletion: known %t, generation unchanged %t", known, now == admitted)
	}
	wantCode(t, add(s, 1, 1), bookiewire.NotAdmitted) // even with a fresh one: the tombstone is remembered
	s = reopen(t, s)
	wantCode(t, add(s, 1, 1), bookiewire.NotAdmitted)
	wantCode(t, add(s, 1, 1, withGeneration(admitted)), bookiewire.NotAdmitted)
	if !s.Tombstoned(1) {
		t.Error("tombstone is forgotten")
	}
	// Once no record of it is left, it is unknown; an outdated admission is still refused.
	fill(t, s, 3, 0, 600, 100)
	waitSealed(s)
	must(t, s.DeleteLedger(ctx, 3, s.Mark(3)))
	fill(t, s, 4, 0, 300, 100)
	waitSealed(s)
	compactAll(t, s)
	wantCode(t, add(s, 1, 1, withGeneration(admitted)), bookiewire.NotAdmitted)
	if s.Tombstoned(1) {
		t.Error("tombstone is kept although nothing is left")
	}
	_, err = readOne(s, 1, 0)
	wantCode(t, err, bookiewire.NoLedger)
}

// A fence that comes between an admission and its add makes the admission outdated (ledger-protocol, admission).
func TestFenceOutdatesAdmission(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	_, before := s.Admission(1)
	_, err := fence(s, 1, 1)
	must(t, err)
	if _, after := s.Admission(1); after == before {
		t.Error("generation is unchanged")
	}
	wantCode(t, add(s, 1, 0, withGeneration(before)), bookiewire.Fenced)
}

// A ledger that was deleted here may be brought back by repair. Its old entries stay dead, whatever is compacted.
func TestRepairAfterDelete(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openStore(t, small(), vfs.NewMem())
	fill(t, s, 1, 0, 400, 100)
	must(t, s.DeleteLedger(ctx, 1, s.Mark(1)))
	must(t, add(s, 1, 500, recoveryAdd(0)))
	must(t, add(s, 1, 501, recoveryAdd(0)))
	check := func() {
		t.Helper()
		wantEntry(t, s, 1, 500, body(1, 500, 100))
		wantEntry(t, s, 1, 501, body(1, 501, 100))
		for e := range entry.EntryID(400) {
			if _, err := readOne(s, 1, e); codeOf(err) != bookiewire.NoEntry {
				t.Fatalf("entry %d: %v", e, err)
			}
		}
	}
	check()
	s = reopen(t, s)
	check()
	for round := range entry.LedgerID(3) {
		fill(t, s, 10+round, 0, 400, 100)
		waitSealed(s)
		must(t, s.DeleteLedger(ctx, 10+round, s.Mark(10+round)))
		compactAll(t, s)
		check()
		s = reopen(t, s)
		check()
	}
	must(t, s.DeleteLedger(ctx, 1, s.Mark(1)))
	s = reopen(t, s)
	_, err := readOne(s, 1, 500)
	wantCode(t, err, bookiewire.NoLedger)
}

// Readers and compaction do not get in each other's way.
func TestReadsDuringCompaction(t *testing.T) {
	t.Parallel()
	cfg := small()
	cfg.CacheBytes = 1
	s := openStore(t, cfg, vfs.NewMem())
	interleave(t, s, 1, 2, 1000)
	must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
	stop := make(chan struct{})
	errs := make(chan error, 4)
	for i := range 4 {
		go func() {
			for e := entry.EntryID(i * 10); ; e = (e + 10) % 1000 {
				select {
				case <-stop:
					errs <- nil
					return
				default:
				}
				if _, err := readOne(s, 1, e); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	compactAll(t, s)
	close(stop)
	for range 4 {
		must(t, <-errs)
	}
}
