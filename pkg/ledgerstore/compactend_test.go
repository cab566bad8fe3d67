package ledgerstore

import (
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// What a store does by itself while nobody uses it comes to an end: whatever was written and deleted, a few compactions
// later nothing is worth rewriting, and no file changes any more. Each rewrite gives back at least half.
func TestCompactionEnds(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		rng := newRand(seed)
		fs := vfs.NewMem()
		cfg := small()
		s := openStore(t, cfg, fs)
		for range 2 + rng.IntN(4) {
			randomWork(t, s, rng)
			if rng.IntN(2) == 0 { // which seals a segment, however small
				s = reopen(t, s)
			}
		}
		s = reopen(t, s)
		for n := 0; ; n++ {
			victims, dead := s.chooseVictims()
			if len(victims) == 0 {
				break
			}
			if n == 100 {
				t.Fatalf("seed %d: compaction does not end", seed)
			}
			var before int64
			for _, v := range victims {
				before += wholeBlocks(v.size.Load())
			}
			last := victims[0]
			for _, v := range victims {
				if v.seq > last.seq {
					last = v
				}
			}
			_, err := s.CompactOnce(t.Context())
			must(t, err)
			for _, seg := range s.segments.list() {
				if after := wholeBlocks(seg.size.Load()); !dead && seg.seq == last.seq && 2*after > before {
					t.Fatalf("seed %d: %d segments of %d bytes became %d", seed, len(victims), before, after)
				}
			}
		}
		s.jobs.Wait() // what was carried forward may have the next segment prepared, which changes the manifest too
		edition := s.segments.manifest.edition
		freed, err := s.CompactOnce(t.Context())
		must(t, err)
		if freed != 0 || s.segments.manifest.edition != edition {
			t.Fatalf("seed %d: %d bytes freed in the end, manifest %d after %d", seed, freed, s.segments.manifest.edition, edition)
		}
		closeStore(t, s)
	}
}

// randomWork writes entries of any size to ledgers, some of which are fenced or go.
func randomWork(t *testing.T, s *Store, rng *rand.Rand) {
	t.Helper()
	for range 1 + rng.IntN(5) {
		l := entry.LedgerID(1 + rng.IntN(20))
		from, _ := s.Ledger(l)
		size := 1 + rng.IntN(600)
		for e := range entry.EntryID(rng.IntN(30)) {
			_ = add(s, l, from.Last+1+e, withBody(body(l, from.Last+1+e, size))) // refused where it is fenced
		}
		switch rng.IntN(6) {
		case 0:
			_, _ = fence(s, l, 1)
		case 1, 2:
			must(t, s.DeleteLedger(t.Context(), l, s.Mark(l)))
		}
	}
	waitSealed(s)
}

// A segment of a few hundred bytes takes a header and a footer, whatever lives in it. It is left alone.
func TestSmallSegmentIsNotRewritten(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	must(t, add(s, 1, 0))
	s = reopen(t, s)
	seg := s.segments.list()[0]
	freed, err := s.CompactOnce(t.Context())
	must(t, err)
	if now := s.segments.list()[0]; freed != 0 || now != seg {
		t.Fatalf("rewritten to %s, %d bytes freed", now.path, freed)
	}
	// A few of them make one, once.
	for e := range entry.EntryID(12) {
		must(t, add(s, 1, e+1))
		s = reopen(t, s)
	}
	before := len(s.segments.list())
	if freed = compactAll(t, s); freed <= 0 {
		t.Fatal("small segments are not merged")
	}
	if after := len(s.segments.list()); after > before/2 {
		t.Fatalf("%d segments of %d are left", after, before)
	}
	for e := range entry.EntryID(13) {
		wantEntry(t, s, 1, e, body(1, e, 100))
	}
}

// More fences than a segment has room for do not wander through the log for ever.
func TestFencesDoNotWander(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	for l := range entry.LedgerID(800) {
		_, err := fence(s, l+1, 3)
		must(t, err)
	}
	s = reopen(t, s)
	compactAll(t, s)
	s = reopen(t, s)
	for l := range entry.LedgerID(800) {
		if in, _ := s.Ledger(l + 1); in.Term != 3 {
			t.Fatalf("ledger %d: %+v", l+1, in)
		}
	}
}
