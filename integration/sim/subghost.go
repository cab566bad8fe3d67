package sim

import (
	"cmp"
	"context"
	"encoding/binary"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/subscription"
)

// subGhost is what was said of one subscription.
type subGhost struct {
	t        *dataTopic
	name     string
	uuid     entry.UUID // tells it from others of its name; zero: nobody has seen it yet
	created  bool       // for sure
	ensured  bool       // somebody asked for it
	removing bool       // somebody asked for its removal, whose outcome is not known
	gens     map[cursor.Generation]*genGhost
	sure     cursor.Generation // the highest that is durable by the broker's word
	newest   *view
}

// genGhost is one generation: what was acknowledged since the subscription was moved to base.
type genGhost struct {
	number    cursor.Generation
	base      entry.Offset
	since     int64           // simulated time
	applied   cursor.RangeSet // by any owner
	confirmed cursor.RangeSet
}

// view is a subscription at a broker that has loaded it.
type view struct {
	t         *dataTopic
	st        *servedTopic
	g         *subGhost
	sub       *subscription.Subscription
	gen       *genGhost
	has       cursor.RangeSet // what is acknowledged, above base
	early     map[entry.Offset]time.Duration
	consumers []*consuming
}

// seekGhost is a move that somebody asked for.
type seekGhost struct {
	to  entry.Offset
	gen *genGhost // that it began
}

func (t *dataTopic) sub(name string) *subGhost {
	g := t.subs[name]
	if g == nil {
		g = t.newSub(name)
		t.subs[name] = g
	}
	return g
}

func (t *dataTopic) newSub(name string) *subGhost {
	return &subGhost{t: t, name: name, gens: map[cursor.Generation]*genGhost{}}
}

// ensuring notes that a subscription is asked for: it may exist from now on.
func (t *dataTopic) ensuring(name string) { t.sub(name).ensured = true }

// outdated reports whether a later owner than st's has read the subscriptions: nothing that st does to them lasts.
func (st *servedTopic) outdated() bool { return st.t.opened > st.s.guard.Epoch }

// view returns the ghost's side of a subscription.
func (st *servedTopic) view(sub *subscription.Subscription) *view {
	if v := st.views[sub.Name()]; v != nil && v.sub == sub {
		return v
	}
	return st.see(sub) // it was made, or read again after a removal that failed
}

// see begins the ghost's side of a subscription that somebody has just made, or read.
func (st *servedTopic) see(sub *subscription.Subscription) *view {
	t, n := st.t, sub.Generation()
	g := t.sub(sub.Name())
	v := &view{t: t, st: st, sub: sub, early: map[entry.Offset]time.Duration{}}
	st.views[sub.Name()] = v
	switch known := g.uuid; {
	case known == sub.UUID():
	case st.outdated(): // it is gone since, or never lasted
		g = t.newSub(sub.Name())
	case known != entry.UUID{}:
		if g.created && !g.removing {
			v.g = g
			v.fail("I7", "it is another one than was made, which nobody removed")
		}
		g = t.newSub(sub.Name())
		g.ensured = true
		t.subs[g.name] = g
	}
	g.uuid, v.g, v.gen = sub.UUID(), g, g.gens[n]
	if st.outdated() { // who was replaced reads what was, and changes nothing any more
		v.gen = &genGhost{number: n, base: sub.Floor()}
		v.read()
		return v
	}
	switch {
	case !g.ensured:
		v.fail("I7", "it is there, and was removed, or never made")
	case n < g.sure:
		v.fail("I6", "it is in generation %d, a seek that made it %d was confirmed", n, g.sure)
	case v.gen == nil && n > 0:
		v.fail("I6", "it is in generation %d, which no seek made", n)
	}
	if v.gen == nil {
		v.gen = &genGhost{number: n, base: sub.Floor(), since: int64(st.s.m.w.now)}
		g.gens[n] = v.gen
	}
	for m := range g.gens {
		if m > n {
			delete(g.gens, m) // these seeks did not last
		}
	}
	g.newest = v
	missing := v.read()
	v.checkLoaded(&missing)
	return v
}

func (v *view) fail(invariant, format string, args ...any) {
	if v.t.deleting {
		return
	}
	v.t.m.w.fail(invariant, v.t.subject(), "%s of %s at %s: "+format, append([]any{v.g.name, v.t.name, v.st.s.b.name}, args...)...)
}

