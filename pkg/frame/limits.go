package frame

import "fmt"

// Limits bounds what [Parse] accepts. Zero fields mean the defaults of [DefaultLimits].
type Limits struct {
	// MaxMessage is the largest payload in bytes, and the largest it may decompress to.
	MaxMessage int
	// MaxMetadata is the largest metadata in bytes. A frame is at most MaxMessage + MaxMetadata + 10 bytes.
	MaxMetadata int
	// MaxRatio bounds how much a compressed payload may expand: a frame that claims more is a bomb.
	MaxRatio int
}

// Defaults of [Limits].
const (
	DefaultMaxMessage  = 5 << 20
	DefaultMaxMetadata = 64<<10 - headerSize
	DefaultMaxRatio    = 200
)

// MaxProducerName is the longest name of a producer in bytes.
const MaxProducerName = 1 << 10

// DefaultLimits returns the limits of a cluster whose largest message is 5 MiB.
func DefaultLimits() Limits {
	return Limits{MaxMessage: DefaultMaxMessage, MaxMetadata: DefaultMaxMetadata, MaxRatio: DefaultMaxRatio}
}

func (l Limits) withDefaults() Limits {
	d := DefaultLimits()
	if l.MaxMessage <= 0 {
		l.MaxMessage = d.MaxMessage
	}
	if l.MaxMetadata <= 0 {
		l.MaxMetadata = d.MaxMetadata
	}
	if l.MaxRatio <= 0 {
		l.MaxRatio = d.MaxRatio
	}
	return l
}

// MaxFrame is the largest frame in bytes that can pass: payload, metadata and header.
func (l Limits) MaxFrame() int {
	l = l.withDefaults()
	return l.MaxMessage + l.MaxMetadata + headerSize
}

// Reason classifies what is wrong with bytes that were to be decoded.
type Reason uint8

// The reasons.
const (
	// Malformed: the bytes are not of this format, or are cut short.
	Malformed Reason = iota + 1
	// TooLarge: a limit is exceeded.
	TooLarge
	// BadChecksum: the CRC32C does not match.
	BadChecksum
	// Unsupported: a version, format or must-understand tag that this program does not know.
	Unsupported
)

// String names the reason.
func (r Reason) String() string {
	switch r {
	case Malformed:
		return "malformed"
	case TooLarge:
		return "too large"
	case BadChecksum:
		return "wrong checksum"
	case Unsupported:
		return "unsupported"
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}

// Error says why a frame, a message or an envelope was refused. Retrying with the same bytes cannot help.
type Error struct {
	// What was decoded: "frame", "metadata", "message", "envelope".
	What   string
	Reason Reason
	// Tag is the envelope tag that must be understood and is not; 0 otherwise.
	Tag uint16
	// Detail is text for people.
	Detail string
}

// Error formats the refusal.
func (e *Error) Error() string { return e.What + " " + e.Reason.String() + ": " + e.Detail }

func malformed(what, format string, args ...any) error {
	return &Error{What: what, Reason: Malformed, Detail: fmt.Sprintf(format, args...)}
}

func tooLarge(what, format string, args ...any) error {
	return &Error{What: what, Reason: TooLarge, Detail: fmt.Sprintf(format, args...)}
}
