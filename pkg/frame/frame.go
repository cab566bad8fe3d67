package frame

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"

	framev1 "github.com/penstock-mq/penstock/api/penstock/frame/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/hash"
)

// Magic opens every frame.
const Magic uint16 = 0x0e01

// headerSize is the length of magic (2), CRC32C (4) and metadata size (4).
const headerSize = 10

// minMessage is the least a message takes inside a batch: its metadata's size (4) and payload_size (2).
const minMessage = 6

// Frame is a checked view of one batch frame, as cheap as a broker needs it: the fields that it acts on are
// read from the metadata by hand, everything else stays bytes. All slices alias the parsed input, so a Frame
// is good for as long as those bytes are.
//
// A framev1.MessageMetadata could have been returned instead; unmarshalling one costs a dozen allocations per
// batch on the hottest path of the broker, for fields that it never looks at. [Frame.Unmarshal] makes one for
// whoever wants everything.
type Frame struct {
	// Producer is the producer's name as stored in the frame.
	Producer []byte
	// Sequence and HighestSequence are the sequence ids of the first and the last message.
	Sequence, HighestSequence uint64
	// PublishTime is the producer's clock at the first message, in Unix milliseconds.
	PublishTime int64
	// EventTime is the application's time of a single message, in Unix milliseconds; 0 is none.
	EventTime int64
	// Count is the number of messages, at least 1. A single message and a chunk count 1.
	Count int
	// Batched tells whether the payload is a run of messages with metadata each.
	Batched bool
	// Compression is how Payload is compressed, UncompressedSize what it decompresses to, in bytes.
	Compression      framev1.CompressionType
	UncompressedSize int
	// Key tells what is known of the messages' keys without looking into the payload, KeyHash the full
	// murmur3_32 of the one key.
	Key     KeyKind
	KeyHash uint32
	// DeliverAt is the time before which the message is not delivered, in Unix milliseconds; 0 is none.
	DeliverAt int64
	// Marker tells that the entry is a marker for brokers, not a message.
	Marker bool
	// Chunk and Chunks place a chunk in its large message; Chunks is 0 otherwise.
	Chunk, Chunks uint32

	// Metadata is the protobuf metadata, Payload what follows it.
	Metadata, Payload []byte
}

// KeyKind tells what keys the messages of an entry have.
type KeyKind uint8

// The kinds.
const (
	// KeyNone: a single message without a key.
	KeyNone KeyKind = 0
	// KeyOne: all messages have the same key.
	KeyOne KeyKind = 1
	// KeyMixed: the messages of the batch may have different keys, or none: look inside.
	KeyMixed KeyKind = 2
)

// Parse checks a whole frame: magic, sizes against the limits, CRC32C, and the metadata fields that a broker
// needs. The errors are of type [*Error]. Nothing is copied. Whoever has parsed a frame that a broker accepted
// need not parse it again before handing it on.
func Parse(b []byte, limits Limits) (Frame, error) {
	limits = limits.withDefaults()
	if len(b) > limits.MaxFrame() {
		return Frame{}, tooLarge("frame", "%d bytes, the limit is %d", len(b), limits.MaxFrame())
	}
	if len(b) < headerSize {
		return Frame{}, malformed("frame", "%d bytes, a header alone has %d", len(b), headerSize)
	}
	if m := binary.BigEndian.Uint16(b); m != Magic {
		return Frame{}, malformed("frame", "magic %#04x, want %#04x", m, Magic)
	}
	size := binary.BigEndian.Uint32(b[6:])
	if uint64(size) > uint64(len(b)-headerSize) {
		return Frame{}, malformed("frame", "metadata of %d bytes in a frame of %d", size, len(b))
	}
	if uint64(size) > uint64(limits.MaxMetadata) {
		return Frame{}, tooLarge("metadata", "%d bytes, the limit is %d", size, limits.MaxMetadata)
	}
	payload := b[headerSize+int(size):]
	if len(payload) > limits.MaxMessage {
		return Frame{}, tooLarge("frame", "payload of %d bytes, the limit is %d", len(payload), limits.MaxMessage)
	}
	if want, got := binary.BigEndian.Uint32(b[2:]), entry.CRC32C(b[6:]); want != got {
		return Frame{}, &Error{
			What: "frame", Reason: BadChecksum,
			Detail: fmt.Sprintf("CRC32C %#08x does not match %#08x of the bytes", want, got),
		}
	}
	f := Frame{Metadata: b[headerSize : headerSize+int(size)], Payload: payload}
	if err := f.readMetadata(); err != nil {
		return Frame{}, err
	}
	if err := f.check(limits); err != nil {
		return Frame{}, err
	}
	return f, nil
}

// Unmarshal returns the whole metadata. It allocates, and aliases nothing.
func (f *Frame) Unmarshal() (*framev1.MessageMetadata, error) {
	m := new(framev1.MessageMetadata)
	if err := unmarshalOptions.Unmarshal(f.Metadata, m); err != nil {
		return nil, malformed("metadata", "%v", err)
	}
	return m, nil
}

