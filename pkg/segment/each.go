package segment

import "fmt"

// Each reads the segment in the order it was written and calls fn for each record, verified, until fn returns an
// error, which it returns. The body is valid during the call. It passes over gaps; other damage is a *CorruptError.
//
// Records are verified one by one: damage to one costs a reader no other, whatever batch they share.
func (r *Reader) Each(fn func(Record, Location) error) error {
	gaps, err := r.Gaps()
	if err != nil {
		return err
	}
	w := &walk{r: r, win: newWindow(r.f, r.trailer.dataEnd), gaps: gaps, off: headerBlockSize}
	return w.run(r.trailer.dataEnd, fn)
}

// walk is the state of one Each.
type walk struct {
	r    *Reader
	win  *window
	gaps []Gap // those at or behind off
	off  int64
	// onBatch and onGap are called, if set, when off is at the one or the other.
	onBatch func(batchHeader)
	onGap   func(Gap)
}

// run goes from off to end.
func (w *walk) run(end int64, fn func(Record, Location) error) error {
	for w.off < end {
		if w.skipGap() {
			continue
		}
		if err := w.batch(fn); err != nil {
			return err
		}
	}
	return nil
}

// skipGap passes over the gap that begins at off.
func (w *walk) skipGap() bool {
	if len(w.gaps) == 0 || w.gaps[0].Offset != w.off {
		return false
	}
	if w.onGap != nil {
		w.onGap(w.gaps[0])
	}
	w.off = w.gaps[0].End
	w.gaps = w.gaps[1:]
	return true
}

func (w *walk) corrupt(what string) error {
	return &CorruptError{Path: w.r.path, Offset: w.off, What: what}
}

func (w *walk) batch(fn func(Record, Location) error) error {
	b, err := w.win.at(w.off, batchHeaderSize)
	if err != nil {
		return w.readError(err)
	}
	h, ok := decodeBatchHeader(b, w.r.seed, w.r.header.Generation, w.off)
	end := w.off + batchHeaderSize + int64(h.length)
	if !ok {
		return w.corrupt(whatBatch)
	}
	if w.onBatch != nil {
		w.onBatch(h)
	}
	w.off += batchHeaderSize
	for w.off < end {
		if w.skipGap() {
			continue
		}
		if err := w.record(end, fn); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) record(end int64, fn func(Record, Location) error) error {
	b, err := w.win.at(w.off, recordHeaderSize)
	if err != nil {
		return w.readError(err)
	}
	_, bodyLen, ok := decodeRecordHeader(b, w.r.seed, w.off)
	n := recordHeaderSize + int(bodyLen)
	if !ok || int64(n) > end-w.off {
		return w.corrupt(whatRecord)
	}
	if b, err = w.win.at(w.off, n); err != nil {
		return w.readError(err)
	}
	rec, what := decodeRecord(b, w.r.seed, w.off)
	if what != "" {
		return w.corrupt(what)
	}
	if err := fn(rec, Location{Offset: w.off, Length: uint32(n)}); err != nil { // at most MaxBatchBytes
		return err
	}
	w.off += int64(n)
	return nil
}

func (w *walk) readError(err error) error {
	return fmt.Errorf("walk segment: %w", readError(err, w.r.path, w.off, whatBatch))
}
