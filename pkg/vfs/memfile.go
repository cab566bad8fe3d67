package vfs

import (
	"fmt"
	"io"
	"io/fs"
	"slices"
	"syscall"
)

// memFile is an open file of a Mem.
type memFile struct {
	mem      *Mem
	node     *inode
	name     string
	epoch    int
	readOnly bool
	closed   bool
	told     int // of the node's failures
}

func sizeText(node *inode) string {
	return fmt.Sprintf("%d bytes, %d changes not synced", len(node.data), len(node.pending))
}

// begin is called with mem.mu held.
func (f *memFile) begin(op string, isChange bool) error {
	switch {
	case f.closed:
		return pathError(op, f.name, fs.ErrClosed)
	case f.epoch != f.mem.epoch:
		return pathError(op, f.name, ErrPowerCut)
	case isChange && f.readOnly:
		return pathError(op, f.name, syscall.EBADF)
	}
	return f.mem.begin(op, f.name, isChange)
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin("read", false); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, pathError("read", f.name, fs.ErrInvalid)
	}
	n := 0
	if off < int64(len(f.node.data)) {
		n = copy(p, f.node.data[off:])
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt writes p, or what of it the capacity has room for.
func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin("write", true); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, pathError("write", f.name, fs.ErrInvalid)
	}
	err := f.grow(off + int64(len(p)))
	if err != nil {
		p = p[:max(0, min(int64(len(p)), int64(len(f.node.data))-off))]
		err = pathError("write", f.name, err)
	}
	if len(p) > 0 {
		copy(f.node.data[off:], p)
		f.record(change{write: true, off: off, data: slices.Clone(p)})
	}
	return len(p), err
}

// grow extends the file to at least size.
func (f *memFile) grow(size int64) error {
	more := size - int64(len(f.node.data))
	if more <= 0 {
		return nil
	}
	return f.resize(size)
}

func (f *memFile) resize(size int64) error {
	if f.node.links > 0 {
		if err := f.mem.reserve(size - int64(len(f.node.data))); err != nil {
			return err
		}
	}
	f.node.data = resized(f.node.data, size)
	return nil
}

// resized cuts b or extends it by zeros.
func resized(b []byte, size int64) []byte {
	if size <= int64(len(b)) {
		clear(b[size:])
		return b[:size]
	}
	n := len(b)
	b = slices.Grow(b, int(size)-n)[:size]
	clear(b[n:])
	return b
}

func (f *memFile) record(c change) {
	c.size = int64(len(f.node.data))
	f.node.pending = append(f.node.pending, c)
}

func (f *memFile) Truncate(size int64) error {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin("truncate", true); err != nil {
		return err
	}
	if size < 0 {
		return pathError("truncate", f.name, fs.ErrInvalid)
	}
	if err := f.resize(size); err != nil {
		return pathError("truncate", f.name, err)
	}
	f.record(change{})
	return nil
}

func (f *memFile) Allocate(off, n int64) error {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin("allocate", true); err != nil {
		return err
	}
	if off < 0 || n <= 0 {
		return pathError("allocate", f.name, fs.ErrInvalid)
	}
	if err := f.grow(off + n); err != nil {
		return pathError("allocate", f.name, err)
	}
	f.record(change{})
	return nil
}

func (f *memFile) Datasync() error { return f.sync("datasync") }

func (f *memFile) Sync() error { return f.sync("sync") }

func (f *memFile) sync(op string) error {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin(op, true); err != nil {
		return err
	}
	for _, c := range f.node.pending {
		f.node.disk = c.apply(f.node.disk)
	}
	f.node.pending = nil
	if f.told != f.node.failures {
		f.told = f.node.failures
		return pathError(op, f.name, syscall.EIO)
	}
	return nil
}

// apply makes the change to the bytes on disk.
func (c change) apply(disk []byte) []byte {
	disk = resized(disk, c.size)
	if c.write {
		copy(disk[c.off:], c.data)
	}
	return disk
}

// touches reports whether the change decides the byte at off.
func (c change) touches(off int64) bool {
	return off >= c.size || c.write && off >= c.off && off < c.off+int64(len(c.data))
}

// forgetUnsynced is what a kernel does when writing back fails: the pages stay as they are in memory and count as
// clean, so that no later sync brings them to disk. Only the sizes still get there. Each file that is open is told by
// its next sync, once; f by this one.
func (f *memFile) forgetUnsynced() {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	for i := range f.node.pending {
		f.node.pending[i] = change{size: f.node.pending[i].size}
	}
	f.node.failures++
	f.told = f.node.failures
}

// DropCache forgets what is neither on disk nor waiting to be synced.
func (f *memFile) DropCache() error {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin("dropcache", false); err != nil {
		return err
	}
	fresh := slices.Clone(f.node.disk)
	for _, c := range f.node.pending {
		fresh = c.apply(fresh)
	}
	f.node.data = resized(fresh, int64(len(f.node.data)))
	return nil
}

func (f *memFile) Size() (int64, error) {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if err := f.begin("stat", false); err != nil {
		return 0, err
	}
	return int64(len(f.node.data)), nil
}

func (f *memFile) Close() error {
	f.mem.mu.Lock()
	defer f.mem.mu.Unlock()
	if f.closed {
		return pathError("close", f.name, fs.ErrClosed)
	}
	f.closed = true
	return nil
}
