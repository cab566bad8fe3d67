package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// windowScript drives a window by hand, with a clock that only it moves.
type windowScript struct {
	t   *testing.T
	w   window
	now time.Time
	out map[*Receipt]*outcome
	got effects // credit summed up
}

func newWindowScript(t *testing.T, b Batching, dedup bool) *windowScript {
	t.Helper()
	return &windowScript{t: t, w: newWindow("t", b, dedup), now: time.Unix(1, 0), out: make(map[*Receipt]*outcome)}
}

func (s *windowScript) collect() {
	e := s.w.take()
	for i := range e.outcomes {
		o := &e.outcomes[i]
		if s.out[o.receipt] != nil {
			s.t.Fatal("a message got two outcomes")
		}
		s.out[o.receipt] = o
	}
	s.got.messages += e.messages
	s.got.bytes += e.bytes
	s.got.flushed = append(s.got.flushed, e.flushed...)
	s.got.stops = append(s.got.stops, e.stops...)
}

func (s *windowScript) add(ctx context.Context, id uint64) *Receipt {
	m := &Message{SequenceID: id, Value: []byte("0123456789")}
	r := &Receipt{msg: m, ctx: ctx, size: m.size(), done: make(chan struct{})}
	s.w.add(r, s.now)
	return r
}

// step sends what is due, and formats it: "0-3 4-4", with when to wake.
func (s *windowScript) step() string {
	var parts []string
	b, wake := s.w.step(s.now)
	for ; b != nil; b, wake = s.w.step(s.now) {
		parts = append(parts, fmt.Sprintf("%d-%d", b.first, b.last))
		if b.frame == nil {
			s.w.encoded(b, []byte("frame"))
		}
	}
	if !wake.IsZero() {
		parts = append(parts, "wake "+wake.Sub(s.now).String())
	}
	s.collect()
	return strings.Join(parts, " ")
}

func (s *windowScript) expect(got, want string) {
	s.t.Helper()
	if got != want {
		s.t.Fatalf("got %q, want %q", got, want)
	}
}

var shortBatches = Batching{MaxMessages: 3, MaxBytes: 1 << 20, MaxDelay: time.Millisecond}

func unavailable() *Error { return &Error{Code: CodeUnavailable, Retryable: true} }

// TestLoneMessageIsSentAtOnce, and what comes while it is in flight waits: for three, or a millisecond.
func TestLoneMessageIsSentAtOnce(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, shortBatches, false)
	ctx := t.Context()
	s.add(ctx, 0)
	s.expect(s.step(), "") // not connected
	s.w.opened(-1)
	s.expect(s.step(), "0-0")
	s.add(ctx, 0)
	s.expect(s.step(), "wake 1ms")
	s.now = s.now.Add(time.Millisecond)
	s.expect(s.step(), "1-1")
	for range 4 {
		s.add(ctx, 0)
	}
	s.expect(s.step(), "2-4 wake 1ms")
	s.w.receipt(0, 0, entry.Position{}, false)
	s.w.receipt(1, 1, entry.Position{}, false)
	s.expect(s.step(), "wake 1ms")
	s.w.receipt(2, 2, entry.Position{}, false)
	s.expect(s.step(), "5-5") // nothing is in flight any more
}

// TestExpiredBeforeSent: its outcome is certain, and the numbers of the others have no gap.
func TestExpiredBeforeSent(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, shortBatches, false)
	ctx, cancel := context.WithCancel(t.Context())
	s.add(t.Context(), 0)
	gone := s.add(ctx, 0)
	s.add(t.Context(), 0) // fills the batch
	cancel()
	s.w.expire(ctx.Done(), ctx.Err())
	s.collect()
	if e := asError(s.out[gone].err); e.Code != CodeTimeout || !errors.Is(e, context.Canceled) {
		t.Fatal(e)
	}
	if s.got.messages != 1 {
		t.Fatalf("credit for %d messages given back", s.got.messages)
	}
	s.w.opened(-1)
	s.expect(s.step(), "0-1")
}

// TestExpiredAfterSent: its outcome is unknown; its batch keeps its place until the stream has answered or broken.
func TestExpiredAfterSent(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, shortBatches, false)
	s.w.opened(-1)
	ctx, cancel := context.WithCancel(t.Context())
	gone := s.add(ctx, 0)
	s.expect(s.step(), "0-0")
	cancel()
	s.w.expire(ctx.Done(), ctx.Err())
	s.collect()
	if !OutcomeUnknown(s.out[gone].err) || s.got.messages != 0 {
		t.Fatal(s.out[gone].err, s.got.messages)
	}
	stays := s.add(t.Context(), 0)
	s.w.flush()
	s.expect(s.step(), "1-1")
	s.w.broken()
	s.w.opened(-1)
	s.expect(s.step(), "1-1") // nobody waits for the first any more
	if s.got.messages != 1 || s.out[stays] != nil {
		t.Fatal(s.got.messages, s.out[stays])
	}
}

