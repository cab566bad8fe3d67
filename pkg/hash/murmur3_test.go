package hash_test

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/hash"
)

// The values are the algorithm's published test vectors for seed 0.
func TestMurmur3Vectors(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]uint32{
		"":                 0,
		"test":             0xba6bd213,
		"Hello, world!":    0xc0363e43,
		"\x21\x43\x65\x87": 0xf55b516b,
		"\x21\x43\x65":     0x7e4a8634,
		"\x21\x43":         0xa0f7b07a,
		"\x21":             0x72661cf4,
		"The quick brown fox jumps over the lazy dog": 0x2e4ff723,
	} {
		if got := hash.Murmur3([]byte(in)); got != want {
			t.Errorf("Murmur3(%q) = %#x, want %#x", in, got, want)
		}
	}
}

func TestPartition(t *testing.T) {
	t.Parallel()
	// 0xc0363e43 has the sign bit set, which Pulsar masks before the modulo.
	if got, want := hash.Partition([]byte("Hello, world!"), 10), 0x40363e43%10; got != want {
		t.Fatalf("got partition %d, want %d", got, want)
	}
}
