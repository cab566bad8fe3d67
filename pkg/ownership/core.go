package ownership

import (
	"maps"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Limits of how often a bundle changes hands by this broker's doing.
const (
	// suspicionPause lies between two takeovers of one bundle by this broker from one process whose lease is alive. It
	// doubles with each that follows soon, up to suspicionPauseMax: brokers that refuse each other's connections and
	// all reach etcd would pass a bundle to and fro. Another process, of the same name or not, may fail at any time.
	suspicionPause    = 5 * time.Second
	suspicionPauseMax = time.Minute
	// mutualSilence is longer than it takes two brokers that stop hearing each other to suspect one another, both of them.
	mutualSilence = time.Second
	// retryPause lies between two attempts of any kind on one bundle. It doubles, up to setbackPauseMax, with each time in a
	// row that this broker gives a bundle up which nobody else took, within settledAfter of taking it: what is stored refuses
	// its owner, whoever that is, as after a restore of etcd from an older copy, and will again.
	retryPause      = 100 * time.Millisecond
	setbackPauseMax = 5 * time.Second
	settledAfter    = 10 * time.Second
	// standInAfter is how long a bundle may stay without an owner before the next in the order of preference takes
	// it: the first one is alive, as far as pings tell, and yet does not.
	standInAfter = 2 * time.Second
)

// Core decides about bundles. Its input is what is true (who lives, who owns what, whether our lease is alive), not
// what happened: each event updates that picture, and decide computes each bundle's next step from the whole of it.
// So a lost or doubled event delays, but never wedges. The rejected alternative, a transition per pair of state and
// event, had twenty such pairs for failover alone and no answer to a watch that skips revisions.
//
// A Core is not safe for concurrent use.
type Core struct {
	self     string
	life     Life
	now      time.Duration // monotonic, from ticks
	seq      uint64        // counts events: it orders suspicions and changes of owner, finer than ticks
	draining bool
	leased   bool // our own lease is alive as far as we know
	brokers  map[string]brokerState
	bundles  map[meta.BundleID]*bundleState
	actions  []Action
}

type brokerState struct {
	life      Life // of its registration, which is in etcd
	draining  bool
	suspect   bool          // its pings go unanswered, or its port refuses connections
	suspectAt uint64        // the event of the latest evidence of that
	refused   bool          // that evidence is a refused connection, not silence
	suspected time.Duration // when
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
	// movedAt is the event by which owner got the bundle: a broker that takes a bundle lives, whatever was suspected of
	// it before.
	movedAt uint64
	// lost tells that it was taken from us, and lostAt when.
	lost   bool
	lostAt time.Duration
	// missingSince is when the bundle was first found to be needed and without an owner, if missing is set.
	missing      bool
	missingSince time.Duration
	// held and heldEpoch describe our own hold, in the phases held to releasing.
	heldEpoch entry.Epoch
	release   bool // hand over once stopped
	wanted    bool // somebody asked for it while nobody owned it
	known     bool // it was owned at some time, so its topics may have clients waiting
	tried     bool // lastTry is set
	lastTry   time.Duration
	seizing   bool // the take under way is on suspicion, from an owner whose lease is alive
	victim    Life // that owner's
	seized    map[Life]seizure
	heldSince time.Duration // when it was taken last
	setbacks  int           // see retryPause
}

// seizure is the latest takeover of a bundle from one process on suspicion.
type seizure struct {
	at    time.Duration
	pause time.Duration // before the next
}

// NewCore makes the state of a process of a broker called self, with a live lease and no bundles.
func NewCore(self string, life Life) *Core {
	return &Core{
		self: self, life: life, leased: true,
		brokers: map[string]brokerState{}, bundles: map[meta.BundleID]*bundleState{},
	}
}

// At tells what time it is, as Tick does, and decides nothing: the next Step goes by it.
func (c *Core) At(now time.Duration) { c.now = now }

// Step takes one event in and returns what is to be done. The slice is valid until the next Step.
func (c *Core) Step(e Event) []Action {
	c.actions = c.actions[:0]
	c.seq++
	switch e := e.(type) {
	case BrokerSeen:
		if b, ok := c.brokers[e.ID]; !ok || b.life != e.Life {
			c.brokers[e.ID] = brokerState{life: e.Life}
			c.decideAll()
		}
	case BrokerGone:
		delete(c.brokers, e.ID)
		c.decideAll()
	case Suspected:
		if b, ok := c.brokers[e.ID]; ok && b.life == e.Life && (!b.suspect || e.Refused) {
			b.suspect, b.suspectAt, b.refused, b.suspected = true, c.seq, e.Refused, c.now
			c.brokers[e.ID] = b
			c.decideAll()
		}
	case Trusted:
		if b, ok := c.brokers[e.ID]; ok && b.life == e.Life && b.suspect {
			b.suspect = false
			c.brokers[e.ID] = b
			c.decideAll()
		}
	case Draining:
		if b, ok := c.brokers[e.ID]; ok && b.life == e.Life && !b.draining {
			b.draining = true
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

// Missing counts the bundles that are needed and that nobody owns.
func (c *Core) Missing() int {
	n := 0
	for _, b := range c.bundles {
		if b.missing {
			n++
		}
	}
	return n
}

// Route says who should be asked for a bundle: its owner if that one seems alive, or is left in place although it does
// not; otherwise the broker that will take it. The epoch is the owner's, or 0 when it is not known yet.
func (c *Core) Route(id meta.BundleID) (broker string, epoch entry.Epoch) {
	b, ok := c.bundles[id]
	switch {
	case !ok:
		return c.preferred(id, ""), 0
	case c.holds(b):
		return c.self, b.heldEpoch
	case b.owner == c.self && !c.draining:
		return c.self, 0 // about to be taken again
	case b.owner != "" && b.owner != c.self && c.alive(b.owner):
		return b.owner, b.epoch
	}
	heir := c.preferred(id, b.owner)
	if _, live := c.brokers[b.owner]; live && heir == c.self && b.owner != c.self && b.phase == idle && !c.shouldTake(id, b) {
		return b.owner, b.epoch
	}
	return heir, 0
}

func (c *Core) ownerSeen(e OwnerSeen) {
	b := c.bundle(e.Bundle)
	if e.Rev <= b.rev {
		return
	}
	if e.Epoch != b.epoch {
		b.movedAt = c.seq
	}
	if e.Owner != c.self && e.Owner != b.owner {
		b.tried, b.setbacks = false, 0 // what was tried met another state of things
	}
	b.rev, b.owner, b.epoch, b.known, b.missing = e.Rev, e.Owner, e.Epoch, true, false
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
	if b.owner != "" {
		b.tried = false // likewise
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
	seized := b.seizing
	b.seizing = false
	if !e.OK {
		if e.NoSuch {
			b.known, b.wanted = false, false // nobody needs it, until somebody says so
		}
		c.decide(e.Bundle, b)
		return
	}
	if seized {
		maps.DeleteFunc(b.seized, func(_ Life, s seizure) bool { return c.now-s.at > 2*suspicionPauseMax })
		if b.seized == nil {
			b.seized = map[Life]seizure{}
		}
		b.seized[b.victim] = seizure{at: c.now, pause: min(max(2*b.seized[b.victim].pause, suspicionPause), suspicionPauseMax)}
	}
	b.heldSince = c.now
	b.phase, b.heldEpoch, b.wanted, b.known, b.missing, b.lost = held, e.Epoch, false, true, false, false
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
	if why == ReasonReplaced || why == ReasonFenced {
		b.lost, b.lostAt = true, c.now
	}
	if why == ReasonFenced && b.owner == c.self {
		if c.now-b.heldSince >= settledAfter {
			b.setbacks = 0
		}
		b.setbacks++
	}
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
	c.note(b)
	switch c.due(id, b) {
	case reacquiring:
		b.phase = reacquiring
		b.tried, b.lastTry = true, c.now
		c.act(Reacquire{Bundle: id, Epoch: b.heldEpoch})
	case taking:
		b.phase = taking
		b.tried, b.lastTry = true, c.now
		owner, registered := c.brokers[b.owner]
		b.seizing, b.victim = registered && b.owner != c.self, owner.life
		c.act(Take{Bundle: id, Owner: b.owner, Epoch: b.epoch})
	case idle, held, stopping, releasing:
	}
}

// note keeps since when a bundle that is needed has had no owner.
func (c *Core) note(b *bundleState) {
	if missing := b.phase == idle && b.owner == "" && (b.wanted || b.known); missing != b.missing {
		b.missing, b.missingSince = missing, c.now
	}
}

// due returns the phase that a bundle should enter by an action of ours, or idle for none.
func (c *Core) due(id meta.BundleID, b *bundleState) phase {
	switch {
	case !c.leased, c.draining:
		return idle
	case b.tried && c.now-b.lastTry < b.pause():
		return idle // the next tick decides
	case b.phase == held && b.owner == "":
		return reacquiring
	case b.phase == idle && c.registered() && c.shouldTake(id, b):
		return taking
	}
	return idle
}

func (b *bundleState) pause() time.Duration {
	if b.phase != idle || b.setbacks < 2 {
		return retryPause
	}
	return sched.Doubled(retryPause, b.setbacks-1, setbackPauseMax)
}

func (c *Core) shouldTake(id meta.BundleID, b *bundleState) bool {
	if b.owner == "" {
		return (b.wanted || b.known) && c.turn(id, b)
	}
	if b.owner == c.self {
		// A key of an earlier life of ours whose lease has not run out, or of a take whose answer was lost.
		return true
	}
	if owner, registered := c.brokers[b.owner]; registered {
		switch {
		case !owner.suspect:
			return false
		case owner.suspectAt < b.movedAt:
			return false // it took the bundle after it was suspected: it reaches etcd, if not us. Its lease tells
		case b.lost && !owner.refused && owner.suspected-b.lostAt < mutualSilence:
			// It took the bundle from us because it does not hear us, and that is why we do not hear it. Taking it back
			// would leave it where nobody may reach it. Its lease tells.
			return false
		}
		if s, before := b.seized[owner.life]; before && c.now-s.at < s.pause {
			return false
		}
	}
	return c.preferred(id, b.owner) == c.self
}

// turn reports whether a bundle without an owner is this broker's to take: it is preferred, or as many as are preferred
// to it have each had their time.
func (c *Core) turn(id meta.BundleID, b *bundleState) bool {
	mine, ok := c.brokers[c.self]
	if !ok || mine.suspect {
		return false
	}
	before := 0
	for broker, s := range c.brokers {
		if broker != c.self && !s.draining && !s.suspect && preferable(id, broker, c.self) {
			before++
		}
	}
	return before == 0 || b.missing && c.now-b.missingSince >= time.Duration(before)*standInAfter
}

// decideAll takes the next step of every bundle, in the order of their names. Most have none.
func (c *Core) decideAll() {
	var due []meta.BundleID
	for id, b := range c.bundles {
		c.note(b)
		if c.due(id, b) != idle {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	for _, id := range due {
		c.decide(id, c.bundles[id])
	}
}

func (c *Core) holds(b *bundleState) bool { return b.phase == held || b.phase == reacquiring }

// registered reports whether the registration under our name is ours. While it is another process's, which somebody
// started by mistake, or in place of this one, two that both took for theirs what their name owns would never end.
func (c *Core) registered() bool {
	b, ok := c.brokers[c.self]
	return ok && b.life == c.life
}

func (c *Core) alive(id string) bool {
	b, registered := c.brokers[id]
	return registered && !b.suspect
}

// preferred is the broker that comes first for the bundle among those that may take it; "" if none may.
func (c *Core) preferred(id meta.BundleID, exclude string) string {
	best := ""
	for broker, b := range c.brokers {
		if broker == exclude || b.draining || b.suspect || (broker == c.self && c.draining) {
			continue
		}
		if best == "" || preferable(id, broker, best) {
			best = broker
		}
	}
	return best
}

// preferable reports whether rendezvous hashing puts broker a before broker b for the bundle.
func preferable(id meta.BundleID, a, b string) bool {
	wa, wb := weight(id, a), weight(id, b)
	return wa > wb || wa == wb && a < b
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
