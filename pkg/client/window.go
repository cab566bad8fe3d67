package client

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// window is the state machine of one producer on one partition: the messages between Publish and their outcome,
// in order. It has no goroutine, clock or socket; the runner in producer.go feeds it events and carries out
// what it returns.
//
//	add → open batch → queue (closed, unsent) → queue (sent) → answered
//
// The queue holds closed batches in publish order; a prefix of it was handed to the current stream. When the
// stream breaks, that prefix is unsent again and goes out once more, in the same order and with the same
// sequence ids, before anything new. With dedup, what the broker says it has already is not sent again.
//
// Sequence ids are given when a batch is first sent, not when a message is added. So a message whose context
// ends while it waits can simply be taken out: its outcome is certain (nothing was sent) and no gap appears in a
// batch. Numbering in add would leave holes that the protocol has no way to say.
//
// A batch that failed for now (bookies away, broker overloaded) must not be overtaken by its own resend: the
// window stops sending, waits until everything in flight is answered, and after a pause sends what failed, in
// order.
type window struct {
	topic    string
	batching Batching
	dedup    bool

	open  *batch
	queue []*batch
	sent  int // queue[:sent] is with the current stream

	next      uint64 // next sequence id
	allCopies bool   // that a message is stored is not enough: its batch is sent again, and the broker asked
	stored    int64  // last sequence id that the broker said it has stored, with dedup; -1 is none
	// doubtful are the application's own sequence ids of messages that failed, with dedup: that the broker has stored
	// higher ones says nothing of them. redeemed are those that turned out to be stored.
	doubtful, redeemed rangeSet

	connected bool
	hold      bool // a batch failed for now
	retryAt   time.Time

	late []lateExpiry // contexts that ended while a batch was being encoded

	effects
}

// lateExpiry is an expire event that has to wait.
type lateExpiry struct {
	done  <-chan struct{}
	cause error
}

// effects is what events leave behind for the runner to carry out, without the lock.
type effects struct {
	outcomes []outcome
	flushed  []*flushWait
	stops    []func() bool
	messages int64 // credit to give back
	bytes    int64
}

// outcome settles one receipt.
type outcome struct {
	receipt   *Receipt
	offset    entry.Offset
	position  entry.Position
	duplicate bool
	err       error
}

// flushWait counts the batches that one Flush waits for.
type flushWait struct {
	batches int
	err     error // of the first failed message
	done    chan struct{}
}

type batch struct {
	receipts []*Receipt
	live     int // receipts without an outcome
	bytes    int // as estimated by Message.size
	explicit bool
	opened   time.Time

	first, last uint64
	numbered    bool   // sent at least once: first, last and frame stand
	frame       []byte // filled by the runner before the first send
	failed      bool   // failed for now on the current stream
	sentAt      time.Time

	waits []*flushWait
	stops []func() bool // of the context watches
	watch <-chan struct{}
}

// errCopiesUnknown is about a message that was stored before, by somebody who did not wait for all copies, or by this
// producer's earlier life.
var errCopiesUnknown = errors.New("it is stored already, and may not be on all disks")

// errPassed is about a message that failed before and comes again when later ones were sent.
var errPassed = errors.New("it failed before, and higher sequence ids were sent since: whether it is stored cannot be told any more, and it will not be from now on")

func newWindow(topic string, b Batching, dedup bool) window {
	return window{topic: topic, batching: b, dedup: dedup, stored: -1}
}

// take hands the effects over and forgets them.
func (w *window) take() effects {
	e := w.effects
	w.effects = effects{}
	return e
}

// add takes a message. It returns the batch that the message is in, so that the runner can watch its context.
func (w *window) add(r *Receipt, now time.Time) *batch {
	if w.open != nil && !w.fits(r) {
		w.closeOpen()
	}
	if w.open == nil {
		w.open = &batch{opened: now, explicit: r.msg.SequenceID != 0}
	}
	b := w.open
	b.receipts = append(b.receipts, r)
	b.live++
	b.bytes += r.size
	if len(b.receipts) >= w.batching.MaxMessages || b.bytes >= w.batching.MaxBytes {
		w.closeOpen()
	}
	return b
}

func (w *window) fits(r *Receipt) bool {
	b := w.open
	if b.bytes+r.size > w.batching.MaxBytes || b.explicit != (r.msg.SequenceID != 0) {
		return false
	}
	return !b.explicit || r.msg.SequenceID == b.receipts[len(b.receipts)-1].msg.SequenceID+1
}

