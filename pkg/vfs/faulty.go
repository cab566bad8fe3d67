package vfs

import (
	"io"
	"path"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Op is a kind of call that a [Rule] matches.
type Op string

// The operations. A file's Datasync and Sync are both OpSync.
const (
	OpCreate   Op = "create"
	OpOpen     Op = "open"
	OpRename   Op = "rename"
	OpRemove   Op = "remove"
	OpMkdir    Op = "mkdir"
	OpList     Op = "list"
	OpStat     Op = "stat"
	OpSyncDir  Op = "syncdir"
	OpUsage    Op = "usage"
	OpLock     Op = "lock"
	OpRead     Op = "read"
	OpWrite    Op = "write"
	OpSync     Op = "sync"
	OpTruncate Op = "truncate"
	OpAllocate Op = "allocate"
)

// Rule says which calls go wrong, and how. Rules are tried in the order they were added; the first that matches acts,
// the others count the call all the same.
type Rule struct {
	// Op is the operation it concerns.
	Op Op
	// Path matches as path.Match does: a pattern with a slash against the whole path, one without against its last
	// part. Empty matches all. For a rename, either name.
	Path string
	// After lets so many matching calls pass.
	After int
	// Times is how many it then affects, 0 for all.
	Times int
	// AfterBytes lets pass so many bytes of matching OpWrite or OpAllocate calls; the call that crosses the line
	// writes up to it and fails. Err defaults to ENOSPC.
	AfterBytes int64
	// Err fails the call. A failed call has no effect, but see Short and LoseUnsynced.
	Err error
	// Short lets an OpWrite write so many bytes before it fails. Err defaults to io.ErrShortWrite.
	Short int
	// LoseUnsynced makes a failed OpSync on a [Mem] leave the bytes as a kernel does: in memory, counted as clean, so
	// that the next sync succeeds and does not bring them to disk. Other open files of the same path fail their next
	// sync too.
	LoseUnsynced bool
	// Flips changes what an OpRead returns.
	Flips []Flip
	// Gate holds the call until it is opened; then the call goes on, failing if Err is set.
	Gate *Gate
	// Delay holds the call for a time.
	Delay time.Duration
}

// Flip is damage to one byte of a file: it reads as what it is, exclusive-or Mask.
type Flip struct {
	Offset int64
	Mask   byte
}

// Gate holds calls. Make one with [NewGate].
type Gate struct {
	arrived chan struct{}
	opened  chan struct{}
	once    sync.Once
}

// NewGate returns a closed gate.
func NewGate() *Gate {
	return &Gate{arrived: make(chan struct{}, 1024), opened: make(chan struct{})}
}

// Arrived yields a value for each call that has come to the gate, for the first 1024.
func (g *Gate) Arrived() <-chan struct{} { return g.arrived }

// Open lets all calls through, held and future.
func (g *Gate) Open() { g.once.Do(func() { close(g.opened) }) }

func (g *Gate) pass() {
	select {
	case g.arrived <- struct{}{}:
	default:
	}
	<-g.opened
}

// Faulty passes calls on to another file system and fails them by rule. It is safe for concurrent use; no lock is
// held while a call is passed on or held.
type Faulty struct {
	under FS

	mu    sync.Mutex
	rules []*Active
	calls map[Op]int
}

// Active is a rule in force.
type Active struct {
	rule   Rule
	faulty *Faulty
	seen   int
	bytes  int64
	hits   int
}

// NewFaulty wraps under.
func NewFaulty(under FS) *Faulty {
	return &Faulty{under: under, calls: make(map[Op]int)}
}

// Add puts a rule in force.
func (f *Faulty) Add(r Rule) *Active {
	if r.Err == nil && r.AfterBytes > 0 {
		r.Err = syscall.ENOSPC
	}
	if r.Err == nil && r.Short > 0 {
		r.Err = io.ErrShortWrite
	}
	a := &Active{rule: r, faulty: f}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, a)
	return a
}

// Calls counts the calls of an operation so far, failed ones included.
func (f *Faulty) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// Remove takes the rule out of force. Calls that its gate holds stay held.
func (a *Active) Remove() {
	a.faulty.mu.Lock()
	defer a.faulty.mu.Unlock()
	a.faulty.rules = slices.DeleteFunc(a.faulty.rules, func(b *Active) bool { return a == b })
}

// Hits counts the calls that the rule has affected.
func (a *Active) Hits() int {
	a.faulty.mu.Lock()
	defer a.faulty.mu.Unlock()
	return a.hits
}

// outcome is what is to happen to one call.
type outcome struct {
	err   error
	pass  int // bytes that a write gets through before err
	lose  bool
	flips []Flip
}

// meet finds what happens to a call, and waits as long as it is to be held. n is the length of a write.
func (f *Faulty) meet(op Op, n int64, names ...string) outcome {
	rule, pass := f.match(op, n, names)
	if rule == nil {
		return outcome{}
	}
	if rule.Gate != nil {
		rule.Gate.pass()
	}
	if rule.Delay > 0 {
		time.Sleep(rule.Delay)
	}
	return outcome{err: rule.Err, pass: pass, lose: rule.LoseUnsynced, flips: rule.Flips}
}

