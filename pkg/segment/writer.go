package segment

import (
	"errors"
	"fmt"
	"io"
	"path"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Writer appends to one segment.
//
// One goroutine at a time calls AppendBatch, SetPrevDurable, Room, Seal and Close. Sync, Size and ReadAt may be
// called from any goroutine at any time before Close, overlapping with everything else.
//
// A batch is encoded into one buffer that the Writer keeps, and written with one positioned write; in steady state
// nothing is allocated for an entry but its 24 bytes of index. Gathering the bodies with a vectored write instead
// would save the copy, but the checksum passes over the bytes anyway, and a batch has hundreds of pieces.
//
// Syncs overlap on file descriptions of their own. The kernel reports a failed write-back once to each open file
// description: on a shared one, a sync could meet success because its neighbour has just been told of the failure.
//
// Damage ends a Writer: after a failed write (want of space aside) or sync it is not known what the file holds, so
// everything returns [ErrFailed] from then on. The caller keeps what was synced, and recovers the file after a restart.
type Writer struct {
	f        vfs.File
	path     string
	header   Header
	seed     seed
	reserved int64
	syncs    chan vfs.File // idle descriptions, maxSyncs in all

	size atomic.Int64

	// Owned by the appender.
	buf         []byte
	locs        []Location
	seq         uint64
	prevDurable int64
	contents    *contents
	sealed      bool

	ahead sync.Mutex // over writing ahead
	begun bool       // nothing is written ahead any more

	failMu sync.Mutex
	failed error
}

// maxSyncs is how many syncs overlap; more wait. Disks gain up to two or three.
const maxSyncs = 4

// keepBuffer is the largest encode buffer that is kept between batches.
const keepBuffer = 4 << 20

// Create makes the segment at path, durable when it returns, name included, with size bytes of disk reserved.
// With reuse, path is a file that [Retire] has left there: its blocks are kept, and the generation raised above
// its own. Without reuse the file must not exist.
func Create(fs vfs.FS, path string, h Header, size int64, reuse bool) (*Writer, error) {
	if size > MaxSegmentBytes {
		return nil, fmt.Errorf("create segment %s of %d bytes: %w", path, size, ErrTooLarge)
	}
	size = max(size, headerBlockSize)
	f, h, err := createFile(fs, path, h, size, reuse)
	if err != nil {
		return nil, fmt.Errorf("create segment: %w", err)
	}
	w := &Writer{
		f: f, path: path, header: h, seed: newSeed(h), reserved: size, contents: newContents(),
		syncs: make(chan vfs.File, maxSyncs), begun: reuse,
	}
	w.size.Store(headerBlockSize)
	if err := w.openSyncs(fs); err != nil {
		return nil, errors.Join(fmt.Errorf("create segment: %w", err), w.Close())
	}
	return w, nil
}

// openSyncs opens what syncs go through.
func (w *Writer) openSyncs(fs vfs.FS) error {
	for range maxSyncs {
		s, err := fs.Open(w.path)
		if err != nil {
			return err
		}
		w.syncs <- s
	}
	return nil
}

func createFile(fs vfs.FS, name string, h Header, size int64, reuse bool) (_ vfs.File, _ Header, err error) {
	open := fs.Create
	if reuse {
		open = fs.Open
	}
	f, err := open(name)
	if err != nil {
		return nil, h, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if reuse {
		old, err := readHeaderBlock(f, name)
		if err != nil {
			return nil, h, err
		}
		if !old.retired {
			return nil, h, fmt.Errorf("reuse %s: it was not retired", name)
		}
		h.Generation = max(h.Generation, old.Generation+1)
	}
	if err := f.Allocate(0, size); err != nil {
		return nil, h, err
	}
	if _, err := f.WriteAt(encodeHeaderBlock(fileHeader{Header: h, size: size}), 0); err != nil {
		return nil, h, err
	}
	if err := f.Sync(); err != nil {
		return nil, h, err
	}
	return f, h, fs.SyncDir(path.Dir(name))
}

// Header returns the header as it was written, with the generation that the file got.
func (w *Writer) Header() Header { return w.header }

// Path returns the file's path.
func (w *Writer) Path() string { return w.path }

// AppendBatch writes recs behind what was written before, in one write, as one batch that recovery keeps or drops
// whole. It does not sync. durableUpto is a Size() that a finished Sync is known to cover, as fresh as at hand.
// The locations are in the order of recs and valid until the next call. Bodies are not kept. An error that wraps
// [ErrInvalid] or [ErrTooLarge] has written nothing. One that is ENOSPC may have written a part of the batch, which
// does not count: nothing was promised about it, and the next batch goes over it. After any other the segment has
// failed.
func (w *Writer) AppendBatch(recs []Record, durableUpto int64) ([]Location, error) {
	if err := w.failure(); err != nil {
		return nil, err
	}
	offset := w.size.Load()
	if w.sealed || durableUpto < 0 || durableUpto > offset {
		panic(fmt.Sprintf("segment: append with durableUpto %d at %d, sealed %t", durableUpto, offset, w.sealed))
	}
	if len(recs) == 0 {
		return nil, nil
	}
	length, err := w.check(recs, offset)
	if err != nil {
		return nil, err
	}
	if w.seq == 0 {
		w.begin()
	}
	w.encode(recs, offset, length, durableUpto)
	if n, err := w.f.WriteAt(w.buf, offset); err != nil || n != len(w.buf) {
		if errors.Is(err, syscall.ENOSPC) {
			return nil, fmt.Errorf("append to segment %s: %w", w.path, err)
		}
		if err == nil {
			err = io.ErrShortWrite
		}
		return nil, w.fail(fmt.Errorf("append to segment %s: %w", w.path, err))
	}
	for i := range recs {
		w.contents.add(&recs[i], w.locs[i])
	}
	w.contents.batches++
	w.seq++
	w.size.Store(offset + int64(length))
	if cap(w.buf) > keepBuffer {
		w.buf = nil
	}
	return w.locs, nil
}

// check returns the length of the batch, if recs may be written at offset.
func (w *Writer) check(recs []Record, offset int64) (int, error) {
	length := batchHeaderSize
	for i := range recs {
		if err := validate(&recs[i]); err != nil {
			return 0, fmt.Errorf("append record %d of %d: %w", i, len(recs), err)
		}
		length += recordHeaderSize + len(recs[i].Body)
		if length > MaxBatchBytes {
			return 0, fmt.Errorf("append %d records: %w", len(recs), ErrTooLarge)
		}
	}
	if offset+int64(length)+w.contents.footerBound(len(recs)) > MaxSegmentBytes {
		return 0, fmt.Errorf("append %d bytes at %d: %w", length, offset, ErrTooLarge)
	}
	return length, nil
}

// encode fills buf and locs.
func (w *Writer) encode(recs []Record, offset int64, length int, durableUpto int64) {
	if cap(w.buf) < length {
		w.buf = make([]byte, length)
	}
	w.buf = w.buf[:length]
	w.locs = w.locs[:0]
	at := batchHeaderSize
	for i := range recs {
		r := &recs[i]
		n := recordHeaderSize + len(r.Body)
		rec := *r
		if rec.Kind != KindEntry {
			rec.Checksum = entry.Checksum(rec.Ledger, rec.Entry, rec.Body)
		}
		loc := Location{Offset: offset + int64(at), Length: uint32(n)} // at most MaxBatchBytes
		encodeRecord(w.buf[at:at+n], w.seed, loc.Offset, &rec)
		w.locs = append(w.locs, loc)
		at += n
	}
	encodeBatchHeader(w.buf, w.seed, w.header.Generation, offset, batchHeader{
		seq:         w.seq,
		length:      uint32(length - batchHeaderSize), // at most MaxBatchBytes
		count:       uint32(len(recs)),                // likewise
		durableUpto: durableUpto,
		prevDurable: w.prevDurable,
		recordsCRC:  entry.UpdateCRC32C(uint32(w.seed), w.buf[batchHeaderSize:]),
	})
}

// SetPrevDurable notes how many bytes of the segment with the previous sequence number are durable, of what it was told the
// most; each later batch, and the footer, tells recovery. Recovering that segment then takes damage below it for corruption.
func (w *Writer) SetPrevDurable(n int64) {
	if n < 0 || n > MaxSegmentBytes {
		panic(fmt.Sprintf("segment: previous segment durable up to %d", n))
	}
	w.prevDurable = max(w.prevDurable, n)
}

// Sync makes all batches durable whose AppendBatch returned before it was called. Syncs may overlap.
// A failed Sync is never retried: the segment has failed.
func (w *Writer) Sync() error {
	if err := w.failure(); err != nil {
		return err
	}
	f := <-w.syncs
	err := f.Datasync()
	w.syncs <- f
	if err != nil {
		return w.fail(fmt.Errorf("sync segment %s: %w", w.path, err))
	}
	return nil
}

// Size is where the next batch goes. What Size was before a Sync is durable after it.
func (w *Writer) Size() int64 { return w.size.Load() }

// Room reports whether a batch of so many records and bytes of bodies, and after it the footer, still fit
// into the size that Create reserved. A caller that heeds it can seal on a full disk.
func (w *Writer) Room(records int, bodyBytes int64) bool {
	batch := batchHeaderSize + int64(records)*recordHeaderSize + bodyBytes
	return w.size.Load()+batch+w.contents.footerBound(records) <= w.reserved
}

// ReadAt reads a record that AppendBatch has located, synced or not, and verifies it. The caller owns the body.
func (w *Writer) ReadAt(loc Location) (Record, error) {
	return readRecord(w.f, w.path, w.seed, w.size.Load(), loc, nil)
}

// ReadInto is ReadAt into buf, which must hold loc.Length bytes; the record's body lies in it.
func (w *Writer) ReadInto(loc Location, buf []byte) (Record, error) {
	return readRecord(w.f, w.path, w.seed, w.size.Load(), loc, buf)
}

// Seal writes the footer, gives back reserved space behind it, and makes all of the segment durable. Nothing can be
// appended afterwards; ReadAt goes on working. If it fails, the segment has failed, and what was synced before is safe.
func (w *Writer) Seal() error {
	if w.sealed {
		panic("segment: sealed twice")
	}
	if err := w.failure(); err != nil {
		return err
	}
	w.sealed = true
	w.begin()
	err := seal(w.f, w.header, w.contents, nil, trailer{dataEnd: w.size.Load(), prevDurable: w.prevDurable})
	if err != nil {
		return w.fail(fmt.Errorf("seal segment %s: %w", w.path, err))
	}
	w.buf, w.locs, w.contents = nil, nil, nil
	return nil
}

// Close closes the file. It neither syncs nor seals. No call of Sync or ReadAt may be under way.
func (w *Writer) Close() error {
	err := w.f.Close()
	for range len(w.syncs) {
		err = errors.Join(err, (<-w.syncs).Close())
	}
	return err
}

// fail keeps the first failure and returns err.
func (w *Writer) fail(err error) error {
	w.failMu.Lock()
	defer w.failMu.Unlock()
	if w.failed == nil {
		w.failed = err
	}
	return err
}

func (w *Writer) failure() error {
	w.failMu.Lock()
	defer w.failMu.Unlock()
	if w.failed == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrFailed, w.failed)
}
