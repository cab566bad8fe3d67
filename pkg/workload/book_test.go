package workload

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// history is a run of one producer on one partition, told step by step. Message n stands at offset n unless told otherwise.
type history struct {
	book *Book
	read *Reading
	tags []Tag
}

func newHistory(ordered bool) *history {
	b := NewBook(7, 1)
	return &history{book: b, read: b.NewReading(ordered)}
}

func (h *history) send(n int) {
	for range n {
		h.tags = append(h.tags, h.book.Send(0))
	}
}

func (h *history) ack(numbers ...int) {
	for _, n := range numbers {
		h.book.Settle(h.tags[n], Acknowledged, Receipt{Offset: entry.Offset(n), Known: true})
	}
}

func (h *history) get(numbers ...int) {
	for _, n := range numbers {
		h.at(n, n)
	}
}

func (h *history) at(n, offset int) { h.read.Read(h.tags[n], 0, entry.Offset(offset)) }

// Each planted fault is found, as what it is and nothing else; what is allowed is not found.
func TestJudgeFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		play func(h *history)
		want Kind // "" for none
		n    uint64
		dup  bool // deduplication is off
		any  bool // a Shared subscription: delivered in any order
	}{
		"clean":                   {play: func(h *history) { h.ack(0, 1, 2, 3); h.get(0, 1, 2, 3) }},
		"read before the receipt": {play: func(h *history) { h.get(0, 1, 2, 3); h.ack(0, 1, 2, 3) }},
		"lost":                    {play: func(h *history) { h.ack(0, 1, 2, 3); h.get(0, 1, 2) }, want: Lost, n: 1},
		"lost some":               {play: func(h *history) { h.ack(0, 1, 2, 3); h.get(0) }, want: Lost, n: 3},
		"unknown, not stored": {play: func(h *history) {
			h.ack(0, 1, 2)
			h.book.Settle(h.tags[3], Unknown, Receipt{})
			h.get(0, 1, 2)
		}},
		"unknown, stored": {play: func(h *history) {
			h.ack(0, 1, 2)
			h.book.Settle(h.tags[3], Unknown, Receipt{})
			h.get(0, 1, 2, 3)
		}},
		"refused, stored": {play: func(h *history) {
			h.ack(0, 1, 2)
			h.book.Settle(h.tags[3], Refused, Receipt{})
			h.get(0, 1, 2, 3)
		}, want: Phantom, n: 1},
		"never sent": {play: func(h *history) {
			h.ack(0, 1, 2, 3)
			h.get(0, 1, 2, 3)
			h.read.Read(Tag{Run: 7, Number: 4}, 0, 4)
		}, want: Phantom, n: 1},
		"another run's": {play: func(h *history) {
			h.ack(0, 1, 2, 3)
			h.get(0, 1, 2, 3)
			h.read.Read(Tag{Run: 8}, 0, 4)
		}, want: Phantom, n: 1},
		"damaged": {play: func(h *history) {
			h.ack(0, 1, 2)
			h.get(0, 1, 2)
			h.read.Foreign(0, 3, errForeign)
		}, want: Phantom, n: 1},
		"delivered again": {play: func(h *history) { h.ack(0, 1, 2, 3); h.get(0, 1, 0, 1, 2, 3, 3) }},
		"stored twice": {play: func(h *history) {
			h.ack(0, 1, 2, 3)
			h.get(0, 1, 2, 3)
			h.at(1, 4)
		}, want: StoredTwice, n: 1},
		"stored twice without deduplication": {dup: true, play: func(h *history) {
			h.ack(0, 1, 2, 3)
			h.get(0, 1, 2, 3)
			h.at(1, 4)
			h.at(2, 5)
		}},
		"acknowledged where it is stored the second time": {dup: true, play: func(h *history) {
			h.ack(0, 1, 2)
			h.get(0, 1, 2, 3)
			h.book.Settle(h.tags[3], Acknowledged, Receipt{Offset: 4, Known: true})
			h.at(3, 4)
		}},
		"reordered": {play: func(h *history) {
			for i, n := range []int{0, 2, 1, 3} {
				h.book.Settle(h.tags[n], Acknowledged, Receipt{})
				h.at(n, i)
			}
		}, want: Reordered, n: 1},
		"shared": {any: true, play: func(h *history) { h.ack(0, 1, 2, 3); h.get(2, 0, 3, 1) }},
		"gap": {play: func(h *history) {
			for i, n := range []int{0, 1, 2, 3} {
				h.book.Settle(h.tags[n], Acknowledged, Receipt{})
				h.at(n, i+2*(n/2))
			}
		}, want: Gap, n: 2},
		"changed": {play: func(h *history) {
			h.ack(0, 1, 2)
			h.get(0, 1, 2)
			h.at(3, 2)
			h.book.Settle(h.tags[3], Unknown, Receipt{})
		}, want: Changed, n: 1},
		"misplaced": {play: func(h *history) {
			h.ack(0, 1, 2)
			h.get(0, 1, 2)
			h.book.Settle(h.tags[3], Acknowledged, Receipt{Offset: 9, Known: true})
			h.at(3, 3)
		}, want: Misplaced, n: 1},
		"misplaced, receipt later": {play: func(h *history) {
			h.get(0, 1, 2, 3)
			h.book.Settle(h.tags[3], Acknowledged, Receipt{Offset: 9, Known: true})
			h.ack(0, 1, 2)
		}, want: Misplaced, n: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHistory(!c.any)
			h.send(4)
			c.play(h)
			report := h.book.Judge(h.read, !c.dup)
			switch {
			case c.want == "" && report.Err() != nil:
				t.Fatalf("found what is not there: %v", report.Err())
			case c.want == "":
			case len(report.Violations) != 1 || report.Count(c.want) != c.n:
				t.Fatalf("want %d × %q, got %v", c.n, c.want, report.Violations)
			}
		})
	}
}