func (v *view) trace(format string, args ...any) {
	v.t.m.w.trace(v.st.s.b.name, v.t.subject(), "%s of %s: "+format, append([]any{v.g.name, v.t.name}, args...)...)
}

// loaded holds what a new owner has read of the subscriptions against what was promised.
func (st *servedTopic) loaded(subs []*subscription.Subscription) {
	t, w := st.t, st.t.m.w
	t.opened = max(t.opened, st.s.guard.Epoch)
	for _, name := range slices.Sorted(maps.Keys(t.subs)) {
		g := t.subs[name]
		found := slices.ContainsFunc(subs, func(s *subscription.Subscription) bool { return s.Name() == g.name })
		if g.created && !g.removing && !found && !st.outdated() {
			w.fail("I7", t.subject(), "%s of %s is gone at %s", g.name, t.name, st.s.b.name)
		}
	}
	for _, sub := range subs {
		if v := st.see(sub); !st.outdated() {
			v.g.removing = false
		}
	}
}

// read notes what was loaded, and returns what is not acknowledged.
func (v *view) read() cursor.RangeSet {
	end := v.st.log.Next()
	var missing cursor.RangeSet
	for _, r := range v.sub.Missing(nil, cursor.Range{End: end}) {
		missing.Add(r)
	}
	at := entry.Offset(0)
	has := func(upTo entry.Offset) {
		if upTo > at {
			v.has.Add(cursor.Range{First: at, End: upTo})
		}
	}
	for r := range missing.All() {
		has(r.First)
		at = r.End
	}
	has(max(end, v.sub.Floor()))
	v.trace("loaded, generation %d, floor %d, %d of %d acknowledged", v.gen.number, v.sub.Floor(), v.has.Offsets(), end)
	return missing
}

func (v *view) checkLoaded(missing *cursor.RangeSet) {
	g := v.gen
	if first, ok := missing.First(); ok && first.First < g.base {
		v.fail("I6", "offset %d is not acknowledged, it was moved to %d", first.First, g.base)
	}
	for r := range g.confirmed.All() {
		for lost := range missing.Within(r) {
			v.fail("I7", "offsets %v were acknowledged, confirmed, and are not any more", lost)
		}
	}
	left := cursor.RangeSet{}
	for r := range v.has.All() {
		left.Add(r)
	}
	left.Remove(cursor.Range{End: g.base})
	for r := range g.applied.All() {
		left.Remove(r)
	}
	if r, ok := left.First(); ok {
		v.fail("phantom-ack", "offsets %v are acknowledged, by nobody", r)
	}
	// What is trimmed was acknowledged before, or nobody's yet.
	from := entry.Offset(0)
	for _, trim := range v.t.trims {
		for r := range missing.Within(cursor.Range{First: max(from, g.base), End: trim.end}) {
			if g.since < trim.began {
				v.fail("trim", "offsets %v are trimmed, and were not acknowledged", r)
			}
		}
		from = trim.end
	}
}

// ensured notes that the subscription is there for good.
func (v *view) ensured(created bool) {
	if created {
		v.trace("created at offset %d", v.sub.Floor())
	}
	if v.g.newest == v {
		v.g.created = true
	}
}

// genOf returns the generation that a consumer was told.
func (v *view) genOf(incarnation []byte) *genGhost {
	n := cursor.Generation(binary.BigEndian.Uint32(incarnation[16:]))
	if g := v.g.gens[n]; g != nil && v.gen.number != n {
		return g
	}
	return v.gen
}

// sync holds the subscription's generation against its moves: each is seen as soon as it happens.
func (v *view) sync() {
	if n := v.sub.Generation(); n != v.gen.number {
		v.fail("I6", "it is in generation %d, and nobody moved it since generation %d", n, v.gen.number)
	}
}

