package ledgerstore

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func TestAddReadRestart(t *testing.T) {
	t.Parallel()
	for name, fs := range map[string]vfs.FS{"mem": vfs.NewMem(), "os": vfs.OS()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := small()
			if name == "os" {
				cfg.Dir = t.TempDir() + "/data"
				cfg.LowRatio, cfg.HighRatio = 0.9999, 0.9999 // however full the machine's disk is
			}
			s := openStore(t, cfg, fs)
			for e := range entry.EntryID(300) { // several segments
				must(t, add(s, 1, e))
				must(t, add(s, 2, e*3, withBody(body(2, e*3, 200))))
			}
			check := func() {
				t.Helper()
				for e := range entry.EntryID(300) {
					wantEntry(t, s, 1, e, body(1, e, 100))
					wantEntry(t, s, 2, e*3, body(2, e*3, 200))
				}
				_, err := readOne(s, 1, 300)
				wantCode(t, err, bookiewire.NoEntry)
				_, err = readOne(s, 2, 1)
				wantCode(t, err, bookiewire.NoEntry)
				_, err = readOne(s, 3, 0)
				wantCode(t, err, bookiewire.NoLedger)
				in, ok := s.Ledger(2)
				if !ok || in.Entries != 300 || in.First != 0 || in.Last != 299*3 || in.LAC != 299*3-1 {
					t.Fatalf("ledger 2: %+v", in)
				}
			}
			check()
			waitSealed(s)
			for _, r := range s.table.lookup(1).runs {
				if r.seg.sealed.Load() && r.slots != nil {
					t.Errorf("locations of sealed segment %d are still in memory", r.seg.seq)
				}
			}
			s = reopen(t, s)
			check()
			must(t, add(s, 1, 300))
			s = reopen(t, s)
			wantEntry(t, s, 1, 300, body(1, 300, 100))
		})
	}
}

