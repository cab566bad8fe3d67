package segment

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// placed is a record and where it went.
type placed struct {
	Record
	loc Location
}

// randomSegment appends random records of a few ledgers in random batches, copies of entries among them.
func randomSegment(tb testing.TB, w *Writer, rng *rand.Rand, batches int) []placed {
	tb.Helper()
	var all []placed
	for range batches {
		var recs []Record
		for range 1 + rng.IntN(30) {
			l := entry.LedgerID(1 + rng.IntN(8))
			r := add(l, entry.EntryID(rng.IntN(500)), rng.IntN(40))
			switch rng.IntN(20) {
			case 0:
				r = fence(l, entry.Term(rng.IntN(9)))
			case 1:
				r = Record{Kind: KindLAC, Ledger: l, Entry: entry.NoEntry, LAC: entry.EntryID(rng.IntN(900)), Nonce: 77}
			case 2:
				r = Record{Kind: KindTombstone, Ledger: l + 100, Entry: entry.NoEntry, LAC: entry.NoEntry, Body: []byte("why")}
			}
			recs = append(recs, r)
		}
		for i, loc := range appendBatch(tb, w, w.Size(), recs...) {
			all = append(all, placed{recs[i], loc})
		}
	}
	return all
}

func TestSealedSegmentTellsWhatWasAppended(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		fs := vfs.NewMem()
		w, err := Create(fs, "s", header(1), 1<<20, false)
		must(t, err)
		w.SetPrevDurable(4711)
		all := randomSegment(t, w, rng, rng.IntN(60))
		for _, p := range all {
			checkRecord(t, w.ReadAt, p)
		}
		must(t, w.Seal())
		closeAll(t, w)
		r, err := Open(fs, "s")
		must(t, err)
		if r.Header() != header(1) || r.PrevDurable() != 4711 || r.Recovered() || r.Size() != int64(len(fileBytes(t, fs, "s"))) {
			t.Errorf("header %+v, prevDurable %d, size %d", r.Header(), r.PrevDurable(), r.Size())
		}
		checkReader(t, r, all)
		closeAll(t, r)
	}
}

func checkRecord(tb testing.TB, readAt func(Location) (Record, error), want placed) {
	tb.Helper()
	got, err := readAt(want.loc)
	must(tb, err)
	if got.Kind != KindEntry {
		got.Checksum = want.Checksum
	}
	if !bytes.Equal(got.Body, want.Body) {
		tb.Fatalf("at %+v: body %x, want %x", want.loc, got.Body, want.Body)
	}
	got.Body, want.Body = nil, nil
	if fmt.Sprint(got) != fmt.Sprint(want.Record) {
		tb.Fatalf("at %+v: %+v, want %+v", want.loc, got, want.Record)
	}
}

// checkReader compares all that a reader tells with the records, in the order they were appended.
func checkReader(tb testing.TB, r *Reader, all []placed) {
	tb.Helper()
	i := 0
	must(tb, r.Each(func(rec Record, loc Location) error {
		if i == len(all) || loc != all[i].loc || !bytes.Equal(rec.Body, all[i].Body) {
			return fmt.Errorf("record %d is %+v at %+v", i, rec, loc)
		}
		i++
		return nil
	}))
	if i != len(all) {
		tb.Fatalf("each: %d records, want %d", i, len(all))
	}

	var index []placed
	var controls []Control
	infos := make(map[entry.LedgerID]LedgerInfo)
	for _, p := range all {
		info, ok := infos[p.Ledger]
		if !ok {
			info = LedgerInfo{Ledger: p.Ledger, LAC: -1, First: -1, Last: -1}
		}
		info.Bytes += int64(p.loc.Length)
		info.Term = max(info.Term, p.Term)
		info.Nonce = cmp.Or(info.Nonce, p.Nonce)
		if p.Kind == KindEntry || p.Kind == KindLAC {
			info.LAC = max(info.LAC, p.LAC)
		}
		if p.Kind == KindEntry {
			index = append(index, p)
			info.Entries++
			info.Last = max(info.Last, p.Entry)
			if info.First < 0 || p.Entry < info.First {
				info.First = p.Entry
			}
		} else {
			controls = append(controls, Control{p.Kind, p.Ledger, p.Entry, p.LAC, p.Term, p.Nonce, p.loc})
		}
		infos[p.Ledger] = info
	}
	slices.SortStableFunc(index, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.Ledger, b.Ledger), cmp.Compare(a.Entry, b.Entry))
	})

	gotControls, err := r.Controls()
	must(tb, err)
	if !slices.Equal(gotControls, controls) {
		tb.Fatalf("controls %+v, want %+v", gotControls, controls)
	}
	gotInfos, err := r.Ledgers()
	must(tb, err)
	if len(gotInfos) != len(infos) {
		tb.Fatalf("%d ledgers, want %d", len(gotInfos), len(infos))
	}
	for _, got := range gotInfos {
		one, ok, err := r.Ledger(got.Ledger)
		must(tb, err)
		if got != infos[got.Ledger] || one != got || !ok {
			tb.Fatalf("ledger %+v, by itself %+v, want %+v", got, one, infos[got.Ledger])
		}
	}
	if _, ok, err := r.Ledger(1 << 50); ok || err != nil {
		tb.Fatalf("a ledger that is not there: %v, %v", ok, err)
	}
	checkIndex(tb, r, index)
}

