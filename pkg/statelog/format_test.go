package statelog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// sample is an entry with one record of each kind.
func sample() []byte {
	b := appendHeader(nil)
	b = appendRecord(b, opPut, 1, "topic-a", []byte("key"), []byte("value"))
	b = appendRecord(b, opDelete, 2, "topic-a", []byte("old"), nil)
	b = appendRecord(b, opDeleteOwner, 0, "topic-b", nil, nil)
	putHeader(b, header{seq: 7, time: 1_700_000_000_000, count: 3})
	return b
}

func read(body []byte) ([]stored, error) {
	var out []stored
	err := eachRecord(body, func(_ int32, r *stored) error {
		out = append(out, *r)
		return nil
	})
	return out, err
}

func TestFormat(t *testing.T) {
	t.Parallel()
	b := sample()
	h, err := parseHeader(b)
	if err != nil || h != (header{seq: 7, time: 1_700_000_000_000, count: 3}) {
		t.Fatalf("%+v, %v", h, err)
	}
	end, millis, err := describe(b)
	if err != nil || end != 8 || millis != 1_700_000_000_000 {
		t.Fatalf("%d, %d, %v", end, millis, err)
	}
	rs, err := read(b)
	if err != nil || len(rs) != 3 {
		t.Fatalf("%+v, %v", rs, err)
	}
	if r := rs[0]; r.op != opPut || r.kind != 1 || r.owner != "topic-a" || string(r.key) != "key" || string(r.value) != "value" || r.bad != nil ||
		r.size != encodedSize("topic-a", r.key, r.value) {
		t.Fatalf("%+v", r)
	}
	if rs[1].op != opDelete || rs[2].op != opDeleteOwner || rs[2].owner != "topic-b" {
		t.Fatalf("%+v", rs)
	}
	for n := range b { // cut short anywhere
		if _, err := read(b[:n]); err == nil {
			t.Fatalf("%d of %d bytes are read", n, len(b))
		}
	}
	b[0] = 2
	var format *FormatError
	if _, err := read(b); !errors.As(err, &format) {
		t.Fatalf("a newer version: %v", err)
	}
}

// Every bit counts: a flip is seen, and one in a value is charged to its owner alone.
func TestFlippedBits(t *testing.T) {
	t.Parallel()
	good := sample()
	valueAt := bytes.Index(good, []byte("value"))
	for i := headerSize; i < len(good); i++ {
		b := bytes.Clone(good)
		b[i] ^= 0x10
		rs, err := read(b)
		crcOfValue := i >= headerSize+12 && i < headerSize+16
		switch {
		case i >= valueAt && i < valueAt+5 || crcOfValue:
			if err != nil || len(rs) != 3 || rs[0].bad == nil || rs[0].owner != "topic-a" || rs[1].bad != nil {
				t.Fatalf("byte %d: %+v, %v", i, rs, err)
			}
		case err == nil:
			bad := false
			for _, r := range rs {
				bad = bad || r.bad != nil
			}
			if !bad {
				t.Fatalf("byte %d: not seen", i)
			}
		}
	}
}

func FuzzEntry(f *testing.F) {
	f.Add(sample())
	f.Add([]byte{})
	f.Add(appendHeader(nil))
	huge := sample()
	binary.BigEndian.PutUint32(huge[4:], 1<<31)
	f.Add(huge)
	f.Fuzz(func(t *testing.T, body []byte) {
		x := NewIndex()
		n := int32(0)
		good := true
		again := appendHeader(nil)
		err := eachRecord(body, func(i int32, r *stored) error {
			if i != n {
				t.Fatalf("record %d after %d", i, n)
			}
			n++
			good = good && r.bad == nil
			x.apply(entry.Position{Batch: i}, r)
			again = appendRecord(again, r.op, r.kind, r.owner, r.key, r.value)
			return nil
		})
		if err != nil || !good {
			return
		}
		h, err := parseHeader(body)
		if err != nil {
			t.Fatal(err)
		}
		putHeader(again, h)
		if h.count > 0 && !bytes.Equal(again[4:], body[4:]) {
			t.Fatalf("%x is written as %x", body, again)
		}
	})
}

// A damaged value refuses its owner, and keeps the ledger that holds it.
func TestDamageIsChargedToItsOwner(t *testing.T) {
	t.Parallel()
	x := NewIndex()
	at := func(e entry.EntryID, i int32) entry.Position { return entry.Position{Ledger: 5, Entry: e, Batch: i} }
	x.apply(at(0, 0), &stored{owner: "a", kind: 1, key: []byte("k"), value: []byte("v"), size: 10})
	x.apply(at(0, 1), &stored{owner: "b", kind: 1, key: []byte("k"), value: []byte("v"), size: 20, bad: errValueChecksum})
	if live, n := x.Live(); live != 30 || n != 2 {
		t.Fatalf("%d bytes of %d records live", live, n)
	}
	out, _ := x.toRewrite(5, 1000)
	if len(out) != 2 || out[0].bad != nil || out[1].bad == nil {
		t.Fatalf("%+v", out)
	}
	// What is about to be superseded is not written again.
	x.hold("a", itemName(1, []byte("k")))
	out, waiting := x.toRewrite(5, 1000)
	if len(out) != 1 || !waiting || out[0].it.owner.name != "b" {
		t.Fatalf("%+v, %v", out, waiting)
	}
	x.hold("b", "")
	if out, waiting = x.toRewrite(5, 1000); len(out) != 0 || !waiting {
		t.Fatalf("%+v, %v", out, waiting)
	}
	x.apply(at(1, 0), &stored{op: opDeleteOwner, owner: "b", size: 5})
	x.release("b", "")
	x.release("a", itemName(1, []byte("k")))
	if live, n := x.Live(); live != 10 || n != 1 || len(x.pending) != 0 {
		t.Fatalf("%d bytes of %d records live", live, n)
	}
	if out, _ = x.toRewrite(4, 1000); len(out) != 0 {
		t.Fatalf("ledger 4 has %+v", out)
	}
}
