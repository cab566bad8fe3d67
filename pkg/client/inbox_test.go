package client

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// TestRangeSet compares with a plain map.
func TestRangeSet(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var s rangeSet
		model := make(map[entry.Offset]bool)
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			o := entry.Offset(rapid.IntRange(0, 20).Draw(t, "offset"))
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0, 1:
				s.add(o)
				model[o] = true
			case 2:
				if s.remove(o) != model[o] {
					t.Fatalf("remove %d: was in: %v", o, model[o])
				}
				delete(model, o)
			case 3:
				s.removeUpTo(o)
				maps.DeleteFunc(model, func(k entry.Offset, _ bool) bool { return k <= o })
			}
			var got []entry.Offset
			for i, r := range s.ranges {
				if r.first > r.last || i > 0 && s.ranges[i-1].last+1 >= r.first {
					t.Fatalf("ranges %v", s.ranges)
				}
				for o := r.first; o <= r.last; o++ {
					got = append(got, o)
				}
			}
			if want := slices.Sorted(maps.Keys(model)); !slices.Equal(got, want) {
				t.Fatalf("holds %v, want %v", got, want)
			}
			for o := range entry.Offset(22) {
				if s.contains(o) != model[o] {
					t.Fatalf("contains %d: %v", o, !model[o])
				}
			}
		}
	})
}

// TestFlowModel: prefetch stays within its message limit, and never stalls: with nothing buffered the broker
// has a permit.
func TestFlowModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := flow{maxMessages: rapid.IntRange(1, 50).Draw(t, "messages"), maxBytes: int64(rapid.IntRange(1, 5000).Draw(t, "bytes"))}
		permits := 0 // the broker's view
		var buffer []int64
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0:
				permits += f.grant()
			case 1:
				if permits <= 0 {
					continue
				}
				span, size := rapid.IntRange(1, 5).Draw(t, "span"), int64(rapid.IntRange(1, 3000).Draw(t, "size"))
				kept := rapid.IntRange(0, span).Draw(t, "kept")
				permits -= span
				f.received(span, kept, size*int64(kept))
				for range kept {
					buffer = append(buffer, size)
				}
			case 2:
				if len(buffer) > 0 {
					f.consumed(buffer[0])
					buffer = buffer[1:]
				}
			case 3:
				if rapid.IntRange(0, 9).Draw(t, "break") == 0 {
					f.connected()
					permits, buffer = 0, nil
				}
			}
			if permits != f.outstanding || len(buffer) != f.buffered {
				t.Fatalf("counts %d permits and %d buffered, want %d and %d", f.outstanding, f.buffered, permits, len(buffer))
			}
			if over := max(0, permits) + len(buffer); over > f.maxMessages+4 { // one batch
				t.Fatalf("%d messages on their way, limit %d", over, f.maxMessages)
			}
		}
		for len(buffer) > 0 {
			f.consumed(buffer[0])
			buffer = buffer[1:]
		}
		if permits += f.grant(); permits < 1 {
			t.Fatal("nothing is buffered, and the broker may not send")
		}
	})
}

// TestFlowLearnsSize: large messages shrink what is asked for.
func TestFlowLearnsSize(t *testing.T) {
	t.Parallel()
	f := flow{maxMessages: 1000, maxBytes: 10 << 20}
	if n := f.grant(); n != 10 {
		t.Fatalf("%d permits before the first message", n)
	}
	f.received(1, 1, 1<<10)
	f.consumed(1 << 10)
	if n := f.grant(); n != 991 {
		t.Fatalf("%d permits more for messages of 1 KiB", n)
	}
	for range 40 {
		f.received(1, 1, 2<<20)
		f.consumed(2 << 20)
	}
	f.connected()
	if n := f.grant(); n != 5 {
		t.Fatalf("%d permits for messages of 2 MiB", n)
	}
}

