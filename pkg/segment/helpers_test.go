package segment

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func closeAll(tb testing.TB, closers ...io.Closer) {
	tb.Helper()
	for _, c := range closers {
		must(tb, c.Close())
	}
}

// fileBytes reads a whole file.
func fileBytes(tb testing.TB, fs vfs.FS, name string) []byte {
	tb.Helper()
	f, err := fs.OpenRead(name)
	must(tb, err)
	size, err := f.Size()
	must(tb, err)
	b := make([]byte, size)
	_, err = f.ReadAt(b, 0)
	must(tb, err)
	must(tb, f.Close())
	return b
}

// putFile makes a file, durable.
func putFile(tb testing.TB, fs vfs.FS, name string, b []byte) {
	tb.Helper()
	f, err := fs.Create(name)
	must(tb, err)
	_, err = f.WriteAt(b, 0)
	must(tb, err)
	must(tb, f.Sync())
	must(tb, f.Close())
	must(tb, fs.SyncDir("."))
}

// patch changes bytes of a file, durably.
func patch(tb testing.TB, fs vfs.FS, name string, off int64, b []byte) {
	tb.Helper()
	f, err := fs.Open(name)
	must(tb, err)
	_, err = f.WriteAt(b, off)
	must(tb, err)
	must(tb, f.Sync())
	must(tb, f.Close())
}

// header returns the header of the n-th segment of a test.
func header(n uint64) Header {
	h := Header{Sequence: n, Generation: 1, Cluster: entry.UUID{0xcc}, Storage: entry.UUID{0xdd}}
	binary.BigEndian.PutUint64(h.SegmentUUID[:], n+1)
	return h
}

// add makes the record of an entry with a body that follows from its ids.
func add(l entry.LedgerID, e entry.EntryID, size int) Record {
	body := make([]byte, size)
	src := rand.New(rand.NewPCG(uint64(l), uint64(e)))
	for i := range body {
		body[i] = byte(src.Uint32())
	}
	return Record{
		Kind: KindEntry, Ledger: l, Entry: e, LAC: e - 1, Nonce: 77, Checksum: entry.Checksum(l, e, body), Body: body,
	}
}

func fence(l entry.LedgerID, term entry.Term) Record {
	return Record{Kind: KindFence, Ledger: l, Entry: entry.NoEntry, LAC: entry.NoEntry, Term: term}
}

// create makes a small segment.
func create(tb testing.TB, fs vfs.FS, name string, h Header) *Writer {
	tb.Helper()
	w, err := Create(fs, name, h, 64<<10, false)
	must(tb, err)
	return w
}

// appendBatch appends and keeps the locations.
func appendBatch(tb testing.TB, w *Writer, durable int64, recs ...Record) []Location {
	tb.Helper()
	locs, err := w.AppendBatch(recs, durable)
	must(tb, err)
	return append([]Location(nil), locs...)
}
