package frame

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	framev1 "github.com/penstock-mq/penstock/api/penstock/frame/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/hash"
)

func drawMessage(t *rapid.T) Message {
	m := Message{
		EventTime: rapid.Int64Range(0, 1<<50).Draw(t, "event time"),
		Null:      rapid.Bool().Draw(t, "null"),
		Value:     rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "value"),
	}
	if rapid.Bool().Draw(t, "has key") {
		m.Key = rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "key")
	}
	if rapid.Bool().Draw(t, "has ordering key") {
		m.OrderingKey = rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "ordering key")
	}
	for range rapid.IntRange(0, 3).Draw(t, "properties") {
		m.Properties = append(m.Properties, Property{Name: rapid.String().Draw(t, "name"), Value: rapid.String().Draw(t, "value")})
	}
	return m
}

func equalMessage(t interface{ Fatalf(string, ...any) }, got, want Message) {
	same := got.Sequence == want.Sequence && got.EventTime == want.EventTime && got.Null == want.Null &&
		bytes.Equal(got.Key, want.Key) && (got.Key == nil) == (want.Key == nil) &&
		bytes.Equal(got.OrderingKey, want.OrderingKey) && (got.OrderingKey == nil) == (want.OrderingKey == nil) &&
		bytes.Equal(got.Value, want.Value) && len(got.Properties) == len(want.Properties)
	for i := range got.Properties {
		same = same && got.Properties[i] == want.Properties[i]
	}
	if !same {
		t.Fatalf("read %+v, wrote %+v", got, want)
	}
}

// TestBatchRoundTrip writes batches and reads them back, message by message, and the metadata with the stock
// protobuf codec, which is what other clients use.
func TestBatchRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		h := Header{
			Producer: rapid.StringN(1, 20, -1).Draw(t, "producer"), Sequence: rapid.Uint64Range(0, 1<<62).Draw(t, "sequence"),
			PublishTime: rapid.Int64Range(0, 1<<50).Draw(t, "publish time"), Count: rapid.IntRange(1, 20).Draw(t, "count"),
		}
		if rapid.Bool().Draw(t, "one key") {
			h.Key = rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "batch key")
		}
		var want []Message
		var payload []byte
		for i := range h.Count {
			m := drawMessage(t)
			m.Sequence = h.Sequence + uint64(i)
			want = append(want, m)
			payload = AppendMessage(payload, &m)
		}
		prefix := []byte("before")
		b := Append(bytes.Clone(prefix), &h, payload)[len(prefix):]
		f, err := Parse(b, Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if string(f.Producer) != h.Producer || f.Sequence != h.Sequence || f.HighestSequence != h.Sequence+uint64(h.Count)-1 ||
			f.PublishTime != h.PublishTime || f.Count != h.Count || !f.Batched || f.UncompressedSize != len(payload) {
			t.Fatalf("parsed %+v from %+v", f, h)
		}
		wantKind, wantHash := KeyMixed, uint32(0)
		if h.Key != nil {
			wantKind, wantHash = KeyOne, hash.Murmur3(h.Key)
		}
		if f.Key != wantKind || f.KeyHash != wantHash {
			t.Fatalf("key %d %#x, want %d %#x", f.Key, f.KeyHash, wantKind, wantHash)
		}
		i := 0
		for m, err := range f.Messages(f.Payload) {
			if err != nil {
				t.Fatal(err)
			}
			equalMessage(t, m, want[i])
			i++
		}
		if i != h.Count {
			t.Fatalf("%d messages of %d", i, h.Count)
		}
		meta, err := f.Unmarshal()
		if err != nil {
			t.Fatal(err)
		}
		if meta.GetProducerName() != h.Producer || meta.GetSequenceId() != h.Sequence || int(meta.GetNumMessagesInBatch()) != h.Count {
			t.Fatalf("stock codec read %v", meta)
		}
	})
}

// TestSingleRoundTrip does the same for a message that is a frame of its own.
func TestSingleRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := drawMessage(t)
		m.Sequence = rapid.Uint64Range(0, 1<<62).Draw(t, "sequence")
		h := Header{Producer: "p", Sequence: m.Sequence, PublishTime: 1, Single: &m}
		f, err := Parse(Append(nil, &h, m.Value), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for got, err := range f.Messages(f.Payload) {
			if err != nil {
				t.Fatal(err)
			}
			equalMessage(t, got, m)
			n++
		}
		if n != 1 || f.Count != 1 || f.Batched {
			t.Fatalf("%d messages, parsed %+v", n, f)
		}
		wantKey := KeyNone
		if m.Key != nil || m.OrderingKey != nil {
			wantKey = KeyOne
		}
		if f.Key != wantKey {
			t.Fatalf("key kind %d, want %d", f.Key, wantKey)
		}
	})
}