func TestReadRange(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	fill(t, s, 1, 0, 100, 100)
	must(t, add(s, 1, 105))
	for _, c := range []struct {
		read bookiewire.Read
		want []entry.EntryID
	}{
		{bookiewire.Read{First: 0, Stride: 1, MaxEntries: 5, MaxBytes: 1 << 20}, []entry.EntryID{0, 1, 2, 3, 4}},
		{bookiewire.Read{First: 1, Stride: 3, MaxEntries: 3, MaxBytes: 1 << 20}, []entry.EntryID{1, 4, 7}},
		{bookiewire.Read{First: 90, Stride: 1, MaxEntries: 50, MaxBytes: 350}, []entry.EntryID{90, 91, 92}},
		{bookiewire.Read{First: 90, Stride: 1, MaxEntries: 50, MaxBytes: 1}, []entry.EntryID{90}},
		{bookiewire.Read{First: 98, Stride: 1, MaxEntries: 50, MaxBytes: 1 << 20}, []entry.EntryID{98, 99}},
		{bookiewire.Read{First: 105, Stride: 1, MaxEntries: 50, MaxBytes: 1 << 20}, []entry.EntryID{105}},
	} {
		c.read.Ledger = 1
		reply, err := s.Read(t.Context(), c.read)
		must(t, err)
		var got []entry.EntryID
		for _, e := range reply.Entries {
			got = append(got, e.Entry)
		}
		if !slices.Equal(got, c.want) || reply.LAC != 104 {
			t.Errorf("%+v: entries %v LAC %d, want %v LAC 104", c.read, got, reply.LAC, c.want)
		}
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	out := make(chan error, 1)
	a := newAdd(s, 1, 0, func(err error) { out <- err })
	a.Checksum++
	s.Add(a)
	wantCode(t, <-out, bookiewire.BadChecksum)
	wantCode(t, add(s, 1<<63, 0), bookiewire.BadRequest)
	wantCode(t, add(s, everyLedger, 0), bookiewire.BadRequest)
	wantCode(t, add(s, 1, -1), bookiewire.BadRequest)
	wantCode(t, add(s, 1, 0, withBody(make([]byte, maxBody+1))), bookiewire.BadRequest)
	wantCode(t, add(s, 1, 0, func(a *Add) { a.Term = 1 }), bookiewire.BadRequest)
	_, err := fence(s, 1, 0)
	wantCode(t, err, bookiewire.BadRequest)
	if _, ok := s.Ledger(1); ok {
		t.Error("a refused add has made the ledger known")
	}
	closeStore(t, s)
	wantCode(t, add(s, 1, 0), bookiewire.Unknown)
}

func TestDuplicates(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	must(t, add(s, 1, 0))
	for range 2 {
		must(t, add(s, 1, 0))
		wantCode(t, add(s, 1, 0, withBody([]byte("other"))), bookiewire.BadRequest)
		wantEntry(t, s, 1, 0, body(1, 0, 100))
		if in, _ := s.Ledger(1); in.Entries != 1 && in.Entries != 400 {
			t.Fatalf("%d copies", in.Entries)
		}
		fill(t, s, 1, 1, 400, 100) // into other segments, the first is sealed
		waitSealed(s)
	}
	// A hole within the range of sealed segments is no duplicate.
	must(t, add(s, 2, 0))
	must(t, add(s, 2, 2))
	fill(t, s, 1, 400, 800, 100)
	waitSealed(s)
	must(t, add(s, 2, 1))
	wantEntry(t, s, 2, 1, body(2, 1, 100))
}

// A copy of an entry that is on its way is answered by the sync of the first.
func TestDuplicateWaitsForTheFirstCopysSync(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0))
	gate := vfs.NewGate()
	fs.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Gate: gate})
	answers := make(chan string, 3)
	tell := func(name string) func(error) {
		return func(err error) { answers <- name + " " + codeOf(err).String() }
	}
	s.Add(newAdd(s, 1, 1, tell("first")))
	<-gate.Arrived()
	s.Add(newAdd(s, 1, 1, tell("copy")))
	s.Add(newAdd(s, 1, 1, tell("other"), withBody([]byte("other"))))
	known, _ := s.Admission(1)
	if _, err := readOne(s, 1, 1); !known || codeOf(err) != bookiewire.NoEntry {
		t.Fatalf("an entry that is not durable is readable: %v", err)
	}
	select {
	case a := <-answers:
		t.Fatalf("answered before the sync: %s", a)
	default:
	}
	gate.Open()
	got := []string{<-answers, <-answers, <-answers}
	want := []string{"first " + bookiewire.OK.String(), "copy " + bookiewire.OK.String(), "other " + bookiewire.BadRequest.String()}
	if !slices.Equal(got, want) {
		t.Fatalf("answers %v, want %v", got, want)
	}
}

func TestFence(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	must(t, add(s, 1, 0))
	must(t, add(s, 1, 1))
	r, err := fence(s, 1, 2)
	must(t, err)
	if r.LAC != 0 {
		t.Errorf("fence answers LAC %d, want 0", r.LAC)
	}
	check := func() {
		t.Helper()
		err := add(s, 1, 2)
		wantCode(t, err, bookiewire.Fenced)
		if e := new(bookiewire.Error); !asError(err, &e) || e.Term != 2 {
			t.Fatalf("refusal carries term %d, want 2", e.Term)
		}
		_, err = fence(s, 1, 1)
		wantCode(t, err, bookiewire.Fenced)
		wantCode(t, recoveryRead(s, 1, 0, 1), bookiewire.Fenced)
		wantCode(t, add(s, 1, 2, recoveryAdd(1)), bookiewire.Fenced)
		_, err = fence(s, 1, 2)
		must(t, err)
		must(t, recoveryRead(s, 1, 0, 2))
	}
	check()
	s = reopen(t, s)
	check()
	must(t, add(s, 1, 2, recoveryAdd(2), withLAC(0)))
	wantEntry(t, s, 1, 2, body(1, 2, 100))
	// A recovery's write with a higher term raises it, on a bookie that it has not fenced.
	must(t, add(s, 9, 0, recoveryAdd(3), withLAC(-1)))
	_, err = fence(s, 9, 2)
	wantCode(t, err, bookiewire.Fenced)
	s = reopen(t, s)
	_, err = fence(s, 9, 2)
	wantCode(t, err, bookiewire.Fenced)
	// An unknown ledger becomes known by its fence.
	_, err = fence(s, 5, 1)
	must(t, err)
	wantCode(t, add(s, 5, 0), bookiewire.Fenced)
	_, err = readOne(s, 5, 0)
	wantCode(t, err, bookiewire.NoEntry)
}

