package ownership

import "time"

// Limits of how long a peer may be silent.
const (
	// PingEvery is how often a broker pings another.
	PingEvery = 150 * time.Millisecond
	// silenceLimit is how long a peer may leave pings unanswered before it is suspect.
	silenceLimit = 600 * time.Millisecond
	// stallLimit is a gap between two looks at the clock that says that this process stood still itself
	// (stopped, starved), so that the peers' silence proves nothing.
	stallLimit = 2 * PingEvery
)

// pulse decides whether one peer seems dead. It has no clock: the caller looks at it about every PingEvery, by a time
// that starts at 0 with the zero pulse, which suspects nothing and has heard nothing yet.
type pulse struct {
	suspect bool
	met     bool          // the peer answered at some time
	heardAt time.Duration // when the peer last answered, moved on by our own stalls
	looked  time.Duration // when look was last called
}

// heard says that the peer answered. It reports whether that is news: the first answer, or the end of a suspicion.
func (p *pulse) heard(now time.Duration) bool {
	news := p.suspect || !p.met
	p.suspect, p.met, p.heardAt = false, true, now
	return news
}

// refused says that a new connection was refused: nobody listens there. It reports whether the peer was not suspect.
func (p *pulse) refused() bool { return p.doubt() }

// look asks for the verdict of the clock. It reports whether the peer becomes suspect.
func (p *pulse) look(now time.Duration) bool {
	if gap := now - p.looked; gap > stallLimit {
		p.heardAt += gap
	}
	p.looked = now
	return now-p.heardAt > silenceLimit && p.doubt()
}

func (p *pulse) doubt() bool {
	news := !p.suspect
	p.suspect = true
	return news
}
