// Package segment is one file of a bookie's log: a header, batches of records of many ledgers, and, once
// sealed, a footer with a sorted index. The bytes are specified in docs/formats.md.
//
// The writer's loop (one appender; syncs and reads may overlap with it):
//
//	w, err := segment.Create(fs, path, header, 256<<20, false) // durable, name included
//	for w.Room(len(recs), bodyBytes) {
//		locs, err := w.AppendBatch(recs, durableUpto) // one write, not yet durable
//		end := w.Size()
//		go func() {
//			err := w.Sync() // all batches up to end are durable: reply, and raise durableUpto to end
//		}()
//	}
//	err = w.Seal() // durable with its footer
//	err = w.Close()
//
// The loop after a start, newest segment first, so that each tells how much of the one before it must be there:
//
//	r, err := segment.Open(fs, path)
//	switch {
//	case errors.Is(err, segment.ErrUnsealed):
//		rec, err := segment.Recover(fs, path, prevDurableOfTheNextSegment)
//		if rec.Corrupt != nil {
//			// put the affected ledgers in limbo and fence them, durably, before going on
//		}
//		err = segment.SealRecovered(fs, path, rec) // never appended to again; or, on a full disk, Resume
//		r, err = segment.Open(fs, path)
//	case errors.Is(err, segment.ErrBlank), errors.Is(err, segment.ErrRetired):
//		// creation or recycling was cut short: nothing was ever acknowledged from this file; remove it
//	}
//
// A file that is no longer needed may be kept with [Retire] and handed to [Create] with reuse, which keeps its
// blocks. Every checksum in a file is seeded with its segment's UUID, its generation and the place of what it
// covers, so that what the file held before cannot be read as what it holds now.
package segment
