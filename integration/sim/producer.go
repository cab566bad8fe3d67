package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
	product "github.com/penstock-mq/penstock/pkg/topic"
)

// conn is a client's connection to a broker, for one producer or consumer. What goes in comes out in order, until it breaks.
type conn struct {
	m           *messaging
	b           *broker
	life        int // of the broker
	s           *servedBundle
	st          *servedTopic
	there, back pipe
	over        bool // the client has left, or knows that it is broken
	ended       bool // the server has
	onEnd       func()
	onLost      func()
	remote      *consuming      // of a subscriber, at the server
	ctx         context.Context //nolint:containedctx // of the server's end
	cancel      context.CancelFunc
}

// dial connects to the broker that the topic is looked up at: the owner mostly.
func (m *messaging) dial(client string, onLost func()) *conn {
	w := m.w
	b := pick(w.kernel, w.brokers)
	if owner, err := w.checker.GetOwner(context.Background(), m.tp.bundle); err == nil && !w.chance(20) {
		for _, o := range w.brokers {
			if o.name == owner.Broker {
				b = o
			}
		}
	}
	if !b.up {
		return nil
	}
	c := &conn{m: m, b: b, life: b.life, onLost: onLost}
	c.there.way, c.back.way = way{client, b.name}, way{b.name, client}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	m.conns = append(slices.DeleteFunc(m.conns, func(c *conn) bool { return c.over && c.ended }), c)
	w.after(w.between(100*time.Millisecond, 300*time.Millisecond), c.watch)
	return c
}

// call has f run at the broker.
func (c *conn) call(f func()) {
	c.m.w.net.send(&c.there, func() {
		c.b.deliver(c.life, func() {
			if !c.ended {
				f()
			}
		})
	})
}

// tell has f run at the client.
func (c *conn) tell(f func()) {
	if c.ended {
		return
	}
	c.m.w.net.send(&c.back, func() {
		if !c.over {
			f()
		}
	})
}

// watch sees that the broker is gone, or silent for long.
func (c *conn) watch() {
	if c.over {
		return
	}
	w := c.m.w
	w.after(w.between(100*time.Millisecond, 300*time.Millisecond), c.watch)
	if !c.b.up || c.b.life != c.life || c.b.paused && w.chance(8) || c.ended && w.chance(2) {
		c.lose()
	}
}

// lose ends the client's side of a connection that is broken.
func (c *conn) lose() {
	if c.over {
		return
	}
	c.leave()
	c.onLost()
}

// leave ends the connection from the client's side; the server sees it in a while.
func (c *conn) leave() {
	c.over = true
	c.back.broken = true
	w := c.m.w
	after := w.net.delay()
	if w.chance(10) && !w.healed {
		after = w.between(0, 3*time.Second)
	}
	w.after(after, func() {
		c.there.broken = true
		c.b.deliver(c.life, c.serverEnds)
	})
}

// serverEnds ends the server's side.
func (c *conn) serverEnds() {
	if c.ended {
		return
	}
	c.ended = true
	c.cancel()
	if f := c.onEnd; f != nil {
		c.onEnd = nil
		c.b.sched.Go(f)
	}
}

// closed has f run at the server when the connection ends, or at once in a task if it has.
func (c *conn) closed(f func()) {
	if c.ended {
		c.b.sched.Go(f)
		return
	}
	c.onEnd = f
}

// cut breaks it, with what is on its way.
func (c *conn) cut() {
	w := c.m.w
	c.there.broken, c.back.broken = true, true
	w.after(w.between(0, 500*time.Millisecond), c.lose)
}

