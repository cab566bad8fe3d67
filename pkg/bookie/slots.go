package bookie

import (
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"path"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// slotFile is a small file of two slots that are written in turn, in place, each in a sector of its own, so that one of
// them is whole always. On a full disk, which a bookie must start on and delete on, there is no room for a new file.
type slotFile struct {
	fs   vfs.FS
	name string
	size int // of a slot
}

// secondSlot is where it begins.
const secondSlot = vfs.SectorSize

// read returns what is in the slots, or [iofs.ErrNotExist].
func (f slotFile) read() (slots [2][]byte, err error) {
	file, err := f.fs.OpenRead(f.name)
	if err != nil {
		return slots, err
	}
	defer file.Close()
	for i := range slots {
		slots[i] = make([]byte, f.size)
		if _, err := file.ReadAt(slots[i], int64(i)*secondSlot); err != nil && !errors.Is(err, io.EOF) {
			return slots, fmt.Errorf("read %s: %w", f.name, err)
		}
	}
	return slots, nil
}

// write fills a slot, durably; where there is no file, both.
func (f slotFile) write(slot int, b []byte) error {
	file, err := f.fs.Open(f.name)
	if errors.Is(err, iofs.ErrNotExist) {
		return f.create(b)
	}
	if err != nil {
		return err
	}
	if _, err = file.WriteAt(b, int64(slot)*secondSlot); err == nil {
		err = file.Datasync()
	}
	return errors.Join(err, file.Close())
}

// create makes the file, whole or not at all.
func (f slotFile) create(b []byte) error {
	tmp := f.name + ".tmp"
	if err := f.fs.Remove(tmp); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return err
	}
	file, err := f.fs.Create(tmp)
	if err != nil {
		return err
	}
	both := make([]byte, secondSlot+f.size)
	copy(both, b)
	copy(both[secondSlot:], b)
	_, err = file.WriteAt(both, 0)
	if err == nil {
		err = file.Sync()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := f.fs.Rename(tmp, f.name); err != nil {
		return err
	}
	return f.fs.SyncDir(path.Dir(f.name))
}
