package bookiewire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Frame is one frame as [Reader.Next] returns it: a header whose length and kind are within the limits, and the
// payload. Its checksum is verified by the decoders, each for its kind.
type Frame struct {
	Kind Kind
	// Seq numbers an Add within its connection, and otherwise pairs a request with its answer.
	Seq uint64

	raw  []byte // header and payload
	slab *slab
}

// parseHeader reads the payload's size and the kind from a header, and applies the limits.
func parseHeader(b []byte) (kind Kind, n int, err error) {
	size := binary.BigEndian.Uint32(b)
	kind = Kind(b[8])
	var limit uint32
	switch kind {
	case KindAdd:
		limit = addFixed + MaxBody
	case KindReadReply:
		limit = MaxPayload
	case KindAddAck, KindFailed, KindRead, KindFence, KindFenceReply, KindWriteLAC, KindWriteLACReply, KindWaitLAC,
		KindWaitLACReply, KindPing, KindPong:
		limit = maxControl
	default:
		return 0, 0, malformed("frame of unknown kind %d", kind)
	}
	if size > limit {
		return 0, 0, malformed("frame of kind %d with %d bytes, limit is %d", kind, size, limit)
	}
	return kind, int(size), nil
}

// ParseFrame takes exactly one frame's bytes. The frame aliases b.
func ParseFrame(b []byte) (Frame, error) {
	if len(b) < HeaderSize {
		return Frame{}, malformed("header of %d bytes", len(b))
	}
	kind, n, err := parseHeader(b)
	if err != nil {
		return Frame{}, err
	}
	if len(b) != HeaderSize+n {
		return Frame{}, malformed("frame of %d bytes, header says %d", len(b), HeaderSize+n)
	}
	return Frame{Kind: kind, Seq: binary.BigEndian.Uint64(b[12:]), raw: b}, nil
}

// fixed checks the kind, that the payload has at least n bytes (exactly, unless more is allowed), and the
// checksum over header and these n bytes, which it returns.
func (f Frame) fixed(kind Kind, n int, more bool) ([]byte, error) {
	if f.Kind != kind {
		return nil, malformed("frame of kind %d, want %d", f.Kind, kind)
	}
	p := f.raw[HeaderSize:]
	if len(p) < n || !more && len(p) != n {
		return nil, malformed("frame of kind %d with %d bytes, want %d", kind, len(p), n)
	}
	if got, want := frameCRC(f.raw[:HeaderSize+n]), binary.BigEndian.Uint32(f.raw[4:]); got != want {
		return nil, malformed("frame of kind %d: checksum %08x, want %08x", kind, got, want)
	}
	return p[:n], nil
}

func (f Frame) recovery() bool { return f.raw[9]&flagRecovery != 0 }

func getEntry(b []byte) entry.EntryID {
	return entry.EntryID(binary.BigEndian.Uint64(b))
}

// Add decodes into a, whose Body aliases the frame. The body's checksum is not verified.
func (f Frame) Add(a *Add) error {
	p, err := f.fixed(KindAdd, addFixed, true)
	if err != nil {
		return err
	}
	*a = Add{
		Ledger:   entry.LedgerID(binary.BigEndian.Uint64(p)),
		Entry:    getEntry(p[8:]),
		Term:     entry.Term(binary.BigEndian.Uint64(p[16:])),
		Recovery: f.recovery(),
		Urgent:   f.raw[9]&flagUrgent != 0,
		Nonce:    binary.BigEndian.Uint64(p[24:]),
		LAC:      getEntry(p[32:]),
		Checksum: binary.BigEndian.Uint32(p[40:]),
		Body:     f.raw[HeaderSize+addFixed:],
	}
	if err := checkEntry(a.Entry, 0); err != nil {
		return err
	}
	return checkEntry(a.LAC, entry.NoEntry)
}

func checkEntry(e, least entry.EntryID) error {
	if e < least {
		return malformed("entry id %d", e)
	}
	return nil
}

// AddAck decodes the range of adds acknowledged, both ends included.
func (f Frame) AddAck() (first, last uint64, err error) {
	p, err := f.fixed(KindAddAck, ackFixed, false)
	if err != nil {
		return 0, 0, err
	}
	if last = binary.BigEndian.Uint64(p); last < f.Seq {
		return 0, 0, malformed("acknowledged range %d to %d", f.Seq, last)
	}
	return f.Seq, last, nil
}

// Failed decodes a negative answer.
func (f Frame) Failed() (*Error, error) {
	n := len(f.raw) - HeaderSize
	p, err := f.fixed(KindFailed, max(n, failedFixed), false)
	if err != nil {
		return nil, err
	}
	if d := int(binary.BigEndian.Uint16(p[4:])); d != n-failedFixed {
		return nil, malformed("detail of %d bytes in %d", d, n-failedFixed)
	}
	code := Code(p[0])
	if code == OK || code == Disconnected {
		return nil, malformed("failure with code %s", code)
	}
	return &Error{Code: code, Term: entry.Term(binary.BigEndian.Uint64(p[8:])), Detail: string(p[failedFixed:])}, nil
}

