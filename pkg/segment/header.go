package segment

import (
	"errors"
	"fmt"
	"io"
	"path"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// readHeaderBlock reads the header of either state. It returns ErrBlank, ErrVersion or a *CorruptError if there is
// none.
func readHeaderBlock(f io.ReaderAt, path string) (fileHeader, error) {
	// The block and the start of the first batch: a file is blank only if there is nothing there either.
	var b [headerBlockSize + vfs.SectorSize]byte
	n, err := f.ReadAt(b[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return fileHeader{}, fmt.Errorf("read header of %s: %w", path, err)
	}
	h, err := decodeHeader(b[:headerSize])
	if errors.Is(err, errDamaged) {
		h, err = decodeHeader(b[headerCopyOffset : headerCopyOffset+headerSize])
	}
	if err == nil {
		return h, nil
	}
	if !errors.Is(err, errDamaged) {
		return fileHeader{}, fmt.Errorf("read header of %s: %w", path, err)
	}
	for _, x := range b[:n] {
		if x != 0 {
			return fileHeader{}, &CorruptError{Path: path, What: whatHeader}
		}
	}
	return fileHeader{}, fmt.Errorf("%s: %w", path, ErrBlank)
}

// readLiveHeader is readHeaderBlock for a segment that is in use; another one is ErrRetired.
func readLiveHeader(f io.ReaderAt, path string) (fileHeader, error) {
	h, err := readHeaderBlock(f, path)
	if err == nil && h.retired {
		err = fmt.Errorf("%s: %w", path, ErrRetired)
	}
	return h, err
}

// ReadHeader reads the header of a segment, sealed or not. It returns [ErrBlank], [ErrRetired], [ErrVersion] or a
// *CorruptError if there is none.
func ReadHeader(fs vfs.FS, path string) (Header, error) {
	f, err := fs.OpenRead(path)
	if err != nil {
		return Header{}, fmt.Errorf("open segment: %w", err)
	}
	h, err := readLiveHeader(f, path)
	return h.Header, errors.Join(err, f.Close())
}

// Retire makes the segment at from hold nothing, durably, and renames it to to, durably, for a later Create with
// reuse. A crash leaves it as it was, or retired under either name. The caller has made sure that nothing needs it.
func Retire(fs vfs.FS, from, to string) error {
	if err := retireFile(fs, from); err != nil {
		return fmt.Errorf("retire segment %s: %w", from, err)
	}
	if from == to {
		return nil
	}
	if err := fs.Rename(from, to); err != nil {
		return fmt.Errorf("retire segment: %w", err)
	}
	for _, dir := range uniqueDirs(to, from) {
		if err := fs.SyncDir(dir); err != nil {
			return fmt.Errorf("retire segment %s: %w", from, err)
		}
	}
	return nil
}

func uniqueDirs(a, b string) []string {
	if path.Dir(a) == path.Dir(b) {
		return []string{path.Dir(a)}
	}
	return []string{path.Dir(a), path.Dir(b)}
}

func retireFile(fs vfs.FS, name string) (err error) {
	f, err := fs.Open(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	old, err := readHeaderBlock(f, name)
	var damage *CorruptError
	switch {
	case errors.As(err, &damage), errors.Is(err, ErrBlank):
		// Its generation is unknown. The next use gets a new UUID, which alone keeps old bytes from verifying.
	case err != nil:
		return err
	}
	retired := fileHeader{Header: Header{Generation: old.Generation}, retired: true, size: old.size}
	if _, err := f.WriteAt(encodeHeaderBlock(retired), 0); err != nil {
		return err
	}
	return f.Sync()
}
