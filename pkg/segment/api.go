package segment

import (
	"errors"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

const (
	batchHeaderSize  = 48
	recordHeaderSize = 56
)

// Writer appends to one segment.
//
// One goroutine at a time calls AppendBatch, SetPrevDurable, Room, Seal and Close. Sync, Size and ReadAt may be
// called from any goroutine at any time before Close, overlapping with everything else.
type Writer struct{}

// Create makes the segment at path, durable when it returns, name included, with size bytes of disk reserved.
// With reuse, path is a file that [Retire] has left there: its blocks are kept, and the generation raised.
// Without reuse the file must not exist.
func Create(fs vfs.FS, path string, h Header, size int64, reuse bool) (*Writer, error) {
	return nil, errors.ErrUnsupported
}

// Header returns the header as it was written, with the generation that the file got.
func (w *Writer) Header() Header { return Header{} }

// Path returns the file's path.
func (w *Writer) Path() string { return "" }

// AppendBatch writes recs behind what was written before, in one write, as one batch that recovery keeps or drops
// whole. It does not sync. durableUpto is a Size() that a finished Sync is known to cover, as fresh as at hand.
// The locations are in the order of recs and valid until the next call. Bodies are not kept. An error that wraps
// [ErrInvalid] or [ErrTooLarge] has written nothing; after any other the segment has failed.
func (w *Writer) AppendBatch(recs []Record, durableUpto int64) ([]Location, error) {
	return nil, errors.ErrUnsupported
}

// SetPrevDurable notes how many bytes of the segment with the previous sequence number are durable; each later
// batch, and the footer, tells recovery. Recovering that segment then takes damage below it for corruption.
func (w *Writer) SetPrevDurable(n int64) {}

// Sync makes all batches durable whose AppendBatch returned before it was called. Syncs may overlap.
// A failed Sync is never retried: the segment has failed.
func (w *Writer) Sync() error { return errors.ErrUnsupported }

// Size is where the next batch goes. What Size was before a Sync is durable after it.
func (w *Writer) Size() int64 { return 0 }

// Room reports whether a batch of so many records and bytes of bodies, and after it the footer, still fit
// into the size that Create reserved. A caller that heeds it can seal on a full disk.
func (w *Writer) Room(records int, bodyBytes int64) bool { return false }

// ReadAt reads a record that AppendBatch has located, synced or not, and verifies it. The caller owns the body.
func (w *Writer) ReadAt(loc Location) (Record, error) { return Record{}, errors.ErrUnsupported }

// Seal syncs, writes the footer, gives back reserved space behind it, and syncs again. Nothing can be appended
// afterwards; ReadAt goes on working. If it fails, the file is as good as unsealed.
func (w *Writer) Seal() error { return errors.ErrUnsupported }

// Close closes the file. It neither syncs nor seals.
func (w *Writer) Close() error { return errors.ErrUnsupported }

// Reader reads a sealed segment. All methods may be called concurrently, except Close.
// It holds a file descriptor and next to no memory: the footer is searched where it lies, page by verified page.
// Errors are *CorruptError for damage, or the disk's; neither says that something is absent.
type Reader struct{}

// Open opens a sealed segment. It returns [ErrUnsealed], [ErrBlank], [ErrRetired], [ErrVersion] or a *CorruptError
// for what is not one.
func Open(fs vfs.FS, path string) (*Reader, error) { return nil, errors.ErrUnsupported }

// Header returns the segment's header.
func (r *Reader) Header() Header { return Header{} }

// Path returns the file's path.
func (r *Reader) Path() string { return "" }

// Size is the size of the file.
func (r *Reader) Size() int64 { return 0 }

// DataEnd is where the batches end and the footer begins.
func (r *Reader) DataEnd() int64 { return 0 }

// PrevDurable is how much of the previous segment was known to be durable; 0 if nothing was.
func (r *Reader) PrevDurable() int64 { return 0 }

// Entries counts the records of KindEntry.
func (r *Reader) Entries() int64 { return 0 }

// Recovered reports whether the segment was sealed by [SealRecovered].
func (r *Reader) Recovered() bool { return false }

// Find locates an entry; of several copies the first that was appended. An error means that it cannot tell.
func (r *Reader) Find(l entry.LedgerID, e entry.EntryID) (Location, bool, error) {
	return Location{}, false, errors.ErrUnsupported
}

// Ledger sums up the records of one ledger.
func (r *Reader) Ledger(l entry.LedgerID) (LedgerInfo, bool, error) {
	return LedgerInfo{}, false, errors.ErrUnsupported
}

// Ledgers sums up the records of each ledger, sorted by ledger.
func (r *Reader) Ledgers() ([]LedgerInfo, error) { return nil, errors.ErrUnsupported }

// Controls lists the control records, in the order they were appended.
func (r *Reader) Controls() ([]Control, error) { return nil, errors.ErrUnsupported }

// Gaps lists what a recovery could not read.
func (r *Reader) Gaps() ([]Gap, error) { return nil, errors.ErrUnsupported }

// Index calls fn for each entry sorted by ledger, entry and place, until fn returns an error, which it returns.
func (r *Reader) Index(fn func(IndexEntry) error) error { return errors.ErrUnsupported }

// IndexLedger calls fn for the entries of one ledger from first on, sorted, until fn returns false.
func (r *Reader) IndexLedger(l entry.LedgerID, first entry.EntryID, fn func(entry.EntryID, Location) bool) error {
	return errors.ErrUnsupported
}

// ReadAt reads and verifies a record. The caller owns the body.
func (r *Reader) ReadAt(loc Location) (Record, error) { return Record{}, errors.ErrUnsupported }

// ReadInto is ReadAt into buf, which must hold loc.Length bytes; the record's body lies in it.
func (r *Reader) ReadInto(loc Location, buf []byte) (Record, error) {
	return Record{}, errors.ErrUnsupported
}

// Each reads the segment in the order it was written and calls fn for each record, verified, until fn returns an
// error, which it returns. The body is valid during the call. It passes over gaps.
func (r *Reader) Each(fn func(Record, Location) error) error { return errors.ErrUnsupported }

// Close closes the file.
func (r *Reader) Close() error { return errors.ErrUnsupported }

// ReadHeader reads the header of a segment, sealed or not.
func ReadHeader(fs vfs.FS, path string) (Header, error) { return Header{}, errors.ErrUnsupported }

// Retire makes the segment at from hold nothing, durably, and renames it to to, durably, for a later Create with
// reuse. A crash leaves it as it was, or retired under either name.
func Retire(fs vfs.FS, from, to string) error { return errors.ErrUnsupported }

// Recovered is what the scan of an unsealed segment found.
type Recovered struct {
	Header Header
	// End is where the batches end; what follows is dropped by SealRecovered.
	End int64
	// Torn is set if a batch was begun and is not whole, so that records were dropped which were never acknowledged.
	Torn bool
	// Corrupt is set if batches that had been durable cannot be read.
	Corrupt *Corruption
	// PrevDurable is how much of the previous segment was known to be durable; 0 if nothing was.
	PrevDurable int64
}

// Entries counts the records of KindEntry.
func (r *Recovered) Entries() int64 { return 0 }

// Ledgers sums up the records of each ledger, sorted by ledger.
func (r *Recovered) Ledgers() []LedgerInfo { return nil }

// Controls lists the control records, in the order they were appended.
func (r *Recovered) Controls() []Control { return nil }

// Index calls fn for each entry sorted by ledger, entry and place, until fn returns an error, which it returns.
func (r *Recovered) Index(fn func(IndexEntry) error) error { return errors.ErrUnsupported }

// Recover scans an unsealed segment. Everything it reports is durable. nextSegmentDurable is the PrevDurable of the
// segment with the next sequence number, 0 if there is none.
func Recover(fs vfs.FS, path string, nextSegmentDurable int64) (*Recovered, error) {
	return nil, errors.ErrUnsupported
}

// SealRecovered drops what follows rec.End and seals the segment. It is durable when it returns.
func SealRecovered(fs vfs.FS, path string, rec *Recovered) error { return errors.ErrUnsupported }