// TestAckGroups is the life of acknowledgements, as a script.
func TestAckGroups(t *testing.T) {
	t.Parallel()
	now := time.Unix(1, 0)
	a := acker{max: 3, delay: 10 * time.Millisecond}
	a.add(1, nil, now)
	if g, wake := a.step(now); g != nil || wake != now.Add(10*time.Millisecond) {
		t.Fatal(g, wake)
	}
	a.add(2, nil, now)
	a.add(5, nil, now)
	g, _ := a.step(now) // three are enough
	if g == nil || len(g.ranges.ranges) != 2 {
		t.Fatal(g)
	}
	waiter := make(chan error, 1)
	a.add(3, waiter, now)
	second, _ := a.step(now) // somebody waits
	if second == nil || !a.unconfirmed(1) || !a.unconfirmed(3) || a.unconfirmed(4) || !a.waiting() {
		t.Fatal(second)
	}
	if w := a.answered(g.id, nil, now); len(w) != 0 || a.unconfirmed(1) {
		t.Fatal(w)
	}
	a.broken(now) // the second was not answered
	again, _ := a.step(now)
	if again == nil || again.id == second.id || !again.ranges.contains(3) || again.ranges.contains(1) {
		t.Fatal(again)
	}
	if w := a.answered(again.id, unavailable(), now.Add(time.Second)); w != nil {
		t.Fatal(w)
	}
	if g, wake := a.step(now); g != nil || wake != now.Add(time.Second) {
		t.Fatal(g, wake)
	}
	a.addCumulative(7, nil, now)
	a.add(9, nil, now)
	last, _ := a.step(now.Add(time.Second))
	if last == nil || *last.cumulative != 7 || len(last.ranges.ranges) != 1 {
		t.Fatalf("%+v", last)
	}
	if w := a.answered(last.id, nil, now); len(w) != 1 || !a.pending.empty() || len(a.inFlight) != 0 {
		t.Fatal(w)
	}
}

func take(b *inbox, offsets ...entry.Offset) (out []*Delivery) {
	for _, o := range offsets {
		if b.wanted(o) {
			out = append(out, &Delivery{ID: MessageID{Offset: o}, size: 1})
		}
	}
	b.delivered(len(offsets), out)
	for _, d := range out {
		b.taken(d)
	}
	return out
}

// TestInboxAfterReconnect: what the application holds is left out once; what it gave back comes.
func TestInboxAfterReconnect(t *testing.T) {
	t.Parallel()
	now := time.Unix(1, 0)
	b := inbox{flow: flow{maxMessages: 10, maxBytes: 1 << 20}, acks: acker{max: 10}}
	b.connected(0)
	d := take(&b, 0, 1, 2, 3, 4)
	b.held.remove(0)
	b.acks.add(0, nil, now) // acknowledged, not durable
	if !b.nacked(d[1]) {
		t.Fatal("the broker is not told of a nack")
	}
	b.broken(now)
	b.connected(0)
	if b.nacked(d[2]) {
		t.Fatal("the broker is told of a nack of what it has yet to deliver again")
	}
	if got := take(&b, 0, 1, 2, 3, 4); len(got) != 2 || got[0].ID.Offset != 1 || got[1].ID.Offset != 2 {
		t.Fatalf("got %+v", got)
	}
	if !b.nacked(d[3]) { // delivered again, and left out: the broker believes it to be here
		t.Fatal("the broker is not told of a nack of what it delivered again")
	}
	if got := take(&b, 4); len(got) != 1 {
		t.Fatal("a second delivery on the same stream is a real one")
	}
}

func TestCharge(t *testing.T) {
	t.Parallel()
	e := &brokerv1.DeliveredEntry{Span: 10, Skip: []*brokerv1.OffsetRange{{First: 0, Last: 2}, {First: 9, Last: 9}, {First: 5, Last: 99}}}
	if n := charge(e); n != 6 {
		t.Fatalf("charged %d", n)
	}
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	b := backoff{rnd: func() float64 { return 0.5 }}
	var total time.Duration
	for i := range 20 {
		d := b.next()
		if d < 20*time.Millisecond || d > 50*time.Millisecond {
			t.Fatalf("attempt %d comes after %s", i, d)
		}
		total += d
	}
	for range 20 {
		if d := b.next(); d > time.Second {
			t.Fatalf("pause of %s", d)
		}
	}
	if d := b.next(); d != time.Second || total > time.Second {
		t.Fatal(d, total)
	}
}

// TestUnansweredAcks: what is in flight and what waits is named, until it is durable.
func TestUnansweredAcks(t *testing.T) {
	t.Parallel()
	now := time.Unix(1, 0)
	a := acker{max: 1, delay: time.Second}
	if got := a.unanswered(); got != "" {
		t.Fatal(got)
	}
	a.add(3, nil, now)
	a.add(4, nil, now)
	first, _ := a.step(now)
	a.add(9, nil, now)
	if got := a.unanswered(); got != "3 to 4, 9" {
		t.Fatal(got)
	}
	a.answered(first.id, unavailable(), now)
	if got := a.unanswered(); got != "3 to 4, 9" || a.refusal == nil {
		t.Fatal(got, a.refusal)
	}
	again, _ := a.step(now)
	a.answered(again.id, nil, now)
	a.addCumulative(20, nil, now)
	for o := range entry.Offset(2 * namedRanges) {
		a.add(100+2*o, nil, now)
	}
	if got := a.unanswered(); !strings.HasPrefix(got, "up to 20, 100, 102, ") || !strings.HasSuffix(got, ", and 8 ranges more") || a.refusal != nil {
		t.Fatal(got, a.refusal)
	}
}
