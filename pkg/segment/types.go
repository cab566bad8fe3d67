package segment

import (
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Limits. What is larger is refused on the way in, and taken for damage on the way out.
const (
	// MaxBatchBytes limits a batch with its header, and so the memory that recovering a file takes.
	MaxBatchBytes = 32 << 20
	// MaxBodyBytes limits the body of one record.
	MaxBodyBytes = MaxBatchBytes - batchHeaderSize - recordHeaderSize
	// MaxSegmentBytes limits a file, footer included; the index stores offsets in 32 bits.
	MaxSegmentBytes = 1<<32 - 1
)

// Errors of opening. A file for which one of these is returned was not damaged, only not finished.
var (
	// ErrUnsealed: the file has a header but no complete footer. [Recover] it.
	ErrUnsealed = errors.New("segment is not sealed")
	// ErrBlank: the file has no header, because its creation was cut short. Nothing was ever acknowledged from it.
	ErrBlank = errors.New("segment is blank")
	// ErrRetired: the file is kept for reuse and holds nothing.
	ErrRetired = errors.New("segment is retired")
	// ErrVersion: the file was written in a format that this program does not know.
	ErrVersion = errors.New("segment has an unknown format version")
)

// ErrTooLarge is returned by AppendBatch for a batch over [MaxBatchBytes], or one that would grow the file over
// [MaxSegmentBytes]. Nothing was written.
var ErrTooLarge = errors.New("batch is too large")

// ErrInvalid is wrapped by AppendBatch's error for a record that may not be stored: unknown kind, negative entry,
// ledger with its high bit set, body over the limit. Nothing was written.
var ErrInvalid = errors.New("invalid record")

// ErrFailed is wrapped by everything a [Writer] is asked to do after a write or sync of it has failed: what the
// file holds is no longer known, and trying again could report lost bytes as durable.
var ErrFailed = errors.New("segment failed earlier")

// Kind tells what a record says.
type Kind uint8

// The kinds. Their numbers are part of the format.
const (
	// KindEntry holds an entry of a ledger.
	KindEntry Kind = 1
	// KindFence raises the ledger's term to Term.
	KindFence Kind = 2
	// KindLAC makes a LAC known without an entry.
	KindLAC Kind = 3
	// KindLimbo says that entries of the ledger may have been lost here.
	KindLimbo Kind = 4
	// KindLimboCleared ends limbo.
	KindLimboCleared Kind = 5
	// KindTombstone says that the ledger was deleted.
	KindTombstone Kind = 6
)

var kindNames = [...]string{"invalid", "entry", "fence", "lac", "limbo", "limbo-cleared", "tombstone"}

// Valid reports whether k is one of the kinds.
func (k Kind) Valid() bool { return k >= KindEntry && k <= KindTombstone }

// String names k as `penstock segment dump` prints it.
func (k Kind) String() string {
	if !k.Valid() {
		return fmt.Sprintf("kind-%d", uint8(k))
	}
	return kindNames[k]
}

// Header identifies a segment.
type Header struct {
	// SegmentUUID is new for each segment, also when its file is reused.
	SegmentUUID entry.UUID
	// Sequence orders the segments of a store; the next one has the next number.
	Sequence uint64
	// Generation counts the uses of the file. Create raises it above that of a reused file.
	Generation uint32
	// Cluster and Storage say whose data it is.
	Cluster, Storage entry.UUID
}

// Record is one record. Fields that a kind does not need are stored as they are.
type Record struct {
	Kind   Kind
	Ledger entry.LedgerID
	Entry  entry.EntryID
	// LAC is what was confirmed when an entry was added, or what a KindLAC says.
	LAC  entry.EntryID
	Term entry.Term
	// Nonce is that of the ledger's writer.
	Nonce uint64
	// Checksum is entry.Checksum(Ledger, Entry, Body). The writer of a KindEntry gives it and has verified it;
	// for the other kinds it is computed on append.
	Checksum uint32
	// Body is envelope and frame of a KindEntry; mostly empty for the others.
	Body []byte
}

// Location is the place of a record in its segment.
type Location struct {
	// Offset is from the start of the file.
	Offset int64
	// Length counts the record with its header; the body is RecordOverhead shorter.
	Length uint32
}

// RecordOverhead is what a record takes beside its body, in bytes.
const RecordOverhead = recordHeaderSize

// LedgerInfo sums up the records of one ledger in one segment.
type LedgerInfo struct {
	Ledger entry.LedgerID
	// Nonce is the first that is not 0 in a record of the ledger.
	Nonce uint64
	// Term is the highest in a record of any kind; Controls tells of fences alone.
	Term entry.Term
	// LAC is the highest in a KindEntry or KindLAC, NoEntry if there is none.
	LAC entry.EntryID
	// First and Last are the lowest and highest entries; NoEntry if there are only control records.
	First, Last entry.EntryID
	// Entries counts KindEntry records, copies of one entry included.
	Entries int64
	// Bytes is the size of all records of the ledger with their headers.
	Bytes int64
}

// Control is a record of any kind but KindEntry, without its body. Controls are listed in the order they were
// appended.
type Control struct {
	Kind     Kind
	Ledger   entry.LedgerID
	Entry    entry.EntryID
	LAC      entry.EntryID
	Term     entry.Term
	Nonce    uint64
	Location Location
}

// IndexEntry tells where an entry is.
type IndexEntry struct {
	Ledger   entry.LedgerID
	Entry    entry.EntryID
	Location Location
}

// Gap is a stretch of a recovered segment that held acknowledged batches and cannot be read.
type Gap struct {
	// Offset is where the damage begins, End where the next readable batch begins, or what is known to have been
	// durable ends.
	Offset, End int64
}

// Corruption is a verdict on a recovered segment: bytes that had been durable cannot be read back. The ledgers it
// affects must be put in limbo and fenced, durably, before the segment is sealed: the seal keeps the gaps, but not
// whom they affect.
type Corruption struct {
	Gaps []Gap
	// Ledgers are those that had records in the gaps, sorted, unless AllLedgers.
	Ledgers []entry.LedgerID
	// AllLedgers is set if that cannot be told: then every ledger of the store may be affected.
	AllLedgers bool
}

// Affects reports whether records of l may have been lost.
func (c *Corruption) Affects(l entry.LedgerID) bool {
	if c.AllLedgers {
		return true
	}
	_, found := slices.BinarySearch(c.Ledgers, l)
	return found
}

// CorruptError says that bytes of a segment do not carry the checksum they should, or make no sense.
// What they held is unknown, not absent.
type CorruptError struct {
	Path   string
	Offset int64
	// What was being read: "header", "batch", "record", "body", "footer".
	What string
}

// Error says what is damaged and where.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("corrupt %s at offset %d of %s", e.What, e.Offset, e.Path)
}
