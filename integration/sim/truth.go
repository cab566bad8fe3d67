package sim

import (
	"context"
	"encoding/binary"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	product "github.com/penstock-mq/penstock/pkg/topic"
)

// message is one message that a producer made.
type message struct {
	number      uint64
	t           *dataTopic
	producer    string
	incarnation rank
	dedup       bool
	seq         uint64
	level       ledger.AckLevel
	// attempts were taken in by a broker, and not told to have stored nothing.
	attempts int
	acked    bool // told to be stored, and so to be found
	copies   int  // in ledgers that are closed
}

// truth is what a topic consists of: what lies in its closed ledgers, which cannot change any more, and what was said of
// offsets beyond.
type truth struct {
	numbers map[uint64]*message
	order   []*message
	log     []*message // by offset
	times   []int64    // broker times
	claims  map[entry.Offset]claim
	run     entry.LedgerID // the last one that is in log
	newest  map[string]*message
	letIn   map[string]rank   // the newest incarnations
	made    map[string]uint64 // the highest sequence, by producer
	subs    map[string]*subGhost
	opened  entry.Epoch // of the newest owner that has read them
	trims   []trimGhost
	start   entry.Offset // what is not trimmed
}

// claim is what somebody was told of an offset.
type claim struct {
	*message
	acked bool // a producer; a consumer else
}

// trimGhost is what was trimmed, and when whoever did it began.
type trimGhost struct {
	end   entry.Offset
	began int64
}

func (t *truth) init() {
	t.numbers, t.claims = map[uint64]*message{}, map[entry.Offset]claim{}
	t.newest, t.made, t.subs = map[string]*message{}, map[string]uint64{}, map[string]*subGhost{}
	t.letIn = map[string]rank{}
}

func (t *dataTopic) subject() subject { return subject{topic: t.m.tp.index + 1} }

func (t *dataTopic) about(msg *message) subject {
	return subject{topic: t.m.tp.index + 1, number: msg.number}
}

func (t *dataTopic) newMessage(p *producer, seq uint64) *message {
	w := t.m.w
	w.numbers++
	msg := &message{number: w.numbers, t: t, producer: p.name, incarnation: p.rank, dedup: p.dedup, seq: seq, level: p.level}
	t.numbers[msg.number] = msg
	t.made[p.name] = max(t.made[p.name], seq)
	t.order = append(t.order, msg)
	w.tally[pending]++
	w.trace(p.name, t.about(msg), "makes %d: sequence %d of incarnation %d", msg.number, seq, p.incarnation)
	return msg
}

// acknowledged is the broker's word that a message is stored, which is to be believed of levels from the quorum on, and of a duplicate.
func (msg *message) acknowledged(level ledger.AckLevel, duplicate bool) {
	if level == ledger.AckQuorum || level == ledger.AckAll || duplicate && level != ledger.AckNone && level != ledger.AckOne {
		msg.acked = true
	}
}

// claim notes what somebody is told to be at an offset, and holds it against what is known.
func (t *dataTopic) claim(o entry.Offset, msg *message, acked bool, who string) {
	if t.deleting {
		return
	}
	invariant, verb := "4", "is delivered"
	if acked {
		invariant, verb = "I1", "is acknowledged"
	}
	if o < entry.Offset(len(t.log)) {
		if is := t.log[o]; is != msg {
			t.m.w.fail(invariant, t.about(msg), "message %d %s at offset %d of %s by %s, where %d is", msg.number, verb, o, t.name, who, is.number)
		}
		return
	}
	before, ok := t.claims[o]
	switch {
	case !ok:
		t.claims[o] = claim{msg, acked}
	case before.message != msg:
		t.m.w.fail(invariant, t.about(msg), "message %d %s at offset %d of %s by %s, of which it was told to be %d", msg.number, verb, o, t.name, who, before.number)
	case acked:
		t.claims[o] = claim{msg, true}
	}
}

