package frame

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/entry"
)

func drawEnvelope(t *rapid.T) Envelope {
	e := Envelope{
		Version: EnvelopeVersion, Format: FormatFrame, Flags: Flags(rapid.Uint16().Draw(t, "flags")),
		Base: entry.Offset(rapid.Uint64Range(0, 1<<63).Draw(t, "base")), Span: rapid.Uint32Range(1, 1<<31).Draw(t, "span"),
		BrokerTime: rapid.Int64().Draw(t, "broker time"), MinPublish: rapid.Int64().Draw(t, "min"), MaxPublish: rapid.Int64().Draw(t, "max"),
	}
	if rapid.Bool().Draw(t, "producer") {
		e.Producer = rapid.SliceOfN(rapid.Byte(), 1, 30).Draw(t, "name")
		e.ProducerEpoch, e.FirstSeq, e.LastSeq = rapid.Uint64().Draw(t, "epoch"), rapid.Uint64().Draw(t, "first"), rapid.Uint64().Draw(t, "last")
	}
	if rapid.Bool().Draw(t, "chunked") {
		e.Chunks = rapid.Uint32Range(1, 1000).Draw(t, "chunks")
		e.Chunk = rapid.Uint32Range(0, e.Chunks-1).Draw(t, "chunk")
	}
	e.Key = KeyKind(rapid.IntRange(0, 2).Draw(t, "key"))
	if e.Key == KeyOne {
		e.KeyHash = rapid.Uint32().Draw(t, "hash")
	}
	return e
}

func equalEnvelope(a, b Envelope) bool {
	name := bytes.Equal(a.Producer, b.Producer)
	a.Producer, b.Producer = nil, nil
	return name && a.Version == b.Version && a.Format == b.Format && a.Flags == b.Flags && a.Base == b.Base && a.Span == b.Span &&
		a.BrokerTime == b.BrokerTime && a.MinPublish == b.MinPublish && a.MaxPublish == b.MaxPublish &&
		a.ProducerEpoch == b.ProducerEpoch && a.FirstSeq == b.FirstSeq && a.LastSeq == b.LastSeq &&
		a.Chunk == b.Chunk && a.Chunks == b.Chunks && a.Key == b.Key && a.KeyHash == b.KeyHash
}

// TestEnvelopeRoundTrip writes envelopes, adds tags of the future that may be skipped, and reads them back.
func TestEnvelopeRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := drawEnvelope(t)
		batch := rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "batch")
		b := AppendEnvelope(nil, &e)
		for tag := TagDeliverAt; tag < 12; tag++ {
			if rapid.Bool().Draw(t, "future") {
				v := rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "future value")
				b = append(appendTag(b, tag, len(v)), v...)
			}
		}
		binary.BigEndian.PutUint32(b[4:], uint32(len(b)))
		got, left, err := ParseEnvelope(append(b, batch...))
		if err != nil {
			t.Fatal(err)
		}
		if !equalEnvelope(got, e) || !bytes.Equal(left, batch) {
			t.Fatalf("read %+v, wrote %+v", got, e)
		}
	})
}

// TestMustUnderstand is the promise to older programs: they refuse what they would serve wrongly.
func TestMustUnderstand(t *testing.T) {
	t.Parallel()
	e := Envelope{Format: FormatFrame, Span: 1, Producer: []byte("p")}
	b := AppendEnvelope(nil, &e)
	b = append(appendTag(b, TagTransaction|mustUnderstand, 16), make([]byte, 16)...)
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)))
	_, _, err := ParseEnvelope(b)
	var refused *Error
	if !errors.As(err, &refused) || refused.Reason != Unsupported || refused.Tag != TagTransaction {
		t.Fatalf("an unknown must-understand tag gave %v", err)
	}
	// A known tag is understood with the bit and without.
	known := append(AppendEnvelope(nil, &Envelope{Format: FormatFrame, Span: 1}), 0x80, 3, 0, 0, 0, 1, byte(KeyMixed))
	binary.BigEndian.PutUint32(known[4:], uint32(len(known)))
	if got, _, err := ParseEnvelope(known); err != nil || got.Key != KeyMixed {
		t.Fatalf("a known must-understand tag gave %+v, %v", got, err)
	}
}

func TestEnvelopeRefuses(t *testing.T) {
	t.Parallel()
	base := AppendEnvelope(nil, &Envelope{Format: FormatFrame, Span: 1, Key: KeyMixed})
	with := func(change func(b []byte) []byte) []byte {
		b := change(bytes.Clone(base))
		return b
	}
	grow := func(tail ...byte) []byte {
		b := append(bytes.Clone(base), tail...)
		binary.BigEndian.PutUint32(b[4:], uint32(len(b)))
		return b
	}
	for _, c := range []struct {
		name string
		body []byte
		want Reason
	}{
		{"nothing", nil, Malformed},
		{"a cut fixed part", base[:43], Malformed},
		{"another version", with(func(b []byte) []byte { b[0] = 2; return b }), Unsupported},
		{"another format", with(func(b []byte) []byte { b[1] = byte(FormatKafka); return b }), Unsupported},
		{"a length beyond the body", with(func(b []byte) []byte { b[7]++; return b }), Malformed},
		{"a length below the fixed part", with(func(b []byte) []byte { b[7] = 43; return b }), Malformed},
		{"a span of none", with(func(b []byte) []byte { b[19] = 0; return b }), Malformed},
		{"offsets that overflow", with(func(b []byte) []byte {
			copy(b[8:], bytes.Repeat([]byte{0xff}, 8))
			return b
		}), Malformed},
		{"a cut tag", grow(0, 9, 0), Malformed},
		{"a tag beyond the envelope", grow(0, 9, 0, 0, 0, 1), Malformed},
		{"a tag twice", grow(0, 3, 0, 0, 0, 1, 2), Malformed},
		{"tags out of order", grow(0, 2, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1), Malformed},
	} {
		_, _, err := ParseEnvelope(c.body)
		var e *Error
		if !errors.As(err, &e) || e.Reason != c.want {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
}

func FuzzParseEnvelope(f *testing.F) {
	f.Add(AppendEnvelope(nil, &Envelope{Format: FormatFrame, Span: 3, Producer: []byte("p"), Key: KeyOne, KeyHash: 5, Chunks: 2}))
	f.Add([]byte{1, 1, 0, 0})
	f.Fuzz(func(t *testing.T, body []byte) {
		e, left, err := ParseEnvelope(body)
		if err != nil {
			var typed *Error
			if !errors.As(err, &typed) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		again, left2, err := ParseEnvelope(append(AppendEnvelope(nil, &e), left...))
		if err != nil || !equalEnvelope(again, e) || !bytes.Equal(left, left2) {
			t.Fatalf("%+v became %+v, %v", e, again, err)
		}
	})
}
