package segment

import (
	"io"
	"sync"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// A table is a run of rows of one size, cut into pages that each end with their own checksum, so that a row is
// found and verified by reading one page, and nothing of a table has to stay in memory.
//
// The alternative, one checksum over a table that is loaded whole, costs a bookie 12 bytes of memory for each entry
// on its disk: gigabytes for a terabyte of small entries.
const (
	pageSize    = 4096
	pageCRCSize = 4

	indexRowSize   = 12
	ledgerRowSize  = 64
	controlRowSize = 56
	gapRowSize     = 16
)

// rowsPerPage is how many rows a full page has.
func rowsPerPage(rowSize int64) int64 { return (pageSize - pageCRCSize) / rowSize }

// tableSize is what a table takes in the file: full pages, then a short one for the rest.
func tableSize(rows uint32, rowSize int64) int64 {
	per := rowsPerPage(rowSize)
	size := int64(rows) / per * (per*rowSize + pageCRCSize)
	if rest := int64(rows) % per; rest > 0 {
		size += rest*rowSize + pageCRCSize
	}
	return size
}

// table is a table in a file.
type table struct {
	f       io.ReaderAt
	path    string
	seed    seed
	offset  int64
	rows    uint32
	rowSize int64
}

// page places page n.
func (t *table) page(n int64) (offset, length int64) {
	per := rowsPerPage(t.rowSize)
	rows := min(per, int64(t.rows)-n*per)
	return t.offset + n*(per*t.rowSize+pageCRCSize), rows*t.rowSize + pageCRCSize
}

// scan walks a table, holding one verified page. Take one with newScan and give it back with release.
type scan struct {
	table
	loaded int64 // page number, -1 if none
	buf    []byte
}

var pagePool = sync.Pool{New: func() any { return new([pageSize]byte) }}

func newScan(t table) *scan {
	return &scan{table: t, loaded: -1, buf: pagePool.Get().(*[pageSize]byte)[:]} // the pool holds nothing else
}

func (s *scan) release() {
	pagePool.Put((*[pageSize]byte)(s.buf))
	s.buf = nil
}

// row returns row i, valid until the next call.
func (s *scan) row(i uint32) ([]byte, error) {
	per := rowsPerPage(s.rowSize)
	n := int64(i) / per
	if s.loaded != n {
		off, length := s.page(n)
		page := s.buf[:length]
		s.loaded = -1
		if _, err := s.f.ReadAt(page, off); err != nil {
			return nil, readError(err, s.path, off, whatFooter)
		}
		rows, crc := page[:length-pageCRCSize], page[length-pageCRCSize:]
		if entry.UpdateCRC32C(s.seed.at(off), rows) != be.Uint32(crc) {
			return nil, &CorruptError{Path: s.path, Offset: off, What: whatFooter}
		}
		s.loaded = n
	}
	off := int64(i) % per * s.rowSize
	return s.buf[off : off+s.rowSize], nil
}

// tableWriter writes tables one behind the other.
type tableWriter struct {
	f     vfs.File
	seed  seed
	off   int64  // of buf in the file
	buf   []byte // pages ready, then the rows of the open page
	open  int    // start of the open page in buf
	inner int    // rows in the open page
}

const tableWriterFlush = 1 << 20

var zeros [max(indexRowSize, ledgerRowSize, controlRowSize, gapRowSize)]byte

// row makes room for the next row, to be filled before the next call.
func (w *tableWriter) row(size int64) ([]byte, error) {
	if int64(w.inner) == rowsPerPage(size) {
		if err := w.endTable(); err != nil {
			return nil, err
		}
	}
	w.inner++
	n := len(w.buf)
	w.buf = append(w.buf, zeros[:size]...)
	return w.buf[n:], nil
}

// endTable ends the open page, as the end of a table does.
func (w *tableWriter) endTable() error {
	if w.inner == 0 {
		return nil
	}
	crc := entry.UpdateCRC32C(w.seed.at(w.off+int64(w.open)), w.buf[w.open:])
	w.buf = be.AppendUint32(w.buf, crc)
	w.open, w.inner = len(w.buf), 0
	if len(w.buf) < tableWriterFlush {
		return nil
	}
	return w.flush()
}

// flush writes what is ready; no page is open.
func (w *tableWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	if _, err := w.f.WriteAt(w.buf, w.off); err != nil {
		return err
	}
	w.off += int64(len(w.buf))
	w.buf, w.open = w.buf[:0], 0
	return nil
}