func checkIndex(tb testing.TB, r *Reader, index []placed) {
	tb.Helper()
	if r.Entries() != int64(len(index)) {
		tb.Fatalf("%d entries, want %d", r.Entries(), len(index))
	}
	i := 0
	must(tb, r.Index(func(e IndexEntry) error {
		if want := index[i]; e != (IndexEntry{want.Ledger, want.Entry, want.loc}) {
			return fmt.Errorf("index row %d is %+v, want %+v", i, e, want)
		}
		i++
		return nil
	}))
	if i != len(index) {
		tb.Fatalf("index has %d rows, want %d", i, len(index))
	}
	first := make(map[[2]int64]Location)
	for _, p := range index {
		key := [2]int64{int64(p.Ledger), int64(p.Entry)}
		if _, ok := first[key]; !ok {
			first[key] = p.loc
			checkRecord(tb, r.ReadAt, p)
		}
	}
	for l := range int64(10) {
		for e := int64(-1); e < 510; e++ {
			loc, ok, err := r.Find(entry.LedgerID(l), entry.EntryID(e))
			must(tb, err)
			want, there := first[[2]int64{l, e}]
			if ok != there || loc != want {
				tb.Fatalf("find %d:%d: %+v, %v, want %+v, %v", l, e, loc, ok, want, there)
			}
		}
	}
	for l := entry.LedgerID(0); l < 10; l++ {
		for _, from := range []entry.EntryID{-1, 0, 3, 250, 499, 500} {
			var want, got []IndexEntry
			for _, p := range index {
				if p.Ledger == l && p.Entry >= from {
					want = append(want, IndexEntry{l, p.Entry, p.loc})
				}
			}
			must(tb, r.IndexLedger(l, from, func(e entry.EntryID, loc Location) bool {
				got = append(got, IndexEntry{l, e, loc})
				return true
			}))
			if !slices.Equal(got, want) {
				tb.Fatalf("ledger %d from %d: %v, want %v", l, from, got, want)
			}
		}
	}
}

// TestEntriesFarApart has entries of one ledger further apart than an index row can say.
func TestEntriesFarApart(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	w := create(t, fs, "s", header(1))
	far := []entry.EntryID{0, 1, math.MaxUint32, math.MaxUint32 + 1, math.MaxInt64 - 1, math.MaxInt64}
	for _, e := range far {
		appendBatch(t, w, 0, add(3, e, 5), add(4, 1, 5))
	}
	must(t, w.Seal())
	closeAll(t, w)
	r, err := Open(fs, "s")
	must(t, err)
	for _, e := range far {
		loc, ok, err := r.Find(3, e)
		must(t, err)
		if !ok {
			t.Fatalf("entry %d is not found", e)
		}
		if rec, err := r.ReadAt(loc); err != nil || rec.Entry != e {
			t.Errorf("got entry %d, %v, want %d", rec.Entry, err, e)
		}
	}
	if _, ok, err := r.Find(3, 2); ok || err != nil {
		t.Errorf("found entry 2: %v", err)
	}
	n := 0
	must(t, r.IndexLedger(3, 1, func(entry.EntryID, Location) bool { n++; return true }))
	if n != len(far)-1 {
		t.Errorf("%d entries from 1 on, want %d", n, len(far)-1)
	}
	infos, err := r.Ledgers()
	must(t, err)
	one, ok, err := r.Ledger(3)
	must(t, err)
	if len(infos) != 2 || infos[0] != one || !ok || one.Entries != int64(len(far)) || one.Last != math.MaxInt64 || one.First != 0 {
		t.Errorf("ledgers %+v, ledger 3 %+v", infos, one)
	}
	closeAll(t, r)
}

