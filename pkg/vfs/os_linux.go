package vfs

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// OS returns the file system of the machine.
//
// Datasync is fdatasync(2). Allocate is fallocate(2) without FALLOC_FL_KEEP_SIZE; on a file system without
// fallocate the size is extended and nothing is reserved. Lock is flock(2) on a file of its own.
func OS() FS { return osFS{} }

type osFS struct{}

const (
	filePerm = 0o640
	dirPerm  = 0o750
)

func (osFS) Create(path string) (File, error) {
	return openOS(path, os.O_RDWR|os.O_CREATE|os.O_EXCL)
}

func (osFS) Open(path string) (File, error) { return openOS(path, os.O_RDWR) }

func (osFS) OpenRead(path string) (File, error) { return openOS(path, os.O_RDONLY) }

func (osFS) OpenDirect(path string) (File, error) {
	cached, err := os.OpenFile(path, os.O_RDONLY, 0) // the path is the operator's data directory
	if err != nil {
		return nil, err
	}
	direct, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0) // likewise
	if err != nil {
		return &osFile{File: cached}, nil //nolint:nilerr // a file system that cannot; reads go through the cache
	}
	return &directFile{osFile: osFile{File: cached}, direct: direct}, nil
}

// directFile reads around the cache what is aligned for it.
type directFile struct {
	osFile
	direct *os.File
}

func (f *directFile) ReadAt(p []byte, off int64) (int, error) {
	if !aligned(p, off) {
		return f.osFile.ReadAt(p, off)
	}
	n, err := f.direct.ReadAt(p, off)
	if errors.Is(err, syscall.EINVAL) { // the device's blocks are larger
		return f.osFile.ReadAt(p, off)
	}
	return n, err
}

func (f *directFile) Close() error { return errors.Join(f.direct.Close(), f.osFile.Close()) }

func openOS(path string, flag int) (File, error) {
	f, err := os.OpenFile(path, flag, filePerm) // the path is the operator's data directory
	if err != nil {
		return nil, err
	}
	return &osFile{File: f}, nil
}

func (osFS) Rename(from, to string) error { return os.Rename(from, to) }

func (osFS) Remove(path string) error { return os.Remove(path) }

func (osFS) MkdirAll(dir string) error { return os.MkdirAll(dir, dirPerm) }

func (osFS) List(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

func (osFS) Stat(path string) (Info, error) {
	st, err := os.Stat(path)
	if err != nil {
		return Info{}, err
	}
	return Info{Size: st.Size(), Dir: st.IsDir()}, nil
}

func (osFS) OpenDir(dir string) (Dir, error) {
	d, err := os.Open(dir) // the path is the operator's data directory
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (f osFS) SyncDir(dir string) error {
	d, err := f.OpenDir(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}

func (osFS) Usage(dir string) (Usage, error) {
	var st syscall.Statfs_t
	if err := ignoreEINTR(func() error { return syscall.Statfs(dir, &st) }); err != nil {
		return Usage{}, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	block := uint64(st.Frsize) // a block size is positive
	return Usage{Total: st.Blocks * block, Free: st.Bavail * block}, nil
}

func (osFS) Lock(path string) (io.Closer, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, filePerm) // the path is the operator's data directory
	if err != nil {
		return nil, err
	}
	err = control(f, "flock", func(fd int) error { return syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) })
	if err != nil {
		_ = f.Close() // nothing was written to it
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = &fs.PathError{Op: "lock", Path: path, Err: ErrLocked}
		}
		return nil, err
	}
	return f, nil
}

type osFile struct{ *os.File }

func (f *osFile) Datasync() error { return control(f.File, "fdatasync", syscall.Fdatasync) }

func (f *osFile) Allocate(off, n int64) error {
	err := control(f.File, "fallocate", func(fd int) error { return syscall.Fallocate(fd, 0, off, n) })
	if !errors.Is(err, syscall.EOPNOTSUPP) {
		return err
	}
	size, err := f.Size()
	if err != nil || size >= off+n {
		return err
	}
	return f.Truncate(off + n)
}

func (f *osFile) DropCache() error {
	return control(f.File, "fadvise", func(fd int) error { return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED) })
}

func (f *osFile) Size() (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// control runs a system call on f's descriptor while keeping f from being closed under it. Calls overlap.
func control(f *os.File, op string, call func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var callErr error
	err = conn.Control(func(fd uintptr) {
		callErr = ignoreEINTR(func() error { return call(int(fd)) }) // descriptors are small
	})
	if err != nil {
		return err
	}
	if callErr != nil {
		return &fs.PathError{Op: op, Path: f.Name(), Err: callErr}
	}
	return nil
}

// ignoreEINTR repeats a call that a signal interrupted; the runtime's preemption sends many. An interrupted
// sync has reported no failed write, so repeating it hides none.
func ignoreEINTR(call func() error) error {
	for {
		if err := call(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
