package segment

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// row is an index entry in memory: 24 bytes.
type row struct {
	ledger entry.LedgerID
	entry  entry.EntryID
	offset uint32
	length uint32
}

func (r row) location() Location { return Location{Offset: int64(r.offset), Length: r.length} }

const rowChunk = 4096

// contents gathers what a footer says, while records are appended or scanned.
type contents struct {
	full     [][]row // chunks of rowChunk rows, so that growing copies nothing
	open     []row
	ledgers  map[entry.LedgerID]*LedgerInfo
	last     *LedgerInfo // of the record before: runs of one ledger are common
	controls []Control
	batches  uint32
}

func newContents() *contents {
	return &contents{ledgers: make(map[entry.LedgerID]*LedgerInfo)}
}

// add takes in a record that was stored at loc.
func (c *contents) add(r *Record, loc Location) {
	info := c.last
	if info == nil || info.Ledger != r.Ledger {
		info = c.ledgers[r.Ledger]
		if info == nil {
			info = &LedgerInfo{Ledger: r.Ledger, LAC: entry.NoEntry, First: entry.NoEntry, Last: entry.NoEntry}
			c.ledgers[r.Ledger] = info
		}
		c.last = info
	}
	info.Bytes += int64(loc.Length)
	info.Term = max(info.Term, r.Term)
	if info.Nonce == 0 {
		info.Nonce = r.Nonce
	}
	if r.Kind == KindEntry || r.Kind == KindLAC {
		info.LAC = max(info.LAC, r.LAC)
	}
	if r.Kind != KindEntry {
		c.controls = append(c.controls, Control{
			Kind: r.Kind, Ledger: r.Ledger, Entry: r.Entry, LAC: r.LAC, Term: r.Term, Nonce: r.Nonce, Location: loc,
		})
		return
	}
	if info.Entries == 0 || r.Entry < info.First {
		info.First = r.Entry
	}
	info.Last = max(info.Last, r.Entry)
	info.Entries++
	if len(c.open) == rowChunk {
		c.full = append(c.full, c.open)
		c.open = nil
	}
	if c.open == nil {
		c.open = make([]row, 0, rowChunk)
	}
	c.open = append(c.open, row{r.Ledger, r.Entry, uint32(loc.Offset), loc.Length}) // a segment ends below 4 GiB
}

// entries counts index rows.
func (c *contents) entries() int { return len(c.full)*rowChunk + len(c.open) }

// sorted returns the index in order. Copies of one entry stay in the order they were stored. A ledger's entries mostly
// come in their order, among those of others: so rows are dealt out by ledger, and few ledgers are left to sort.
func (c *contents) sorted() []row {
	ledgers := c.sortedLedgers()
	places := make(map[entry.LedgerID]*int, len(ledgers)) // where a ledger's next row goes
	at := 0
	for _, info := range ledgers {
		start := at
		places[info.Ledger] = &start
		at += int(info.Entries)
	}
	rows := make([]row, c.entries())
	var of entry.LedgerID
	var place *int
	for _, chunk := range append(slices.Clip(c.full), c.open) {
		for _, r := range chunk {
			if place == nil || r.ledger != of {
				of, place = r.ledger, places[r.ledger]
			}
			rows[*place] = r
			*place++
		}
	}
	at = 0
	for _, info := range ledgers {
		its := rows[at : at+int(info.Entries)]
		at += int(info.Entries)
		if !slices.IsSortedFunc(its, compareRows) {
			slices.SortFunc(its, compareRows)
		}
	}
	return rows
}

// compareRows orders the rows of one ledger.
func compareRows(a, b row) int {
	if a.entry != b.entry {
		return cmp.Compare(a.entry, b.entry)
	}
	return cmp.Compare(a.offset, b.offset)
}

func (c *contents) sortedLedgers() []LedgerInfo {
	infos := make([]LedgerInfo, 0, len(c.ledgers))
	for _, id := range slices.Sorted(maps.Keys(c.ledgers)) {
		infos = append(infos, *c.ledgers[id])
	}
	return infos
}

