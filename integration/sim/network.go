package sim

import (
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// The times of package bookieclient's links.
const (
	dialTimeout     = 2 * time.Second
	silenceTimeout  = 5 * time.Second
	pingInterval    = time.Second
	answerTimeout   = 10 * time.Second
	connectPauseMin = 20 * time.Millisecond
	connectPauseMax = time.Second
)

// way is one direction of the network between two machines.
type way struct{ from, to string }

// network carries what processes send each other. Each way between two machines can be blocked.
type network struct {
	w       *world
	blocked map[way]bool
	stalled map[way][]func() // what waits for the way to open, in order
}

func (n *network) block(from, to string) { n.blocked[way{from, to}] = true }

// isOpen reports whether what comes now gets through.
func (n *network) isOpen(k way) bool { return !n.blocked[k] && len(n.stalled[k]) == 0 }

// open lets what was stalled through: TCP sends it again.
func (n *network) open(from, to string) {
	k := way{from, to}
	if !n.blocked[k] {
		return
	}
	delete(n.blocked, k)
	n.w.after(n.w.between(0, 300*time.Millisecond), func() {
		if n.blocked[k] {
			return
		}
		waiting := n.stalled[k]
		delete(n.stalled, k)
		for _, f := range waiting {
			f()
		}
	})
}

// delay is mostly short, at times long enough to overtake what goes another way.
func (n *network) delay() time.Duration {
	k := n.w.kernel
	if n.w.healed {
		return k.between(50*time.Microsecond, 500*time.Microsecond)
	}
	switch k.rng.IntN(24) {
	case 0:
		return k.between(0, 300*time.Millisecond)
	case 1, 2, 3:
		return k.between(0, 20*time.Millisecond)
	}
	return k.between(50*time.Microsecond, 2*time.Millisecond)
}

// pipe is one direction of a connection: what goes in comes out in order, or not at all.
type pipe struct {
	way    way
	last   time.Duration // when the last one arrives
	broken bool
}

func (n *network) send(p *pipe, f func()) {
	p.last = max(p.last, n.w.now+n.delay())
	n.arrive(p, p.last, f)
}

func (n *network) arrive(p *pipe, at time.Duration, f func()) {
	n.w.at(at, func() {
		switch {
		case p.broken:
		case !n.isOpen(p.way):
			n.stalled[p.way] = append(n.stalled[p.way], func() { n.arrive(p, n.w.now, f) })
		default:
			f()
		}
	})
}

// link is a broker's connection to one bookie for one use, when there is one; it keeps what awaits an answer.
type link struct {
	n       *network
	from    *broker
	to      entry.StorageUUID
	adds    bool
	conn    *connection
	dialing bool
	pending []*request // in the order sent
	queued  []*request
	pause   time.Duration
	notTill time.Duration
}

// connection is one life of a link.
type connection struct {
	there, back pipe
	server      *bookieProcess
	life        int // of the server
	heard       time.Duration
	watched     bool
}

type request struct {
	since time.Duration
	limit time.Duration // 0: none; beyond it the request fails alone
	// serve runs at the bookie, which calls reply once, with what runs at the sender; it may be lost.
	serve func(b *bookieProcess, reply func(answer func()))
	// fail tells the sender that no answer will come.
	fail     func(err *bookiewire.Error)
	ends     *ender // of its context, which is of no interest once it has been answered; may be nil
	answered bool
}

func disconnected(why string) *bookiewire.Error {
	return &bookiewire.Error{Code: bookiewire.Disconnected, Detail: why}
}

// ask sends a request. Its answer, or failure, comes later, in the life of the sender that asked.
func (l *link) ask(r *request) {
	w := l.n.w
	r.since = w.now
	if w.now < l.notTill {
		l.from.after(0, func() { r.end(func() { r.fail(disconnected("not reached a moment ago")) }) })
		return
	}
	if l.conn != nil {
		l.transmit(r)
		return
	}
	l.queued = append(l.queued, r)
	if !l.dialing {
		l.dialing = true
		l.dial()
	}
}

// end gives a request its one outcome.
func (r *request) end(f func()) {
	if r.answered {
		return
	}
	r.answered = true
	r.ends.forget()
	f()
}

func (l *link) dial() {
	w := l.n.w
	b := w.bookieOf(l.to)
	refuse := func(after time.Duration) {
		l.from.after(after, func() {
			l.dialing = false
			l.pause = min(max(2*l.pause, connectPauseMin), connectPauseMax)
			l.notTill = w.now + w.between(l.pause/2, l.pause)
			l.failAll("cannot be reached")
		})
	}
	switch {
	case b == nil: // that identity is gone for good
		refuse(l.n.delay())
		return
	case l.n.blocked[way{l.from.name, b.name}] || l.n.blocked[way{b.name, l.from.name}]:
		refuse(dialTimeout)
		return
	case !b.serving():
		refuse(l.n.delay())
		return
	case b.paused:
		refuse(silenceTimeout)
		return
	}
	life := b.life
	l.from.after(2*l.n.delay(), func() {
		if b.life != life || !b.serving() {
			refuse(0)
			return
		}
		l.dialing = false
		l.conn = &connection{there: pipe{way: way{l.from.name, b.name}}, back: pipe{way: way{b.name, l.from.name}}, server: b, life: life, heard: w.now}
		b.clients = append(b.clients, l)
		queued := l.queued
		l.queued = nil
		for _, r := range queued {
			l.transmit(r)
		}
	})
}

func (l *link) transmit(r *request) {
	c, n := l.conn, l.n
	l.pending = append(l.pending, r)
	l.watch()
	life := l.from.life
	n.send(&c.there, func() {
		c.server.deliver(c.life, func() {
			r.serve(c.server, func(answer func()) {
				n.send(&c.back, func() {
					l.from.deliver(life, func() {
						if l.conn != c {
							return
						}
						c.heard, l.pause = n.w.now, 0
						l.drop(r)
						r.end(answer)
					})
				})
			})
		})
	})
}

// drop forgets a request, sent or not.
func (l *link) drop(r *request) {
	gone := func(o *request) bool { return o == r }
	if i := slices.IndexFunc(l.pending, gone); i >= 0 {
		l.pending = slices.Delete(l.pending, i, i+1)
	} else {
		l.queued = slices.DeleteFunc(l.queued, gone)
	}
}

// watch looks after a connection on which answers are awaited: a bookie that does not answer pings is given up, and so
// is one that is late with an add.
func (l *link) watch() {
	c := l.conn
	if c.watched {
		return
	}
	c.watched = true
	if len(l.pending) == 1 {
		c.heard = max(c.heard, l.n.w.now)
	}
	l.from.after(pingInterval, func() {
		c.watched = false
		if l.conn != c || len(l.pending) == 0 {
			return
		}
		now, b := l.n.w.now, c.server
		if !l.n.blocked[c.there.way] && !l.n.blocked[c.back.way] {
			if !b.up || b.life != c.life { // another process answers the ping, or none
				l.broke("reset")
				return
			}
			if !b.paused {
				c.heard = now
			}
		}
		if now-c.heard >= silenceTimeout || l.adds && now-l.pending[0].since >= answerTimeout {
			l.broke("silent")
			return
		}
		for i := 0; i < len(l.pending); i++ {
			if r := l.pending[i]; r.limit > 0 && now-r.since >= r.limit {
				l.pending = append(l.pending[:i], l.pending[i+1:]...)
				i--
				r.end(func() { r.fail(disconnected("no answer in time")) })
			}
		}
		if len(l.pending) > 0 {
			l.watch()
		}
	})
}

// broke is the sender's end of a connection. What it has sent may still arrive, up to a point; no answer does.
func (l *link) broke(why string) {
	c, k := l.conn, l.n.w.kernel
	if c == nil {
		return
	}
	l.conn = nil
	c.back.broken = true
	// The server reads what has come to its machine, and then learns of the end.
	k.after(k.between(0, 5*time.Millisecond), func() { c.there.broken = true })
	l.pause = min(max(2*l.pause, connectPauseMin), connectPauseMax)
	l.notTill = k.now + k.between(l.pause/2, l.pause)
	l.failAll("connection lost: " + why)
}

func (l *link) failAll(why string) {
	all := append(l.pending, l.queued...)
	l.pending, l.queued = nil, nil
	for _, r := range all {
		r.end(func() { r.fail(disconnected(why)) })
	}
}

// reset breaks a connection from outside; both ends learn of it in their own time.
func (l *link) reset(after time.Duration) {
	c := l.conn
	if c == nil {
		return
	}
	l.from.after(after, func() {
		if l.conn == c {
			l.broke("reset")
		}
	})
}