// read holds a frame that somebody is given against what was sent. skip is what of it is not meant for them. It returns the
// messages.
func (t *dataTopic) read(base entry.Offset, b []byte, skip []cursor.Range, who string) []*message {
	msgs := t.parse(b, base)
	for i, msg := range msgs {
		o := base + entry.Offset(i)
		if !slices.ContainsFunc(skip, func(r cursor.Range) bool { return r.Contains(o) }) {
			t.claim(o, msg, false, who)
		}
	}
	return msgs
}

// parse returns the messages of a frame.
func (t *dataTopic) parse(b []byte, base entry.Offset) []*message {
	w := t.m.w
	f, err := frame.Parse(b, frame.DefaultLimits())
	if err != nil {
		w.fail("I4", t.subject(), "what is at offset %d of %s is no frame: %v", base, t.name, err)
		return nil
	}
	var msgs []*message
	for got, err := range f.Messages(f.Payload) {
		if err != nil || len(got.Value) < 8 {
			w.fail("I4", t.subject(), "what is at offset %d of %s is no message: %v", base, t.name, err)
			return nil
		}
		msg := t.numbers[binary.BigEndian.Uint64(got.Value)]
		if msg == nil || msg.producer != string(f.Producer) || msg.seq != got.Sequence {
			w.fail("I4", t.subject(), "what is at offset %d of %s was never sent there", base, t.name)
			return nil
		}
		msgs = append(msgs, msg)
	}
	return msgs
}

// chainChanged looks at what a transaction did to a chain of the kind's.
func (m *messaging) chainChanged(actor *broker, id meta.ChainID) {
	for _, t := range m.all {
		if t.chain != id {
			continue
		}
		if t.deleting {
			m.chainEnds(t)
			continue
		}
		rec, err := m.w.checker.GetChain(context.Background(), id)
		if err != nil {
			m.w.fail("15", t.subject(), "chain of %s: %v", t.name, err)
			return
		}
		for _, run := range rec.Runs {
			if run.Closed && run.Ledger > t.run {
				t.settle(run)
			}
		}
		start := rec.NextOffset
		if len(rec.Runs) > 0 {
			start = rec.Runs[0].First
		}
		if start > t.start {
			t.start = start
			trim := trimGhost{end: start, began: int64(m.w.now)}
			if s := m.at[actor]; s != nil && s.topics[t] != nil {
				trim.began = int64(s.topics[t].trimming)
			}
			t.trims = append(t.trims, trim)
			m.w.provokeTrim(actor)
		}
	}
}

// settle adds a closed ledger to what the topic consists of.
func (t *dataTopic) settle(run meta.Run) {
	w := t.m.w
	t.run = run.Ledger
	if run.First != entry.Offset(len(t.log)) {
		w.fail("20", ledgerSubject(run.Ledger), "ledger %d of %s begins at offset %d, the one before ended at %d", run.Ledger, t.name, run.First, len(t.log))
		return
	}
	l := w.ghost.ledger(run.Ledger).record
	for e := entry.EntryID(0); e <= l.Last; e++ {
		s := entrySubject(run.Ledger, e)
		env, b, err := frame.ParseEnvelope(w.ghost.bodies[entryKey{run.Ledger, e}].whole)
		if err != nil || env.Base != entry.Offset(len(t.log)) {
			w.fail("20", s, "%d:%d of %s has offset %d, before it lie %d; error %v", run.Ledger, e, t.name, env.Base, len(t.log), err)
			return
		}
		msgs := t.parse(b, env.Base)
		if len(msgs) != int(env.Span) {
			w.fail("20", s, "%d:%d of %s has %d messages and %d offsets", run.Ledger, e, t.name, len(msgs), env.Span)
			return
		}
		for _, msg := range msgs {
			o := entry.Offset(len(t.log))
			w.trace("sim", subject{ledger: uint64(run.Ledger), entry: int64(e), number: msg.number, topic: t.m.tp.index + 1}, "%d:%d of %s has offset %d, message %d", run.Ledger, e, t.name, o, msg.number)
			if n := len(t.times); o > t.start && env.BrokerTime < t.times[n-1] { // of what is trimmed nobody remembers the time
				w.fail("20", s, "broker times of %s fall at offset %d", t.name, o)
			}
			t.log, t.times = append(t.log, msg), append(t.times, env.BrokerTime)
			t.stored(msg, o)
			if c, ok := t.claims[o]; ok {
				delete(t.claims, o)
				t.claim(o, c.message, c.acked, "somebody")
			}
		}
	}
	if run.End != entry.Offset(len(t.log)) {
		w.fail("20", ledgerSubject(run.Ledger), "ledger %d of %s ends at offset %d, its entries at %d", run.Ledger, t.name, run.End, len(t.log))
	}
}

