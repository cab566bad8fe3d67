package vfs

import (
	"maps"
	"math/rand/v2"
	"path"
	"slices"
)

// Crash cuts the power and brings the file system back as a disk might hold it: what was synced, and of the rest
// what rng picks. One draw in four loses all that was not synced, one keeps all of it, the others decide sector by
// sector and name by name. A nil rng loses all. Files and locks from before are dead; power is on afterwards, with
// no cut set.
//
// The same calls in the same order and the same rng give the same bytes.
func (m *Mem) Crash(rng *rand.Rand) {
	m.mu.Lock()
	defer m.mu.Unlock()
	pick := newPicker(rng)
	names := m.crashNames(pick)
	// A file under two names cannot be, but one can be left under none; walk in the order of names.
	m.used = 0
	for _, name := range slices.Sorted(maps.Keys(names)) {
		node := names[name]
		node.disk = node.crash(pick)
		node.pending = nil
		node.data = slices.Clone(node.disk)
		node.links = 1
		m.used += uint64(len(node.data))
	}
	m.durable, m.names, m.pending = names, maps.Clone(names), nil
	m.locks = make(map[string]*memLock)
	m.epoch++
	m.off, m.budget = false, -1
}

// Clone returns a file system in the same state. Open files and locks stay with the original, so the clone is good
// for its [Mem.Crash]: one state can be crashed in many ways.
func (m *Mem) Clone() *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	nodes := make(map[*inode]*inode)
	cloned := func(n *inode) *inode {
		if nodes[n] == nil {
			nodes[n] = &inode{
				dir: n.dir, links: n.links, data: slices.Clone(n.data), disk: slices.Clone(n.disk),
				pending: slices.Clone(n.pending),
			}
		}
		return nodes[n]
	}
	all := func(names map[string]*inode) map[string]*inode {
		out := make(map[string]*inode, len(names))
		for name, node := range names {
			out[name] = cloned(node)
		}
		return out
	}
	c := &Mem{
		epoch: m.epoch, off: m.off, budget: m.budget, changes: m.changes, capacity: m.capacity, others: m.others, used: m.used,
		names: all(m.names), durable: all(m.durable), locks: make(map[string]*memLock),
	}
	for _, p := range m.pending {
		p.node = cloned(p.node)
		c.pending = append(c.pending, p)
	}
	return c
}

// crashNames decides which names survive.
func (m *Mem) crashNames(pick *picker) map[string]*inode {
	names := maps.Clone(m.durable)
	for _, c := range m.pending {
		if !pick.keep() {
			continue
		}
		// A file has one name: one that is kept ends an older one, whose own rename was lost.
		for name, node := range names {
			if c.add != "" && node == c.node {
				delete(names, name)
			}
		}
		c.apply(names)
	}
	for name := range names {
		if !reachable(names, name) {
			delete(names, name)
		}
	}
	return names
}

// reachable reports whether all parents of name exist.
func reachable(names map[string]*inode, name string) bool {
	for {
		parent := path.Dir(name)
		if parent == name {
			return true
		}
		if dir := names[parent]; dir == nil || !dir.dir {
			return false
		}
		name = parent
	}
}

// crash returns the bytes that the disk holds after the power cut.
func (n *inode) crash(pick *picker) []byte {
	if n.dir || len(n.pending) == 0 {
		return n.disk
	}
	// How many of the writes that touch a sector it has seen.
	touched := make(map[int64]int)
	for _, c := range n.pending {
		c.sectors(func(s, _, _ int64) { touched[s]++ })
	}
	seen := make(map[int64]int, len(touched))
	for _, s := range slices.Sorted(maps.Keys(touched)) {
		seen[s] = pick.upTo(touched[s])
	}
	sizes := pick.upTo(len(n.pending))
	size := int64(len(n.disk))
	if sizes > 0 {
		size = n.pending[sizes-1].size
	}
	disk := slices.Clone(n.disk)
	for i, c := range n.pending {
		if i < sizes && c.size < int64(len(disk)) {
			disk = resized(disk, c.size) // what was cut off does not come back
		}
		c.sectors(func(s, from, to int64) {
			if seen[s] == 0 {
				return
			}
			seen[s]--
			if to > int64(len(disk)) {
				disk = resized(disk, to)
			}
			copy(disk[from:to], c.data[from-c.off:])
		})
	}
	return resized(disk, size)
}

// sectors calls fn with each sector that the change writes to, and the stretch of the file it writes there.
func (c change) sectors(fn func(sector, from, to int64)) {
	if !c.write {
		return
	}
	end := c.off + int64(len(c.data))
	for from := c.off; from < end; {
		s := from / SectorSize
		to := min(end, (s+1)*SectorSize)
		fn(s, from, to)
		from = to
	}
}

// picker decides what survives.
type picker struct {
	rng   *rand.Rand
	mode  pickMode
	chanc float64 // of a change to survive, with pickSome
}

type pickMode int

const (
	pickNone pickMode = iota
	pickAll
	pickSome
)

func newPicker(rng *rand.Rand) *picker {
	p := &picker{rng: rng}
	if rng == nil {
		return p
	}
	switch rng.IntN(4) {
	case 0:
		p.mode = pickNone
	case 1:
		p.mode = pickAll
	default:
		p.mode, p.chanc = pickSome, rng.Float64()
	}
	return p
}

// keep decides on one change.
func (p *picker) keep() bool { return p.upTo(1) == 1 }

// upTo decides how many of n changes in a row survive.
func (p *picker) upTo(n int) int {
	switch p.mode {
	case pickNone:
		return 0
	case pickAll:
		return n
	case pickSome:
	}
	if p.rng.Float64() < p.chanc {
		return n
	}
	return p.rng.IntN(n + 1)
}
