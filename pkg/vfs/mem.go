package vfs

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// ErrPowerCut is returned by everything done to a [Mem] whose power is off, and to files and locks from before a
// [Mem.Crash].
var ErrPowerCut = errors.New("power cut")

// Mem is a file system in memory that loses in a power cut what a disk may lose. The zero Mem is not usable.
//
// Each file has its bytes as programs see them and its bytes on disk; between them lie the writes and size changes
// since the last sync, in order. [Mem.Crash] picks for each 512-byte sector one of the states it went through since
// then, independently, and for the size one of its states: bytes are lost, kept, torn and reordered. Names are
// changes too, each kept or lost on its own, until SyncDir; a directory whose own name is lost takes its contents
// along. A rename is atomic.
//
// Paths are cleaned and may be relative or absolute; "." and "/" exist. A Mem is safe for concurrent use.
//
// Recording states is the alternative to recording a log of all calls and replaying prefixes of it, as crash
// explorers do: that finds less, since it never reorders, and needs a model of the file system besides.
type Mem struct {
	mu      sync.Mutex
	epoch   int // counts crashes; handles of an earlier one are dead
	off     bool
	budget  int // changes left until the power goes, -1 for no end
	changes int

	capacity uint64 // 0: unlimited
	others   uint64 // bytes that somebody else takes
	used     uint64

	names   map[string]*inode // as programs see them
	durable map[string]*inode // on disk
	pending []nameChange      // not on disk, in order
	locks   map[string]*memLock
}

// inode is a file or directory.
type inode struct {
	dir     bool
	links   int // names in Mem.names, 0 or 1
	data    []byte
	disk    []byte
	pending []change
	// failures counts the write-backs that failed. Each open file is told once.
	failures int
}

// change is one write or size change that was not synced.
type change struct {
	write bool
	off   int64
	data  []byte
	size  int64 // of the file after it
}

// nameChange is one unsynced change of names.
type nameChange struct {
	add, remove string // either may be empty
	node        *inode
}

// NewMem returns an empty file system without a limit.
func NewMem() *Mem {
	m := &Mem{budget: -1, durable: make(map[string]*inode), locks: make(map[string]*memLock)}
	for _, root := range []string{".", "/"} {
		m.durable[root] = &inode{dir: true}
	}
	m.names = maps.Clone(m.durable)
	return m
}

// SetCapacity limits the sizes of all files together, in bytes; 0 is no limit. Less than what is used is allowed.
func (m *Mem) SetCapacity(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.capacity = n
}

// Occupy has n bytes be taken by somebody else, as a large file would, which here would take as much memory.
func (m *Mem) Occupy(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.others = n
}

// CutPowerAfter turns the power off once n more changes were made; a change is any call that creates, writes,
// truncates, allocates, syncs, renames or removes. Everything then fails with [ErrPowerCut] until [Mem.Crash]. A
// negative n takes the limit away. Running a test with n = 0, 1, 2, … visits each point at which it could be cut.
func (m *Mem) CutPowerAfter(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.budget = n
}

// Rot damages bytes at rest: those on disk, and as programs see them unless they have a write or a size change of their
// own on its way there. What is written anew is whole again. Flips beyond the file's end do nothing.
func (m *Mem) Rot(name string, flips []Flip) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	node := m.names[path.Clean(name)]
	if node == nil || node.dir {
		return pathError("rot", name, fs.ErrNotExist)
	}
	for _, f := range flips {
		if f.Offset < int64(len(node.disk)) {
			node.disk[f.Offset] ^= f.Mask
		}
		if f.Offset < int64(len(node.data)) && !slices.ContainsFunc(node.pending, func(c change) bool { return c.touches(f.Offset) }) {
			node.data[f.Offset] ^= f.Mask
		}
	}
	return nil
}

// Changes counts the changes made so far, as [Mem.CutPowerAfter] counts them.
func (m *Mem) Changes() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changes
}

// begin is called with mu held at the start of each operation.
func (m *Mem) begin(op, name string, isChange bool) error {
	if isChange && !m.off {
		if m.budget == 0 {
			m.off = true
		} else {
			m.changes++
			if m.budget > 0 {
				m.budget--
			}
		}
	}
	if m.off {
		return pathError(op, name, ErrPowerCut)
	}
	return nil
}

