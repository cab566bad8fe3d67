package cursor

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"sort"
)

// A page covers pageSize offsets.
const (
	pageBits  = 16
	pageSize  = 1 << pageBits
	pageMask  = pageSize - 1
	pageWords = pageSize / 64
	// maxRuns is where a bitmap becomes smaller than runs; below fewRuns a bitmap goes back to runs. They
	// differ so that a page at the border does not change its form with each acknowledgement.
	maxRuns = pageSize / 8 / 4
	fewRuns = maxRuns / 2
)

// run is a closed range of indices in a page; closed, because a page's end does not fit in 16 bits.
type run struct {
	first, last uint16
}

// pageSet is a set of indices in a page: as runs while they are few, else as a bitmap. A form for single
// indices exists on disk only: in memory it would save at most half of what a page takes.
type pageSet struct {
	runs []run
	bits *[pageWords]uint64 // not nil: runs is unused
	n    int                // indices in the set
}

// add puts first..last in and returns how many are new.
func (s *pageSet) add(first, last int) int {
	added := 0
	if s.bits == nil {
		s.runs, added = addRun(s.runs, first, last)
		if len(s.runs) > maxRuns {
			s.toBits()
		}
	} else {
		for w := first >> 6; w <= last>>6; w++ {
			mask := ^uint64(0)
			if w == first>>6 {
				mask <<= uint(first & 63)
			}
			if w == last>>6 {
				mask &= ^uint64(0) >> uint(63-last&63)
			}
			added += bits.OnesCount64(mask &^ s.bits[w])
			s.bits[w] |= mask
		}
	}
	s.n += added
	return added
}

// addRun joins first..last into sorted, disjoint, not touching runs; added is the number of new indices.
func addRun(runs []run, first, last int) (joined []run, added int) {
	n := len(runs)
	if n == 0 || int(runs[n-1].last)+1 < first {
		return append(runs, run{uint16(first), uint16(last)}), last - first + 1
	}
	// i..j are the runs that first..last overlaps or touches.
	i := n - 1
	if first <= int(runs[n-1].first) {
		i = sort.Search(n, func(i int) bool { return int(runs[i].last)+1 >= first })
	}
	j, added := i, last-first+1
	lo, hi := first, last
	for ; j < n && int(runs[j].first) <= last+1; j++ {
		lo, hi = min(lo, int(runs[j].first)), max(hi, int(runs[j].last))
		if overlap := min(last, int(runs[j].last)) - max(first, int(runs[j].first)) + 1; overlap > 0 {
			added -= overlap
		}
	}
	merged := run{uint16(lo), uint16(hi)}
	if i == j {
		return slices.Insert(runs, i, merged), added
	}
	runs[i] = merged
	return slices.Delete(runs, i+1, j), added
}

// nextClear returns the first index ≥ i that is not in the set; pageSize if there is none.
func (s *pageSet) nextClear(i int) int {
	if s.bits == nil {
		k := s.searchRun(i)
		if k < len(s.runs) && int(s.runs[k].first) <= i {
			return int(s.runs[k].last) + 1
		}
		return i
	}
	for w := i >> 6; w < pageWords; w++ {
		free := ^s.bits[w]
		if w == i>>6 {
			free &= ^uint64(0) << uint(i&63)
		}
		if free != 0 {
			return w<<6 + bits.TrailingZeros64(free)
		}
	}
	return pageSize
}

// nextSet returns the first index ≥ i that is in the set; pageSize if there is none.
func (s *pageSet) nextSet(i int) int {
	if i >= pageSize {
		return pageSize
	}
	if s.bits == nil {
		if k := s.searchRun(i); k < len(s.runs) {
			return max(i, int(s.runs[k].first))
		}
		return pageSize
	}
	for w := i >> 6; w < pageWords; w++ {
		set := s.bits[w]
		if w == i>>6 {
			set &= ^uint64(0) << uint(i&63)
		}
		if set != 0 {
			return w<<6 + bits.TrailingZeros64(set)
		}
	}
	return pageSize
}

// searchRun returns the index of the first run that ends at or after i.
func (s *pageSet) searchRun(i int) int {
	if len(s.runs) > 0 && int(s.runs[0].last) >= i {
		return 0
	}
	return sort.Search(len(s.runs), func(k int) bool { return int(s.runs[k].last) >= i })
}

// countRuns returns the number of runs, whatever the form.
func (s *pageSet) countRuns() int {
	if s.bits == nil {
		return len(s.runs)
	}
	n, carry := 0, uint64(0)
	for _, w := range s.bits {
		n += bits.OnesCount64(w &^ (w<<1 | carry))
		carry = w >> 63
	}
	return n
}

func (s *pageSet) toBits() {
	runs := s.runs
	s.runs, s.bits, s.n = nil, new([pageWords]uint64), 0
	for _, r := range runs {
		s.add(int(r.first), int(r.last))
	}
}

// shrink goes back to runs when they have become few.
func (s *pageSet) shrink() {
	if s.bits == nil {
		return
	}
	n := s.countRuns()
	if n > fewRuns {
		return
	}
	runs := make([]run, 0, n)
	for i := s.nextSet(0); i < pageSize; {
		end := s.nextClear(i)
		runs = append(runs, run{uint16(i), uint16(end - 1)})
		i = s.nextSet(end)
	}
	s.runs, s.bits = runs, nil
}

// fromWords fills an empty set from the bytes of a bitmap.
func (s *pageSet) fromWords(b []byte) {
	s.bits = new([pageWords]uint64)
	for i := range s.bits {
		s.bits[i] = binary.LittleEndian.Uint64(b[8*i:])
		s.n += bits.OnesCount64(s.bits[i])
	}
}
