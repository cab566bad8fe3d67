package ledgerstore

import (
	"cmp"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Trash. What a deleted ledger had on the disk stays there for [Config.Trash], if the disk has room: no request reaches
// it, but a deletion that should not have been can be undone by hand from the segments. All there is to it is that a
// tombstone carries the time of the deletion, that the runs of a buried ledger are kept with its tombstone, and that
// a segment with such runs is not compacted. When the time is over, or space is short, oldest first, they become dead
// bytes as any.
//
// Moving the segments of a deleted ledger to a place of their own was rejected: a segment has records of many ledgers.

// buried is a ledger in the trash.
type buried struct {
	ledger  entry.LedgerID
	deleted int64
}

// Expire empties the trash of what was deleted up to Before, in Unix milliseconds, and of more, oldest first, until
// Bytes are given up.
type Expire struct {
	Before int64
	Bytes  int64
}

func (*Expire) event() {}

func (c *Core) stepExpire(ev *Expire) {
	need := ev.Bytes
	for len(c.trash) > 0 {
		oldest := c.trash[0]
		// One that was deleted again since has a later place, too.
		if t, ok := c.table.tomb(oldest.ledger); ok && t.deleted == oldest.deleted {
			if t.deleted > ev.Before && need <= 0 {
				return
			}
			need -= c.table.emptyTrash(oldest.ledger)
		}
		c.trash = c.trash[1:]
	}
}

// bury replaces a ledger by its tombstone, under the shard's lock.
func (c *Core) bury(sh *shard, l *ledger, t tomb) {
	for _, r := range l.runs {
		r.seg.live.Add(-r.bytes)
	}
	before := sh.tombs[l.id] // of an earlier deletion
	if t.deleted != 0 {
		for _, r := range l.runs {
			r.seg.trash.Add(r.bytes)
		}
		t.runs = append(before.runs, l.runs...)
		if len(t.runs) > 0 {
			c.trash = append(c.trash, buried{ledger: l.id, deleted: t.deleted})
		}
	} else {
		before.empty()
	}
	sh.tombs[l.id] = t
	delete(sh.ledgers, l.id)
	sh.wake(l.id)
}

// empty makes dead bytes of what the tomb holds.
func (t tomb) empty() (bytes int64) {
	for _, r := range t.runs {
		r.seg.trash.Add(-r.bytes)
		bytes += r.bytes
	}
	return bytes
}

func (t *table) emptyTrash(id entry.LedgerID) int64 {
	sh := t.shard(id)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	m := sh.tombs[id]
	bytes := m.empty()
	m.runs = nil
	sh.tombs[id] = m
	return bytes
}

// inTrash lists what is in the trash, oldest first.
func (t *table) inTrash() []buried {
	var all []buried
	for id, m := range t.tombSnapshot() {
		if len(m.runs) > 0 {
			all = append(all, buried{ledger: id, deleted: m.deleted})
		}
	}
	slices.SortFunc(all, func(a, b buried) int {
		return cmp.Or(cmp.Compare(a.deleted, b.deleted), cmp.Compare(a.ledger, b.ledger))
	})
	return all
}

// deletionTime is what a tombstone of now says.
func (s *Store) deletionTime() int64 {
	if s.cfg.Trash <= 0 {
		return 0
	}
	return s.cfg.Sched.Now().UnixMilli()
}

// expired reports whether what was deleted then is trash no more.
func (s *Store) expired(deleted int64) bool {
	return deleted == 0 || deleted <= s.trashBefore()
}

func (s *Store) trashBefore() int64 { return s.cfg.Sched.Now().Add(-max(s.cfg.Trash, 0)).UnixMilli() }

// shortage is how many bytes the disk lacks to be writable, less those that compaction will free anyhow.
func (s *Store) shortage() int64 {
	u := s.Usage()
	free := max(int64(float64(u.Total)*(1-s.cfg.LowRatio)), s.cfg.SegmentSize)
	short := free - int64(u.Free)
	if short <= 0 {
		return short
	}
	carried := s.carried()
	for _, seg := range s.segments.list() {
		if short > 0 && s.compactable(seg) {
			short -= s.gain(seg, carried)
		}
	}
	return short
}
