package ledgerstore

import (
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// diskWith overrides what the disk says of its usage.
type diskWith struct {
	vfs.FS
	mu    sync.Mutex
	usage vfs.Usage
}

func (d *diskWith) Usage(string) (vfs.Usage, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.usage, nil
}

func (d *diskWith) set(free uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.usage = vfs.Usage{Total: 1000 << 20, Free: free << 20}
}

func TestWatermarks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := &diskWith{FS: vfs.NewMem()}
		disk.set(500)
		s := openStore(t, small(), disk)
		must(t, add(s, 1, 0))
		until := func(want State) {
			t.Helper()
			changed := s.StateChanged()
			time.Sleep(2 * spaceEvery) // of the bubble's clock
			synctest.Wait()
			if got := s.State(); got != want {
				t.Fatalf("state is %v, want %v", got, want)
			}
			select {
			case <-changed:
			default:
				t.Fatal("nobody is told")
			}
		}
		disk.set(80)
		until(ReadOnly)
		must(t, add(s, 1, 1))
		wantCode(t, add(s, 2, 0), bookiewire.ReadOnly)
		must(t, add(s, 3, 0, recoveryAdd(1)))
		must(t, add(s, 4, 0, urgent))

		disk.set(20)
		until(Full)
		wantCode(t, add(s, 1, 2), bookiewire.ReadOnly)
		must(t, add(s, 1, 1))         // stored already
		must(t, add(s, 5, 0, urgent)) // one that is not known here, too
		must(t, add(s, 5, 1, urgent))
		wantCode(t, add(s, 5, 2), bookiewire.ReadOnly) // it is the add that is urgent, not the ledger
		must(t, add(s, 1, 2, recoveryAdd(1)))
		wantCode(t, add(s, 1, 3, urgent), bookiewire.Fenced)
		_, err := fence(s, 9, 1)
		must(t, err)
		must(t, s.DeleteLedger(t.Context(), 3, s.Mark(3)))
		must(t, writeLAC(s, 1, 2))
		wantEntry(t, s, 1, 0, body(1, 0, 100))

		s = reopen(t, s) // it is not stored: a restart sees it for itself
		if got := s.State(); got != Full {
			t.Fatalf("after a restart the state is %v", got)
		}
		disk.set(500)
		until(Writable)
		must(t, add(s, 2, 0))
		if u := s.Usage(); u.Total != 1000<<20 || u.Segments == 0 || u.Live == 0 {
			t.Errorf("usage %+v", u)
		}
		closeStore(t, s)
	})
}

// Between the watermarks, but without room for one more segment, the disk is full already: the state must not go to and
// fro between what the ratio says and what the next roll meets.
func TestNoRoomForASegmentIsFull(t *testing.T) {
	t.Parallel()
	disk := &diskWith{FS: vfs.NewMem()}
	cfg := small()
	cfg.Spares = 0
	disk.usage = vfs.Usage{Total: uint64(cfg.SegmentSize) * 10, Free: uint64(cfg.SegmentSize) - 1}
	s := openStore(t, cfg, disk)
	if got := s.State(); got != Full {
		t.Fatalf("state is %v with less than a segment free", got)
	}
	disk.mu.Lock()
	disk.usage.Free++
	disk.mu.Unlock()
	s.look()
	if got, err := s.measure(); err != nil || got != ReadOnly {
		t.Fatalf("measured %v, %v with a segment free", got, err)
	}
	closeStore(t, s)
}