// stored holds a message that is there for good against its producer's others.
func (t *dataTopic) stored(msg *message, o entry.Offset) {
	w, s := t.m.w, t.about(msg)
	msg.copies++
	switch {
	case msg.dedup && msg.copies > 1:
		w.fail("I3", s, "message %d of %s is stored twice, the second time at offset %d", msg.number, msg.producer, o)
	case msg.copies > msg.attempts:
		w.fail("19", s, "message %d is at offset %d, and was told not to be stored: %d attempts, %d copies", msg.number, o, msg.attempts, msg.copies)
	}
	if msg.copies > 1 {
		return
	}
	before := t.newest[msg.producer]
	t.newest[msg.producer] = msg
	if before == nil {
		before = &message{}
	}
	sure := msg.level == ledger.AckQuorum || msg.level == ledger.AckAll
	switch {
	case !msg.dedup && before.incarnation != msg.incarnation: // without deduplication only its owner keeps an older one out
	case msg.incarnation.before(before.incarnation):
		w.fail("I2", s, "message %d of incarnation %v of %s comes after one of incarnation %v", msg.number, msg.incarnation, msg.producer, before.incarnation)
	case before.incarnation.before(msg.incarnation):
		if msg.dedup && before.t != nil && msg.seq <= before.seq {
			w.fail("I3", s, "message %d of %s has sequence %d, %d is stored already", msg.number, msg.producer, msg.seq, before.seq)
		}
	case msg.seq < before.seq || sure && msg.seq != before.seq+1:
		w.fail("I2", s, "message %d of %s, sequence %d, comes after sequence %d", msg.number, msg.producer, msg.seq, before.seq)
	}
}

// took notes that a topic took a batch in.
func (st *servedTopic) took(u *publisher, b *sendBatch) {
	if newest := st.newestOf(u.from); u.from.rank.before(newest) && !st.t.deleting {
		st.t.m.w.fail("fencing", st.t.about(b.messages[0]), "%s takes %d of %s incarnation %d, %v, after %v was let in",
			st.s.b.name, b.first, u.from.name, u.from.incarnation, u.from.rank, newest)
	}
}

// attempts counts those of new incarnations of a name. They fence older ones before they are let in.
type attempts struct {
	underWay, ended int
}

// others reports whether there was one of somebody else since the last one of p.
func (a *attempts) others(p *producer) bool { return a.underWay > p.asking || a.ended > p.heard }

// attempt notes that a producer asks to be let in, as a new incarnation or not. It returns what to call afterwards.
func (st *servedTopic) attempt(p *producer, fresh bool) (ended func(letIn bool)) {
	a := st.s.m.attempts[p.name]
	if a == nil {
		a = new(attempts)
		st.s.m.attempts[p.name] = a
	}
	if !fresh {
		return func(bool) {}
	}
	if !p.asked { // later requests are for the same incarnation
		p.asked, p.heard = true, a.ended
	}
	a.underWay++
	p.asking++
	return func(letIn bool) {
		a.underWay--
		p.asking--
		a.ended++
		if p.heard++; letIn {
			p.heard = a.ended // it is above all those
		}
	}
}

