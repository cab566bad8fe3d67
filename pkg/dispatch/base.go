package dispatch

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// consumer is a connected consumer.
type consumer struct {
	Consumer
	permits     int64
	outstanding cursor.RangeSet // delivered, neither acknowledged nor given back
}

// base is what the types have in common: consumers, the read position, the read in flight, counts.
type base struct {
	cfg       Config
	noAcks    bool        // a reader's: nothing is outstanding
	consumers []*consumer // in order of arrival
	unacked   uint64      // outstanding of all
	loaded    bool

	generation cursor.Generation // of the cursor when it was loaded or moved last

	pos, end entry.Offset // the next offset to read for the first time; the topic's end
	ready    queue        // read for the first time, not sent

	// Redeliveries; the ordered types have none, they go back instead. Neither overlaps what is outstanding.
	replay  queue           // read again, not sent; still in due
	due     cursor.RangeSet // to be delivered again now
	delayed delayQueue      // to be delivered again later
	ahead   cursor.RangeSet // redeliveries from before a restart: reading for the first time passes over them

	counts  cursor.RangeMap[uint32] // deliveries so far, of what was given back
	retries []Retry                 // to be handed out
	notices []Action

	readID     uint64
	reading    *ReadRequest
	readBuffer ReadRequest
	ackedSince cursor.RangeSet // acknowledged since the read in flight began
	failures   int
	failure    error
	retryAt    time.Time

	sent     []Delivery // handed out by the last Next
	notified []Retry
}

// item is an entry that waits to be sent; deliver is what of it is meant for the consumer, nil for all.
type item struct {
	Entry
	deliver []cursor.Range
}

func (it *item) messages() uint64 {
	if it.deliver == nil {
		return uint64(it.Span)
	}
	n := uint64(0)
	for _, r := range it.deliver {
		n += r.Len()
	}
	return n
}

// first is the first offset that is meant for the consumer.
func (it *item) first() entry.Offset {
	if it.deliver == nil {
		return it.Offset
	}
	return it.deliver[0].First
}

// subtract takes r away from what is to be delivered.
func (it *item) subtract(r cursor.Range) {
	own := it.Range()
	if r = r.Intersect(own); r.Empty() {
		return
	}
	old := it.deliver
	if old == nil {
		old = []cursor.Range{own}
	}
	left := make([]cursor.Range, 0, len(old)+1)
	for _, d := range old {
		for _, part := range []cursor.Range{{First: d.First, End: min(d.End, r.First)}, {First: max(d.First, r.End), End: d.End}} {
			if !part.Empty() {
				left = append(left, part)
			}
		}
	}
	it.deliver = left
}

// skips returns the complement of deliver.
func (it *item) skips() []cursor.Range {
	if it.deliver == nil {
		return nil
	}
	var skip []cursor.Range
	own := it.Range()
	at := own.First
	for _, d := range it.deliver {
		if d.First > at {
			skip = append(skip, cursor.Range{First: at, End: d.First})
		}
		at = d.End
	}
	if at < own.End {
		skip = append(skip, cursor.Range{First: at, End: own.End})
	}
	return skip
}

// queue holds items in order of offset, and counts them.
type queue struct {
	items    []item
	head     int
	bytes    int
	messages uint64
	filled   uint64 // messages when it was last filled: what is shared out
}

func (q *queue) empty() bool { return q.head == len(q.items) }

func (q *queue) push(it item) {
	q.items = append(q.items, it)
	q.bytes += len(it.Frame)
	q.messages += it.messages()
}

func (q *queue) front() *item { return &q.items[q.head] }

func (q *queue) pop() {
	it := &q.items[q.head]
	q.bytes -= len(it.Frame)
	q.messages -= it.messages()
	*it = item{}
	if q.head++; q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
}

func (q *queue) clear() {
	clear(q.items)
	*q = queue{items: q.items[:0]}
}

// subtract takes r away from everything in the queue.
func (q *queue) subtract(r cursor.Range) {
	held := q.items[q.head:]
	first := q.head + sort.Search(len(held), func(i int) bool { return held[i].Range().End > r.First })
	for i := first; i < len(q.items) && q.items[i].Offset < r.End; i++ {
		it := &q.items[i]
		q.messages -= it.messages()
		it.subtract(r)
		q.messages += it.messages()
		if len(it.deliver) == 0 {
			q.bytes -= len(it.Frame)
			q.items = slices.Delete(q.items, i, i+1)
			i--
		}
	}
	if q.empty() {
		q.items, q.head = q.items[:0], 0
	}
}

