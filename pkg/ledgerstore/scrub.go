package ledgerstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

// MaxListed limits the entries of one [Store.Entries].
const MaxListed = 1 << 20

// Listing is which entries of a range are here.
type Listing struct {
	// Known: something of the ledger is stored here.
	Known bool
	// Limbo: entries may have been lost here. What is listed is here all the same.
	Limbo bool
	// Bits has a bit for each entry of the range, the lowest bit of the first byte for the first entry: it is durable here,
	// and was not found unreadable.
	Bits []byte
}

// Entries lists which of the entries first … last of a ledger are durable here, by the index: bodies are not read. It costs
// a read of a footer's part for each sealed segment that has some of them. The error is a *bookiewire.Error: BadRequest for a
// range that is empty or has more than [MaxListed] entries, Unknown if an index cannot be read.
func (s *Store) Entries(ledger entry.LedgerID, first, last entry.EntryID) (Listing, error) {
	if badLedger(ledger) || first < 0 || last < first || last-first >= MaxListed {
		return Listing{}, errBad
	}
	for range 8 { // compaction may replace a segment between the look at the table and the read
		if err := s.stopped(); err != nil {
			return Listing{}, err
		}
		listing, err := s.list(ledger, first, last)
		if errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			return Listing{}, &bookiewire.Error{Code: bookiewire.Unknown, Detail: err.Error()}
		}
		return listing, nil
	}
	return Listing{}, &bookiewire.Error{Code: bookiewire.Unknown, Detail: "segments are being replaced"}
}

func (s *Store) list(id entry.LedgerID, first, last entry.EntryID) (Listing, error) {
	out := Listing{Bits: make([]byte, (last-first)/8+1)}
	set := func(e entry.EntryID) { out.Bits[(e-first)/8] |= 1 << ((e - first) % 8) }
	var sealed []*Segment
	var bad unreadable
	sh := s.table.shard(id)
	sh.mu.RLock()
	out.Limbo = s.table.lossAll.Load()
	if l := sh.ledgers[id]; l != nil && l.durable && !l.deleting {
		out.Known, out.Limbo = true, out.Limbo || l.limbo
		bad = append(bad, l.unreadable...)
		for _, r := range l.runs {
			switch {
			case r.first > last || r.last < first:
			case r.slots == nil:
				sealed = append(sealed, r.seg)
			default:
				for _, at := range r.slots {
					if at.entry >= first && at.entry <= last {
						set(at.entry)
					}
				}
			}
		}
	}
	sh.mu.RUnlock()
	for _, seg := range sealed {
		if err := s.listSealed(seg, id, first, last, set); err != nil {
			return Listing{}, err
		}
	}
	for _, r := range bad {
		for e := max(r.First, first); e <= min(r.Last, last); e++ {
			out.Bits[(e-first)/8] &^= 1 << ((e - first) % 8)
		}
	}
	return out, nil
}

// listSealed calls set for the entries that a sealed segment's footer names.
func (s *Store) listSealed(seg *Segment, id entry.LedgerID, first, last entry.EntryID, set func(entry.EntryID)) error {
	r, err := seg.handle.acquireReader(s.fs, seg.path)
	if err != nil {
		return err
	}
	defer seg.handle.release()
	s.segments.trim()
	var here []entry.EntryID
	err = r.IndexLedger(id, first, func(e entry.EntryID, _ segment.Location) bool {
		if e <= last {
			here = append(here, e)
		}
		return e <= last
	})
	var corrupt *segment.CorruptError
	if errors.As(err, &corrupt) {
		// None of it can be found by its readers, and all of it is stored anew by a repair.
		s.noteRun(seg, id)
		return nil
	}
	for _, e := range here {
		set(e)
	}
	return err
}

// Scrubbed sums up one pass over the sealed segments.
type Scrubbed struct {
	// Segments were read, Bytes of records in them.
	Segments int
	Bytes    int64
	// Damaged entries were found, of those that are not readable in another segment either.
	Damaged int64
}

