package bookiewire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Version is the protocol version that this package speaks. A peer offers a range; the highest common one is used.
const Version = 1

// Use is what a connection is for. Adds have a connection of their own, so that a long read never delays them.
type Use uint8

// The uses of a connection.
const (
	// UseAdds carries Add one way, AddAck and Failed the other.
	UseAdds Use = 1
	// UseRequests carries everything else.
	UseRequests Use = 2
)

// Limits of the handshake. Nothing larger is read before a peer has shown what it is.
const (
	// MaxBookieID is the longest bookie id, in bytes.
	MaxBookieID = 255
	// MaxDetail is the longest text of an error, in bytes; longer ones are cut.
	MaxDetail = 512

	helloFixed   = 48
	welcomeFixed = 56
)

var magic = [8]byte{'P', 'N', 'S', 'T', 'B', 'K', 'I', 'E'}

// ErrMagic is returned for bytes that are not this protocol at all.
var ErrMagic = errors.New("not the bookie protocol")

// ErrMalformed is returned (wrapped, with what is wrong) for bytes that break the protocol.
var ErrMalformed = errors.New("malformed")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// Hello is the first thing a client sends: whom it expects to find.
type Hello struct {
	// MinVersion and MaxVersion are the versions that the client speaks.
	MinVersion, MaxVersion uint16
	Use                    Use
	Cluster                entry.UUID
	// Storage is the identity that the requests are meant for.
	Storage entry.StorageUUID
	// BookieID is the name expected; "" takes any.
	BookieID string
}

// Welcome is the bookie's answer. With another Code than OK it says why not, and the connection is closed.
type Welcome struct {
	// Version is the one to speak; 0 with a refusal.
	Version uint16
	Code    Code
	Cluster entry.UUID
	Storage entry.StorageUUID
	// MaxBody is the largest body of an entry that the bookie takes, in bytes.
	MaxBody  uint32
	BookieID string
	Detail   string
}

// AppendHello appends h to dst.
func AppendHello(dst []byte, h Hello) ([]byte, error) {
	if len(h.BookieID) > MaxBookieID {
		return dst, fmt.Errorf("encode hello: bookie id of %d bytes, limit is %d", len(h.BookieID), MaxBookieID)
	}
	start := len(dst)
	dst = append(dst, magic[:]...)
	dst = binary.BigEndian.AppendUint16(dst, h.MinVersion)
	dst = binary.BigEndian.AppendUint16(dst, h.MaxVersion)
	dst = append(dst, byte(h.Use), byte(len(h.BookieID)), 0, 0)
	dst = append(dst, h.Cluster[:]...)
	dst = append(dst, h.Storage[:]...)
	dst = append(dst, h.BookieID...)
	return binary.BigEndian.AppendUint32(dst, entry.CRC32C(dst[start:])), nil
}

// ReadHello reads exactly one Hello. The errors are ErrMagic, ErrMalformed, and r's.
func ReadHello(r io.Reader) (Hello, error) {
	var buf [helloFixed + MaxBookieID + 4]byte
	if err := readPrefix(r, buf[:helloFixed]); err != nil {
		return Hello{}, fmt.Errorf("read hello: %w", err)
	}
	n := int(buf[13])
	b := buf[:helloFixed+n+4]
	if _, err := io.ReadFull(r, b[helloFixed:]); err != nil {
		return Hello{}, fmt.Errorf("read hello: %w", err)
	}
	if err := checkTail(b); err != nil {
		return Hello{}, fmt.Errorf("read hello: %w", err)
	}
	h := Hello{
		MinVersion: binary.BigEndian.Uint16(b[8:]),
		MaxVersion: binary.BigEndian.Uint16(b[10:]),
		Use:        Use(b[12]),
		Cluster:    entry.UUID(b[16:32]),
		Storage:    entry.StorageUUID(b[32:48]),
		BookieID:   string(b[helloFixed : helloFixed+n]),
	}
	if h.Use != UseAdds && h.Use != UseRequests {
		return Hello{}, fmt.Errorf("read hello: %w", malformed("use %d", h.Use))
	}
	return h, nil
}

// AppendWelcome appends w to dst. A detail over MaxDetail bytes is cut.
func AppendWelcome(dst []byte, w Welcome) ([]byte, error) {
	if len(w.BookieID) > MaxBookieID {
		return dst, fmt.Errorf("encode welcome: bookie id of %d bytes, limit is %d", len(w.BookieID), MaxBookieID)
	}
	detail := w.Detail[:min(len(w.Detail), MaxDetail)]
	start := len(dst)
	dst = append(dst, magic[:]...)
	dst = binary.BigEndian.AppendUint16(dst, w.Version)
	dst = append(dst, byte(w.Code), byte(len(w.BookieID)))
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(detail)))
	dst = append(dst, 0, 0)
	dst = append(dst, w.Cluster[:]...)
	dst = append(dst, w.Storage[:]...)
	dst = binary.BigEndian.AppendUint32(dst, w.MaxBody)
	dst = append(dst, 0, 0, 0, 0)
	dst = append(dst, w.BookieID...)
	dst = append(dst, detail...)
	return binary.BigEndian.AppendUint32(dst, entry.CRC32C(dst[start:])), nil
}

// ReadWelcome reads exactly one Welcome. The errors are ErrMagic, ErrMalformed, and r's. A refusal is not an
// error here.
func ReadWelcome(r io.Reader) (Welcome, error) {
	var buf [welcomeFixed + MaxBookieID + MaxDetail + 4]byte
	if err := readPrefix(r, buf[:welcomeFixed]); err != nil {
		return Welcome{}, fmt.Errorf("read welcome: %w", err)
	}
	n, d := int(buf[11]), int(binary.BigEndian.Uint16(buf[12:]))
	if d > MaxDetail {
		return Welcome{}, fmt.Errorf("read welcome: %w", malformed("detail of %d bytes", d))
	}
	b := buf[:welcomeFixed+n+d+4]
	if _, err := io.ReadFull(r, b[welcomeFixed:]); err != nil {
		return Welcome{}, fmt.Errorf("read welcome: %w", err)
	}
	if err := checkTail(b); err != nil {
		return Welcome{}, fmt.Errorf("read welcome: %w", err)
	}
	return Welcome{
		Version:  binary.BigEndian.Uint16(b[8:]),
		Code:     Code(b[10]),
		Cluster:  entry.UUID(b[16:32]),
		Storage:  entry.StorageUUID(b[32:48]),
		MaxBody:  binary.BigEndian.Uint32(b[48:]),
		BookieID: string(b[welcomeFixed : welcomeFixed+n]),
		Detail:   string(b[welcomeFixed+n : welcomeFixed+n+d]),
	}, nil
}

// readPrefix fills b, and gives up at the magic if that is wrong.
func readPrefix(r io.Reader, b []byte) error {
	if _, err := io.ReadFull(r, b[:len(magic)]); err != nil {
		return err
	}
	if !bytes.Equal(b[:len(magic)], magic[:]) {
		return ErrMagic
	}
	_, err := io.ReadFull(r, b[len(magic):])
	return err
}

// checkTail verifies the checksum that b ends with.
func checkTail(b []byte) error {
	n := len(b) - 4
	if got, want := entry.CRC32C(b[:n]), binary.BigEndian.Uint32(b[n:]); got != want {
		return malformed("checksum %08x, want %08x", got, want)
	}
	return nil
}
