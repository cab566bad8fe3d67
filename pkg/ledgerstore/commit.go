package ledgerstore

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/penstock-mq/penstock/pkg/segment"
)

// How what is accepted becomes groups, durable, and known.

// pump cuts groups as long as there is something to write and nothing in the way.
func (c *Core) pump() {
	for c.failed == nil && !c.writing && !c.stalled && len(c.queue) > 0 {
		head := c.queue[0]
		if head.rec.Kind == 0 {
			c.popQueue(1)
			if n := len(c.groups); n > 0 {
				c.groups[n-1].items = append(c.groups[n-1].items, head)
			} else {
				c.finish(head)
			}
			continue
		}
		if len(c.groups) >= maxInFlight {
			return
		}
		if c.mustRoll || !c.fits(head, 0, 0) {
			if !c.roll() {
				return
			}
		}
		c.cut()
	}
}

// fits reports whether a record may follow n others in the group being cut.
func (c *Core) fits(it *item, n int, bodies int64) bool {
	if it.rec.Kind == segment.KindEntry {
		// A ledger that was deleted may come back, but never in the segment of its tombstone: then the
		// sequence number alone tells which of its entries are dead.
		if t, ok := c.table.tomb(it.rec.Ledger); ok && t.at.seq == c.active.seq {
			return false
		}
	}
	if n == 0 && c.active.batches == 0 {
		return true // what is too large for any segment makes its own one longer
	}
	size := int64(len(it.rec.Body))
	if it.rec.Kind == segment.KindEntry && c.noNext && c.next == nil {
		size += c.keep
	}
	return c.active.appender.Room(n+1, bodies+size)
}

func (c *Core) cut() {
	b := c.newBatch()
	b.Segment, b.DurableUpto = c.active, c.active.durable
	if c.previous != nil {
		b.PreviousDurable = c.previous.durable
	}
	var bodies int64
	n := 0
	for _, it := range c.queue {
		if it.rec.Kind != 0 {
			size := int64(len(it.rec.Body))
			if len(b.Records) > 0 && (bodies+size > groupBytes || len(b.Records) == maxGroupRecords || !c.fits(it, len(b.Records), bodies)) {
				break
			}
			bodies += size
			b.Records = append(b.Records, it.rec)
		}
		b.items = append(b.items, it)
		n++
	}
	c.popQueue(n)
	c.groups = append(c.groups, b)
	c.writing = true
	c.active.inFlight++
	c.ready.Append = b
}

// maxGroupRecords keeps a group of tiny records within a batch's limit.
const maxGroupRecords = 8192

func (c *Core) newBatch() *Batch {
	if n := len(c.free); n > 0 {
		b := c.free[n-1]
		c.free = c.free[:n-1]
		return b
	}
	return &Batch{}
}

func (c *Core) popQueue(n int) {
	if len(c.queue)-n > 4*n { // moving the rest would cost more than the memory behind it
		clear(c.queue[:n])
		c.queue = c.queue[n:]
		return
	}
	rest := copy(c.queue, c.queue[n:])
	clear(c.queue[rest:])
	c.queue = c.queue[:rest]
}

func (c *Core) stepWritten(ev *Written) {
	b := ev.Batch
	c.writing = false
	switch {
	case ev.Err == nil:
		b.end = ev.End
		b.Segment.batches++
		for i, j := 0, 0; i < len(b.items); i++ {
			if it := b.items[i]; it.rec.Kind != 0 {
				it.location = ev.Locations[j]
				j++
			}
		}
		b.hard = !c.lazy || b.demanded()
		c.ready.Syncs = append(c.ready.Syncs, b)
		c.askPrepare()
	case errors.Is(ev.Err, syscall.ENOSPC):
		c.refuseForSpace(b)
	default:
		c.fail(fmt.Errorf("write segment %d: %w", b.Segment.seq, ev.Err))
	}
}