// Room is the size of a file that holds so many bytes of entries, headers included, of so many ledgers, in so many
// batches, and its footer; a ledger whose entries lie more than 2³² apart counts again.
func Room(bytes int64, entries, ledgers, batches int64) int64 {
	clip := func(n int64) uint32 { return uint32(min(n, math.MaxUint32)) } // clipped
	return headerBlockSize + batches*batchHeaderSize + bytes +
		tableSize(clip(entries), indexRowSize) + tableSize(clip(ledgers), ledgerRowSize) + trailerSize
}

// footerBound is the most that a footer takes after so many more records.
func (c *contents) footerBound(more int) int64 {
	clip := func(n int) uint32 { return uint32(min(n, math.MaxUint32)) } // clipped
	return tableSize(clip(c.entries()+more), indexRowSize) + tableSize(clip(len(c.ledgers)+more), ledgerRowSize) +
		tableSize(clip(len(c.controls)+more), controlRowSize) + trailerSize
}

// run is a stretch of the index: the rows of one ledger whose entries are at most 2³²−1 above the first.
type run struct {
	info  LedgerInfo
	first uint32 // row
	rows  uint32
}

// runs cuts the sorted index into runs, sorted by ledger and first entry. A ledger's sums are in its first run.
func (c *contents) runs(rows []row) []run {
	out := make([]run, 0, len(c.ledgers))
	next := uint32(0)
	for _, info := range c.sortedLedgers() {
		r := run{info: info, first: next}
		for int(next) < len(rows) && rows[next].ledger == info.Ledger {
			if rows[next].entry-r.info.First > math.MaxUint32 {
				out = append(out, r)
				r = run{info: LedgerInfo{Ledger: info.Ledger, LAC: entry.NoEntry, First: rows[next].entry}, first: next}
			}
			r.info.Last = rows[next].entry
			r.rows++
			next++
		}
		out = append(out, r)
	}
	return out
}