// A fence takes its place behind the adds that were accepted before it, and answers with their LAC.
func TestFenceDrainsAdmittedAdds(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0))
	gate := vfs.NewGate()
	fs.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Gate: gate})
	var order []string
	done := make(chan struct{})
	for e := entry.EntryID(1); e < 4; e++ {
		s.Add(newAdd(s, 1, e, func(err error) { order = append(order, "add "+codeOf(err).String()) }))
	}
	s.Fence(bookiewire.Fence{Ledger: 1, Term: 1}, func(r bookiewire.FenceReply, err error) {
		if r.LAC != 2 || err != nil {
			t.Errorf("fence answers LAC %d and %v, want 2", r.LAC, err)
		}
		order = append(order, "fence")
	})
	s.Add(newAdd(s, 1, 4, func(err error) {
		order = append(order, "add "+codeOf(err).String())
		close(done)
	}))
	<-gate.Arrived()
	gate.Open()
	<-done
	ok, fenced := "add "+bookiewire.OK.String(), "add "+bookiewire.Fenced.String()
	if want := []string{ok, ok, ok, "fence", fenced}; !slices.Equal(order, want) {
		t.Fatalf("answers %v, want %v", order, want)
	}
}

func TestLAC(t *testing.T) {
	t.Parallel()
	s := openStore(t, small(), vfs.NewMem())
	wantCode(t, writeLAC(s, 1, 0), bookiewire.NoLedger)
	must(t, add(s, 1, 0))
	must(t, writeLAC(s, 1, 0))
	must(t, writeLAC(s, 1, -1))
	s = reopen(t, s) // a LAC that a reader has seen is not taken back by a restart
	if in, _ := s.Ledger(1); in.LAC != 0 {
		t.Fatalf("LAC %d after restart, want 0", in.LAC)
	}
}

func TestWaitLAC(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, small(), vfs.NewMem())
		wait := func(after entry.EntryID, timeout time.Duration) <-chan entry.EntryID {
			c := make(chan entry.EntryID, 1)
			go func() {
				r, err := s.WaitLAC(t.Context(), bookiewire.WaitLAC{Ledger: 1, After: after, Timeout: timeout})
				if err != nil {
					t.Error(err)
				}
				c <- r.LAC
			}()
			return c
		}
		unknown := wait(-1, time.Hour) // a ledger that does not exist yet
		short := wait(-1, time.Second)
		if lac := <-short; lac != -1 {
			t.Errorf("timeout answers %d, want -1", lac)
		}
		must(t, add(s, 1, 0))
		must(t, writeLAC(s, 1, 0))
		if lac := <-unknown; lac != 0 {
			t.Errorf("woken with %d, want 0", lac)
		}
		if lac := <-wait(-1, time.Hour); lac != 0 {
			t.Errorf("answered %d at once, want 0", lac)
		}
		later := wait(0, time.Hour)
		synctest.Wait()
		_, err := fence(s, 1, 1) // fenced is not closed: it goes on waiting
		must(t, err)
		synctest.Wait()
		select {
		case lac := <-later:
			t.Errorf("woken by a fence with %d", lac)
		default:
		}
		must(t, add(s, 1, 1, recoveryAdd(1), withLAC(1)))
		if lac := <-later; lac != 1 {
			t.Errorf("woken with %d, want 1", lac)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.WaitLAC(ctx, bookiewire.WaitLAC{Ledger: 1, After: 9, Timeout: time.Hour}); err == nil {
			t.Error("an ended context waits on")
		}
		for i := range s.table.shards {
			if n := len(s.table.shards[i].waits); n > 0 {
				t.Errorf("%d waits are left", n)
			}
		}
		closeStore(t, s)
	})
}

