package segment

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

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
	// Stated is up to where a batch says that all is durable. What lies behind it and is lost later passes for a torn tail.
	Stated int64

	contents *contents
	seq      uint64 // of the next batch
	reserved int64  // on creation
	size     int64  // of the file
}

// Entries counts the records of KindEntry.
func (r *Recovered) Entries() int64 { return int64(r.contents.entries()) }

// Batches counts the batches.
func (r *Recovered) Batches() int { return int(r.contents.batches) }

// Room is how much of the reserved space is left behind the batches, and the footer that they need.
func (r *Recovered) Room() int64 { return r.reserved - r.End - r.contents.footerBound(0) }

// Ledgers sums up the records of each ledger, sorted by ledger.
func (r *Recovered) Ledgers() []LedgerInfo { return r.contents.sortedLedgers() }

// Controls lists the control records, in the order they were appended.
func (r *Recovered) Controls() []Control { return slices.Clone(r.contents.controls) }

// Index calls fn for each entry sorted by ledger, entry and place, until fn returns an error, which it returns.
func (r *Recovered) Index(fn func(IndexEntry) error) error {
	for _, row := range r.contents.sorted() {
		if err := fn(IndexEntry{Ledger: row.ledger, Entry: row.entry, Location: row.location()}); err != nil {
			return err
		}
	}
	return nil
}

// Recover scans an unsealed segment. nextSegmentDurable is the PrevDurable of the segment with the next sequence
// number, 0 if there is none. It returns the errors of [Open], ErrUnsealed aside, and the disk's.
//
// The verdict. Batches are taken in order up to the first that is not whole. That one is the torn tail, unless its
// place lies below a durableUpto that any readable batch header of the file states, or below nextSegmentDurable,
// or before a complete footer: then bytes are missing that a sync had covered, which is corruption. A whole batch
// behind it proves nothing, as pages reach the disk in any order and syncs overlap. A file that is shorter than [Create] has
// durably made it was cut short, which no crash does but one during a seal, after which the file has the length of a
// sealed one: all that was behind is missing. After corruption, what is still
// readable is kept: records one by one in a batch whose header is readable, else from the next readable batch on.
//
// Everything reported is durable: what a killed process left in the cache is synced first, and the bytes are read
// from the disk rather than from a cache that a failed sync may have left wrong.
//
// The segment must be one whose Create has returned.
//
// Memory is bounded by the largest batch and 24 bytes for each entry.
func Recover(fs vfs.FS, path string, nextSegmentDurable int64) (*Recovered, error) {
	f, err := fs.Open(path)
	if err != nil {
		return nil, fmt.Errorf("recover segment: %w", err)
	}
	rec, err := recoverFile(fs, f, path, nextSegmentDurable)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("recover segment: %w", err)
	}
	return rec, nil
}

func recoverFile(fs vfs.FS, f vfs.File, path string, nextSegmentDurable int64) (*Recovered, error) {
	if err := f.Sync(); err != nil {
		return nil, err
	}
	if err := f.DropCache(); err != nil {
		return nil, err
	}
	direct, err := fs.OpenDirect(path)
	if err != nil {
		return nil, err
	}
	rec, err := scanFile(direct, path, nextSegmentDurable)
	return rec, errors.Join(err, direct.Close())
}

// scanFile reads a file as it is.
func scanFile(f vfs.File, path string, nextSegmentDurable int64) (*Recovered, error) {
	h, err := readLiveHeader(f, path)
	if err != nil {
		return nil, err
	}
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	t, sealed, err := readTrailer(f, path, h.Header, size)
	if err != nil {
		return nil, err
	}
	s := &scanner{
		win: newWindow(f, min(size, MaxSegmentBytes)), path: path, header: h.Header, seed: newSeed(h.Header),
		durable: nextSegmentDurable, contents: newContents(),
	}
	if sealed {
		s.win.size = t.dataEnd
		s.durable = max(s.durable, t.dataEnd)
		s.prevDurable = t.prevDurable
	}
	rec, err := s.run()
	if err != nil {
		return nil, err
	}
	rec.Stated, rec.seq, rec.reserved, rec.size = s.durable, s.seq, h.size, size
	if !sealed && size < h.size {
		rec.cutShort(size, h.size)
	}
	return rec, nil
}

// cutShort takes a file that has lost its end for corruption, unless a seal has cut it.
func (r *Recovered) cutShort(size, was int64) {
	var gaps []Gap
	if r.Corrupt != nil {
		gaps = r.Corrupt.Gaps
	}
	switch {
	case size == r.contents.sealedSize(gaps, r.End):
	case r.Corrupt == nil:
		r.Corrupt = &Corruption{Gaps: []Gap{{Offset: r.End, End: was}}, AllLedgers: true}
	default:
		r.Corrupt.Ledgers, r.Corrupt.AllLedgers = nil, true
	}
}