func (b *base) find(id ConsumerID) *consumer {
	for _, c := range b.consumers {
		if c.ID == id {
			return c
		}
	}
	return nil
}

// Permits implements [Core].
func (b *base) Permits(id ConsumerID, n uint32) {
	if c := b.find(id); c != nil {
		c.permits += int64(n)
	}
}

// Withdraw implements [Core].
func (b *base) Withdraw(id ConsumerID) uint64 {
	c := b.find(id)
	if c == nil || c.permits <= 0 {
		return 0
	}
	n := uint64(c.permits)
	c.permits = 0
	return n
}

// DataAvailable implements [Core].
func (b *base) DataAvailable(end entry.Offset) { b.end = max(b.end, end) }

// InFlight implements [Core].
func (b *base) InFlight() uint64 {
	if b.reading == nil {
		return 0
	}
	return b.reading.ID
}

// Buffered implements [Core].
func (b *base) Buffered() int { return b.ready.bytes + b.replay.bytes }

// Acked implements [Core].
func (b *base) Acked(g cursor.Generation, id ConsumerID, ranges ...cursor.Range) {
	if g != b.generation {
		return
	}
	for _, r := range ranges {
		b.acked(id, r)
	}
}

func (b *base) acked(id ConsumerID, r cursor.Range) {
	left := r.Len()
	if c := b.find(id); c != nil {
		n := c.outstanding.Remove(r)
		b.unacked -= n
		left -= n
	}
	if left > 0 && b.unacked > 0 {
		for _, c := range b.consumers {
			b.unacked -= c.outstanding.Remove(r)
		}
	}
	if b.counts.Len() > 0 {
		b.counts.Erase(r)
	}
	if !b.due.Empty() {
		b.due.Remove(r)
	}
	b.delayed.remove(r)
	if !b.ahead.Empty() {
		b.ahead.Remove(r)
	}
	if !b.ready.empty() {
		b.ready.subtract(r)
	}
	if !b.replay.empty() {
		b.replay.subtract(r)
	}
	if b.reading != nil {
		b.ackedSince.Add(r)
	}
	if r.Contains(b.pos) {
		b.pos = r.End // expired or evicted: there is nothing to read, so it need not wait for permits
	}
}

// SeekDone implements [Core].
func (b *base) SeekDone(g cursor.Generation, to entry.Offset) {
	if g <= b.generation {
		return
	}
	b.generation = g
	for _, c := range b.consumers {
		c.outstanding.Clear()
	}
	b.unacked = 0
	b.ready.clear()
	b.replay.clear()
	b.due.Clear()
	b.delayed.clear()
	b.ahead.Clear()
	b.counts.Clear()
	b.retries = nil
	b.abandonRead()
	b.pos = to
	b.failures, b.failure, b.retryAt = 0, nil, time.Time{}
}

// abandonRead makes the answer of the read in flight one to ignore.
func (b *base) abandonRead() {
	b.reading = nil
	b.ackedSince.Clear()
}

// ReadFailed implements [Core].
func (b *base) ReadFailed(id uint64, err error, now time.Time) {
	if b.reading == nil || b.reading.ID != id {
		return
	}
	b.abandonRead()
	b.failure = err
	pause := sched.Doubled(b.cfg.RetryMin, b.failures, b.cfg.RetryMax)
	b.failures++
	b.retryAt = now.Add(pause)
}

// EntriesRead implements [Core].
func (b *base) EntriesRead(r ReadResult, now time.Time) {
	if b.reading == nil || b.reading.ID != r.ID {
		return
	}
	req := *b.reading
	if len(r.Entries) == 0 && r.Next <= req.From {
		b.ReadFailed(r.ID, ErrNoProgress, now)
		return
	}
	for i := range r.Entries {
		it := item{Entry: r.Entries[i].Entry, deliver: r.Entries[i].Missing}
		for acked := range b.ackedSince.Within(it.Range()) {
			it.subtract(acked)
		}
		if req.Redelivery {
			b.keepDue(&it)
		} else {
			it.subtract(cursor.Range{End: b.pos})
			for taken := range b.ahead.Within(it.Range()) {
				it.subtract(taken)
			}
		}
		if it.deliver != nil && len(it.deliver) == 0 {
			continue
		}
		if req.Redelivery {
			b.replay.push(it)
		} else {
			b.ready.push(it)
		}
	}
	b.ready.filled, b.replay.filled = b.ready.messages, b.replay.messages
	if req.Redelivery {
		b.forgetDue(cursor.Range{First: req.From, End: r.Next})
	} else {
		b.pos = max(b.pos, r.Next)
	}
	b.abandonRead()
	b.failures, b.failure, b.retryAt = 0, nil, time.Time{}
}

