package workload

import (
	"encoding/binary"
	"errors"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// MinSize is the smallest message that a run can publish, in bytes.
const MinSize = 32

// The layout of a message, big endian: magic, run, producer, number, checksum of the rest, filler.
const (
	magic       = 0x70776c31
	lastWord    = ^uint32(0) // in place of a producer: the end of a run
	checksumAt  = 24
	fillerAt    = 28
	fillerPrime = 131
)

// Tag says which message of a run a body is.
type Tag struct {
	// Run tells messages of one run from another's on the same topic.
	Run uint64
	// Producer counts the run's producers from 0.
	Producer uint32
	// Number counts the producer's messages from 0.
	Number uint64
}

// errForeign is a body that no run has made.
var errForeign = errors.New("not a message of a workload")

// AppendBody appends the message that t names, of size bytes, at least MinSize, to dst.
func AppendBody(dst []byte, t Tag, size int) []byte {
	start := len(dst)
	dst = binary.BigEndian.AppendUint32(dst, magic)
	dst = binary.BigEndian.AppendUint64(dst, t.Run)
	dst = binary.BigEndian.AppendUint32(dst, t.Producer)
	dst = binary.BigEndian.AppendUint64(dst, t.Number)
	dst = append(dst, 0, 0, 0, 0)
	fill := byte(t.Number)
	for len(dst)-start < max(size, MinSize) {
		dst = append(dst, fill)
		fill = fill*fillerPrime + 1
	}
	body := dst[start:]
	binary.BigEndian.PutUint32(body[checksumAt:], checksum(body))
	return dst
}

func checksum(body []byte) uint32 {
	return entry.UpdateCRC32C(entry.CRC32C(body[:checksumAt]), body[fillerAt:])
}

// ParseBody reads what AppendBody wrote. Anything else, a single flipped bit included, is an error.
func ParseBody(body []byte) (Tag, error) {
	if len(body) < MinSize || binary.BigEndian.Uint32(body) != magic || binary.BigEndian.Uint32(body[checksumAt:]) != checksum(body) {
		return Tag{}, errForeign
	}
	return Tag{
		Run: binary.BigEndian.Uint64(body[4:]), Producer: binary.BigEndian.Uint32(body[12:]), Number: binary.BigEndian.Uint64(body[16:]),
	}, nil
}