// moves looks whether a move has just happened, which is before it is confirmed. A move below what was trimmed goes to what
// is left.
func (v *view) moves(s *seekGhost) {
	n := v.sub.Generation()
	if n == v.gen.number {
		return
	}
	base := v.sub.Floor() // nothing was acknowledged since
	switch left := v.st.log.Earliest(); {
	case s.gen != nil || n != v.gen.number+1:
		v.fail("I6", "a move to %d takes it from generation %d to %d", s.to, v.gen.number, n)
	case base != max(s.to, left) || left > v.t.start:
		v.fail("seek", "it is to be moved to %d, and is at %d; the topic begins at %d", s.to, base, left)
	}
	s.gen = &genGhost{number: n, base: base, since: int64(v.t.m.w.now)}
	v.gen = s.gen
	if v.g.newest == v {
		v.g.gens[n] = s.gen
	}
	v.has = cursor.RangeSet{}
	v.has.Add(cursor.Range{End: base})
	clear(v.early)
	v.trace("moved to %d, generation %d", base, n)
}

// applies notes acknowledgements that may be found from now on.
func (v *view) applies(g *genGhost, ranges []cursor.Range) {
	for _, r := range ranges {
		g.applied.Add(r)
	}
}

// acked notes acknowledgements that were taken in.
func (v *view) acked(ranges []cursor.Range) {
	for _, r := range ranges {
		v.has.Add(r)
		for _, c := range v.consumers {
			c.held.Remove(r)
		}
	}
}

// expire has what lies below an offset expire. That is noted first, as it is applied before the call returns; one that is
// refused, for instance while the subscription is being deleted, is refused at once and leaves what was.
func (v *view) expire(upTo entry.Offset) error {
	v.sync()
	if upTo > v.sub.Floor() {
		v.trace("what lies below %d expires", upTo)
	}
	below := cursor.Range{End: upTo}
	gen, consumers := v.gen, slices.Clone(v.consumers)
	unapplied, left := slices.Collect(missingOf(&gen.applied, below)), slices.Collect(missingOf(&v.has, below))
	held := make([][]cursor.Range, len(consumers))
	for i, c := range consumers {
		held[i] = slices.Collect(c.held.Within(below))
	}
	v.applies(gen, []cursor.Range{below})
	v.acked([]cursor.Range{below})
	err := v.sub.Expire(upTo)
	if err == nil {
		return nil
	}
	for _, r := range unapplied {
		gen.applied.Remove(r)
	}
	for _, r := range left {
		v.has.Remove(r)
	}
	for i, c := range consumers {
		c.held.AddAll(held[i])
	}
	return err //nolint:wrapcheck // it says what failed
}

// confirmed is the broker's word that acknowledgements are durable.
func (v *view) confirmed(g *genGhost, ranges []cursor.Range) {
	for _, r := range ranges {
		g.confirmed.Add(r)
		n := v.g.newest
		if n == nil || n == v || n.gen != g {
			continue
		}
		for lost := range missingOf(&n.has, r) {
			v.fail("I7", "offsets %v are confirmed to be acknowledged, and the next owner has not read that", lost)
		}
	}
}

// missingOf yields what of r is not in s.
func missingOf(s *cursor.RangeSet, r cursor.Range) iter.Seq[cursor.Range] {
	return func(yield func(cursor.Range) bool) {
		at := r.First
		for part := range s.Within(r) {
			if part.First > at && !yield(cursor.Range{First: at, End: part.First}) {
				return
			}
			at = part.End
		}
		if at < r.End {
			yield(cursor.Range{First: at, End: r.End})
		}
	}
}

// delivered holds a delivery against what is acknowledged, and in whose hands.
func (r *consuming) delivered(span cursor.Range, msg *message) {
	v := r.view
	w := r.st.t.m.w
	if v == nil {
		if span.First > r.next && span.First > r.st.t.start && !r.st.t.deleting {
			w.fail("I2", r.st.t.about(msg), "a reader of %s is given offset %d after %d", r.st.t.name, span.First, r.next)
		}
		r.next = span.End
		return
	}
	v.sync()
	if r.of != v.gen {
		return // it is about to be told to come again
	}
	for acked := range v.has.Within(span) {
		v.fail("I7", "offsets %v are delivered, and acknowledged", acked)
	}
	for _, c := range v.consumers {
		if c.of != v.gen {
			continue
		}
		for twice := range c.held.Within(span) {
			v.fail("shared-out", "offsets %v are delivered to %s, and in the hands of %s", twice, r.from.name, c.from.name)
		}
	}
	for o := span.First; o < span.End; o++ {
		if at, ok := v.early[o]; ok {
			if w.now < at {
				v.fail("delay", "offset %d is delivered %v before its time", o, at-w.now)
			}
			delete(v.early, o)
		}
	}
	if r.from.kind != subscription.Shared {
		for left := range missingOf(&v.has, cursor.Range{First: r.st.t.start, End: span.First}) {
			for before := range missingOf(&r.held, left) {
				v.fail("I2", "offset %d is delivered to %s before %v", span.First, r.from.name, before)
				return
			}
		}
	}
	r.held.Add(span)
}