// TestExpiredWhileEncoded: nothing may settle a message whose bytes are being read.
func TestExpiredWhileEncoded(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, shortBatches, false)
	s.w.opened(-1)
	ctx, cancel := context.WithCancel(t.Context())
	r := s.add(ctx, 0)
	send, _ := s.w.step(s.now)
	cancel()
	s.w.expire(ctx.Done(), ctx.Err())
	s.collect()
	if s.out[r] != nil {
		t.Fatal("settled while it was encoded")
	}
	s.w.encoded(send, []byte("frame"))
	s.collect()
	if s.out[r] == nil || !OutcomeUnknown(s.out[r].err) {
		t.Fatal("never settled")
	}
}

// TestFlushWaitsForOutcomes: not for the broker's answer about a message that nobody waits for any more.
func TestFlushWaitsForOutcomes(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, shortBatches, false)
	s.w.opened(-1)
	ctx, cancel := context.WithCancel(t.Context())
	s.add(ctx, 0)
	s.expect(s.step(), "0-0")
	cancel()
	f := s.w.flush()
	s.w.expire(ctx.Done(), ctx.Err())
	s.collect()
	if len(s.got.flushed) != 1 || !OutcomeUnknown(f.err) {
		t.Fatalf("the flush goes on: %v", f.err)
	}
	if s.w.flush() != nil {
		t.Fatal("a flush waits for what has its outcome")
	}
	s.w.receipt(0, 0, entry.Position{}, false)
	s.collect()
	if len(s.got.flushed) != 1 || s.got.messages != 1 {
		t.Fatal("the answer ended the flush once more, or gave no credit")
	}
}

// TestResend: after a break, everything unanswered goes out again in order, under the same numbers, before what
// is new.
func TestResend(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, Batching{MaxMessages: 1, MaxBytes: 1, MaxDelay: 1}, false)
	s.w.opened(-1)
	for range 3 {
		s.add(t.Context(), 0)
	}
	s.expect(s.step(), "0-0 1-1 2-2")
	s.w.receipt(0, 7, entry.Position{}, false)
	s.w.broken()
	s.add(t.Context(), 0)
	s.expect(s.step(), "")
	s.w.opened(1) // no dedup: what the broker stored does not matter
	s.expect(s.step(), "1-1 2-2 3-3")
}

// TestResendWithDedup leaves out what the broker has.
func TestResendWithDedup(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, Batching{MaxMessages: 1, MaxBytes: 1, MaxDelay: 1}, true)
	s.w.opened(4) // an earlier run of the producer
	a, b := s.add(t.Context(), 0), s.add(t.Context(), 0)
	s.expect(s.step(), "5-5 6-6")
	s.w.broken()
	s.w.opened(5)
	s.expect(s.step(), "6-6")
	if o := s.out[a]; o == nil || !o.duplicate || o.err != nil || s.out[b] != nil {
		t.Fatalf("%+v, %+v", s.out[a], s.out[b])
	}
}

// TestResendAtAckAll sends again what the broker has: whether on all disks, only its answer tells.
func TestResendAtAckAll(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, Batching{MaxMessages: 1, MaxBytes: 1, MaxDelay: 1}, true)
	s.w.allCopies = true
	s.w.opened(4)
	a := s.add(t.Context(), 0)
	s.expect(s.step(), "5-5")
	s.w.broken()
	s.w.opened(5)
	s.expect(s.step(), "5-5")
	if s.out[a] != nil {
		t.Fatalf("%+v", s.out[a])
	}
	s.w.receipt(5, 0, entry.Position{}, true)
	s.expect(s.step(), "")
	if o := s.out[a]; o == nil || !o.duplicate || o.err != nil {
		t.Fatalf("%+v", o)
	}
	b := s.add(t.Context(), 3) // its own sequence id, of an earlier run
	s.expect(s.step(), "")
	if o := s.out[b]; o == nil || !OutcomeUnknown(o.err) {
		t.Fatalf("%+v", o)
	}
}

