package workload

import (
	"slices"
	"sort"
)

// span is a closed range of numbers.
type span struct{ first, last uint64 }

func (s span) len() uint64 { return s.last - s.first + 1 }

// ranges is a set of numbers, kept as disjoint ranges in order that do not touch. Adding at the end, the common case,
// costs nothing; memory grows with the holes.
type ranges []span

// add puts n into the set and tells whether it was new.
func (r *ranges) add(n uint64) bool {
	s := *r
	if l := len(s); l > 0 {
		if last := &s[l-1]; n > last.last {
			if n == last.last+1 {
				last.last = n
			} else {
				*r = append(s, span{n, n})
			}
			return true
		}
	} else {
		*r = append(s, span{n, n})
		return true
	}
	i := s.search(n) // s[i].last >= n
	if s[i].first <= n {
		return false
	}
	left := i > 0 && s[i-1].last+1 == n
	right := s[i].first == n+1
	switch {
	case left && right:
		s[i-1].last = s[i].last
		*r = slices.Delete(s, i, i+1)
	case left:
		s[i-1].last = n
	case right:
		s[i].first = n
	default:
		*r = slices.Insert(s, i, span{n, n})
	}
	return true
}

// search returns the index of the first range that ends at n or later.
func (r ranges) search(n uint64) int {
	return sort.Search(len(r), func(i int) bool { return r[i].last >= n })
}

func (r ranges) has(n uint64) bool {
	i := r.search(n)
	return i < len(r) && r[i].first <= n
}

// covers reports whether every number from first to last, included, is in the set.
func (r ranges) covers(first, last uint64) bool {
	i := r.search(first)
	return i < len(r) && r[i].first <= first && r[i].last >= last
}

func (r ranges) count() (n uint64) {
	for _, s := range r {
		n += s.len()
	}
	return n
}

// minus returns the numbers of r that are not in o.
func (r ranges) minus(o ranges) ranges {
	var out ranges
	for _, s := range r {
		at, whole := s.first, false // what lies before at is decided
		for i := o.search(at); i < len(o) && o[i].first <= s.last; i++ {
			if o[i].first > at {
				out = append(out, span{at, o[i].first - 1})
			}
			if o[i].last >= s.last {
				whole = true
				break
			}
			at = o[i].last + 1
		}
		if !whole {
			out = append(out, span{at, s.last})
		}
	}
	return out
}

// and returns the numbers that are in both.
func (r ranges) and(o ranges) ranges {
	var out ranges
	for _, s := range r {
		for i := o.search(s.first); i < len(o) && o[i].first <= s.last; i++ {
			out = append(out, span{max(s.first, o[i].first), min(s.last, o[i].last)})
		}
	}
	return out
}