func TestFailedSyncStopsTheStore(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0))
	fs.Add(vfs.Rule{Op: vfs.OpSync, Path: "*.seg", Times: 1, Err: errDisk})
	wantCode(t, add(s, 1, 1), bookiewire.Unknown)
	if err := <-s.Fatal(); err == nil {
		t.Error("no reason given")
	}
	wantCode(t, add(s, 1, 2), bookiewire.Unknown)
	_, err := readOne(s, 1, 0)
	wantCode(t, err, bookiewire.Unknown)
	_, err = fence(s, 1, 1)
	wantCode(t, err, bookiewire.Unknown)
	wantCode(t, s.DeleteLedger(t.Context(), 1, s.Mark(1)), bookiewire.Unknown)
	s = reopen(t, s)
	wantEntry(t, s, 1, 0, body(1, 0, 100))
}

func TestFailedWriteStopsTheStore(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	fs.Add(vfs.Rule{Op: vfs.OpWrite, Path: "*.seg", Times: 1, Err: errDisk})
	wantCode(t, add(s, 1, 1), bookiewire.Unknown)
	if err := <-s.Fatal(); err == nil {
		t.Error("no reason given")
	}
	wantCode(t, add(s, 1, 2), bookiewire.Unknown)
}

// What cannot be read is unknown, never absent, and never wrong bytes.
func TestDamageIsUnknown(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	cfg := small()
	cfg.CacheBytes = 1 // nothing from memory
	s := openStore(t, cfg, fs)
	fill(t, s, 1, 0, 10, 100)
	rule := fs.Add(vfs.Rule{Op: vfs.OpRead, Path: "*.seg", Err: errDisk})
	_, err := readOne(s, 1, 3)
	wantCode(t, err, bookiewire.Unknown)
	rule.Remove()
	wantEntry(t, s, 1, 3, body(1, 3, 100))
	var flips []vfs.Flip
	for off := int64(4096); off < 8192; off += 64 {
		flips = append(flips, vfs.Flip{Offset: off, Mask: 1})
	}
	rule = fs.Add(vfs.Rule{Op: vfs.OpRead, Path: "*.seg", Flips: flips})
	_, err = readOne(s, 1, 3)
	wantCode(t, err, bookiewire.Unknown)
	wantCode(t, add(s, 1, 3), bookiewire.Unknown) // it cannot be told whether it is the same
	rule.Remove()
	wantEntry(t, s, 1, 3, body(1, 3, 100))
}

func TestIdentityOfAnother(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0))
	if _, err := Open(t.Context(), small(), fs, quiet, nil); err == nil {
		t.Fatal("opened twice")
	}
	closeStore(t, s)
	cfg := small()
	cfg.Storage = entry.UUID{9}
	if _, err := Open(t.Context(), cfg, fs, quiet, nil); err == nil {
		t.Fatal("opened another's data")
	}
	openStore(t, small(), fs)
}

// A duplicate that a newer recovery sends raises the term all the same, before it is answered and for good: an older
// recovery's write that is still on its way comes too late.
func TestDuplicateOfANewerRecoveryRaisesTheTerm(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, small(), fs)
	must(t, add(s, 1, 0, recoveryAdd(1)))
	must(t, add(s, 1, 0, recoveryAdd(3)))
	wantCode(t, add(s, 1, 1, recoveryAdd(2)), bookiewire.Fenced)
	fill(t, s, 2, 0, 400, 100) // the entry's segment is sealed: the duplicate has to be looked up
	waitSealed(s)
	must(t, add(s, 1, 0, recoveryAdd(4)))
	wantCode(t, add(s, 1, 1, recoveryAdd(3)), bookiewire.Fenced)
	closeStore(t, s)
	s = openStore(t, small(), fs)
	wantCode(t, add(s, 1, 1, recoveryAdd(3)), bookiewire.Fenced)
	must(t, add(s, 1, 1, recoveryAdd(4)))
}
