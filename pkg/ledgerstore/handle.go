package ledgerstore

import (
	"errors"
	"sync"

	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// errGone is returned by acquire for a segment that compaction has replaced: look the entry up again.
var errGone = errors.New("segment was replaced")

// handle is a segment's open file, shared by its readers. A file is closed only when nobody reads from it.
type handle struct {
	mu     sync.Mutex
	writer *segment.Writer // while unsealed, and until its last reader has left
	reader *segment.Reader // once sealed; opened on demand
	sealed bool
	refs   int
	gone   bool
}

// source reads records at places in a segment, verified.
type source interface {
	ReadAt(loc segment.Location) (segment.Record, error)
}

func (h *handle) acquire(fs vfs.FS, path string) (source, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone {
		return nil, errGone
	}
	if !h.sealed {
		h.refs++
		return h.writer, nil
	}
	if h.reader == nil {
		r, err := segment.Open(fs, path)
		if err != nil {
			return nil, err
		}
		h.reader = r
	}
	h.refs++
	return h.reader, nil
}

// acquireReader is acquire for a sealed segment.
func (h *handle) acquireReader(fs vfs.FS, path string) (*segment.Reader, error) {
	src, err := h.acquire(fs, path)
	if err != nil {
		return nil, err
	}
	r, ok := src.(*segment.Reader)
	if !ok {
		panic("ledgerstore: segment is not sealed")
	}
	return r, nil
}

func (h *handle) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refs--
	h.closeIdle(h.gone)
}

// seal switches from the writer to the footer.
func (h *handle) seal() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sealed = true
	h.closeIdle(false)
}

// close gives the segment up, and reports whether nobody is reading from it.
func (h *handle) close() (idle bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gone = true
	h.closeIdle(true)
	return h.refs == 0
}

// trim closes the file if it can be opened again and nobody reads from it.
func (h *handle) trim() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closeIdle(true)
}

func (h *handle) isOpen() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reader != nil
}

// closeIdle drops the errors of Close: nothing was written through these since their last sync.
func (h *handle) closeIdle(all bool) {
	if h.refs > 0 {
		return
	}
	if h.writer != nil && (h.sealed || h.gone) {
		_ = h.writer.Close()
		h.writer = nil
	}
	if all && h.reader != nil {
		_ = h.reader.Close()
		h.reader = nil
	}
}
