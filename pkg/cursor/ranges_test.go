package cursor

import (
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/entry"
)

func TestRangeMapMatchesArray(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const n = 48
		var m RangeMap[int]
		var want [n]int // 0: no value
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			first := rapid.IntRange(0, n-1).Draw(t, "first")
			end := rapid.IntRange(first, n).Draw(t, "end")
			v := rapid.IntRange(0, 3).Draw(t, "v")
			r := Range{entry.Offset(first), entry.Offset(end)}
			erased := uint64(0)
			for o := first; o < end; o++ {
				if want[o] != 0 {
					erased++
				}
				want[o] = v
			}
			if v == 0 {
				if got := m.Erase(r); got != erased {
					t.Fatalf("erased %d, want %d", got, erased)
				}
			} else {
				m.Set(r, v)
			}
			var got [n]int
			offsets, stretches, last := uint64(0), 0, Range{}
			lastV := 0
			for r, v := range m.All() {
				if r.Empty() || r.First < last.End || r.First == last.End && v == lastV && stretches > 0 {
					t.Fatalf("%v after %v", r, last)
				}
				for o := r.First; o < r.End; o++ {
					got[o] = v
				}
				offsets += r.Len()
				stretches++
				last, lastV = r, v
			}
			if got != want || m.Offsets() != offsets || m.Len() != stretches {
				t.Fatalf("got %v, want %v; %d offsets of %d", got, want, m.Offsets(), offsets)
			}
			o := entry.Offset(rapid.IntRange(0, n-1).Draw(t, "o"))
			if v, ok := m.Get(o); ok != (want[o] != 0) || v != want[o] {
				t.Fatalf("Get(%d) = %d, %v; want %d", o, v, ok, want[o])
			}
		}
	})
}

func TestUpdateMatchesArray(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var m RangeMap[int]
		const n = 200
		var want [n]int
		draw := func(name string) []Range {
			var ranges []Range
			at := 0
			for range rapid.IntRange(0, 40).Draw(t, name) {
				first := at + rapid.IntRange(0, 4).Draw(t, "gap")
				end := first + rapid.IntRange(1, 4).Draw(t, "n")
				if end > n {
					break
				}
				ranges = append(ranges, Range{entry.Offset(first), entry.Offset(end)})
				at = end
			}
			return ranges
		}
		for range 2 {
			ranges := draw("ranges")
			m.Update(ranges, func(old int, ok bool) int {
				if ok != (old > 0) {
					t.Fatalf("old is %d, %v", old, ok)
				}
				return old + 1
			})
			for _, r := range ranges {
				for o := r.First; o < r.End; o++ {
					want[o]++
				}
			}
			var got [n]int
			offsets, last, lastV := uint64(0), Range{}, 0
			for r, v := range m.All() {
				if r.Empty() || r.First < last.End || r.First == last.End && v == lastV {
					t.Fatalf("%v after %v", r, last)
				}
				for o := r.First; o < r.End; o++ {
					got[o] = v
				}
				offsets += r.Len()
				last, lastV = r, v
			}
			if got != want || offsets != m.Offsets() {
				t.Fatalf("got %v, want %v; %d offsets, want %d", got, want, m.Offsets(), offsets)
			}
		}
	})
}

func TestPageSetMatchesArray(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var s pageSet
		if rapid.Bool().Draw(t, "bits") {
			s.toBits()
		}
		want := make([]bool, pageSize)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			first := rapid.OneOf(rapid.IntRange(0, 200), rapid.IntRange(pageSize-200, pageMask)).Draw(t, "first")
			last := min(pageMask, first+rapid.IntRange(0, 100).Draw(t, "more"))
			added := 0
			for i := first; i <= last; i++ {
				if !want[i] {
					added++
				}
				want[i] = true
			}
			if got := s.add(first, last); got != added {
				t.Fatalf("added %d, want %d", got, added)
			}
			if rapid.Bool().Draw(t, "shrink") {
				s.shrink()
			}
		}
		runs, n := 0, 0
		nextSet, nextClear := pageSize, pageSize
		for i := pageMask; i >= 0; i-- {
			if want[i] {
				nextSet = i
				n++
				if i == 0 || !want[i-1] {
					runs++
				}
			} else {
				nextClear = i
			}
			if i < 300 || i > pageSize-300 {
				if s.nextSet(i) != nextSet || s.nextClear(i) != nextClear {
					t.Fatalf("at %d: next set %d, clear %d; want %d, %d", i, s.nextSet(i), s.nextClear(i), nextSet, nextClear)
				}
			}
		}
		if s.countRuns() != runs || s.n != n {
			t.Fatalf("%d runs of %d, want %d of %d", s.countRuns(), s.n, runs, n)
		}
	})
}

func TestMissingLeavesWhatIsInDstAlone(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 5)
	got := c.Missing([]Range{{1, 5}}, Range{5, 7})
	if !reflect.DeepEqual(got, []Range{{1, 5}, {5, 7}}) {
		t.Fatalf("got %v", got)
	}
}
