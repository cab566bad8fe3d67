package segment

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// descriptorFS notes which descriptors are being synced at once.
type descriptorFS struct {
	vfs.FS
	mu    sync.Mutex
	busy  map[*descriptorFile]bool
	twice bool
	meet  sync.WaitGroup // overlapping syncs wait for each other
}

type descriptorFile struct {
	vfs.File
	fs *descriptorFS
}

func (d *descriptorFS) Create(path string) (vfs.File, error) { return d.wrap(d.FS.Create(path)) }

func (d *descriptorFS) Open(path string) (vfs.File, error) { return d.wrap(d.FS.Open(path)) }

func (d *descriptorFS) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &descriptorFile{File: f, fs: d}, nil
}

func (f *descriptorFile) Datasync() error {
	f.fs.mu.Lock()
	f.fs.twice = f.fs.twice || f.fs.busy[f]
	f.fs.busy[f] = true
	f.fs.mu.Unlock()
	f.fs.meet.Done()
	f.fs.meet.Wait()
	err := f.File.Datasync()
	f.fs.mu.Lock()
	delete(f.fs.busy, f)
	f.fs.mu.Unlock()
	return err
}

// A kernel tells each descriptor once of a failed write back, so no two syncs may share one.
func TestOverlappingSyncsUseTheirOwnDescriptors(t *testing.T) {
	t.Parallel()
	fs := &descriptorFS{FS: vfs.NewMem(), busy: map[*descriptorFile]bool{}}
	w, err := Create(fs, "/a.seg", header(1), 64<<10, false)
	must(t, err)
	fs.meet.Add(maxSyncs)
	errs := make(chan error, maxSyncs)
	for range maxSyncs {
		go func() { errs <- w.Sync() }()
	}
	for range maxSyncs {
		must(t, <-errs)
	}
	if fs.twice {
		t.Error("two syncs shared a descriptor")
	}
	must(t, w.Close())
}

// A batch that finds no space does not count, and the next one goes over it.
func TestAppendWithoutSpace(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	w, err := Create(fs, "/a.seg", header(1), 64<<10, false)
	must(t, err)
	appendBatch(t, w, 0, add(1, 0, 50))
	fs.Add(vfs.Rule{Op: vfs.OpWrite, AfterBytes: 100, Times: 1, Err: syscall.ENOSPC})
	if _, err := w.AppendBatch([]Record{add(1, 1, 50), add(1, 2, 50)}, 0); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("append: %v", err)
	}
	appendBatch(t, w, 0, add(1, 3, 50))
	must(t, w.Sync())
	must(t, w.Close())
	rec, err := Recover(fs, "/a.seg", 0)
	must(t, err)
	if rec.Entries() != 2 || rec.Corrupt != nil {
		t.Errorf("recovered %d entries, corrupt %v", rec.Entries(), rec.Corrupt)
	}
}