func TestAppendRefuses(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	w := create(t, fs, "s", header(1))
	writes := fs.Calls(vfs.OpWrite)
	big := make([]byte, 20<<20)
	for name, test := range map[string]struct {
		recs []Record
		want error
	}{
		"kind":     {[]Record{add(1, 1, 1), {Kind: 9, Ledger: 1}}, ErrInvalid},
		"ledger":   {[]Record{add(1<<63, 1, 1)}, ErrInvalid},
		"entry":    {[]Record{add(1, -1, 1)}, ErrInvalid},
		"no entry": {[]Record{{Kind: KindFence, Ledger: 1, Entry: -2}}, ErrInvalid},
		"lac":      {[]Record{{Kind: KindLAC, Ledger: 1, LAC: -2}}, ErrInvalid},
		"body":     {[]Record{{Kind: KindEntry, Body: make([]byte, MaxBodyBytes+1)}}, ErrInvalid},
		"batch":    {[]Record{{Kind: KindEntry, Body: big}, {Kind: KindEntry, Body: big}}, ErrTooLarge},
	} {
		if _, err := w.AppendBatch(test.recs, 0); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	if _, err := w.AppendBatch(nil, 0); err != nil {
		t.Errorf("nothing: %v", err)
	}
	if got := fs.Calls(vfs.OpWrite); got != writes {
		t.Errorf("%d writes for what was refused", got-writes)
	}
	appendBatch(t, w, 0, add(1, 1, 1))
	closeAll(t, w)
	if _, err := Create(fs, "t", header(1), 5<<30, false); !errors.Is(err, ErrTooLarge) {
		t.Errorf("5 GiB: %v", err)
	}
	_, err := Create(fs, "s", header(1), 0, false)
	if err == nil {
		t.Error("created a segment over another")
	}
}

func TestMisuseIsABug(t *testing.T) {
	t.Parallel()
	w := create(t, vfs.NewMem(), "s", header(1))
	mustPanic(t, "durable past the end", func() { _, _ = w.AppendBatch([]Record{add(1, 1, 1)}, w.Size()+1) })
	mustPanic(t, "previous durable", func() { w.SetPrevDurable(-1) })
	must(t, w.Seal())
	mustPanic(t, "append after seal", func() { _, _ = w.AppendBatch([]Record{add(1, 1, 1)}, 0) })
	mustPanic(t, "seal after seal", func() { _ = w.Seal() })
	closeAll(t, w)
}

func mustPanic(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s: no panic", what)
		}
	}()
	f()
}

// TestRoomLeavesPlaceForTheFooter fills segments as far as Room allows; they seal on a disk that is otherwise full.
func TestRoomLeavesPlaceForTheFooter(t *testing.T) {
	t.Parallel()
	const size = 64 << 10
	for _, body := range []int{0, 1, 100, 5000} {
		for _, ledgers := range []entry.LedgerID{1, 7, 1 << 30} {
			fs := vfs.NewMem()
			fs.SetCapacity(size)
			w := create(t, fs, "s", header(1))
			for i := entry.EntryID(0); ; i++ {
				recs := []Record{add(entry.LedgerID(i)%ledgers, i, body), fence(entry.LedgerID(i)%ledgers, 1)}
				if !w.Room(len(recs), int64(body)) {
					break
				}
				appendBatch(t, w, 0, recs...)
			}
			must(t, w.Seal())
			closeAll(t, w)
			info, err := fs.Stat("s")
			must(t, err)
			if info.Size > size || info.Size < size-size/8 {
				t.Errorf("body %d, ledgers %d: sealed at %d bytes of %d", body, ledgers, info.Size, size)
			}
		}
	}
}

