package ledgerstore

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/penstock-mq/penstock/pkg/segment"
)

// How the core goes from one segment to the next, and what it does where the disk has no room for one.

// roll makes the next segment the active one, if it is there.
func (c *Core) roll() bool {
	if c.next == nil {
		switch {
		case !c.noNext:
			c.askPrepare()
		case c.exhausted:
			c.stalled = true
		case !c.prepareAsked && c.unsealed < maxUnsealed:
			// No space, or no file descriptor, for an ordinary segment: what is urgent gets one from the reserve.
			c.turnAdds(false)
			if c.urgentQueued() {
				c.prepareAsked, c.ready.Reserve = true, true
			}
		}
		return false
	}
	old := c.active
	old.rolled = true
	c.previous = old
	c.active, c.next, c.mustRoll = c.next, nil, false
	c.sealIfDone(old)
	return true
}

func (c *Core) askPrepare() {
	if !c.prepareAsked && !c.noNext && c.next == nil && c.unsealed < maxUnsealed {
		c.prepareAsked = true
		c.ready.Prepare = true
	}
}

func (c *Core) stepPrepared(ev *Prepared) {
	c.prepareAsked = false
	switch {
	case ev.Err == nil:
		c.next = ev.Segment
		c.unsealed++
	case !shortage(ev.Err):
		c.fail(fmt.Errorf("prepare segment: %w", ev.Err))
	case c.noNext:
		c.exhausted = true
		c.turnAdds(true)
	default:
		c.noNext = true
		c.noFiles = noFiles(ev.Err)
		c.spaceOut = c.spaceOut || !c.noFiles
	}
}

// shortage reports whether something could not be begun for want of space or of file descriptors: it will do when there are
// some again, and has changed nothing.
func shortage(err error) bool { return errors.Is(err, syscall.ENOSPC) || noFiles(err) }

func noFiles(err error) bool { return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) }

// short is the answer to an add that finds no segment to go to.
func (c *Core) short() error {
	if c.noFiles {
		return errNoFiles
	}
	return errFull
}

func (c *Core) stepSealed(ev *Sealed) {
	c.unsealed--
	if errors.Is(ev.Err, errPostponed) {
		return
	}
	if ev.Err != nil {
		c.fail(fmt.Errorf("seal segment %d: %w", ev.Segment.seq, ev.Err))
		return
	}
	for _, l := range ev.Segment.holders {
		sh := c.table.shard(l.id)
		sh.mu.Lock()
		for _, r := range l.runs {
			if r.seg == ev.Segment {
				r.slots = nil
			}
		}
		sh.mu.Unlock()
	}
	ev.Segment.holders = nil
	ev.Segment.sealed.Store(true)
}

// urgentQueued reports whether something in the queue has to be stored: adds that have not are not in it any more.
func (c *Core) urgentQueued() bool {
	for _, it := range c.queue {
		if it.rec.Kind != 0 {
			return true
		}
	}
	return false
}

func (c *Core) sealIfDone(s *Segment) {
	if s.rolled && s.inFlight == 0 {
		c.ready.Seals = append(c.ready.Seals, s)
	}
}

// refuseForSpace takes back a group that found no room on the disk. Nothing of it counts: the next group is
// written over whatever part of it reached the file. Adds are answered ReadOnly; what is urgent goes to the next
// segment, which comes out of the reserve, and waits for space if that has no room either.
func (c *Core) refuseForSpace(b *Batch) {
	c.spaceOut = true
	if b.Segment.batches == 0 {
		c.stalled = true
	} else {
		c.mustRoll = true
	}
	b.Segment.inFlight--
	c.groups = c.groups[:len(c.groups)-1]
	c.queue = append(append(make([]*item, 0, len(b.items)+len(c.queue)), b.items...), c.queue...)
	c.recycle(b)
	c.turnAdds(false)
}

// turnAdds answers the adds in the queue that may be refused for want of space: once the reserve is used up, the urgent
// ones as well.
func (c *Core) turnAdds(urgent bool) {
	kept := c.queue[:0]
	for _, it := range c.queue {
		if it.rec.Kind != segment.KindEntry || it.urgent && !urgent {
			kept = append(kept, it)
			continue
		}
		l := it.ledger
		c.pendingBytes -= int64(len(it.rec.Body))
		delete(l.pending, it.rec.Entry)
		if l.queued--; !l.durable && l.queued == 0 {
			c.table.forget(l)
		}
		for d := it.after; d != nil; d = d.after {
			d.err = c.short() // it is behind this one in the queue
		}
		c.reply(it, c.short())
	}
	clear(c.queue[len(kept):])
	c.queue = kept
}
