package ledgerstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

const (
	// compactEvery is how often compaction looks for work when nothing was deleted.
	compactEvery = 10 * time.Second
	// maxVictims bounds what one compaction merges.
	maxVictims = 8
)

// compactor compacts in the background until the store is closed.
func (s *Store) compactor() {
	tick := time.NewTicker(compactEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		case <-s.kick:
		}
		for {
			freed, err := s.CompactOnce(s.ctx)
			if err != nil && s.ctx.Err() == nil {
				s.log.Error("compaction is given up; the segments are kept", "error", err)
			}
			if err != nil || freed <= 0 {
				break
			}
		}
	}
}

// CompactOnce frees space once: it unlinks segments whose ledgers are all gone, or, if there are none, rewrites what
// lives in the emptiest sealed segments, if at least half of what they take comes back. It returns the bytes of disk given back, 0 if there was nothing to do. If a
// live record cannot be read, the segment it is in is kept for good and the error is returned. Each step is durable
// before the next: copies, their directory entry, control records still in force, manifest; only then the old files
// go. A crash in between leaves the old segments, or the new one, in force.
func (s *Store) CompactOnce(ctx context.Context) (freed int64, err error) {
	s.compact.Lock()
	defer s.compact.Unlock()
	if err := s.stopped(); err != nil {
		return 0, err
	}
	victims, dead := s.chooseVictims()
	if len(victims) == 0 {
		return 0, nil
	}
	var out *Segment
	var infos []segment.LedgerInfo
	if !dead {
		if out, infos, err = s.rewrite(ctx, victims); err != nil {
			s.metrics.compactErrors.Inc()
			return 0, fmt.Errorf("rewrite live records: %w", err)
		}
	}
	freed, err = s.replace(ctx, victims, out, infos)
	if err != nil {
		s.metrics.compactErrors.Inc()
		return 0, fmt.Errorf("replace segments: %w", err)
	}
	s.metrics.compactions.Inc()
	s.metrics.freedBytes.Add(float64(max(freed, 0)))
	s.log.Info("compacted", "segments", len(victims), "freed_bytes", freed)
	return freed, nil
}

// chooseVictims returns dead segments, or else some to rewrite into one. Only segments whose going makes the disk's use
// fall, to CompactBelow of what they take at most: so compaction comes to an end.
func (s *Store) chooseVictims() (victims []*Segment, dead bool) {
	var empty, half []*Segment
	for _, seg := range s.segments.list() {
		switch {
		case !s.compactable(seg):
		case seg.live.Load() > 0:
			half = append(half, seg)
		default:
			empty = append(empty, seg)
		}
	}
	if len(empty)+len(half) == 0 {
		return nil, false
	}
	carried := s.carried()
	for _, seg := range empty {
		if len(victims) < maxVictims && s.pays([]*Segment{seg}, 0, carried) {
			victims = append(victims, seg)
		}
	}
	if len(victims) > 0 {
		return victims, true
	}
	slices.SortStableFunc(half, func(a, b *Segment) int {
		return int(a.live.Load()*100/max(a.size.Load(), 1) - b.live.Load()*100/max(b.size.Load(), 1))
	})
	for i := range half { // the emptiest first; some are too small to be worth it by themselves
		if victims = s.neighbours(half[i:], carried); len(victims) > 0 {
			return victims, false
		}
	}
	return nil, false
}

// neighbours returns as many of the first segments as may become one, if that pays, or none.
func (s *Store) neighbours(half []*Segment, carried map[uint64]int64) (victims []*Segment) {
	var sum int64
	for n, seg := range half[:min(len(half), maxVictims)] {
		sum += seg.live.Load()
		if n > 0 && sum > s.cfg.SegmentSize*3/4 {
			break
		}
		if some := half[:n+1]; s.pays(some, s.rewrittenSize(some), carried) {
			victims = some
		}
	}
	return victims
}

// diskBlock is what files take a multiple of.
const diskBlock = 4096

func wholeBlocks(size int64) int64 { return (size + diskBlock - 1) / diskBlock * diskBlock }

// pays reports whether enough is given back when a file of so many bytes takes the place of segments.
func (s *Store) pays(victims []*Segment, rewritten int64, carried map[uint64]int64) bool {
	before, after := int64(0), wholeBlocks(rewritten)
	for _, v := range victims {
		before += wholeBlocks(v.size.Load())
		after += carried[v.seq]
	}
	return after < before && float64(after) <= s.cfg.CompactBelow*float64(before)
}

// gain is how many bytes a compaction of one segment gives back, 0 if it does not pay.
func (s *Store) gain(seg *Segment, carried map[uint64]int64) int64 {
	alone, rewritten := []*Segment{seg}, int64(0)
	if seg.live.Load() > 0 {
		rewritten = s.rewrittenSize(alone)
	}
	if !s.pays(alone, rewritten, carried) {
		return 0
	}
	return seg.size.Load() - rewritten
}

