package client

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	framev1 "github.com/penstock-mq/penstock/api/penstock/frame/v1"
	"github.com/penstock-mq/penstock/pkg/frame"
)

// Compression names how a producer compresses its batches, in Pulsar's numbering.
type Compression int32

// The compressions.
const (
	NoCompression Compression = Compression(framev1.CompressionType_NONE)
	LZ4           Compression = Compression(framev1.CompressionType_LZ4)
	Zlib          Compression = Compression(framev1.CompressionType_ZLIB)
	Zstd          Compression = Compression(framev1.CompressionType_ZSTD)
	Snappy        Compression = Compression(framev1.CompressionType_SNAPPY)
)

// String names the compression as the command line does.
func (c Compression) String() string {
	switch c {
	case NoCompression:
		return "none"
	case LZ4:
		return "lz4"
	case Zlib:
		return "zlib"
	case Zstd:
		return "zstd"
	case Snappy:
		return "snappy"
	}
	return fmt.Sprintf("Compression(%d)", int32(c))
}

// ParseCompression reads what String prints.
func ParseCompression(s string) (Compression, error) {
	for c := NoCompression; c <= Snappy; c++ {
		if c.String() == s {
			return c, nil
		}
	}
	return 0, fmt.Errorf("parse compression %q: want none, lz4, zlib, zstd or snappy", s)
}

// zstd's encoder and decoder are safe for concurrent use of EncodeAll and DecodeAll, and cost megabytes to
// make: there is one of each, made on first use.
var (
	zstdEncoder = sync.OnceValues(func() (*zstd.Encoder, error) {
		return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	})
	zstdDecoder = sync.OnceValues(func() (*zstd.Decoder, error) {
		return zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(64<<20),
			zstd.WithDecoderMaxWindow(32<<20))
	})
	lz4Compressors = sync.Pool{New: func() any { return new(lz4.Compressor) }}
)

// compress returns payload compressed, or payload itself and NoCompression when that is not smaller, or
// so much smaller that readers would take it for a bomb.
func compress(kind Compression, payload []byte) ([]byte, Compression, error) {
	out, err := deflate(kind, payload)
	if err != nil {
		return nil, kind, fmt.Errorf("compress with %s: %w", kind, err)
	}
	if len(out) == 0 || len(out) >= len(payload) || len(payload)/frame.DefaultMaxRatio > len(out) {
		return payload, NoCompression, nil
	}
	return out, kind, nil
}

func deflate(kind Compression, payload []byte) ([]byte, error) {
	switch kind {
	case LZ4:
		c, ok := lz4Compressors.Get().(*lz4.Compressor)
		if !ok {
			panic("client: foreign value in the pool of LZ4 compressors")
		}
		defer lz4Compressors.Put(c)
		out := make([]byte, lz4.CompressBlockBound(len(payload)))
		n, err := c.CompressBlock(payload, out)
		return out[:n], err
	case Zlib:
		var out bytes.Buffer
		w, err := zlib.NewWriterLevel(&out, zlib.BestSpeed)
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(payload); err != nil {
			return nil, err
		}
		err = w.Close()
		return out.Bytes(), err
	case Zstd:
		e, err := zstdEncoder()
		if err != nil {
			return nil, err
		}
		return e.EncodeAll(payload, nil), nil
	case Snappy:
		return snappy.Encode(nil, payload), nil
	case NoCompression:
	}
	return payload, nil
}

var errSize = errors.New("decompresses to another size than it claims")

// decompress returns the payload of f as it was before compression. The claimed size was checked against the
// message limit and the ratio when the frame was parsed; no more than it is ever written.
func decompress(f *frame.Frame) ([]byte, error) {
	kind := Compression(f.Compression)
	if kind == NoCompression {
		return f.Payload, nil
	}
	out, err := inflate(kind, f.Payload, f.UncompressedSize)
	if err != nil {
		return nil, fmt.Errorf("decompress with %s: %w", kind, err)
	}
	return out, nil
}

func inflate(kind Compression, payload []byte, size int) ([]byte, error) {
	switch kind {
	case LZ4:
		out := make([]byte, size)
		n, err := lz4.UncompressBlock(payload, out)
		if err == nil && n != size {
			err = errSize
		}
		return out, err
	case Zlib:
		r, err := zlib.NewReader(bytes.NewReader(payload))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		out := make([]byte, size)
		if _, err := io.ReadFull(r, out); err != nil {
			return nil, err
		}
		var more [1]byte
		if n, err := r.Read(more[:]); n > 0 {
			return nil, errSize
		} else if !errors.Is(err, io.EOF) {
			return nil, err // the trailing checksum
		}
		return out, nil
	case Zstd:
		var h zstd.Header
		if err := h.Decode(payload); err != nil {
			return nil, err
		}
		if h.HasFCS && h.FrameContentSize != uint64(size) {
			return nil, errSize
		}
		d, err := zstdDecoder()
		if err != nil {
			return nil, err
		}
		if h.HasFCS {
			out, err := d.DecodeAll(payload, make([]byte, 0, size))
			if err == nil && len(out) != size {
				err = errSize
			}
			return out, err
		}
		return inflateZstdStream(payload, size)
	case Snappy:
		n, err := snappy.DecodedLen(payload)
		if err != nil {
			return nil, err
		}
		if n != size {
			return nil, errSize
		}
		return snappy.Decode(nil, payload)
	case NoCompression:
	}
	return nil, fmt.Errorf("unknown compression %d", int32(kind))
}

// inflateZstdStream decodes frames that do not say how large they are, no further than size.
func inflateZstdStream(payload []byte, size int) ([]byte, error) {
	r, err := zstd.NewReader(bytes.NewReader(payload), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(32<<20),
		zstd.WithDecoderMaxMemory(64<<20))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out := make([]byte, size)
	if _, err := io.ReadFull(r, out); err != nil {
		return nil, err
	}
	var more [1]byte
	if n, err := r.Read(more[:]); n > 0 {
		return nil, errSize
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return out, nil
}

// DecodeFrame returns the messages of a stored batch frame, for tools that look at raw entries. It verifies
// the frame's checksum and limits. Values may alias b.
func DecodeFrame(b []byte) ([]Message, error) {
	f, err := frame.Parse(b, frame.DefaultLimits())
	if err != nil {
		return nil, fmt.Errorf("parse frame: %w", err)
	}
	payload, err := decompress(&f)
	if err != nil {
		return nil, err
	}
	out := make([]Message, 0, f.Count)
	for m, err := range f.Messages(payload) {
		if err != nil {
			return nil, fmt.Errorf("read message %d: %w", len(out), err)
		}
		out = append(out, fromFrame(&m))
	}
	return out, nil
}