func (w *window) closeOpen() {
	if w.open != nil {
		w.queue = append(w.queue, w.open)
		w.open = nil
	}
}

// inFlight tells whether the current stream owes an answer.
func (w *window) inFlight() bool {
	for _, b := range w.queue[:w.sent] {
		if !b.failed {
			return true
		}
	}
	return false
}

// step returns the batch to send now, or the time at which to ask again; neither when nothing is due. It is one batch at
// a time because sending one may take as long as the broker pleases: what is handed out behind it would be numbered,
// which nothing can take back, and not encoded, so that no context could end it.
func (w *window) step(now time.Time) (send *batch, wake time.Time) {
	if !w.connected {
		return nil, time.Time{}
	}
	if w.hold {
		if w.inFlight() {
			return nil, time.Time{}
		}
		if now.Before(w.retryAt) {
			return nil, w.retryAt
		}
		w.hold, w.sent = false, 0
		for _, b := range w.queue {
			b.failed = false
		}
	}
	if w.open != nil {
		due := w.open.opened.Add(w.batching.MaxDelay)
		if len(w.queue) == 0 || !now.Before(due) {
			w.closeOpen()
		} else {
			wake = due
		}
	}
	for w.sent < len(w.queue) {
		b := w.queue[w.sent]
		if !w.number(b, w.sent) {
			continue // b was settled whole and is gone
		}
		b.sentAt = now
		w.sent++
		return b, time.Time{}
	}
	return nil, wake
}

// number gives a batch its sequence ids before its first send. It reports false if nothing of it is left.
func (w *window) number(b *batch, at int) bool {
	if b.numbered {
		return true
	}
	b.receipts = slices.DeleteFunc(b.receipts, func(r *Receipt) bool { return r.settled })
	if b.explicit {
		w.numberExplicit(b, at)
	} else {
		b.first = w.next
	}
	if b.live == 0 {
		w.finish(at)
		return false
	}
	b.last = b.first + uint64(len(b.receipts)) - 1
	b.numbered = true
	w.next = b.last + 1
	return true
}

// numberExplicit settles the messages whose own sequence ids were used before, and splits b where what is left
// is not contiguous.
func (w *window) numberExplicit(b *batch, at int) {
	for len(b.receipts) > 0 && b.receipts[0].msg.SequenceID < w.next {
		r := b.receipts[0]
		b.receipts = b.receipts[1:]
		switch id := r.msg.SequenceID; {
		case w.redeemed.contains(entry.Offset(id)):
			w.settle(b, outcome{receipt: r, duplicate: true})
		case w.doubtful.contains(entry.Offset(id)):
			w.settle(b, outcome{receipt: r, err: &Error{Code: CodeOutcomeUnknown, Op: "publish", Topic: w.topic, Err: errPassed}})
		case w.dedup && w.stored >= 0 && id <= uint64(w.stored) && w.allCopies:
			w.settle(b, outcome{receipt: r, err: &Error{Code: CodeOutcomeUnknown, Op: "publish", Topic: w.topic, Err: errCopiesUnknown}})
		case w.dedup && w.stored >= 0 && id <= uint64(w.stored):
			w.settle(b, outcome{receipt: r, duplicate: true})
		default:
			w.settle(b, outcome{receipt: r, err: invalidError("publish", w.topic,
				"sequence id %d after %d: sequence ids must grow", id, w.next-1)})
		}
		w.credit(r)
	}
	if len(b.receipts) == 0 {
		return
	}
	b.first = b.receipts[0].msg.SequenceID
	for i, r := range b.receipts {
		if r.msg.SequenceID == b.first+uint64(i) {
			continue
		}
		rest := &batch{explicit: true, opened: b.opened, receipts: b.receipts[i:], waits: slices.Clone(b.waits)}
		rest.live = len(rest.receipts)
		for _, r := range rest.receipts {
			rest.bytes += r.size
		}
		for _, f := range rest.waits {
			f.batches++
		}
		rest.stops, b.stops = b.stops, nil // b is answered before rest
		b.receipts = b.receipts[:i:i]
		b.live -= rest.live
		b.bytes -= rest.bytes
		w.queue = slices.Insert(w.queue, at+1, rest)
		return
	}
}