// TestStockSingleMetadata reads what AppendMessage wrote with the stock codec, and the other way round.
func TestStockSingleMetadata(t *testing.T) {
	t.Parallel()
	m := Message{Sequence: 7, EventTime: 9, Key: []byte{0xff, 0x00}, OrderingKey: []byte("o"), Null: true, Value: []byte("v"), Properties: []Property{{"a", "b"}}}
	b := AppendMessage(nil, &m)
	var s framev1.SingleMessageMetadata
	if err := proto.Unmarshal(b[4:4+binary.BigEndian.Uint32(b)], &s); err != nil {
		t.Fatal(err)
	}
	if s.GetPartitionKey() != "/wA=" || !s.GetPartitionKeyB64Encoded() || s.GetSequenceId() != 7 || s.GetPayloadSize() != 1 ||
		s.GetEventTime() != 9 || !s.GetNullValue() || string(s.GetOrderingKey()) != "o" || s.GetProperties()[0].GetValue() != "b" {
		t.Fatalf("stock codec read %v", &s)
	}
	stock, err := proto.Marshal(&s)
	if err != nil {
		t.Fatal(err)
	}
	again := binary.BigEndian.AppendUint32(nil, uint32(len(stock)))
	again = append(append(again, stock...), 'v')
	got, n, err := readMessage(again, 0)
	if err != nil || n != len(again) {
		t.Fatal(n, err)
	}
	equalMessage(t, got, m)
}

// mend recomputes the checksum of a frame that a test has changed.
func mend(b []byte) []byte {
	binary.BigEndian.PutUint32(b[2:], entry.CRC32C(b[6:]))
	return b
}