// Read decodes a Read, whose MaxEntries and Stride are at least 1.
func (f Frame) Read() (Read, error) {
	p, err := f.fixed(KindRead, readFixed, false)
	if err != nil {
		return Read{}, err
	}
	r := Read{
		Ledger:     entry.LedgerID(binary.BigEndian.Uint64(p)),
		First:      getEntry(p[8:]),
		Term:       entry.Term(binary.BigEndian.Uint64(p[16:])),
		Recovery:   f.recovery(),
		Stride:     binary.BigEndian.Uint32(p[24:]),
		MaxEntries: binary.BigEndian.Uint32(p[28:]),
		MaxBytes:   binary.BigEndian.Uint32(p[32:]),
	}
	if r.Stride == 0 || r.MaxEntries == 0 || r.Recovery && r.MaxEntries != 1 {
		return Read{}, malformed("read of %d entries, stride %d", r.MaxEntries, r.Stride)
	}
	return r, checkEntry(r.First, 0)
}

// ReadReply decodes the entries found. Their bodies alias the frame; their checksums are not verified.
func (f Frame) ReadReply() (ReadReply, error) {
	if f.Kind != KindReadReply || len(f.raw) < HeaderSize+readReplyFixed {
		return ReadReply{}, malformed("read reply of kind %d with %d bytes", f.Kind, len(f.raw))
	}
	count := binary.BigEndian.Uint32(f.raw[HeaderSize+8:])
	if count > MaxReadEntries {
		return ReadReply{}, malformed("read reply of %d entries", count)
	}
	fixed := readReplyFixed + int(count)*readEntrySize
	p, err := f.fixed(KindReadReply, fixed, true)
	if err != nil {
		return ReadReply{}, err
	}
	r := ReadReply{LAC: getEntry(p)}
	if count > 0 {
		r.Entries = make([]ReadEntry, count)
	}
	bodies := f.raw[HeaderSize+fixed:]
	for i := range r.Entries {
		t := p[readReplyFixed+i*readEntrySize:]
		n := int(binary.BigEndian.Uint32(t[12:]))
		if n > len(bodies) {
			return ReadReply{}, malformed("read reply: body of %d bytes in %d", n, len(bodies))
		}
		r.Entries[i] = ReadEntry{Entry: getEntry(t), Checksum: binary.BigEndian.Uint32(t[8:]), Body: bodies[:n:n]}
		bodies = bodies[n:]
	}
	if len(bodies) > 0 {
		return ReadReply{}, malformed("read reply: %d bytes after the last body", len(bodies))
	}
	return r, nil
}

// Fence decodes a Fence, whose term is at least 1.
func (f Frame) Fence() (Fence, error) {
	p, err := f.fixed(KindFence, fenceFixed, false)
	if err != nil {
		return Fence{}, err
	}
	r := Fence{Ledger: entry.LedgerID(binary.BigEndian.Uint64(p)), Term: entry.Term(binary.BigEndian.Uint64(p[8:]))}
	if r.Term == 0 {
		return Fence{}, malformed("fence with term 0")
	}
	return r, nil
}

// FenceReply decodes the answer to a Fence.
func (f Frame) FenceReply() (FenceReply, error) {
	lac, err := f.lac(KindFenceReply)
	return FenceReply{LAC: lac}, err
}

// WriteLAC decodes a WriteLAC.
func (f Frame) WriteLAC() (WriteLAC, error) {
	p, err := f.fixed(KindWriteLAC, writeLACFixed, false)
	if err != nil {
		return WriteLAC{}, err
	}
	r := WriteLAC{
		Ledger: entry.LedgerID(binary.BigEndian.Uint64(p)),
		Nonce:  binary.BigEndian.Uint64(p[8:]),
		LAC:    getEntry(p[16:]),
	}
	return r, checkEntry(r.LAC, entry.NoEntry)
}

// WaitLAC decodes a WaitLAC.
func (f Frame) WaitLAC() (WaitLAC, error) {
	p, err := f.fixed(KindWaitLAC, waitLACFixed, false)
	if err != nil {
		return WaitLAC{}, err
	}
	r := WaitLAC{
		Ledger:  entry.LedgerID(binary.BigEndian.Uint64(p)),
		After:   getEntry(p[8:]),
		Timeout: time.Duration(binary.BigEndian.Uint32(p[16:])) * time.Millisecond,
	}
	return r, checkEntry(r.After, entry.NoEntry)
}

// WaitLACReply decodes the answer to a WaitLAC.
func (f Frame) WaitLACReply() (WaitLACReply, error) {
	lac, err := f.lac(KindWaitLACReply)
	return WaitLACReply{LAC: lac}, err
}

// Empty checks a frame of a kind without payload: WriteLACReply, Ping, Pong.
func (f Frame) Empty() error {
	_, err := f.fixed(f.Kind, 0, false)
	return err
}

func (f Frame) lac(kind Kind) (entry.EntryID, error) {
	p, err := f.fixed(kind, lacFixed, false)
	if err != nil {
		return 0, err
	}
	lac := getEntry(p)
	return lac, checkEntry(lac, entry.NoEntry)
}

// AsError is err as a *Error: itself, if there is one in it, otherwise an Unknown with its text.
func AsError(err error) *Error {
	var x *Error
	if errors.As(err, &x) {
		return x
	}
	return &Error{Code: Unknown, Detail: fmt.Sprint(err)}
}
