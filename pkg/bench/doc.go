// Package bench measures a message broker under load: how much it takes in and gives out, how late, and at what cost.
//
// A [Scenario] says what load; a [Driver] puts it on one kind of broker; all else is the same for all of them, so that
// figures of different brokers differ by the brokers.
//
// # What is measured
//
// Latency counts from when a message was due. At a given rate that is its place in the schedule, not when the engine came
// around to it: a broker that stands still for a second delays every message that was due in that second, and all of them
// count (no coordinated omission). At the highest rate there is no schedule, and a message is due when it is handed to the
// driver. Publish latency ends when the driver reports the acknowledgement, end-to-end latency when a consumer is handed
// the message. All of it happens in this process, on one monotonic clock.
//
// # What is verified
//
// Each message carries its run, producer and number. A set per producer holds what was acknowledged, one per producer and
// subscription what came back; a run ends when the latter holds the former, and otherwise says what is missing. Sets are
// bitmaps in pages, and a page that is full is one word: memory grows with holes, not with the length of the run.
//
// # Who owns what
//
// A producer of the engine owns a fixed number of messages, as many as it may have in flight, with values of their own. One
// goes to the driver with Publish, and comes back with the outcome; nothing is allocated per message. The alternative, a
// closure and a new message per call, costs more than some brokers do, and measures the garbage collector.
package bench
