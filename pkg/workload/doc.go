// Package workload puts load on a cluster through the SDK, checks what comes back, and measures how long publishing
// stood still. The demo, the integration tests, benches and verification share it.
//
//	run, err := workload.Start(ctx, c, workload.Config{Topic: "orders", Subscription: "check", Messages: 20_000, Rate: 2_000})
//	if err != nil {
//		return err
//	}
//	gap := run.Watch()                 // something is about to be broken
//	…
//	fmt.Println(gap.Stop())            // longest stretch without an acknowledgement since
//	report, err := run.Wait(ctx)       // everything was published and read back
//	for _, v := range report.Violations {
//		…
//	}
//
// # What is checked
//
// Every message carries the run it belongs to, its producer and a number, counted from 0 by each producer, and a
// checksum. A [Book] keeps what each producer sent and what became of it; a [Reading] keeps what one reading of the
// topic brought, a subscription's or a reader's; [Book.Judge] compares them. Both are pure: they take events and know
// neither clocks nor goroutines, so that planted faults can test them, and any history can be checked afterwards. They
// hold ranges of numbers and fixed tables, not messages: memory grows with the holes in a history, not with its
// length.
//
// # Stored twice or delivered twice
//
// A message that is read twice at one offset was delivered again, which delivery at least once allows. Read at two
// offsets it was stored twice, which deduplication forbids. Offsets are the only difference.
//
// # The end of a run
//
// After the last message has its outcome, a last word is published to each partition. Whatever was stored before it has
// a lower offset, so a reading that has everything below the last word is complete; no pause guesses at it.
package workload
