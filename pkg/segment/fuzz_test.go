package segment

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// The fuzz tests mend checksums, or a decoder would see nothing but wrong ones. What is decoded must encode to the same
// bytes; nothing may panic, hang, or take memory out of proportion.

func FuzzDecodeHeader(f *testing.F) {
	f.Add(encodeHeaderBlock(fileHeader{Header: exampleHeader(), size: 1 << 20})[:headerSize])
	f.Add(encodeHeaderBlock(fileHeader{retired: true})[:headerSize])
	f.Add([]byte("PNSTKSEG"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerSize {
			be.PutUint32(b[80:], entry.CRC32C(b[:80]))
		}
		h, err := decodeHeader(b)
		if err != nil {
			return
		}
		if got := encodeHeaderBlock(h)[:headerSize]; !bytes.Equal(got, b[:headerSize]) {
			t.Errorf("%x decodes to what encodes to %x", b, got)
		}
	})
}

func FuzzDecodeBatchHeader(f *testing.F) {
	const offset = 1 << 20
	h := exampleHeader()
	s := newSeed(h)
	good := make([]byte, batchHeaderSize)
	encodeBatchHeader(good, s, h.Generation, offset, batchHeader{seq: 4, length: 100, count: 1, durableUpto: 5000, prevDurable: 7})
	f.Add(good)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= batchHeaderSize {
			be.PutUint32(b[44:], entry.UpdateCRC32C(s.at(offset), b[:44]))
		}
		got, ok := decodeBatchHeader(b, s, h.Generation, offset)
		if !ok {
			return
		}
		again := make([]byte, batchHeaderSize)
		encodeBatchHeader(again, s, h.Generation, offset, got)
		if !bytes.Equal(again, b[:batchHeaderSize]) || got.durableUpto > offset || got.length > MaxBatchBytes {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, got, again)
		}
	})
}

func FuzzDecodeRecord(f *testing.F) {
	s := newSeed(exampleHeader())
	for _, r := range exampleRecords() {
		b := make([]byte, recordHeaderSize+len(r.Body))
		encodeRecord(b, s, 5000, &r)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		mendRecord(b, s, 5000)
		r, what := decodeRecord(b, s, 5000)
		if what != "" {
			return
		}
		again := make([]byte, len(b))
		encodeRecord(again, s, 5000, &r)
		if !bytes.Equal(again, b) || validate(&r) != nil {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, r, again)
		}
	})
}

// mendRecord makes the checksums of what may be a record right, and returns its length, 0 if it is none.
func mendRecord(b []byte, s seed, offset int64) int {
	if len(b) < recordHeaderSize {
		return 0
	}
	n := recordHeaderSize + int(be.Uint32(b[4:]))
	if n > len(b) {
		return 0
	}
	sum := entry.Checksum(entry.LedgerID(be.Uint64(b[8:])), entry.EntryID(be.Uint64(b[16:])), b[recordHeaderSize:n])
	be.PutUint32(b[48:], sum)
	be.PutUint32(b[52:], entry.UpdateCRC32C(s.at(offset), b[:52]))
	return n
}

// mendBatches does the same for batches from the start of the data on, a broken one aside where spare has a bit.
func mendBatches(file []byte, h Header, spare uint8) {
	s := newSeed(h)
	for off := headerBlockSize; off+batchHeaderSize <= len(file); {
		b := file[off:]
		copy(b, batchMagic[:])
		be.PutUint32(b[4:], h.Generation)
		n := batchHeaderSize + int(be.Uint32(b[16:]))
		if n > len(b) {
			n = len(b)
			be.PutUint32(b[16:], uint32(n-batchHeaderSize)) // inputs are small
		}
		for at := batchHeaderSize; at < n; {
			length := mendRecord(b[at:n], s, int64(off+at))
			if length == 0 {
				break
			}
			at += length
		}
		if spare&1 == 0 {
			be.PutUint32(b[40:], entry.UpdateCRC32C(uint32(s), b[batchHeaderSize:n]))
		}
		if spare&2 == 0 {
			be.PutUint32(b[44:], entry.UpdateCRC32C(s.at(int64(off)), b[:44]))
		}
		spare >>= 2
		off += n
	}
}

