package ledgerstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

// Read returns the entries r.First, r.First+r.Stride, … as far as they are here, within the limits. Each was
// verified against its record's checksum. If the first is missing: NoEntry or NoLedger if this store cannot have had
// it, Unknown if it may have (limbo, a disk error, a wrong checksum, a store that has stopped). What ends a run
// later says nothing.
//
// With r.Recovery the ledger is fenced with r.Term first, and whatever the answer is, the fence is durable and each
// add accepted before it has become durable or was refused. The reader owns the bodies.
func (s *Store) Read(ctx context.Context, r bookiewire.Read) (bookiewire.ReadReply, error) {
	if badLedger(r.Ledger) || r.First < 0 || r.MaxEntries == 0 {
		return bookiewire.ReadReply{}, errBad
	}
	if r.Recovery {
		if err := s.fenceAndWait(ctx, bookiewire.Fence{Ledger: r.Ledger, Term: r.Term}); err != nil {
			return bookiewire.ReadReply{}, err
		}
	}
	first, err := s.readEntry(r.Ledger, r.First, -1)
	if err != nil {
		return bookiewire.ReadReply{}, err
	}
	reply := bookiewire.ReadReply{Entries: []bookiewire.ReadEntry{first}}
	left := int64(r.MaxBytes) - int64(len(first.Body))
	stride := max(entry.EntryID(r.Stride), 1)
	for id := r.First + stride; id > r.First && len(reply.Entries) < int(r.MaxEntries) && left > 0 && ctx.Err() == nil; id += stride {
		next, ok := s.readNext(r.Ledger, id, left)
		if !ok {
			break
		}
		left -= int64(len(next.Body))
		reply.Entries = append(reply.Entries, next)
	}
	reply.LAC = s.lac(r.Ledger)
	return reply, nil
}

// readNext reads an entry that goes on a run; why a run ends, nobody is told.
func (s *Store) readNext(id entry.LedgerID, e entry.EntryID, limit int64) (bookiewire.ReadEntry, bool) {
	got, err := s.readEntry(id, e, limit)
	return got, err == nil
}