// scanner recovers one segment.
type scanner struct {
	win    *window
	path   string
	header Header
	seed   seed

	contents    *contents
	off         int64  // of the next batch
	seq         uint64 // at least; exactly, unless skipped
	skipped     bool   // a damaged header has hidden how many batches there were
	durable     int64  // highest durableUpto seen
	prevDurable int64

	gaps    []Gap
	lost    map[entry.LedgerID]struct{}
	lostAll bool
}

func (s *scanner) run() (*Recovered, error) {
	s.off = headerBlockSize
	if err := s.whole(); err != nil {
		return nil, err
	}
	bad := s.off
	evidence, err := s.headersAfter(bad)
	if err != nil {
		return nil, err
	}
	rec := &Recovered{Header: s.header, contents: s.contents, PrevDurable: s.prevDurable}
	if bad >= s.durable {
		rec.End, rec.Torn = bad, evidence > bad
		if !rec.Torn {
			rec.Torn, err = s.begun(bad)
		}
		return rec, err
	}
	if err := s.salvage(); err != nil {
		return nil, err
	}
	rec.Torn = evidence > s.off
	if rec.Torn {
		// Headers from here on may be what the verdict rests on. They stay until the seal is durable, so that a
		// crash during it leads to the same verdict.
		s.gap(s.off, evidence)
		s.off = evidence
	}
	rec.End, rec.PrevDurable = s.off, s.prevDurable
	rec.Corrupt = &Corruption{Gaps: s.gaps, AllLedgers: s.lostAll}
	if !s.lostAll {
		rec.Corrupt.Ledgers = slices.Sorted(maps.Keys(s.lost))
	}
	return rec, nil
}

// header reads the batch header at off.
func (s *scanner) headerAt(off int64) (batchHeader, bool, error) {
	b, err := s.win.at(off, batchHeaderSize)
	if err != nil {
		return batchHeader{}, false, err
	}
	h, ok := decodeBatchHeader(b, s.seed, s.header.Generation, off)
	if !ok || h.seq < s.seq || h.seq != s.seq && !s.skipped {
		return batchHeader{}, false, nil
	}
	return h, true, nil
}

// note takes in what a readable batch header states.
func (s *scanner) note(h batchHeader) {
	s.durable = max(s.durable, h.durableUpto)
	s.prevDurable = max(s.prevDurable, h.prevDurable)
}

// whole takes batches from off on, up to the first that is not whole.
func (s *scanner) whole() error {
	for {
		h, ok, err := s.headerAt(s.off)
		if err != nil || !ok {
			return err
		}
		b, err := s.win.at(s.off, batchHeaderSize+int(h.length))
		if err != nil {
			return err
		}
		if len(b) != batchHeaderSize+int(h.length) ||
			entry.UpdateCRC32C(uint32(s.seed), b[batchHeaderSize:]) != h.recordsCRC || !s.take(h, b) {
			return nil
		}
		s.note(h)
		s.contents.batches++
		s.off += int64(len(b))
		s.seq, s.skipped = h.seq+1, false
	}
}

// take adds the records of a batch whose checksum is right. It is false, and nothing is added, if they are not what
// the header says; no writer does that.
func (s *scanner) take(h batchHeader, b []byte) bool {
	count, at := uint32(0), batchHeaderSize
	for at < len(b) {
		n := recordLength(b[at:])
		if n == 0 {
			return false
		}
		at += n
		count++
	}
	if count != h.count {
		return false
	}
	for at = batchHeaderSize; at < len(b); {
		r, bodyLen, _ := parseRecord(b[at:])
		n := recordHeaderSize + int(bodyLen)
		s.contents.add(&r, Location{Offset: s.off + int64(at), Length: uint32(n)}) // at most MaxBatchBytes
		at += n
	}
	return true
}

// recordLength is the length of the record that b begins with, 0 if it makes no sense or reaches past b.
func recordLength(b []byte) int {
	if len(b) < recordHeaderSize {
		return 0
	}
	_, bodyLen, ok := parseRecord(b)
	if n := recordHeaderSize + int(bodyLen); ok && n <= len(b) {
		return n
	}
	return 0
}

// headersAfter looks for readable batch headers at and behind off, takes in what they state, and returns the end of
// the last one's batch, or off if there is none.
func (s *scanner) headersAfter(off int64) (int64, error) {
	end := off
	for {
		at, h, ok, err := s.nextHeader(off)
		if err != nil || !ok {
			return end, err
		}
		s.note(h)
		end = min(at+batchHeaderSize+int64(h.length), s.win.size)
		off = at + batchHeaderSize
	}
}

