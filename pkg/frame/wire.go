package frame

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

var unmarshalOptions = proto.UnmarshalOptions{}

// Field numbers of MessageMetadata.
const (
	fieldProducerName     protowire.Number = 1
	fieldSequenceID       protowire.Number = 2
	fieldPublishTime      protowire.Number = 3
	fieldProperties       protowire.Number = 4
	fieldPartitionKey     protowire.Number = 6
	fieldCompression      protowire.Number = 8
	fieldUncompressedSize protowire.Number = 9
	fieldNumMessages      protowire.Number = 11
	fieldEventTime        protowire.Number = 12
	fieldKeyB64           protowire.Number = 17
	fieldOrderingKey      protowire.Number = 18
	fieldDeliverAt        protowire.Number = 19
	fieldMarker           protowire.Number = 20
	fieldHighestSequence  protowire.Number = 24
	fieldNullValue        protowire.Number = 25
	fieldChunks           protowire.Number = 27
	fieldChunkID          protowire.Number = 29
)

// Field numbers of SingleMessageMetadata.
const (
	singleProperties   protowire.Number = 1
	singlePartitionKey protowire.Number = 2
	singlePayloadSize  protowire.Number = 3
	singleCompactedOut protowire.Number = 4
	singleEventTime    protowire.Number = 5
	singleKeyB64       protowire.Number = 6
	singleOrderingKey  protowire.Number = 7
	singleSequenceID   protowire.Number = 8
	singleNullValue    protowire.Number = 9
)

// wireType returns the type that a field of the published .proto has on the wire, and false for numbers that
// have no meaning there: those are skipped whatever their type.
func wireType(single bool, num protowire.Number) (protowire.Type, bool) {
	if single {
		switch {
		case num == singleProperties, num == singlePartitionKey, num == singleOrderingKey:
			return protowire.BytesType, true
		case num <= 10:
			return protowire.VarintType, true
		}
		return 0, false
	}
	switch num {
	case fieldProducerName, fieldProperties, fieldPartitionKey, fieldOrderingKey,
		5, 7, 16, 26: // replicated_from, replicate_to, schema_version, uuid
		return protowire.BytesType, true
	case 10, 13, 14, 15, 21: // Pulsar's
		return 0, false
	default:
		return protowire.VarintType, num <= 30
	}
}

// field is one protobuf field: a varint, or bytes that alias the input.
type field struct {
	num    protowire.Number
	varint uint64
	bytes  []byte
}

// readField reads the first field of b, and returns its length. single says which of the two messages it is
// a field of.
func readField(b []byte, single bool) (field, int, error) {
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 {
		return field{}, 0, malformed("metadata", "%v", protowire.ParseError(n))
	}
	if want, known := wireType(single, num); known && want != typ {
		return field{}, 0, malformed("metadata", "field %d has wire type %d", num, typ)
	}
	f := field{num: num}
	var m int
	switch typ {
	case protowire.VarintType:
		f.varint, m = protowire.ConsumeVarint(b[n:])
	case protowire.BytesType:
		f.bytes, m = protowire.ConsumeBytes(b[n:])
	default:
		m = protowire.ConsumeFieldValue(num, typ, b[n:])
	}
	if m < 0 {
		return field{}, 0, malformed("metadata", "field %d: %v", num, protowire.ParseError(m))
	}
	return f, n + m, nil
}
