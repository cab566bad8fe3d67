// Package statelog is the keyed log of a bundle: side state of all its topics (acknowledgements, deduplication
// snapshots, later more) as records of owner, kind and key, of which the newest value counts.
//
//	l, err := statelog.Open(ctx, env, guard, bundle, statelog.Config{})   // recovers and replays
//	records, err := l.Load(ctx, owner)                                    // what is live of one owner
//	err = l.Append(ctx, []statelog.Record{{Owner: owner, Kind: k, Key: key, Value: v}}, func(err error) { … })
//	err = l.DeleteOwner(ctx, owner, done)
//	err = l.Close(ctx)                                                    // or <-l.Lost(): another owner took over
//
// # The log
//
// Records are written in entries to a chain of ledgers, many calls' records in one entry while earlier ones are
// under way. The records of one call stay together in one entry, which is stored whole or not at all; only a call
// above [MaxEntry] is split, and then a beginning of it may be all that is stored.
//
// The log is replayed when the bundle is taken over. So it must stay short: at most max(8 MiB, 4 × live), and at most two
// dozen ledgers, of which each takeover adds one. When it grows, the oldest live records are written again at the tail,
// until the oldest ledger holds nothing live, and is deleted. Ledgers go strictly from the oldest on. That is why a deletion
// needs to be written only once: everything it supersedes is older, and is gone before it.
//
// # Damage
//
// Each record has checksums of its own beside those of the entry. A damaged value fails the [Log.Load] of its owner
// with a *[DamagedError], and nobody else's. It is never dropped, and the ledger that holds it is kept, until the record
// is superseded or its owner deleted.
//
// Each entry names the owners of the one before. So an entry that no bookie gives fails the loads of those with an
// *[UnreadableError], and nobody else's; each such load tries to read it again, and once that succeeds nothing is
// missing. Until then the log goes on, but is not shortened; whenever it should be, that read is tried as well. If the entry after it is missing too, or there is none, nothing
// tells whose state it holds: then the log is not opened, which is worth retrying.
package statelog