// forgetDue takes out of due what of r was read and not found.
func (b *base) forgetDue(r cursor.Range) {
	at := r.First
	found := func(part cursor.Range) {
		b.due.Remove(cursor.Range{First: at, End: part.First})
		at = part.End
	}
	for i := b.replay.head; i < len(b.replay.items); i++ {
		it := &b.replay.items[i]
		if it.deliver == nil {
			found(it.Range())
		}
		for _, part := range it.deliver {
			found(part)
		}
	}
	b.due.Remove(cursor.Range{First: at, End: r.End})
}

// keepDue cuts what is to be delivered to what is due.
func (b *base) keepDue(it *item) {
	own := it.Range()
	at := own.First
	for r := range b.due.Within(own) {
		it.subtract(cursor.Range{First: at, End: r.First})
		at = r.End
	}
	it.subtract(cursor.Range{First: at, End: own.End})
}

// startRead returns the action that reads from..until.
func (b *base) startRead(from, until entry.Offset, redelivery bool) Action {
	b.readID++
	b.readBuffer = ReadRequest{ID: b.readID, From: from, Until: until, MaxBytes: b.cfg.ReadBytes, Redelivery: redelivery}
	b.reading = &b.readBuffer
	b.ackedSince.Clear()
	return Action{Kind: ActionRead, Read: b.readBuffer}
}

// blocked says why a consumer may not be sent anything; ReasonNone if it may.
func (b *base) blocked(c *consumer) Reason {
	switch {
	case c.permits <= 0:
		return ReasonNoPermits
	case b.cfg.MaxUnackedPerConsumer > 0 && c.outstanding.Offsets() >= b.cfg.MaxUnackedPerConsumer:
		return ReasonUnackedConsumer
	case b.cfg.MaxUnackedPerSubscription > 0 && b.unacked >= b.cfg.MaxUnackedPerSubscription:
		return ReasonUnackedSubscription
	}
	return ReasonNone
}

// room returns how many messages a consumer may be sent.
func (b *base) room(c *consumer) uint64 {
	if b.blocked(c) != ReasonNone {
		return 0
	}
	n := uint64(c.permits)
	if limit := b.cfg.MaxUnackedPerConsumer; limit > 0 {
		n = min(n, limit-c.outstanding.Offsets())
	}
	if limit := b.cfg.MaxUnackedPerSubscription; limit > 0 {
		n = min(n, limit-b.unacked)
	}
	return n
}

// drop forgets the entries that are held: they will be read again. Whoever waits holds no memory that another
// may wait for.
func (b *base) drop() {
	b.replay.clear() // what is in it is still due
	if !b.ready.empty() {
		b.pos = min(b.pos, b.ready.front().first())
		b.ready.clear()
	}
}

// send moves entries from a queue to a consumer: at least one, up to about most messages.
func (b *base) send(c *consumer, q *queue, most uint64) Action {
	b.sent = b.sent[:0]
	for n := uint64(0); n < most && !q.empty() && b.blocked(c) == ReasonNone; {
		it := q.front()
		d := Delivery{Entry: it.Entry, Skip: it.skips()}
		messages := it.messages()
		if it.deliver == nil {
			b.hand(c, q, it.Range(), &d)
		}
		for _, r := range it.deliver {
			b.hand(c, q, r, &d)
		}
		if !b.noAcks {
			b.unacked += messages
		}
		c.permits -= int64(messages)
		n += messages
		q.pop()
		b.sent = append(b.sent, d)
	}
	return Action{Kind: ActionSend, Consumer: c.ID, Deliveries: b.sent}
}

// hand puts a part of a delivery into the hands of a consumer.
func (b *base) hand(c *consumer, q *queue, r cursor.Range, d *Delivery) {
	if b.counts.Len() > 0 {
		for _, count := range b.counts.Within(r) {
			d.Redelivered = max(d.Redelivered, count)
		}
	}
	if !b.noAcks {
		c.outstanding.Add(r)
	}
	if q == &b.replay {
		b.due.Remove(r)
	}
}

