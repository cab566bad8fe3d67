// Package cursor holds one subscription's acknowledgement state: which offsets are acknowledged, which are to
// be delivered again, and the records that make both survive a restart.
//
// Everything is in offsets. A [Cursor] is a pure state machine: no goroutines, no clock, no I/O, and not safe
// for concurrent use; its owner serialises calls. The owner's loop is
//
//	ticket, err := c.Ack(c.Generation(), end, ranges)  // as often as acknowledgements come
//	…
//	if batch, ok := c.Take(); ok {                     // several acknowledgements, one append
//		for _, records := range batch.Split(maxEntryBytes) {
//			append them to the bundle's state log, in order
//		}
//		// when the last append is durable, and in the order of Take:
//		c.Confirm(batch.Seq)
//	}
//	every ticket ≤ c.Durable() may now be answered
//
// What is applied and what is durable are told apart: [Cursor.Floor] is what dispatch goes by, and
// [Cursor.TrimFloor] is what retention goes by: it counts only what is durable, and falls at once when the
// subscription is moved back.
//
// When an append fails with an unknown outcome, or ownership is lost, the cursor is dropped and loaded anew
// from the log ([Group], [Load]); a batch that was certainly not written may be appended again as it is,
// before any later one.
//
// The records' bytes are described in docs/formats.md. Loading never repairs by forgetting: a damaged record
// is a [*CorruptError], and the subscription stays refused until someone decides what to do about it.
package cursor
