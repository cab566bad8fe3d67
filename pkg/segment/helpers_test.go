package segment

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func closeAll(t testing.TB, closers ...io.Closer) {
	t.Helper()
	for _, c := range closers {
		must(t, c.Close())
	}
}

// fileBytes reads a whole file.
func fileBytes(t testing.TB, fs vfs.FS, name string) []byte {
	t.Helper()
	f, err := fs.OpenRead(name)
	must(t, err)
	size, err := f.Size()
	must(t, err)
	b := make([]byte, size)
	_, err = f.ReadAt(b, 0)
	must(t, err)
	must(t, f.Close())
	return b
}

// putFile makes a file, durable.
func putFile(t testing.TB, fs vfs.FS, name string, b []byte) {
	t.Helper()
	f, err := fs.Create(name)
	must(t, err)
	_, err = f.WriteAt(b, 0)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	must(t, fs.SyncDir("."))
}

// patch changes bytes of a file, durably.
func patch(t testing.TB, fs vfs.FS, name string, off int64, b []byte) {
	t.Helper()
	f, err := fs.Open(name)
	must(t, err)
	_, err = f.WriteAt(b, off)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
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
func create(t testing.TB, fs vfs.FS, name string, h Header) *Writer {
	t.Helper()
	w, err := Create(fs, name, h, 64<<10, false)
	must(t, err)
	return w
}

// appendBatch appends and keeps the locations.
func appendBatch(t testing.TB, w *Writer, durable int64, recs ...Record) []Location {
	t.Helper()
	locs, err := w.AppendBatch(recs, durable)
	must(t, err)
	return append([]Location(nil), locs...)
}
