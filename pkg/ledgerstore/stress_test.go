package ledgerstore

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Writers, readers, fences, deletion and compaction at once, for the race detector; afterwards everything that was
// acknowledged is there, before and after a power cut.
func TestEverythingAtOnce(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	const writers, ledgersEach, entries = 6, 5, 60
	name := func(w, i int) entry.LedgerID { return entry.LedgerID(1 + w*ledgersEach + i) }
	stop := make(chan struct{})
	var busy, background sync.WaitGroup
	background.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := s.CompactOnce(t.Context()); err != nil {
				t.Errorf("compact: %v", err)
				return
			}
			s.Ledgers(func(LedgerInfo) bool { return true })
			s.look()
		}
	})
	for w := range writers {
		busy.Go(func() {
			for i := range ledgersEach {
				l := name(w, i)
				fill(t, s, l, 0, entries, 200)
				for e := range entry.EntryID(entries) {
					if got, err := readOne(s, l, e); err != nil || !bytes.Equal(got, body(l, e, 200)) {
						t.Errorf("entry %d:%d: %v", l, e, err)
					}
				}
				if _, err := fence(s, l, 1); err != nil {
					t.Errorf("fence %d: %v", l, err)
				}
				if i%2 == 1 {
					must(t, s.DeleteLedger(t.Context(), name(w, i-1), s.Mark(name(w, i-1))))
				}
			}
		})
	}
	busy.Wait()
	close(stop)
	background.Wait()
	check := func() {
		t.Helper()
		for w := range writers {
			for i := range ledgersEach {
				l := name(w, i)
				if i%2 == 0 && i+1 < ledgersEach {
					_, err := readOne(s, l, 0)
					wantCode(t, err, bookiewire.NoLedger)
					continue
				}
				for e := range entry.EntryID(entries) {
					wantEntry(t, s, l, e, body(l, e, 200))
				}
				wantCode(t, add(s, l, entries), bookiewire.Fenced)
			}
		}
	}
	check()
	fs.CutPowerAfter(0)
	if err := s.Close(); err != nil && !errors.Is(err, vfs.ErrPowerCut) {
		t.Fatal(err)
	}
	fs.Crash(newRand(1))
	fs.CutPowerAfter(-1)
	s = openStore(t, small(), fs)
	check()
}

// Close answers what was accepted, whatever it waits for.
func TestCloseAnswersEverything(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	gate := vfs.NewGate()
	fs.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Gate: gate})
	var answers sync.WaitGroup
	for e := range entry.EntryID(50) {
		answers.Add(1)
		s.Add(newAdd(s, 1, e, func(err error) {
			if err != nil {
				t.Errorf("entry %d: %v", e, err)
			}
			answers.Done()
		}))
	}
	<-gate.Arrived()
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	gate.Open()
	answers.Wait()
	must(t, <-closed)
	must(t, s.Close())
}
