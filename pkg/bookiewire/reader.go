package bookiewire

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
)

// Reader cuts a stream into frames. It reads into slabs that it shares with the frames: a body is never copied
// from its frame, and a slab is used again once every frame retained from it is released. One goroutine reads;
// [Retained.Release] may be called from any.
//
// A buffer per frame was rejected: at 100 bytes a message the allocations cost more than everything else that is
// done with the entry.
type Reader struct {
	r    io.Reader
	size int
	cur  *slab
	off  int // start of the next frame in cur
	end  int // end of what was read into cur
	free chan *slab

	// Kinds, if set, are the only kinds of frames that may come: another one is malformed as soon as its header is here.
	Kinds []Kind
	// Begun, if set, is called before Next waits for the rest of a frame that has begun to come: with 0, and when a frame
	// needs memory of its own beyond the slabs, with its size, before more of that is taken. An error ends Next.
	Begun func(own int) error
	// AtOnce is the size up to which a frame that is larger than a slab gets all its memory when its header is here. Beyond
	// it, and for those who do not trust their peers, 0, that grows with what has arrived.
	AtOnce int
	told   bool // of the frame being read
}

// firstSlab is what a stream begins with: most connections of a large cluster are idle.
const firstSlab = 4 << 10

// slab is memory shared by frames. refs counts the frames retained, and one for the reader while it reads
// into it.
type slab struct {
	buf  []byte
	refs atomic.Int64
	home chan *slab // nil: too large to keep
}

// Slabs are free slabs, shared by readers.
type Slabs struct {
	size int
	free chan *slab
}

// NewSlabs makes slabs of size bytes, and keeps up to keep of them when they are free.
func NewSlabs(size, keep int) *Slabs {
	return &Slabs{size: max(size, 2*HeaderSize), free: make(chan *slab, keep)}
}

// NewReader returns a Reader that takes its slabs from s. Larger frames get memory of their own, which grows only as
// their bytes arrive.
func (s *Slabs) NewReader(r io.Reader) *Reader { return &Reader{r: r, size: s.size, free: s.free} }

// NewReader returns a Reader with slabs of size bytes of its own.
func NewReader(r io.Reader, size int) *Reader { return NewSlabs(size, 4).NewReader(r) }

// Retained keeps a frame's bytes valid.
type Retained struct{ slab *slab }

// Retain keeps f's bytes valid until Release, beyond the next call of Next.
func (f Frame) Retain() Retained {
	if f.slab != nil {
		f.slab.refs.Add(1)
	}
	return Retained{slab: f.slab}
}

// Release gives the bytes back. It is called once.
func (r Retained) Release() {
	if r.slab != nil {
		r.slab.release()
	}
}

func (s *slab) release() {
	switch refs := s.refs.Add(-1); {
	case refs < 0:
		panic("bookiewire: frame released twice")
	case refs == 0 && s.home != nil:
		select {
		case s.home <- s:
		default:
		}
	}
}

// Size is the number of bytes of the frame on the wire.
func (f Frame) Size() int { return len(f.raw) }

// Buffered reports whether a complete frame is at hand, so that Next will not wait.
func (r *Reader) Buffered() bool {
	b := r.pending()
	if len(b) < HeaderSize {
		return false
	}
	_, n, err := parseHeader(b)
	return err != nil || len(b) >= HeaderSize+n
}

// Next returns the next frame, valid until the next call unless retained. The error is io.EOF between frames,
// io.ErrUnexpectedEOF within one, ErrMalformed (wrapped) for bytes that break the limits, or the stream's. After
// an error the stream is of no further use.
func (r *Reader) Next() (Frame, error) {
	r.told = r.Begun == nil
	if err := r.fill(HeaderSize); err != nil {
		return Frame{}, err
	}
	kind, n, err := parseHeader(r.pending())
	if err == nil && r.Kinds != nil && !slices.Contains(r.Kinds, kind) {
		err = malformed("frame of kind %d on this connection", kind)
	}
	if err != nil {
		return Frame{}, fmt.Errorf("read frame: %w", err)
	}
	if own := HeaderSize + n; own > r.size && len(r.pending()) < own && r.Begun != nil {
		r.told = true
		if err := r.Begun(own); err != nil {
			return Frame{}, err
		}
	}
	if err := r.fill(HeaderSize + n); err != nil {
		if err == io.EOF { //nolint:errorlint // fill returns it bare
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	raw := r.cur.buf[r.off : r.off+HeaderSize+n : r.off+HeaderSize+n]
	r.off += HeaderSize + n
	return Frame{Kind: kind, Seq: binary.BigEndian.Uint64(raw[12:]), raw: raw, slab: r.cur}, nil
}

func (r *Reader) pending() []byte {
	if r.cur == nil {
		return nil
	}
	return r.cur.buf[r.off:r.end]
}

// fill reads until n bytes are pending.
func (r *Reader) fill(n int) error {
	for {
		have := r.end - r.off
		if r.cur != nil && have >= n {
			return nil
		}
		if have > 0 && !r.told {
			r.told = true
			if err := r.Begun(0); err != nil {
				return err
			}
		}
		r.makeRoom(n)
		read, err := r.r.Read(r.cur.buf[r.end:])
		r.end += read
		if read > 0 {
			continue
		}
		if err == io.EOF && have > 0 {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
	}
}

// makeRoom makes sure that there is room to read, and that n bytes from r.off on will fit or can grow to.
func (r *Reader) makeRoom(n int) {
	have := r.end - r.off
	if r.cur != nil {
		small := len(r.cur.buf) < r.size && r.end < len(r.cur.buf)
		if have == 0 && r.cur.refs.Load() == 1 && (small || len(r.cur.buf) == r.size) {
			// Nobody else looks at it: start over. A first one that was filled is too small for this stream.
			r.off, r.end = 0, 0
		}
		if r.off+n <= len(r.cur.buf) && r.end < len(r.cur.buf) {
			return
		}
		if r.off == 0 && r.end < len(r.cur.buf) {
			return // a large frame: fill what there is before growing
		}
	}
	next := r.take(n, have)
	if r.cur != nil {
		copy(next.buf, r.cur.buf[r.off:r.end])
		r.cur.release()
	}
	next.refs.Store(1)
	r.cur, r.off, r.end = next, 0, have
}

// take returns a slab for a frame of n bytes of which have are there.
func (r *Reader) take(n, have int) *slab {
	if r.cur == nil && n <= firstSlab && firstSlab < r.size {
		return &slab{buf: make([]byte, firstSlab)}
	}
	if n <= r.size {
		select {
		case s := <-r.free:
			return s
		default:
			return &slab{buf: make([]byte, r.size), home: r.free}
		}
	}
	// At most twice what has arrived, so that a header alone cannot make us allocate what it claims.
	return &slab{buf: make([]byte, min(n, max(2*have, r.size, r.AtOnce)))}
}

// Own returns f with bytes that are the caller's for good: a copy of a small frame, and for one that fills most
// of its slab the slab itself, which is then not used again.
func (f Frame) Own() Frame {
	if f.slab == nil {
		return f
	}
	if 2*len(f.raw) > len(f.slab.buf) {
		f.slab.refs.Add(1)
	} else {
		f.raw = append([]byte(nil), f.raw...)
	}
	f.slab = nil
	return f
}
