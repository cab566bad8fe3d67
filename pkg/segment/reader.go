package segment

import (
	"errors"
	"fmt"
	"io"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Reader reads a sealed segment. All methods may be called concurrently, except Close.
// It holds a file descriptor and next to no memory: the footer is searched where it lies, page by verified page.
// Errors are *CorruptError for damage, or the disk's; neither says that something is absent.
//
// If the footer turns out to be damaged, [Recover] and [SealRecovered] build it anew from the batches.
type Reader struct {
	f       vfs.File
	path    string
	header  Header
	seed    seed
	size    int64
	trailer trailer
}

// Open opens a sealed segment. It returns [ErrUnsealed], [ErrBlank], [ErrRetired], [ErrVersion] or a *CorruptError
// for what is not one.
func Open(fs vfs.FS, path string) (*Reader, error) {
	f, err := fs.OpenRead(path)
	if err != nil {
		return nil, fmt.Errorf("open segment: %w", err)
	}
	r, err := openReader(f, path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open segment: %w", err), f.Close())
	}
	return r, nil
}

func openReader(f vfs.File, path string) (*Reader, error) {
	h, err := readLiveHeader(f, path)
	if err != nil {
		return nil, err
	}
	r := &Reader{f: f, path: path, header: h.Header, seed: newSeed(h.Header)}
	if r.size, err = f.Size(); err != nil {
		return nil, err
	}
	t, ok, err := readTrailer(f, path, h.Header, r.size)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("%s: %w", path, ErrUnsealed)
	}
	r.trailer = t
	return r, nil
}

// readTrailer reads the trailer at the end of a file of size bytes. ok is false if there is none.
func readTrailer(f io.ReaderAt, path string, h Header, size int64) (t trailer, ok bool, err error) {
	off := size - trailerSize
	if off < headerBlockSize || size > MaxSegmentBytes {
		return trailer{}, false, nil
	}
	var b [trailerSize]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		return trailer{}, false, fmt.Errorf("read trailer of %s: %w", path, err)
	}
	t, ok = decodeTrailer(b[:], newSeed(h), h, off)
	return t, ok, nil
}

// Header returns the segment's header.
func (r *Reader) Header() Header { return r.header }

// Path returns the file's path.
func (r *Reader) Path() string { return r.path }

// Size is the size of the file.
func (r *Reader) Size() int64 { return r.size }

// DataEnd is where the batches end and the footer begins.
func (r *Reader) DataEnd() int64 { return r.trailer.dataEnd }

// PrevDurable is how much of the previous segment was known to be durable; 0 if nothing was.
func (r *Reader) PrevDurable() int64 { return r.trailer.prevDurable }

// Entries counts the records of KindEntry.
func (r *Reader) Entries() int64 { return int64(r.trailer.indexRows) }

// Recovered reports whether the segment was sealed by [SealRecovered].
func (r *Reader) Recovered() bool { return r.trailer.flags&flagRecovered != 0 }

// tables places the four tables, in the order they lie in the file.
func (r *Reader) tables() (index, ledgers, controls, gaps table) {
	off := r.trailer.dataEnd
	next := func(rows uint32, rowSize int64) table {
		t := table{f: r.f, path: r.path, seed: r.seed, offset: off, rows: rows, rowSize: rowSize}
		off += tableSize(rows, rowSize)
		return t
	}
	index = next(r.trailer.indexRows, indexRowSize)
	ledgers = next(r.trailer.ledgerRows, ledgerRowSize)
	controls = next(r.trailer.controlRows, controlRowSize)
	gaps = next(r.trailer.gapRows, gapRowSize)
	return index, ledgers, controls, gaps
}

// run reads row i of the ledger table.
func (r *Reader) run(s *scan, i uint32) (run, error) {
	b, err := s.row(i)
	if err != nil {
		return run{}, err
	}
	got := decodeRun(b)
	if uint64(got.first)+uint64(got.rows) > uint64(r.trailer.indexRows) || got.info.Bytes < 0 ||
		got.info.First < entry.NoEntry || got.info.Last < got.info.First || got.info.LAC < entry.NoEntry {
		return run{}, &CorruptError{Path: r.path, Offset: s.offset, What: whatFooter}
	}
	return got, nil
}

// searchRuns returns the number of the first run that is at or after (l, e).
func (r *Reader) searchRuns(s *scan, l entry.LedgerID, e entry.EntryID) (uint32, error) {
	return search(0, s.rows, func(i uint32) (bool, error) {
		got, err := r.run(s, i)
		return got.info.Ledger > l || got.info.Ledger == l && got.info.First >= e, err
	})
}