// carried is how many bytes of fences, LACs and limbo marks would be written again if a segment went, by its sequence
// number. Tombstones are not among them: those are dropped sooner or later.
func (s *Store) carried() map[uint64]int64 {
	const each = 3 * segment.RecordOverhead // with its rows in the footer
	sums := map[uint64]int64{}
	for i := range s.table.shards {
		sh := &s.table.shards[i]
		sh.mu.RLock()
		for _, l := range sh.ledgers {
			for _, in := range [...]uint64{l.termIn, l.limboIn, l.lacIn} {
				if in != 0 {
					sums[in] += each
				}
			}
		}
		sh.mu.RUnlock()
	}
	return sums
}

// compactable reports whether a segment is dead, or has enough dead bytes and can be read.
func (s *Store) compactable(seg *Segment) bool {
	if !seg.sealed.Load() || seg.trash.Load() > 0 {
		return false
	}
	live := seg.live.Load()
	return live <= 0 || !seg.damaged.Load() && float64(live) < s.cfg.CompactBelow*float64(seg.size.Load())
}

// rewrite copies what lives in victims, ledger by ledger, into a new sealed segment that no manifest lists yet.
// It takes the place in the log of the newest of them.
func (s *Store) rewrite(ctx context.Context, victims []*Segment) (_ *Segment, _ []segment.LedgerInfo, err error) {
	out := &Segment{}
	for _, v := range victims {
		if v.seq >= out.seq {
			out.seq, out.gen = v.seq, v.gen+1
		}
	}
	size := s.rewrittenSize(victims)
	w, err := s.create(out, size, ordinary)
	if errors.Is(err, syscall.ENOSPC) {
		w, err = s.create(out, size, lastReserve)
	}
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.discard(out))
		}
	}()
	c := &copier{store: s, to: w}
	for _, v := range victims {
		if err := c.copyFrom(ctx, v); err != nil {
			return nil, nil, err
		}
	}
	if err := c.flush(ctx); err != nil {
		return nil, nil, err
	}
	if err := w.Seal(); err != nil {
		return nil, nil, err
	}
	out.handle.seal()
	r, err := out.handle.acquireReader(s.fs, out.path)
	if err != nil {
		return nil, nil, err
	}
	defer out.handle.release()
	if err := out.load(r); err != nil {
		return nil, nil, err
	}
	infos, err := r.Ledgers()
	if err != nil {
		return nil, nil, err
	}
	if err := s.fs.SyncDir(s.cfg.Dir); err != nil {
		return nil, nil, err
	}
	s.metrics.compactedBytes.Add(float64(c.copied))
	out.sealed.Store(true)
	return out, infos, nil
}

// rewrittenSize is what a rewrite of victims takes at most.
func (s *Store) rewrittenSize(victims []*Segment) int64 {
	var bytes, entries, ledgers int64
	for _, v := range victims {
		for _, id := range v.ledgers {
			if r := s.heldIn(id, v); r != nil {
				bytes, entries, ledgers = bytes+r.bytes, entries+r.count, ledgers+1
			}
		}
	}
	batches := bytes/groupBytes + entries/maxGroupRecords + 1
	return min(segment.Room(bytes, entries, ledgers, batches), segment.MaxSegmentBytes)
}

// replace makes the manifest list out instead of victims, and discards them.
func (s *Store) replace(ctx context.Context, victims []*Segment, out *Segment, infos []segment.LedgerInfo) (freed int64, err error) {
	published := false
	defer func() {
		if err != nil && out != nil && !published {
			err = errors.Join(err, s.discard(out))
		}
	}()
	going := make([]uint64, len(victims))
	for i, v := range victims {
		going[i] = v.seq
	}
	obsolete := s.obsoleteTombs(victims, going, out)
	err = s.wait(ctx, func(done func(error)) Event { return &Carry{Segments: going, Obsolete: obsolete, Done: done} })
	if err != nil {
		return 0, err
	}
	if err := s.flush(); err != nil { // LACs may have been left for later
		return 0, err
	}
	err = s.publish(true, func(m *manifest) {
		for _, v := range victims {
			m.remove(v.seq)
		}
		if out != nil {
			m.add(manifestSegment{sequence: out.seq, rewrite: out.gen, uuid: out.uuid})
		}
	})
	if err != nil {
		if !shortage(err) {
			published = true // or not: keep every file, a restart will see
			s.post(&Broken{Err: err})
		}
		return 0, err
	}
	published = true
	if out != nil {
		s.segments.insert(out)
		freed -= out.size.Load()
	}
	// Not given up when ctx ends: readers must not be left with segments that are gone.
	err = s.wait(context.WithoutCancel(ctx), func(done func(error)) Event {
		return &Replaced{Old: victims, New: out, Obsolete: obsolete, Runs: infos, Done: done}
	})
	if err != nil {
		return 0, err
	}
	for _, v := range victims { // all of them, whatever comes: a later compaction must not find one that is listed no more
		s.segments.drop(v)
		freed += v.size.Load()
		err = errors.Join(err, s.discard(v))
	}
	return freed, errors.Join(err, s.fs.SyncDir(s.cfg.Dir))
}