func (s *Store) fenceAndWait(ctx context.Context, f bookiewire.Fence) error {
	outcome := make(chan error, 1)
	s.Fence(f, func(_ bookiewire.FenceReply, err error) { outcome <- err })
	select {
	case err := <-outcome:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Store) lac(id entry.LedgerID) entry.EntryID {
	sh := s.table.shard(id)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	if l := sh.ledgers[id]; l != nil && l.durable {
		return l.lac
	}
	return entry.NoEntry
}

// errOverLimit ends a run of entries at its byte limit.
var errOverLimit = errors.New("over the byte limit")

// readEntry reads one entry, of at most limit bytes unless that is negative.
func (s *Store) readEntry(id entry.LedgerID, e entry.EntryID, limit int64) (bookiewire.ReadEntry, error) {
	// Compaction may replace a segment between the look at the table and the read; the table knows better then.
	for range 8 {
		if err := s.stopped(); err != nil {
			return bookiewire.ReadEntry{}, err
		}
		places, miss := s.locate(id, e)
		got, err := s.readPlaces(places, id, e, limit)
		switch {
		case errors.Is(err, errGone):
			continue
		case errors.Is(err, errOverLimit):
			return bookiewire.ReadEntry{}, err
		case err != nil:
			return bookiewire.ReadEntry{}, &bookiewire.Error{Code: bookiewire.Unknown, Detail: err.Error()}
		case got == nil:
			return bookiewire.ReadEntry{}, miss
		}
		return *got, nil
	}
	return bookiewire.ReadEntry{}, &bookiewire.Error{Code: bookiewire.Unknown, Detail: "segments are being replaced"}
}

// locate returns where the entry may be, and the answer if it is in none of the places.
func (s *Store) locate(id entry.LedgerID, e entry.EntryID) ([]candidate, error) {
	sh := s.table.shard(id)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	l := sh.ledgers[id]
	if l == nil || !l.durable {
		if _, buried := sh.tombs[id]; s.table.lossAll.Load() && !buried {
			return nil, errLimbo
		}
		return nil, errNoLedger
	}
	var miss error = errNoEntry
	if l.limbo || s.table.lossAll.Load() { // also of a ledger that a fence has made known since the loss
		miss = errLimbo
	}
	var space [4]candidate
	return l.find(e, space[:0]), miss
}

// readPlaces returns nil without an error if the entry is in none of the places. A place that cannot be read makes
// the answer an error, unless another one has the entry.
func (s *Store) readPlaces(places []candidate, id entry.LedgerID, e entry.EntryID, limit int64) (*bookiewire.ReadEntry, error) {
	var failure error
	damaged := false
	for _, p := range places {
		got, err := s.readPlace(p, id, e, limit)
		switch {
		case errors.Is(err, errGone), errors.Is(err, errOverLimit):
			return nil, err
		case err != nil:
			failure = err
			s.metrics.readErrors.Inc()
			damaged = damaged || !noFiles(err)
			if !noFiles(err) && !p.seg.damaged.Swap(true) {
				s.log.Error("segment is damaged: what cannot be read is answered unknown", "path", p.seg.path, "error", err)
			}
		case got != nil:
			return got, nil
		}
	}
	if damaged {
		s.table.noteDamage(id, e, e)
	}
	return nil, failure
}

func (s *Store) readPlace(p candidate, id entry.LedgerID, e entry.EntryID, limit int64) (*bookiewire.ReadEntry, error) {
	over := func(length uint32) bool { return limit >= 0 && int64(length)-segment.RecordOverhead > limit }
	if !p.footer {
		if over(p.slot.length) {
			return nil, errOverLimit
		}
		// Rewrites reuse sequence numbers, but never hold slots while they are in use.
		if body, sum, ok := s.cache.get(p.seg.seq, int64(p.slot.offset)); ok && !p.uncached {
			s.metrics.cacheHits.Inc()
			return &bookiewire.ReadEntry{Entry: e, Checksum: sum, Body: body}, nil
		}
	}
	src, err := p.seg.handle.acquire(s.fs, p.seg.path)
	if err != nil {
		return nil, err
	}
	defer p.seg.handle.release()
	s.segments.trim()
	loc := segment.Location{Offset: int64(p.slot.offset), Length: p.slot.length}
	if p.footer {
		r, ok := src.(*segment.Reader)
		if !ok {
			panic("ledgerstore: a footer is asked for that is not written yet")
		}
		found := false
		if loc, found, err = s.footers.find(r, footerKey{p.seg, id}, p.count, e); err != nil || !found {
			return nil, err
		}
		if over(loc.Length) {
			return nil, errOverLimit
		}
		if p.seg.gen == 0 && !p.uncached {
			if body, sum, ok := s.cache.get(p.seg.seq, loc.Offset); ok {
				s.metrics.cacheHits.Inc()
				return &bookiewire.ReadEntry{Entry: e, Checksum: sum, Body: body}, nil
			}
		}
	}
	s.metrics.cacheMisses.Inc()
	rec, err := src.ReadAt(loc) // verifies the record and its body
	if err != nil {
		return nil, err
	}
	if rec.Kind != segment.KindEntry || rec.Ledger != id || rec.Entry != e {
		return nil, fmt.Errorf("index of %s leads to %s %d:%d instead of entry %d:%d", p.seg.path, rec.Kind, rec.Ledger, rec.Entry, id, e)
	}
	return &bookiewire.ReadEntry{Entry: e, Checksum: rec.Checksum, Body: rec.Body}, nil
}

// answer looks a doubtful add up.
func (s *Store) answer(c *Check) *Checked {
	id, e := c.Add.Ledger, c.Add.Entry
	places := c.places
	for range 8 {
		got, err := s.readPlaces(places, id, e, -1)
		switch {
		case errors.Is(err, errGone):
			places, _ = s.locate(id, e)
			continue
		case err != nil:
			return &Checked{Check: c, Err: err}
		case got == nil:
			return &Checked{Check: c}
		}
		if c.Add.Recovery { // which counts on it
			if err := s.flush(); err != nil {
				return &Checked{Check: c, Err: err}
			}
		}
		return &Checked{Check: c, Found: true, Same: got.Checksum == c.Add.Checksum && bytes.Equal(got.Body, c.Add.Body)}
	}
	return &Checked{Check: c, Err: errGone}
}
