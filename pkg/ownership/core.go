package ownership

import (
	"maps"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Limits of how often a bundle changes hands by this broker's doing.
const (
	// suspicionPause lies between two takeovers of one bundle from an owner whose lease is alive, so that two
	// brokers which cannot see each other do not pass a bundle to and fro.
	suspicionPause = 5 * time.Second
	// retryPause lies between two attempts of any kind on one bundle.
	retryPause = 100 * time.Millisecond
)

// Core decides about bundles. Its input is what is true (who lives, who owns what, whether our lease is alive), not
// what happened: each event updates that picture, and decide computes each bundle's next step from the whole of it.
// So a lost or doubled event delays, but never wedges. The rejected alternative, a transition per pair of state and
// event, had twenty such pairs for failover alone and no answer to a watch that skips revisions.
//
// A Core is not safe for concurrent use.
type Core struct {
	self     string
	now      time.Duration // monotonic, from ticks
	draining bool
	leased   bool // our own lease is alive as far as we know
	brokers  map[string]brokerState
	bundles  map[meta.BundleID]*bundleState
	actions  []Action
}

type brokerState struct {
	registered bool // its leased registration is in etcd
	draining   bool
	suspect    bool // its pings go unanswered
}

type phase uint8

const (
	idle        phase = iota // not ours
	taking                   // a Take is under way
	held                     // ours, served
	reacquiring              // ours, served; its key went with the old lease and is being put back
	stopping                 // a Stop is under way; then release or idle
	releasing                // a Release is under way
)

type bundleState struct {
	phase phase
	// rev is the etcd revision up to which owner is known: watch events at or below it are old news.
	rev   int64
	owner string // "" is nobody
	epoch entry.Epoch
	// held and heldEpoch describe our own hold, in the phases held to releasing.
	heldEpoch entry.Epoch
	release   bool // hand over once stopped
	wanted    bool // somebody asked for it while nobody owned it
	known     bool // it was owned at some time, so its topics may have clients waiting
	tried     bool // lastTry is set
	lastTry   time.Duration
	lastTaken time.Duration // last takeover from a live lease, once taken is set
	taken     bool
}

// NewCore makes the state of a broker called self, with a live lease and no bundles.
func NewCore(self string) *Core {
	return &Core{
		self: self, leased: true,
		brokers: map[string]brokerState{}, bundles: map[meta.BundleID]*bundleState{},
	}
}

// Step takes one event in and returns what is to be done. The slice is valid until the next Step.
func (c *Core) Step(e Event) []Action {
	c.actions = c.actions[:0]
	switch e := e.(type) {
	case BrokerSeen:
		b := c.brokers[e.ID]
		if !b.registered {
			b.suspect = false // a new life
		}
		b.registered, b.draining = true, e.Draining
		c.brokers[e.ID] = b
		c.decideAll()
	case BrokerGone:
		delete(c.brokers, e.ID)
		c.decideAll()
	case Suspected:
		if b, ok := c.brokers[e.ID]; ok && !b.suspect {
			b.suspect = true
			c.brokers[e.ID] = b
			c.decideAll()
		}
	case Trusted:
		if b, ok := c.brokers[e.ID]; ok && b.suspect {
			b.suspect = false
			c.brokers[e.ID] = b
			c.decideAll()
		}
	case OwnerSeen:
		c.ownerSeen(e)
	case OwnerGone:
		c.ownerGone(e)
	case Wanted:
		b := c.bundle(e.Bundle)
		b.wanted = true
		c.decide(e.Bundle, b)
	case Taken:
		c.takeDone(e)
	case Reacquired:
		c.reacquireDone(e)
	case Stopped:
		c.stopDone(e)
	case Released:
		b := c.bundle(e.Bundle)
		b.phase = idle
		b.tried, b.lastTry = true, c.now
		c.decide(e.Bundle, b)
	case Fenced:
		if b := c.bundle(e.Bundle); c.holds(b) && b.heldEpoch == e.Epoch {
			c.stop(e.Bundle, b, ReasonFenced, false)
		}
	case LeaseLost:
		c.leased = false
	case LeaseRenewed:
		c.leased = true
		c.decideAll()
	case Drain:
		c.draining = true
		for _, id := range c.sorted() {
			if b := c.bundles[id]; c.holds(b) {
				c.stop(id, b, ReasonHandOver, true)
			}
		}
	case Tick:
		c.now = e.Now
		c.decideAll()
	}
	return c.actions
}

// Holds returns the epoch under which the bundle may be served here.
func (c *Core) Holds(id meta.BundleID) (entry.Epoch, bool) {
	b, ok := c.bundles[id]
	if !ok || !c.holds(b) {
		return 0, false
	}
	return b.heldEpoch, true
}

// Drained reports whether, after a Drain, nothing is held or under way any more.
func (c *Core) Drained() bool {
	if !c.draining {
		return false
	}
	for _, b := range c.bundles {
		if b.phase != idle {
			return false
		}
	}
	return true
}

// Route says who should be asked for a bundle: its owner if that one seems alive, otherwise the broker that will
// take it. The epoch is the owner's, or 0 when it is not known yet.
func (c *Core) Route(id meta.BundleID) (broker string, epoch entry.Epoch) {
	b, ok := c.bundles[id]
	if ok && c.holds(b) {
		return c.self, b.heldEpoch
	}
	if ok && b.owner != "" && b.owner != c.self && c.alive(b.owner) {
		return b.owner, b.epoch
	}
	exclude := ""
	if ok {
		exclude = b.owner
	}
	return c.preferred(id, exclude), 0
}

func (c *Core) ownerSeen(e OwnerSeen) {
	b := c.bundle(e.Bundle)
	if e.Rev <= b.rev {
		return
	}
	b.rev, b.owner, b.epoch, b.known = e.Rev, e.Owner, e.Epoch, true
	if c.holds(b) && e.Epoch > b.heldEpoch {
		c.stop(e.Bundle, b, ReasonReplaced, false)
	}
	c.decide(e.Bundle, b)
}

func (c *Core) ownerGone(e OwnerGone) {
	b := c.bundle(e.Bundle)
	if e.Rev <= b.rev {
		return
	}
	b.rev, b.owner = e.Rev, ""
	c.decide(e.Bundle, b)
}

func (c *Core) takeDone(e Taken) {
	b := c.bundle(e.Bundle)
	if b.phase != taking {
		panic("ownership: a take finished that was not under way")
	}
	b.phase = idle
	if !e.OK {
		c.decide(e.Bundle, b)
		return
	}
	b.phase, b.heldEpoch, b.wanted, b.known = held, e.Epoch, false, true
	if e.Rev > b.rev {
		b.rev, b.owner, b.epoch = e.Rev, c.self, e.Epoch
	}
	switch {
	case b.epoch > b.heldEpoch: // the watch was faster: somebody took it from us already
		c.stop(e.Bundle, b, ReasonReplaced, false)
	case c.draining:
		c.stop(e.Bundle, b, ReasonHandOver, true)
	default:
		c.act(Serve{Bundle: e.Bundle, Epoch: e.Epoch})
		c.decide(e.Bundle, b)
	}
}

func (c *Core) reacquireDone(e Reacquired) {
	b := c.bundle(e.Bundle)
	if b.phase != reacquiring { // stopped meanwhile
		return
	}
	b.phase = held
	switch e.Outcome {
	case ReacquireOK:
		if e.Rev > b.rev {
			b.rev, b.owner, b.epoch = e.Rev, c.self, b.heldEpoch
		}
	case ReacquireLost:
		c.stop(e.Bundle, b, ReasonReplaced, false)
	case ReacquireUnavailable: // still ours until somebody proves otherwise
	}
	c.decide(e.Bundle, b)
}

func (c *Core) stopDone(e Stopped) {
	b := c.bundle(e.Bundle)
	if b.phase != stopping {
		panic("ownership: a stop finished that was not under way")
	}
	if b.release {
		b.phase, b.release = releasing, false
		c.act(Release{Bundle: e.Bundle, Epoch: b.heldEpoch})
		return
	}
	b.phase = idle
	b.tried, b.lastTry = true, c.now
	c.decide(e.Bundle, b)
}

func (c *Core) stop(id meta.BundleID, b *bundleState, why Reason, release bool) {
	b.phase, b.release = stopping, release
	c.act(Stop{Bundle: id, Epoch: b.heldEpoch, Reason: why, Next: c.successor(id, b)})
}

// successor is the broker that clients of a bundle which we stop should turn to; "" if we know of none.
func (c *Core) successor(id meta.BundleID, b *bundleState) string {
	if b.owner != "" && b.owner != c.self && c.alive(b.owner) {
		return b.owner
	}
	return c.preferred(id, c.self)
}

// decide takes the next step of one bundle, if there is one.
func (c *Core) decide(id meta.BundleID, b *bundleState) {
	if !c.leased || c.draining {
		return
	}
	if b.tried && c.now-b.lastTry < retryPause {
		return // the next tick decides
	}
	switch {
	case b.phase == held && b.owner == "":
		b.phase = reacquiring
		b.tried, b.lastTry = true, c.now
		c.act(Reacquire{Bundle: id, Epoch: b.heldEpoch})
	case b.phase == idle && c.shouldTake(id, b):
		b.phase = taking
		b.tried, b.lastTry = true, c.now
		if b.owner != "" {
			b.taken, b.lastTaken = true, c.now
		}
		c.act(Take{Bundle: id, Owner: b.owner, Epoch: b.epoch})
	}
}

func (c *Core) shouldTake(id meta.BundleID, b *bundleState) bool {
	switch {
	case b.owner == "":
		return (b.wanted || b.known) && c.preferred(id, "") == c.self
	case b.owner == c.self:
		// A key of an earlier life of ours whose lease has not run out, or of a take whose answer was lost.
		return true
	case c.alive(b.owner):
		return false
	case b.taken && c.now-b.lastTaken < suspicionPause && c.brokers[b.owner].registered:
		return false
	}
	return c.preferred(id, b.owner) == c.self
}

func (c *Core) decideAll() {
	for _, id := range c.sorted() {
		c.decide(id, c.bundles[id])
	}
}

func (c *Core) holds(b *bundleState) bool { return b.phase == held || b.phase == reacquiring }

func (c *Core) alive(id string) bool {
	b := c.brokers[id]
	return b.registered && !b.suspect
}

// preferred is the broker with the highest hash for the bundle among those that may take it.
func (c *Core) preferred(id meta.BundleID, exclude string) string {
	best, bestWeight := "", uint64(0)
	for broker, b := range c.brokers {
		if broker == exclude || b.draining || !c.alive(broker) || (broker == c.self && c.draining) {
			continue
		}
		w := weight(id, broker)
		if best == "" || w > bestWeight || (w == bestWeight && broker < best) {
			best, bestWeight = broker, w
		}
	}
	return best
}

func (c *Core) bundle(id meta.BundleID) *bundleState {
	b, ok := c.bundles[id]
	if !ok {
		b = &bundleState{}
		c.bundles[id] = b
	}
	return b
}

func (c *Core) sorted() []meta.BundleID { return slices.Sorted(maps.Keys(c.bundles)) }

func (c *Core) act(a Action) { c.actions = append(c.actions, a) }

// weight is FNV-1a over both names with murmur3's 64-bit finalizer, which spreads names that differ in one digit.
func weight(id meta.BundleID, broker string) uint64 {
	h := uint64(14695981039346656037)
	for _, s := range [2]string{string(id), broker} {
		for i := range len(s) {
			h = (h ^ uint64(s[i])) * 1099511628211
		}
		h *= 1099511628211 // a separator, so that ("a", "bc") differs from ("ab", "c")
	}
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
