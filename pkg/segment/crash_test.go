package segment

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// story is a life of segments on a disk that may lose power at any moment, and what was promised until then.
type story struct {
	fs  *vfs.Mem
	seg map[entry.UUID]*promise
}

// promise is what is known of one segment.
type promise struct {
	appended []Record // in order
	durable  int      // so many of them were synced
	retired  bool     // its retirement was begun, so that it may be gone
}

func (s *story) create(name string, h Header, reuse bool) (*Writer, *promise, error) {
	w, err := Create(s.fs, name, h, 16<<10, reuse)
	if err != nil {
		return nil, nil, err
	}
	p := &promise{}
	s.seg[h.SegmentUUID] = p
	return w, p, nil
}

func (p *promise) append(w *Writer, durable int64, recs ...Record) error {
	p.appended = append(p.appended, recs...)
	_, err := w.AppendBatch(recs, durable)
	return err
}

func (p *promise) sync(w *Writer) error {
	n := len(p.appended)
	err := w.Sync()
	if err == nil {
		p.durable = n
	}
	return err
}

// run creates, appends, seals, rolls, retires and reuses, until the power goes.
func (s *story) run() error {
	w, p, err := s.create("1", header(1), false)
	if err != nil {
		return err
	}
	end := int64(0)
	for i := entry.EntryID(0); i < 6; i++ {
		if err := p.append(w, end, add(1, i, 700), add(2, i, 30), fence(3, entry.Term(i))); err != nil {
			return err
		}
		if i%2 == 1 {
			at := w.Size()
			if err := p.sync(w); err != nil {
				return err
			}
			end = at
		}
	}
	if err := p.append(w, end, add(1, 100, 2000)); err != nil {
		return err
	}
	n := len(p.appended)
	if err := w.Seal(); err != nil {
		return err
	}
	p.durable = n
	w2, p2, err := s.create("2", header(2), false)
	if err != nil {
		return err
	}
	w2.SetPrevDurable(w.Size())
	if err := errors.Join(w.Close(), p2.append(w2, 0, add(1, 101, 600)), p2.sync(w2)); err != nil {
		return err
	}
	p.retired = true
	if err := Retire(s.fs, "1", "free"); err != nil {
		return err
	}
	if err := s.fs.Rename("free", "3"); err != nil {
		return err
	}
	w3, p3, err := s.create("3", header(3), true)
	if err != nil {
		return err
	}
	// The batches of the first segment began at the same places.
	for i := entry.EntryID(0); i < 3; i++ {
		if err := p3.append(w3, 0, add(5, i, 700), add(6, i, 30), fence(7, entry.Term(i))); err != nil {
			return err
		}
	}
	return errors.Join(p3.sync(w3), p3.append(w3, w3.Size(), add(5, 3, 300)), w3.Close(), w2.Close())
}

// check opens or recovers all segments and compares them with what was promised. With redo, it cuts the power again
// at each point of sealing what it recovers.
func (s *story) check(t *testing.T, what string, redo bool) {
	t.Helper()
	names, err := s.fs.List(".")
	must(t, err)
	found := make(map[entry.UUID]bool)
	for _, name := range names {
		h, err := ReadHeader(s.fs, name)
		if errors.Is(err, ErrBlank) || errors.Is(err, ErrRetired) {
			continue
		}
		if err != nil {
			t.Fatalf("%s: %s: %v", what, name, err)
		}
		found[h.SegmentUUID] = true
		s.checkSegment(t, fmt.Sprintf("%s: segment %s", what, name), name, h, redo)
	}
	for uuid, p := range s.seg {
		if p.durable > 0 && !p.retired && !found[uuid] {
			t.Fatalf("%s: a segment with durable records is gone:\n%v", what, s.fs)
		}
	}
}