// obsoleteTombs are the ledgers whose tombstone stands in victims and whose records are nowhere else: what is sealed
// gets no more of them, so that this stays true.
func (s *Store) obsoleteTombs(victims []*Segment, going []uint64, out *Segment) map[entry.LedgerID]bool {
	obsolete := map[entry.LedgerID]bool{}
	for id, t := range s.table.tombSnapshot() {
		if slices.Contains(going, t.in) && !s.recordsElsewhere(victims, out, id, t.at.seq) {
			obsolete[id] = true
		}
	}
	return obsolete
}

// recordsElsewhere reports whether a segment up to a sequence number, other than the victims, has records of l.
func (s *Store) recordsElsewhere(victims []*Segment, out *Segment, l entry.LedgerID, upto uint64) bool {
	others := s.segments.list()
	if out != nil {
		others = append(others, out)
	}
	for _, seg := range others {
		if seg.seq > upto || slices.Contains(victims, seg) {
			continue
		}
		if !seg.sealed.Load() {
			return true // its ledgers are not listed yet
		}
		if _, found := slices.BinarySearch(seg.ledgers, l); found {
			return true
		}
	}
	return false
}

// copier writes live records of segments to another, in batches.
type copier struct {
	store  *Store
	to     *segment.Writer
	recs   []segment.Record
	bytes  int64
	copied int64
}

func (c *copier) copyFrom(ctx context.Context, v *Segment) error {
	r, err := v.handle.acquireReader(c.store.fs, v.path)
	if err != nil {
		return c.damaged(v, err)
	}
	defer v.handle.release()
	for _, id := range v.ledgers {
		if c.store.heldIn(id, v) == nil {
			continue
		}
		var places []segment.IndexEntry
		err := r.IndexLedger(id, 0, func(e entry.EntryID, loc segment.Location) bool {
			if n := len(places); n == 0 || places[n-1].Entry != e { // of copies the first counts
				places = append(places, segment.IndexEntry{Ledger: id, Entry: e, Location: loc})
			}
			return true
		})
		if err != nil {
			return c.damaged(v, err)
		}
		for _, p := range places {
			rec, err := r.ReadAt(p.Location) // verifies the record and its body
			if err != nil {
				return c.damaged(v, err)
			}
			if rec.Kind != segment.KindEntry || rec.Ledger != id || rec.Entry != p.Entry {
				return c.damaged(v, fmt.Errorf("entry %d:%d of %s is not what its index says", id, p.Entry, v.path))
			}
			c.recs = append(c.recs, rec)
			c.bytes += int64(len(rec.Body))
			if c.bytes >= groupBytes || len(c.recs) == maxGroupRecords {
				if err := c.flush(ctx); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// damaged keeps v out of later compactions.
func (c *copier) damaged(v *Segment, err error) error {
	if noFiles(err) {
		return err
	}
	c.store.metrics.readErrors.Inc()
	v.damaged.Store(true)
	return err
}

// heldIn returns what v has of a ledger, if that counts, or is in the trash since the compaction began.
func (s *Store) heldIn(id entry.LedgerID, v *Segment) *run {
	sh := s.table.shard(id)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	in := func(runs []*run) *run {
		if i := slices.IndexFunc(runs, func(r *run) bool { return r.seg == v }); i >= 0 {
			return runs[i]
		}
		return nil
	}
	if l := sh.ledgers[id]; l != nil {
		if r := in(l.runs); r != nil {
			return r
		}
	}
	return in(sh.tombs[id].runs)
}

func (c *copier) flush(ctx context.Context) error {
	if len(c.recs) == 0 {
		return ctx.Err()
	}
	if lim := c.store.limiter; lim != nil {
		if err := lim.WaitN(ctx, int(min(c.bytes, int64(lim.Burst())))); err != nil {
			return err
		}
	} else if err := ctx.Err(); err != nil {
		return err
	}
	if _, err := c.to.AppendBatch(c.recs, 0); err != nil {
		return err
	}
	c.copied += c.bytes
	clear(c.recs)
	c.recs, c.bytes = c.recs[:0], 0
	return nil
}
