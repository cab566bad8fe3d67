package segment

import "fmt"

// prewriteChunk is what is written ahead at once: a batch that comes meanwhile waits for no more than this.
const prewriteChunk = 1 << 20

var blankChunk [prewriteChunk]byte

// Prewrite writes a chunk of zeros at off, durably, and returns where the next one goes; done if there is none. Blocks
// that were written once take batches and their syncs faster than blocks that are only allocated, whose state is
// journaled with them. It begins at offset 0, and is of no use any more, which it says, once there is a batch, or if the
// file is reused. It may overlap with everything but Close.
func (w *Writer) Prewrite(off int64) (next int64, done bool, err error) {
	off = max(off, headerBlockSize)
	if written, err := w.prewrite(off); err != nil || !written {
		return off, true, err
	}
	if err := w.Sync(); err != nil {
		return off, true, err
	}
	off += prewriteChunk
	return off, off >= w.reserved, nil
}

func (w *Writer) prewrite(off int64) (bool, error) {
	w.ahead.Lock()
	defer w.ahead.Unlock()
	n := min(prewriteChunk, w.reserved-off)
	if w.begun || n <= 0 {
		return false, nil
	}
	if _, err := w.f.WriteAt(blankChunk[:n], off); err != nil {
		return false, fmt.Errorf("write segment %s ahead: %w", w.path, err)
	}
	return true, nil
}

// begin ends writing ahead.
func (w *Writer) begin() {
	w.ahead.Lock()
	defer w.ahead.Unlock()
	w.begun = true
}
