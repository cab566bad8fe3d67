package frame

import (
	"encoding/binary"
	"fmt"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// EnvelopeVersion is the version of envelopes written now.
const EnvelopeVersion = 1

// Format tells what follows an envelope.
type Format uint8

// The formats.
const (
	// FormatFrame: the batch frame of this package.
	FormatFrame Format = 1
	// FormatKafka is reserved for a Kafka RecordBatch.
	FormatKafka Format = 2
)

// Flags of an envelope. Unknown ones are ignored.
type Flags uint16

// The flags.
const (
	// FlagMarker: the entry is a marker for brokers; it takes offsets but is not delivered.
	FlagMarker Flags = 1 << 0
	// FlagDedup: the producer field takes part in deduplication; an owner that rebuilds what it knows of
	// producers reads it.
	FlagDedup Flags = 1 << 1
)

// fixedEnvelope is the length of the part of an envelope that is always there.
const fixedEnvelope = 44

// maxEnvelope bounds the whole envelope in bytes.
const maxEnvelope = 64 << 10

// mustUnderstand is the bit of a tag that tells a reader to refuse an entry whose tag it does not know.
const mustUnderstand uint16 = 0x8000

// Tags of the optional fields, in the order in which they stand. A tag's high bit, outside of these numbers,
// says "must understand"; it is the writer's choice, entry by entry.
const (
	tagProducer uint16 = 1
	tagChunk    uint16 = 2
	tagKey      uint16 = 3
	// Reserved, for what is not written yet: see docs/formats.md.
	TagDeliverAt     uint16 = 4 // i64: Unix milliseconds before which nothing is delivered
	TagTransaction   uint16 = 5 // 16 bytes: transaction id; must understand
	TagOrigin        uint16 = 6 // cluster UUID, topic UUID, u32 partition, u64 offset: where it was replicated from
	TagCompactedFrom uint16 = 7 // u64 first, u64 last, retained bitset; must understand
	TagTransform     uint16 = 8 // u16 transform, key id: what was done to the stored bytes; must understand
)

// Envelope is what the owning broker writes before a batch when it appends it. Everyone behind the broker
// acts on the envelope and leaves the batch alone.
//
// The fields could have been written into the frame's own metadata, as Pulsar's broker entry metadata is
// prepended as one more protobuf; fixed offsets are read without parsing (a binary search over millions of
// entries reads Base and BrokerTime only), and a must-understand tag stops an old program from serving what it
// would serve wrongly.
type Envelope struct {
	Version uint8
	Format  Format
	Flags   Flags
	// Base is the offset of the first message, Span the number of offsets taken, at least 1.
	Base entry.Offset
	Span uint32
	// Times in Unix milliseconds: the broker's at append, and the range of the messages' publish times.
	BrokerTime, MinPublish, MaxPublish int64

	// Producer is the producer's name, empty when the entry has no producer field. It aliases what was parsed.
	Producer          []byte
	ProducerEpoch     uint64
	FirstSeq, LastSeq uint64
	// Chunk and Chunks place a chunk in its large message; Chunks is 0 when the entry is not a chunk.
	Chunk, Chunks uint32
	// Key tells what keys the messages have; KeyHash is the full murmur3_32 with KeyOne.
	Key     KeyKind
	KeyHash uint32
}

// EnvelopeOf fills what an envelope takes from a parsed frame: all but Base, BrokerTime and ProducerEpoch.
// Producer aliases the frame.
func EnvelopeOf(f *Frame) Envelope {
	e := Envelope{
		Version: EnvelopeVersion, Format: FormatFrame, Span: uint32(f.Count),
		MinPublish: f.PublishTime, MaxPublish: f.PublishTime,
		Producer: f.Producer, FirstSeq: f.Sequence, LastSeq: f.HighestSequence,
		Chunk: f.Chunk, Chunks: f.Chunks, Key: f.Key, KeyHash: f.KeyHash,
	}
	if f.Marker {
		e.Flags |= FlagMarker
	}
	return e
}

// AppendEnvelope appends e, always in the current version. It allocates only when dst has no room. A span
// of 0, a name above [MaxProducerName] or a chunk beyond its count is a broken assumption of the caller and
// panics: all three were checked when the batch came in.
func AppendEnvelope(dst []byte, e *Envelope) []byte {
	if e.Span == 0 || len(e.Producer) > MaxProducerName || e.Chunks > 0 && e.Chunk >= e.Chunks || e.Key > KeyMixed {
		panic(fmt.Sprintf("frame: envelope with span %d, a name of %d bytes, chunk %d of %d, key kind %d",
			e.Span, len(e.Producer), e.Chunk, e.Chunks, e.Key))
	}
	start := len(dst)
	dst = append(dst, EnvelopeVersion, byte(e.Format))
	dst = binary.BigEndian.AppendUint16(dst, uint16(e.Flags))
	dst = binary.BigEndian.AppendUint32(dst, 0) // length, below
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.Base))
	dst = binary.BigEndian.AppendUint32(dst, e.Span)
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.BrokerTime))
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.MinPublish))
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.MaxPublish))
	if len(e.Producer) > 0 {
		dst = appendTag(dst, tagProducer, 24+len(e.Producer))
		dst = binary.BigEndian.AppendUint64(dst, e.ProducerEpoch)
		dst = binary.BigEndian.AppendUint64(dst, e.FirstSeq)
		dst = binary.BigEndian.AppendUint64(dst, e.LastSeq)
		dst = append(dst, e.Producer...)
	}
	if e.Chunks > 0 {
		dst = appendTag(dst, tagChunk, 8)
		dst = binary.BigEndian.AppendUint32(dst, e.Chunk)
		dst = binary.BigEndian.AppendUint32(dst, e.Chunks)
	}
	switch e.Key {
	case KeyNone:
	case KeyOne:
		dst = appendTag(dst, tagKey, 5)
		dst = append(dst, byte(KeyOne))
		dst = binary.BigEndian.AppendUint32(dst, e.KeyHash)
	case KeyMixed:
		dst = appendTag(dst, tagKey, 1)
		dst = append(dst, byte(KeyMixed))
	}
	binary.BigEndian.PutUint32(dst[start+4:], uint32(len(dst)-start))
	return dst
}