func (f *Faulty) match(op Op, n int64, names []string) (hit *Rule, pass int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[op]++
	for _, a := range f.rules {
		r := &a.rule
		if r.Op != op || !slices.ContainsFunc(names, func(name string) bool { return matches(r.Path, name) }) {
			continue
		}
		a.seen++
		before := a.bytes
		a.bytes += n
		if hit != nil || a.seen <= r.After || r.Times > 0 && a.hits >= r.Times ||
			r.AfterBytes > 0 && a.bytes <= r.AfterBytes {
			continue
		}
		a.hits++
		hit, pass = r, r.Short
		if r.AfterBytes > 0 {
			pass = int(max(0, r.AfterBytes-before))
		}
	}
	return hit, pass
}

func matches(pattern, name string) bool {
	if pattern == "" {
		return true
	}
	if path.Base(pattern) == pattern {
		name = path.Base(name)
	}
	ok, err := path.Match(pattern, name)
	if err != nil {
		panic("vfs: rule with the pattern " + pattern + ": " + err.Error())
	}
	return ok
}

// Create makes a file.
func (f *Faulty) Create(name string) (File, error) {
	return f.file(OpCreate, name, f.under.Create)
}

// Open opens a file for reading and writing.
func (f *Faulty) Open(name string) (File, error) { return f.file(OpOpen, name, f.under.Open) }

// OpenRead opens a file for reading.
func (f *Faulty) OpenRead(name string) (File, error) { return f.file(OpOpen, name, f.under.OpenRead) }

// OpenDirect opens a file for reading around the cache.
func (f *Faulty) OpenDirect(name string) (File, error) {
	return f.file(OpOpen, name, f.under.OpenDirect)
}

func (f *Faulty) file(op Op, name string, open func(string) (File, error)) (File, error) {
	if o := f.meet(op, 0, name); o.err != nil {
		return nil, pathError(string(op), name, o.err)
	}
	file, err := open(name)
	if err != nil {
		return nil, err
	}
	return &faultyFile{File: file, faulty: f, name: name}, nil
}

// Rename renames a file.
func (f *Faulty) Rename(from, to string) error {
	if o := f.meet(OpRename, 0, from, to); o.err != nil {
		return pathError("rename", from, o.err)
	}
	return f.under.Rename(from, to)
}

// Remove unlinks a file or an empty directory.
func (f *Faulty) Remove(name string) error { return f.call(OpRemove, name, f.under.Remove) }

// MkdirAll makes a directory and its parents.
func (f *Faulty) MkdirAll(dir string) error { return f.call(OpMkdir, dir, f.under.MkdirAll) }

// SyncDir makes the names in dir durable.
func (f *Faulty) SyncDir(dir string) error { return f.call(OpSyncDir, dir, f.under.SyncDir) }

func (f *Faulty) call(op Op, name string, under func(string) error) error {
	if o := f.meet(op, 0, name); o.err != nil {
		return pathError(string(op), name, o.err)
	}
	return under(name)
}

// List returns the names in dir.
func (f *Faulty) List(dir string) ([]string, error) { return ask(f, OpList, dir, f.under.List) }

// Stat describes a file or directory.
func (f *Faulty) Stat(name string) (Info, error) { return ask(f, OpStat, name, f.under.Stat) }

// Usage tells the space of the file system that holds dir.
func (f *Faulty) Usage(dir string) (Usage, error) { return ask(f, OpUsage, dir, f.under.Usage) }

// Lock locks path.
func (f *Faulty) Lock(name string) (io.Closer, error) { return ask(f, OpLock, name, f.under.Lock) }

func ask[T any](f *Faulty, op Op, name string, under func(string) (T, error)) (T, error) {
	if o := f.meet(op, 0, name); o.err != nil {
		var none T
		return none, pathError(string(op), name, o.err)
	}
	return under(name)
}

// faultyFile is an open file of a Faulty.
type faultyFile struct {
	File
	faulty *Faulty
	name   string
}

func (f *faultyFile) ReadAt(p []byte, off int64) (int, error) {
	o := f.faulty.meet(OpRead, 0, f.name)
	if o.err != nil {
		return 0, pathError("read", f.name, o.err)
	}
	n, err := f.File.ReadAt(p, off)
	for _, flip := range o.flips {
		if i := flip.Offset - off; i >= 0 && i < int64(n) {
			p[i] ^= flip.Mask
		}
	}
	return n, err
}

func (f *faultyFile) WriteAt(p []byte, off int64) (int, error) {
	o := f.faulty.meet(OpWrite, int64(len(p)), f.name)
	if o.err == nil {
		return f.File.WriteAt(p, off)
	}
	n := 0
	if o.pass > 0 {
		var err error
		if n, err = f.File.WriteAt(p[:min(o.pass, len(p))], off); err != nil {
			return n, err
		}
	}
	return n, pathError("write", f.name, o.err)
}

func (f *faultyFile) Datasync() error { return f.sync(f.File.Datasync) }

func (f *faultyFile) Sync() error { return f.sync(f.File.Sync) }

func (f *faultyFile) sync(under func() error) error {
	o := f.faulty.meet(OpSync, 0, f.name)
	if o.err == nil {
		return under()
	}
	if mem, ok := f.File.(*memFile); ok && o.lose {
		mem.forgetUnsynced()
	}
	return pathError("sync", f.name, o.err)
}

func (f *faultyFile) Truncate(size int64) error {
	if o := f.faulty.meet(OpTruncate, 0, f.name); o.err != nil {
		return pathError("truncate", f.name, o.err)
	}
	return f.File.Truncate(size)
}

func (f *faultyFile) Allocate(off, n int64) error {
	if o := f.faulty.meet(OpAllocate, n, f.name); o.err != nil {
		return pathError("allocate", f.name, o.err)
	}
	return f.File.Allocate(off, n)
}
