package client

import (
	"bytes"
	"errors"
	"testing"

	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	framev1 "github.com/penstock-mq/penstock/api/penstock/frame/v1"
	"github.com/penstock-mq/penstock/pkg/frame"
)

var compressions = []Compression{LZ4, Zlib, Zstd, Snappy}

func TestCompressionRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.SampledFrom(compressions).Draw(t, "kind")
		in := bytes.Repeat(rapid.SliceOfN(rapid.Byte(), 0, 50).Draw(t, "piece"), rapid.IntRange(0, 200).Draw(t, "times"))
		out, kind, err := compress(k, in)
		if err != nil {
			t.Fatal(err)
		}
		if kind == NoCompression && len(out) != len(in) || len(in) > frame.DefaultMaxRatio*(len(out)+1) {
			t.Fatalf("%d bytes became %d as %s", len(in), len(out), kind)
		}
		f := frame.Frame{Compression: framev1.CompressionType(kind), UncompressedSize: len(in), Payload: out}
		back, err := decompress(&f)
		if err != nil || !bytes.Equal(back, in) {
			t.Fatal(err)
		}
	})
}

// TestBombs: a payload that decompresses to anything but what it claims is refused, and no more than the claim is
// ever written.
func TestBombs(t *testing.T) {
	t.Parallel()
	large := make([]byte, 1<<20)
	for _, k := range compressions {
		packed, err := deflate(k, large)
		if err != nil {
			t.Fatal(err)
		}
		for _, claim := range []int{0, 1000, len(large) - 1, len(large) + 1} {
			out, err := inflate(k, packed, claim)
			if err == nil || cap(out) > claim+1024 {
				t.Errorf("%s: claimed %d, got %d bytes, %v", k, claim, len(out), err)
			}
		}
	}
	// Zstandard frames that do not say their size.
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(large); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := inflate(Zstd, b.Bytes(), 1000); !errors.Is(err, errSize) {
		t.Errorf("a stream of 1 MiB that claimed 1,000 bytes gave %v", err)
	}
	if out, err := inflate(Zstd, b.Bytes(), len(large)); err != nil || !bytes.Equal(out, large) {
		t.Errorf("a stream gave %d bytes, %v", len(out), err)
	}
}

// FuzzUnpack is every decoder that a consumer turns on a broker's bytes.
func FuzzUnpack(f *testing.F) {
	for _, k := range append(compressions, NoCompression) {
		payload := frame.AppendMessage(nil, &frame.Message{Value: bytes.Repeat([]byte("x"), 100)})
		out, kind, err := compress(k, payload)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(int32(kind), uint32(len(payload)), out)
	}
	f.Fuzz(func(t *testing.T, kind int32, claim uint32, payload []byte) {
		b := frame.Append(nil, &frame.Header{
			Producer: "p", Count: 1, Compression: framev1.CompressionType(kind), UncompressedSize: int(claim),
		}, payload)
		got, err := unpack(&brokerv1.DeliveredEntry{Frame: b, Span: 1}, "t", NoPartition)
		if err == nil && len(got) > 1 {
			t.Fatalf("%d messages of one", len(got))
		}
		_, _ = DecodeFrame(b)
	})
}
