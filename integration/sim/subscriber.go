package sim

import (
	"context"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/subscription"
)

// subscriber is a client that consumes: from a subscription, or as a reader, whose name is empty.
type subscriber struct {
	m        *messaging
	topic    int
	sub      string
	kind     subscription.Type
	name     string
	priority int32

	// How it goes about it.
	permits              uint32
	think                time.Duration
	nacks, forgets, asks int // one message in so many; 0: none
	cumulative           bool
	stays                int // it leaves once in so many looks

	c      *conn
	ready  bool
	since  time.Duration
	remote *consuming
	t      *dataTopic
	next   entry.Offset // of a reader, in t
}

// consuming is the server's side of a subscriber's connection.
type consuming struct {
	c        *conn
	st       *servedTopic
	from     *subscriber
	consumer *subscription.Consumer
	view     *view // nil for a reader
	of       *genGhost
	held     cursor.RangeSet
	next     entry.Offset // of a reader

	granted, received uint64 // messages
}

// style draws how the subscriber goes about it.
func (s *subscriber) style() {
	w := s.m.w
	s.permits = uint32(1) << w.rng.IntN(10)
	s.think = w.between(0, 200*time.Millisecond)
	s.nacks = []int{0, 4, 20}[w.rng.IntN(3)]
	s.forgets = []int{0, 0, 30}[w.rng.IntN(3)]
	s.asks = []int{1, 5}[w.rng.IntN(2)]
	s.cumulative = s.kind != subscription.Shared && w.chance(2)
	s.stays = []int{20, 100, 1000}[w.rng.IntN(3)]
	if own := w.overload.rng; own != nil && own.IntN(3) == 0 {
		s.permits, s.think = 512, 2*time.Second
	}
}

func (s *subscriber) subject() subject { return subject{topic: s.m.tp.index + 1} }

// settled reports whether there is nothing left for it.
func (s *subscriber) settled(st *servedTopic) bool {
	if s.sub == "" {
		return s.t == st.t && max(s.next, st.log.Earliest()) >= st.log.Next() // what is trimmed does not reach it any more
	}
	v := st.views[s.sub]
	return v != nil && len(v.sub.Missing(nil, cursor.Range{First: st.t.start, End: st.log.Next()})) == 0
}

// tick connects, and leaves at times.
func (s *subscriber) tick() {
	m, w := s.m, s.m.w
	if w.ending {
		return
	}
	w.after(w.between(50*time.Millisecond, 500*time.Millisecond), s.tick)
	switch {
	case s.c == nil:
		s.connect()
	case !s.ready && w.now-s.since > 6*time.Second:
		s.c.lose()
	case m.healing:
		if s.nacks+s.forgets > 0 || s.stays < 1000 || s.permits < 64 { // what it has forgotten comes again
			s.nacks, s.forgets, s.stays, s.permits, s.think = 0, 0, 1000, 64, 0
			s.c.lose()
		}
		m.finish()
	case w.chance(calmer(w, s.stays, 10)):
		s.c.lose()
		if w.chance(3) {
			s.style()
		}
	}
}

func (s *subscriber) connect() {
	m, w := s.m, s.m.w
	c := m.dial(s.name, nil)
	if c == nil {
		return
	}
	s.c, s.ready, s.since, s.remote = c, false, w.now, nil
	c.onLost = func() {
		if s.c == c {
			s.c, s.ready, s.remote = nil, false, nil
		}
	}
	earliest, permits := w.chance(2), s.permits
	c.call(func() {
		b := m.at[c.b]
		if b == nil || b.life != c.life || b.closed {
			c.tell(c.lose)
			return
		}
		c.s = b
		c.b.sched.Go(func() {
			ctx, cancel := c.b.sched.WithTimeout(c.ctx, 10*time.Second)
			defer cancel()
			st := b.find(ctx, s.topic)
			c.st = st
			if st == nil || !st.attach(ctx, c, s, earliest) {
				c.tell(c.lose)
				return
			}
			r := c.remote
			r.permit(permits)
			c.tell(func() {
				if s.c == c {
					s.ready, s.remote, s.since = true, r, w.now
				}
			})
		})
	})
}

// attach lets a subscriber in.
func (st *servedTopic) attach(ctx context.Context, c *conn, s *subscriber, earliest bool) bool {
	w := s.m.w
	r := &consuming{c: c, st: st, from: s}
	if s.t != st.t {
		s.t, s.next = st.t, 0
	}
	who := dispatch.Consumer{Name: s.name, Priority: s.priority}
	start := func(context.Context) (entry.Offset, error) {
		if earliest {
			return st.log.Earliest(), nil
		}
		return st.log.Next(), nil
	}
	if s.sub == "" {
		from := s.next
		if from == 0 {
			from, _ = start(ctx)
			s.next = from
		}
		r.next = from
		var err error
		if r.consumer, err = st.set.AttachReader(r, from, who); err != nil {
			return false
		}
	} else {
		st.t.ensuring(s.sub)
		sub, created, err := st.set.Ensure(ctx, s.sub, start)
		if sub == nil {
			return false
		}
		v := st.view(sub)
		if err != nil {
			return false
		}
		v.ensured(created)
		if r.consumer, err = sub.Attach(r, s.kind, who); err != nil {
			return false
		}
		r.view = v
		v.sync()
		r.of = v.genOf(r.consumer.Incarnation())
		v.consumers = append(v.consumers, r)
		w.trace(c.b.name, s.subject(), "%s joins %s of %s in generation %d", s.name, s.sub, st.t.name, v.gen.number)
	}
	c.remote = r
	c.closed(func() {
		r.consumer.Close()
		if r.view != nil {
			r.view.left(r)
		}
	})
	return true
}