// nacked notes what is given back.
func (v *view) nacked(r *consuming, one cursor.Range, delay time.Duration) {
	if r.of != v.gen {
		return
	}
	held := false
	for range r.held.Within(one) {
		held = true
	}
	if !held || v.replaced(r) {
		return
	}
	if delay > 0 {
		v.early[one.First] = v.t.m.w.now + delay
	}
	if r.from.kind != subscription.Shared {
		one.End = ^entry.Offset(0)
	}
	r.held.Remove(one)
}

// replaced reports whether another consumer of a Failover subscription is the active one in r's place, which r need not
// have heard yet: what it held was given back as that one came, without a delay.
func (v *view) replaced(r *consuming) bool {
	if r.from.kind != subscription.Failover {
		return false
	}
	first := slices.MinFunc(v.consumers, func(a, b *consuming) int { // the first of equals is who came first
		return cmp.Or(cmp.Compare(a.from.priority, b.from.priority), cmp.Compare(a.from.name, b.from.name))
	})
	return first != r
}

// left notes that a consumer is gone.
func (v *view) left(r *consuming) {
	r.held.Clear()
	v.consumers = slices.DeleteFunc(v.consumers, func(c *consuming) bool { return c == r })
}

// seek moves the subscription.
func (v *view) seek(ctx context.Context, how int) {
	log, t, w := v.st.log, v.t, v.t.m.w
	var to entry.Offset
	switch how {
	case 0:
		to = log.Earliest()
	case 1:
		to = log.Next()
	case 2:
		to = entry.Offset(w.rng.Uint64N(uint64(log.Next()) + 1))
	case 3:
		at := w.clock().Add(-w.between(0, 20*time.Second)).UnixMilli()
		known := log.Next() // who was replaced does not know of more
		var err error
		if to, err = log.OffsetAt(ctx, at); err != nil {
			return
		}
		for o := t.start; o < min(known, entry.Offset(len(t.times))); o++ {
			if o < to != (t.times[o] < at) && to > t.start {
				v.fail("seek", "offset %d was stored at %d; from time %d on it begins at offset %d", o, t.times[o], at, to)
				break
			}
		}
	case 4:
		o := entry.Offset(w.rng.Uint64N(uint64(log.Next()) + 1))
		at, err := log.PositionOf(ctx, o)
		if err != nil {
			return
		}
		if to, err = log.OffsetOf(ctx, at); err != nil {
			return
		}
		if o >= log.Earliest() && to != o {
			v.fail("seek", "offset %d is at %v, which is at offset %d", o, at, to)
		}
	}
	s := &seekGhost{to: to}
	v.trace("is to be moved to %d", to)
	w.running.after = func() { v.moves(s) }
	err := v.sub.Seek(ctx, to)
	v.moves(s)
	w.running.after = nil
	if err != nil {
		return
	}
	if s.gen == nil {
		v.fail("seek", "it was moved to %d, and is not", to)
		return
	}
	if n := v.g.newest; n != nil && n != v && n.gen.number < s.gen.number {
		v.fail("I6", "a move to %d is confirmed, and the next owner has not read that", to)
	}
	v.g.sure = max(v.g.sure, s.gen.number)
	v.trace("moved to %d, confirmed", to)
}

// remove removes the subscription.
func (v *view) remove(ctx context.Context) {
	g := v.g
	v.trace("is to be removed")
	g.removing = true
	err := v.st.set.Remove(ctx, g.name, true)
	v.trace("removed: error %v", err != nil)
	if err == nil && v.t.subs[g.name] == g && (g.newest == v || g.newest == nil) {
		g.created = false
		if !v.st.outdated() { // else somebody may have asked a later owner for it since
			g.ensured = false
			delete(v.t.subs, g.name)
		}
	}
}