func pathError(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: name, Err: err}
}

// reserve accounts for a file growing or shrinking by n bytes.
func (m *Mem) reserve(n int64) error {
	switch {
	case n < 0:
		m.used -= uint64(-n)
	case m.capacity > 0 && n > 0 && m.used+m.others+uint64(n) > m.capacity:
		return syscall.ENOSPC
	default:
		m.used += uint64(n)
	}
	return nil
}

// Create makes a file.
func (m *Mem) Create(name string) (File, error) {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("create", name, true); err != nil {
		return nil, err
	}
	if m.names[name] != nil {
		return nil, pathError("create", name, fs.ErrExist)
	}
	if err := m.parent("create", name); err != nil {
		return nil, err
	}
	node := &inode{}
	m.addName(name, node)
	return &memFile{mem: m, node: node, name: name, epoch: m.epoch}, nil
}

func (m *Mem) addName(name string, node *inode) {
	node.links = 1
	m.names[name] = node
	m.pending = append(m.pending, nameChange{add: name, node: node})
}

// parent tells whether name can be made where it is.
func (m *Mem) parent(op, name string) error {
	switch dir := m.names[path.Dir(name)]; {
	case dir == nil:
		return pathError(op, name, fs.ErrNotExist)
	case !dir.dir:
		return pathError(op, name, syscall.ENOTDIR)
	}
	return nil
}

// Open opens a file for reading and writing.
func (m *Mem) Open(name string) (File, error) { return m.open(name, false) }

// OpenRead opens a file for reading.
func (m *Mem) OpenRead(name string) (File, error) { return m.open(name, true) }

// OpenDirect is OpenRead: what reads around the cache see is left to [File.DropCache].
func (m *Mem) OpenDirect(name string) (File, error) { return m.open(name, true) }

func (m *Mem) open(name string, readOnly bool) (File, error) {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("open", name, false); err != nil {
		return nil, err
	}
	node := m.names[name]
	switch {
	case node == nil:
		return nil, pathError("open", name, fs.ErrNotExist)
	case node.dir:
		return nil, pathError("open", name, syscall.EISDIR)
	}
	return &memFile{mem: m, node: node, name: name, epoch: m.epoch, readOnly: readOnly, told: node.failures}, nil
}

// Rename replaces to by from. Directories cannot be renamed.
func (m *Mem) Rename(from, to string) error {
	from, to = path.Clean(from), path.Clean(to)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("rename", from, true); err != nil {
		return err
	}
	node := m.names[from]
	switch {
	case node == nil:
		return pathError("rename", from, fs.ErrNotExist)
	case node.dir, m.names[to] != nil && m.names[to].dir:
		return pathError("rename", from, syscall.EISDIR)
	case from == to:
		return nil
	}
	if err := m.parent("rename", to); err != nil {
		return err
	}
	if old := m.names[to]; old != nil {
		m.unlink(old)
	}
	delete(m.names, from)
	m.names[to] = node
	m.pending = append(m.pending, nameChange{add: to, remove: from, node: node})
	return nil
}

func (m *Mem) unlink(node *inode) {
	node.links = 0
	m.used -= uint64(len(node.data))
}

// Remove unlinks a file or an empty directory.
func (m *Mem) Remove(name string) error {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("remove", name, true); err != nil {
		return err
	}
	node := m.names[name]
	switch {
	case node == nil:
		return pathError("remove", name, fs.ErrNotExist)
	case node.dir && len(m.children(name)) > 0:
		return pathError("remove", name, syscall.ENOTEMPTY)
	}
	m.unlink(node)
	delete(m.names, name)
	m.pending = append(m.pending, nameChange{remove: name, node: node})
	return nil
}