// TestFailedForNow: nothing overtakes a batch that is to be sent again.
func TestFailedForNow(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, Batching{MaxMessages: 1, MaxBytes: 1, MaxDelay: 1}, false)
	s.w.opened(-1)
	for range 3 {
		s.add(t.Context(), 0)
	}
	s.expect(s.step(), "0-0 1-1 2-2")
	s.w.receipt(0, 0, entry.Position{}, false)
	s.w.refused(1, unavailable(), s.now.Add(time.Second))
	s.add(t.Context(), 0)
	s.expect(s.step(), "") // 2 is not answered yet
	s.w.refused(2, unavailable(), s.now.Add(time.Second))
	s.expect(s.step(), "wake 1s")
	s.now = s.now.Add(time.Second)
	s.expect(s.step(), "1-1 2-2 3-3")
	s.w.refused(1, &Error{Code: CodeInvalid}, time.Time{})
	s.expect(s.step(), "")
	if len(s.out) != 2 {
		t.Fatalf("%d outcomes", len(s.out))
	}
}

// TestOwnSequenceIDs: a batch holds a run without gaps, whatever falls out of it; used numbers are refused.
func TestOwnSequenceIDs(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, Batching{MaxMessages: 10, MaxBytes: 1 << 20, MaxDelay: time.Millisecond}, true)
	ctx, cancel := context.WithCancel(t.Context())
	stored := s.add(t.Context(), 4)
	s.add(t.Context(), 5)
	s.add(ctx, 6)
	s.add(t.Context(), 7)
	s.add(t.Context(), 9)
	s.add(t.Context(), 0) // numbered by the producer again
	f := s.w.flush()
	cancel()
	s.w.expire(ctx.Done(), ctx.Err())
	s.w.opened(4)
	s.expect(s.step(), "5-5 7-7 9-9 10-10")
	if o := s.out[stored]; o == nil || !o.duplicate {
		t.Fatalf("%+v", o)
	}
	again := s.add(t.Context(), 9)
	s.w.flush()
	s.step()
	if e := asError(s.out[again].err); e.Code != CodeInvalid {
		t.Fatal(e)
	}
	for _, first := range []uint64{5, 7, 9} {
		s.w.receipt(first, 0, entry.Position{}, false)
	}
	s.collect()
	if len(s.got.flushed) > 1 {
		t.Fatal("the flush ended early")
	}
	s.w.receipt(10, 0, entry.Position{}, false)
	s.collect()
	if f.batches != 0 || f.err == nil { // one message expired
		t.Fatal(f.batches, f.err)
	}
}

// TestWhatFailedIsNoDuplicate: that the broker has stored higher sequence ids than that of a message which failed does not
// say that it has stored that one, and a batch that may be stored is, or is not, before higher ones are sent.
func TestWhatFailedIsNoDuplicate(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, Batching{MaxMessages: 1, MaxBytes: 1, MaxDelay: 1}, true)
	s.w.opened(-1)
	ctx, cancel := context.WithCancel(t.Context())
	first := s.add(ctx, 5)
	s.add(t.Context(), 6)
	s.expect(s.step(), "5-5 6-6")
	cancel()
	s.w.expire(ctx.Done(), ctx.Err())
	s.w.broken() // the broker has got neither
	again := s.add(t.Context(), 5)
	s.w.opened(-1)
	s.expect(s.step(), "5-5 6-6")
	for _, r := range []*Receipt{first, again} {
		if o := s.out[r]; o == nil || !OutcomeUnknown(o.err) {
			t.Fatalf("%+v", o)
		}
	}
	s.w.receipt(5, 0, entry.Position{}, false)
	again = s.add(t.Context(), 5)
	s.w.receipt(6, 1, entry.Position{}, false)
	s.expect(s.step(), "")
	if o := s.out[again]; o == nil || !o.duplicate {
		t.Fatalf("it is stored: %+v", o)
	}

	// What is refused for good lets the next ones by, and what was never sent does.
	refused, late := s.add(t.Context(), 7), s.add(t.Context(), 9)
	ctx, cancel = context.WithCancel(t.Context())
	s.expect(s.step(), "7-7 9-9")
	unsent := s.add(ctx, 10)
	last := s.add(t.Context(), 11)
	cancel()
	s.w.expire(ctx.Done(), ctx.Err())
	s.w.refused(7, &Error{Code: CodeBacklogExceeded}, time.Time{})
	s.w.broken()
	s.w.opened(9)
	s.expect(s.step(), "11-11")
	s.w.receipt(11, 2, entry.Position{}, false)
	s.w.broken()
	s.w.opened(11)
	if o := s.out[late]; o == nil || !o.duplicate || s.out[refused].err == nil || s.out[unsent].err == nil {
		t.Fatalf("%+v", o)
	}
	for _, id := range []uint64{7, 9, 10, 11} {
		r := s.add(t.Context(), id)
		s.expect(s.step(), "")
		if o := s.out[r]; o == nil || o.duplicate != (id == 9 || id == 11) || OutcomeUnknown(o.err) == o.duplicate {
			t.Errorf("sequence id %d again: %+v", id, o)
		}
	}
	if o := s.out[last]; o == nil || o.err != nil {
		t.Fatalf("%+v", o)
	}
}

