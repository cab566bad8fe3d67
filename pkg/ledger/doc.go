// Package ledger is the replication protocol of one ledger: its writer, its reader, its recovery, and the
// placement of its copies.
//
// A ledger is an append-only run of entries with one writer. Each entry goes to Qw bookies of an ensemble of E; it
// counts once Qa of them have it on disk, and every entry before it counts too. A writer that lost its bookies
// swaps them by a metadata transaction and counts nothing against the new ones before it is acknowledged. A
// writer that is gone, or thought gone, is shut out by a recovery: it raises the term, fences the bookies, finds
// the end by reading from quorums, and closes the ledger.
//
// The decisions are pure: [WriterCore] and [RecoveryCore] take events and return what to do, without goroutines,
// clocks, sockets or files, so that the same code runs under a simulator. [Writer] and [Recover] are the thin
// runners beside them.
//
//	w := ledger.NewWriter(env, record)                    // after the transaction that opened the ledger
//	w.Append(body, ledger.AckQuorum, func(id entry.EntryID, err error) { … })
//	closed, err := w.CloseWith(ctx, closeTxn)             // or <-w.Broken(): another owner took over
//
//	closed, stats, err := ledger.Recover(ctx, env, id, ledger.RecoverOptions{Finish: closeTxn})
//
//	r := ledger.NewReader(env, record)
//	entries, err := r.Read(ctx, first, last, 1<<20)
//
// The caller's loop over a core is that of the runner in writer.go:
//
//	core.Step(now, event)      // any number of events
//	rd := core.Ready()         // what to do now: sends, confirmations, completions, transactions
//	…                          // do it, in the order of Ready's fields
package ledger
