package ledgerstore

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func benchConfig(b *testing.B) Config {
	b.Helper()
	return Config{
		Dir: b.TempDir() + "/data", Cluster: testCluster, Storage: testStorage, Fresh: true, CompactBytesPerSecond: -1,
		LowRatio: 0.999, HighRatio: 0.9999, // whatever the disk of the machine has left
	}
}

// BenchmarkGroupCommit adds entries of 1 KiB to a real directory, each adder with a window of its own, and waits for
// each to be durable. With one adder and a window of one it is the latency of a lone commit.
func BenchmarkGroupCommit(b *testing.B) {
	for _, c := range []struct{ adders, window int }{{1, 1}, {16, 1}, {16, 64}, {64, 256}} {
		b.Run(fmt.Sprintf("adders=%d/window=%d", c.adders, c.window), func(b *testing.B) {
			s := openStore(b, benchConfig(b), vfs.OS())
			payload := make([]byte, 1024)
			var left atomic.Int64
			left.Store(int64(b.N))
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			b.ResetTimer()
			var wg sync.WaitGroup
			for l := range c.adders {
				wg.Go(func() { addWindow(b, s, entry.LedgerID(l+1), payload, c.window, &left) })
			}
			wg.Wait()
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "entries/s")
		})
	}
}

// addWindow keeps up to window adds of one ledger on their way, reusing them as a connection does.
func addWindow(b *testing.B, s *Store, l entry.LedgerID, payload []byte, window int, left *atomic.Int64) {
	b.Helper()
	idle := make(chan *Add, window)
	for range window {
		a := &Add{}
		a.Done = func(err error) {
			if err != nil {
				b.Error(err)
			}
			idle <- a
		}
		idle <- a
	}
	_, generation := s.Admission(l)
	for e := entry.EntryID(0); left.Add(-1) >= 0; e++ {
		a := <-idle
		a.Generation = generation
		a.Add = bookiewire.Add{Ledger: l, Entry: e, LAC: e - 1, Body: payload, Checksum: entry.Checksum(l, e, payload)}
		s.Add(a)
	}
	for range window {
		<-idle
	}
}

// BenchmarkTailRead reads what was written last, from memory.
func BenchmarkTailRead(b *testing.B) {
	s := openStore(b, benchConfig(b), vfs.OS())
	fill(b, s, 1, 0, 1000, 1024)
	b.SetBytes(1024)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, err := readOne(s, 1, entry.EntryID(i%1000)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSealedRead reads from sealed segments through their footers.
func BenchmarkSealedRead(b *testing.B) {
	cfg := benchConfig(b)
	cfg.CacheBytes = 1
	s := openStore(b, cfg, vfs.OS())
	fill(b, s, 1, 0, 20000, 1024)
	s = reopen(b, s)
	b.SetBytes(1024)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, err := readOne(s, 1, entry.EntryID(i*7%20000)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRestart opens a directory with four unsealed segments of 256 MiB, full of entries of 1 KiB, as a killed
// process leaves it. The figure to look at is s/open.
func BenchmarkRestart(b *testing.B) {
	for _, size := range []int{100, 1024} {
		b.Run(fmt.Sprintf("entry=%dB", size), func(b *testing.B) { benchRestart(b, size) })
	}
}

func benchRestart(b *testing.B, size int) {
	b.Helper()
	var total time.Duration
	for range b.N {
		b.StopTimer()
		cfg := benchConfig(b)
		writeUnsealed(b, cfg, 4, size)
		b.StartTimer()
		began := time.Now()
		s, err := Open(b.Context(), cfg, vfs.OS(), quiet, nil)
		total += time.Since(began)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		wantEntry(b, s, 1, 0, body(1, 0, size))
		closeStore(b, s)
		b.StartTimer()
	}
	b.ReportMetric(total.Seconds()/float64(b.N), "s/open")
}

// writeUnsealed fills n segments without sealing them.
func writeUnsealed(b *testing.B, cfg Config, n, size int) {
	b.Helper()
	cfg, err := cfg.withDefaults()
	if err != nil {
		b.Fatal(err)
	}
	s := openStore(b, cfg, vfs.OS())
	must(b, add(s, 1, 0, withBody(body(1, 0, size))))
	closeStore(b, s)
	m, err := readManifest(s.fs, cfg.Dir)
	must(b, err)
	s.segments.manifest = m
	e := entry.EntryID(1)
	payload := make([]byte, size)
	for range n {
		seg, err := s.prepare(ordinary)
		must(b, err)
		w := seg.handle.writer
		for {
			recs := benchRecords(e, payload)
			if !w.Room(len(recs), int64(len(recs)*size)) {
				break
			}
			_, err := w.AppendBatch(recs, w.Size())
			must(b, err)
			e += entry.EntryID(len(recs))
		}
		must(b, w.Sync())
		seg.handle.close()
	}
}
