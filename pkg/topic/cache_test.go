package topic

import (
	"slices"
	"testing"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
)

func TestCacheReads(t *testing.T) {
	t.Parallel()
	c, v := NewCache(1<<20), &cached{}
	for o := entry.Offset(10); o < 40; o += 3 { // entries of three messages and 100 bytes
		c.push(v, []chain.ConfirmedEntry{{Position: entry.Position{Entry: entry.EntryID(o)}, Offset: o, Span: 3, Body: make([]byte, 100)}})
	}
	read := func(from, end entry.Offset, maxBytes int) []entry.Offset {
		var out []entry.Offset
		for _, e := range v.read(nil, from, end, maxBytes) {
			out = append(out, e.offset)
		}
		return out
	}
	for _, k := range []struct {
		from, end entry.Offset
		maxBytes  int
		want      []entry.Offset
	}{
		{9, 99, 1000, nil},                        // evicted, or never cached
		{10, 99, 0, []entry.Offset{10}},           // at least one
		{12, 99, 250, []entry.Offset{10, 13}},     // from within a batch
		{34, 99, 1000, []entry.Offset{34, 37}},    // to the end
		{10, 14, 1000, []entry.Offset{10, 13}},    // no further than what is visible
		{10, 10, 1000, nil},                       // nothing is
		{37, 38, 1000, []entry.Offset{37}},        // the last
		{10, 99, 300, []entry.Offset{10, 13, 16}}, // as many as fit
	} {
		if got := read(k.from, k.end, k.maxBytes); !slices.Equal(got, k.want) {
			t.Errorf("from %d below %d, %d bytes: %v, want %v", k.from, k.end, k.maxBytes, got, k.want)
		}
	}
	v.clear()
	if got := read(10, 99, 1000); got != nil {
		t.Errorf("after clear: %v", got)
	}
}

// Many topics share the bytes; a large entry pushes out whatever is older, itself included.
func TestCacheStaysWithinItsBytes(t *testing.T) {
	t.Parallel()
	c := NewCache(10_000)
	topics := make([]*cached, 7)
	for i := range topics {
		topics[i] = &cached{}
	}
	held := func() int64 {
		n := int64(0)
		for _, v := range topics {
			for _, e := range v.tail[v.head:] {
				n += int64(len(e.body)) + entryOverhead
			}
		}
		return n
	}
	for i := range 5000 {
		size := i % 900
		if i%1000 == 999 {
			size = 20_000
		}
		c.push(topics[i*i%7], []chain.ConfirmedEntry{{Offset: entry.Offset(i), Span: 1, Body: make([]byte, size)}})
		if held() != c.Used() || c.Used() > 10_000 {
			t.Fatalf("%d bytes held, %d counted", held(), c.Used())
		}
	}
	if len(c.ring) > 4096 {
		t.Fatalf("the ring has grown to %d", len(c.ring))
	}
}
