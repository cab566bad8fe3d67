package client

import (
	"slices"
	"sort"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// rangeSet is a set of offsets as sorted closed ranges. Its size follows the number of holes, not of offsets.
type rangeSet struct {
	ranges []offsetRange
}

type offsetRange struct{ first, last entry.Offset }

func (s *rangeSet) empty() bool { return len(s.ranges) == 0 }

// at returns the index of the first range whose end is not below o.
func (s *rangeSet) at(o entry.Offset) int {
	if n := len(s.ranges); n > 0 && s.ranges[n-1].last < o {
		return n // the common case: growing offsets
	}
	return sort.Search(len(s.ranges), func(i int) bool { return s.ranges[i].last >= o })
}

func (s *rangeSet) contains(o entry.Offset) bool {
	i := s.at(o)
	return i < len(s.ranges) && s.ranges[i].first <= o
}

// add inserts o, and joins the ranges that it connects.
func (s *rangeSet) add(o entry.Offset) {
	i := s.at(o)
	if i < len(s.ranges) && s.ranges[i].first <= o {
		return
	}
	left := i > 0 && s.ranges[i-1].last+1 == o
	right := i < len(s.ranges) && s.ranges[i].first == o+1
	switch {
	case left && right:
		s.ranges[i-1].last = s.ranges[i].last
		s.ranges = slices.Delete(s.ranges, i, i+1)
	case left:
		s.ranges[i-1].last = o
	case right:
		s.ranges[i].first = o
	default:
		s.ranges = slices.Insert(s.ranges, i, offsetRange{o, o})
	}
}

// remove takes o out, and reports whether it was in.
func (s *rangeSet) remove(o entry.Offset) bool {
	i := s.at(o)
	if i >= len(s.ranges) || s.ranges[i].first > o {
		return false
	}
	switch r := s.ranges[i]; {
	case r.first == o && r.last == o:
		s.ranges = slices.Delete(s.ranges, i, i+1)
	case r.first == o:
		s.ranges[i].first++
	case r.last == o:
		s.ranges[i].last--
	default:
		s.ranges[i].last = o - 1
		s.ranges = slices.Insert(s.ranges, i+1, offsetRange{o + 1, r.last})
	}
	return true
}

// removeUpTo takes everything up to and including o out.
func (s *rangeSet) removeUpTo(o entry.Offset) {
	i := s.at(o)
	s.ranges = slices.Delete(s.ranges, 0, i)
	if len(s.ranges) == 0 || s.ranges[0].first > o {
		return
	}
	if s.ranges[0].last == o {
		s.ranges = slices.Delete(s.ranges, 0, 1)
		return
	}
	s.ranges[0].first = o + 1
}

func (s *rangeSet) merge(other rangeSet) {
	for _, r := range other.ranges {
		for o := r.first; ; o++ {
			s.add(o)
			if o == r.last {
				break
			}
		}
	}
}

func (s *rangeSet) clone() rangeSet { return rangeSet{ranges: slices.Clone(s.ranges)} }

func (s *rangeSet) wire() []*brokerv1.OffsetRange {
	out := make([]*brokerv1.OffsetRange, len(s.ranges))
	for i, r := range s.ranges {
		out[i] = &brokerv1.OffsetRange{First: uint64(r.first), Last: uint64(r.last)}
	}
	return out
}