// Scrub reads every entry in the sealed segments from the disk and verifies it, and notes what is damaged: see [Store.Damage].
// pace is called before each read, with its bytes, and may wait; its error ends the pass. What is in the unsealed segments
// is next time's: it was written moments ago.
//
// It reads by the index, ledger by ledger, and not the file from the start to the end: a record whose header is damaged must
// be known by name, so that it can be repaired.
func (s *Store) Scrub(ctx context.Context, pace func(ctx context.Context, bytes int) error) (Scrubbed, error) {
	var sum Scrubbed
	for _, seg := range s.segments.list() {
		if !seg.sealed.Load() {
			continue
		}
		if err := s.scrub(ctx, seg, pace, &sum); err != nil {
			return sum, fmt.Errorf("scrub segment %s: %w", seg.path, err)
		}
		sum.Segments++
	}
	return sum, nil
}

func (s *Store) scrub(ctx context.Context, seg *Segment, pace func(context.Context, int) error, sum *Scrubbed) error {
	r, err := seg.handle.acquireReader(s.fs, seg.path)
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil && noFiles(err) {
		return err
	}
	if err == nil {
		defer seg.handle.release()
	}
	for _, id := range seg.ledgers {
		if err := s.stopped(); err != nil {
			return err
		}
		if s.heldIn(id, seg) == nil {
			continue
		}
		if r == nil { // not even its header can be read
			sum.Damaged += s.noteRun(seg, id)
			continue
		}
		if err := s.scrubLedger(ctx, seg, r, id, pace, sum); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) scrubLedger(ctx context.Context, seg *Segment, r *segment.Reader, id entry.LedgerID, pace func(context.Context, int) error, sum *Scrubbed) error {
	places, whole := placesOf(r, id)
	if !whole {
		sum.Damaged += s.noteRun(seg, id)
	}
	for _, p := range places {
		if err := pace(ctx, int(p.Location.Length)); err != nil {
			return err
		}
		sum.Bytes += int64(p.Location.Length)
		if intact(r, p) || s.heldIn(id, seg) == nil || s.intactElsewhere(seg, id, p.Entry) {
			continue
		}
		sum.Damaged++
		s.noteEntry(seg, id, p.Entry)
	}
	return nil
}

// placesOf returns where a segment has the entries of a ledger, or none of them and false if its footer cannot be read.
func placesOf(r *segment.Reader, id entry.LedgerID) (places []segment.IndexEntry, whole bool) {
	err := r.IndexLedger(id, 0, func(e entry.EntryID, loc segment.Location) bool {
		if n := len(places); n == 0 || places[n-1].Entry != e { // of copies the first counts
			places = append(places, segment.IndexEntry{Ledger: id, Entry: e, Location: loc})
		}
		return true
	})
	if err != nil {
		return nil, false
	}
	return places, true
}

// intact reads an entry from the disk, whatever is in memory of it.
func intact(src source, p segment.IndexEntry) bool {
	rec, err := src.ReadAt(p.Location) // verifies the record and its body
	return err == nil && rec.Kind == segment.KindEntry && rec.Ledger == p.Ledger && rec.Entry == p.Entry
}

// intactElsewhere reports whether another segment than seg has the entry, readable: it was repaired.
func (s *Store) intactElsewhere(seg *Segment, id entry.LedgerID, e entry.EntryID) bool {
	places, _ := s.locate(id, e)
	for _, p := range places {
		if p.seg == seg {
			continue
		}
		p.uncached = true
		if got, err := s.readPlace(p, id, e, -1); err == nil && got != nil {
			return true
		}
	}
	return false
}

// noteEntry notes an entry that its segment does not give.
func (s *Store) noteEntry(seg *Segment, id entry.LedgerID, e entry.EntryID) {
	s.metrics.damaged.Inc()
	if !seg.damaged.Swap(true) {
		s.log.Error("segment is damaged: what cannot be read is answered unknown, until it is repaired", "path", seg.path, "ledger", id, "entry", e)
	}
	s.table.noteDamage(id, e, e)
}

// noteRun notes all that a segment has of a ledger, and returns how many entries that are, those included that were stored anew
// since: where they are cannot be told apart any more.
func (s *Store) noteRun(seg *Segment, id entry.LedgerID) int64 {
	r := s.heldIn(id, seg)
	if r == nil || r.first < 0 {
		return 0
	}
	var lost int64
	for e := r.first; e <= r.last; e++ {
		if s.intactElsewhere(seg, id, e) {
			continue
		}
		lost++
		s.noteEntry(seg, id, e)
	}
	return lost
}
