package model

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
)

// Result is what a search found.
type Result struct {
	// States were visited, Closed of them with an ended ledger; Depth is the longest of the shortest ways to one.
	States, Closed, Depth int
	// Writers, Recoveries and Records are the states of the product's machines among them.
	Writers, Recoveries, Records int
	// Cut: there are more states than the limit.
	Cut       bool
	Violation *Violation
	Took      time.Duration
}

// Violation is a rule that breaks, with the shortest story that leads there.
type Violation struct {
	Rule  string
	Story []string
}

func (v *Violation) String() string {
	var s strings.Builder
	for i, line := range v.Story {
		fmt.Fprintf(&s, "%3d. %s\n", i+1, line)
	}
	fmt.Fprintf(&s, "  => %s\n", v.Rule)
	return s.String()
}

// search is the set of visited states, in the order of the visits.
type search struct {
	cfg     *Config
	stride  int
	packed  []byte // the states, one after the other
	parents []uint32
	table   []uint32 // open addressing: index+1
	seed    maphash.Seed
	scratch [128]byte
}

func newSearch(c *Config) *search {
	return &search{cfg: c, stride: c.packed(), table: make([]uint32, 1<<16), seed: maphash.MakeSeed()}
}

func (v *search) at(i int) []byte { return v.packed[i*v.stride : (i+1)*v.stride] }

func (v *search) len() int { return len(v.parents) }

// slot returns where in the table the state is, or would be.
func (v *search) slot(p []byte) uint64 {
	mask := uint64(len(v.table) - 1)
	at := maphash.Bytes(v.seed, p) & mask
	for v.table[at] != 0 && !bytes.Equal(v.at(int(v.table[at]-1)), p) {
		at = (at + 1) & mask
	}
	return at
}

func (v *search) visit(s *state, parent uint32) {
	if v.len()*4 >= len(v.table)*3 {
		v.table = make([]uint32, 2*len(v.table))
		for i := range v.len() {
			v.table[v.slot(v.at(i))] = uint32(i + 1)
		}
	}
	p := v.scratch[:v.stride]
	v.cfg.pack(s, p)
	at := v.slot(p)
	if v.table[at] != 0 {
		return
	}
	v.packed = append(v.packed, p...)
	v.parents = append(v.parents, parent)
	v.table[at] = uint32(v.len())
}

// Explore visits all states of c, and stops at the first that breaks a rule.
func Explore(c *Config) (r Result) {
	began := time.Now()
	w := newWorld(c)
	v := newSearch(c)
	x := &expander{world: w}
	v.visit(&w.first, 0)
	defer func() {
		r.States = v.len()
		r.Writers, r.Recoveries, r.Records = len(w.writer)-1, len(w.recovery)-1, len(w.record)-1
		r.Took = time.Since(began)
	}()
	level := 1 // where the states of the next depth begin
	for i := 0; i < v.len(); i++ {
		if i == level {
			r.Depth++
			level = v.len()
		}
		s := c.unpack(v.at(i))
		if w.record[s.record].l.State >= meta.LedgerClosed {
			r.Closed++
		}
		if rule := w.check(&s); rule != "" {
			r.Violation = &Violation{rule, v.story(w, uint32(i))}
			return r
		}
		for _, n := range x.expand(&s) {
			if n.broken != "" {
				story := v.story(w, uint32(i))
				r.Violation = &Violation{n.broken, append(story, w.describe(&s, &n))}
				return r
			}
			v.visit(&n.s, uint32(i))
		}
		if c.Limit > 0 && v.len() >= c.Limit {
			r.Cut = true
			return r
		}
	}
	return r
}

// story tells how state i came about.
func (v *search) story(w *world, i uint32) []string {
	var path []uint32
	for ; i != 0; i = v.parents[i] {
		path = append(path, i)
	}
	lines := []string{fmt.Sprintf("the writer appends %d entries at %v", len(w.cfg.Levels), w.cfg.Levels)}
	at := w.first
	for k := len(path) - 1; k >= 0; k-- {
		next := w.cfg.unpack(v.at(int(path[k])))
		lines = append(lines, w.describe(&at, &successor{s: next}))
		at = next
	}
	return lines
}

// describe tells the event that leads from s to n.
func (w *world) describe(s *state, n *successor) string {
	x := &expander{world: w, tell: true}
	for _, m := range x.expand(s) {
		if m.s == n.s && m.broken == n.broken {
			return m.what
		}
	}
	panic("model: an event does not come back")
}
