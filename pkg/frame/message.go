package frame

import (
	"encoding/base64"
	"encoding/binary"
	"iter"
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	framev1 "github.com/penstock-mq/penstock/api/penstock/frame/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Property is one application property. Names may repeat; the last one wins in a map view.
type Property struct{ Name, Value string }

// Message is one message of a frame. Decoded ones alias the payload; encoders only read.
type Message struct {
	// Sequence is the message's sequence id.
	Sequence uint64
	// EventTime is the application's time in Unix milliseconds; 0 is none.
	EventTime int64
	// Key routes the message; nil is none. Bytes that are not UTF-8 travel as base64, as Pulsar has it.
	Key []byte
	// OrderingKey orders messages when that is not the key's work; nil is none.
	OrderingKey []byte
	Properties  []Property
	// Null tells that the value is null rather than empty.
	Null bool
	// CompactedOut tells that compaction removed the message; it still takes its offset.
	CompactedOut bool
	Value        []byte
}

// Header is what a producer says of a whole frame.
type Header struct {
	// Producer is the producer's name.
	Producer string
	// Sequence is the sequence id of the first message.
	Sequence uint64
	// PublishTime is the producer's clock in Unix milliseconds.
	PublishTime int64
	// Compression says how the payload was compressed, UncompressedSize what it was before, in bytes.
	Compression      framev1.CompressionType
	UncompressedSize int
	// Count is the number of messages in a payload made by AppendMessage; 0 means that the payload is the
	// value of the single message Single, whose metadata then travels in the frame's.
	Count  int
	Single *Message
	// Key, when not nil, is the one key that all messages of the batch share.
	Key []byte
}

// AppendMessage appends one message of a batch to an uncompressed payload: metadata size, metadata, value.
func AppendMessage(dst []byte, m *Message) []byte {
	at := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	for _, p := range m.Properties {
		dst = appendProperty(dst, singleProperties, p)
	}
	dst = appendKey(dst, singlePartitionKey, singleKeyB64, m.Key)
	dst = protowire.AppendTag(dst, singlePayloadSize, protowire.VarintType)
	dst = protowire.AppendVarint(dst, uint64(len(m.Value)))
	if m.CompactedOut {
		dst = appendVarint(dst, singleCompactedOut, 1)
	}
	if m.EventTime != 0 {
		dst = appendVarint(dst, singleEventTime, uint64(m.EventTime))
	}
	if m.OrderingKey != nil {
		dst = protowire.AppendTag(dst, singleOrderingKey, protowire.BytesType)
		dst = protowire.AppendBytes(dst, m.OrderingKey)
	}
	dst = appendVarint(dst, singleSequenceID, m.Sequence)
	if m.Null {
		dst = appendVarint(dst, singleNullValue, 1)
	}
	binary.BigEndian.PutUint32(dst[at:], uint32(len(dst)-at-4))
	return append(dst, m.Value...)
}

// Append appends a whole frame around payload, which is compressed already if the header says so. It allocates
// only when dst has no room.
func Append(dst []byte, h *Header, payload []byte) []byte {
	start := len(dst)
	dst = append(dst, byte(Magic>>8), byte(Magic&0xff), 0, 0, 0, 0, 0, 0, 0, 0)
	dst = protowire.AppendTag(dst, fieldProducerName, protowire.BytesType)
	dst = protowire.AppendString(dst, h.Producer)
	dst = appendVarint(dst, fieldSequenceID, h.Sequence)
	dst = appendVarint(dst, fieldPublishTime, uint64(h.PublishTime))
	if h.Count == 0 && h.Single != nil {
		for _, p := range h.Single.Properties {
			dst = appendProperty(dst, fieldProperties, p)
		}
		dst = appendKey(dst, fieldPartitionKey, fieldKeyB64, h.Single.Key)
	} else {
		dst = appendKey(dst, fieldPartitionKey, fieldKeyB64, h.Key)
	}
	if h.Compression != framev1.CompressionType_NONE {
		dst = appendVarint(dst, fieldCompression, uint64(h.Compression))
		dst = appendVarint(dst, fieldUncompressedSize, uint64(h.UncompressedSize))
	}
	switch {
	case h.Count > 0:
		dst = appendVarint(dst, fieldNumMessages, uint64(h.Count))
		if h.Count > 1 {
			dst = appendVarint(dst, fieldHighestSequence, h.Sequence+uint64(h.Count)-1)
		}
	case h.Single != nil:
		if h.Single.EventTime != 0 {
			dst = appendVarint(dst, fieldEventTime, uint64(h.Single.EventTime))
		}
		if h.Single.OrderingKey != nil {
			dst = protowire.AppendTag(dst, fieldOrderingKey, protowire.BytesType)
			dst = protowire.AppendBytes(dst, h.Single.OrderingKey)
		}
		if h.Single.Null {
			dst = appendVarint(dst, fieldNullValue, 1)
		}
	}
	binary.BigEndian.PutUint32(dst[start+6:], uint32(len(dst)-start-headerSize))
	dst = append(dst, payload...)
	binary.BigEndian.PutUint32(dst[start+2:], entry.CRC32C(dst[start+6:]))
	return dst
}

// Messages iterates over the messages of the frame, given its uncompressed payload (Payload itself when the
// frame is not compressed). It yields an error of type [*Error] at the first malformed message, and stops.
// Exactly Count messages come, and they must use up the payload.
func (f *Frame) Messages(payload []byte) iter.Seq2[Message, error] {
	return func(yield func(Message, error) bool) {
		if !f.Batched {
			m, err := f.single(payload)
			yield(m, err)
			return
		}
		for i := range f.Count {
			m, n, err := readMessage(payload, f.Sequence+uint64(i))
			if !yield(m, err) || err != nil {
				return
			}
			payload = payload[n:]
		}
		if len(payload) > 0 {
			yield(Message{}, malformed("message", "%d bytes after the last of %d messages", len(payload), f.Count))
		}
	}
}

// single makes the one message of a frame that is not a batch.
func (f *Frame) single(payload []byte) (Message, error) {
	m := Message{Sequence: f.Sequence, EventTime: f.EventTime, Value: payload}
	var b64 bool
	for b := f.Metadata; len(b) > 0; {
		v, n, err := readField(b, false)
		if err != nil {
			return Message{}, err
		}
		b = b[n:]
		switch v.num {
		case fieldProperties:
			p, err := readProperty(v.bytes)
			if err != nil {
				return Message{}, err
			}
			m.Properties = append(m.Properties, p)
		case fieldPartitionKey:
			m.Key = v.bytes
		case fieldKeyB64:
			b64 = v.varint != 0
		case fieldOrderingKey:
			m.OrderingKey = v.bytes
		case fieldNullValue:
			m.Null = v.varint != 0
		default: // of the batch, not of the message
		}
	}
	if b64 {
		return m, m.decodeKey()
	}
	return m, nil
}

// readMessage reads the first message of an uncompressed batch payload, and returns its length.
func readMessage(payload []byte, sequence uint64) (Message, int, error) {
	if len(payload) < 4 {
		return Message{}, 0, malformed("message", "%d bytes left for a metadata size", len(payload))
	}
	size := binary.BigEndian.Uint32(payload)
	if uint64(size) > uint64(len(payload)-4) {
		return Message{}, 0, malformed("message", "metadata of %d bytes in %d", size, len(payload)-4)
	}
	m := Message{Sequence: sequence}
	value := uint64(math.MaxUint64)
	var b64 bool
	for b := payload[4 : 4+int(size)]; len(b) > 0; {
		v, n, err := readField(b, true)
		if err != nil {
			return Message{}, 0, err
		}
		b = b[n:]
		switch v.num {
		case singleProperties:
			p, err := readProperty(v.bytes)
			if err != nil {
				return Message{}, 0, err
			}
			m.Properties = append(m.Properties, p)
		case singlePartitionKey:
			m.Key = v.bytes
		case singlePayloadSize:
			value = v.varint
		case singleCompactedOut:
			m.CompactedOut = v.varint != 0
		case singleEventTime:
			m.EventTime = int64(v.varint)
		case singleKeyB64:
			b64 = v.varint != 0
		case singleOrderingKey:
			m.OrderingKey = v.bytes
		case singleSequenceID:
			m.Sequence = v.varint
		case singleNullValue:
			m.Null = v.varint != 0
		default:
		}
	}
	rest := payload[4+int(size):]
	if value > uint64(len(rest)) {
		return Message{}, 0, malformed("message", "value of %d bytes in %d", int64(value), len(rest))
	}
	m.Value = rest[:value:value]
	if b64 {
		if err := m.decodeKey(); err != nil {
			return Message{}, 0, err
		}
	}
	return m, 4 + int(size) + int(value), nil
}

func (m *Message) decodeKey() error {
	raw := make([]byte, base64.StdEncoding.DecodedLen(len(m.Key)))
	n, err := base64.StdEncoding.Decode(raw, m.Key)
	if err != nil {
		return malformed("message", "partition key: %v", err)
	}
	m.Key = raw[:n]
	return nil
}

func appendVarint(dst []byte, num protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(dst, num, protowire.VarintType), v)
}