// Send implements subscription.Stream.
func (r *consuming) Send(deliveries []dispatch.Delivery) {
	for i := range deliveries {
		d := deliveries[i]
		r.st.s.held.frame = max(r.st.s.held.frame, int64(len(d.Frame)))
		msgs := r.st.t.read(d.Offset, d.Frame, d.Skip, r.c.b.name)
		var ranges []cursor.Range
		at := d.Offset
		for _, skip := range d.Skip {
			if skip.First > at {
				ranges = append(ranges, cursor.Range{First: at, End: skip.First})
			}
			at = skip.End
		}
		if end := d.Range().End; at < end {
			ranges = append(ranges, cursor.Range{First: at, End: end})
		}
		for _, span := range ranges {
			r.sent(span.Len())
			r.delivered(span, msgs[span.First-d.Offset])
		}
		r.c.tell(func() { r.from.deliver(r, ranges) })
	}
}

// Active implements subscription.Stream.
func (r *consuming) Active(active bool) {
	if !active {
		r.held.Clear()
	}
}

// Stop implements subscription.Stream.
func (r *consuming) Stop(error) { r.c.tell(r.c.lose) }

// deliver is what arrives at the client: it decides about each message.
func (s *subscriber) deliver(r *consuming, ranges []cursor.Range) {
	w := s.m.w
	if s.c != r.c {
		return
	}
	s.since = w.now
	n := uint32(0)
	for _, span := range ranges {
		n += uint32(span.Len())
	}
	if s.sub == "" {
		for _, span := range ranges {
			s.next = max(s.next, span.End)
		}
		r.c.call(func() { r.permit(n) })
		return
	}
	w.after(w.between(0, s.think), func() {
		if s.c != r.c {
			return
		}
		var acks []cursor.Range
		var upTo entry.Offset
		for _, span := range ranges {
			for o := span.First; o < span.End; o++ {
				one := cursor.Range{First: o, End: o + 1}
				switch {
				case s.nacks > 0 && w.chance(s.nacks):
					delay := w.between(0, 3*time.Second)
					if w.chance(2) {
						delay = 0
					}
					r.c.call(func() { r.nack(delay, one) })
				case s.forgets > 0 && w.chance(s.forgets):
				case s.cumulative:
					upTo = o + 1
				default:
					acks = append(acks, one)
				}
			}
		}
		confirmed := w.chance(s.asks)
		r.c.call(func() {
			if len(acks) > 0 || upTo > 0 {
				r.ack(acks, upTo, confirmed)
			}
			r.permit(n)
		})
	})
}

// ack is an acknowledgement that arrives at the broker.
func (r *consuming) ack(ranges []cursor.Range, upTo entry.Offset, confirmed bool) {
	v, gen := r.view, r.of
	all := slices.Clone(ranges)
	if upTo > 0 {
		all = append(all, cursor.Range{End: upTo})
	}
	var done func(error)
	if confirmed {
		done = func(err error) {
			if err == nil {
				v.confirmed(gen, all)
			}
		}
	}
	v.sync()
	v.trace("%s acknowledges %v, generation %d, to be confirmed: %v", r.from.name, all, gen.number, confirmed)
	// What is applied is known before done may be called.
	may := gen == v.gen
	if may {
		v.applies(gen, all)
	}
	if err := r.consumer.Ack(ranges, upTo, done); err == nil && may {
		v.acked(all)
	} else if err == nil && !v.t.deleting {
		v.t.m.w.fail("generation", v.t.subject(), "an acknowledgement of generation %d of %s is taken in generation %d", gen.number, v.g.name, v.gen.number)
	}
}

// nack is what a consumer gives back, as it arrives at the broker.
func (r *consuming) nack(delay time.Duration, one cursor.Range) {
	v := r.view
	v.sync()
	v.nacked(r, one, delay)
	r.consumer.Nack(delay, []cursor.Range{one})
}

// administer moves and deletes subscriptions.
func (m *messaging) administer() {
	w := m.w
	if m.healing || w.ending {
		return
	}
	w.after(calmer(w, w.between(200*time.Millisecond, 4*time.Second), 5), m.administer)
	if w.chance(2) && len(m.conns) > 0 && !w.healed {
		if c := pick(w.kernel, m.conns); !c.over {
			c.cut()
		}
	}
	s := pick(w.kernel, m.subscribers)
	if s.sub == "" {
		return
	}
	c := m.dial("admin", func() {})
	if c == nil {
		return
	}
	remove, how := w.chance(6), w.rng.IntN(5)
	if m.deletes && w.chance(5) {
		name := m.names[s.topic]
		c.call(func() { c.b.sched.Go(func() { m.deleteTopic(c, name) }) })
		w.after(25*time.Second, c.leave)
		return
	}
	c.call(func() {
		b := m.at[c.b]
		if b == nil || b.life != c.life || b.closed || b.topic(s.topic) == nil {
			return
		}
		c.b.sched.Go(func() {
			st := b.topic(s.topic)
			if st == nil {
				return
			}
			ctx, cancel := c.b.sched.WithTimeout(b.ctx, w.between(0, 5*time.Second))
			defer cancel()
			sub, err := st.set.Get(ctx, s.sub)
			if err != nil {
				return
			}
			v := st.view(sub)
			if remove {
				v.remove(ctx)
			} else {
				v.seek(ctx, how)
			}
		})
	})
	w.after(6*time.Second, c.leave)
}