// TestOwnSequenceIDsModel publishes messages by its own sequence ids, and those whose outcome was not good once more, to a
// broker that answers, breaks off and refuses as it pleases: who is told that a message is stored is told the truth.
func TestOwnSequenceIDsModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := newWindowScript(t, Batching{MaxMessages: 3, MaxBytes: 1 << 20, MaxDelay: 2 * time.Millisecond}, true)
		type life struct {
			context.Context
			end context.CancelFunc
		}
		lives := make([]life, 8)
		for i := range lives {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			lives[i] = life{ctx, cancel}
		}
		stored := map[uint64]bool{}
		var wire []*batch
		var next uint64
		var published []uint64
		last, gap, connected := int64(-1), int64(-1), false
		store := func(b *batch) {
			if int64(b.last) > last {
				for id := b.first; id <= b.last; id++ {
					stored[id] = true
				}
			}
			last = max(last, int64(b.last))
		}
		for range rapid.IntRange(1, 200).Draw(rt, "events") {
			switch rapid.SampledFrom([]string{"add", "add", "again", "again", "step", "step", "answer", "answer", "refuse", "break", "open", "open", "expire", "time"}).Draw(rt, "event") {
			case "add":
				next += rapid.SampledFrom([]uint64{1, 1, 1, 2}).Draw(rt, "by")
				published = append(published, next)
				s.add(lives[0], next)
			case "again":
				if next > 0 {
					s.add(lives[0], rapid.SampledFrom(published).Draw(rt, "id"))
				}
			case "step":
				if b, _ := s.w.step(s.now); b != nil {
					if b.frame == nil {
						s.w.encoded(b, []byte("frame"))
					}
					wire = append(wire, b)
				}
			case "answer", "refuse":
				if len(wire) == 0 {
					continue
				}
				b := wire[0]
				wire = wire[1:]
				switch refuse := rapid.SampledFrom([]string{"", "", "now", "always"}).Draw(rt, "refuse"); {
				case gap >= 0 && int64(b.first) > gap, refuse == "now":
					if gap < 0 || int64(b.first) < gap {
						gap = int64(b.first)
					}
					s.w.refused(b.first, unavailable(), s.now)
				case refuse == "always" && int64(b.last) > last:
					s.w.refused(b.first, &Error{Code: CodeBacklogExceeded}, time.Time{})
				default:
					gap = -1
					duplicate := int64(b.last) <= last
					store(b)
					s.w.receipt(b.first, 0, entry.Position{}, duplicate)
				}
			case "break":
				for _, b := range wire {
					if gap >= 0 || rapid.Bool().Draw(rt, "lost") {
						break
					}
					store(b)
				}
				wire, connected, gap = nil, false, -1
				s.w.broken()
			case "open":
				if !connected {
					connected = true
					s.w.opened(last)
				}
			case "expire":
				if len(lives) > 1 {
					lives[0].end()
					s.w.expire(lives[0].Done(), context.Canceled)
					lives = lives[1:]
				}
			case "time":
				s.now = s.now.Add(time.Millisecond)
			}
			s.collect()
			for r, o := range s.out {
				if o.err == nil && !stored[r.msg.SequenceID] {
					rt.Fatalf("message %d is told to be stored (duplicate %v)", r.msg.SequenceID, o.duplicate)
				}
			}
		}
	})
}

// TestAbort: what was sent has an unknown outcome, the rest a certain one.
func TestAbort(t *testing.T) {
	t.Parallel()
	s := newWindowScript(t, shortBatches, false)
	s.w.opened(-1)
	sent := s.add(t.Context(), 0)
	s.step()
	waiting := s.add(t.Context(), 0)
	fenced := &Error{Code: CodeFenced}
	s.w.abort(fenced)
	s.collect()
	if !OutcomeUnknown(s.out[sent].err) || !errors.Is(s.out[sent].err, fenced) || !errors.Is(s.out[waiting].err, fenced) ||
		OutcomeUnknown(s.out[waiting].err) || s.got.messages != 2 {
		t.Fatal(s.out[sent].err, s.out[waiting].err, s.got.messages)
	}
}

