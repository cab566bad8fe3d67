package bookie

import (
	"encoding/binary"
	"errors"
	"fmt"
	iofs "io/fs"
	"sync"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// revisionName is the file that keeps the highest revision of etcd that was seen.
const revisionName = "REVISION"

const (
	revisionVersion = 1
	revisionSize    = 36
)

var revisionMagic = [8]byte{'P', 'N', 'S', 'T', 'R', 'E', 'V', 'N'}

// errRevision is returned for bytes that are no revision slot.
var errRevision = errors.New("revision is damaged")

// seenRevision is the highest revision of etcd that a bookie has seen, and the lower one that it saw afterwards, if it
// did: then etcd was restored from an older copy, and nothing that it says of deletions is to be trusted.
type seenRevision struct {
	highest int64
	back    int64 // 0: never
}

// encode returns the bytes of a slot.
func (r seenRevision) encode() []byte {
	b := append([]byte{}, revisionMagic[:]...)
	b = binary.BigEndian.AppendUint16(b, revisionVersion)
	b = append(b, 0, 0, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, uint64(r.highest))
	b = binary.BigEndian.AppendUint64(b, uint64(r.back))
	return binary.BigEndian.AppendUint32(b, entry.CRC32C(b))
}

// decodeRevision reads a slot.
func decodeRevision(b []byte) (seenRevision, error) {
	if len(b) < revisionSize || [8]byte(b) != revisionMagic || entry.CRC32C(b[:revisionSize-4]) != binary.BigEndian.Uint32(b[revisionSize-4:]) ||
		binary.BigEndian.Uint16(b[8:]) != revisionVersion {
		return seenRevision{}, errRevision
	}
	r := seenRevision{highest: int64(binary.BigEndian.Uint64(b[16:])), back: int64(binary.BigEndian.Uint64(b[24:]))}
	if r.highest < 0 || r.back < 0 {
		return seenRevision{}, errRevision
	}
	return r, nil
}

// revisions remembers, across restarts, how far this bookie has seen etcd go.
type revisions struct {
	file slotFile

	mu     sync.Mutex
	loaded bool
	seen   seenRevision
	saved  seenRevision
	slot   int // to be written next: 0 or 1
}

func newRevisions(fs vfs.FS, file string) *revisions {
	return &revisions{file: slotFile{fs: fs, name: file, size: revisionSize}}
}

// wentBackError says that etcd told a revision lower than one before.
type wentBackError struct {
	seen seenRevision
	file string
}

func (e *wentBackError) Error() string {
	return fmt.Sprintf("etcd was restored from an older copy: it was at revision %d after %d; "+
		"find out which ledgers it has forgotten, then stop this bookie, delete %s and start it", e.seen.back, e.seen.highest, e.file)
}

// note takes a revision that etcd has just told. It returns a *wentBackError if that is, or ever was, lower than one before.
func (r *revisions) note(rev int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.load(); err != nil {
		return err
	}
	if rev < r.seen.highest && r.seen.back == 0 {
		r.seen.back = rev
		if err := r.write(); err != nil {
			return fmt.Errorf("keep that etcd went back: %w", err)
		}
	}
	if r.seen.back != 0 {
		return &wentBackError{seen: r.seen, file: r.file.name}
	}
	r.seen.highest = rev
	return nil
}

// save makes what was noted durable.
func (r *revisions) save() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen == r.saved {
		return nil
	}
	return r.write()
}

// load reads the file once. A file that cannot be read, or has no valid slot, is an error: it may have said that etcd
// went back.
func (r *revisions) load() error {
	if r.loaded {
		return nil
	}
	slots, err := r.file.read()
	if errors.Is(err, iofs.ErrNotExist) {
		r.loaded = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("read etcd's revision: %w", err)
	}
	valid := 0
	for i, b := range slots {
		got, err := decodeRevision(b)
		if err != nil {
			continue
		}
		valid++
		if valid == 1 || got.highest > r.saved.highest || got.back != 0 {
			r.saved, r.slot = got, 1-i
		}
	}
	if valid == 0 {
		return fmt.Errorf("%s: %w: find out whether etcd was restored from an older copy, then stop this bookie, delete the file and start it", r.file.name, errRevision)
	}
	r.seen, r.loaded = r.saved, true
	return nil
}

// write puts what is known into the slot whose turn it is. r.mu is held.
func (r *revisions) write() error {
	if err := r.file.write(r.slot, r.seen.encode()); err != nil {
		return err
	}
	r.saved, r.slot = r.seen, 1-r.slot
	return nil
}