func TestFailedWriterStaysFailed(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for _, op := range []vfs.Op{vfs.OpSync, vfs.OpWrite, vfs.OpTruncate} {
		fs := vfs.NewFaulty(vfs.NewMem())
		w := create(t, fs, "s", header(1))
		locs := appendBatch(t, w, 0, add(1, 1, 10))
		fs.Add(vfs.Rule{Op: op, Times: 1, Err: boom})
		var err error
		switch op { // those of the loop
		case vfs.OpSync:
			err = w.Sync()
		case vfs.OpWrite:
			_, err = w.AppendBatch([]Record{add(1, 2, 10)}, 0)
		default:
			err = w.Seal()
		}
		if !errors.Is(err, boom) {
			t.Fatalf("%s: %v", op, err)
		}
		syncs, writes := fs.Calls(vfs.OpSync), fs.Calls(vfs.OpWrite)
		if err := w.Sync(); !errors.Is(err, ErrFailed) || !errors.Is(err, boom) {
			t.Errorf("%s: sync afterwards: %v", op, err)
		}
		if op != vfs.OpTruncate {
			if _, err := w.AppendBatch([]Record{add(1, 3, 10)}, 0); !errors.Is(err, ErrFailed) {
				t.Errorf("%s: append afterwards: %v", op, err)
			}
			if err := w.Seal(); !errors.Is(err, ErrFailed) {
				t.Errorf("%s: seal afterwards: %v", op, err)
			}
		}
		if fs.Calls(vfs.OpSync) != syncs || fs.Calls(vfs.OpWrite) != writes {
			t.Errorf("%s: the file was touched again", op)
		}
		if _, err := w.ReadAt(locs[0]); err != nil {
			t.Errorf("%s: read afterwards: %v", op, err)
		}
		closeAll(t, w)
	}
}

// TestSyncsOverlap holds a sync in the disk: appends, reads and other syncs go on.
func TestSyncsOverlap(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	w := create(t, fs, "s", header(1))
	gate := vfs.NewGate()
	fs.Add(vfs.Rule{Op: vfs.OpSync, Times: 1, Gate: gate})
	appendBatch(t, w, 0, add(1, 1, 10))
	held := make(chan error)
	go func() { held <- w.Sync() }()
	<-gate.Arrived()
	locs := appendBatch(t, w, 0, add(1, 2, 10))
	_, err := w.ReadAt(locs[0])
	must(t, err)
	must(t, w.Sync())
	select {
	case err := <-held:
		t.Fatalf("the held sync returned %v", err)
	default:
	}
	gate.Open()
	must(t, <-held)
	closeAll(t, w)
}

// TestDamageIsUnknown flips each byte of a sealed segment: what is read is right, or an error, never wrong or absent.
func TestDamageIsUnknown(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	w := create(t, fs, "s", header(1))
	appendBatch(t, w, 0, add(1, 1, 20), add(2, 1, 20), fence(3, 4))
	appendBatch(t, w, w.Size(), add(1, 2, 20))
	must(t, w.Seal())
	closeAll(t, w)
	whole := fileBytes(t, fs, "s")
	ok, damaged := 0, 0
	for i := range whole {
		if i == headerSize {
			i = headerCopyOffset - 1
		}
		b := bytes.Clone(whole)
		b[i] ^= 0x10
		m := vfs.NewMem()
		putFile(t, m, "s", b)
		if err := readAll(m, whole); err != nil {
			var damage *CorruptError
			if !errors.As(err, &damage) && !errors.Is(err, ErrUnsealed) {
				t.Fatalf("byte %d: %v", i, err)
			}
			damaged++
			continue
		}
		ok++
	}
	// The batches' own headers do not matter to a reader by index, nor does one copy of the header.
	if damaged < 300 || ok < 2*batchHeaderSize {
		t.Errorf("%d bytes caused errors, %d did not", damaged, ok)
	}
}