// TestWindowModel runs random events against a broker that stores what it is sent, and holds the promises: one
// outcome each, all credit back, and, with dedup, every message stored at most once, in order; stored if and only
// if its outcome allows that.
func TestWindowModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := newWindowScript(t, Batching{MaxMessages: 4, MaxBytes: 1 << 20, MaxDelay: 2 * time.Millisecond}, true)
		type context2 struct {
			ctx    context.Context
			cancel context.CancelFunc
		}
		var contexts []context2
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			contexts = append(contexts, context2{ctx, cancel})
		}
		var receipts []*Receipt
		var bytes int64
		var wire []*batch // on the current stream, unanswered
		var log []*Receipt
		last := int64(-1)
		failed := int64(-1)
		connected := false
		store := func(b *batch) (duplicate bool) {
			if int64(b.last) <= last {
				return true
			}
			last = int64(b.last)
			log = append(log, b.receipts...)
			return false
		}
		for range rapid.IntRange(1, 80).Draw(rt, "events") {
			switch rapid.SampledFrom([]string{"add", "add", "add", "step", "step", "answer", "answer", "fail", "break", "open", "expire", "flush", "time"}).Draw(rt, "event") {
			case "add":
				c := rapid.SampledFrom(contexts).Draw(rt, "context")
				if c.ctx.Err() != nil {
					continue
				}
				r := s.add(c.ctx, 0)
				receipts = append(receipts, r)
				bytes += int64(r.size)
			case "step":
				for range rapid.IntRange(1, 5).Draw(rt, "steps") {
					b, _ := s.w.step(s.now)
					if b == nil {
						break
					}
					if b.frame == nil {
						s.w.encoded(b, []byte("frame"))
					}
					wire = append(wire, b)
				}
			case "answer", "fail":
				if len(wire) == 0 {
					continue
				}
				b := wire[0]
				wire = wire[1:]
				if failed >= 0 && b.first > uint64(failed) || rapid.Bool().Draw(rt, "refuse") {
					if failed < 0 || b.first <= uint64(failed) {
						failed = int64(b.first)
					}
					s.w.refused(b.first, unavailable(), s.now.Add(time.Millisecond))
					break
				}
				failed = -1
				s.w.receipt(b.first, 0, entry.Position{}, store(b))
			case "break":
				for _, b := range wire { // some of it arrived
					if failed >= 0 || rapid.Bool().Draw(rt, "lost") {
						break
					}
					store(b)
				}
				wire, connected, failed = nil, false, -1
				s.w.broken()
			case "open":
				if !connected {
					connected = true
					s.w.opened(last)
				}
			case "expire":
				c := rapid.SampledFrom(contexts).Draw(rt, "context")
				c.cancel()
				s.w.expire(c.ctx.Done(), context.Canceled)
			case "flush":
				s.w.flush()
			case "time":
				s.now = s.now.Add(time.Millisecond)
			}
			s.collect()
		}
		s.w.abort(&Error{Code: CodeClosed})
		s.collect()
		if len(s.out) != len(receipts) || s.got.messages != int64(len(receipts)) || s.got.bytes != bytes {
			rt.Fatalf("%d outcomes and credit for %d of %d messages", len(s.out), s.got.messages, len(receipts))
		}
		place := make(map[*Receipt]int)
		for i, r := range log {
			if _, twice := place[r]; twice {
				rt.Fatal("a message was stored twice")
			}
			place[r] = i
		}
		before := -1
		for i, r := range receipts {
			at, stored := place[r]
			err := s.out[r].err
			if stored && err != nil && !OutcomeUnknown(err) || !stored && err == nil {
				rt.Fatalf("message %d: stored %v, outcome %v", i, stored, err)
			}
			if stored && at < before {
				rt.Fatalf("message %d was stored before one that was published earlier", i)
			}
			if stored {
				before = at
			}
		}
	})
}

// The highest sequence id that there is can be doubtful, and turn out to be stored.
func TestTheHighestSequenceIDIsCertain(t *testing.T) {
	t.Parallel()
	const highest = math.MaxUint64
	w := &window{dedup: true}
	w.doubtful.add(highest)
	w.certain(&batch{explicit: true, first: highest, last: highest})
	if !w.doubtful.empty() || !w.redeemed.contains(highest) {
		t.Errorf("doubtful %v, redeemed %v", w.doubtful.ranges, w.redeemed.ranges)
	}
}