func stockFrame(t *testing.T, m *framev1.MessageMetadata, payload []byte) []byte {
	t.Helper()
	meta, err := proto.MarshalOptions{AllowPartial: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	b := binary.BigEndian.AppendUint16(nil, Magic)
	b = append(b, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(len(meta)))
	return mend(append(append(b, meta...), payload...))
}

// TestParseRefuses lists what a broker must not take.
func TestParseRefuses(t *testing.T) {
	t.Parallel()
	meta := func(change func(*framev1.MessageMetadata)) *framev1.MessageMetadata {
		m := &framev1.MessageMetadata{ProducerName: proto.String("p"), SequenceId: proto.Uint64(1), PublishTime: proto.Uint64(2)}
		change(m)
		return m
	}
	good := stockFrame(t, meta(func(*framev1.MessageMetadata) {}), []byte("hello"))
	if _, err := Parse(good, Limits{}); err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1
	for _, c := range []struct {
		name   string
		frame  []byte
		limits Limits
		want   Reason
	}{
		{"nothing", nil, Limits{}, Malformed},
		{"a cut header", good[:9], Limits{}, Malformed},
		{"another magic", mend(append([]byte{0x0e, 0x02}, good[2:]...)), Limits{}, Malformed},
		{"a flipped bit", flipped, Limits{}, BadChecksum},
		{"metadata beyond the frame", mend(append(append(bytes.Clone(good[:6]), 0xff, 0xff, 0xff, 0xff), good[10:]...)), Limits{}, Malformed},
		{"metadata over its limit", good, Limits{MaxMetadata: 3}, TooLarge},
		{"payload over the limit", good, Limits{MaxMessage: 4}, TooLarge},
		{"frame over the limit", good, Limits{MaxMessage: 1, MaxMetadata: 1}, TooLarge},
		{"no producer name", stockFrame(t, &framev1.MessageMetadata{SequenceId: proto.Uint64(1), PublishTime: proto.Uint64(2)}, nil), Limits{}, Malformed},
		{"a long producer name", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.ProducerName = proto.String(string(bytes.Repeat([]byte("x"), MaxProducerName+1)))
		}), nil), Limits{}, TooLarge},
		{"a batch of none", stockFrame(t, meta(func(m *framev1.MessageMetadata) { m.NumMessagesInBatch = proto.Int32(0) }), nil), Limits{}, Malformed},
		{"a negative batch", stockFrame(t, meta(func(m *framev1.MessageMetadata) { m.NumMessagesInBatch = proto.Int32(-1) }), nil), Limits{}, Malformed},
		{"more messages than bytes", stockFrame(t, meta(func(m *framev1.MessageMetadata) { m.NumMessagesInBatch = proto.Int32(1e9) }), []byte("hello")), Limits{}, Malformed},
		{"sequences that overflow", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.NumMessagesInBatch, m.SequenceId = proto.Int32(2), proto.Uint64(1<<64-1)
		}), bytes.Repeat([]byte("x"), 12)), Limits{}, Malformed},
		{"a bomb", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.Compression, m.UncompressedSize = framev1.CompressionType_ZSTD.Enum(), proto.Uint32(5000)
		}), []byte("hello")), Limits{}, TooLarge},
		{"a large claim", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.Compression, m.UncompressedSize = framev1.CompressionType_ZSTD.Enum(), proto.Uint32(1<<32-1)
		}), []byte("hello")), Limits{}, TooLarge},
		{"a compression of the future", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.Compression, m.UncompressedSize = framev1.CompressionType(5).Enum(), proto.Uint32(5)
		}), []byte("hello")), Limits{}, Unsupported},
		{"a chunk beyond its count", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.NumChunksFromMsg, m.ChunkId = proto.Int32(2), proto.Int32(2)
		}), nil), Limits{}, Malformed},
		{"a base64 key that is not", stockFrame(t, meta(func(m *framev1.MessageMetadata) {
			m.PartitionKey, m.PartitionKeyB64Encoded = proto.String("!"), proto.Bool(true)
		}), nil), Limits{}, Malformed},
		{"garbage metadata", mend([]byte{0x0e, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0xff}), Limits{}, Malformed},
	} {
		_, err := Parse(c.frame, c.limits)
		var e *Error
		if !errors.As(err, &e) || e.Reason != c.want {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
}

// TestMessagesRefuses lists batches whose inside is wrong.
func TestMessagesRefuses(t *testing.T) {
	t.Parallel()
	one := AppendMessage(nil, &Message{Value: []byte("hello")})
	frameOf := func(payload []byte, n int) Frame {
		f, err := Parse(Append(nil, &Header{Producer: "p", Count: n}, payload), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	for name, f := range map[string]Frame{
		"bytes after the last":  frameOf(append(bytes.Clone(one), 1), 1),
		"one message too few":   frameOf(one, 2),
		"a cut value":           frameOf(one[:len(one)-1], 1),
		"no payload size":       frameOf([]byte{0, 0, 0, 2, 0x28, 1}, 1),
		"a negative value size": frameOf([]byte{0, 0, 0, 11, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, 1),
		"metadata past the end": frameOf([]byte{0, 0, 0, 9, 0x18, 0}, 1),
	} {
		var last error
		for _, err := range f.Messages(f.Payload) {
			last = err
		}
		var e *Error
		if !errors.As(last, &e) || e.Reason != Malformed {
			t.Errorf("%s: %v", name, last)
		}
	}
}

func FuzzParse(f *testing.F) {
	payload := AppendMessage(AppendMessage(nil, &Message{Key: []byte("k"), Value: []byte("v")}), &Message{Properties: []Property{{"a", "b"}}})
	f.Add(Append(nil, &Header{Producer: "p", Count: 2}, payload)[6:])
	f.Add(Append(nil, &Header{Producer: "p", Single: &Message{Key: []byte{0xff}}}, []byte("v"))[6:])
	f.Add([]byte{0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, rest []byte) {
		b := append([]byte{0x0e, 1, 0, 0, 0, 0}, rest...)
		fr, err := Parse(mend(b), DefaultLimits())
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		env := EnvelopeOf(&fr)
		back, left, err := ParseEnvelope(append(AppendEnvelope(nil, &env), b...))
		if err != nil || !bytes.Equal(left, b) || back.Span != uint32(fr.Count) || !bytes.Equal(back.Producer, fr.Producer) {
			t.Fatalf("envelope of %+v: %+v, %v", fr, back, err)
		}
		n := 0
		for _, err := range fr.Messages(fr.Payload) {
			if err == nil {
				n++
			}
		}
		if n > fr.Count {
			t.Fatalf("%d messages of %d", n, fr.Count)
		}
	})
}

// TestAllocations holds the hot paths to what they promise.
func TestAllocations(t *testing.T) {
	payload := AppendMessage(nil, &Message{Value: make([]byte, 1000)})
	h := Header{Producer: "producer", Count: 1}
	b := Append(nil, &h, payload)
	buf := make([]byte, 0, 2*len(b))
	for name, fn := range map[string]func(){
		"Parse":         func() { _, _ = Parse(b, Limits{}) },
		"Append":        func() { Append(buf, &h, payload) },
		"AppendMessage": func() { AppendMessage(buf, &Message{Key: []byte("key"), Value: payload}) },
		"envelope": func() {
			e := Envelope{Format: FormatFrame, Span: 1, Key: KeyMixed}
			_, _, _ = ParseEnvelope(AppendEnvelope(buf, &e))
		},
	} {
		if n := testing.AllocsPerRun(100, fn); n > 0 {
			t.Errorf("%s allocates %.0f times", name, n)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	var payload []byte
	for range 64 {
		payload = AppendMessage(payload, &Message{Value: make([]byte, 1024)})
	}
	fr := Append(nil, &Header{Producer: "producer", Count: 64}, payload)
	b.SetBytes(int64(len(fr)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(fr, Limits{}); err != nil {
			b.Fatal(err)
		}
	}
}
