package ledgerstore

import "github.com/penstock-mq/penstock/pkg/vfs"

// strictFS tells the store of each sync that failed, of a file or of the directory, whoever asked for it. The kernel
// reports a failure once: a later sync, of something else, would succeed over it. So none may be lost in an error that is
// logged and left behind, as compaction's are.
type strictFS struct {
	vfs.FS
	broken func(error)
}

func (f *strictFS) Create(path string) (vfs.File, error) { return f.wrap(f.FS.Create(path)) }
func (f *strictFS) Open(path string) (vfs.File, error)   { return f.wrap(f.FS.Open(path)) }

func (f *strictFS) wrap(file vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &strictFile{File: file, fs: f}, nil
}

func (f *strictFS) SyncDir(dir string) error { return f.tell(f.FS.SyncDir(dir)) }

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
