// Package entry holds the numbers and names that every floor of Penstock shares: ledger and entry
// identifiers, positions, offsets, terms, epochs, storage identities, and the entry checksum.
//
// The package has no behaviour beyond formatting, parsing and checksumming, and imports nothing of
// Penstock. A type per number keeps an offset from being passed where an entry id is meant.
package entry

import (
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
)

// LedgerID names a ledger. The high bit is always 0, the next 15 bits are the cluster's restore
// generation, the remaining 48 bits come from blocks reserved in etcd. Ids are never reused and grow
// within a chain of ledgers.
type LedgerID uint64

// LedgerSequenceBits is the width of the part of a [LedgerID] below its restore generation.
const LedgerSequenceBits = 48

// MakeLedgerID joins a restore generation (15 bits) and a sequence number (48 bits).
func MakeLedgerID(generation uint16, sequence uint64) LedgerID {
	return LedgerID(uint64(generation&0x7fff)<<LedgerSequenceBits | sequence&(1<<LedgerSequenceBits-1))
}

// Generation returns the restore generation the id was reserved under.
func (l LedgerID) Generation() uint16 { return uint16(l >> LedgerSequenceBits) }

// EntryID numbers the entries of one ledger from 0 without gaps. [NoEntry] stands for "before the first".
type EntryID int64

// NoEntry is the LAC of a ledger in which nothing is confirmed, and the last entry of an empty ledger.
const NoEntry EntryID = -1

// Offset numbers the messages of one topic partition contiguously, in append order, from 0. It survives
// failover and trimming. Markers and chunks take an offset too.
type Offset uint64

// Term is the number of the last recovery of a ledger. A bookie refuses requests of an older term.
// The original writer has term 0.
type Term uint64

// Epoch is the number of the last takeover of a bundle. It never falls.
type Epoch uint64

// Position locates a message: its ledger, its entry, and its index within the entry's batch.
// Positions of one topic are ordered by ledger, entry, batch index.
type Position struct {
	Ledger LedgerID
	Entry  EntryID
	Batch  int32
}

// Compare returns -1, 0 or 1 as p is before, at or after q.
func (p Position) Compare(q Position) int {
	switch {
	case p.Ledger != q.Ledger:
		return order(p.Ledger < q.Ledger)
	case p.Entry != q.Entry:
		return order(p.Entry < q.Entry)
	case p.Batch != q.Batch:
		return order(p.Batch < q.Batch)
	}
	return 0
}

func order(less bool) int {
	if less {
		return -1
	}
	return 1
}

// String formats p as "ledger:entry:batch", which [ParsePosition] reads back.
func (p Position) String() string {
	return fmt.Sprintf("%d:%d:%d", uint64(p.Ledger), int64(p.Entry), p.Batch)
}

// ParsePosition reads "ledger:entry" or "ledger:entry:batch".
func ParsePosition(s string) (Position, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 2 && len(parts) != 3 {
		return Position{}, fmt.Errorf("parse position %q: want ledger:entry or ledger:entry:batch", s)
	}
	ledger, err := strconv.ParseUint(parts[0], 10, 63)
	if err != nil {
		return Position{}, fmt.Errorf("parse position %q: ledger: %w", s, err)
	}
	id, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || id < -1 {
		return Position{}, fmt.Errorf("parse position %q: entry is not a number ≥ -1", s)
	}
	p := Position{Ledger: LedgerID(ledger), Entry: EntryID(id)}
	if len(parts) == 3 {
		batch, err := strconv.ParseInt(parts[2], 10, 32)
		if err != nil || batch < 0 {
			return Position{}, fmt.Errorf("parse position %q: batch index is not a number ≥ 0", s)
		}
		p.Batch = int32(batch)
	}
	return p, nil
}

// UUID is a 16-byte identity: of a cluster, of a topic, or of the data on a bookie's disk.
// The zero UUID means "none".
type UUID [16]byte

// StorageUUID is the identity of the data on one bookie's disk. Ledger ensembles name storage UUIDs,
// never addresses. An empty disk gets a new one; a lost one is never reused.
type StorageUUID = UUID

// String formats u in the canonical 8-4-4-4-12 form.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// IsZero reports whether u is the zero UUID, "none".
func (u UUID) IsZero() bool { return u == UUID{} }

// ErrUUID is returned by [ParseUUID] for anything but 32 hexadecimal digits, hyphens ignored.
var ErrUUID = errors.New("not a UUID: want 32 hexadecimal digits")

// ParseUUID reads a UUID in canonical form, or without hyphens.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	h := strings.ReplaceAll(s, "-", "")
	if len(h) != 32 {
		return u, fmt.Errorf("parse %q: %w", s, ErrUUID)
	}
	if _, err := hex.Decode(u[:], []byte(h)); err != nil {
		return u, fmt.Errorf("parse %q: %w", s, ErrUUID)
	}
	return u, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC32C is the Castagnoli checksum of b, as used in every format of Penstock.
func CRC32C(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// UpdateCRC32C continues crc over b.
func UpdateCRC32C(crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }

// Checksum is the checksum that travels and rests with an entry: CRC32C over the ledger id and the entry
// id (8 bytes each, big endian) and the body (envelope and frame). The piggybacked LAC is outside, since
// recovery rewrites it. Every bookie checks it before it acknowledges, every reader after it has read.
func Checksum(l LedgerID, e EntryID, body []byte) uint32 {
	// The ids byte by byte: as a slice they would be allocated, since the package's assembly lets it escape.
	crc := ^uint32(0)
	for shift := 56; shift >= 0; shift -= 8 {
		crc = castagnoli[byte(crc)^byte(l>>shift)] ^ crc>>8
	}
	for shift := 56; shift >= 0; shift -= 8 {
		crc = castagnoli[byte(crc)^byte(e>>shift)] ^ crc>>8
	}
	return crc32.Update(^crc, castagnoli, body)
}