// What comes late is found also where each producer's messages are in order.
func TestJudgeFindsOffsetsOutOfOrder(t *testing.T) {
	t.Parallel()
	b := NewBook(7, 2)
	ordered, shared := b.NewReading(true), b.NewReading(false)
	for offset, producer := range []uint32{0, 1, 0} {
		b.Settle(b.Send(producer), Acknowledged, Receipt{Offset: entry.Offset(offset), Known: true})
	}
	for _, r := range []*Reading{ordered, shared} {
		r.Read(Tag{Run: 7}, 0, 0)
		r.Read(Tag{Run: 7, Number: 1}, 0, 2)
		r.Read(Tag{Run: 7, Producer: 1}, 0, 1)
		r.Read(Tag{Run: 7}, 0, 0) // again
	}
	if r := b.Judge(ordered, true); len(r.Violations) != 1 || r.Count(Reordered) != 1 {
		t.Errorf("%v", r.Violations)
	}
	if err := b.Judge(shared, true).Err(); err != nil {
		t.Error(err)
	}
}

func TestJudgeCounts(t *testing.T) {
	t.Parallel()
	h := newHistory(true)
	h.send(6)
	h.ack(0, 1)
	h.book.Settle(h.tags[2], Unknown, Receipt{})
	h.book.Settle(h.tags[3], Refused, Receipt{})
	h.book.Settle(h.tags[4], Acknowledged, Receipt{})
	h.get(0, 1, 1, 2)
	h.at(4, 3)
	h.at(4, 4)
	want := Report{
		Sent: 6, Acknowledged: 3, Unknown: 1, Refused: 1, Unsettled: 1, Deduplicated: 1,
		Received: 4, Redelivered: 1, StoredTwice: 1, UnknownStored: 1,
	}
	got := h.book.Judge(h.read, false)
	if got.Err() != nil || got.String() != want.String() || got.UnknownStored != 1 || got.Deduplicated != 1 {
		t.Fatalf("got  %+v\nwant %+v", got, want)
	}
}

// A message has one outcome.
func TestSettleTwicePanics(t *testing.T) {
	t.Parallel()
	h := newHistory(true)
	h.send(1)
	h.ack(0)
	defer func() {
		if recover() == nil {
			t.Error("settled twice")
		}
	}()
	h.ack(0)
}

// A reading is complete once everything below the last words was read, whatever came first.
func TestComplete(t *testing.T) {
	t.Parallel()
	h := newHistory(false)
	h.send(3)
	h.ack(0, 1, 2)
	words := map[int]entry.Offset{0: 3}
	if h.read.Complete(words) {
		t.Fatal("complete before anything was read")
	}
	h.get(1, 2)
	h.read.Read(Tag{Run: 7, Producer: lastWord}, 0, 3)
	if h.read.Complete(words) {
		t.Fatal("complete without the first message")
	}
	h.get(0)
	if !h.read.Complete(words) {
		t.Fatal("not complete")
	}
	if r := h.book.Judge(h.read, true); r.Err() != nil || r.Received != 3 {
		t.Fatalf("%+v", r)
	}
}