func appendTag(dst []byte, tag uint16, size int) []byte {
	dst = binary.BigEndian.AppendUint16(dst, tag)
	return binary.BigEndian.AppendUint32(dst, uint32(size))
}

// ParseEnvelope splits an entry's body into its envelope and the producer's bytes. Producer and the returned
// bytes alias body. The errors are of type [*Error]: Unsupported for a version, a format or a must-understand
// tag that this program does not know, Malformed for everything else. Unknown tags that may be skipped are
// skipped. The producer's bytes are not looked at: the entry's checksum covers them.
func ParseEnvelope(body []byte) (Envelope, []byte, error) {
	if len(body) < fixedEnvelope {
		return Envelope{}, nil, malformed("envelope", "%d bytes, the fixed part alone has %d", len(body), fixedEnvelope)
	}
	if body[0] != EnvelopeVersion {
		return Envelope{}, nil, &Error{What: "envelope", Reason: Unsupported, Detail: fmt.Sprintf("version %d", body[0])}
	}
	length := binary.BigEndian.Uint32(body[4:])
	if length < fixedEnvelope || length > maxEnvelope || uint64(length) > uint64(len(body)) {
		return Envelope{}, nil, malformed("envelope", "length %d in a body of %d", length, len(body))
	}
	e := Envelope{
		Version: body[0], Format: Format(body[1]), Flags: Flags(binary.BigEndian.Uint16(body[2:])),
		Base: entry.Offset(binary.BigEndian.Uint64(body[8:])), Span: binary.BigEndian.Uint32(body[16:]),
		BrokerTime: int64(binary.BigEndian.Uint64(body[20:])),
		MinPublish: int64(binary.BigEndian.Uint64(body[28:])),
		MaxPublish: int64(binary.BigEndian.Uint64(body[36:])),
	}
	if e.Format != FormatFrame {
		return Envelope{}, nil, &Error{What: "envelope", Reason: Unsupported, Detail: fmt.Sprintf("format %d", body[1])}
	}
	if e.Span == 0 || uint64(e.Base)+uint64(e.Span) < uint64(e.Base) {
		return Envelope{}, nil, malformed("envelope", "span %d from offset %d", e.Span, e.Base)
	}
	if err := e.readTags(body[fixedEnvelope:length]); err != nil {
		return Envelope{}, nil, err
	}
	return e, body[length:], nil
}

func (e *Envelope) readTags(b []byte) error {
	var last uint16
	for len(b) > 0 {
		if len(b) < 6 {
			return malformed("envelope", "%d bytes left for a tag", len(b))
		}
		raw, size := binary.BigEndian.Uint16(b), binary.BigEndian.Uint32(b[2:])
		tag := raw &^ mustUnderstand
		if uint64(size) > uint64(len(b)-6) {
			return malformed("envelope", "tag %d of %d bytes in %d", tag, size, len(b)-6)
		}
		if tag <= last {
			return malformed("envelope", "tag %d after tag %d", tag, last)
		}
		last = tag
		known, err := e.readTag(tag, b[6:6+int(size)])
		if err != nil {
			return err
		}
		if !known && raw&mustUnderstand != 0 {
			return &Error{
				What: "envelope", Reason: Unsupported, Tag: tag,
				Detail: fmt.Sprintf("tag %d must be understood: a newer program wrote this entry", tag),
			}
		}
		b = b[6+int(size):]
	}
	return nil
}

func (e *Envelope) readTag(tag uint16, v []byte) (known bool, err error) {
	switch tag {
	case tagProducer:
		if len(v) <= 24 || len(v) > 24+MaxProducerName {
			return true, malformed("envelope", "producer field of %d bytes", len(v))
		}
		e.ProducerEpoch = binary.BigEndian.Uint64(v)
		e.FirstSeq, e.LastSeq = binary.BigEndian.Uint64(v[8:]), binary.BigEndian.Uint64(v[16:])
		e.Producer = v[24:]
	case tagChunk:
		if len(v) != 8 {
			return true, malformed("envelope", "chunk field of %d bytes", len(v))
		}
		e.Chunk, e.Chunks = binary.BigEndian.Uint32(v), binary.BigEndian.Uint32(v[4:])
		if e.Chunk >= e.Chunks {
			return true, malformed("envelope", "chunk %d of %d", e.Chunk, e.Chunks)
		}
	case tagKey:
		switch {
		case len(v) == 5 && KeyKind(v[0]) == KeyOne:
			e.Key, e.KeyHash = KeyOne, binary.BigEndian.Uint32(v[1:])
		case len(v) == 1 && KeyKind(v[0]) == KeyMixed:
			e.Key = KeyMixed
		default:
			return true, malformed("envelope", "key field % x", v)
		}
	default:
		return false, nil
	}
	return true, nil
}