// producer is a client that publishes. What is not answered it sends again, in the same order with the same sequences.
type producer struct {
	m           *messaging
	topic       int        // index
	t           *dataTopic // which of that name it has met; nil: none yet
	name        string
	dedup       bool
	level       ledger.AckLevel
	pace        time.Duration
	most        int // batches in the window
	incarnation int
	epoch       uint64
	next        uint64
	window      []*sendBatch
	c           *conn
	ready       bool
	since       time.Duration // the window's oldest batch, or the connection, is so old
	hold        bool          // a batch failed: nothing is sent until all that was sent is answered
	remote      *publisher
	drawn       uint64 // tells its requests from those of others until it has an epoch
	given       uint64 // the last epoch that it was let in with, by letBy
	letBy       *dataTopic
	rank        rank
	asked       bool // to be let in as a new incarnation
	asking      int  // opens under way for that
	heard       int  // of the attempts of its name that ended, those before its own
	dead        bool // superseded
	lingers     bool // all the same, it comes back until it is told so
	byOutdated  bool // it was let in by an owner that was none any more
	final       bool // the last batch was made
}

// rank orders the incarnations of a name: by the owner's epoch, and by when it let them in. An incarnation is one from then on;
// of those that come at the same time it is not told who is the newer one.
type rank struct {
	owner  entry.Epoch
	number int
}

func (r rank) before(o rank) bool {
	return r.owner < o.owner || r.owner == o.owner && r.number < o.number
}

type sendBatch struct {
	first, last uint64
	messages    []*message
	frame       []byte
	sent        bool // on this connection, and not answered
	failed      bool
}

// publisher is the server's side of a producer's connection.
type publisher struct {
	c     *conn
	st    *servedTopic
	from  *producer
	p     *product.Producer
	queue []*sendBatch
	wake  chan struct{}
}

func (p *producer) settled() bool {
	return p.dead || p.final && len(p.window) == 0 && p.t == p.m.topics[p.topic]
}

// tick gives the producer something to do, and begins it anew at times.
func (p *producer) tick() {
	if p.dead && p.c == nil && !p.lingers {
		return
	}
	m, w := p.m, p.m.w
	if w.ending {
		return
	}
	w.after(w.between(p.pace/2, 2*p.pace), p.tick)
	switch {
	case p.c == nil:
		p.connect()
	case w.now-p.since > 4*time.Second && (len(p.window) > 0 || !p.ready):
		p.c.lose()
	case w.calm && !w.chance(60): // nothing to say
	case p.ready && !p.hold && len(p.window) < p.most && !p.final:
		for range 1 + w.rng.IntN(2) {
			p.publish(0)
		}
		p.burst()
		p.final = m.healing
	}
	if m.healing {
		m.finish()
	} else if !p.dead && w.chance(calmer(w, 300, 10)) {
		p.beginAnew()
	}
}

// beginAnew is a new incarnation, which knows nothing but its name. The old one goes on with its connection for a while, or
// leaves, or goes on until it is fenced: with deduplication, by whichever owner.
func (p *producer) beginAnew() {
	w := p.m.w
	p.dead = true
	p.lingers = p.dedup && w.chance(2)
	fresh := &producer{m: p.m, topic: p.topic, name: p.name, dedup: p.dedup, level: p.level, pace: p.pace, most: p.most, incarnation: p.incarnation + 1}
	p.m.producers[slices.Index(p.m.producers, p)] = fresh
	w.trace(p.name, p.subject(), "begins anew as incarnation %d", fresh.incarnation)
	w.after(w.between(0, 2*p.pace), fresh.tick)
	if p.c != nil && w.chance(2) {
		p.c.lose()
	}
}

func (p *producer) subject() subject { return subject{topic: p.m.tp.index + 1} }

