package segment

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// batchAt is a batch of a test's segment.
type batchAt struct {
	off, end int64
	locs     []Location
}

// batches writes an unsealed segment of n batches with an entry of ledger 1, 2 and 3 each. Batch i states that all
// before batch durable[i] was durable.
func batches(t *testing.T, m *vfs.Mem, name string, durable ...int) []batchAt {
	t.Helper()
	w := create(t, m, name, header(1))
	var out []batchAt
	for i, upto := range durable {
		off := w.Size()
		ends := append([]int64{headerBlockSize}, ends(out)...)
		e := entry.EntryID(i)
		locs := appendBatch(t, w, ends[upto], add(1, e, 100), add(2, e, 100), add(3, e, 100))
		out = append(out, batchAt{off: off, end: w.Size(), locs: locs})
	}
	must(t, w.Sync())
	closeAll(t, w)
	return out
}

func ends(bs []batchAt) []int64 {
	var out []int64
	for _, b := range bs {
		out = append(out, b.end)
	}
	return out
}

// flip damages one byte.
func flip(t *testing.T, m *vfs.Mem, name string, off int64) {
	t.Helper()
	b := fileBytes(t, m, name)[off]
	patch(t, m, name, off, []byte{b ^ 1})
}

// ids lists what a recovery has kept as "ledger:entry".
func ids(t *testing.T, rec *Recovered) string {
	t.Helper()
	var out []string
	must(t, rec.Index(func(e IndexEntry) error {
		out = append(out, fmt.Sprintf("%d:%d", e.Ledger, e.Entry))
		return nil
	}))
	return strings.Join(out, " ")
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	const all3 = "1:0 1:1 1:2 2:0 2:1 2:2 3:0 3:1 3:2"
	for _, test := range []struct {
		name    string
		durable []int // of each batch
		next    int   // batches that the next segment knows to be durable
		damage  func(t *testing.T, m *vfs.Mem, b []batchAt)
		kept    string
		end     int // number of batches up to End
		torn    bool
		lost    []entry.LedgerID
		all     bool
	}{
		{
			name: "nothing is wrong", durable: []int{0, 0, 1}, kept: all3, end: 3,
		},
		{
			name: "last batch, body", durable: []int{0, 1, 2}, torn: true, kept: "1:0 1:1 2:0 2:1 3:0 3:1", end: 2,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[2].end-1) },
		},
		{
			name: "last batch, header", durable: []int{0, 1, 2}, torn: true, kept: "1:0 1:1 2:0 2:1 3:0 3:1", end: 2,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[2].off+20) },
		},
		{
			name: "a whole batch behind a bad one proves nothing", durable: []int{0, 0, 0, 1}, torn: true, kept: "1:0 2:0 3:0", end: 1,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[1].off+200) },
		},
		{
			name: "zeros for a tail", durable: []int{0, 0, 1}, kept: "1:0 2:0 3:0", end: 1,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				patch(t, m, "s", b[1].off, make([]byte, b[2].end-b[1].off))
			},
		},
		{
			name: "one body of a durable batch", durable: []int{0, 0, 2}, lost: []entry.LedgerID{2},
			kept: "1:0 1:1 1:2 2:0 2:2 3:0 3:1 3:2", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				flip(t, m, "s", b[1].locs[1].Offset+recordHeaderSize)
			},
		},
		{
			name: "two bodies of a durable batch", durable: []int{0, 0, 2}, lost: []entry.LedgerID{1, 3},
			kept: "1:0 1:2 2:0 2:1 2:2 3:0 3:2", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				flip(t, m, "s", b[1].locs[0].Offset+recordHeaderSize)
				flip(t, m, "s", b[1].locs[2].Offset+recordHeaderSize)
			},
		},
		{
			name: "a record's header in a durable batch", durable: []int{0, 0, 2}, all: true,
			kept: "1:0 1:1 1:2 2:0 2:2 3:0 3:2", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[1].locs[1].Offset+9) },
		},
		{
			name: "a durable batch's header", durable: []int{0, 0, 2}, all: true, kept: "1:0 1:2 2:0 2:2 3:0 3:2", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[1].off) },
		},
		{
			name: "the first batch", durable: []int{0, 0, 2}, all: true, kept: "1:1 1:2 2:1 2:2 3:1 3:2", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				patch(t, m, "s", b[0].off, make([]byte, 100))
			},
		},
		{
			name: "a durable batch and the tail", durable: []int{0, 0, 2, 2}, all: true, torn: true,
			kept: "1:0 1:2 2:0 2:2 3:0 3:2", end: 4, // the tail's header stays as evidence
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				flip(t, m, "s", b[1].off)
				flip(t, m, "s", b[3].end-1)
			},
		},
		{
			name: "the only evidence is in a torn batch", durable: []int{0, 0, 2}, all: true, torn: true, kept: "1:0 2:0 3:0", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				flip(t, m, "s", b[1].off)
				flip(t, m, "s", b[2].end-1)
			},
		},
		{
			name: "the last batch, and the next segment knows it", durable: []int{0, 0, 0}, next: 3, lost: []entry.LedgerID{3},
			kept: "1:0 1:1 1:2 2:0 2:1 2:2 3:0 3:1", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[2].end-1) },
		},
		{
			name: "the last batch, and the next segment knows of others", durable: []int{0, 0, 0}, next: 2, torn: true,
			kept: "1:0 1:1 2:0 2:1 3:0 3:1", end: 2,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) { t.Helper(); flip(t, m, "s", b[2].end-1) },
		},
		{
			name: "all is gone, and the next segment knows", durable: []int{0, 0, 0}, next: 3, all: true, kept: "", end: 3,
			damage: func(t *testing.T, m *vfs.Mem, b []batchAt) {
				t.Helper()
				patch(t, m, "s", b[0].off, make([]byte, b[2].end-b[0].off))
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m := vfs.NewMem()
			b := batches(t, m, "s", test.durable...)
			if test.damage != nil {
				test.damage(t, m, b)
			}
			next := int64(0)
			if test.next > 0 {
				next = b[test.next-1].end
			}
			check := func(what string) *Recovered {
				t.Helper()
				rec, err := Recover(m, "s", next)
				must(t, err)
				if got := ids(t, rec); got != test.kept || rec.Torn != test.torn {
					t.Errorf("%s: kept %q, torn %t; want %q, %t", what, got, rec.Torn, test.kept, test.torn)
				}
				if rec.End != b[test.end-1].end {
					t.Errorf("%s: ends at %d, want %d", what, rec.End, b[test.end-1].end)
				}
				corrupt := test.lost != nil || test.all
				if (rec.Corrupt != nil) != corrupt {
					t.Fatalf("%s: corruption %+v", what, rec.Corrupt)
				}
				if corrupt && (rec.Corrupt.AllLedgers != test.all || !slices.Equal(rec.Corrupt.Ledgers, test.lost)) {
					t.Errorf("%s: corruption %+v, want %v, all %t", what, rec.Corrupt, test.lost, test.all)
				}
				return rec
			}
			rec := check("first")
			crashWhileSealing(t, m, rec, check)
			must(t, SealRecovered(m, "s", rec))
			checkSealedRecovery(t, m, rec, test.kept)
		})
	}
}

