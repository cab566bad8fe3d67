package ledgerstore

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	iofs "io/fs"
	"path"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// The manifest lists the segments that may hold what was acknowledged. It is replaced as a whole: written beside,
// synced, renamed over the old one, directory synced. docs/formats.md has its bytes.
const (
	manifestName    = "MANIFEST"
	manifestTemp    = "MANIFEST.tmp"
	manifestMagic   = "PENSTMAN"
	manifestVersion = 1

	manifestHeaderSize  = 64
	manifestSegmentSize = 32
	manifestMaxSegments = 1 << 20
)

type manifest struct {
	// edition grows with each write.
	edition uint64
	// next is the lowest sequence number never used.
	next             uint64
	cluster, storage entry.UUID
	// segments are sorted by sequence, which is unique.
	segments []manifestSegment
}

type manifestSegment struct {
	sequence uint64
	rewrite  uint32
	uuid     entry.UUID
}

// errManifest says that the manifest is damaged. What it listed is unknown.
var errManifest = errors.New("manifest is damaged")

func (m *manifest) size() int { return manifestHeaderSize + len(m.segments)*manifestSegmentSize + 4 }

func (m *manifest) encode() []byte {
	b := make([]byte, 0, m.size())
	b = append(b, manifestMagic...)
	b = binary.BigEndian.AppendUint32(b, manifestVersion)
	b = binary.BigEndian.AppendUint32(b, uint32(len(m.segments)))
	b = binary.BigEndian.AppendUint64(b, m.edition)
	b = binary.BigEndian.AppendUint64(b, m.next)
	b = append(b, m.cluster[:]...)
	b = append(b, m.storage[:]...)
	for _, s := range m.segments {
		b = binary.BigEndian.AppendUint64(b, s.sequence)
		b = binary.BigEndian.AppendUint32(b, s.rewrite)
		b = binary.BigEndian.AppendUint32(b, 0)
		b = append(b, s.uuid[:]...)
	}
	return binary.BigEndian.AppendUint32(b, entry.CRC32C(b))
}

func decodeManifest(b []byte) (*manifest, error) {
	if len(b) < manifestHeaderSize+4 || string(b[:8]) != manifestMagic {
		return nil, fmt.Errorf("%w: no header", errManifest)
	}
	body, sum := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	if entry.CRC32C(body) != sum {
		return nil, fmt.Errorf("%w: checksum differs", errManifest)
	}
	if v := binary.BigEndian.Uint32(b[8:]); v != manifestVersion {
		return nil, fmt.Errorf("manifest has format version %d, this program knows %d", v, manifestVersion)
	}
	n := binary.BigEndian.Uint32(b[12:])
	if n > manifestMaxSegments || len(body) != manifestHeaderSize+int(n)*manifestSegmentSize {
		return nil, fmt.Errorf("%w: %d segments in %d bytes", errManifest, n, len(b))
	}
	m := &manifest{edition: binary.BigEndian.Uint64(b[16:]), next: binary.BigEndian.Uint64(b[24:])}
	copy(m.cluster[:], b[32:])
	copy(m.storage[:], b[48:])
	for at := manifestHeaderSize; at < len(body); at += manifestSegmentSize {
		s := manifestSegment{sequence: binary.BigEndian.Uint64(b[at:]), rewrite: binary.BigEndian.Uint32(b[at+8:])}
		copy(s.uuid[:], b[at+16:])
		if k := len(m.segments); k > 0 && m.segments[k-1].sequence >= s.sequence || s.sequence >= m.next {
			return nil, fmt.Errorf("%w: sequence %d is out of order", errManifest, s.sequence)
		}
		m.segments = append(m.segments, s)
	}
	return m, nil
}

// clone copies m for the next edition.
func (m *manifest) clone() *manifest {
	c := *m
	c.segments = slices.Clone(m.segments)
	c.edition++
	return &c
}

func (m *manifest) add(s manifestSegment) {
	i, found := slices.BinarySearchFunc(m.segments, s, func(a, b manifestSegment) int { return cmp.Compare(a.sequence, b.sequence) })
	if found {
		m.segments[i] = s
		return
	}
	m.segments = slices.Insert(m.segments, i, s)
	m.next = max(m.next, s.sequence+1)
}

func (m *manifest) remove(sequence uint64) {
	m.segments = slices.DeleteFunc(m.segments, func(s manifestSegment) bool { return s.sequence == sequence })
}

// readManifest returns nil without an error if there is none.
func readManifest(fs vfs.FS, dir string) (*manifest, error) {
	f, err := fs.OpenRead(path.Join(dir, manifestName))
	if errors.Is(err, iofs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no manifest is an answer
	}
	if err != nil {
		return nil, fmt.Errorf("open manifest: %w", err)
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	if size > manifestHeaderSize+manifestMaxSegments*manifestSegmentSize+4 {
		return nil, fmt.Errorf("%w: %d bytes", errManifest, size)
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); n < len(b) {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	return decodeManifest(b)
}

// writeManifest replaces the manifest, durably.
func writeManifest(fs vfs.FS, dir string, m *manifest) error {
	temp := path.Join(dir, manifestTemp)
	if err := fs.Remove(temp); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return fmt.Errorf("remove old %s: %w", manifestTemp, err)
	}
	f, err := fs.Create(temp)
	if err != nil {
		return fmt.Errorf("create manifest: %w", err)
	}
	_, err = f.WriteAt(m.encode(), 0)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	if err := fs.Rename(temp, path.Join(dir, manifestName)); err != nil {
		return fmt.Errorf("publish manifest: %w", err)
	}
	if err := fs.SyncDir(dir); err != nil {
		return unsettled{fmt.Errorf("publish manifest: %w", err)}
	}
	return nil
}

// unsettled is the error of a step that may have been taken or not: which, the next start will see. It hides what it
// wraps, so that nobody takes it for a lack of space that has changed nothing.
type unsettled struct{ err error }

func (u unsettled) Error() string { return u.err.Error() }
