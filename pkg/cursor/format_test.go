package cursor

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// hexBlock returns the bytes of a block of docs/formats.md, nil if there is none of that name.
func hexBlock(t *testing.T, name string) []byte {
	t.Helper()
	page, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(page), "```hex "+name+"\n")
	if !ok {
		return nil
	}
	block, _, _ := strings.Cut(rest, "```")
	var out []byte
	for line := range strings.Lines(block) {
		line, _, _ = strings.Cut(line, "#")
		b, err := hex.DecodeString(strings.Join(strings.Fields(line), ""))
		if err != nil {
			t.Fatalf("block %s: %v", name, err)
		}
		out = append(out, b...)
	}
	return out
}

// TestFormatsPage holds the examples of docs/formats.md to the code, both ways.
func TestFormatsPage(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 100)
	first, _ := c.Take(0)
	ack(t, c, 65700, 65703)
	ack(t, c, 65710, 65711)
	if _, err := c.SetRetry(0, maxOffset, Range{65720, 65722}, Retry{Count: 2, NotBefore: 1700000000500, KeyHash: 0xdeadbeef, Reason: RetryNacked}); err != nil {
		t.Fatal(err)
	}
	second, _ := c.Take(1700000000000)
	c.pages[1].whole = true
	c.changed(c.pages[1])
	third, _ := c.Take(1700000000000)
	page := map[string]Record{}
	for _, b := range []Batch{first, second, third} {
		for _, r := range b.Records {
			name := map[uint8]string{KindSubscription: "cursor-subscription", KindState: "cursor-state", KindPage: "cursor-page", KindDelta: "cursor-delta"}[r.Kind]
			if r.Delete {
				continue
			}
			for part, want := range map[string][]byte{"-key": r.Key, "": r.Value} {
				if got := hexBlock(t, name+part); !bytes.Equal(got, want) {
					t.Errorf("docs/formats.md block %s has\n%x\nthe code writes\n%x", name+part, got, want)
				}
			}
			page[name] = Record{Kind: r.Kind, Key: hexBlock(t, name+"-key"), Value: hexBlock(t, name)}
		}
	}
	for _, change := range []string{"cursor-delta", "cursor-page"} {
		got, err := Load([]Record{page["cursor-subscription"], page["cursor-state"], page[change]}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got.Meta() != c.Meta() || !reflect.DeepEqual(got.Missing(nil, Range{0, 70000}), c.Missing(nil, Range{0, 70000})) || got.retries.Offsets() != 2 {
			t.Errorf("%s reads as %+v", change, got)
		}
	}
}

// loadAndStore checks what must hold of any records that load: storing everything anew changes nothing.
func loadAndStore(t *testing.T, records []Record) {
	t.Helper()
	c, err := Load(records, 0)
	if err != nil {
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) && !errors.Is(err, ErrDeleted) {
			t.Fatalf("untyped error %v", err)
		}
		return
	}
	if c.Acked(c.Floor()) || c.NextUnacked(0) != c.Floor() {
		t.Fatalf("floor %d is acknowledged", c.Floor())
	}
	var l log
	l.write(records)
	for _, p := range c.pages {
		p.whole = true
		c.changed(p)
	}
	c.metaDirty, c.stateDirty = true, true
	l.store(c)
	again, err := Load(l.records(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if again.meta != c.meta || again.floor != c.floor || again.generation != c.generation || again.above != c.above ||
		again.Holes() != c.Holes() || !slices.Equal(again.retries.spans, c.retries.spans) {
		t.Fatalf("stored %+v, loaded %+v", c, again)
	}
	for number, p := range c.pages {
		q := again.pages[number]
		if q == nil {
			t.Fatalf("page %d is gone", number)
		}
		for i := 0; i < pageSize; i = p.acked.nextClear(p.acked.nextSet(i)) {
			if next := p.acked.nextSet(i); next != q.acked.nextSet(i) || p.acked.nextClear(next) != q.acked.nextClear(next) {
				t.Fatalf("page %d differs after %d", number, i)
			}
		}
	}
}

// FuzzLoad takes records apart as they might come from a damaged log.
func FuzzLoad(f *testing.F) {
	c := newCursor(f, 100)
	var l log
	l.store(c)
	ack(f, c, 110, 120)
	_, _ = c.SetRetry(0, maxOffset, Range{130, 132}, Retry{Count: 1, Reason: RetryNacked})
	l.store(c)
	c.pages[0].whole = true
	c.changed(c.pages[0])
	ack(f, c, 300, 301)
	l.store(c)
	ack(f, c, 400, 401)
	l.store(c)
	var seed []byte
	for _, r := range l.records() {
		seed = append(seed, r.Kind, byte(len(r.Key)), byte(len(r.Value)))
		seed = append(append(seed, r.Key...), r.Value...)
	}
	f.Add(seed)
	f.Add([]byte{KindSubscription, 16, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		var records []Record
		for len(data) >= 3 {
			kind, k, v := data[0], int(data[1]), int(data[2])
			data = data[3:]
			if len(data) < k+v {
				break
			}
			records = append(records, Record{Kind: kind, Key: data[:k], Value: data[k : k+v]})
			data = data[k+v:]
		}
		_, _ = Group(records)
		loadAndStore(t, records)
	})
}

// FuzzValues gets past the checksums: the values are the fuzzer's, sealed.
func FuzzValues(f *testing.F) {
	c := newCursor(f, 100)
	first, _ := c.Take(0)
	ack(f, c, 110, 120)
	_, _ = c.SetRetry(0, maxOffset, Range{130, 132}, Retry{Count: 1, Reason: RetryNacked})
	second, _ := c.Take(0)
	c.pages[0].whole = true
	c.changed(c.pages[0])
	third, _ := c.Take(0)
	body := func(r Record) []byte { return r.Value[:len(r.Value)-crcBytes] }
	f.Add(body(first.Records[0]), body(first.Records[1]), body(third.Records[0]), body(second.Records[0]), uint64(0))
	f.Add(body(first.Records[0]), body(first.Records[1]), []byte{1, 2, 0}, []byte{1, 0, 0}, uint64(1))
	f.Fuzz(func(t *testing.T, meta, state, page, delta []byte, number uint64) {
		keys := pageKeys{number: number}
		if len(state) >= 5 {
			keys.generation = Generation(state[4])
		}
		snap := seal(KindPage, keys.pageKey(testUUID), page)
		seq := uint64(1)
		if p, err := decodePage(snap); err == nil {
			seq = p.seq + 1
		}
		loadAndStore(t, []Record{
			seal(KindSubscription, testUUID[:], meta), seal(KindState, testUUID[:], state), snap,
			seal(KindDelta, keys.deltaKey(testUUID, seq), delta),
		})
	})
}

func TestValuesOfAnotherVersionAreRefused(t *testing.T) {
	t.Parallel()
	c := newCursor(t, 0)
	b, _ := c.Take(0)
	v := append([]byte{}, b.Records[1].Value...)
	v[0] = 2
	_, err := Load([]Record{b.Records[0], seal(KindState, testUUID[:], v[:len(v)-crcBytes])}, 0)
	if err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Fatalf("got %v", err)
	}
	other := entry.UUID{7}
	if _, err := Load([]Record{b.Records[0], {Kind: KindState, Key: other[:], Value: b.Records[1].Value}}, 0); err == nil {
		t.Fatal("a record of another subscription was accepted")
	}
}