// A long history costs ranges, not messages.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	b := NewBook(1, 1)
	r := b.NewReading(true)
	for n := range uint64(1_000_000) {
		tag := b.Send(0)
		b.Settle(tag, Acknowledged, Receipt{Offset: entry.Offset(n), Known: true})
		r.Read(tag, 0, entry.Offset(n))
	}
	a := b.accounts[0]
	if n := len(a.acked) + len(r.producers[0].numbers) + len(r.partitions[0].offsets); n != 3 || len(a.recent) != recentReceipts {
		t.Fatalf("%d ranges, %d receipts", n, len(a.recent))
	}
	if err := b.Judge(r, true).Err(); err != nil {
		t.Fatal(err)
	}
}

func TestStretches(t *testing.T) {
	t.Parallel()
	start := time.Unix(100, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	var s Stretches
	s.Event(at(0))
	kill := s.Watch(at(40)) // not from the acknowledgement before it
	s.Event(at(100))
	other := s.Watch(at(110))
	s.Event(at(330))
	s.Event(at(340))
	if d := s.Stop(kill, at(350)); d != 230*time.Millisecond {
		t.Errorf("longest after the kill: %v", d)
	}
	if d := s.Stop(other, at(900)); d != 560*time.Millisecond { // silence that has not ended counts
		t.Errorf("longest with the end: %v", d)
	}
	if began, d := kill.Longest(); !began.Equal(at(100)) || d != 230*time.Millisecond {
		t.Errorf("the longest began at %v and took %v", began, d)
	}
	s.Event(at(2000))
	if d := s.Stop(kill, at(3000)); d != 230*time.Millisecond {
		t.Errorf("stopped again: %v", d)
	}
}

// What is delivered before it is known to be published has not waited; neither has what comes again.
func TestDelays(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time { return time.Unix(100, int64(ms)*int64(time.Millisecond)) }
	d := NewDelays(1)
	tag := func(n uint64) Tag { return Tag{Number: n} }
	d.Delivered(tag(0), at(0))
	d.Acknowledged(tag(0), at(10))
	d.Delivered(tag(0), at(5000))
	if d.Longest() != 0 {
		t.Errorf("delivered first: %v", d.Longest())
	}
	d.Acknowledged(tag(1), at(20))
	d.Acknowledged(tag(2), at(30))
	if !d.Delivered(tag(1), at(100)) || d.Delivered(tag(1), at(9000)) {
		t.Error("new is what comes for the first time")
	}
	d.Delivered(tag(2), at(130))
	if d.Longest() != 100*time.Millisecond {
		t.Errorf("longest: %v", d.Longest())
	}
	d.Acknowledged(tag(recentReceipts+1), at(200)) // takes the place of 1
	if d.Delivered(tag(1), at(8000)) {
		t.Error("what is older than what is remembered is not new")
	}
	d.Delivered(Tag{Producer: lastWord}, at(8000))
	d.Delivered(tag(recentReceipts+1), at(400))
	if d.Longest() != 200*time.Millisecond {
		t.Errorf("longest: %v", d.Longest())
	}
}

func TestCells(t *testing.T) {
	t.Parallel()
	r := Report{Sent: 9, Acknowledged: 8, Received: 7, StoredTwice: 2, Violations: []Violation{
		{Kind: Lost, Count: 1}, {Kind: Reordered, Count: 3}, {Kind: Gap, Count: 4}, {Kind: Changed, Count: 5},
	}}
	if got := strings.Join(r.Cells(), " "); got != "9 8 7 1 2 3 9" || len(r.Cells()) != len(Columns) {
		t.Error(got)
	}
}

// A body says what it is; one flipped bit anywhere, and it says nothing.
func TestBody(t *testing.T) {
	t.Parallel()
	tag := Tag{Run: 1 << 60, Producer: 3, Number: 1 << 40}
	for _, size := range []int{0, MinSize, 100} {
		body := AppendBody([]byte("x"), tag, size)[1:]
		if len(body) != max(size, MinSize) {
			t.Fatalf("%d bytes for %d", len(body), size)
		}
		if got, err := ParseBody(body); err != nil || got != tag {
			t.Fatalf("%+v, %v", got, err)
		}
		for bit := range len(body) * 8 {
			damaged := bytes.Clone(body)
			damaged[bit/8] ^= 1 << (bit % 8)
			if _, err := ParseBody(damaged); err == nil {
				t.Fatalf("bit %d of %d bytes", bit, size)
			}
		}
		if _, err := ParseBody(body[:len(body)-1]); err == nil {
			t.Fatal("truncated")
		}
	}
}

func FuzzParseBody(f *testing.F) {
	f.Add([]byte{})
	f.Add(AppendBody(nil, Tag{1, 2, 3}, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		tag, err := ParseBody(b)
		if err == nil && !bytes.Equal(AppendBody(nil, tag, len(b))[:checksumAt], b[:checksumAt]) {
			t.Fatalf("%x", b)
		}
	})
}
