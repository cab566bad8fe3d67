package segment

import (
	"bytes"
	"errors"
	"io"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// windowChunk is how much is read at a time: enough for the disk's bandwidth, and for the kernel to read ahead.
const windowChunk = 2 << 20

// window reads a file forward in big chunks and lends out stretches of it. What it holds grows to the largest
// stretch asked for, and so to at most MaxBatchBytes and a chunk. It begins and ends at blocks, so that a file that
// is opened for it is read around the cache.
type window struct {
	f     io.ReaderAt
	size  int64
	buf   []byte
	start int64 // of buf in the file
}

func newWindow(f io.ReaderAt, size int64) *window { return &window{f: f, size: size} }

// at returns n bytes at off, fewer at the end of the file, valid until the next call.
func (w *window) at(off int64, n int) ([]byte, error) {
	n = int(max(0, min(int64(n), w.size-off)))
	end := off + int64(n)
	if off < w.start || end > w.start+int64(len(w.buf)) {
		if err := w.fill(off, n); err != nil {
			return nil, err
		}
	}
	return w.buf[off-w.start : end-w.start], nil
}

// fill moves the window so that it holds at least n bytes from off on.
func (w *window) fill(off int64, n int) error {
	start := off &^ (vfs.BlockSize - 1)
	n += int(off - start)
	var kept []byte
	if have := start - w.start; have >= 0 && have < int64(len(w.buf)) {
		kept = w.buf[have:]
	}
	// To the end of a block, also if the file ends before: a shorter read could not go around the cache.
	room := (max(n, windowChunk) + vfs.BlockSize - 1) &^ (vfs.BlockSize - 1)
	if left := (w.size - start + vfs.BlockSize - 1) &^ (vfs.BlockSize - 1); left < int64(room) {
		room = int(left)
	}
	want := int(min(int64(room), w.size-start))
	if room > cap(w.buf) {
		grown := vfs.AlignedBuffer(room)
		w.buf = grown[:copy(grown, kept)]
	} else {
		w.buf = w.buf[:copy(w.buf[:cap(w.buf)], kept)]
	}
	w.start = start
	have := len(w.buf)
	if have >= want {
		return nil
	}
	have &^= vfs.BlockSize - 1
	w.buf = w.buf[:room]
	got, err := w.f.ReadAt(w.buf[have:], start+int64(have))
	w.buf = w.buf[:min(want, have+got)]
	switch {
	case len(w.buf) == want:
		return nil
	case err == nil || errors.Is(err, io.EOF):
		// The size was read before: the file is shorter than it said. What is not there reads as nothing.
		w.size = start + int64(len(w.buf))
		return io.ErrUnexpectedEOF
	}
	w.buf = w.buf[:0]
	return err
}

// find returns the offset of the first pattern at or behind off.
func (w *window) find(off int64, pattern []byte) (int64, bool, error) {
	for w.size-off >= int64(len(pattern)) {
		// What is left in the window first, then whole chunks.
		n := windowChunk
		if have := w.start + int64(len(w.buf)) - off; off >= w.start && have >= int64(len(pattern)) {
			n = int(have)
		}
		b, err := w.at(off, n)
		if err != nil {
			return 0, false, err
		}
		if i := bytes.Index(b, pattern); i >= 0 {
			return off + int64(i), true, nil
		}
		off += int64(len(b) - len(pattern) + 1)
	}
	return 0, false, nil
}
