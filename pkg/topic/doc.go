// Package topic is one topic partition at its owner: it gives messages their offsets, keeps each producer's
// sequences, serves readers from a tail cache or from bookies, and decides what may be trimmed.
//
//	t, err := topic.Open(ctx, env, guard, id, cfg)        // recovers what a former owner left open
//
//	p, err := t.OpenProducer(ctx, "orders-7", epoch, true) // rebuilds sequences first, if deduplication asks for it
//	err = p.Append(ctx, topic.Batch{Frame: bytes, Parsed: &f, Level: ledger.AckQuorum, Done: func(r topic.Receipt, err error) { … }})
//
//	r := t.NewReader(from)
//	entries, err := r.Next(ctx, 1<<20)                     // waits; TryNext never does
//
//	freed, err := t.Trim(ctx, topic.TrimPolicy{Floor: lowestUnacknowledged, …})
//	err = t.Close(ctx)                                    // or <-t.Lost()
//
// # What happens to a batch
//
// Append waits for bytes of the budget, then checks the producer's epoch and sequence, takes the next offset, and
// hands envelope and frame, one buffer built once, to the chain. When the ledger confirms the entry it becomes
// visible: it enters the tail cache, readers are woken, the producer's stored sequence moves. Then the batch is done.
//
// A batch that fails definitely (no ledger can be opened) takes its offset with it: all batches in flight fail
// alike, the topic takes up again at the offset of the first of them. What follows a failed or refused batch of one
// producer is refused as well ([ErrSequenceGap]), until that batch is sent again or the producer opened anew: so a
// retry never lands behind its successors.
//
// # Deduplication
//
// Of each producer that asks for it, the topic knows the highest sequence stored. A batch at or below is a
// duplicate; one in flight is answered with the first copy. This state is a function of the log: whoever opens the
// topic reads the last snapshot and the entries after it, on first need. Snapshots go, as records, to a store
// that is handed in; entries are not trimmed before a snapshot covers them. Producers that stored nothing for a long
// time are forgotten (DedupConfig); if one returns with old sequences, they count as new.
//
// An incarnation is told where to go on when it is let in. So it is in that store first: else a later owner could let
// an older one in, whose messages would get the sequences of the newer one's, and those would be taken for duplicates.
//
// An idle topic has no goroutine and no timer.
package topic
