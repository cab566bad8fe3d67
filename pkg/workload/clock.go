package workload

import "time"

// Stretches measures how long nothing was acknowledged. It is pure: times are the caller's, and must not go back.
type Stretches struct {
	watches []*Stretch
}

// Stretch is the longest time without an acknowledgement after a moment.
type Stretch struct {
	from    time.Time // the moment, or the newest acknowledgement after it
	longest time.Duration
}

// Watch begins to measure at a moment.
func (s *Stretches) Watch(at time.Time) *Stretch {
	w := &Stretch{from: at}
	s.watches = append(s.watches, w)
	return w
}

// Acknowledged tells of an acknowledgement.
func (s *Stretches) Acknowledged(at time.Time) {
	for _, w := range s.watches {
		w.longest = max(w.longest, at.Sub(w.from))
		w.from = at
	}
}

// Stop ends measuring, with the time since the newest acknowledgement counted, and returns the longest stretch.
func (s *Stretches) Stop(w *Stretch, at time.Time) time.Duration {
	for i, x := range s.watches {
		if x == w {
			s.watches = append(s.watches[:i], s.watches[i+1:]...)
			w.longest = max(w.longest, at.Sub(w.from))
			break
		}
	}
	return w.longest
}
