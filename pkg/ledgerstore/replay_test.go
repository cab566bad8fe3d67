package ledgerstore

import (
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// killedStore leaves a directory as a process does that is killed while it writes: four entries of ledgers 1 and 2 are acknowledged,
// one by one; e4 of ledger 2 is written from offset tail to end of the file, and not acknowledged.
func killedStore(tb testing.TB) (fs *vfs.Mem, path string, tail, end int64) {
	tb.Helper()
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	s := openStore(tb, small(), faulty)
	for e := range entry.EntryID(4) {
		must(tb, add(s, 1, e))
		must(tb, add(s, 2, e))
	}
	path, tail = s.core.active.path, s.core.active.size.Load()
	gate := vfs.NewGate()
	faulty.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Gate: gate})
	done := make(chan error, 1)
	s.Add(newAdd(s, 2, 4, func(err error) { done <- err }))
	<-gate.Arrived()
	fs = mem.Clone()
	gate.Open()
	must(tb, <-done)
	end = s.core.active.size.Load()
	closeStore(tb, s)
	return fs, path, tail, end
}

// B27, BOOKKEEPER-166: a process is killed while it writes, and what it wrote last ends within the prefix that tells its length, or
// anywhere else. That is no loss, and does not get in the way of what was acknowledged before, or of what comes after.
func TestB27TornTailDoesNotBlockReplay(t *testing.T) {
	t.Parallel()
	killed, path, tail, end := killedStore(t)
	for cut := tail; cut < end; cut++ {
		fs := killed.Clone()
		f, err := fs.Open(path)
		must(t, err)
		_, err = f.WriteAt(make([]byte, end-cut), cut)
		must(t, err)
		must(t, f.Sync())
		must(t, f.Close())
		s := openStore(t, small(), fs)
		for range 2 {
			if l := s.Loss(); l.All || len(l.Ledgers) > 0 {
				t.Fatalf("cut at %d of %d … %d: loss %+v", cut, tail, end, l)
			}
			for e := range entry.EntryID(4) {
				wantEntry(t, s, 1, e, body(1, e, 100))
				wantEntry(t, s, 2, e, body(2, e, 100))
			}
			s = reopen(t, s)
		}
		_, err = readOne(s, 2, 4)
		wantCode(t, err, bookiewire.NoEntry)
		must(t, add(s, 2, 4))
		wantEntry(t, s, 2, 4, body(2, 4, 100))
		closeStore(t, s)
	}
}

// B27, #2178: damage where entries were acknowledged is not taken for the end of the log. The entries behind it are there, the store
// knows that it has lost something, and denies nothing that it may have had.
func TestB27CorruptionIsNotSwallowed(t *testing.T) {
	t.Parallel()
	killed, _, _, _ := killedStore(t)
	path, record := place(t, killed.Clone(), 1, 1)
	const header = 48 // of the batch, before its only record
	for at := range int64(header) {
		t.Run(fmt.Sprint("byte ", at), func(t *testing.T) {
			t.Parallel()
			fs := killed.Clone()
			damage(t, fs, path, record-header+at)
			s := openStore(t, small(), fs)
			for range 2 {
				if !s.Loss().All {
					t.Fatal("the loss is not noticed")
				}
				for e := range entry.EntryID(4) {
					wantEntry(t, s, 2, e, body(2, e, 100))
					if e != 1 {
						wantEntry(t, s, 1, e, body(1, e, 100))
					}
				}
				for _, l := range []entry.LedgerID{1, 2, 77} {
					_, err := readOne(s, l, 9)
					wantCode(t, err, bookiewire.Unknown)
					wantCode(t, recoveryRead(s, l, 9, 5), bookiewire.Unknown)
				}
				_, err := readOne(s, 1, 1)
				wantCode(t, err, bookiewire.Unknown)
				s = reopen(t, s)
			}
		})
	}
}