func (c *Core) stepSynced(ev *Synced) {
	if ev.Err != nil {
		c.fail(fmt.Errorf("sync segment %d: %w", ev.Batch.Segment.seq, ev.Err))
		return
	}
	if ev.Skipped && ev.Batch.demanded() { // a recovery has come to count on it meanwhile
		ev.Batch.hard = true
		c.ready.Syncs = append(c.ready.Syncs, ev.Batch)
		return
	}
	ev.Batch.synced = true
	for len(c.groups) > 0 && c.groups[0].synced {
		b := c.groups[0]
		c.groups = append(c.groups[:0], c.groups[1:]...)
		c.commit(b)
	}
	for len(c.deferred) > 0 {
		ev := c.deferred[0]
		c.deferred = c.deferred[1:]
		c.Step(ev)
	}
}

// demanded reports whether an answer of the group promises that it is on the disk.
func (b *Batch) demanded() bool {
	return slices.ContainsFunc(b.items, func(it *item) bool {
		switch it.rec.Kind { //nolint:exhaustive // the rest is below
		case 0, segment.KindLAC:
			return it.hard
		case segment.KindEntry:
			return it.hard || it.add != nil && it.add.Recovery
		}
		return true
	})
}

// commit makes a durable group visible and answers it.
func (c *Core) commit(b *Batch) {
	s := b.Segment
	s.durable = b.end
	s.inFlight--
	s.unstated = nil
	for _, it := range b.items {
		if it.ledger != nil && it.rec.Kind != 0 && !it.vouches {
			s.unstated = it.ledger
		}
		c.apply(s, it)
		c.finish(it)
	}
	c.sealIfDone(s)
	c.recycle(b)
}

// vouch repeats a LAC, once after each burst, when nothing is on its way. The header of its batch states that all
// before is durable, so that a restart that cannot read it takes it for damage and not for a torn tail, which without
// a batch behind it cannot be told apart.
func (c *Core) vouch() {
	l := c.active.unstated
	if l == nil || len(c.queue) > 0 || len(c.groups) > 0 || c.State() == Full {
		return
	}
	c.active.unstated = nil
	if !l.deleting && c.table.lookup(l.id) == l {
		c.enqueue(&item{ledger: l, vouches: true, rec: segment.Record{Kind: segment.KindLAC, Ledger: l.id, LAC: l.lac}})
	}
}

func (c *Core) recycle(b *Batch) {
	clear(b.Records)
	clear(b.items)
	*b = Batch{Records: b.Records[:0], items: b.items[:0]}
	c.free = append(c.free, b)
}

// apply files a durable record.
func (c *Core) apply(s *Segment, it *item) {
	kind, l := it.rec.Kind, it.ledger
	switch {
	case kind == 0:
		return
	case l == nil: // a tombstone carried forward: its first place counts
		sh := c.table.shard(it.rec.Ledger)
		sh.mu.Lock()
		if t, ok := sh.tombs[it.rec.Ledger]; ok {
			t.in = s.seq
			sh.tombs[it.rec.Ledger] = t
		}
		sh.mu.Unlock()
		return
	}
	c.pendingBytes -= int64(len(it.rec.Body))
	l.queued--
	sh := c.table.shard(l.id)
	sh.mu.Lock()
	l.durable = true
	switch kind {
	case segment.KindEntry:
		l.addEntry(s, it.rec.Entry, it.location.Offset, it.location.Length)
		l.unreadable = l.unreadable.without(it.rec.Entry)
		sh.raiseLAC(l, it.rec.LAC, s.seq)
		delete(l.pending, it.rec.Entry)
	case segment.KindFence:
		if it.rec.Term >= l.term {
			l.term, l.termIn = it.rec.Term, s.seq
		}
	case segment.KindLAC:
		sh.raiseLAC(l, it.rec.LAC, s.seq)
		if it.rec.LAC == l.lac {
			l.lacIn = s.seq
		}
	case segment.KindLimbo, segment.KindLimboCleared:
		l.limbo, l.limboIn = kind == segment.KindLimbo, s.seq
		if l.id == everyLedger {
			c.table.lossAll.Store(l.limbo)
		}
	case segment.KindTombstone:
		c.bury(sh, l, tomb{
			at: logPlace{seq: s.seq, offset: it.location.Offset}, in: s.seq, deleted: int64(it.rec.Entry),
		})
	}
	sh.mu.Unlock()
	if kind == segment.KindTombstone {
		c.deferred = append(c.deferred, l.deferred...)
		l.deferred = nil
	}
}
