package segment

import (
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// BenchmarkAppendSync appends a group of entries and syncs it, as a bookie under load does. An operation is one entry.
func BenchmarkAppendSync(b *testing.B) {
	for _, shape := range []struct{ size, group int }{{1 << 10, 1}, {1 << 10, 64}, {64 << 10, 16}} {
		for _, blocks := range []string{"new", "ahead", "reused"} {
			b.Run(fmt.Sprintf("entry=%d/group=%d/blocks=%s", shape.size, shape.group, blocks), func(b *testing.B) {
				benchAppendSync(b, shape.size, shape.group, blocks)
			})
		}
	}
}

func benchAppendSync(b *testing.B, size, group int, blocks string) {
	b.Helper()
	reuse := blocks == "reused"
	const segmentSize = 256 << 20
	fs, dir := vfs.OS(), b.TempDir()
	name := filepath.Join(dir, "segment")
	var w *Writer
	n := uint64(0)
	next := func() {
		if w != nil {
			closeAll(b, w)
			must(b, Retire(fs, name, name))
		}
		if w != nil && !reuse {
			must(b, fs.Remove(name))
			w = nil
		}
		n++
		var err error
		w, err = Create(fs, name, header(n), segmentSize, w != nil)
		must(b, err)
		for off, done := int64(0), blocks != "ahead"; !done; {
			off, done, err = w.Prewrite(off)
			must(b, err)
		}
	}
	recs := make([]Record, group)
	for i := range recs {
		recs[i] = add(entry.LedgerID(1+i%4), 0, size)
	}
	next()
	if reuse { // write the blocks once
		for w.Room(group, int64(group*size)) {
			appendBatch(b, w, w.Size(), recs...)
		}
		must(b, w.Sync())
		next()
	}
	durable := w.Size()
	id := entry.EntryID(0)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	for done := 0; done < b.N; done += group {
		if !w.Room(group, int64(group*size)) {
			b.StopTimer()
			next()
			durable = w.Size()
			b.StartTimer()
		}
		for i := range recs {
			recs[i].Entry = id // the checksum is not looked at on the way in
			id++
		}
		_, err := w.AppendBatch(recs, durable)
		must(b, err)
		must(b, w.Sync())
		durable = w.Size()
	}
	b.StopTimer()
	closeAll(b, w)
}

// BenchmarkRecover recovers four unsealed segments of 256 MiB at once, as a bookie does that was killed under load.
func BenchmarkRecover(b *testing.B) {
	for _, size := range []int{100, 1 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("entry=%d", size), func(b *testing.B) { benchRecover(b, size) })
	}
}

func benchRecover(b *testing.B, size int) {
	b.Helper()
	const segments, segmentSize = 4, 256 << 20
	fs, dir := vfs.OS(), b.TempDir()
	group := max(1, (256<<10)/size)
	recs := make([]Record, group)
	for i := range recs {
		recs[i] = add(entry.LedgerID(1+i%100), 0, size)
	}
	names := make([]string, segments)
	for n := range names {
		names[n] = filepath.Join(dir, strconv.Itoa(n))
		w, err := Create(fs, names[n], header(uint64(n)), segmentSize, false)
		must(b, err)
		id := entry.EntryID(0)
		for w.Room(group, int64(group*size)) {
			for i := range recs {
				recs[i].Entry = id
				id++
			}
			appendBatch(b, w, w.Size(), recs...)
		}
		must(b, w.Sync())
		must(b, w.Close())
	}
	b.SetBytes(segments * segmentSize)
	b.ReportAllocs()
	for b.Loop() {
		var wg sync.WaitGroup
		for _, name := range names {
			wg.Go(func() {
				if _, err := Recover(fs, name, 0); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}
}
