package dispatch

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
)

// delayQueue holds ranges until their time: a heap of times, and the set of offsets that still count, so that
// an acknowledgement need not search the heap. An offset is in it at most once.
type delayQueue struct {
	heap    []delayedRange
	offsets cursor.RangeSet
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

// popDue calls f for what still counts of the ranges whose time has come.
func (q *delayQueue) popDue(now time.Time, f func(cursor.Range)) {
	for len(q.heap) > 0 && !q.heap[0].at.After(now) {
		r := q.heap[0].r
		n := len(q.heap) - 1
		q.heap[0] = q.heap[n]
		q.heap = q.heap[:n]
		for i := 0; ; {
			child := 2*i + 1
			if child >= n {
				break
			}
			if child+1 < n && q.heap[child+1].at.Before(q.heap[child].at) {
				child++
			}
			if !q.heap[child].at.Before(q.heap[i].at) {
				break
			}
			q.heap[i], q.heap[child] = q.heap[child], q.heap[i]
			i = child
		}
		var parts []cursor.Range
		for part := range q.offsets.Within(r) {
			parts = append(parts, part)
		}
		for _, part := range parts {
			q.offsets.Remove(part)
			f(part)
		}
	}
}

// remove forgets r: it is acknowledged.
func (q *delayQueue) remove(r cursor.Range) {
	if len(q.heap) == 0 {
		return
	}
	if q.offsets.Remove(r) > 0 && q.offsets.Empty() {
		q.heap = nil
	}
}
