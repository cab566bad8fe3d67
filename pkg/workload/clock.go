package workload

import "time"

// Stretches measures how long nothing happened: nothing was acknowledged, or nothing delivered. It is pure: times are the
// caller's, and must not go back.
type Stretches struct {
	watches []*Stretch
}

// Stretch is the longest time after a moment in which nothing happened.
type Stretch struct {
	from    time.Time // the moment, or the newest event after it
	longest time.Duration
	began   time.Time // of the longest
}

// until lets the stretch that lasts end at a moment.
func (w *Stretch) until(at time.Time) {
	if d := at.Sub(w.from); d > w.longest {
		w.longest, w.began = d, w.from
	}
	w.from = at
}

// Longest returns the beginning of the longest stretch, and its length.
func (w *Stretch) Longest() (began time.Time, d time.Duration) { return w.began, w.longest }

// Watch begins to measure at a moment.
func (s *Stretches) Watch(at time.Time) *Stretch {
	w := &Stretch{from: at}
	s.watches = append(s.watches, w)
	return w
}

// Event tells that something happened.
func (s *Stretches) Event(at time.Time) {
	for _, w := range s.watches {
		w.until(at)
	}
}

// Stop ends measuring, with the time since the newest event counted, and returns the longest stretch.
func (s *Stretches) Stop(w *Stretch, at time.Time) time.Duration {
	for i, x := range s.watches {
		if x == w {
			s.watches = append(s.watches[:i], s.watches[i+1:]...)
			w.until(at)
			break
		}
	}
	return w.longest
}

// Delays measures how long acknowledged messages wait for their delivery. It is pure: times are the caller's. It remembers
// the newest messages of each producer, as many as it can within bounded memory.
type Delays struct {
	producers [][]delayed // by number
	longest   time.Duration
}

// delayed is a message that waits, or was delivered.
type delayed struct {
	seen      bool
	delivered bool
	number    uint64
	since     time.Time
}

// NewDelays returns the measure of so many producers.
func NewDelays(producers int) *Delays { return &Delays{producers: make([][]delayed, producers)} }

func (d *Delays) slot(t Tag) *delayed {
	if int(t.Producer) >= len(d.producers) {
		return &delayed{} // the end of the run
	}
	if d.producers[t.Producer] == nil {
		d.producers[t.Producer] = make([]delayed, recentReceipts)
	}
	return &d.producers[t.Producer][t.Number%recentReceipts]
}

// Acknowledged tells that a message is published.
func (d *Delays) Acknowledged(t Tag, at time.Time) {
	if s := d.slot(t); !s.seen || s.number != t.Number {
		*s = delayed{seen: true, number: t.Number, since: at}
	}
}

// Delivered tells that a message has come; that it comes again does not count. It reports whether it is new, which one that is
// older than what is remembered is not.
func (d *Delays) Delivered(t Tag, at time.Time) bool {
	s := d.slot(t)
	if s.seen && s.number == t.Number && !s.delivered {
		d.longest = max(d.longest, at.Sub(s.since))
	}
	if s.seen && (s.number > t.Number || s.number == t.Number && s.delivered) {
		return false
	}
	*s = delayed{seen: true, delivered: true, number: t.Number}
	return true
}

// Longest is the longest delay of a message that was delivered.
func (d *Delays) Longest() time.Duration { return d.longest }