func (f *Frame) readMetadata() error {
	var seenName, seenSequence, seenTime, b64, hasKey, hasOrdering bool
	var key, ordering []byte
	var highest, uncompressed uint64
	var hasHighest bool
	count := uint64(1)
	for b := f.Metadata; len(b) > 0; {
		v, n, err := readField(b, false)
		if err != nil {
			return err
		}
		b = b[n:]
		switch v.num {
		case fieldProducerName:
			f.Producer, seenName = v.bytes, true
		case fieldSequenceID:
			f.Sequence, seenSequence = v.varint, true
		case fieldPublishTime:
			f.PublishTime, seenTime = int64(v.varint), true
		case fieldPartitionKey:
			key, hasKey = v.bytes, true
		case fieldCompression:
			if v.varint > math.MaxInt8 {
				return malformed("metadata", "compression %d", v.varint)
			}
			f.Compression = framev1.CompressionType(v.varint)
		case fieldUncompressedSize:
			uncompressed = v.varint
		case fieldNumMessages:
			count, f.Batched = v.varint, true
		case fieldEventTime:
			f.EventTime = int64(v.varint)
		case fieldKeyB64:
			b64 = v.varint != 0
		case fieldOrderingKey:
			ordering, hasOrdering = v.bytes, true
		case fieldDeliverAt:
			f.DeliverAt = int64(v.varint)
		case fieldMarker:
			f.Marker = true
		case fieldHighestSequence:
			highest, hasHighest = v.varint, true
		case fieldChunks:
			if v.varint > math.MaxInt32 {
				return malformed("metadata", "%d chunks", int64(v.varint))
			}
			f.Chunks = uint32(v.varint)
		case fieldChunkID:
			if v.varint > math.MaxInt32 {
				return malformed("metadata", "chunk %d", int64(v.varint))
			}
			f.Chunk = uint32(v.varint)
		default: // of no concern to a broker
		}
	}
	if !seenName || !seenSequence || !seenTime {
		return malformed("metadata", "producer name, sequence id or publish time is missing")
	}
	if count < 1 || count > math.MaxInt32 {
		return malformed("metadata", "batch of %d messages", int64(count))
	}
	f.Count = int(count)
	f.HighestSequence = f.Sequence + count - 1
	if hasHighest && highest > f.Sequence {
		f.HighestSequence = highest
	}
	f.UncompressedSize = len(f.Payload)
	if f.Compression != framev1.CompressionType_NONE {
		if uncompressed > math.MaxInt32 {
			return tooLarge("frame", "claims %d bytes uncompressed", uncompressed)
		}
		f.UncompressedSize = int(uncompressed)
	}
	return f.readKey(key, ordering, hasKey, hasOrdering, b64)
}

// readKey hashes what orders the messages: the ordering key, else the partition key.
func (f *Frame) readKey(key, ordering []byte, hasKey, hasOrdering, b64 bool) error {
	switch {
	case hasOrdering:
		f.Key, f.KeyHash = KeyOne, hash.Murmur3(ordering)
	case hasKey && b64:
		raw := make([]byte, base64.StdEncoding.DecodedLen(len(key)))
		n, err := base64.StdEncoding.Decode(raw, key)
		if err != nil {
			return malformed("metadata", "partition key: %v", err)
		}
		f.Key, f.KeyHash = KeyOne, hash.Murmur3(raw[:n])
	case hasKey:
		f.Key, f.KeyHash = KeyOne, hash.Murmur3(key)
	case f.Batched:
		f.Key = KeyMixed
	}
	return nil
}

func (f *Frame) check(limits Limits) error {
	switch {
	case len(f.Producer) > MaxProducerName:
		return tooLarge("metadata", "producer name of %d bytes, the limit is %d", len(f.Producer), MaxProducerName)
	case f.Compression > framev1.CompressionType_SNAPPY:
		return &Error{What: "frame", Reason: Unsupported, Detail: fmt.Sprintf("compression %d", int32(f.Compression))}
	case f.UncompressedSize > limits.MaxMessage:
		return tooLarge("frame", "claims %d bytes uncompressed, the limit is %d", f.UncompressedSize, limits.MaxMessage)
	case f.Compression != framev1.CompressionType_NONE && f.UncompressedSize/limits.MaxRatio > len(f.Payload):
		return tooLarge("frame", "claims %d bytes uncompressed from %d, more than %d times",
			f.UncompressedSize, len(f.Payload), limits.MaxRatio)
	case f.Batched && f.Count > f.UncompressedSize/minMessage:
		return malformed("frame", "claims %d messages in %d bytes", f.Count, f.UncompressedSize)
	case f.HighestSequence < f.Sequence:
		return malformed("metadata", "sequence id %d and %d messages overflow", f.Sequence, f.Count)
	case f.Chunks > 0 && (f.Chunk >= f.Chunks || f.Batched):
		return malformed("metadata", "chunk %d of %d", f.Chunk, f.Chunks)
	}
	return nil
}
