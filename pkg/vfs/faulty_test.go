package vfs

import (
	"errors"
	"io"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestFaultySyncs(t *testing.T) {
	t.Parallel()
	m := NewMem()
	f := NewFaulty(m)
	rule := f.Add(Rule{Op: OpSync, Path: "*.seg", After: 1, Times: 1, Err: syscall.EIO, LoseUnsynced: true})
	other := write(t, f, "other", []byte("x"))
	must(t, other.Sync())
	file := write(t, f, "a.seg", []byte("one"))
	must(t, m.SyncDir("."))
	must(t, file.Sync())
	_, err := file.WriteAt([]byte("two"), 0)
	must(t, err)
	wantErr(t, file.Datasync(), syscall.EIO)
	must(t, file.Datasync()) // says that all is well
	if got := read(t, f, "a.seg"); string(got) != "two" {
		t.Errorf("memory shows %q", got)
	}
	must(t, file.DropCache())
	if got := read(t, f, "a.seg"); string(got) != "one" {
		t.Errorf("the disk holds %q", got)
	}
	m.Crash(nil)
	if got := read(t, f, "a.seg"); string(got) != "one" {
		t.Errorf("after the crash: %q", got)
	}
	if rule.Hits() != 1 || f.Calls(OpSync) != 4 {
		t.Errorf("%d hits, %d syncs", rule.Hits(), f.Calls(OpSync))
	}
}

func TestFaultyWrites(t *testing.T) {
	t.Parallel()
	f := NewFaulty(NewMem())
	file := write(t, f, "f", nil)
	full := f.Add(Rule{Op: OpWrite, AfterBytes: 10})
	_, err := file.WriteAt(fill('a', 8), 0)
	must(t, err)
	n, err := file.WriteAt(fill('b', 8), 8)
	wantErr(t, err, syscall.ENOSPC)
	if n != 2 || string(read(t, f, "f")) != "aaaaaaaabb" {
		t.Errorf("%d bytes got through: %q", n, read(t, f, "f"))
	}
	full.Remove()
	f.Add(Rule{Op: OpWrite, Short: 3, Times: 1})
	n, err = file.WriteAt(fill('c', 8), 0)
	wantErr(t, err, io.ErrShortWrite)
	if n != 3 || string(read(t, f, "f")) != "cccaaaaabb" {
		t.Errorf("%d bytes got through: %q", n, read(t, f, "f"))
	}
	_, err = file.WriteAt(fill('d', 10), 0)
	must(t, err)
}

func TestFaultyReads(t *testing.T) {
	t.Parallel()
	f := NewFaulty(NewMem())
	file := write(t, f, "f", []byte("hello"))
	f.Add(Rule{Op: OpRead, Times: 1, Flips: []Flip{{Offset: 1, Mask: 0x20}, {Offset: 99, Mask: 1}}})
	b := make([]byte, 4)
	_, err := file.ReadAt(b, 1)
	must(t, err)
	if string(b) != "Ello" {
		t.Errorf("got %q", b)
	}
	_, err = file.ReadAt(b, 1)
	must(t, err)
	if string(b) != "ello" {
		t.Errorf("got %q", b)
	}
}

func TestFaultyNames(t *testing.T) {
	t.Parallel()
	f := NewFaulty(NewMem())
	boom := errors.New("boom")
	must(t, write(t, f, "a", nil).Close())
	for _, op := range []Op{
		OpCreate, OpOpen, OpRename, OpRemove, OpMkdir, OpList, OpStat, OpSyncDir, OpUsage, OpLock,
	} {
		f.Add(Rule{Op: op, Err: boom})
	}
	_, err := f.Create("b")
	wantErr(t, err, boom)
	_, err = f.OpenRead("a")
	wantErr(t, err, boom)
	wantErr(t, f.Rename("a", "b"), boom)
	wantErr(t, f.Remove("a"), boom)
	wantErr(t, f.MkdirAll("d"), boom)
	wantErr(t, f.SyncDir("."), boom)
	_, err = f.List(".")
	wantErr(t, err, boom)
	_, err = f.Stat("a")
	wantErr(t, err, boom)
	_, err = f.Usage(".")
	wantErr(t, err, boom)
	_, err = f.Lock("l")
	wantErr(t, err, boom)
}

// TestGateHoldsASync holds one sync while others pass, which is how overlapping syncs are put in any order.
func TestGateHoldsASync(t *testing.T) {
	t.Parallel()
	f := NewFaulty(NewMem())
	file := write(t, f, "f", []byte("x"))
	gate := NewGate()
	f.Add(Rule{Op: OpSync, Times: 1, Gate: gate})
	held := make(chan error)
	go func() { held <- file.Sync() }()
	<-gate.Arrived()
	must(t, file.Sync())
	select {
	case err := <-held:
		t.Fatalf("the gate is closed, yet the sync returned %v", err)
	default:
	}
	gate.Open()
	must(t, <-held)
}

func TestDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := NewFaulty(NewMem())
		file := write(t, f, "f", []byte("x"))
		f.Add(Rule{Op: OpSync, Delay: time.Minute})
		start := time.Now()
		must(t, file.Sync())
		if got := time.Since(start); got != time.Minute {
			t.Errorf("took %v", got)
		}
	})
}

// A kernel tells each open file once of a write-back that failed; one that is opened afterwards learns nothing.
func TestFailedSyncIsToldToEachOpenFile(t *testing.T) {
	t.Parallel()
	f := NewFaulty(NewMem())
	a, err := f.Create("/x")
	must(t, err)
	b, err := f.Open("/x")
	must(t, err)
	_, err = a.WriteAt([]byte("abc"), 0)
	must(t, err)
	f.Add(Rule{Op: OpSync, Times: 1, Err: syscall.EIO, LoseUnsynced: true})
	if err := a.Datasync(); !errors.Is(err, syscall.EIO) {
		t.Fatalf("first sync: %v", err)
	}
	late, err := f.Open("/x")
	must(t, err)
	must(t, a.Datasync())
	must(t, late.Datasync())
	if err := b.Sync(); !errors.Is(err, syscall.EIO) {
		t.Fatalf("sync of another open file: %v", err)
	}
	must(t, b.Sync())
}
