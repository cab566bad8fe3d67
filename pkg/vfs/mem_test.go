package vfs

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
)

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

// write makes a file with the given bytes, unsynced.
func write(tb testing.TB, fsys FS, name string, b []byte) File {
	tb.Helper()
	f, err := fsys.Create(name)
	must(tb, err)
	_, err = f.WriteAt(b, 0)
	must(tb, err)
	return f
}

func read(tb testing.TB, fsys FS, name string) []byte {
	tb.Helper()
	f, err := fsys.OpenRead(name)
	must(tb, err)
	size, err := f.Size()
	must(tb, err)
	b := make([]byte, size)
	if size > 0 {
		_, err = f.ReadAt(b, 0)
		must(tb, err)
	}
	must(tb, f.Close())
	return b
}

func fill(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }

func TestCrashKeepsWhatWasSynced(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		m := NewMem()
		f := write(t, m, "f", fill('a', 2000))
		must(t, f.Datasync())
		must(t, m.SyncDir("."))
		_, err := f.WriteAt(fill('b', 2000), 2000)
		must(t, err)
		m.Crash(newRand(seed))
		if got := read(t, m, "f"); len(got) < 2000 || !bytes.Equal(got[:2000], fill('a', 2000)) {
			t.Fatalf("seed %d: synced bytes are gone", seed)
		}
		_, err = f.WriteAt([]byte("x"), 0)
		wantErr(t, err, ErrPowerCut)
	}
}

func TestCrashLosesNamesThatWereNotSynced(t *testing.T) {
	t.Parallel()
	m := NewMem()
	f := write(t, m, "f", []byte("x"))
	must(t, f.Sync())
	m.Crash(nil)
	_, err := m.Stat("f")
	wantErr(t, err, fs.ErrNotExist)

	must(t, m.MkdirAll("d/e"))
	must(t, m.SyncDir("d"))
	write(t, m, "d/e/f", nil)
	must(t, m.SyncDir("d/e"))
	m.Crash(nil)
	if _, err = m.Stat("d/e/f"); err == nil {
		t.Error("a file survived whose directory's own name was never synced")
	}
}

// TestCrashStates looks for each state that a power cut may leave, and for none that it may not.
func TestCrashStates(t *testing.T) {
	t.Parallel()
	seen := make(map[string]bool)
	for seed := range uint64(2000) {
		m := NewMem()
		f := write(t, m, "f", fill('0', 2*SectorSize))
		must(t, f.Sync())
		must(t, m.SyncDir("."))
		for _, b := range []byte("12") { // two writes over both sectors
			_, err := f.WriteAt(fill(b, 2*SectorSize), 0)
			must(t, err)
		}
		m.Crash(newRand(seed))
		got := read(t, m, "f")
		if len(got) != 2*SectorSize {
			t.Fatalf("seed %d: %d bytes", seed, len(got))
		}
		for s := range 2 {
			sector := got[s*SectorSize : (s+1)*SectorSize]
			if !bytes.Equal(sector, fill(sector[0], SectorSize)) {
				t.Fatalf("seed %d: sector %d is torn", seed, s)
			}
		}
		seen[string([]byte{got[0], got[SectorSize]})] = true
	}
	for _, state := range []string{"00", "01", "02", "10", "11", "12", "20", "21", "22"} {
		if !seen[state] {
			t.Errorf("never saw %s", state)
		}
		delete(seen, state)
	}
	if len(seen) > 0 {
		t.Errorf("saw %v", seen)
	}
}

func TestCrashOfSizes(t *testing.T) {
	t.Parallel()
	seen := make(map[int]bool)
	for seed := range uint64(500) {
		m := NewMem()
		f := write(t, m, "f", fill('a', 1000))
		must(t, f.Sync())
		must(t, m.SyncDir("."))
		must(t, f.Truncate(100))
		must(t, f.Allocate(0, 1500))
		m.Crash(newRand(seed))
		got := read(t, m, "f")
		seen[len(got)] = true
		if len(got) == 1500 && !bytes.Equal(got[100:], make([]byte, 1400)) {
			t.Fatalf("seed %d: what was cut off came back", seed)
		}
	}
	if len(seen) != 3 || !seen[1000] || !seen[100] || !seen[1500] {
		t.Errorf("saw sizes %v", seen)
	}
}

func TestCrashOfRenames(t *testing.T) {
	t.Parallel()
	seen := make(map[string]bool)
	for seed := range uint64(500) {
		m := NewMem()
		f := write(t, m, "a", []byte("x"))
		must(t, f.Sync())
		must(t, m.SyncDir("."))
		must(t, m.Rename("a", "b"))
		must(t, m.Rename("b", "c"))
		m.Crash(newRand(seed))
		names, err := m.List(".")
		must(t, err)
		if len(names) != 1 {
			t.Fatalf("seed %d: one file is called %v", seed, names)
		}
		seen[names[0]] = true
	}
	if len(seen) != 3 {
		t.Errorf("saw %v", seen)
	}
}