func FuzzRecover(f *testing.F) {
	h := exampleHeader()
	m := vfs.NewMem()
	w, err := Create(m, "s", h, headerBlockSize, false)
	must(f, err)
	for i := range entry.EntryID(3) {
		appendBatch(f, w, w.Size(), add(1, i, 10), fence(2, 3))
	}
	data := fileBytes(f, m, "s")[headerBlockSize:]
	must(f, w.Seal())
	for spare := range uint8(8) {
		f.Add(data, spare, int64(0))
		f.Add(data, spare, int64(4500))
	}
	f.Add(fileBytes(f, m, "s")[headerBlockSize:], uint8(0), int64(0))
	f.Fuzz(func(t *testing.T, data []byte, spare uint8, next int64) {
		file := append(encodeHeaderBlock(fileHeader{Header: h}), data...)
		mendBatches(file, h, spare)
		next = max(0, next%(1<<20))
		m := vfs.NewMem()
		putFile(t, m, "s", file)
		rec, err := Recover(m, "s", next)
		if err != nil {
			t.Fatal(err)
		}
		if rec.End < headerBlockSize || rec.End > int64(len(file)) {
			t.Fatalf("ends at %d of %d", rec.End, len(file))
		}
		if err := Dump(discard{}, m, "s"); err != nil {
			t.Fatal(err)
		}
		must(t, SealRecovered(m, "s", rec))
		r, err := Open(m, "s")
		must(t, err)
		n := int64(0)
		must(t, r.Each(func(x Record, _ Location) error {
			if x.Kind == KindEntry {
				n++
			}
			return validate(&x)
		}))
		if n != rec.Entries() || n != r.Entries() {
			t.Errorf("recovered %d entries, indexed %d, read %d", rec.Entries(), r.Entries(), n)
		}
		must(t, r.Index(func(e IndexEntry) error {
			x, err := r.ReadAt(e.Location)
			if err == nil && (x.Ledger != e.Ledger || x.Entry != e.Entry) {
				err = fmt.Errorf("index says %+v of %+v", e, x)
			}
			return err
		}))
		closeAll(t, r)
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// FuzzFooter puts arbitrary rows into pages with right checksums, behind a right trailer.
func FuzzFooter(f *testing.F) {
	h := exampleHeader()
	m := vfs.NewMem()
	w, err := Create(m, "s", h, headerBlockSize, false)
	must(f, err)
	appendBatch(f, w, 0, exampleRecords()...)
	must(f, w.Seal())
	tables := fileBytes(f, m, "s")[w.Size():]
	f.Add(tables[:len(tables)-trailerSize], uint16(1), uint8(2), uint8(1), uint8(0))
	f.Add(make([]byte, 6000), uint16(400), uint8(3), uint8(2), uint8(2))
	f.Fuzz(func(t *testing.T, tables []byte, index uint16, ledgers, controls, gaps uint8) {
		tr := trailer{
			dataEnd: headerBlockSize + 500, indexRows: uint32(index), ledgerRows: uint32(ledgers),
			controlRows: uint32(controls), gapRows: uint32(gaps),
		}
		if tr.tablesSize() > int64(len(tables)) {
			return
		}
		file := append(encodeHeaderBlock(fileHeader{Header: h}), make([]byte, 500)...)
		file = append(file, tables[:tr.tablesSize()]...)
		file = append(file, encodeTrailer(newSeed(h), h, int64(len(file)), tr)...)
		mendPages(file, h, tr)
		m := vfs.NewMem()
		putFile(t, m, "s", file)
		r, err := Open(m, "s")
		must(t, err)
		defer closeAll(t, r)
		check := func(err error) {
			t.Helper()
			var damage *CorruptError
			if err != nil && !errors.As(err, &damage) {
				t.Error(err)
			}
		}
		infos, err := r.Ledgers()
		check(err)
		for _, info := range infos {
			for _, e := range []entry.EntryID{0, info.First, info.First + 1, info.Last, info.Last + 1} {
				_, _, err := r.Find(info.Ledger, e)
				check(err)
			}
			_, _, err := r.Ledger(info.Ledger)
			check(err)
		}
		_, err = r.Controls()
		check(err)
		check(r.Index(func(e IndexEntry) error {
			_, err := r.ReadAt(e.Location)
			check(err)
			return nil
		}))
		check(r.Each(func(Record, Location) error { return nil }))
		must(t, Dump(discard{}, m, "s"))
	})
}

// mendPages makes the checksums of all pages right.
func mendPages(file []byte, h Header, tr trailer) {
	r := &Reader{seed: newSeed(h), header: h, trailer: tr}
	index, ledgers, controls, gaps := r.tables()
	for _, table := range []table{index, ledgers, controls, gaps} {
		per := rowsPerPage(table.rowSize)
		for n := range (int64(table.rows) + per - 1) / per {
			off, length := table.page(n)
			end := off + length - pageCRCSize
			be.PutUint32(file[end:], entry.UpdateCRC32C(r.seed.at(off), file[off:end]))
		}
	}
}