func appendKey(dst []byte, num, b64 protowire.Number, key []byte) []byte {
	if key == nil {
		return dst
	}
	dst = protowire.AppendTag(dst, num, protowire.BytesType)
	if utf8.Valid(key) {
		return protowire.AppendBytes(dst, key)
	}
	dst = protowire.AppendVarint(dst, uint64(base64.StdEncoding.EncodedLen(len(key))))
	dst = base64.StdEncoding.AppendEncode(dst, key)
	return appendVarint(dst, b64, 1)
}

// appendProperty appends a KeyValue: field 1 the name, field 2 the value.
func appendProperty(dst []byte, num protowire.Number, p Property) []byte {
	dst = protowire.AppendTag(dst, num, protowire.BytesType)
	dst = protowire.AppendVarint(dst, uint64(2+protowire.SizeBytes(len(p.Name))+protowire.SizeBytes(len(p.Value))))
	dst = protowire.AppendString(protowire.AppendTag(dst, 1, protowire.BytesType), p.Name)
	return protowire.AppendString(protowire.AppendTag(dst, 2, protowire.BytesType), p.Value)
}

func readProperty(b []byte) (Property, error) {
	var p Property
	var name, value bool
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return p, malformed("metadata", "property: %v", protowire.ParseError(n))
		}
		if (num == 1 || num == 2) && typ != protowire.BytesType {
			return p, malformed("metadata", "property field %d has wire type %d", num, typ)
		}
		m := protowire.ConsumeFieldValue(num, typ, b[n:])
		if m < 0 {
			return p, malformed("metadata", "property: %v", protowire.ParseError(m))
		}
		switch num {
		case 1:
			v, _ := protowire.ConsumeBytes(b[n:])
			p.Name, name = string(v), true
		case 2:
			v, _ := protowire.ConsumeBytes(b[n:])
			p.Value, value = string(v), true
		default:
		}
		b = b[n+m:]
	}
	if !name || !value {
		return p, malformed("metadata", "property without a name or a value")
	}
	return p, nil
}