// giveBack takes back what of r the consumer holds, counts it as delivered once more, and returns it.
func (b *base) giveBack(c *consumer, r cursor.Range, notBefore time.Time, why cursor.RetryReason) []cursor.Range {
	var held []cursor.Range
	for part := range c.outstanding.Within(r) {
		held = append(held, part)
	}
	for i := len(held) - 1; i >= 0; i-- { // from the end: a slice shrinks there for nothing
		b.unacked -= c.outstanding.Remove(held[i])
	}
	b.counts.Update(held, func(n uint32, _ bool) uint32 { return n + 1 })
	for _, part := range held {
		for r, n := range b.counts.Within(part) {
			b.retries = append(b.retries, Retry{Range: r, Count: n, NotBefore: notBefore, Reason: why})
		}
	}
	return held
}

// pending returns what has to be told before anything else.
func (b *base) pending() (Action, bool) {
	if len(b.notices) > 0 {
		a := b.notices[0]
		b.notices = b.notices[1:]
		return a, true
	}
	if len(b.retries) > 0 {
		b.notified, b.retries = b.retries, b.notified[:0]
		return Action{Kind: ActionRetries, Retries: b.notified, Generation: b.generation}, true
	}
	return Action{}, false
}

// gate is what all types wait for first.
func (b *base) gate() Reason {
	switch {
	case len(b.consumers) == 0:
		return ReasonNoConsumers
	case !b.loaded:
		return ReasonAckStateLoading
	case b.reading != nil:
		return ReasonReading
	}
	return ReasonNone
}

// status fills in what all types share, given what they wait for.
func (b *base) status(a Action, now time.Time, active func(*consumer) bool) Status {
	s := Status{
		Reason: a.Reason, Next: b.pos, End: b.end, Unacked: b.unacked, Redelivery: b.due.Offsets(),
		Delayed: b.delayed.offsets.Offsets(), Buffered: b.Buffered(),
	}
	for _, c := range b.consumers {
		s.Consumers = append(s.Consumers, ConsumerStatus{
			Consumer: c.Consumer, Permits: c.permits, Unacked: c.outstanding.Offsets(), Active: active(c),
		})
	}
	s.Detail = b.detail(s, a, now)
	return s
}

func (b *base) detail(s Status, a Action, now time.Time) string {
	wait := max(a.Until.Sub(now), 0).Round(time.Millisecond)
	switch s.Reason {
	case ReasonNone:
		return fmt.Sprintf("delivering from offset %d of %d", s.Next, s.End)
	case ReasonNoConsumers:
		return "no consumer is connected"
	case ReasonAckStateLoading:
		return "what is acknowledged is being read from the bundle's state log"
	case ReasonReading:
		return fmt.Sprintf("reading offsets %d to %d from storage", b.reading.From, b.reading.Until)
	case ReasonReadFailed:
		return fmt.Sprintf("reading failed %d times, next try in %v: %v", b.failures, wait, b.failure)
	case ReasonNoPermits:
		return "no consumer asks for more: " + describe(s.Consumers, func(c ConsumerStatus) string {
			return fmt.Sprintf("%q has %d permits and %d unacknowledged", c.Name, c.Permits, c.Unacked)
		})
	case ReasonUnackedConsumer:
		return fmt.Sprintf("limit of %d unacknowledged messages a consumer: ", b.cfg.MaxUnackedPerConsumer) +
			describe(s.Consumers, func(c ConsumerStatus) string {
				return fmt.Sprintf("%q has %d permits and %d unacknowledged", c.Name, c.Permits, c.Unacked)
			}) + "; acknowledge, or raise the limit"
	case ReasonUnackedSubscription:
		return fmt.Sprintf("%d messages are unacknowledged, the limit of the subscription is %d; acknowledge, or raise the limit",
			s.Unacked, b.cfg.MaxUnackedPerSubscription)
	case ReasonRedeliveryDelay:
		return fmt.Sprintf("%d messages given back wait for their time, the next in %v", s.Delayed, wait)
	case ReasonDelayedLimit:
		return fmt.Sprintf("%d ranges given back wait for their time, more than %d; the next in %v", b.delayed.len(), b.cfg.MaxDelayed, wait)
	case ReasonNoData:
		return fmt.Sprintf("caught up: everything before offset %d was delivered, %d messages are unacknowledged", s.End, s.Unacked)
	case ReasonReadMemory: // told by the runner, which knows the numbers
	}
	return string(s.Reason)
}

// describe joins the first few consumers' descriptions.
func describe(consumers []ConsumerStatus, f func(ConsumerStatus) string) string {
	const few = 5
	var parts []string
	for i, c := range consumers {
		if i == few {
			parts = append(parts, fmt.Sprintf("and %d more", len(consumers)-few))
			break
		}
		parts = append(parts, f(c))
	}
	return strings.Join(parts, ", ")
}
