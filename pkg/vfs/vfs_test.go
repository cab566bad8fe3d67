package vfs

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"testing"
)

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func wantErr(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("got %v, want %v", err, want)
	}
}

// TestFileSystemsAgree runs one story on each implementation: callers must not be able to tell them apart.
func TestFileSystemsAgree(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(*testing.T) (FS, string){
		"os":     func(t *testing.T) (FS, string) { t.Helper(); return OS(), t.TempDir() },
		"mem":    func(t *testing.T) (FS, string) { t.Helper(); return NewMem(), "/" },
		"faulty": func(t *testing.T) (FS, string) { t.Helper(); return NewFaulty(NewMem()), "." },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fsys, dir := open(t)
			t.Run("names", func(t *testing.T) { storyNames(t, fsys, dir) })
			t.Run("bytes", func(t *testing.T) { storyBytes(t, fsys, dir) })
			t.Run("lock", func(t *testing.T) { storyLock(t, fsys, dir) })
		})
	}
}

func storyNames(t *testing.T, fsys FS, dir string) {
	t.Helper()
	a, b, sub := path.Join(dir, "a"), path.Join(dir, "b"), path.Join(dir, "x/y")
	_, err := fsys.Open(a)
	wantErr(t, err, fs.ErrNotExist)
	f, err := fsys.Create(a)
	must(t, err)
	must(t, f.Close())
	wantErr(t, f.Close(), fs.ErrClosed)
	_, err = fsys.Create(a)
	wantErr(t, err, fs.ErrExist)
	_, err = fsys.Create(path.Join(sub, "c"))
	wantErr(t, err, fs.ErrNotExist)
	must(t, fsys.MkdirAll(sub))
	must(t, fsys.MkdirAll(sub))
	f, err = fsys.Create(path.Join(sub, "c"))
	must(t, err)
	must(t, f.Close())
	if fsys.Remove(sub) == nil {
		t.Error("removed a directory that is not empty")
	}
	must(t, fsys.Rename(a, b))
	_, err = fsys.Stat(a)
	wantErr(t, err, fs.ErrNotExist)
	wantErr(t, fsys.Rename(a, b), fs.ErrNotExist)
	names, err := fsys.List(dir)
	must(t, err)
	if want := []string{"b", "x"}; !slices.Equal(names, want) {
		t.Errorf("list: %v, want %v", names, want)
	}
	info, err := fsys.Stat(path.Join(dir, "x"))
	must(t, err)
	if !info.Dir {
		t.Error("x is no directory")
	}
	must(t, fsys.SyncDir(dir))
	wantErr(t, fsys.SyncDir(path.Join(dir, "none")), fs.ErrNotExist)
	must(t, fsys.Remove(b))
	wantErr(t, fsys.Remove(b), fs.ErrNotExist)
	u, err := fsys.Usage(dir)
	must(t, err)
	if u.Total == 0 || u.Free > u.Total {
		t.Errorf("usage: %+v", u)
	}
}

func storyBytes(t *testing.T, fsys FS, dir string) {
	t.Helper()
	name := path.Join(dir, "bytes")
	f, err := fsys.Create(name)
	must(t, err)
	must(t, f.Allocate(0, 3000))
	if size, err := f.Size(); err != nil || size != 3000 {
		t.Fatalf("size %d after allocating 3000: %v", size, err)
	}
	_, err = f.WriteAt([]byte("hello"), 1000)
	must(t, err)
	must(t, f.Allocate(0, 2000)) // shrinks nothing, changes nothing
	must(t, f.Datasync())
	_, err = f.WriteAt([]byte("world"), 4000)
	must(t, err)
	must(t, f.Sync())
	must(t, f.DropCache())
	got := make([]byte, 4005)
	_, err = f.ReadAt(got, 0)
	must(t, err)
	want := make([]byte, 4005)
	copy(want[1000:], "hello")
	copy(want[4000:], "world")
	if !bytes.Equal(got, want) {
		t.Error("bytes differ")
	}
	n, err := f.ReadAt(make([]byte, 10), 4000)
	if n != 5 || !errors.Is(err, io.EOF) {
		t.Errorf("read past the end: %d, %v", n, err)
	}
	must(t, f.Truncate(1002))
	must(t, f.Truncate(1010))
	got = make([]byte, 10)
	_, err = f.ReadAt(got, 1000)
	must(t, err)
	if string(got) != "he\x00\x00\x00\x00\x00\x00\x00\x00" {
		t.Errorf("after cutting and growing: %q", got)
	}
	must(t, f.Close())
	f, err = fsys.OpenRead(name)
	must(t, err)
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("wrote to a file opened for reading")
	}
	must(t, f.Close())
	if _, err := f.ReadAt(got, 0); err == nil {
		t.Error("read from a closed file")
	}
}

func storyLock(t *testing.T, fsys FS, dir string) {
	t.Helper()
	name := path.Join(dir, "LOCK")
	l, err := fsys.Lock(name)
	must(t, err)
	_, err = fsys.Lock(name)
	wantErr(t, err, ErrLocked)
	must(t, l.Close())
	l, err = fsys.Lock(name)
	must(t, err)
	must(t, l.Close())
}

// Whatever the alignment, and past the end of the file: a file opened for reading around the cache has the same bytes.
func TestOpenDirect(t *testing.T) {
	t.Parallel()
	for name, fs := range map[string]FS{"os": OS(), "mem": NewMem(), "faulty": NewFaulty(NewMem())} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := "/direct"
			if name == "os" {
				path = t.TempDir() + path
			}
			want := make([]byte, 5*BlockSize+123)
			for i := range want {
				want[i] = byte(i * i >> 5)
			}
			f, err := fs.Create(path)
			must(t, err)
			_, err = f.WriteAt(want, 0)
			must(t, err)
			must(t, f.Close()) // not synced: what was written is seen all the same
			f, err = fs.OpenDirect(path)
			must(t, err)
			buf := AlignedBuffer(8 * BlockSize)
			for _, at := range []int{0, BlockSize, 2*BlockSize + 7, 5 * BlockSize} {
				for _, n := range []int{1, BlockSize, 3 * BlockSize, len(want) - at, 8 * BlockSize} {
					for _, shift := range []int{0, 1} {
						if n+shift > len(buf) {
							continue
						}
						b := buf[shift : shift+n]
						clear(buf)
						got, err := f.ReadAt(b, int64(at))
						if whole := min(n, len(want)-at); got != whole || (err == nil) != (whole == n) || err != nil && !errors.Is(err, io.EOF) {
							t.Fatalf("read %d at %d: %d bytes, %v", n, at, got, err)
						}
						if !bytes.Equal(b[:got], want[at:at+got]) {
							t.Fatalf("read %d at %d: other bytes", n, at)
						}
					}
				}
			}
			must(t, f.Close())
		})
	}
}
