package segment

import (
	"errors"
	"fmt"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// ErrNotResumable is returned by [Resume] for a segment that can only be sealed.
var ErrNotResumable = errors.New("segment cannot be appended to again")

// Resumable reports whether the segment may be appended to again: all that was durable is there, and so is the space
// that was reserved for it.
func (r *Recovered) Resumable() bool { return r.Corrupt == nil && r.size >= r.reserved }

// Resume lets a recovered segment be appended to again, behind rec.End, in the space that is reserved for it: it is for a
// disk that has no room for another segment. What follows rec.End is made zeros first, durably: no batch that was dropped may
// come back between those that are written now. The error wraps [ErrNotResumable] if the segment has to be sealed instead; any
// error leaves it as it was, as far as [Recover] goes.
//
// The Writer takes what rec knows; rec is of no use any more.
func Resume(fs vfs.FS, path string, rec *Recovered) (*Writer, error) {
	if !rec.Resumable() {
		return nil, fmt.Errorf("resume segment %s: %w", path, ErrNotResumable)
	}
	f, err := fs.Open(path)
	if err != nil {
		return nil, fmt.Errorf("resume segment: %w", err)
	}
	if err := blank(f, rec.End, rec.size); err != nil {
		return nil, errors.Join(fmt.Errorf("resume segment %s: %w", path, err), f.Close())
	}
	w := &Writer{
		f: f, path: path, header: rec.Header, seed: newSeed(rec.Header), reserved: rec.reserved, contents: rec.contents,
		seq: rec.seq, prevDurable: rec.PrevDurable, syncs: make(chan vfs.File, maxSyncs), begun: true,
	}
	w.size.Store(rec.End)
	if err := w.openSyncs(fs); err != nil {
		return nil, errors.Join(fmt.Errorf("resume segment: %w", err), w.Close())
	}
	return w, nil
}

// blank makes a part of a file zeros, durably.
func blank(f vfs.File, from, to int64) error {
	for from < to {
		n := min(prewriteChunk, to-from)
		if _, err := f.WriteAt(blankChunk[:n], from); err != nil {
			return err
		}
		from += n
	}
	return f.Sync()
}
