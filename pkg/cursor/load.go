package cursor

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Group sorts a topic's live records by subscription; kinds that are not a cursor's are left out. A key too
// short to name a subscription is an error, since nobody can tell whose it was.
func Group(records []Record) (map[entry.UUID][]Record, error) {
	groups := map[entry.UUID][]Record{}
	for _, r := range records {
		if !IsKind(r.Kind) {
			continue
		}
		if len(r.Key) < uuidBytes {
			return nil, fmt.Errorf("group cursor records: key of %d bytes names no subscription", len(r.Key))
		}
		id := entry.UUID(r.Key[:uuidBytes])
		groups[id] = append(groups[id], r)
	}
	return groups, nil
}

// Purge returns the records that forget everything of the given live ones, of one subscription whose deletion
// had begun.
func Purge(records []Record) []Record {
	out := make([]Record, 0, len(records))
	for _, r := range records {
		if r.Kind != KindSubscription && !r.Delete {
			out = append(out, Record{Kind: r.Kind, Key: r.Key, Delete: true})
		}
	}
	for _, r := range records { // the mark of deletion goes last
		if r.Kind == KindSubscription && !r.Delete {
			out = append(out, Record{Kind: r.Kind, Key: r.Key, Delete: true})
		}
	}
	return out
}

// pageID tells the pages of one subscription apart.
type pageID struct {
	generation Generation
	number     uint64
}

// loadedPage gathers the records of one page.
type loadedPage struct {
	snap   *Record
	deltas map[uint64]Record
}

// Load builds a cursor from the records of one subscription: what the log holds live, in any order, or any
// prefix of what was written, in that order. Nothing else is assumed of the log than that the last record
// under a key counts. The errors are [ErrDeleted] and [*CorruptError]. Records that are superseded and still
// there are deleted by the next batch. now is the time in Unix milliseconds, from which on delays begin anew.
func Load(records []Record, now int64) (*Cursor, error) {
	var id entry.UUID
	if len(records) > 0 && len(records[0].Key) >= uuidBytes {
		id = entry.UUID(records[0].Key[:uuidBytes])
	}
	corrupt := func(kind uint8, page uint64, err error) error {
		return &CorruptError{Subscription: id, Kind: kind, Page: page, Reason: err.Error()}
	}
	var meta, state *Record
	pages := map[pageID]*loadedPage{}
	for _, r := range records {
		if len(r.Key) < uuidBytes || entry.UUID(r.Key[:uuidBytes]) != id {
			return nil, corrupt(r.Kind, 0, errors.New("key names another subscription"))
		}
		set := &r
		if r.Delete {
			set = nil
		}
		switch {
		case r.Kind == KindSubscription && len(r.Key) == uuidBytes:
			meta = set
		case r.Kind == KindState && len(r.Key) == uuidBytes:
			state = set
		case r.Kind == KindPage && len(r.Key) == pageKeyBytes, r.Kind == KindDelta && len(r.Key) == deltaKeyBytes:
			collect(pages, r)
		default:
			return nil, corrupt(r.Kind, 0, fmt.Errorf("kind %d with a key of %d bytes is not known here", r.Kind, len(r.Key)))
		}
	}
	c := &Cursor{pages: map[uint64]*page{}}
	if meta == nil {
		return nil, corrupt(KindSubscription, 0, errors.New("it is missing"))
	}
	var err error
	var deleted bool
	if c.meta, deleted, err = decodeMeta(*meta, id); err != nil {
		return nil, corrupt(KindSubscription, 0, err)
	}
	if deleted {
		return nil, ErrDeleted
	}
	switch {
	case state != nil:
		if c.generation, c.floor, err = decodeState(*state); err != nil {
			return nil, corrupt(KindState, 0, err)
		}
		if c.floor > maxOffset {
			return nil, corrupt(KindState, 0, fmt.Errorf("floor %d is above %d", uint64(c.floor), uint64(maxOffset)))
		}
	case len(pages) > 0:
		return nil, corrupt(KindState, 0, errors.New("it is missing"))
	default: // cut off between the first record of all and the second
		c.floor, c.stateDirty = c.meta.Initial, true
	}
	ids := slices.SortedFunc(maps.Keys(pages), func(a, b pageID) int {
		return cmp.Or(cmp.Compare(a.generation, b.generation), cmp.Compare(a.number, b.number))
	})
	for _, p := range ids {
		switch {
		case p.generation > c.generation:
			return nil, corrupt(KindPage, p.number, fmt.Errorf("it is of generation %d, the subscription of %d", p.generation, c.generation))
		case p.generation < c.generation || p.number < uint64(c.floor)>>pageBits:
			pages[p].discard(c)
		default:
			if err := pages[p].load(c, p, now); err != nil {
				return nil, err
			}
		}
	}
	if len(c.pages) > 0 {
		if next := c.NextUnacked(c.floor); next > c.floor {
			c.raise(next)
		}
	}
	c.solid = c.floor
	return c, nil
}