// crashWhileSealing cuts the power at each point of the seal: the next recovery reaches the same verdict, or the file is
// sealed.
func crashWhileSealing(t *testing.T, m *vfs.Mem, rec *Recovered, check func(string) *Recovered) {
	t.Helper()
	if rec.Corrupt == nil {
		return // TestCrashAtEveryPoint does
	}
	before := m.Clone()
	for cut := range 8 {
		for seed := range uint64(8) {
			*m = *before.Clone() // the lock is free
			m.CutPowerAfter(cut)
			err := SealRecovered(m, "s", rec)
			m.Crash(rand.New(rand.NewPCG(seed, uint64(cut))))
			r, openErr := Open(m, "s")
			if openErr == nil {
				closeAll(t, r)
			} else {
				check(fmt.Sprintf("cut %d, seed %d", cut, seed))
			}
			if err == nil && openErr != nil {
				t.Errorf("sealed, yet: %v", openErr)
			}
		}
	}
	*m = *before.Clone() // the lock is free
}

// checkSealedRecovery reads back what SealRecovered has written.
func checkSealedRecovery(t *testing.T, m *vfs.Mem, rec *Recovered, kept string) {
	t.Helper()
	r, err := Open(m, "s")
	must(t, err)
	defer closeAll(t, r)
	if !r.Recovered() || r.DataEnd() != rec.End {
		t.Errorf("recovered %t, data ends at %d", r.Recovered(), r.DataEnd())
	}
	var got []string
	must(t, r.Each(func(x Record, loc Location) error {
		found, ok, err := r.Find(x.Ledger, x.Entry)
		if err != nil || !ok || found != loc {
			return fmt.Errorf("%d:%d: %v, %v, %w", x.Ledger, x.Entry, found, ok, err)
		}
		got = append(got, fmt.Sprintf("%d:%d", x.Ledger, x.Entry))
		return nil
	}))
	slices.Sort(got)
	if strings.Join(got, " ") != kept {
		t.Errorf("sealed with %v, want %v", got, kept)
	}
	gaps, err := r.Gaps()
	must(t, err)
	var want []Gap
	if rec.Corrupt != nil {
		want = rec.Corrupt.Gaps
	}
	if !slices.Equal(gaps, want) {
		t.Errorf("gaps %v, want %v", gaps, want)
	}
	infos, err := r.Ledgers()
	must(t, err)
	if !slices.Equal(infos, rec.Ledgers()) {
		t.Errorf("ledgers %+v, want %+v", infos, rec.Ledgers())
	}
}

