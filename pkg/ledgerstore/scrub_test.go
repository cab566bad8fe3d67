package ledgerstore

import (
	"context"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func unpaced(ctx context.Context, _ int) error { return ctx.Err() }

func scrub(tb testing.TB, s *Store) Scrubbed {
	tb.Helper()
	sum, err := s.Scrub(tb.Context(), unpaced)
	must(tb, err)
	return sum
}

// listed returns the entries 0 … last that are listed.
func listed(tb testing.TB, s *Store, l entry.LedgerID, last entry.EntryID) (all []entry.EntryID) {
	tb.Helper()
	listing, err := s.Entries(l, 0, last)
	must(tb, err)
	for e := range last + 1 {
		if listing.Bits[e/8]&(1<<(e%8)) != 0 {
			all = append(all, e)
		}
	}
	return all
}

// rot damages an entry on the disk, in the segment that holds it now.
func rot(tb testing.TB, s *Store, fs vfs.FS, l entry.LedgerID, e entry.EntryID) {
	tb.Helper()
	places, _ := s.locate(l, e)
	if len(places) != 1 {
		tb.Fatalf("entry %d:%d may be in %d places", l, e, len(places))
	}
	p := places[0]
	at := int64(p.slot.offset)
	if p.footer {
		r, err := p.seg.handle.acquireReader(s.fs, p.seg.path)
		must(tb, err)
		loc, found, err := r.Find(l, e)
		must(tb, err)
		p.seg.handle.release()
		if !found {
			tb.Fatalf("entry %d:%d is not there", l, e)
		}
		at = loc.Offset
	}
	damage(tb, fs, p.seg.path, at+segment.RecordOverhead+3)
}

func TestEntriesListsWhatIsDurable(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	want := []entry.EntryID{0, 1, 2, 40, 41, 300}
	for _, e := range want[:3] {
		must(t, add(s, 1, e))
	}
	fill(t, s, 2, 0, 400, 100) // seals it
	waitSealed(s)
	for _, e := range want[3:] {
		must(t, add(s, 1, e))
	}
	if got := listed(t, s, 1, 400); !reflect.DeepEqual(got, want) {
		t.Fatalf("listed %v, want %v", got, want)
	}
	got, err := s.Entries(1, 41, 300)
	must(t, err)
	if !got.Known || got.Limbo || len(got.Bits) != 33 || got.Bits[0] != 1 || got.Bits[32] != 1<<3 {
		t.Fatalf("got %+v", got)
	}
	if got, err = s.Entries(9, 0, 7); err != nil || got.Known || got.Bits[0] != 0 {
		t.Fatalf("of a ledger that is not here: %+v, %v", got, err)
	}
	must(t, s.SetLimbo(t.Context(), 1))
	if got, err = s.Entries(1, 0, 7); err != nil || !got.Limbo || got.Bits[0] != 7 {
		t.Fatalf("of a ledger in limbo: %+v, %v", got, err)
	}
	for _, r := range [][2]entry.EntryID{{-1, 3}, {4, 3}, {0, MaxListed}} {
		_, err := s.Entries(1, r[0], r[1])
		wantCode(t, err, bookiewire.BadRequest)
	}
}

// A scrub finds what has rotted, though the entry is still in memory; it is listed no more, a copy that a repair sends is stored
// beside it and served, and nothing of that is forgotten by a restart.
func TestScrubFindsWhatARepairStoresAnew(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.CacheBytes = 1 << 20
	s := openStore(t, cfg, fs)
	fill(t, s, 1, 0, 10, 100)
	fill(t, s, 2, 0, 400, 100)
	waitSealed(s)
	if sum := scrub(t, s); sum.Damaged != 0 || sum.Bytes == 0 || sum.Segments == 0 || len(s.Damage()) != 0 {
		t.Fatalf("a sound store: %+v, %v", sum, s.Damage())
	}
	rot(t, s, fs, 1, 4)
	rot(t, s, fs, 1, 5)
	if sum := scrub(t, s); sum.Damaged != 2 {
		t.Fatalf("found %+v, want 2 entries", sum)
	}
	if got, want := s.Damage(), []LedgerDamage{{Ledger: 1, Entries: []EntryRange{{4, 5}}}}; !reflect.DeepEqual(got, want) {
		t.Fatalf("damage is %v, want %v", got, want)
	}
	if got := listed(t, s, 1, 9); !reflect.DeepEqual(got, []entry.EntryID{0, 1, 2, 3, 6, 7, 8, 9}) {
		t.Fatalf("listed %v", got)
	}
	must(t, add(s, 1, 4, recoveryAdd(1)))
	must(t, add(s, 1, 5, recoveryAdd(1)))
	if got := s.Damage(); len(got) != 0 {
		t.Fatalf("damage is %v after the repair", got)
	}
	if got := listed(t, s, 1, 9); len(got) != 10 {
		t.Fatalf("listed %v after the repair", got)
	}
	if sum := scrub(t, s); sum.Damaged != 0 {
		t.Fatalf("found %+v after the repair", sum)
	}
	s = reopen(t, s)
	if sum := scrub(t, s); sum.Damaged != 0 {
		t.Fatalf("found %+v after a restart", sum)
	}
	for e := range entry.EntryID(10) {
		wantEntry(t, s, 1, e, body(1, e, 100))
	}
}

// What a read finds is known like what a scrub finds. In a segment that is not sealed yet the new copy waits for that.
func TestReadFindsDamageInAnUnsealedSegment(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.CacheBytes = 1
	s := openStore(t, cfg, fs)
	fill(t, s, 1, 0, 10, 100)
	rot(t, s, fs, 1, 4)
	_, err := readOne(s, 1, 4)
	wantCode(t, err, bookiewire.Unknown)
	if got, want := s.Damage(), []LedgerDamage{{Ledger: 1, Entries: []EntryRange{{4, 4}}}}; !reflect.DeepEqual(got, want) {
		t.Fatalf("damage is %v, want %v", got, want)
	}
	wantCode(t, add(s, 1, 4), bookiewire.Unknown)                 // a writer's copy proves nothing about the one that was there
	wantCode(t, add(s, 1, 4, recoveryAdd(1)), bookiewire.Unknown) // and the segment comes to its end
	for attempt := 0; add(s, 1, 4, recoveryAdd(1)) != nil; attempt++ {
		if attempt == 100 {
			t.Fatal("it is not stored anew")
		}
		waitSealed(s)
	}
	wantEntry(t, s, 1, 4, body(1, 4, 100))
	if len(s.Damage()) != 0 {
		t.Fatalf("damage is %v after the repair", s.Damage())
	}
}

// A footer that has rotted hides all that its segment has of some ledger: all of it is stored anew.
func TestScrubFindsADamagedFooter(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.CacheBytes = 1
	s := openStore(t, cfg, fs)
	fill(t, s, 1, 0, 10, 100)
	fill(t, s, 2, 0, 400, 100)
	waitSealed(s)
	places, _ := s.locate(1, 0)
	seg := places[0].seg
	r, err := seg.handle.acquireReader(s.fs, seg.path)
	must(t, err)
	end := r.DataEnd()
	seg.handle.release()
	damage(t, fs, seg.path, end+8) // in the index's first page
	scrub(t, s)
	if got := listed(t, s, 1, 9); len(got) != 0 {
		t.Fatalf("listed %v", got)
	}
	for e := range entry.EntryID(10) {
		must(t, add(s, 1, e, recoveryAdd(1)))
	}
	for e := range entry.EntryID(10) {
		wantEntry(t, s, 1, e, body(1, e, 100))
	}
	if got := listed(t, s, 1, 9); len(got) != 10 {
		t.Fatalf("listed %v after the repair", got)
	}
	for _, d := range s.Damage() {
		if d.Ledger == 1 {
			t.Fatalf("damage is %v after the repair", d)
		}
	}
}

// The ranges of what is unreadable are those of a set, as long as there are not too many of them.
func TestUnreadableIsASet(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var d unreadable
		want := map[entry.EntryID]bool{}
		for range 60 {
			e := entry.EntryID(rng.IntN(40))
			switch rng.IntN(3) {
			case 0:
				d = d.without(e)
				delete(want, e)
			case 1:
				d = d.with(e, e)
				want[e] = true
			default:
				last := e + entry.EntryID(rng.IntN(5))
				d = d.with(e, last)
				for i := e; i <= last; i++ {
					want[i] = true
				}
			}
			for e := range entry.EntryID(50) {
				if _, found := d.at(e); found != want[e] {
					t.Fatalf("entry %d of %v is %t, want %t", e, d, found, want[e])
				}
			}
			for i := 1; i < len(d); i++ {
				if d[i].First <= d[i-1].Last+1 {
					t.Fatalf("ranges touch: %v", d)
				}
			}
		}
	}
	var many unreadable
	for e := range entry.EntryID(3 * maxDamageRanges) {
		many = many.with(4*e, 4*e)
	}
	if len(many) != maxDamageRanges {
		t.Fatalf("%d ranges are kept, want %d", len(many), maxDamageRanges)
	}
	for e := range entry.EntryID(3 * maxDamageRanges) {
		if _, found := many.at(4 * e); !found {
			t.Fatalf("entry %d was forgotten", 4*e)
		}
	}
}
