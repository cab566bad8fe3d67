package bench

import "time"

// clock counts nanoseconds from the beginning of a run, monotonically.
type clock struct{ base time.Time }

func (c clock) now() int64 { return int64(time.Since(c.base)) }

// schedule says when messages are due: at even intervals over all producers, who take turns. Producer i's n-th message is
// the run's message n*producers+i. So the load is as smooth as a rate can be, however many producers share it.
type schedule struct {
	start     int64
	interval  float64 // nanoseconds between two messages of the run; 0: there is no schedule
	producers uint64
}

func (s schedule) exists() bool { return s.interval > 0 }

// due is when the n-th message of producer i is due.
func (s schedule) due(i, n uint64) int64 { return s.dueOf(n*s.producers + i) }

// dueOf is when the k-th message of the run is due.
func (s schedule) dueOf(k uint64) int64 { return s.start + int64(float64(k)*s.interval) }

// upTo is how many messages of the run are due by then.
func (s schedule) upTo(now int64) uint64 {
	if now < s.start {
		return 0
	}
	k := uint64(float64(now-s.start) / s.interval)
	for s.dueOf(k) <= now { // rounding
		k++
	}
	for k > 0 && s.dueOf(k-1) > now {
		k--
	}
	return k
}

// dueBefore is how many messages of producer i are due before then.
func (s schedule) dueBefore(i uint64, then int64) uint64 {
	k := s.upTo(then - 1)
	if k <= i {
		return 0
	}
	return (k-i-1)/s.producers + 1
}
