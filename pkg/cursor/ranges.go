package cursor

import (
	"fmt"
	"iter"
	"slices"
	"sort"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Range is a half-open range of offsets: First is in it, End is not. It is empty when End ≤ First.
type Range struct {
	First, End entry.Offset
}

// Len returns the number of offsets in r.
func (r Range) Len() uint64 {
	if r.End <= r.First {
		return 0
	}
	return uint64(r.End - r.First)
}

// Empty reports whether r holds no offset.
func (r Range) Empty() bool { return r.End <= r.First }

// Contains reports whether o is in r.
func (r Range) Contains(o entry.Offset) bool { return r.First <= o && o < r.End }

// Intersect returns what r and q share, possibly empty.
func (r Range) Intersect(q Range) Range {
	return Range{First: max(r.First, q.First), End: min(r.End, q.End)}
}

// String formats r as "[first,end)".
func (r Range) String() string { return fmt.Sprintf("[%d,%d)", uint64(r.First), uint64(r.End)) }

// RangeMap gives values to ranges of offsets. Neighbours with equal values are joined, so that its size is the
// number of distinct stretches, not of offsets. The zero RangeMap is empty and ready.
//
// It is a sorted slice. A balanced tree would insert in the middle for less, but the two uses that count grow
// at the end and shrink at the front, which a slice does without moving or allocating anything; a change in
// the middle moves the shorter side.
type RangeMap[V comparable] struct {
	spans   []span[V]
	offsets uint64
}

// span has its value first, so that an empty value takes no room.
type span[V comparable] struct {
	value V
	r     Range
}

// Len returns the number of stretches.
func (m *RangeMap[V]) Len() int { return len(m.spans) }

// Offsets returns the number of offsets that have a value.
func (m *RangeMap[V]) Offsets() uint64 { return m.offsets }

// Clear forgets everything.
func (m *RangeMap[V]) Clear() { m.spans, m.offsets = nil, 0 }

// search returns the index of the first stretch that ends after o.
func (m *RangeMap[V]) search(o entry.Offset) int {
	if n := len(m.spans); n > 0 && m.spans[0].r.End > o {
		return 0
	} else if n > 0 && m.spans[n-1].r.End <= o {
		return n
	}
	return sort.Search(len(m.spans), func(i int) bool { return m.spans[i].r.End > o })
}

// Get returns the value at o.
func (m *RangeMap[V]) Get(o entry.Offset) (V, bool) {
	if i := m.search(o); i < len(m.spans) && m.spans[i].r.First <= o {
		return m.spans[i].value, true
	}
	var zero V
	return zero, false
}

// Set gives every offset of r the value v.
func (m *RangeMap[V]) Set(r Range, v V) {
	if r.Empty() {
		return
	}
	if n := len(m.spans); n == 0 || m.spans[n-1].r.End <= r.First {
		m.offsets += r.Len()
		if n > 0 && m.spans[n-1].r.End == r.First && m.spans[n-1].value == v {
			m.spans[n-1].r.End = r.End
			return
		}
		m.spans = append(m.spans, span[V]{value: v, r: r})
		return
	}
	i := m.search(r.First)
	if i > 0 && m.spans[i-1].r.End == r.First && m.spans[i-1].value == v {
		i-- // it touches; the loop joins it
	}
	var out [3]span[V]
	n, merged, right, hasRight := 0, span[V]{value: v, r: r}, span[V]{}, false
	j := i
	for ; j < len(m.spans) && m.spans[j].r.First < r.End; j++ {
		old := m.spans[j]
		m.offsets -= old.r.Len()
		if old.r.First < r.First {
			if old.value == v {
				merged.r.First = old.r.First
			} else {
				out[n] = span[V]{value: old.value, r: Range{First: old.r.First, End: r.First}}
				m.offsets += out[n].r.Len()
				n++
			}
		}
		if old.r.End > r.End {
			if old.value == v {
				merged.r.End = old.r.End
			} else {
				right, hasRight = span[V]{value: old.value, r: Range{First: r.End, End: old.r.End}}, true
			}
		}
	}
	if !hasRight && j < len(m.spans) && m.spans[j].r.First == merged.r.End && m.spans[j].value == v {
		merged.r.End = m.spans[j].r.End
		m.offsets -= m.spans[j].r.Len()
		j++
	}
	m.offsets += merged.r.Len()
	out[n] = merged
	n++
	if hasRight {
		out[n] = right
		m.offsets += right.r.Len()
		n++
	}
	m.replace(i, j, out[:n])
}

// Erase takes the values of r away and returns how many offsets had one.
func (m *RangeMap[V]) Erase(r Range) uint64 {
	if r.Empty() || len(m.spans) == 0 {
		return 0
	}
	i := m.search(r.First)
	var out [2]span[V]
	n, j := 0, i
	var erased uint64
	for ; j < len(m.spans) && m.spans[j].r.First < r.End; j++ {
		old := m.spans[j]
		erased += old.r.Intersect(r).Len()
		if old.r.First < r.First {
			out[n] = span[V]{value: old.value, r: Range{First: old.r.First, End: r.First}}
			n++
		}
		if old.r.End > r.End {
			out[n] = span[V]{value: old.value, r: Range{First: r.End, End: old.r.End}}
			n++
		}
	}
	m.offsets -= erased
	if i < j {
		m.replace(i, j, out[:n])
	}
	return erased
}

// Update gives every offset of ranges, which must ascend and not overlap, the value that f returns for what
// it had; ok is false where it had none. Many ranges cost one pass over the map, few a search each.
func (m *RangeMap[V]) Update(ranges []Range, f func(old V, ok bool) V) {
	const few = 16
	if len(ranges) <= few || len(m.spans) == 0 {
		var had []span[V]
		var zero V
		for _, r := range ranges {
			had = had[:0]
			for part, v := range m.Within(r) {
				had = append(had, span[V]{value: v, r: part})
			}
			m.Set(r, f(zero, false))
			for _, h := range had {
				m.Set(h.r, f(h.value, true))
			}
		}
		return
	}
	m.rebuild(ranges, f)
}

// rebuild is Update in one pass.
func (m *RangeMap[V]) rebuild(ranges []Range, f func(old V, ok bool) V) {
	old := m.spans
	m.spans, m.offsets = make([]span[V], 0, len(old)+len(ranges)), 0
	var zero V
	for _, r := range ranges {
		for len(old) > 0 && old[0].r.End <= r.First {
			m.Set(old[0].r, old[0].value)
			old = old[1:]
		}
		if len(old) > 0 && old[0].r.First < r.First {
			m.Set(Range{First: old[0].r.First, End: r.First}, old[0].value)
			old[0].r.First = r.First
		}
		for at := r.First; at < r.End; {
			if len(old) == 0 || old[0].r.First >= r.End {
				m.Set(Range{First: at, End: r.End}, f(zero, false))
				break
			}
			m.Set(Range{First: at, End: old[0].r.First}, f(zero, false)) // maybe empty
			end := min(old[0].r.End, r.End)
			m.Set(Range{First: old[0].r.First, End: end}, f(old[0].value, true))
			if at = end; old[0].r.End > end {
				old[0].r.First = end
			} else {
				old = old[1:]
			}
		}
	}
	for _, o := range old {
		m.Set(o.r, o.value)
	}
}

// replace puts with, which has at most two elements more than it replaces, in place of spans i to j.
func (m *RangeMap[V]) replace(i, j int, with []span[V]) {
	shrink := j - i - len(with)
	switch {
	case shrink < 0:
		m.spans = slices.Replace(m.spans, i, j, with...)
	case i < len(m.spans)-j: // the front is the shorter side
		copy(m.spans[shrink:], m.spans[:i])
		m.spans = m.spans[shrink:]
		copy(m.spans[i:], with)
	default:
		copy(m.spans[i:], with)
		copy(m.spans[i+len(with):], m.spans[j:])
		m.spans = m.spans[:len(m.spans)-shrink]
	}
}

// All iterates over the stretches in order of offset. The map must not change meanwhile.
func (m *RangeMap[V]) All() iter.Seq2[Range, V] {
	return m.Within(Range{End: ^entry.Offset(0)})
}

// Within iterates over the stretches that overlap r, cut to r. The map must not change meanwhile.
func (m *RangeMap[V]) Within(r Range) iter.Seq2[Range, V] {
	return func(yield func(Range, V) bool) {
		for i := m.search(r.First); i < len(m.spans) && m.spans[i].r.First < r.End; i++ {
			if !yield(m.spans[i].r.Intersect(r), m.spans[i].value) {
				return
			}
		}
	}
}

// RangeSet is a set of offsets, kept as ranges. The zero RangeSet is empty and ready.
type RangeSet struct {
	m RangeMap[struct{}]
}

// Add puts r in.
func (s *RangeSet) Add(r Range) { s.m.Set(r, struct{}{}) }

// AddAll puts ranges in, which must ascend and not overlap.
func (s *RangeSet) AddAll(ranges []Range) {
	s.m.Update(ranges, func(struct{}, bool) struct{} { return struct{}{} })
}

// Remove takes r out and returns how many offsets of it were in.
func (s *RangeSet) Remove(r Range) uint64 { return s.m.Erase(r) }

// Contains reports whether o is in the set.
func (s *RangeSet) Contains(o entry.Offset) bool {
	_, ok := s.m.Get(o)
	return ok
}

// Offsets returns the number of offsets in the set.
func (s *RangeSet) Offsets() uint64 { return s.m.offsets }

// Len returns the number of ranges.
func (s *RangeSet) Len() int { return len(s.m.spans) }

// Empty reports whether nothing is in the set.
func (s *RangeSet) Empty() bool { return len(s.m.spans) == 0 }

// Clear takes everything out.
func (s *RangeSet) Clear() { s.m.Clear() }

// First returns the lowest range; ok is false when the set is empty.
func (s *RangeSet) First() (r Range, ok bool) {
	if len(s.m.spans) == 0 {
		return Range{}, false
	}
	return s.m.spans[0].r, true
}

// Within iterates over what of r is in the set, in order. The set must not change meanwhile.
func (s *RangeSet) Within(r Range) iter.Seq[Range] {
	return func(yield func(Range) bool) {
		for part := range s.m.Within(r) {
			if !yield(part) {
				return
			}
		}
	}
}

// All iterates over the ranges in order. The set must not change meanwhile.
func (s *RangeSet) All() iter.Seq[Range] { return s.Within(Range{End: ^entry.Offset(0)}) }