// nextHeader finds the first readable batch header at or behind off.
func (s *scanner) nextHeader(off int64) (int64, batchHeader, bool, error) {
	var pattern [8]byte
	copy(pattern[:], batchMagic[:])
	be.PutUint32(pattern[4:], s.header.Generation)
	skipped := s.skipped
	s.skipped = true
	defer func() { s.skipped = skipped }()
	for {
		at, found, err := s.win.find(off, pattern[:])
		if err != nil || !found {
			return 0, batchHeader{}, false, err
		}
		h, ok, err := s.headerAt(at)
		if err != nil || ok {
			return at, h, ok, err
		}
		off = at + 1
	}
}

// begun reports whether a batch was begun at off, going by the start of its header.
func (s *scanner) begun(off int64) (bool, error) {
	b, err := s.win.at(off, 8)
	if err != nil {
		return false, err
	}
	return len(b) == 8 && [4]byte(b[:4]) == batchMagic && be.Uint32(b[4:]) == s.header.Generation, nil
}

// salvage goes on from the first bad batch, which lies below durable, to the first bad one that does not.
func (s *scanner) salvage() error {
	s.lost = make(map[entry.LedgerID]struct{})
	for s.off < min(s.durable, s.win.size) {
		h, ok, err := s.headerAt(s.off)
		if err != nil {
			return err
		}
		if ok {
			err = s.salvageBatch(h)
		} else {
			err = s.skipToHeader()
		}
		if err != nil {
			return err
		}
		if err := s.whole(); err != nil {
			return err
		}
	}
	if s.off < s.durable {
		s.lostAll = true // the file was cut short
		s.gap(s.off, s.durable)
	}
	return nil
}

// skipToHeader passes over a batch whose header is not readable, and over all that follows up to one that is.
func (s *scanner) skipToHeader() error {
	s.lostAll = true
	s.skipped = true
	at, _, ok, err := s.nextHeader(s.off)
	if err != nil {
		return err
	}
	if !ok || at > s.durable && s.durable <= s.win.size {
		at = min(s.durable, s.win.size)
	}
	s.gap(s.off, at)
	s.off = at
	return nil
}

// salvageBatch keeps the records of a damaged batch that verify singly.
func (s *scanner) salvageBatch(h batchHeader) error {
	s.note(h)
	s.contents.batches++
	end := s.off + batchHeaderSize + int64(h.length)
	b, err := s.win.at(s.off, batchHeaderSize+int(h.length))
	if err != nil {
		return err
	}
	base, at := s.off, batchHeaderSize
	for at < len(b) {
		off := base + int64(at)
		r, bodyLen, ok := decodeRecordHeader(b[at:], s.seed, off)
		n := recordHeaderSize + int(bodyLen)
		if !ok || int64(n) > end-off {
			break
		}
		if n <= len(b)-at && entry.Checksum(r.Ledger, r.Entry, b[at+recordHeaderSize:at+n]) == r.Checksum {
			s.contents.add(&r, Location{Offset: off, Length: uint32(n)}) // at most MaxBatchBytes
		} else {
			s.lost[r.Ledger] = struct{}{}
			s.gap(off, off+int64(n))
		}
		at += n
	}
	if off := base + int64(at); off < end {
		s.lostAll = true
		s.gap(off, end)
	}
	s.off = min(end, s.win.size)
	s.seq, s.skipped = h.seq+1, false
	return nil
}

// gap notes damage in [from, to), joined to the one before if they touch. A record that the end of the file cuts short
// reaches past it.
func (s *scanner) gap(from, to int64) {
	if from >= to {
		return
	}
	if n := len(s.gaps); n > 0 && from <= s.gaps[n-1].End {
		s.gaps[n-1].End = max(s.gaps[n-1].End, to)
		return
	}
	s.gaps = append(s.gaps, Gap{Offset: from, End: to})
}

// SealRecovered drops what follows rec.End and seals the segment. It is durable when it returns. If rec.Corrupt is
// set, the caller has put the ledgers it affects in limbo before, durably.
func SealRecovered(fs vfs.FS, path string, rec *Recovered) error {
	f, err := fs.Open(path)
	if err != nil {
		return fmt.Errorf("seal recovered segment: %w", err)
	}
	t := trailer{flags: flagRecovered, dataEnd: rec.End, prevDurable: rec.PrevDurable}
	var gaps []Gap
	if rec.Corrupt != nil {
		t.flags |= flagDamaged
		gaps = rec.Corrupt.Gaps
	}
	if err := errors.Join(seal(f, rec.Header, rec.contents, gaps, t), f.Close()); err != nil {
		return fmt.Errorf("seal recovered segment %s: %w", path, err)
	}
	return nil
}
