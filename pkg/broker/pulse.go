package broker

import "time"

// Limits of how long a peer may be silent.
const (
	pingEvery = 150 * time.Millisecond
	// silenceLimit is how long a peer may leave pings unanswered before it is suspect.
	silenceLimit = 600 * time.Millisecond
	// stallLimit is a gap between two looks at the clock that says that this process stood still itself
	// (stopped, starved), so that the peers' silence proves nothing.
	stallLimit = 2 * pingEvery
)

// pulse decides whether one peer seems dead. It has no clock: the caller looks at it about every pingEvery, by a time
// that starts at 0 with the zero pulse, which trusts the peer.
type pulse struct {
	suspect bool
	heardAt time.Duration // when the peer last answered, moved on by our own stalls
	looked  time.Duration // when look was last called
}

type verdict uint8

const (
	unchanged verdict = iota
	suspected
	trusted
)

// heard says that the peer answered.
func (p *pulse) heard(now time.Duration) verdict {
	p.heardAt = now
	if !p.suspect {
		return unchanged
	}
	p.suspect = false
	return trusted
}

// refused says that the stream broke and a new connection was refused: nobody listens there.
func (p *pulse) refused() verdict { return p.doubt() }

// look asks for the verdict of the clock.
func (p *pulse) look(now time.Duration) verdict {
	if gap := now - p.looked; gap > stallLimit {
		p.heardAt += gap
	}
	p.looked = now
	if now-p.heardAt > silenceLimit {
		return p.doubt()
	}
	return unchanged
}

func (p *pulse) doubt() verdict {
	if p.suspect {
		return unchanged
	}
	p.suspect = true
	return suspected
}
