package ledgerstore

import (
	"sort"
	"sync"

	"github.com/penstock-mq/penstock/pkg/segment"
)

// tailCache keeps the newest bodies in memory, so that readers at the tail cost no disk reads. Bodies are copied
// into slabs as they are written; the oldest slab goes when the budget is used up. Entries are found by their place
// in the log, which grows, so that a binary search takes the place of a map.
type tailCache struct {
	limit int64
	slab  int

	mu    sync.RWMutex
	slabs []*slab // oldest first
	used  int64
}

type slab struct {
	seq    uint64 // all of one segment
	places []cached
	bytes  []byte
}

type cached struct {
	offset   int64
	start    int
	length   int
	checksum uint32
}

func newTailCache(limit int64) *tailCache {
	return &tailCache{limit: limit, slab: int(min(mib, max(limit/8, 4096)))}
}

// put copies the entries of a batch that was written.
func (c *tailCache) put(seq uint64, recs []segment.Record, locs []segment.Location) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range recs {
		if r := &recs[i]; r.Kind == segment.KindEntry && int64(len(r.Body)) <= c.limit {
			s := c.room(seq, len(r.Body))
			s.places = append(s.places, cached{
				offset: locs[i].Offset, start: len(s.bytes), length: len(r.Body), checksum: r.Checksum,
			})
			s.bytes = append(s.bytes, r.Body...)
		}
	}
}

// room returns the slab that takes n bytes more.
func (c *tailCache) room(seq uint64, n int) *slab {
	if k := len(c.slabs); k > 0 {
		if s := c.slabs[k-1]; s.seq == seq && len(s.bytes)+n <= cap(s.bytes) {
			return s
		}
	}
	size := max(c.slab, n)
	for len(c.slabs) > 0 && c.used+int64(size) > c.limit {
		c.used -= int64(cap(c.slabs[0].bytes))
		c.slabs[0] = nil
		c.slabs = c.slabs[1:]
	}
	s := &slab{seq: seq, bytes: make([]byte, 0, size)}
	c.slabs = append(c.slabs, s)
	c.used += int64(cap(s.bytes))
	return s
}

// get returns a copy of the body of the entry at offset of segment seq.
func (c *tailCache) get(seq uint64, offset int64) (body []byte, checksum uint32, ok bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	i := sort.Search(len(c.slabs), func(i int) bool {
		s := c.slabs[i]
		return s.seq > seq || s.seq == seq && s.places[0].offset > offset
	})
	if i == 0 || c.slabs[i-1].seq != seq {
		return nil, 0, false
	}
	s := c.slabs[i-1]
	at := sort.Search(len(s.places), func(i int) bool { return s.places[i].offset >= offset })
	if at == len(s.places) || s.places[at].offset != offset {
		return nil, 0, false
	}
	p := s.places[at]
	return append(make([]byte, 0, p.length), s.bytes[p.start:p.start+p.length]...), p.checksum, true
}