// TestB27TruncatedLengthPrefix is the story of journals that end amid a length, or with one that makes no sense, and then
// block every start, or are swallowed whole (BOOKKEEPER-166, #2178): what was written ends at each byte of the last batch, and
// has each byte of that batch's header changed. What was before it is there.
func TestB27TruncatedLengthPrefix(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	b := batches(t, m, "s", 0, 1, 2)
	whole := fileBytes(t, m, "s")
	last := b[2]
	check := func(what string, file []byte) {
		t.Helper()
		m := vfs.NewMem()
		putFile(t, m, "s", file)
		rec, err := Recover(m, "s", 0)
		must(t, err)
		if rec.End != last.off || rec.Entries() != 6 || rec.Corrupt != nil {
			t.Fatalf("%s: ends at %d with %d entries, %+v", what, rec.End, rec.Entries(), rec.Corrupt)
		}
		must(t, SealRecovered(m, "s", rec))
		r, err := Open(m, "s")
		must(t, err)
		closeAll(t, r)
	}
	for end := last.off; end < last.end; end++ {
		file := make([]byte, len(whole)) // a file keeps the length that it was made with
		copy(file, whole[:end])
		check(fmt.Sprintf("cut at %d", end), file)
	}
	for i := range int64(batchHeaderSize) {
		for _, x := range []byte{0x00, 0x01, 0x7f, 0x80, 0xff} {
			file := bytes.Clone(whole)
			file[last.off+i] ^= x
			if x != 0 {
				check(fmt.Sprintf("byte %d of the header", i), file)
			}
		}
	}
}

// TestFileCutShort loses the end of a segment, whose successor may know that it was durable.
func TestFileCutShort(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	b := batches(t, m, "s", 0, 0, 0)
	for _, size := range []int64{headerBlockSize, b[1].off, b[1].off + 20, b[1].end - 1, b[2].off} {
		c := m.Clone()
		f, err := c.Open("s")
		must(t, err)
		must(t, f.Truncate(size))
		closeAll(t, f)
		for _, known := range []int64{b[2].end, 0} { // that nobody else knows does not matter
			if rec, err := Recover(c, "s", known); err != nil || rec.Corrupt == nil || !rec.Corrupt.AllLedgers {
				t.Fatalf("cut at %d, durable up to %d: %+v, %v", size, known, rec, err)
			}
		}
		rec, err := Recover(c, "s", b[2].end)
		must(t, err)
		if rec.Corrupt == nil || !rec.Corrupt.AllLedgers || !rec.Corrupt.Affects(4711) {
			t.Fatalf("cut at %d: %+v", size, rec.Corrupt)
		}
		must(t, SealRecovered(c, "s", rec))
		r, err := Open(c, "s")
		must(t, err)
		must(t, r.Each(func(Record, Location) error { return nil }))
		closeAll(t, r)
	}
}