// readAll finds and reads all that TestDamageIsUnknown has written.
func readAll(fs vfs.FS, whole []byte) error {
	r, err := Open(fs, "s")
	if err != nil {
		return err
	}
	defer r.Close() // it was only read
	for _, id := range [][2]int64{{1, 1}, {2, 1}, {1, 2}} {
		loc, ok, err := r.Find(entry.LedgerID(id[0]), entry.EntryID(id[1]))
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("entry %v is absent", id)
		}
		rec, err := r.ReadAt(loc)
		if err != nil {
			return err
		}
		if !bytes.Equal(rec.Body, whole[loc.Offset+recordHeaderSize:loc.Offset+int64(loc.Length)]) {
			return fmt.Errorf("entry %v reads wrong", id)
		}
	}
	if _, ok, err := r.Find(2, 2); ok || err != nil {
		return errors.Join(err, errors.New("looked for what is not there"))
	}
	controls, err := r.Controls()
	if err == nil && (len(controls) != 1 || controls[0].Term != 4) {
		err = fmt.Errorf("controls %+v", controls)
	}
	return err
}

func TestReadFailuresAreNotAbsence(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	w := create(t, fs, "s", header(1))
	locs := appendBatch(t, w, 0, add(1, 1, 20))
	must(t, w.Seal())
	closeAll(t, w)
	r, err := Open(fs, "s")
	must(t, err)
	boom := errors.New("boom")
	fs.Add(vfs.Rule{Op: vfs.OpRead, Err: boom})
	if _, ok, err := r.Find(1, 1); ok || !errors.Is(err, boom) {
		t.Errorf("find: %v, %v", ok, err)
	}
	if _, err := r.ReadAt(locs[0]); !errors.Is(err, boom) {
		t.Errorf("read: %v", err)
	}
	if _, err := r.Ledgers(); !errors.Is(err, boom) {
		t.Errorf("ledgers: %v", err)
	}
	if err := r.Each(func(Record, Location) error { return nil }); !errors.Is(err, boom) {
		t.Errorf("each: %v", err)
	}
	if _, err := Open(fs, "s"); !errors.Is(err, boom) {
		t.Errorf("open: %v", err)
	}
	closeAll(t, r)
}

// TestMisdirectedWrite puts a whole record where another of the same size was: it does not pass for one of that place.
func TestMisdirectedWrite(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(1))
	locs := appendBatch(t, w, 0, add(1, 1, 20), add(1, 2, 20))
	b := fileBytes(t, m, "s")
	patch(t, m, "s", locs[1].Offset, b[locs[0].Offset:locs[0].Offset+int64(locs[0].Length)])
	var damage *CorruptError
	if _, err := w.ReadAt(locs[1]); !errors.As(err, &damage) || damage.Offset != locs[1].Offset {
		t.Errorf("got %v", err)
	}
	closeAll(t, w)
}

// What is written ahead changes nothing but the speed, and ends with the first batch.
func TestPrewrite(t *testing.T) {
	t.Parallel()
	const size = 3<<20 + 100
	fs := vfs.NewMem()
	w, err := Create(fs, "/a.seg", header(1), size, false)
	must(t, err)
	off, done, chunks := int64(0), false, 0
	for !done {
		off, done, err = w.Prewrite(off)
		must(t, err)
		chunks++
	}
	if info, err := fs.Stat("/a.seg"); err != nil || info.Size != size || chunks != 3 {
		t.Fatalf("%d bytes after %d chunks, %v", info.Size, chunks, err)
	}
	appendBatch(t, w, 0, add(1, 0, 50))
	if _, done, err := w.Prewrite(0); !done || err != nil {
		t.Fatalf("written ahead over a batch: %v", err)
	}
	must(t, w.Sync())
	fs.Crash(nil)
	rec, err := Recover(fs, "/a.seg", 0)
	must(t, err)
	if rec.Entries() != 1 || rec.Torn || rec.Corrupt != nil {
		t.Errorf("recovered %d entries, torn %v, corrupt %v", rec.Entries(), rec.Torn, rec.Corrupt)
	}
	must(t, SealRecovered(fs, "/a.seg", rec))
	must(t, Retire(fs, "/a.seg", "/a.seg"))
	w, err = Create(fs, "/a.seg", header(2), size, true)
	must(t, err)
	if _, done, err := w.Prewrite(0); !done || err != nil {
		t.Fatalf("a reused file is written ahead: %v", err)
	}
	must(t, w.Close())
}
