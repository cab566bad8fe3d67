package segment

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Sizes in bytes, as in docs/formats.md.
const (
	headerBlockSize  = 4096 // header, its copy, and zeros; the first batch follows
	headerCopyOffset = 2048 // in another sector than the first copy, so that one torn write spares one of them
	headerSize       = 84
	batchHeaderSize  = 48
	recordHeaderSize = 56
	trailerSize      = 76
)

const (
	formatVersion = 1

	stateLive    = 1
	stateRetired = 2

	flagRecovered = 1 << 0
	flagDamaged   = 1 << 1
	knownFlags    = flagRecovered | flagDamaged
)

var (
	headerMagic  = [8]byte{'P', 'N', 'S', 'T', 'K', 'S', 'E', 'G'}
	batchMagic   = [4]byte{'P', 'N', 'B', 'T'}
	trailerMagic = [4]byte{'P', 'N', 'F', 'T'}
)

var be = binary.BigEndian

// seed starts every checksum of a segment, so that nothing written in another segment, in an earlier use of the
// same file, or at another place verifies.
type seed uint32

func newSeed(h Header) seed {
	var b [20]byte
	copy(b[:16], h.SegmentUUID[:])
	be.PutUint32(b[16:], h.Generation)
	return seed(entry.CRC32C(b[:]))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// at continues the seed over a place in the file, as entry.UpdateCRC32C would over its 8 bytes. Those would be
// allocated for each record, since they escape into the assembly.
func (s seed) at(offset int64) uint32 {
	crc := ^uint32(s)
	for shift := 56; shift >= 0; shift -= 8 {
		crc = castagnoli[byte(crc)^byte(offset>>shift)] ^ crc>>8
	}
	return ^crc
}

// fileHeader is what the header block holds.
type fileHeader struct {
	Header
	retired bool
	size    int64 // reserved on creation
}

// encodeHeaderBlock fills the block at the start of the file.
func encodeHeaderBlock(h fileHeader) []byte {
	block := make([]byte, headerBlockSize)
	b := block[:headerSize]
	copy(b, headerMagic[:])
	be.PutUint16(b[8:], formatVersion)
	be.PutUint16(b[10:], stateLive)
	if h.retired {
		be.PutUint16(b[10:], stateRetired)
	}
	be.PutUint32(b[12:], h.Generation)
	be.PutUint64(b[16:], h.Sequence)
	copy(b[24:], h.SegmentUUID[:])
	copy(b[40:], h.Cluster[:])
	copy(b[56:], h.Storage[:])
	be.PutUint64(b[72:], uint64(h.size)) // sizes are not negative
	be.PutUint32(b[80:], entry.CRC32C(b[:80]))
	copy(block[headerCopyOffset:], b)
	return block
}

// decodeHeader reads one copy of the header. It returns ErrVersion for another format, and errDamaged for what is
// no header.
func decodeHeader(b []byte) (fileHeader, error) {
	if len(b) < headerSize || [8]byte(b[:8]) != headerMagic || be.Uint32(b[80:]) != entry.CRC32C(b[:80]) {
		return fileHeader{}, errDamaged
	}
	if v := be.Uint16(b[8:]); v != formatVersion {
		return fileHeader{}, fmt.Errorf("version %d: %w", v, ErrVersion)
	}
	h := fileHeader{size: int64(be.Uint64(b[72:]))} // checked below
	state := be.Uint16(b[10:])
	if state != stateLive && state != stateRetired || h.size < 0 {
		return fileHeader{}, errDamaged
	}
	h.retired = state == stateRetired
	h.Generation = be.Uint32(b[12:])
	h.Sequence = be.Uint64(b[16:])
	copy(h.SegmentUUID[:], b[24:40])
	copy(h.Cluster[:], b[40:56])
	copy(h.Storage[:], b[56:72])
	return h, nil
}

// batchHeader precedes the records of a batch.
type batchHeader struct {
	seq         uint64 // 0, 1, … in the segment
	length      uint32 // of the records
	count       uint32 // of the records
	durableUpto int64
	prevDurable int64
	recordsCRC  uint32
}

func encodeBatchHeader(b []byte, s seed, generation uint32, offset int64, h batchHeader) {
	_ = b[batchHeaderSize-1]
	copy(b, batchMagic[:])
	be.PutUint32(b[4:], generation)
	be.PutUint64(b[8:], h.seq)
	be.PutUint32(b[16:], h.length)
	be.PutUint32(b[20:], h.count)
	be.PutUint64(b[24:], uint64(h.durableUpto)) // offsets are not negative
	be.PutUint64(b[32:], uint64(h.prevDurable)) // offsets are not negative
	be.PutUint32(b[40:], h.recordsCRC)
	be.PutUint32(b[44:], entry.UpdateCRC32C(s.at(offset), b[:44]))
}

// decodeBatchHeader reads the batch header at offset. It is false for what is not a header of this segment at this
// place, or breaks a limit.
func decodeBatchHeader(b []byte, s seed, generation uint32, offset int64) (batchHeader, bool) {
	if len(b) < batchHeaderSize || [4]byte(b[:4]) != batchMagic || be.Uint32(b[4:]) != generation ||
		be.Uint32(b[44:]) != entry.UpdateCRC32C(s.at(offset), b[:44]) {
		return batchHeader{}, false
	}
	h := batchHeader{
		seq:         be.Uint64(b[8:]),
		length:      be.Uint32(b[16:]),
		count:       be.Uint32(b[20:]),
		durableUpto: int64(be.Uint64(b[24:])), // checked below
		prevDurable: int64(be.Uint64(b[32:])), // checked below
		recordsCRC:  be.Uint32(b[40:]),
	}
	ok := h.length <= MaxBatchBytes-batchHeaderSize && h.count >= 1 &&
		uint64(h.count)*recordHeaderSize <= uint64(h.length) &&
		h.durableUpto >= 0 && h.durableUpto <= offset && h.prevDurable >= 0 && h.prevDurable <= MaxSegmentBytes
	return h, ok
}

// encodeRecord writes r's header and body to b, which has room for them.
func encodeRecord(b []byte, s seed, offset int64, r *Record) {
	_ = b[recordHeaderSize-1]
	b[0] = byte(r.Kind)
	b[1], b[2], b[3] = 0, 0, 0
	be.PutUint32(b[4:], uint32(len(r.Body))) // at most MaxBodyBytes
	be.PutUint64(b[8:], uint64(r.Ledger))
	be.PutUint64(b[16:], uint64(r.Entry)) // two's complement is the format
	be.PutUint64(b[24:], uint64(r.LAC))   // two's complement is the format
	be.PutUint64(b[32:], uint64(r.Term))
	be.PutUint64(b[40:], r.Nonce)
	be.PutUint32(b[48:], r.Checksum)
	be.PutUint32(b[52:], entry.UpdateCRC32C(s.at(offset), b[:52]))
	copy(b[recordHeaderSize:], r.Body)
}

// parseRecord reads the fields of a record header, without verifying its checksum, and returns the length of the
// body. It is false for fields that no writer stores.
func parseRecord(b []byte) (r Record, bodyLen uint32, ok bool) {
	_ = b[recordHeaderSize-1]
	r = Record{
		Kind:     Kind(b[0]),
		Ledger:   entry.LedgerID(be.Uint64(b[8:])),
		Entry:    entry.EntryID(be.Uint64(b[16:])), // two's complement is the format
		LAC:      entry.EntryID(be.Uint64(b[24:])), // two's complement is the format
		Term:     entry.Term(be.Uint64(b[32:])),
		Nonce:    be.Uint64(b[40:]),
		Checksum: be.Uint32(b[48:]),
	}
	bodyLen = be.Uint32(b[4:])
	return r, bodyLen, b[1]|b[2]|b[3] == 0 && bodyLen <= MaxBodyBytes && validate(&r) == nil
}

// decodeRecordHeader is parseRecord, with the header's checksum verified.
func decodeRecordHeader(b []byte, s seed, offset int64) (r Record, bodyLen uint32, ok bool) {
	if len(b) < recordHeaderSize || be.Uint32(b[52:]) != entry.UpdateCRC32C(s.at(offset), b[:52]) {
		return Record{}, 0, false
	}
	return parseRecord(b)
}

// decodeRecord reads and verifies a whole record; its body lies in b. what names the part that is damaged.
func decodeRecord(b []byte, s seed, offset int64) (r Record, what string) {
	r, bodyLen, ok := decodeRecordHeader(b, s, offset)
	if !ok || int(bodyLen) != len(b)-recordHeaderSize {
		return Record{}, whatRecord
	}
	r.Body = b[recordHeaderSize:]
	if entry.Checksum(r.Ledger, r.Entry, r.Body) != r.Checksum {
		return Record{}, whatBody
	}
	return r, ""
}

// validate tells whether a record may be stored. Its error wraps ErrInvalid.
func validate(r *Record) error {
	switch {
	case !r.Kind.Valid():
		return fmt.Errorf("kind %d: %w", uint8(r.Kind), ErrInvalid)
	case r.Ledger>>63 != 0:
		return fmt.Errorf("ledger %d has its high bit set: %w", uint64(r.Ledger), ErrInvalid)
	case r.Entry < entry.NoEntry || r.Kind == KindEntry && r.Entry < 0:
		return fmt.Errorf("%v of ledger %d has entry %d: %w", r.Kind, r.Ledger, r.Entry, ErrInvalid)
	case r.LAC < entry.NoEntry:
		return fmt.Errorf("%v of ledger %d has LAC %d: %w", r.Kind, r.Ledger, r.LAC, ErrInvalid)
	case len(r.Body) > MaxBodyBytes:
		return fmt.Errorf("body of %d bytes, at most %d: %w", len(r.Body), MaxBodyBytes, ErrInvalid)
	}
	return nil
}

// trailer ends a sealed segment. The tables lie between dataEnd and it, in the order of the counts.
type trailer struct {
	flags       uint16
	batches     uint32
	dataEnd     int64
	prevDurable int64
	indexRows   uint32
	ledgerRows  uint32
	controlRows uint32
	gapRows     uint32
}

func encodeTrailer(s seed, h Header, offset int64, t trailer) []byte {
	b := make([]byte, trailerSize)
	copy(b, trailerMagic[:])
	be.PutUint16(b[4:], formatVersion)
	be.PutUint16(b[6:], t.flags)
	be.PutUint32(b[8:], h.Generation)
	be.PutUint32(b[12:], t.batches)
	copy(b[16:], h.SegmentUUID[:])
	be.PutUint64(b[32:], h.Sequence)
	be.PutUint64(b[40:], uint64(t.dataEnd))     // offsets are not negative
	be.PutUint64(b[48:], uint64(t.prevDurable)) // offsets are not negative
	be.PutUint32(b[56:], t.indexRows)
	be.PutUint32(b[60:], t.ledgerRows)
	be.PutUint32(b[64:], t.controlRows)
	be.PutUint32(b[68:], t.gapRows)
	be.PutUint32(b[72:], entry.UpdateCRC32C(s.at(offset), b[:72]))
	return b
}

// decodeTrailer reads the trailer at offset, which is the end of the file less its size. It is false for anything
// but the trailer of this segment in a file of this size.
func decodeTrailer(b []byte, s seed, h Header, offset int64) (trailer, bool) {
	if len(b) != trailerSize || [4]byte(b[:4]) != trailerMagic || be.Uint16(b[4:]) != formatVersion ||
		be.Uint32(b[72:]) != entry.UpdateCRC32C(s.at(offset), b[:72]) ||
		be.Uint32(b[8:]) != h.Generation || entry.UUID(b[16:32]) != h.SegmentUUID || be.Uint64(b[32:]) != h.Sequence {
		return trailer{}, false
	}
	t := trailer{
		flags:       be.Uint16(b[6:]),
		batches:     be.Uint32(b[12:]),
		dataEnd:     int64(be.Uint64(b[40:])), // checked below
		prevDurable: int64(be.Uint64(b[48:])), // checked below
		indexRows:   be.Uint32(b[56:]),
		ledgerRows:  be.Uint32(b[60:]),
		controlRows: be.Uint32(b[64:]),
		gapRows:     be.Uint32(b[68:]),
	}
	ok := t.flags&^knownFlags == 0 && t.dataEnd >= headerBlockSize && t.dataEnd <= MaxSegmentBytes &&
		t.prevDurable >= 0 && t.prevDurable <= MaxSegmentBytes && t.dataEnd+t.tablesSize() == offset
	return t, ok
}

// tablesSize is what the tables take, without the trailer.
func (t trailer) tablesSize() int64 {
	return tableSize(t.indexRows, indexRowSize) + tableSize(t.ledgerRows, ledgerRowSize) +
		tableSize(t.controlRows, controlRowSize) + tableSize(t.gapRows, gapRowSize)
}