// TestPrevDurableTravels gives the knowledge of one segment to the next, sealed and unsealed.
func TestPrevDurableTravels(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(2))
	appendBatch(t, w, 0, add(1, 1, 1))
	w.SetPrevDurable(5000)
	appendBatch(t, w, 0, add(1, 2, 1))
	rec, err := Recover(m, "s", 0)
	must(t, err)
	if rec.PrevDurable != 5000 {
		t.Errorf("recovered %d", rec.PrevDurable)
	}
	must(t, SealRecovered(m, "s", rec))
	r, err := Open(m, "s")
	must(t, err)
	if r.PrevDurable() != 5000 {
		t.Errorf("sealed %d", r.PrevDurable())
	}
	closeAll(t, r, w)
}

// TestDamagedFooterIsRebuilt damages tables and trailer of a sealed segment, and a batch besides.
func TestDamagedFooterIsRebuilt(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(1))
	var locs []Location
	for i := range entry.EntryID(50) {
		locs = append(locs, appendBatch(t, w, 0, add(1, i, 20))...)
	}
	must(t, w.Seal())
	end := w.Size()
	closeAll(t, w)
	flip(t, m, "s", end+5)
	r, err := Open(m, "s")
	must(t, err)
	_, _, err = r.Find(1, 3)
	var damage *CorruptError
	if !errors.As(err, &damage) || damage.What != whatFooter || damage.Offset != end {
		t.Fatalf("find: %v", err)
	}
	closeAll(t, r)

	flip(t, m, "s", locs[49].Offset+recordHeaderSize) // no later batch knows that it was durable, but the trailer does
	rec, err := Recover(m, "s", 0)
	must(t, err)
	if rec.Entries() != 49 || rec.Corrupt == nil || !slices.Equal(rec.Corrupt.Ledgers, []entry.LedgerID{1}) || rec.End != end {
		t.Fatalf("%d entries, end %d, %+v", rec.Entries(), rec.End, rec.Corrupt)
	}
	must(t, SealRecovered(m, "s", rec))
	r, err = Open(m, "s")
	must(t, err)
	_, ok, err := r.Find(1, 3)
	if err != nil || !ok {
		t.Errorf("find after rebuilding: %v, %v", ok, err)
	}
	closeAll(t, r)
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	closeAll(t, create(t, m, "s", header(1)))
	for name, test := range map[string]struct {
		patch func(b []byte)
		want  error
	}{
		"first copy damaged":  {func(b []byte) { b[30] ^= 1 }, nil},
		"second copy damaged": {func(b []byte) { b[headerCopyOffset+30] ^= 1 }, nil},
		"both damaged":        {func(b []byte) { b[30] ^= 1; b[headerCopyOffset+30] ^= 1 }, &CorruptError{}},
		"zeros":               {func(b []byte) { clear(b) }, ErrBlank},
		"zeros, but a batch":  {func(b []byte) { clear(b); b[headerBlockSize] = 'P' }, &CorruptError{}},
		"newer version": {func(b []byte) {
			be.PutUint16(b[8:], 2)
			be.PutUint32(b[80:], entry.CRC32C(b[:80]))
		}, ErrVersion},
	} {
		c := m.Clone()
		b := fileBytes(t, c, "s")
		test.patch(b)
		patch(t, c, "s", 0, b)
		_, err := ReadHeader(c, "s")
		var damage *CorruptError
		if want := test.want; errors.As(want, &damage) {
			if !errors.As(err, &damage) {
				t.Errorf("%s: %v", name, err)
			}
		} else if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	putFile(t, m, "empty", nil)
	_, err := Open(m, "empty")
	if !errors.Is(err, ErrBlank) {
		t.Errorf("empty file: %v", err)
	}
}
