package ownership

import (
	"sync"
	"time"
)

// Limits of how long a peer may be silent.
const (
	// PingEvery is how often a broker pings another.
	PingEvery = 150 * time.Millisecond
	// silenceLimit is how long a peer may leave pings unanswered before it is suspect.
	silenceLimit = 600 * time.Millisecond
	// stallLimit is a gap between two looks at the clock that says that this process stood still itself
	// (stopped, starved), so that the peers' silence proves nothing.
	stallLimit = 2 * PingEvery
	// deafLimit is how long a broker with several peers may hear none of them, until it takes itself for the one that is
	// cut off: their silence proves nothing any more, and begins before it makes anybody suspect.
	deafLimit = silenceLimit / 2
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

// look asks for the verdict of the clock, by a broker that is deaf or not. It reports whether the peer becomes suspect.
func (p *pulse) look(now time.Duration, deaf bool) bool {
	if gap := now - p.looked; gap > stallLimit {
		p.heardAt += gap
	}
	p.looked = now
	return !deaf && now-p.heardAt > silenceLimit && p.doubt()
}

func (p *pulse) doubt() bool {
	news := !p.suspect
	p.suspect = true
	return news
}

// hearing keeps when each peer was heard last: an answer, or that nobody listens where it did, which its host says. A broker
// that hears none of several is cut off itself, as likely as not, at least in one direction. Were it to suspect them, it
// would take what they serve to where nobody may reach it. Two that are silent at the same time have leases.
type hearing struct {
	mu sync.Mutex
	at map[string]time.Time
}

// meet adds a peer, which has just registered.
func (h *hearing) meet(id string, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at[id] = now
}

// heard notes a sign of life; of a peer that is forgotten it counts no more.
func (h *hearing) heard(id string, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.at[id]; ok {
		h.at[id] = now
	}
}

func (h *hearing) forget(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.at, id)
}

// deaf tells whether there are several peers, and none of them was heard lately.
func (h *hearing) deaf(now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, at := range h.at {
		if now.Sub(at) <= deafLimit {
			return false
		}
	}
	return len(h.at) > 1
}
