package ledgerstore

import (
	"context"
	"errors"
	"fmt"
	iofs "io/fs"
	"path"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// How a start finds out what is in the directory, and fills the table.

// cleanUp removes what no manifest lists: it was never acknowledged, or lives on elsewhere. Anything that does not
// look like a file of this store is left alone.
func (r *recovery) cleanUp(m *manifest) error {
	s := r.store
	names, err := s.fs.List(s.cfg.Dir)
	if err != nil {
		return fmt.Errorf("list data directory: %w", err)
	}
	for _, name := range names {
		remove := name == manifestTemp || strings.HasPrefix(name, "spare-") && strings.HasSuffix(name, ".tmp")
		if seq, rewrite, ok := parseSegmentName(name); ok {
			remove = !r.all && !slices.ContainsFunc(m.segments, func(l manifestSegment) bool { return l.sequence == seq && l.rewrite == rewrite })
		}
		if n, ok := parseSpareName(name); ok {
			s.segments.nextSpare = max(s.segments.nextSpare, n)
			// One that was being taken when the power went is retired no more.
			_, err := segment.ReadHeader(s.fs, path.Join(s.cfg.Dir, name))
			remove = s.spareCount() == s.maxSpares() || !errors.Is(err, segment.ErrRetired)
			if !remove {
				s.addSpare(name)
			}
		}
		if remove {
			if err := s.fs.Remove(path.Join(s.cfg.Dir, name)); err != nil {
				return fmt.Errorf("remove leftover: %w", err)
			}
		}
	}
	return nil
}

// maxScans is how many segments are opened or scanned at once: the disk and the checksums take turns otherwise.
const maxScans = 4

// openSegments opens what is sealed and scans what is not. Each segment tells how much of the one before it must be
// there. They are scanned side by side nevertheless, as if nothing was known of that, and one whose verdict it can
// change is scanned again.
func (r *recovery) openSegments(ctx context.Context, m *manifest) error {
	found := make([]*recovered, len(m.segments))
	g, scanCtx := errgroup.WithContext(ctx)
	g.SetLimit(r.scans)
	for i := range slices.Backward(m.segments) {
		g.Go(func() error {
			if err := scanCtx.Err(); err != nil {
				return err
			}
			f, err := r.openSegment(m.segments[i], 0)
			found[i] = f
			return err
		})
	}
	err := g.Wait()
	for i, f := range slices.Backward(found) {
		switch {
		case f == nil:
			if err == nil {
				r.all = true
				r.lost = append(r.lost, m.segments[i])
			}
			continue
		case err == nil && f.scan != nil:
			durable := int64(0)
			if i+1 < len(found) && found[i+1] != nil && found[i+1].seg.seq == f.seg.seq+1 {
				durable = found[i+1].prevDurable()
			}
			if f, err = r.judge(f, m.segments[i], durable); err != nil {
				return err
			}
			found[i] = f
		}
		r.found = append(r.found, f)
	}
	slices.Reverse(r.found)
	return err
}

// judge returns a scan whose verdict takes in how much of the segment was durable.
func (r *recovery) judge(f *recovered, listed manifestSegment, durable int64) (*recovered, error) {
	if durable > f.scan.End || f.scan.Corrupt != nil {
		again, err := r.openSegment(listed, durable)
		if err != nil {
			return nil, err
		}
		if again == nil {
			return nil, fmt.Errorf("segment %s was readable and is no more", f.seg.path)
		}
		f = again
	}
	r.noteDamage(f)
	return f, nil
}

// prevDurable is how much of the segment before was durable, as far as this one knows.
func (f *recovered) prevDurable() int64 {
	if f.reader != nil {
		return f.reader.PrevDurable()
	}
	return f.scan.PrevDurable
}

// openSegment returns nil without an error for a segment that is lost.
func (r *recovery) openSegment(listed manifestSegment, durable int64) (*recovered, error) {
	s := r.store
	seg := &Segment{seq: listed.sequence, gen: listed.rewrite, uuid: listed.uuid}
	seg.path = path.Join(s.cfg.Dir, segmentName(seg.seq, seg.gen))
	f := &recovered{seg: seg}
	err := f.open(s.fs, durable)
	var damage *segment.CorruptError
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, iofs.ErrNotExist), errors.Is(err, segment.ErrBlank), errors.Is(err, segment.ErrRetired),
		errors.Is(err, errForeign), errors.As(err, &damage):
		seg.handle.close()
		s.log.Error("segment is lost: every ledger is put in limbo", "path", seg.path, "error", err)
		return nil, nil //nolint:nilnil // lost is an answer
	}
	seg.handle.close()
	return nil, fmt.Errorf("open segment: %w", err)
}

