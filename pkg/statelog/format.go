package statelog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// The format of an entry is in docs/formats.md: a header, then records, each with a checksum over its lengths and head
// and one over its value, so that a damaged value still tells whose it is.
const (
	formatVersion = 1

	headerSize       = 24
	recordHeaderSize = 16
	minHead          = 4
)

// op is what a record does.
type op uint8

const (
	opPut op = iota
	opDelete
	opDeleteOwner
	// opBefore names the owners of the entry before: its value is their hashes. So one that cannot be read is charged to
	// those, and to nobody else.
	opBefore
)

// beforeOwner fills the owner of an opBefore.
const beforeOwner = "-"

// hashOf is how an opBefore names an owner: FNV-1a. Two owners of one hash are refused together, which does no harm.
func hashOf(owner string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(owner) {
		h = (h ^ uint64(owner[i])) * 1099511628211
	}
	return h
}

// appendBefore appends an opBefore.
func appendBefore(b []byte, owners []uint64) []byte {
	value := make([]byte, 0, 8*len(owners))
	for _, h := range owners {
		value = binary.BigEndian.AppendUint64(value, h)
	}
	return appendRecord(b, opBefore, 0, beforeOwner, nil, value)
}

// ownersOf returns the hashes of an entry's owners, in order, and those that it names of the entry before; false if it
// names none, or its damage leaves that open.
func ownersOf(body []byte) (own, before []uint64, named bool) {
	err := eachRecord(body, func(_ int32, r *stored) error {
		switch {
		case r.op != opBefore:
			own = append(own, hashOf(r.owner))
		case r.bad == nil && len(r.value)%8 == 0:
			named = true
			for v := r.value; len(v) > 0; v = v[8:] {
				before = append(before, binary.BigEndian.Uint64(v))
			}
		}
		return nil
	})
	return compact(own), before, named && err == nil
}

// compact sorts hashes and leaves out what is there twice.
func compact(h []uint64) []uint64 {
	slices.Sort(h)
	return slices.Compact(h)
}

// header is the start of an entry.
type header struct {
	seq   entry.Offset // entries of a log are numbered from 0
	time  int64        // Unix milliseconds
	count uint32
}

// stored is a record as encoded. Key and value alias the entry's body.
type stored struct {
	op    op
	kind  uint8
	owner string
	key   []byte
	value []byte
	size  int // of all of it, encoded
	// bad says what is wrong with the value; the rest is good.
	bad error
}

// FormatError says that an entry is not of this format, or of a newer version.
type FormatError struct{ Detail string }

// Error says what was found.
func (e *FormatError) Error() string { return "state log entry: " + e.Detail }

var errValueChecksum = errors.New("checksum of the value does not match")

// appendHeader makes room for an entry's header; putHeader fills it.
func appendHeader(b []byte) []byte { return append(b, make([]byte, headerSize)...) }

func putHeader(b []byte, h header) {
	b[0], b[1], b[2], b[3] = formatVersion, 0, 0, 0
	binary.BigEndian.PutUint32(b[4:], h.count)
	binary.BigEndian.PutUint64(b[8:], uint64(h.seq))
	binary.BigEndian.PutUint64(b[16:], uint64(h.time))
}

// encodedSize is what a record takes in an entry.
func encodedSize(owner string, key, value []byte) int {
	return recordHeaderSize + minHead + len(owner) + len(key) + len(value)
}

func appendRecord(b []byte, o op, kind uint8, owner string, key, value []byte) []byte {
	at := len(b)
	b = binary.BigEndian.AppendUint32(b, uint32(minHead+len(owner)+len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	b = append(b, make([]byte, 8)...)
	b = append(b, byte(o), kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(owner)))
	b = append(b, owner...)
	b = append(b, key...)
	head := entry.UpdateCRC32C(entry.CRC32C(b[at:at+8]), b[at+recordHeaderSize:])
	binary.BigEndian.PutUint32(b[at+8:], head)
	b = append(b, value...)
	binary.BigEndian.PutUint32(b[at+12:], entry.CRC32C(value))
	return b
}

// parseHeader reads an entry's header.
func parseHeader(body []byte) (header, error) {
	if len(body) < headerSize {
		return header{}, &FormatError{fmt.Sprintf("%d bytes, a header alone has %d", len(body), headerSize)}
	}
	if body[0] != formatVersion || body[1] != 0 {
		return header{}, &FormatError{fmt.Sprintf("version %d with flags %#02x, this program knows version %d", body[0], body[1], formatVersion)}
	}
	h := header{
		count: binary.BigEndian.Uint32(body[4:]),
		seq:   entry.Offset(binary.BigEndian.Uint64(body[8:])),
		time:  int64(binary.BigEndian.Uint64(body[16:])),
	}
	if uint64(h.count)*(recordHeaderSize+minHead) > uint64(len(body)-headerSize) {
		return header{}, &FormatError{fmt.Sprintf("%d records in %d bytes", h.count, len(body))}
	}
	return h, nil
}

// eachRecord calls fn with each record of an entry. An error that is fn's is returned as it is; a *FormatError means that
// the rest cannot be told apart.
func eachRecord(body []byte, fn func(i int32, r *stored) error) error {
	h, err := parseHeader(body)
	if err != nil {
		return err
	}
	b := body[headerSize:]
	for i := range h.count {
		r, n, err := parseRecord(b)
		if err != nil {
			return fmt.Errorf("record %d: %w", i, err)
		}
		b = b[n:]
		if err := fn(int32(i), &r); err != nil {
			return err
		}
	}
	if len(b) > 0 {
		return &FormatError{fmt.Sprintf("%d bytes after the last record", len(b))}
	}
	return nil
}

func parseRecord(b []byte) (stored, int, error) {
	if len(b) < recordHeaderSize {
		return stored{}, 0, &FormatError{fmt.Sprintf("%d bytes left for a record", len(b))}
	}
	headLen, valueLen := binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
	rest := b[recordHeaderSize:]
	if headLen < minHead || uint64(headLen)+uint64(valueLen) > uint64(len(rest)) {
		return stored{}, 0, &FormatError{fmt.Sprintf("head of %d and value of %d bytes in %d", headLen, valueLen, len(rest))}
	}
	head, value := rest[:headLen], rest[headLen:headLen+valueLen]
	if entry.UpdateCRC32C(entry.CRC32C(b[:8]), head) != binary.BigEndian.Uint32(b[8:]) {
		return stored{}, 0, &FormatError{"checksum of a record's head does not match"}
	}
	ownerLen := int(binary.BigEndian.Uint16(head[2:]))
	if head[0] > byte(opBefore) || ownerLen == 0 || ownerLen > MaxOwner || minHead+ownerLen > len(head) {
		return stored{}, 0, &FormatError{fmt.Sprintf("operation %d, owner of %d bytes in a head of %d", head[0], ownerLen, len(head))}
	}
	size := recordHeaderSize + int(headLen) + int(valueLen)
	r := stored{
		op: op(head[0]), kind: head[1], owner: string(head[minHead : minHead+ownerLen]),
		key: head[minHead+ownerLen:], value: value, size: size,
	}
	if entry.CRC32C(value) != binary.BigEndian.Uint32(b[12:]) {
		r.bad = errValueChecksum
	}
	return r, size, nil
}

// describe is what a chain needs to know of an entry: entries are its offsets.
func describe(body []byte) (entry.Offset, int64, error) {
	h, err := parseHeader(body)
	if err != nil {
		return 0, 0, err
	}
	return h.seq + 1, h.time, nil
}