func (p *producer) connect() {
	m, w := p.m, p.m.w
	c := m.dial(p.name, nil)
	if c == nil {
		return
	}
	p.c, p.ready, p.since, p.hold = c, false, w.now, false
	c.onLost = func() { p.broken(c) }
	for _, b := range p.window {
		b.sent, b.failed = false, false
	}
	name, epoch, topic := p.name, p.epoch, p.topic
	fresh := epoch == 0
	if fresh {
		if p.drawn == 0 {
			w.numbers++
			p.drawn = w.numbers
		}
		epoch = product.NewIncarnation(p.drawn)
	}
	c.call(func() {
		s := m.at[c.b]
		if s == nil || s.life != c.life || s.closed {
			c.tell(func() { c.lose() })
			return
		}
		c.s = s
		c.b.sched.Go(func() {
			ctx, cancel := c.b.sched.WithTimeout(c.ctx, 10*time.Second)
			defer cancel()
			st := s.find(ctx, topic)
			if st == nil {
				c.tell(func() { c.lose() })
				return
			}
			c.st = st
			if p.t != nil && p.t != st.t {
				c.tell(func() { p.moved(c) })
				return
			}
			ended := st.attempt(p, fresh)
			remote, err := st.log.OpenProducer(ctx, name, epoch, p.dedup)
			ended(err == nil)
			if err != nil {
				fenced := errors.Is(err, product.ErrProducerFenced)
				c.tell(func() { p.refused(c, fenced) })
				return
			}
			pub := &publisher{c: c, st: st, from: p, p: remote, wake: make(chan struct{}, 1)}
			st.opened(p, remote.Epoch())
			st.present[name] = pub
			p.byOutdated = p.byOutdated || s.outdated()
			c.closed(func() {
				remote.Close()
				st.closed(pub)
			})
			s.run.Go(pub.run)
			last := remote.LastSequence()
			c.tell(func() { p.opened(c, pub, remote.Epoch(), last) })
		})
	})
}

func (p *producer) broken(c *conn) {
	if p.c == c {
		p.c, p.ready, p.remote = nil, false, nil
	}
}

// refused is the answer to an incarnation that was superseded, or comes at a bad time.
func (p *producer) refused(c *conn, fenced bool) {
	if fenced {
		p.lingers = false
	}
	switch {
	case !fenced || p.dead || p.t != nil && p.t.deleting:
	case p.m.attempts[p.name].others(p): // one may not have been let in after all
	case p.byOutdated && !p.dedup: // two owners let one in, and the newer owner's is above the other
	default:
		p.m.w.fail("fencing", p.subject(), "%s incarnation %d is fenced, and is the newest", p.name, p.incarnation)
	}
	c.lose()
	if fenced && !p.dead {
		p.beginAnew()
		p.lingers = false
	}
}

// moved is the answer to an incarnation whose topic is gone: another one has its name.
func (p *producer) moved(c *conn) {
	if p.c == c && !p.dead {
		p.beginAnew()
	}
	c.lose()
}

// opened goes on with what is not stored yet.
func (p *producer) opened(c *conn, remote *publisher, epoch uint64, last int64) {
	if p.c != c {
		return
	}
	p.t = remote.st.t
	if made, ok := p.t.made[p.name]; last >= 0 && (!ok || last > int64(made)) {
		p.m.w.fail("I3", p.subject(), "%s of %s is told that sequence %d is stored, and made none so high", p.name, p.t.name, last)
	}
	p.ready, p.remote, p.epoch, p.since = true, remote, epoch, p.m.w.now
	if p.dedup {
		p.next = max(p.next, uint64(last+1))
		for len(p.window) > 0 && last >= 0 && p.window[0].last <= uint64(last) && p.level != ledger.AckAll {
			b := p.window[0]
			p.window = p.window[1:]
			for _, msg := range b.messages {
				msg.acknowledged(p.level, true)
			}
		}
	}
	for _, b := range p.window {
		p.send(b)
	}
}