// opened notes that a producer was let in.
func (st *servedTopic) opened(p *producer, epoch uint64) {
	t := st.t
	if p.letBy != t || epoch>>product.GenerationShift != p.given>>product.GenerationShift {
		t.m.lets++
		if r := (rank{st.s.guard.Epoch, t.m.lets}); p.letBy != t || p.rank.before(r) {
			p.rank = r
		}
	}
	p.given, p.letBy = epoch, t
	t.m.w.trace(st.s.b.name, p.subject(), "lets %s incarnation %d in as %v", p.name, p.incarnation, p.rank)
	newest := st.newestOf(p)
	if p.rank.before(newest) && !t.deleting {
		t.m.w.fail("fencing", p.subject(), "%s lets %s incarnation %d, %v, in after %v was", st.s.b.name, p.name, p.incarnation, p.rank, newest)
	}
	if newest = st.newest[p.name]; newest.before(p.rank) {
		st.newest[p.name] = p.rank
	}
	if newest = t.letIn[p.name]; newest.before(p.rank) {
		t.letIn[p.name] = p.rank
	}
}

// closed notes that a producer left. Without deduplication, an owner remembers no incarnation that has: one that it had
// superseded may come back.
func (st *servedTopic) closed(u *publisher) {
	if name := u.from.name; st.present[name] == u {
		delete(st.present, name)
		if !u.from.dedup {
			delete(st.newest, name)
		}
	}
}

// newestOf returns the newest incarnation of a producer's name that a topic's owner must know of: those that it let in itself,
// and with deduplication those that an earlier one did.
func (st *servedTopic) newestOf(p *producer) rank {
	if newest := st.t.letIn[p.name]; p.dedup && newest.owner <= st.s.guard.Epoch {
		return newest
	}
	return st.newest[p.name]
}

// finished is the topic's word on a batch that it took in.
func (st *servedTopic) finished(u *publisher, b *sendBatch, r product.Receipt, err error) {
	t, w := st.t, st.t.m.w
	o := outcomeOf(err)
	w.tally[o] += len(b.messages)
	w.trace(st.s.b.name, subject{topic: t.m.tp.index + 1, number: b.messages[0].number},
		"%s: %s of %s, sequences %d to %d, offset %d, duplicate %v: outcome %d", t.name, u.from.level, u.from.name, b.first, b.last, r.Offset, r.Duplicate, o)
	for i, msg := range b.messages {
		switch {
		case o == notWritten, o == stored && r.Duplicate:
			msg.attempts--
		}
		if o != stored {
			continue
		}
		msg.acknowledged(u.from.level, r.Duplicate)
		if i == 0 && msg.acked && !r.Duplicate {
			w.ghost.confirms(st.s.b, r.Position.Ledger, r.Position.Entry)
		}
		if msg.acked && r.Position.Ledger != 0 {
			t.claim(r.Offset+entry.Offset(i), msg, true, st.s.b.name)
		}
	}
}

// check holds what is in the end against what was said.
func (m *messaging) check(*topic) {
	w := m.w
	for _, t := range m.topics {
		if t.deleting {
			continue
		}
		rec, err := w.checker.GetChain(context.Background(), t.chain)
		if err != nil {
			w.fail("I1", t.subject(), "chain of %s: %v", t.name, err)
			return
		}
		for _, run := range rec.Runs {
			if !w.checkClosed(run) {
				return
			}
			l := w.ghost.ledger(run.Ledger).record
			for e := entry.EntryID(0); e <= l.Last; e++ {
				if !w.onDisk(l, e) {
					return
				}
			}
		}
		for _, o := range slices.Sorted(maps.Keys(t.claims)) {
			c := t.claims[o]
			w.fail("4", t.about(c.message), "message %d was told to be at offset %d of %s, which ends at %d", c.number, o, t.name, len(t.log))
			return
		}
		for _, msg := range t.order {
			if msg.acked && msg.copies == 0 {
				w.fail("I1", t.about(msg), "message %d of %s was acknowledged, and is nowhere in %s", msg.number, msg.producer, t.name)
				return
			}
		}
	}
}
