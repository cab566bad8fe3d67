package ledgerstore

import (
	"errors"
	"io"
	"path"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// strictFS tells the store of each sync that failed, of a file or of the directory, whoever asked for it. The kernel
// reports a failure once: a later sync, of something else, would succeed over it. So none may be lost in an error that is
// logged and left behind, as compaction's are.
//
// It keeps the store's directory open, where the file system can, so that no want of file descriptors keeps it from being
// synced.
type strictFS struct {
	vfs.FS
	broken func(error)
	name   string
	dir    vfs.Dir // or nil
}

func newStrictFS(fs vfs.FS, dir string, broken func(error)) (*strictFS, error) {
	f := &strictFS{FS: fs, broken: broken, name: path.Clean(dir)}
	if o, ok := fs.(vfs.DirOpener); ok {
		d, err := o.OpenDir(dir)
		if err != nil {
			return nil, err
		}
		f.dir = d
	}
	return f, nil
}

func (f *strictFS) Close() error {
	if f.dir == nil {
		return nil
	}
	return f.dir.Close()
}

// closers are closed in order.
type closers []io.Closer

func (c closers) Close() (err error) {
	for _, x := range c {
		err = errors.Join(err, x.Close())
	}
	return err
}

func (f *strictFS) Create(path string) (vfs.File, error) { return f.wrap(f.FS.Create(path)) }
func (f *strictFS) Open(path string) (vfs.File, error)   { return f.wrap(f.FS.Open(path)) }

func (f *strictFS) wrap(file vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &strictFile{File: file, fs: f}, nil
}

func (f *strictFS) SyncDir(dir string) error {
	if f.dir != nil && path.Clean(dir) == f.name {
		return f.tell(f.dir.Sync())
	}
	return f.tell(f.FS.SyncDir(dir))
}

func (f *strictFS) tell(err error) error {
	if err != nil {
		f.broken(err)
	}
	return err
}

type strictFile struct {
	vfs.File
	fs *strictFS
}

func (f *strictFile) Datasync() error { return f.fs.tell(f.File.Datasync()) }
func (f *strictFile) Sync() error     { return f.fs.tell(f.File.Sync()) }