func TestSyncDirCoversEarlierChanges(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		m := NewMem()
		must(t, m.MkdirAll("d"))
		must(t, m.SyncDir("."))
		f := write(t, m, "a", []byte("x"))
		must(t, f.Sync())
		must(t, m.Rename("a", "d/b"))
		must(t, m.SyncDir("d"))
		m.Crash(newRand(seed))
		if got := read(t, m, "d/b"); string(got) != "x" {
			t.Fatalf("seed %d: %q", seed, got)
		}
		_, err := m.Stat("a")
		wantErr(t, err, fs.ErrNotExist)
	}
}

func TestCrashIsSeeded(t *testing.T) {
	t.Parallel()
	run := func() string {
		m := NewMem()
		for _, name := range []string{"a", "b", "c", "d"} {
			f := write(t, m, name, fill('x', 5000))
			_, err := f.WriteAt(fill('y', 3000), 700)
			must(t, err)
		}
		c := m.Clone()
		c.Crash(newRand(7))
		m.Crash(newRand(7))
		if m.String() != c.String() {
			t.Fatal("a clone crashes otherwise")
		}
		var out strings.Builder
		out.WriteString(m.String())
		names, err := m.List(".")
		must(t, err)
		for _, name := range names {
			out.Write(read(t, m, name))
		}
		return out.String()
	}
	first, second := run(), run()
	if first != second {
		t.Error("one seed, two outcomes")
	}
}

func TestCutPower(t *testing.T) {
	t.Parallel()
	m := NewMem()
	f := write(t, m, "f", []byte("a"))
	must(t, f.Sync())
	must(t, m.SyncDir("."))
	if got := m.Changes(); got != 4 {
		t.Errorf("%d changes, want 4", got)
	}
	m.CutPowerAfter(1)
	_, err := f.WriteAt([]byte("b"), 0)
	must(t, err)
	wantErr(t, f.Sync(), ErrPowerCut)
	_, err = m.Stat("f")
	wantErr(t, err, ErrPowerCut)
	m.Crash(nil)
	if got := read(t, m, "f"); string(got) != "a" {
		t.Errorf("got %q", got)
	}
}

func TestCapacity(t *testing.T) {
	t.Parallel()
	m := NewMem()
	m.SetCapacity(1000)
	f := write(t, m, "f", fill('a', 600))
	n, err := f.WriteAt(fill('b', 600), 500)
	wantErr(t, err, syscall.ENOSPC)
	if n != 100 {
		t.Errorf("wrote %d bytes before the disk was full, want the 100 that fit", n)
	}
	wantErr(t, f.Allocate(0, 1001), syscall.ENOSPC)
	must(t, f.Allocate(0, 1000))
	u, err := m.Usage(".")
	must(t, err)
	if u.Total != 1000 || u.Free != 0 {
		t.Errorf("usage %+v", u)
	}
	must(t, m.Remove("f"))
	u, err = m.Usage(".")
	must(t, err)
	if u.Free != 1000 {
		t.Errorf("usage after removal %+v", u)
	}
	must(t, f.Truncate(2000)) // a file without a name counts no more
	m.Occupy(400)
	g := write(t, m, "g", fill('c', 500))
	wantErr(t, g.Truncate(601), syscall.ENOSPC)
	must(t, g.Truncate(600))
	m.Occupy(500) // more than there is room for
	u, err = m.Clone().Usage(".")
	must(t, err)
	if u.Total != 1000 || u.Free != 0 {
		t.Errorf("usage beside others %+v", u)
	}
}

func TestRot(t *testing.T) {
	t.Parallel()
	m := NewMem()
	f, err := m.Create("f")
	if err != nil {
		t.Fatal(err)
	}
	write := func(s string, off int64) {
		t.Helper()
		if _, err := f.WriteAt([]byte(s), off); err != nil {
			t.Fatal(err)
		}
	}
	sync := func() {
		t.Helper()
		if err := errors.Join(f.Sync(), m.SyncDir(".")); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when, want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := f.ReadAt(b, 0); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v; want %q", when, b, err, want)
		}
	}
	write("aaaa", 0)
	sync()
	write("bb", 2)
	if err := m.Rot("f", []Flip{{Offset: 1, Mask: 'a' ^ 'x'}, {Offset: 2, Mask: 'a' ^ 'x'}, {Offset: 9, Mask: 1}}); err != nil {
		t.Fatal(err)
	}
	check("with a write on its way", "axbb")
	lost := m.Clone()
	lost.Crash(nil)
	g, err := lost.OpenRead("f")
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := g.ReadAt(b, 0); err != nil || string(b) != "axxa" {
		t.Errorf("after the write was lost: %q, %v", b, err)
	}
	sync()
	check("synced", "axbb")
	write("a", 1)
	sync()
	check("written anew", "aabb")
	if err := m.Rot("g", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a file that is not there: %v", err)
	}
}