var errForeign = errors.New("the file is another segment than the manifest lists")

func (f *recovered) open(fs vfs.FS, durable int64) error {
	r, err := segment.Open(fs, f.seg.path)
	if err == nil {
		f.reader = r
		f.seg.handle.reader, f.seg.handle.sealed = r, true
		if r.Header().SegmentUUID != f.seg.uuid {
			return errForeign
		}
		if f.ledgers, err = r.Ledgers(); err == nil {
			f.controls, err = r.Controls()
		}
		if err == nil {
			err = f.seg.load(r)
			f.seg.sealed.Store(true)
			f.seg.handle.trim() // there are more segments than descriptors
			return err
		}
		f.reader = nil
		f.seg.handle.trim()
		f.seg.handle.sealed = false
	}
	var damage *segment.CorruptError
	if !errors.Is(err, segment.ErrUnsealed) && !errors.As(err, &damage) {
		return err
	}
	// Not sealed, or its footer is damaged: the batches tell what the footer would.
	if f.scan, err = segment.Recover(fs, f.seg.path, durable); err != nil {
		return err
	}
	if f.scan.Header.SegmentUUID != f.seg.uuid {
		return errForeign
	}
	f.ledgers, f.controls = f.scan.Ledgers(), f.scan.Controls()
	return nil
}

// load fills the table. Tombstones first: they tell which of the other records count.
func (r *recovery) load() {
	t := r.store.table
	for _, f := range r.found {
		for _, c := range f.controls {
			if c.Kind != segment.KindTombstone {
				continue
			}
			at := logPlace{seq: f.seg.seq, offset: c.Location.Offset}
			if c.Nonce != 0 { // carried forward
				at = logPlace{seq: c.Nonce, offset: int64(c.Term)}
			}
			sh := t.shard(c.Ledger)
			if old, ok := sh.tombs[c.Ledger]; !ok || !old.at.after(at) {
				sh.tombs[c.Ledger] = tomb{at: at, in: f.seg.seq, deleted: int64(c.Entry)}
			}
		}
	}
	for _, f := range r.found {
		for _, c := range f.controls {
			r.loadControl(f.seg, c)
		}
		for _, in := range f.ledgers {
			r.loadRun(f.seg, in)
		}
	}
}

func (r *recovery) ledger(id entry.LedgerID) *ledger {
	l := r.store.table.lookup(id)
	if l == nil {
		l = r.store.table.create(id)
		l.durable = true
	}
	return l
}

func (r *recovery) loadControl(seg *Segment, c segment.Control) {
	t := r.store.table
	at := logPlace{seq: seg.seq, offset: c.Location.Offset}
	if tomb, ok := t.tomb(c.Ledger); c.Kind == segment.KindTombstone || ok && !at.after(tomb.at) {
		return
	}
	l := r.ledger(c.Ledger)
	switch c.Kind { //nolint:exhaustive // entries are no controls, tombstones were loaded before
	case segment.KindFence:
		if c.Term >= l.term {
			l.term, l.acceptedTerm, l.termIn = c.Term, c.Term, seg.seq
		}
	case segment.KindLAC:
		if c.LAC >= l.lac {
			l.lac, l.lacIn = c.LAC, seg.seq
		}
	case segment.KindLimbo, segment.KindLimboCleared:
		l.limbo, l.limboIn = c.Kind == segment.KindLimbo, seg.seq
		l.acceptedLimbo = l.limbo
		if l.id == everyLedger {
			t.lossAll.Store(l.limbo)
		}
	}
}

func (r *recovery) loadRun(seg *Segment, in segment.LedgerInfo) {
	if in.Entries == 0 {
		return
	}
	held := &run{seg: seg, first: in.First, last: in.Last, count: in.Entries, bytes: in.Bytes}
	if tomb, ok := r.store.table.tomb(in.Ledger); ok && seg.seq <= tomb.at.seq {
		if !r.store.expired(tomb.deleted) {
			tomb.runs = append(tomb.runs, held)
			r.store.table.shard(in.Ledger).tombs[in.Ledger] = tomb
			seg.trash.Add(in.Bytes)
		}
		return
	}
	l := r.ledger(in.Ledger)
	l.addRun(held)
	seg.live.Add(in.Bytes)
	if in.LAC > l.lac {
		l.lac, l.lacIn = in.LAC, seg.seq
	}
}