// search is sort.Search over [low, high) with errors.
func search(low, high uint32, reached func(uint32) (bool, error)) (uint32, error) {
	for low < high {
		mid := low + (high-low)/2
		ok, err := reached(mid)
		if err != nil {
			return 0, err
		}
		if ok {
			high = mid
		} else {
			low = mid + 1
		}
	}
	return low, nil
}

// indexRow reads row i, which belongs to run g.
func (r *Reader) indexRow(s *scan, g run, i uint32) (entry.EntryID, Location, error) {
	b, err := s.row(i)
	if err != nil {
		return 0, Location{}, err
	}
	loc := Location{Offset: int64(be.Uint32(b[4:])), Length: be.Uint32(b[8:])}
	return g.info.First + entry.EntryID(be.Uint32(b)), loc, nil
}

// searchRun returns the first row of g with an entry at or after e. Entries of a run mostly have no holes, so the row
// where e would be then is looked at first.
func (r *Reader) searchRun(s *scan, g run, e entry.EntryID) (uint32, error) {
	if e <= g.info.First {
		return g.first, nil
	}
	low, high := g.first, g.first+g.rows
	if d := e - g.info.First; d < entry.EntryID(g.rows) {
		guess := g.first + uint32(d) // below rows
		got, _, err := r.indexRow(s, g, guess)
		if err != nil {
			return 0, err
		}
		if got >= e {
			before, _, err := r.indexRow(s, g, guess-1)
			if err != nil || before < e {
				return guess, err
			}
			high = guess
		} else {
			low = guess + 1
		}
	}
	return search(low, high, func(i uint32) (bool, error) {
		got, _, err := r.indexRow(s, g, i)
		return got >= e, err
	})
}

// errStop ends IndexLedger early.
var errStop = errors.New("stop")

// Find locates an entry; of several copies the first that was appended. An error means that it cannot tell.
func (r *Reader) Find(l entry.LedgerID, e entry.EntryID) (Location, bool, error) {
	var found Location
	ok := false
	err := r.IndexLedger(l, e, func(got entry.EntryID, loc Location) bool {
		found, ok = loc, got == e
		return false
	})
	if err != nil || !ok {
		return Location{}, false, err
	}
	return found, true, nil
}

// IndexLedger calls fn for the entries of one ledger from first on, sorted, until fn returns false. Copies of an
// entry follow each other, the first that was appended first.
func (r *Reader) IndexLedger(l entry.LedgerID, first entry.EntryID, fn func(entry.EntryID, Location) bool) error {
	index, ledgers, _, _ := r.tables()
	runs, rows := newScan(ledgers), newScan(index)
	defer runs.release()
	defer rows.release()
	n, err := r.searchRuns(runs, l, first)
	if err != nil {
		return err
	}
	if n > 0 {
		n-- // the run before may reach past first
	}
	for ; n < ledgers.rows; n++ {
		g, err := r.run(runs, n)
		if err != nil {
			return err
		}
		if g.info.Ledger > l {
			return nil
		}
		if g.info.Ledger < l || g.rows == 0 || g.info.Last < first {
			continue
		}
		err = r.walkRun(rows, g, first, fn)
		if err != nil {
			if errors.Is(err, errStop) {
				return nil
			}
			return err
		}
	}
	return nil
}

func (r *Reader) walkRun(rows *scan, g run, first entry.EntryID, fn func(entry.EntryID, Location) bool) error {
	i, err := r.searchRun(rows, g, first)
	if err != nil {
		return err
	}
	for ; i < g.first+g.rows; i++ {
		e, loc, err := r.indexRow(rows, g, i)
		if err != nil {
			return err
		}
		if !fn(e, loc) {
			return errStop
		}
	}
	return nil
}

