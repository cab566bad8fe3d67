package dispatch

import (
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
)

// delayQueue holds ranges until their time: a heap of times, and the set of offsets that still count, so that
// an acknowledgement need not search the heap. An offset is in it at most once.
type delayQueue struct {
	heap    []delayedRange
	offsets cursor.RangeSet
	removed uint64 // offsets taken out by acknowledgements since the heap was last gone through
}

type delayedRange struct {
	at time.Time
	r  cursor.Range
}

func (q *delayQueue) len() int { return len(q.heap) }

func (q *delayQueue) clear() { *q = delayQueue{} }

func (q *delayQueue) push(at time.Time, r cursor.Range) {
	q.offsets.Add(r)
	q.heap = append(q.heap, delayedRange{at, r})
	for i := len(q.heap) - 1; i > 0; {
		parent := (i - 1) / 2
		if !q.heap[i].at.Before(q.heap[parent].at) {
			break
		}
		q.heap[i], q.heap[parent] = q.heap[parent], q.heap[i]
		i = parent
	}
}

// next returns the time of the first range; zero when there is none.
func (q *delayQueue) next() time.Time {
	if len(q.heap) == 0 {
		return time.Time{}
	}
	return q.heap[0].at
}

// pop takes the first range off the heap.
func (q *delayQueue) pop() cursor.Range {
	r := q.heap[0].r
	n := len(q.heap) - 1
	q.heap[0] = q.heap[n]
	q.heap = q.heap[:n]
	q.down(0)
	return r
}

// down moves element i to where it belongs below.
func (q *delayQueue) down(i int) {
	for n := len(q.heap); ; {
		child := 2*i + 1
		if child >= n {
			return
		}
		if child+1 < n && q.heap[child+1].at.Before(q.heap[child].at) {
			child++
		}
		if !q.heap[child].at.Before(q.heap[i].at) {
			return
		}
		q.heap[i], q.heap[child] = q.heap[child], q.heap[i]
		i = child
	}
}

// counts reports whether anything of r is still to come.
func (q *delayQueue) counts(r cursor.Range) bool {
	for range q.offsets.Within(r) {
		return true
	}
	return false
}

// tidy takes off the heap what no longer counts: always at its head, so that next is true, and everywhere once
// that may be half of it, so that it stays bounded by what does count.
func (q *delayQueue) tidy() {
	if q.removed > uint64(len(q.heap))/2 {
		q.removed = 0
		q.heap = slices.DeleteFunc(q.heap, func(d delayedRange) bool { return !q.counts(d.r) })
		for i := len(q.heap)/2 - 1; i >= 0; i-- {
			q.down(i)
		}
	}
	for len(q.heap) > 0 && !q.counts(q.heap[0].r) {
		q.pop()
	}
}

// popDue calls f for what still counts of the ranges whose time has come.
func (q *delayQueue) popDue(now time.Time, f func(cursor.Range)) {
	for len(q.heap) > 0 && !q.heap[0].at.After(now) {
		r := q.pop()
		var parts []cursor.Range
		for part := range q.offsets.Within(r) {
			parts = append(parts, part)
		}
		for _, part := range parts {
			q.offsets.Remove(part)
			f(part)
		}
		q.tidy()
	}
}

// remove forgets r: it is acknowledged.
func (q *delayQueue) remove(r cursor.Range) {
	if len(q.heap) == 0 {
		return
	}
	if n := q.offsets.Remove(r); n > 0 {
		q.removed += n
		q.tidy()
	}
}