// seal writes a footer at t.dataEnd and makes the file end behind it, durably. t brings dataEnd, prevDurable and flags.
//
// The batches and the tables are synced before the trailer is written, so that a trailer proves them to be there: whoever
// finds one need not verify the tables before it trusts that they are whole. The file is cut last, since the footer
// goes into blocks that are reserved.
func seal(f vfs.File, h Header, c *contents, gaps []Gap, t trailer) error {
	rows := c.sorted()
	runs := c.runs(rows)
	t.count(c, rows, runs, gaps)
	trailerOffset := t.dataEnd + t.tablesSize()
	end := trailerOffset + trailerSize
	if end > MaxSegmentBytes {
		return fmt.Errorf("footer would end past %d bytes: %w", int64(MaxSegmentBytes), ErrTooLarge)
	}
	w := &tableWriter{f: f, seed: newSeed(h), off: t.dataEnd}
	steps := []func() error{
		func() error { return writeIndex(w, rows, runs) },
		func() error { return writeRuns(w, runs) },
		func() error { return writeControls(w, c.controls) },
		func() error { return writeGaps(w, gaps) },
		w.flush,
		f.Datasync,
		func() error {
			if w.off != trailerOffset {
				panic(fmt.Sprintf("segment: tables end at %d, not at %d", w.off, trailerOffset))
			}
			_, err := f.WriteAt(encodeTrailer(w.seed, h, w.off, t), w.off)
			return err
		},
		func() error { return f.Truncate(end) },
		f.Sync,
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// count notes how many rows the tables have.
func (t *trailer) count(c *contents, rows []row, runs []run, gaps []Gap) {
	t.batches = c.batches
	t.indexRows = uint32(len(rows))         // a segment below 4 GiB has fewer
	t.ledgerRows = uint32(len(runs))        // likewise
	t.controlRows = uint32(len(c.controls)) // likewise
	t.gapRows = uint32(len(gaps))           // likewise
}

// sealedSize is how long a file is that a seal, with its batches up to dataEnd, has cut.
func (c *contents) sealedSize(gaps []Gap, dataEnd int64) int64 {
	t := trailer{dataEnd: dataEnd}
	rows := c.sorted()
	t.count(c, rows, c.runs(rows), gaps)
	return dataEnd + t.tablesSize() + trailerSize
}

func writeIndex(w *tableWriter, rows []row, runs []run) error {
	for _, run := range runs {
		for _, r := range rows[run.first : run.first+run.rows] {
			b, err := w.row(indexRowSize)
			if err != nil {
				return err
			}
			be.PutUint32(b, uint32(r.entry-run.info.First)) // runs are cut so
			be.PutUint32(b[4:], r.offset)
			be.PutUint32(b[8:], r.length)
		}
	}
	return w.endTable()
}

func writeRuns(w *tableWriter, runs []run) error {
	for _, r := range runs {
		b, err := w.row(ledgerRowSize)
		if err != nil {
			return err
		}
		be.PutUint64(b, uint64(r.info.Ledger))
		be.PutUint64(b[8:], r.info.Nonce)
		be.PutUint64(b[16:], uint64(r.info.Term))
		be.PutUint64(b[24:], uint64(r.info.LAC))   // two's complement is the format
		be.PutUint64(b[32:], uint64(r.info.First)) // two's complement is the format
		be.PutUint64(b[40:], uint64(r.info.Last))  // two's complement is the format
		be.PutUint64(b[48:], uint64(r.info.Bytes)) // not negative
		be.PutUint32(b[56:], r.first)
		be.PutUint32(b[60:], r.rows)
	}
	return w.endTable()
}

func decodeRun(b []byte) run {
	return run{
		info: LedgerInfo{
			Ledger:  entry.LedgerID(be.Uint64(b)),
			Nonce:   be.Uint64(b[8:]),
			Term:    entry.Term(be.Uint64(b[16:])),
			LAC:     entry.EntryID(be.Uint64(b[24:])), // two's complement is the format
			First:   entry.EntryID(be.Uint64(b[32:])), // two's complement is the format
			Last:    entry.EntryID(be.Uint64(b[40:])), // two's complement is the format
			Bytes:   int64(be.Uint64(b[48:])),         // as it was written
			Entries: int64(be.Uint32(b[60:])),
		},
		first: be.Uint32(b[56:]),
		rows:  be.Uint32(b[60:]),
	}
}

func writeControls(w *tableWriter, controls []Control) error {
	for _, c := range controls {
		b, err := w.row(controlRowSize)
		if err != nil {
			return err
		}
		b[0] = byte(c.Kind)
		be.PutUint32(b[4:], c.Location.Length)
		be.PutUint64(b[8:], uint64(c.Ledger))
		be.PutUint64(b[16:], uint64(c.Entry)) // two's complement is the format
		be.PutUint64(b[24:], uint64(c.LAC))   // two's complement is the format
		be.PutUint64(b[32:], uint64(c.Term))
		be.PutUint64(b[40:], c.Nonce)
		be.PutUint64(b[48:], uint64(c.Location.Offset)) // not negative
	}
	return w.endTable()
}

func decodeControl(b []byte) Control {
	return Control{
		Kind:     Kind(b[0]),
		Ledger:   entry.LedgerID(be.Uint64(b[8:])),
		Entry:    entry.EntryID(be.Uint64(b[16:])), // two's complement is the format
		LAC:      entry.EntryID(be.Uint64(b[24:])), // two's complement is the format
		Term:     entry.Term(be.Uint64(b[32:])),
		Nonce:    be.Uint64(b[40:]),
		Location: Location{Offset: int64(be.Uint64(b[48:])), Length: be.Uint32(b[4:])}, // checked by ReadAt
	}
}

func writeGaps(w *tableWriter, gaps []Gap) error {
	for _, g := range gaps {
		b, err := w.row(gapRowSize)
		if err != nil {
			return err
		}
		be.PutUint64(b, uint64(g.Offset))  // not negative
		be.PutUint64(b[8:], uint64(g.End)) // not negative
	}
	return w.endTable()
}