func (s *story) checkSegment(t *testing.T, what, name string, h Header, redo bool) {
	t.Helper()
	p := s.seg[h.SegmentUUID]
	if p == nil {
		p = &promise{} // Create has not returned
	}
	r, err := Open(s.fs, name)
	if errors.Is(err, ErrUnsealed) {
		rec, err := Recover(s.fs, name, 0)
		must(t, err)
		if s.seg[h.SegmentUUID] == nil {
			return // nobody recovers it
		}
		if rec.Corrupt != nil {
			t.Fatalf("%s: taken for corrupt: %+v", what, rec.Corrupt)
		}
		if redo {
			s.redo(t, what, name, h, rec)
		}
		must(t, SealRecovered(s.fs, name, rec))
		r, err = Open(s.fs, name)
		must(t, err)
	} else {
		must(t, err)
	}
	n := 0
	must(t, r.Each(func(rec Record, loc Location) error {
		if n == len(p.appended) {
			return fmt.Errorf("%s: %v %d:%d was never appended", what, rec.Kind, rec.Ledger, rec.Entry)
		}
		want := p.appended[n]
		if rec.Kind != want.Kind || rec.Ledger != want.Ledger || rec.Entry != want.Entry || !bytes.Equal(rec.Body, want.Body) {
			return fmt.Errorf("%s: record %d is %+v, want %+v", what, n, rec, want)
		}
		if got, ok, err := r.Find(rec.Ledger, rec.Entry); rec.Kind == KindEntry && (err != nil || !ok || got != loc) {
			return fmt.Errorf("%s: record %d found at %v, %v, %w", what, n, got, ok, err)
		}
		n++
		return nil
	}))
	if n < p.durable {
		t.Fatalf("%s: %d records, %d were durable", what, n, p.durable)
	}
	closeAll(t, r)
}

// redo cuts the power at each point of SealRecovered.
func (s *story) redo(t *testing.T, what, name string, h Header, rec *Recovered) {
	t.Helper()
	for cut := range 8 {
		again := &story{fs: s.fs.Clone(), seg: s.seg}
		again.fs.CutPowerAfter(cut)
		err := SealRecovered(again.fs, name, rec)
		again.fs.Crash(rand.New(rand.NewPCG(uint64(cut), 2)))
		again.checkSegment(t, fmt.Sprintf("%s, cut %d of the seal", what, cut), name, h, false)
		if err == nil {
			return
		}
	}
	t.Fatalf("%s: the seal does not end", what)
}

// TestCrashAtEveryPoint cuts the power after each change of a story, in several ways each: what was durable is there,
// nothing else than what was appended is, and a crash is never taken for corruption.
func TestCrashAtEveryPoint(t *testing.T) {
	t.Parallel()
	whole := &story{fs: vfs.NewMem(), seg: make(map[entry.UUID]*promise)}
	must(t, whole.run())
	points := whole.fs.Changes()
	for cut := range points + 1 {
		s := &story{fs: vfs.NewMem(), seg: make(map[entry.UUID]*promise)}
		s.fs.CutPowerAfter(cut)
		if err := s.run(); cut < points && !errors.Is(err, vfs.ErrPowerCut) {
			t.Fatalf("cut %d: %v", cut, err)
		}
		for seed := range uint64(12) {
			after := &story{fs: s.fs.Clone(), seg: s.seg}
			var rng *rand.Rand
			if seed > 0 {
				rng = rand.New(rand.NewPCG(seed, uint64(cut)))
			}
			after.fs.Crash(rng)
			after.check(t, fmt.Sprintf("cut %d, seed %d", cut, seed), seed%4 == 1)
		}
	}
	t.Logf("%d points", points)
}

// TestKillLosesNothing stops a writer without a power cut: what it wrote is in the kernel's cache, and recovery makes it
// durable before it reports it.
func TestKillLosesNothing(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(1))
	appendBatch(t, w, 0, add(1, 0, 100))
	rec, err := Recover(m, "s", 0)
	must(t, err)
	if rec.Entries() != 1 || rec.Torn {
		t.Fatalf("%d entries, torn %t", rec.Entries(), rec.Torn)
	}
	m.Crash(nil)
	rec, err = Recover(m, "s", 0)
	must(t, err)
	if rec.Entries() != 1 {
		t.Error("what a recovery had reported was lost afterwards")
	}
}

// TestFailedSyncIsNotTrusted restarts after a failed sync, whose bytes the cache still shows: they are not on the disk,
// and must not be found.
func TestFailedSyncIsNotTrusted(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	f := vfs.NewFaulty(m)
	w := create(t, f, "s", header(1))
	appendBatch(t, w, 0, add(1, 0, 100))
	must(t, w.Sync())
	appendBatch(t, w, w.Size(), add(1, 1, 100))
	f.Add(vfs.Rule{Op: vfs.OpSync, Times: 1, Err: errors.New("boom"), LoseUnsynced: true})
	if w.Sync() == nil {
		t.Fatal("no failure")
	}
	rec, err := Recover(f, "s", 0)
	must(t, err)
	if rec.Entries() != 1 || rec.Corrupt != nil {
		t.Errorf("%d entries, corruption %+v", rec.Entries(), rec.Corrupt)
	}
}

