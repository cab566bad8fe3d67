package bookie

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	iofs "io/fs"
	"path"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// startName is the file that counts the starts on a disk.
const startName = "START"

const (
	startVersion = 1
	startSize    = 28
)

var startMagic = [8]byte{'P', 'N', 'S', 'T', 'S', 'T', 'R', 'T'}

// errStart is returned for bytes that are no slot of that file.
var errStart = errors.New("count of starts is damaged")

// encodeStart returns the bytes of a slot.
func encodeStart(n uint64) []byte {
	b := append([]byte{}, startMagic[:]...)
	b = binary.BigEndian.AppendUint16(b, startVersion)
	b = append(b, 0, 0, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, n)
	return binary.BigEndian.AppendUint32(b, entry.CRC32C(b))
}

// decodeStart reads a slot.
func decodeStart(b []byte) (uint64, error) {
	if len(b) != startSize || [8]byte(b) != startMagic || binary.BigEndian.Uint16(b[8:]) != startVersion ||
		entry.CRC32C(b[:startSize-4]) != binary.BigEndian.Uint32(b[startSize-4:]) {
		return 0, errStart
	}
	return binary.BigEndian.Uint64(b[16:]), nil
}

// starts is how often a bookie has started on a disk, by the disk's own count.
type starts struct {
	who     Identity
	cookies Cookies
	dir     string
	file    slotFile
	known   uint64
	next    int // slot to be written
}

// loadStarts compares the disk's count with the cluster's record. A disk that knows of fewer starts than the cluster is an
// old copy of itself, or what is left of it: it would deny what the bookie has acknowledged since, so that is an
// [*IdentityError]. A disk that knows of more was stopped while it counted, or is newer than etcd's data are.
//
// It does not find a copy that was made since the latest start. That would take a record of each moment, with each a write
// to etcd; a directory is copied while its bookie does not run, and then there is a start in between.
func (d disk) loadStarts(ctx context.Context, who Identity, cookies Cookies) (*starts, error) {
	s := &starts{who: who, cookies: cookies, dir: d.dir, file: slotFile{fs: d.fs, name: path.Join(d.dir, startName), size: startSize}}
	slots, err := s.file.read()
	switch {
	case errors.Is(err, iofs.ErrNotExist): // it has not started
	case err != nil:
		return nil, fmt.Errorf("count starts: %w", err)
	default:
		valid := false
		for i, b := range slots {
			if n, err := decodeStart(b); err == nil && (!valid || n > s.known) {
				valid, s.known, s.next = true, n, 1-i
			}
		}
		if !valid {
			return nil, &IdentityError{
				Problem: fmt.Sprintf("%s: %v", s.file.name, errStart),
				Advice:  "restore the file from a copy, or check the disk; if it is lost, " + lostAdvice,
			}
		}
	}
	record, err := cookies.GetCookie(ctx, who.ID)
	if err != nil {
		return nil, fmt.Errorf("count starts: %w", err)
	}
	if record.Starts > s.known {
		return nil, s.old(record.Starts)
	}
	return s, nil
}

func (s *starts) old(times uint64) error {
	return &IdentityError{
		Problem: fmt.Sprintf("%s is an old copy of itself: bookie %q has started %d times, and this disk knows of %d", s.dir, s.who.ID, times, s.known),
		Advice:  "mount the disk that the bookie ran on last; if it is lost, " + lostAdvice,
	}
}

// count counts this start, before anything is served, and after it is known that no other process lives under this
// identity: a copy that is started by mistake must not make the original one an old copy.
func (s *starts) count(ctx context.Context) error {
	// First on the disk: a stop in between leaves a disk that knows of more, which it may.
	if err := s.file.write(s.next, encodeStart(s.known+1)); err != nil {
		return fmt.Errorf("count starts: %w", err)
	}
	err := s.cookies.CountStart(ctx, s.who.ID, s.who.Storage, s.known+1)
	if errors.Is(err, meta.ErrConflict) { // a twin was faster
		return s.old(s.known + 1)
	}
	if err != nil {
		return fmt.Errorf("count starts: %w", err)
	}
	return nil
}