// opened says that a stream is ready, and, with dedup, which sequence id the broker stored last.
func (w *window) opened(stored int64) {
	w.connected, w.hold, w.sent = true, false, 0
	w.stored = -1
	if !w.dedup || stored < 0 {
		return
	}
	w.stored = stored
	w.next = max(w.next, uint64(stored)+1)
	if w.allCopies {
		return
	}
	for i := 0; i < len(w.queue); {
		b := w.queue[i]
		if !b.numbered || b.last > uint64(stored) {
			i++
			continue
		}
		w.settleAll(b, outcome{duplicate: true})
		w.certain(b)
		w.finish(i)
	}
}

// kept tells that a batch stays in the window: somebody waits for it, or it has sequence ids of the application's and
// may be stored only before what has higher ones. Otherwise the application, which does not know its outcome and publishes
// it again, would be told that it is a duplicate.
func (w *window) kept(b *batch) bool { return b.live > 0 || w.dedup && b.explicit && b.numbered }

// maxDoubtful bounds the ranges of doubtful ids. Beyond it, what lies between the lowest two is taken for doubtful, too;
// and of redeemed ones, the lowest are doubtful again.
const maxDoubtful = 10_000

// doubt notes that a message has failed.
func (w *window) doubt(r *Receipt) {
	if !w.dedup || r.msg.SequenceID == 0 {
		return
	}
	w.doubtful.add(entry.Offset(r.msg.SequenceID))
	if all := w.doubtful.ranges; len(all) > maxDoubtful {
		all[1].first = all[0].first
		w.doubtful.ranges = slices.Delete(all, 0, 1)
	}
}

// certain notes that a batch is stored.
func (w *window) certain(b *batch) {
	if w.doubtful.empty() || !b.explicit {
		return
	}
	for i := range b.last - b.first + 1 { // the last id may be the highest that there is
		if id := entry.Offset(b.first + i); w.doubtful.remove(id) {
			w.redeemed.add(id)
		}
	}
	if all := w.redeemed.ranges; len(all) > maxDoubtful {
		w.doubtful.merge(rangeSet{ranges: all[:1]})
		w.redeemed.ranges = slices.Delete(all, 0, 1)
	}
}

// broken says that the stream is gone. What it had is unsent again; what nobody waits for any more is dropped, if it may be.
func (w *window) broken() {
	w.connected, w.hold, w.sent = false, false, 0
	for i := 0; i < len(w.queue); {
		w.queue[i].failed = false
		if w.kept(w.queue[i]) {
			i++
		} else {
			w.finish(i)
		}
	}
}

// find returns the index of the sent batch that begins with first, or -1.
func (w *window) find(first uint64) int {
	return slices.IndexFunc(w.queue[:w.sent], func(b *batch) bool { return b.first == first && !b.failed && b.frame != nil })
}

// receipt says that the batch that begins with sequence id first is stored. It reports false for a batch that
// was not sent.
func (w *window) receipt(first uint64, offset entry.Offset, position entry.Position, duplicate bool) bool {
	i := w.find(first)
	if i < 0 {
		return false
	}
	b := w.queue[i]
	for n, r := range b.receipts {
		if r.settled {
			continue
		}
		o := outcome{receipt: r, duplicate: duplicate}
		if !duplicate {
			o.offset = offset + entry.Offset(n)
			o.position = position
			o.position.Batch += int32(n)
		}
		w.settle(b, o)
	}
	w.certain(b)
	w.finish(i)
	return true
}

// encoded gives a batch its frame, on its way to the stream. Until then its messages are being read, so no
// context can settle them.
func (w *window) encoded(b *batch, frame []byte) {
	b.frame = frame
	late := w.late
	w.late = nil
	for _, l := range late {
		w.expire(l.done, l.cause)
	}
}

// refused says that the batch that begins with first failed. A failure that may pass is retried at the given
// time; the messages' contexts bound how often.
func (w *window) refused(first uint64, err *Error, retryAt time.Time) bool {
	i := w.find(first)
	if i < 0 {
		return false
	}
	b := w.queue[i]
	if err.Retryable {
		b.failed = true
		if !w.hold || retryAt.After(w.retryAt) {
			w.retryAt = retryAt
		}
		w.hold = true
		return true
	}
	for _, r := range b.receipts {
		w.doubt(r)
	}
	w.settleAll(b, outcome{err: err})
	w.finish(i)
	return true
}