// TestRetiredSegmentsDoNotResurrect fills a file with batches, seals it, and reuses it again and again, each time for
// batches at the same places as before: none of the old ones is ever found, nor the old footer.
func TestRetiredSegmentsDoNotResurrect(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	const size = 32 << 10
	for use := range uint64(4) {
		w, err := Create(m, "s", header(use), size, use > 0)
		must(t, err)
		if got := w.Header().Generation; got != uint32(1+use) {
			t.Fatalf("use %d: generation %d", use, got)
		}
		rec, err := Recover(m, "s", 0)
		must(t, err)
		if rec.Entries() != 0 || rec.Torn || rec.Corrupt != nil || len(rec.Controls()) != 0 {
			t.Fatalf("use %d begins with %d entries, torn %t, %+v", use, rec.Entries(), rec.Torn, rec.Corrupt)
		}
		for i := entry.EntryID(0); w.Room(2, 500); i++ {
			appendBatch(t, w, w.Size(), add(entry.LedgerID(use), i, 500), fence(9, 9))
			if i != 4 {
				continue
			}
			rec, err := Recover(m, "s", 0)
			must(t, err)
			if rec.Entries() != 5 || rec.Torn || rec.Corrupt != nil || rec.End != w.Size() {
				t.Fatalf("use %d: %d entries after 5, torn %t, %+v", use, rec.Entries(), rec.Torn, rec.Corrupt)
			}
			_, err = Open(m, "s")
			if !errors.Is(err, ErrUnsealed) {
				t.Fatalf("use %d: open: %v", use, err)
			}
		}
		must(t, w.Seal())
		closeAll(t, w)
		must(t, Retire(m, "s", "free"))
		_, err = Open(m, "free")
		if !errors.Is(err, ErrRetired) {
			t.Fatalf("use %d: open retired: %v", use, err)
		}
		must(t, m.Rename("free", "s"))
	}
	// The UUID alone keeps old bytes out, and so does the generation alone.
	for name, h := range map[string]Header{
		"same generation": {SegmentUUID: entry.UUID{0xff}, Generation: 4},
		"same UUID":       {SegmentUUID: header(3).SegmentUUID, Generation: 5},
	} {
		c := m.Clone()
		patch(t, c, "s", 0, encodeHeaderBlock(fileHeader{Header: h, size: headerBlockSize})) // the seal has cut the file
		rec, err := Recover(c, "s", 0)
		must(t, err)
		if rec.Entries() != 0 || rec.Corrupt != nil {
			t.Errorf("%s: %d entries, %+v", name, rec.Entries(), rec.Corrupt)
		}
	}
}

func TestReuseNeedsARetiredFile(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	closeAll(t, create(t, m, "s", header(1)))
	if _, err := Create(m, "s", header(2), 1<<20, true); err == nil {
		t.Error("reused a segment that is in use")
	}
	_, err := Create(m, "none", header(2), 1<<20, true)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("reused nothing: %v", err)
	}
	must(t, Retire(m, "s", "s"))
	h, err := ReadHeader(m, "s")
	if !errors.Is(err, ErrRetired) || h.Generation != 1 {
		t.Errorf("retired: %+v, %v", h, err)
	}
	patch(t, m, "s", 0, make([]byte, headerBlockSize))
	must(t, Retire(m, "s", "t"))
	w, err := Create(m, "t", header(2), 1<<20, true)
	must(t, err)
	closeAll(t, w)
}

// TestTrailerProvesTables cuts the power at each point of many seals: a segment that opens has all its tables.
func TestTrailerProvesTables(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(1))
	for i := entry.EntryID(0); i < 100; i++ {
		appendBatch(t, w, 0, add(1, i, 10), fence(2, 1))
	}
	closeAll(t, w)
	rec, err := Recover(m, "s", 0)
	must(t, err)
	sealed := 0
	for cut := range 8 {
		for seed := range uint64(100) {
			m := m.Clone()
			m.CutPowerAfter(cut)
			sealErr := SealRecovered(m, "s", rec)
			m.Crash(rand.New(rand.NewPCG(seed, uint64(cut))))
			r, err := Open(m, "s")
			if errors.Is(err, ErrUnsealed) && sealErr != nil {
				continue
			}
			must(t, err)
			sealed++
			controls, err := r.Controls()
			must(t, err)
			n := 0
			must(t, r.Index(func(IndexEntry) error { n++; return nil }))
			if n != 100 || len(controls) != 100 {
				t.Fatalf("cut %d, seed %d: %d entries, %d controls", cut, seed, n, len(controls))
			}
			closeAll(t, r)
		}
	}
	if sealed == 0 || sealed == 800 {
		t.Errorf("%d of 800 were sealed", sealed)
	}
}
