package ledgerstore

import (
	"container/list"
	"slices"
	"sync"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

// footerCache keeps parts of sealed segments' footers in memory: where the entries of one ledger are in one segment.
// The least recently used go when the budget is used up. A reader that catches up needs a part many times, and then
// one read of the disk for an entry instead of several.
type footerCache struct {
	limit int64

	mu    sync.Mutex
	used  int64
	parts map[footerKey]*list.Element // of *footerPart
	order list.List                   // least recently used first
}

type footerKey struct {
	seg    *Segment
	ledger entry.LedgerID
}

type footerPart struct {
	key   footerKey
	slots []slot
}

const (
	slotBytes      = 16
	footerOverhead = 128 // of a part, roughly
)

func newFooterCache(limit int64) *footerCache {
	return &footerCache{limit: limit, parts: map[footerKey]*list.Element{}}
}

// find locates an entry, of count that the ledger has in the segment. An error means that it cannot be told.
func (c *footerCache) find(r *segment.Reader, key footerKey, count int64, e entry.EntryID) (segment.Location, bool, error) {
	if count*slotBytes+footerOverhead > c.limit {
		return r.Find(key.ledger, e)
	}
	slots, ok := c.get(key)
	if !ok {
		var err error
		if slots, err = loadSlots(r, key.ledger, count); err != nil {
			return segment.Location{}, false, err
		}
		c.put(key, slots)
	}
	at, found := slices.BinarySearchFunc(slots, e, compareSlot)
	if !found {
		return segment.Location{}, false, nil
	}
	return segment.Location{Offset: int64(slots[at].offset), Length: slots[at].length}, true, nil
}

func loadSlots(r *segment.Reader, l entry.LedgerID, count int64) ([]slot, error) {
	slots := make([]slot, 0, count)
	err := r.IndexLedger(l, 0, func(e entry.EntryID, loc segment.Location) bool {
		if n := len(slots); n == 0 || slots[n-1].entry != e { // of copies the first counts
			slots = append(slots, slot{entry: e, offset: uint32(loc.Offset), length: loc.Length})
		}
		return true
	})
	return slots, err
}

func (c *footerCache) get(key footerKey) ([]slot, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.parts[key]
	if at == nil {
		return nil, false
	}
	c.order.MoveToBack(at)
	return part(at).slots, true
}

func (c *footerCache) put(key footerKey, slots []slot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.parts[key] != nil {
		return // another reader was faster
	}
	p := &footerPart{key: key, slots: slots}
	c.parts[key] = c.order.PushBack(p)
	for c.used += p.bytes(); c.used > c.limit; {
		c.remove(c.order.Front())
	}
}

// drop forgets a segment.
func (c *footerCache) drop(seg *Segment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, at := range c.parts {
		if key.seg == seg {
			c.remove(at)
		}
	}
}

func (c *footerCache) remove(at *list.Element) {
	p := part(at)
	c.order.Remove(at)
	delete(c.parts, p.key)
	c.used -= p.bytes()
}

func (p *footerPart) bytes() int64 { return int64(cap(p.slots))*slotBytes + footerOverhead }

func part(at *list.Element) *footerPart {
	p, ok := at.Value.(*footerPart)
	if !ok {
		panic("ledgerstore: foreign value in the footers' list")
	}
	return p
}