func collect(pages map[pageID]*loadedPage, r Record) {
	id := pageID{
		generation: Generation(binary.BigEndian.Uint32(r.Key[uuidBytes:])),
		number:     binary.BigEndian.Uint64(r.Key[uuidBytes+4:]),
	}
	p := pages[id]
	if p == nil {
		p = &loadedPage{}
		pages[id] = p
	}
	if r.Kind == KindPage {
		p.snap = &r
		if r.Delete {
			p.snap = nil
		}
	} else {
		seq := binary.BigEndian.Uint64(r.Key[pageKeyBytes:])
		if r.Delete {
			delete(p.deltas, seq)
		} else {
			if p.deltas == nil {
				p.deltas = map[uint64]Record{}
			}
			p.deltas[seq] = r
		}
	}
	if p.snap == nil && len(p.deltas) == 0 {
		delete(pages, id)
	}
}

// discard has the page's records deleted.
func (l *loadedPage) discard(c *Cursor) {
	if l.snap != nil {
		c.stale = append(c.stale, Record{Kind: KindPage, Key: l.snap.Key, Delete: true})
	}
	for _, seq := range slices.Sorted(maps.Keys(l.deltas)) {
		c.stale = append(c.stale, Record{Kind: KindDelta, Key: l.deltas[seq].Key, Delete: true})
	}
}

// load puts a page together from its snapshot and the deltas after it, which must not have gaps.
func (l *loadedPage) load(c *Cursor, id pageID, now int64) error {
	corrupt := func(kind uint8, err error) error {
		return &CorruptError{Subscription: c.meta.UUID, Kind: kind, Page: id.number, Reason: err.Error()}
	}
	if id.number > uint64(maxOffset)>>pageBits {
		return corrupt(KindPage, errors.New("no offset is in such a page"))
	}
	p := &page{pageKeys: pageKeys{generation: id.generation, number: id.number}}
	base := entry.Offset(id.number << pageBits)
	setRetries := func(retries []retryAt) {
		for _, r := range retries {
			if r.NotBefore > 0 {
				r.NotBefore += min(now, math.MaxInt64-r.NotBefore)
			}
			c.retries.Set(Range{First: base + entry.Offset(r.first), End: base + entry.Offset(r.last) + 1}, r.Retry)
		}
	}
	if l.snap != nil {
		snap, err := decodePage(*l.snap)
		if err != nil {
			return corrupt(KindPage, err)
		}
		p.acked, p.hasSnap, p.snapSeq, p.snapBytes = snap.acked, true, snap.seq, l.snap.Size()
		setRetries(snap.retries)
	}
	p.seq = p.snapSeq
	for _, seq := range slices.Sorted(maps.Keys(l.deltas)) {
		r := l.deltas[seq]
		if seq <= p.snapSeq { // the snapshot has it
			c.stale = append(c.stale, Record{Kind: KindDelta, Key: r.Key, Delete: true})
			continue
		}
		if seq != p.seq+1 {
			return corrupt(KindDelta, fmt.Errorf("change %d is missing before %d", p.seq+1, seq))
		}
		delta, err := decodeDelta(r)
		if err != nil {
			return corrupt(KindDelta, err)
		}
		for _, run := range delta.acked {
			p.acked.add(int(run.first), int(run.last))
		}
		setRetries(delta.retries)
		p.seq, p.deltaBytes = seq, p.deltaBytes+r.Size()
	}
	for i := p.acked.nextSet(0); c.retries.Len() > 0 && i < pageSize; {
		end := p.acked.nextClear(i)
		c.retries.Erase(Range{First: base + entry.Offset(i), End: base + entry.Offset(end)})
		i = p.acked.nextSet(end)
	}
	above := p.acked.n
	if id.number == uint64(c.floor)>>pageBits {
		p.fill(c.floor)
		above = p.acked.n - int(c.floor&pageMask)
		c.retries.Erase(Range{End: c.floor})
	}
	p.acked.shrink()
	c.above += uint64(above)
	c.pages[id.number] = p
	return nil
}