// Index calls fn for each entry sorted by ledger, entry and place, until fn returns an error, which it returns.
func (r *Reader) Index(fn func(IndexEntry) error) error {
	index, ledgers, _, _ := r.tables()
	runs, rows := newScan(ledgers), newScan(index)
	defer runs.release()
	defer rows.release()
	for n := range ledgers.rows {
		g, err := r.run(runs, n)
		if err != nil {
			return err
		}
		for i := g.first; i < g.first+g.rows; i++ {
			e, loc, err := r.indexRow(rows, g, i)
			if err != nil {
				return err
			}
			if err := fn(IndexEntry{Ledger: g.info.Ledger, Entry: e, Location: loc}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Ledger sums up the records of one ledger.
func (r *Reader) Ledger(l entry.LedgerID) (info LedgerInfo, ok bool, err error) {
	_, ledgers, _, _ := r.tables()
	runs := newScan(ledgers)
	defer runs.release()
	n, err := r.searchRuns(runs, l, entry.NoEntry)
	if err != nil {
		return LedgerInfo{}, false, err
	}
	for ; n < ledgers.rows; n++ {
		g, err := r.run(runs, n)
		if err != nil {
			return LedgerInfo{}, false, err
		}
		if g.info.Ledger != l {
			break
		}
		info, ok = mergeRun(info, ok, g), true
	}
	return info, ok, nil
}

// mergeRun adds a run to what is known of its ledger.
func mergeRun(info LedgerInfo, known bool, g run) LedgerInfo {
	if !known {
		return g.info
	}
	info.Last = g.info.Last
	info.Entries += g.info.Entries
	return info
}

// Ledgers sums up the records of each ledger, sorted by ledger.
func (r *Reader) Ledgers() ([]LedgerInfo, error) {
	_, ledgers, _, _ := r.tables()
	runs := newScan(ledgers)
	defer runs.release()
	infos := make([]LedgerInfo, 0, ledgers.rows)
	for n := range ledgers.rows {
		g, err := r.run(runs, n)
		if err != nil {
			return nil, err
		}
		last := len(infos) - 1
		if last >= 0 && infos[last].Ledger == g.info.Ledger {
			infos[last] = mergeRun(infos[last], true, g)
			continue
		}
		infos = append(infos, g.info)
	}
	return infos, nil
}

// Controls lists the control records, in the order they were appended.
func (r *Reader) Controls() ([]Control, error) {
	_, _, controls, _ := r.tables()
	return readRows(controls, decodeControl)
}

// Gaps lists what a recovery could not read.
func (r *Reader) Gaps() ([]Gap, error) {
	_, _, _, table := r.tables()
	gaps, err := readRows(table, func(b []byte) Gap {
		return Gap{Offset: int64(be.Uint64(b)), End: int64(be.Uint64(b[8:]))} // checked below
	})
	for i, g := range gaps {
		if g.Offset < headerBlockSize || g.End <= g.Offset || i > 0 && g.Offset <= gaps[i-1].End {
			return nil, &CorruptError{Path: r.path, Offset: table.offset, What: whatFooter}
		}
	}
	return gaps, err
}

func readRows[T any](t table, decode func([]byte) T) ([]T, error) {
	s := newScan(t)
	defer s.release()
	out := make([]T, 0, t.rows)
	for i := range t.rows {
		b, err := s.row(i)
		if err != nil {
			return nil, err
		}
		out = append(out, decode(b))
	}
	return out, nil
}

// ReadAt reads and verifies a record. The caller owns the body.
func (r *Reader) ReadAt(loc Location) (Record, error) {
	return readRecord(r.f, r.path, r.seed, r.trailer.dataEnd, loc, nil)
}

// ReadInto is ReadAt into buf, which must hold loc.Length bytes; the record's body lies in it.
func (r *Reader) ReadInto(loc Location, buf []byte) (Record, error) {
	return readRecord(r.f, r.path, r.seed, r.trailer.dataEnd, loc, buf)
}

// readRecord reads the record at loc, which must end at or before end.
func readRecord(f io.ReaderAt, path string, s seed, end int64, loc Location, buf []byte) (Record, error) {
	if loc.Offset < headerBlockSize+batchHeaderSize || loc.Length < recordHeaderSize ||
		loc.Length > recordHeaderSize+MaxBodyBytes || loc.Offset > end-int64(loc.Length) {
		return Record{}, &CorruptError{Path: path, Offset: loc.Offset, What: whatRecord}
	}
	if buf == nil {
		buf = make([]byte, loc.Length)
	}
	buf = buf[:loc.Length]
	if _, err := f.ReadAt(buf, loc.Offset); err != nil {
		return Record{}, readError(err, path, loc.Offset, whatRecord)
	}
	rec, what := decodeRecord(buf, s, loc.Offset)
	if what != "" {
		return Record{}, &CorruptError{Path: path, Offset: loc.Offset, What: what}
	}
	return rec, nil
}

// Close closes the file.
func (r *Reader) Close() error { return r.f.Close() }
