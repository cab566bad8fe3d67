package vfs

import (
	"errors"
	"io"
	"unsafe"
)

// SectorSize is the unit in which a disk writes all or nothing, in bytes. [Mem] tears writes at it.
const SectorSize = 512

// BlockSize is the alignment that reads around the cache need, in bytes.
const BlockSize = 4096

// AlignedBuffer returns n bytes that begin at a multiple of [BlockSize].
func AlignedBuffer(n int) []byte {
	b := make([]byte, n+BlockSize-1)
	at := (BlockSize - misaligned(b)) % BlockSize
	return b[at : at+n : at+n]
}

// misaligned is how far behind a multiple of BlockSize b begins.
func misaligned(b []byte) int {
	return int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % BlockSize) //nolint:gosec // the address alone is looked at
}

// aligned reports whether a read can go around the cache.
func aligned(p []byte, off int64) bool {
	return off%BlockSize == 0 && len(p)%BlockSize == 0 && misaligned(p) == 0
}

// ErrLocked is returned by [FS.Lock] when another process, or this one, holds the lock.
var ErrLocked = errors.New("locked by another user")

// DirOpener is an [FS] that can keep a directory open.
type DirOpener interface {
	// OpenDir opens a directory, whose Sync does what SyncDir does, and needs no file descriptor any more.
	OpenDir(dir string) (Dir, error)
}

// Dir is a directory that is open.
type Dir interface {
	io.Closer
	Sync() error
}

// FS is a file system. Paths are slash-separated; errors are *fs.PathError or wrap one, so errors.Is works with
// fs.ErrNotExist, fs.ErrExist, syscall.ENOSPC and syscall.EIO. All methods may be called concurrently.
type FS interface {
	// Create makes a file that does not exist yet, for reading and writing. The name is durable after SyncDir.
	Create(path string) (File, error)
	// Open opens an existing file for reading and writing.
	Open(path string) (File, error)
	// OpenRead opens an existing file for reading.
	OpenRead(path string) (File, error)
	// OpenDirect opens an existing file for reading all of it once, around the cache where the file system can. Only
	// reads whose memory, offset and length are multiples of [BlockSize] go around it; see [AlignedBuffer].
	OpenDirect(path string) (File, error)
	// Rename replaces to by from, atomically. It is durable after SyncDir of both directories.
	Rename(from, to string) error
	// Remove unlinks a file or an empty directory. It is durable after SyncDir.
	Remove(path string) error
	// MkdirAll makes dir and its missing parents. Each is durable after SyncDir of its parent.
	MkdirAll(dir string) error
	// List returns the names (not paths) in dir, sorted.
	List(dir string) ([]string, error)
	// Stat describes a file or directory.
	Stat(path string) (Info, error)
	// SyncDir makes the names in dir durable.
	SyncDir(dir string) error
	// Usage tells the space of the file system that holds dir.
	Usage(dir string) (Usage, error)
	// Lock creates path if needed and locks it until the closer is closed or the process dies.
	// It does not wait: a lock that is held returns [ErrLocked].
	Lock(path string) (io.Closer, error)
}

// File is an open file. ReadAt and WriteAt are positioned and may overlap with each other and with syncs;
// what a WriteAt wrote is seen by each ReadAt that begins after it returned. The caller keeps its buffers.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Datasync makes durable all bytes written, and the size needed to read them, before it was called.
	Datasync() error
	// Sync is Datasync, and makes the rest of the file's metadata durable too.
	Sync() error
	// Truncate sets the size. Bytes past it are gone, bytes up to it that were never written read as zero.
	Truncate(size int64) error
	// Allocate reserves blocks for bytes [off, off+n), so that writing them cannot fail for want of space,
	// and extends the size to off+n if it is smaller. It changes no byte within the size. Extending the size
	// at once is deliberate: later writes then change no size, so that a Datasync has less to journal.
	Allocate(off, n int64) error
	// DropCache makes later reads come from the disk, as far as the bytes are durable. After a failed sync the
	// cache may show bytes that the disk does not hold; whoever decides from a file's bytes what survived a crash
	// calls Sync and then DropCache first.
	DropCache() error
	// Size returns the size in bytes.
	Size() (int64, error)
}

// Info describes a file or directory.
type Info struct {
	// Size is in bytes.
	Size int64
	// Dir tells a directory from a file.
	Dir bool
}

// Usage is the space of a file system, in bytes.
type Usage struct {
	Total uint64
	// Free is what this process may still use.
	Free uint64
}
