package topic

import (
	"sort"
	"sync"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Cache holds the newest entries of all topics of a process within a number of bytes. What was cached first goes
// first, whichever topic it belongs to.
//
// Each topic keeps its own entries, a contiguous stretch that ends with its newest, under a lock of their own; Cache
// knows only their order and sizes. So a reader waits for its topic alone, and evicting touches one topic at a time.
// A map of entries with least-recently-used order was rejected: tail readers go through a topic in order, and an
// entry that all of them have passed is of no use however often it was read.
type Cache struct {
	capacity int64

	mu   sync.Mutex
	used int64
	ring []token // from head on, oldest first
	head int
}

// token stands for the oldest cached entry of a topic that has no older token.
type token struct {
	of   *cached
	size int64
}

// cached is a topic's place in the cache.
type cached struct {
	mu   sync.Mutex
	tail []cachedEntry // from head on
	head int
	dead bool
}

type cachedEntry struct {
	pos    entry.Position
	offset entry.Offset
	body   []byte
}

// entryOverhead is what an entry costs beside its body.
const entryOverhead = 128

// NewCache returns a cache of capacity bytes.
func NewCache(capacity int64) *Cache { return &Cache{capacity: capacity} }

// Capacity returns how many bytes it may hold.
func (c *Cache) Capacity() int64 { return c.capacity }

// Used returns the bytes held.
func (c *Cache) Used() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.used
}

// push adds confirmed entries at a topic's end, and evicts what is oldest.
func (c *Cache) push(to *cached, entries []chain.ConfirmedEntry) {
	to.mu.Lock()
	if to.dead {
		to.mu.Unlock()
		return
	}
	for i := range entries {
		e := &entries[i]
		to.tail = append(to.tail, cachedEntry{e.Position, e.Offset, e.Body})
	}
	var room [8]*cached
	victims := room[:0]
	c.mu.Lock()
	for i := range entries {
		size := int64(len(entries[i].Body)) + entryOverhead
		c.ring = append(c.ring, token{to, size})
		c.used += size
	}
	for c.used > c.capacity {
		old := c.ring[c.head]
		c.ring[c.head] = token{}
		c.head++
		c.used -= old.size
		victims = append(victims, old.of)
	}
	if c.head > 1024 && c.head > len(c.ring)/2 {
		n := copy(c.ring, c.ring[c.head:])
		clear(c.ring[n:])
		c.ring, c.head = c.ring[:n], 0
	}
	c.mu.Unlock()
	to.mu.Unlock()
	for _, v := range victims {
		v.mu.Lock()
		v.drop()
		v.mu.Unlock()
	}
}

func (v *cached) drop() {
	if v.dead || v.head == len(v.tail) {
		return
	}
	v.tail[v.head] = cachedEntry{}
	v.head++
	switch {
	case v.head == len(v.tail):
		v.tail, v.head = nil, 0
	case v.head > 64 && v.head > len(v.tail)/2:
		n := copy(v.tail, v.tail[v.head:])
		clear(v.tail[n:])
		v.tail, v.head = v.tail[:n], 0
	}
}

// clear lets go of everything; the tokens run out by themselves.
func (v *cached) clear() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tail, v.head, v.dead = nil, 0, true
}

// read appends to buf the cached entries from the one that holds offset on, below end, at least one and at most
// about maxBytes beyond it. It appends nothing if offset is not cached.
func (v *cached) read(buf []cachedEntry, offset, end entry.Offset, maxBytes int) []cachedEntry {
	v.mu.Lock()
	defer v.mu.Unlock()
	live := v.tail[v.head:]
	if len(live) == 0 || offset < live[0].offset {
		return buf
	}
	at := sort.Search(len(live), func(i int) bool { return live[i].offset > offset }) - 1
	size := 0
	for _, e := range live[at:] {
		size += len(e.body)
		if e.offset >= end || size > maxBytes && e.offset > offset && len(buf) > 0 {
			break
		}
		buf = append(buf, e)
	}
	return buf
}

// holding returns the cached entry that holds offset, which nothing from end on does.
func (v *cached) holding(offset, end entry.Offset) (cachedEntry, bool) {
	if offset >= end {
		return cachedEntry{}, false
	}
	var room [1]cachedEntry
	got := v.read(room[:0], offset, end, 0)
	if len(got) == 0 {
		return cachedEntry{}, false
	}
	return got[0], true
}
