package bench

import "encoding/binary"

// Each value begins with a header; what follows is filler. Little endian:
//
//	run       8 bytes, drawn for the run: what is not of it is counted as foreign
//	producer  4 bytes, its index in the run
//	number    8 bytes, counted from 0 by each producer
//	due       8 bytes, nanoseconds on the run's clock
const headerSize = 8 + 4 + 8 + 8

type header struct {
	run      uint64
	producer uint32
	number   uint64
	due      int64
}

// put writes h to the beginning of value, which has room.
func (h header) put(value []byte) {
	_ = value[headerSize-1]
	binary.LittleEndian.PutUint64(value, h.run)
	binary.LittleEndian.PutUint32(value[8:], h.producer)
	binary.LittleEndian.PutUint64(value[12:], h.number)
	binary.LittleEndian.PutUint64(value[20:], uint64(h.due))
}

// readHeader reports false for a value too short to be one of ours.
func readHeader(value []byte) (header, bool) {
	if len(value) < headerSize {
		return header{}, false
	}
	return header{
		run:      binary.LittleEndian.Uint64(value),
		producer: binary.LittleEndian.Uint32(value[8:]),
		number:   binary.LittleEndian.Uint64(value[12:]),
		due:      int64(binary.LittleEndian.Uint64(value[20:])),
	}, true
}

// stamp makes m the message that h says. Message.header keeps what the driver may not change.
func (m *Message) stamp(h header) {
	m.header = h
	h.put(m.Value)
}