// The disk has no byte left. Adds are refused, nothing is lost, and what must go on goes on out of the reserve.
func TestB20FenceWorksOnAFullDisk(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	cfg := small()
	cfg.Spares = 5
	s := openStore(t, cfg, fs)
	must(t, s.fillReserve())
	usage := func() uint64 {
		u, err := fs.Usage("/data")
		must(t, err)
		return u.Total - u.Free
	}
	fs.SetCapacity(1 << 30)
	stored := entry.EntryID(120)
	fill(t, s, 1, 0, stored, 100)
	fs.SetCapacity(usage())
	for ; ; stored++ {
		if err := add(s, 1, stored); err != nil {
			wantCode(t, err, bookiewire.ReadOnly)
			break
		}
		if stored > 10000 {
			t.Fatal("the disk is never full")
		}
	}
	if s.State() != Full {
		t.Errorf("state is %v", s.State())
	}
	_, err := fence(s, 1, 1)
	must(t, err)
	// Nothing but fences, until what was left of the active segment is used up: the next one is taken from the reserve for them.
	fenced := entry.LedgerID(1000)
	for segments := len(s.segments.list()); len(s.segments.list()) == segments; fenced++ {
		if fenced > 3000 {
			t.Fatal("the fences find room without end")
		}
		done := make(chan error, 1)
		s.Fence(bookiewire.Fence{Ledger: fenced, Term: 1}, func(_ bookiewire.FenceReply, err error) { done <- err })
		select {
		case err := <-done:
			must(t, err)
		case <-time.After(2 * time.Minute):
			t.Fatalf("a fence waits for space after %d others", fenced-1000)
		}
	}
	_, err = fence(s, 2, 1)
	must(t, err)
	for e := range entry.EntryID(100) { // more than what was left of the active segment
		must(t, add(s, 2, e, recoveryAdd(1)))
	}
	check := func() {
		t.Helper()
		for e := range stored {
			wantEntry(t, s, 1, e, body(1, e, 100))
		}
		for e := range entry.EntryID(100) {
			wantEntry(t, s, 2, e, body(2, e, 100))
		}
		wantCode(t, add(s, 1, stored), bookiewire.Fenced)
		for l := entry.LedgerID(1000); l < fenced; l++ {
			wantCode(t, add(s, l, 0), bookiewire.Fenced)
		}
	}
	check()
	select {
	case err := <-s.Fatal():
		t.Fatalf("a full disk stops the store: %v", err)
	default:
	}
	closeStore(t, s)
	fs.SetCapacity(usage()) // sealing has given some back
	s = openStore(t, cfg, fs)
	check()
	must(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)))
	if compactAll(t, s) <= 0 {
		t.Error("compaction frees nothing on a full disk")
	}
	fs.SetCapacity(0)
	s.look()
	must(t, add(s, 3, 0))
}

// A write that finds no space on the disk, in a file system that does not reserve, is refused and does not count.
func TestNoSpaceForAWrite(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	must(t, s.fillReserve())
	fill(t, s, 1, 0, 10, 100)
	rule := fs.Add(vfs.Rule{Op: vfs.OpWrite, Path: s.segments.list()[0].path, AfterBytes: 60, Times: 1, Err: syscall.ENOSPC})
	wantCode(t, add(s, 1, 10), bookiewire.ReadOnly)
	if rule.Hits() == 0 {
		t.Fatal("no write was failed")
	}
	if s.State() != Full {
		t.Errorf("state is %v", s.State())
	}
	_, err := fence(s, 2, 1)
	must(t, err)
	s.look() // space is back
	must(t, add(s, 1, 10))
	s = reopen(t, s)
	for e := range entry.EntryID(11) {
		wantEntry(t, s, 1, e, body(1, e, 100))
	}
	if l := s.Loss(); l.All || len(l.Ledgers) > 0 {
		t.Errorf("loss %+v", l)
	}
	wantCode(t, add(s, 2, 0), bookiewire.Fenced)
}

// A recovery's write in the same group as one that finds no space goes to the next segment.
func TestNoSpaceForAnUrgentWrite(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	must(t, s.fillReserve())
	fill(t, s, 1, 0, 10, 100)
	rule := fs.Add(vfs.Rule{Op: vfs.OpWrite, Path: s.segments.list()[0].path, Err: syscall.ENOSPC})
	must(t, add(s, 2, 0, recoveryAdd(1)))
	closeStore(t, s)
	rule.Remove()
	s = reopen(t, s)
	wantEntry(t, s, 2, 0, body(2, 0, 100))
	wantEntry(t, s, 1, 9, body(1, 9, 100))
}

// The next segment is written ahead after a second without work, and never while there is some.
func TestNextSegmentIsWrittenAheadWhileIdle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		fs := vfs.NewFaulty(vfs.NewMem())
		cfg := small()
		cfg.SegmentSize = 4 << 20
		s := openStore(t, cfg, fs)
		must(t, s.fillReserve())
		must(t, add(s, 1, 0))
		synctest.Wait()
		for e := entry.EntryID(1); e < 5; e++ { // an entry a second is work
			before := fs.Calls(vfs.OpWrite)
			must(t, add(s, 1, e))
			synctest.Wait()
			time.Sleep(spaceEvery)
			synctest.Wait()
			if n := fs.Calls(vfs.OpWrite) - before; n > 2 { // the entry, and what vouches for it
				t.Fatalf("%d writes while there is work", n)
			}
		}
		time.Sleep(2 * spaceEvery)
		synctest.Wait()
		before := fs.Calls(vfs.OpWrite)
		if p := s.next.Load(); p != nil {
			t.Fatal("the next segment is not written ahead")
		}
		time.Sleep(10 * spaceEvery)
		synctest.Wait()
		if n := fs.Calls(vfs.OpWrite) - before; n > 0 {
			t.Fatalf("%d writes after it was written ahead", n)
		}
		fill(t, s, 1, 5, 6000, 1000) // goes on over it
		s = reopen(t, s)
		for e := entry.EntryID(5); e < 6000; e += 7 {
			wantEntry(t, s, 1, e, body(1, e, 1000))
		}
		closeStore(t, s)
	})
}
