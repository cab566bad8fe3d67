// Package penstockdriver puts package bench's workloads on Penstock, through the SDK, as an application would.
//
//	driver, err := penstockdriver.Open(ctx, "penstock://127.0.0.1:7650")
//	if err != nil {
//		return err
//	}
//	defer driver.Close(ctx)
//	result, err := bench.Run(ctx, driver, scenario, bench.Options{})
//
// One client serves all producers and consumers. Topics are made in public/default.
//
// The SDK gives a receipt for each message, and receipts of one partition are done in order. So a goroutine for each
// partition of a producer waits for them one after the other. One goroutine for a whole producer would take a message for
// late that waits behind another partition's; one for each message would cost more than the message.
package penstockdriver
