package bookiewire

import (
	"encoding/binary"
	"io"
	"net"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Kind is a frame's type. The numbers are part of the protocol.
type Kind uint8

// The kinds of frames.
const (
	KindAdd Kind = iota + 1
	KindAddAck
	KindFailed
	KindRead
	KindReadReply
	KindFence
	KindFenceReply
	KindWriteLAC
	KindWriteLACReply
	KindWaitLAC
	KindWaitLACReply
	KindPing
	KindPong
)

// Limits of frames.
const (
	// HeaderSize is the size of a frame's header, in bytes.
	HeaderSize = 20
	// MaxBody is the largest body of an entry, in bytes: a message of 5 MiB, its frame and its envelope fit.
	MaxBody = 6 << 20
	// MaxReadEntries is the most entries that one Read asks for or one ReadReply carries.
	MaxReadEntries = 4096
	// MaxPayload is the largest that follows a header, in bytes: a ReadReply with MaxBody bytes of bodies.
	MaxPayload = readReplyFixed + MaxReadEntries*readEntrySize + MaxBody
	// maxControl is the largest payload of frames without bodies.
	maxControl = failedFixed + MaxDetail

	addFixed       = 44
	failedFixed    = 16
	readFixed      = 40
	readReplyFixed = 12
	readEntrySize  = 16
	fenceFixed     = 16
	writeLACFixed  = 24
	waitLACFixed   = 24
	ackFixed       = 8
	lacFixed       = 8

	flagRecovery = 1
	flagUrgent   = 2 // of an add

	// copyBelow is the size up to which a body is copied beside its header: a short copy costs less than one
	// more buffer in the writev.
	copyBelow = 512
)

// Encoder collects frames for one writev. Headers and small parts go to a buffer of its own, larger bodies are
// referred to: they must not change until WriteTo has returned. The zero Encoder is ready. Not for concurrent
// use.
type Encoder struct {
	buf   []byte
	cut   int // buf[:cut] is in vec already
	vec   net.Buffers
	size  int
	spare net.Buffers // what WriteTo consumes
}

// Size is the number of bytes collected since the last Reset.
func (e *Encoder) Size() int { return e.size }

// Reset forgets what was collected and keeps the buffers, unless they have grown out of proportion.
func (e *Encoder) Reset() {
	clear(e.vec)
	e.vec = e.vec[:0]
	e.cut, e.size = 0, 0
	if cap(e.buf) > 1<<20 {
		e.buf = nil
	}
	e.buf = e.buf[:0]
}

// WriteTo writes all frames collected, in one writev if w is a TCP connection, and resets e, also when it fails.
func (e *Encoder) WriteTo(w io.Writer) (int64, error) {
	e.flush()
	e.spare = e.vec
	n, err := e.spare.WriteTo(w)
	e.Reset()
	return n, err
}

// flush puts the tail of buf into vec.
func (e *Encoder) flush() {
	if e.cut < len(e.buf) {
		e.vec = append(e.vec, e.buf[e.cut:len(e.buf):len(e.buf)])
		e.cut = len(e.buf)
	}
}

// body appends b, by reference if it is large.
func (e *Encoder) body(b []byte) {
	e.size += len(b)
	if len(b) < copyBelow {
		e.buf = append(e.buf, b...)
		return
	}
	e.flush()
	e.vec = append(e.vec, b)
}

// begin appends a header for a payload of n bytes, of which fixed are written next into the slice it returns.
func (e *Encoder) begin(kind Kind, flags uint8, seq uint64, fixed, n int) (frame, payload []byte) {
	start := len(e.buf)
	e.size += HeaderSize + fixed
	var zero [HeaderSize + 48]byte
	if fixed <= 48 {
		e.buf = append(e.buf, zero[:HeaderSize+fixed]...)
	} else {
		e.buf = append(e.buf, make([]byte, HeaderSize+fixed)...)
	}
	f := e.buf[start:]
	binary.BigEndian.PutUint32(f, uint32(n))
	f[8], f[9] = byte(kind), flags
	binary.BigEndian.PutUint64(f[12:], seq)
	return f, f[HeaderSize:]
}

// seal sets the checksum over header and fixed part.
func seal(frame []byte) { binary.BigEndian.PutUint32(frame[4:], frameCRC(frame)) }

// frameCRC is CRC32C over the frame without its checksum field, bodies excluded: those have their own.
func frameCRC(frame []byte) uint32 {
	return entry.UpdateCRC32C(entry.CRC32C(frame[:4]), frame[8:])
}

// Add appends an Add numbered seq. a.Body must not change before WriteTo has returned.
func (e *Encoder) Add(seq uint64, a *Add) {
	var flags uint8
	if a.Recovery {
		flags = flagRecovery
	}
	if a.Urgent {
		flags |= flagUrgent
	}
	f, p := e.begin(KindAdd, flags, seq, addFixed, addFixed+len(a.Body))
	binary.BigEndian.PutUint64(p, uint64(a.Ledger))
	putEntry(p[8:], a.Entry)
	binary.BigEndian.PutUint64(p[16:], uint64(a.Term))
	binary.BigEndian.PutUint64(p[24:], a.Nonce)
	putEntry(p[32:], a.LAC)
	binary.BigEndian.PutUint32(p[40:], a.Checksum)
	seal(f)
	e.body(a.Body)
}

// AddAck appends the acknowledgement of the adds numbered first to last, both included.
func (e *Encoder) AddAck(first, last uint64) {
	f, p := e.begin(KindAddAck, 0, first, ackFixed, ackFixed)
	binary.BigEndian.PutUint64(p, last)
	seal(f)
}

// Failed appends a negative answer to the add or the request numbered seq. A detail over MaxDetail is cut.
func (e *Encoder) Failed(seq uint64, x *Error) {
	detail := x.Detail[:min(len(x.Detail), MaxDetail)]
	f, p := e.begin(KindFailed, 0, seq, failedFixed+len(detail), failedFixed+len(detail))
	p[0] = byte(x.Code)
	binary.BigEndian.PutUint16(p[4:], uint16(len(detail)))
	binary.BigEndian.PutUint64(p[8:], uint64(x.Term))
	copy(p[failedFixed:], detail)
	seal(f)
}

// Read appends a Read numbered seq.
func (e *Encoder) Read(seq uint64, r Read) {
	var flags uint8
	if r.Recovery {
		flags = flagRecovery
	}
	f, p := e.begin(KindRead, flags, seq, readFixed, readFixed)
	binary.BigEndian.PutUint64(p, uint64(r.Ledger))
	putEntry(p[8:], r.First)
	binary.BigEndian.PutUint64(p[16:], uint64(r.Term))
	binary.BigEndian.PutUint32(p[24:], r.Stride)
	binary.BigEndian.PutUint32(p[28:], r.MaxEntries)
	binary.BigEndian.PutUint32(p[32:], r.MaxBytes)
	seal(f)
}

// ReadReply appends the answer to the read numbered seq: at most MaxReadEntries entries and MaxBody bytes of
// bodies. The bodies must not change before WriteTo has returned.
func (e *Encoder) ReadReply(seq uint64, r ReadReply) {
	fixed := readReplyFixed + len(r.Entries)*readEntrySize
	n := fixed
	for i := range r.Entries {
		n += len(r.Entries[i].Body)
	}
	if len(r.Entries) > MaxReadEntries || n > MaxPayload {
		panic("bookiewire: read reply over the limits; the server bounds them")
	}
	f, p := e.begin(KindReadReply, 0, seq, fixed, n)
	putEntry(p, r.LAC)
	binary.BigEndian.PutUint32(p[8:], uint32(len(r.Entries)))
	for i := range r.Entries {
		x, t := &r.Entries[i], p[readReplyFixed+i*readEntrySize:]
		putEntry(t, x.Entry)
		binary.BigEndian.PutUint32(t[8:], x.Checksum)
		binary.BigEndian.PutUint32(t[12:], uint32(len(x.Body)))
	}
	seal(f)
	for i := range r.Entries {
		e.body(r.Entries[i].Body)
	}
}

// Fence appends a Fence numbered seq.
func (e *Encoder) Fence(seq uint64, r Fence) {
	f, p := e.begin(KindFence, 0, seq, fenceFixed, fenceFixed)
	binary.BigEndian.PutUint64(p, uint64(r.Ledger))
	binary.BigEndian.PutUint64(p[8:], uint64(r.Term))
	seal(f)
}

// FenceReply appends the answer to the fence numbered seq.
func (e *Encoder) FenceReply(seq uint64, r FenceReply) { e.lacFrame(KindFenceReply, seq, r.LAC) }

// WriteLAC appends a WriteLAC numbered seq.
func (e *Encoder) WriteLAC(seq uint64, r WriteLAC) {
	f, p := e.begin(KindWriteLAC, 0, seq, writeLACFixed, writeLACFixed)
	binary.BigEndian.PutUint64(p, uint64(r.Ledger))
	binary.BigEndian.PutUint64(p[8:], r.Nonce)
	putEntry(p[16:], r.LAC)
	seal(f)
}

// WriteLACReply appends the answer to the WriteLAC numbered seq.
func (e *Encoder) WriteLACReply(seq uint64) { e.empty(KindWriteLACReply, seq) }

// WaitLAC appends a WaitLAC numbered seq. The timeout travels in milliseconds.
func (e *Encoder) WaitLAC(seq uint64, r WaitLAC) {
	f, p := e.begin(KindWaitLAC, 0, seq, waitLACFixed, waitLACFixed)
	binary.BigEndian.PutUint64(p, uint64(r.Ledger))
	putEntry(p[8:], r.After)
	ms := min(max(r.Timeout, 0)/time.Millisecond, 1<<32-1)
	binary.BigEndian.PutUint32(p[16:], uint32(ms))
	seal(f)
}

// WaitLACReply appends the answer to the WaitLAC numbered seq.
func (e *Encoder) WaitLACReply(seq uint64, r WaitLACReply) { e.lacFrame(KindWaitLACReply, seq, r.LAC) }

// Ping appends a question for a sign of life.
func (e *Encoder) Ping(seq uint64) { e.empty(KindPing, seq) }

// Pong appends the answer to the Ping numbered seq.
func (e *Encoder) Pong(seq uint64) { e.empty(KindPong, seq) }

func (e *Encoder) lacFrame(kind Kind, seq uint64, lac entry.EntryID) {
	f, p := e.begin(kind, 0, seq, lacFixed, lacFixed)
	putEntry(p, lac)
	seal(f)
}

func (e *Encoder) empty(kind Kind, seq uint64) {
	f, _ := e.begin(kind, 0, seq, 0, 0)
	seal(f)
}

func putEntry(b []byte, e entry.EntryID) {
	binary.BigEndian.PutUint64(b, uint64(e))
}