// MkdirAll makes a directory and its parents.
func (m *Mem) MkdirAll(dir string) error {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("mkdir", dir, true); err != nil {
		return err
	}
	var missing []string
	for at := dir; m.names[at] == nil; at = path.Dir(at) {
		missing = append(missing, at)
	}
	for _, name := range slices.Backward(missing) {
		if err := m.parent("mkdir", name); err != nil {
			return err
		}
		m.addName(name, &inode{dir: true})
	}
	if !m.names[dir].dir {
		return pathError("mkdir", dir, syscall.ENOTDIR)
	}
	return nil
}

// List returns the names in dir, sorted.
func (m *Mem) List(dir string) ([]string, error) {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("list", dir, false); err != nil {
		return nil, err
	}
	if err := m.isDir("list", dir); err != nil {
		return nil, err
	}
	return m.children(dir), nil
}

func (m *Mem) isDir(op, dir string) error {
	switch node := m.names[dir]; {
	case node == nil:
		return pathError(op, dir, fs.ErrNotExist)
	case !node.dir:
		return pathError(op, dir, syscall.ENOTDIR)
	}
	return nil
}

func (m *Mem) children(dir string) []string {
	var names []string
	for name := range m.names {
		if name != dir && path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	slices.Sort(names)
	return names
}

// Stat describes a file or directory.
func (m *Mem) Stat(name string) (Info, error) {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("stat", name, false); err != nil {
		return Info{}, err
	}
	node := m.names[name]
	if node == nil {
		return Info{}, pathError("stat", name, fs.ErrNotExist)
	}
	return Info{Size: int64(len(node.data)), Dir: node.dir}, nil
}

// SyncDir makes the names in dir durable. A rename between two directories is durable once either is synced.
func (m *Mem) SyncDir(dir string) error {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("syncdir", dir, true); err != nil {
		return err
	}
	if err := m.isDir("syncdir", dir); err != nil {
		return err
	}
	var left []nameChange
	for _, c := range m.pending {
		if !c.in(dir) {
			left = append(left, c)
			continue
		}
		c.apply(m.durable)
		// What happened to the file before is part of this.
		left = slices.DeleteFunc(left, func(before nameChange) bool { return before.node == c.node })
	}
	m.pending = left
	return nil
}

// in reports whether c changes names in dir.
func (c nameChange) in(dir string) bool {
	return c.add != "" && path.Dir(c.add) == dir || c.remove != "" && path.Dir(c.remove) == dir
}

func (c nameChange) apply(names map[string]*inode) {
	if c.remove != "" && names[c.remove] == c.node {
		delete(names, c.remove)
	}
	if c.add != "" {
		names[c.add] = c.node
	}
}

// Usage tells the capacity and what is left of it. Without a limit the capacity is 1 TiB.
func (m *Mem) Usage(dir string) (Usage, error) {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("usage", dir, false); err != nil {
		return Usage{}, err
	}
	if err := m.isDir("usage", dir); err != nil {
		return Usage{}, err
	}
	total := m.capacity
	if total == 0 {
		total = 1 << 40
	}
	return Usage{Total: total, Free: total - min(total, m.used+m.others)}, nil
}

// Lock locks path. The lock of before a crash is gone after it.
func (m *Mem) Lock(name string) (io.Closer, error) {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.begin("lock", name, false); err != nil {
		return nil, err
	}
	if m.locks[name] != nil {
		return nil, pathError("lock", name, ErrLocked)
	}
	if err := m.parent("lock", name); err != nil {
		return nil, err
	}
	if m.names[name] == nil {
		m.addName(name, &inode{})
	}
	l := &memLock{mem: m, name: name}
	m.locks[name] = l
	return l, nil
}

type memLock struct {
	mem  *Mem
	name string
}

// Close releases the lock.
func (l *memLock) Close() error {
	l.mem.mu.Lock()
	defer l.mem.mu.Unlock()
	if l.mem.locks[l.name] != l {
		return pathError("unlock", l.name, fs.ErrClosed)
	}
	delete(l.mem.locks, l.name)
	return nil
}

// String lists the files with their sizes, for a failing test's message.
func (m *Mem) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(m.names)) {
		node := m.names[name]
		if node.dir {
			continue
		}
		b.WriteString(name + " " + sizeText(node) + "\n")
	}
	return b.String()
}