// expire says that a context ended: every message published with it gets its outcome. One that was never sent
// leaves its batch; a batch that nobody waits for leaves the window, unless the current stream has it and may
// still answer, or its sequence ids keep it.
func (w *window) expire(done <-chan struct{}, cause error) {
	for i := 0; i < len(w.queue); {
		b := w.queue[i]
		w.expireIn(b, done, cause)
		if !w.kept(b) && i >= w.sent {
			w.finish(i)
		} else {
			i++
		}
	}
	if b := w.open; b != nil {
		w.expireIn(b, done, cause)
		if b.live == 0 {
			w.closeOpen()
			w.finish(len(w.queue) - 1)
		}
	}
}

func (w *window) expireIn(b *batch, done <-chan struct{}, cause error) {
	for _, r := range b.receipts {
		if r.settled || r.ctx.Done() != done {
			continue
		}
		if b.numbered && b.frame == nil {
			w.late = append(w.late, lateExpiry{done, cause})
			return
		}
		w.doubt(r)
		if b.numbered {
			w.settle(b, outcome{receipt: r, err: unknownOutcome("publish", w.topic, cause)})
			continue
		}
		w.settle(b, outcome{receipt: r, err: timeoutError("publish", w.topic, cause)})
		w.credit(r)
		b.bytes -= r.size
	}
	if !b.numbered {
		b.receipts = slices.DeleteFunc(b.receipts, func(r *Receipt) bool { return r.settled })
	}
}

// abort ends everything with err; what was sent has an unknown outcome that wraps it.
func (w *window) abort(err error) {
	w.closeOpen()
	w.connected, w.hold = false, false
	for len(w.queue) > 0 {
		b := w.queue[0]
		o := outcome{err: err}
		if b.numbered {
			o.err = unknownOutcome("publish", w.topic, err)
		}
		w.settleAll(b, o)
		w.finish(0)
	}
	w.sent = 0
}

// flush closes the open batch and returns what to wait for; nil when every message has its outcome.
func (w *window) flush() *flushWait {
	w.closeOpen()
	f := &flushWait{done: make(chan struct{})}
	for _, b := range w.queue {
		if b.live > 0 {
			f.batches++
			b.waits = append(b.waits, f)
		}
	}
	if f.batches == 0 {
		return nil
	}
	return f
}

// unsettled counts the messages without an outcome that were sent, and those that were not.
func (w *window) unsettled() (sent, unsent int) {
	for _, b := range w.queue {
		if b.numbered {
			sent += b.live
		} else {
			unsent += b.live
		}
	}
	if w.open != nil {
		unsent += w.open.live
	}
	return sent, unsent
}

// waits returns since when the oldest message without an outcome does; zero without one.
func (w *window) waits() time.Time {
	switch {
	case len(w.queue) > 0:
		return w.queue[0].opened
	case w.open != nil:
		return w.open.opened
	}
	return time.Time{}
}

// oldest returns when the oldest unanswered batch was sent; zero if nothing is in flight.
func (w *window) oldest() time.Time {
	for _, b := range w.queue[:w.sent] {
		if !b.failed {
			return b.sentAt
		}
	}
	return time.Time{}
}

func (w *window) settle(b *batch, o outcome) {
	if o.receipt.settled {
		panic("client: a message got two outcomes")
	}
	o.receipt.settled = true
	b.live--
	w.outcomes = append(w.outcomes, o)
	if o.err != nil {
		for _, f := range b.waits {
			if f.err == nil {
				f.err = o.err
			}
		}
	}
	if b.live == 0 {
		w.endWaits(b)
	}
}

// endWaits tells who flushes that every message of b has its outcome. The batch itself may still be with the stream.
func (w *window) endWaits(b *batch) {
	for _, f := range b.waits {
		if f.batches--; f.batches == 0 {
			w.flushed = append(w.flushed, f)
		}
	}
	b.waits = nil
}

func (w *window) settleAll(b *batch, o outcome) {
	for _, r := range b.receipts {
		if !r.settled {
			o.receipt = r
			w.settle(b, o)
		}
	}
}

func (w *window) credit(r *Receipt) {
	w.messages++
	w.bytes += int64(r.size)
}

// finish takes queue[i], all of whose messages have outcomes, out of the window.
func (w *window) finish(i int) {
	b := w.queue[i]
	if b.live != 0 {
		panic(fmt.Sprintf("client: a batch with %d unsettled messages left the window", b.live))
	}
	for _, r := range b.receipts {
		w.credit(r)
	}
	w.stops = append(w.stops, b.stops...)
	if i == 0 {
		w.queue[0] = nil
		w.queue = w.queue[1:]
	} else {
		w.queue = slices.Delete(w.queue, i, i+1)
	}
	if i < w.sent {
		w.sent--
	}
}