// publish makes a batch and sends it, with so many bytes more in each message than they have anyway.
func (p *producer) publish(more int) {
	w, t := p.m.w, p.t
	n := 1 + w.rng.IntN(3)
	b := &sendBatch{first: p.next, last: p.next + uint64(n) - 1}
	var payload []byte
	for range n {
		msg := t.newMessage(p, p.next)
		p.next++
		b.messages = append(b.messages, msg)
		value := binary.BigEndian.AppendUint64(nil, msg.number)
		value = append(value, make([]byte, w.rng.IntN(60)+more)...)
		payload = frame.AppendMessage(payload, &frame.Message{Sequence: msg.seq, Value: value})
	}
	b.frame = frame.Append(nil, &frame.Header{Producer: p.name, Sequence: b.first, PublishTime: w.clock().UnixMilli(), Count: n}, payload)
	if len(p.window) == 0 {
		p.since = w.now
	}
	p.window = append(p.window, b)
	p.send(b)
}

func (p *producer) send(b *sendBatch) {
	b.sent, b.failed = true, false
	pub := p.remote
	p.c.call(func() {
		pub.queue = append(pub.queue, b)
		select {
		case pub.wake <- struct{}{}:
		default:
		}
	})
}

// run takes batches in.
func (u *publisher) run() {
	c, w := u.c, u.c.m.w
	for {
		if _, err := c.b.sched.Wait(c.ctx, sched.Channels{u.wake}); err != nil {
			return
		}
		for len(u.queue) > 0 {
			b := u.queue[0]
			u.queue = u.queue[1:]
			parsed, err := frame.Parse(b.frame, frame.DefaultLimits())
			if err != nil {
				panic(err)
			}
			told := u.from
			for _, msg := range b.messages {
				msg.attempts++
			}
			taken, isTold := c.s.held.takes(c.s, b)
			err = u.p.Append(c.ctx, product.Batch{
				Frame: b.frame, Parsed: &parsed, Level: told.level,
				Done: func(r product.Receipt, err error) {
					isTold()
					u.finished(b, r, err)
				},
			})
			if err == nil {
				taken()
				u.st.took(u, b)
				continue
			}
			for _, msg := range b.messages {
				msg.attempts--
			}
			w.trace(c.b.name, subject{topic: c.m.tp.index + 1, number: b.messages[0].number}, "refuses %d of %s: %v", b.first, u.from.name, err)
			select {
			case <-u.st.log.Lost():
				c.tell(c.lose)
				return
			default:
			}
			u.st.refused(b, err)
			if errors.Is(err, product.ErrProducerFenced) || errors.Is(err, product.ErrProducerReplaced) {
				c.tell(func() { u.from.fenced(c) })
				return
			}
			c.tell(func() { u.from.answered(c, b, err) })
		}
	}
}

// finished is the topic's word on a batch.
func (u *publisher) finished(b *sendBatch, r product.Receipt, err error) {
	c := u.c
	u.st.finished(u, b, r, err)
	if err != nil {
		u.st.refused(b, err)
		select {
		case <-u.st.log.Lost():
			return // it is not known; the client learns it from the next owner
		default:
		}
	}
	c.tell(func() { u.from.answered(c, b, err) })
}

func (p *producer) fenced(c *conn) {
	if p.c == c {
		c.lose()
	}
}

// answered is the broker's answer to a batch.
func (p *producer) answered(c *conn, b *sendBatch, err error) {
	if p.c != c {
		return
	}
	b.sent = false
	switch {
	case err == nil, errors.Is(err, product.ErrCopiesUnknown): // nobody will tell whether it is on all disks
		p.window = slices.DeleteFunc(p.window, func(o *sendBatch) bool { return o == b })
		p.since = p.m.w.now
	default:
		b.failed, p.hold = true, true
	}
	if p.hold && !slices.ContainsFunc(p.window, func(b *sendBatch) bool { return b.sent }) {
		w := p.m.w
		if w.chance(3) {
			c.lose() // and come again
			return
		}
		w.after(w.between(10*time.Millisecond, 300*time.Millisecond), func() {
			if p.c != c || !p.hold {
				return
			}
			p.hold = false
			for _, b := range p.window {
				p.send(b)
			}
		})
	}
}
