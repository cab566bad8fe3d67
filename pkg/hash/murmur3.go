// Package hash holds the one hash that brokers and clients must agree on: the 32-bit MurmurHash3 that maps
// a topic to its bundle and a key to its partition.
package hash

import (
	"encoding/binary"
	"math/bits"
)

// Murmur3 is MurmurHash3 x86 32 of b with seed 0, bit for bit what Pulsar's clients compute.
func Murmur3(b []byte) uint32 {
	const c1, c2 = 0xcc9e2d51, 0x1b873593
	var h uint32
	n := uint32(len(b))
	for ; len(b) >= 4; b = b[4:] {
		k := binary.LittleEndian.Uint32(b) * c1
		k = bits.RotateLeft32(k, 15) * c2
		h = bits.RotateLeft32(h^k, 13)*5 + 0xe6546b64
	}
	if len(b) > 0 {
		var k uint32
		for i := len(b) - 1; i >= 0; i-- {
			k = k<<8 | uint32(b[i])
		}
		h ^= bits.RotateLeft32(k*c1, 15) * c2
	}
	h ^= n
	h ^= h >> 16
	h *= 0x85ebca6b
	h ^= h >> 13
	h *= 0xc2b2ae35
	return h ^ h>>16
}

// Partition maps a message key to one of n partitions (n ≥ 1) as Pulsar's murmur3 routing does: the hash
// without its sign bit, modulo n.
func Partition(key []byte, n int) int {
	return int(Murmur3(key)&0x7fffffff) % n
}
