package ledgerstore

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

// How a store starts on a disk that has no room for a segment. It goes on in the one that it was at when it stopped, in the
// space that is reserved there: so a start takes nothing, neither from the disk nor from the reserve, and neither the
// manifest nor the directory changes. There may be any number of them. A new segment for each start, out of the reserve, was
// rejected: sealing the last one gives its space back to a disk that something else fills, and the reserve comes to an end.

// keepLast sets last, if the disk has no room. The last segment may be one that was made ahead, with nothing in it.
func (r *recovery) keepLast() error {
	s := r.store
	disk, err := s.fs.Usage(s.cfg.Dir)
	if err != nil {
		return fmt.Errorf("read the disk's usage: %w", err)
	}
	if s.hasRoom(disk) || s.spareCount() > s.cfg.Spares || len(r.found) == 0 {
		return nil
	}
	last := r.found[len(r.found)-1]
	if listed := s.segments.manifest.segments; last.scan != nil && last.scan.Resumable() && last.seg.seq == listed[len(listed)-1].sequence {
		r.last = last
	}
	return nil
}

// firstActive makes, or finds, the segment that the store begins with; of one that holds something that no batch says to be
// durable, stated is the ledger of that. A full disk's last segment goes on, if it has room; if it has not, the store takes the last spare file, which
// nothing else takes, then whatever there is room for, a few control records being enough to free space, and at last what
// there is: the store serves, and what it would have to write waits.
func (r *recovery) firstActive() (active *Segment, stated *ledger, err error) {
	s := r.store
	if r.last != nil && r.last.scan.Room() >= s.cfg.SegmentSize/32 {
		return r.resume()
	}
	if r.last == nil {
		active, err = s.prepare(ordinary)
	}
	if r.last != nil || errors.Is(err, syscall.ENOSPC) {
		active, err = s.prepare(lastReserve)
	}
	for size := s.cfg.SegmentSize / 2; errors.Is(err, syscall.ENOSPC) && size >= minSegmentSize/2; size /= 2 {
		active, err = s.prepareSized(size, lastReserve)
	}
	if errors.Is(err, syscall.ENOSPC) && r.last != nil {
		return r.resume()
	}
	r.last = nil // it is sealed as the others are
	return active, nil, err
}

// resume makes the last segment the active one.
func (r *recovery) resume() (active *Segment, stated *ledger, err error) {
	s, f := r.store, r.last
	seg := f.seg
	slots := map[entry.LedgerID][]slot{}
	err = f.scan.Index(func(x segment.IndexEntry) error {
		of := slots[x.Ledger]
		if n := len(of); n == 0 || of[n-1].entry != x.Entry { // of copies the first counts
			slots[x.Ledger] = append(of, slot{entry: x.Entry, offset: uint32(x.Location.Offset), length: x.Location.Length})
		}
		if x.Location.Offset >= f.scan.Stated {
			stated = s.table.lookup(x.Ledger)
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	for _, c := range f.controls {
		if c.Location.Offset >= f.scan.Stated && c.Kind != segment.KindLAC && s.table.lookup(c.Ledger) != nil {
			stated = s.table.lookup(c.Ledger)
		}
	}
	end, batches := f.scan.End, f.scan.Batches()
	w, err := segment.Resume(s.fs, seg.path, f.scan)
	if err != nil {
		return nil, nil, err
	}
	seg.appender, seg.handle.writer = w, w
	seg.batches, seg.durable = batches, end
	seg.size.Store(end)
	seg.synced.Store(end)
	for id, of := range slots {
		l := s.table.lookup(id)
		if l == nil || len(l.runs) == 0 {
			continue // it was deleted
		}
		if held := l.runs[len(l.runs)-1]; held.seg == seg {
			held.slots = of
			seg.holders = append(seg.holders, l)
		}
	}
	s.log.Info("the disk is full: the last segment goes on", "path", seg.path, "end", end)
	return seg, stated, nil
}

// vouchFor states once more what a ledger's LAC is, if there is room: its batch states that what was found is durable.
func (c *Core) vouchFor(l *ledger) {
	if c.active.appender.Room(1, 0) {
		c.enqueue(&item{ledger: l, vouches: true, rec: segment.Record{Kind: segment.KindLAC, Ledger: l.id, LAC: l.lac}})
	}
}
