package segment

import (
	"errors"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func TestSmoke(t *testing.T) {
	dir := t.TempDir()
	p := dir + "/1.seg"
	w, err := Create(vfs.OS(), p, Header{SegmentUUID: entry.UUID{1}, Sequence: 1, Generation: 1}, 1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		b := []byte("hello")
		locs, err := w.AppendBatch([]Record{{Kind: KindEntry, Ledger: 7, Entry: entry.EntryID(i), LAC: -1, Checksum: entry.Checksum(7, entry.EntryID(i), b), Body: b}}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if r, err := w.ReadAt(locs[0]); err != nil || string(r.Body) != "hello" {
			t.Fatal(r, err)
		}
	}
	if err := w.Sync(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(vfs.OS(), p); !errors.Is(err, ErrUnsealed) {
		t.Fatal(err)
	}
	rec, err := Recover(vfs.OS(), p, 0)
	if err != nil || rec.Entries() != 100 || rec.Torn {
		t.Fatal(rec, err)
	}
	if err := w.Seal(); err != nil {
		t.Fatal(err)
	}
	r, err := Open(vfs.OS(), p)
	if err != nil {
		t.Fatal(err)
	}
	loc, ok, err := r.Find(7, 50)
	if !ok || err != nil {
		t.Fatal(err)
	}
	if x, err := r.ReadAt(loc); err != nil || x.Entry != 50 {
		t.Fatal(x, err)
	}
	n := 0
	if err := r.Each(func(Record, Location) error { n++; return nil }); err != nil || n != 100 {
		t.Fatal(n, err)
	}
}
