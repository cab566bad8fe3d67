// Package bench measures a message broker under load: how much it takes in and gives out, how late, and at what cost.
//
//	driver, err := penstockdriver.Open(ctx, "penstock://127.0.0.1:7650")
//	if err != nil {
//		return err
//	}
//	defer driver.Close(ctx)
//	result, err := bench.Run(ctx, driver, bench.Scenario{Size: 1024, Duration: 30 * time.Second}, bench.Options{})
//	if err != nil {
//		return err // result tells what was measured until then
//	}
//	if err := result.Err(); err != nil {
//		return err // messages failed, or are missing
//	}
//	fmt.Println(result.Phase(bench.PhaseSteady).Publish.P99Ms)
//
// A [Scenario] says what load; a [Driver] puts it on one kind of broker; [Run] is the same for all of them, so that figures of
// different brokers differ by the brokers.
//
// # What is measured
//
// Latency counts from when a message was due. At a given rate that is its place in the schedule, not when the engine came
// around to it: a broker that stands still for a second delays every message that was due in that second, and all of them
// count (no coordinated omission). At the highest rate there is no schedule, and a message is due when it is handed to the
// driver. Publish latency ends when the driver reports the acknowledgement, end-to-end latency when a consumer is handed
// the message. All of it happens in this process, on one monotonic clock. A message belongs to the phase that it was due in,
// and its latency is waited for after the phase has ended.
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
