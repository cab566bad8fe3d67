// Package ownership decides which bundles this broker holds: it takes bundles that nobody serves, takes over from
// brokers that seem dead, keeps what it has through a lost lease, and hands everything over before a shutdown.
//
// Ownership is an epoch in etcd; a lease only says that the owner lives. So a broker that is merely suspected can be
// replaced before its lease ends: the replacement raises the epoch in the same transaction that takes the key,
// and every transaction and every ledger of the old owner fails from then on. A wrong suspicion costs a
// reconnect, never a message.
//
// [Core] is a state machine without goroutines or clocks; [Runner] feeds it from watch caches, the lease, the pings of
// [Peers] and a ticker, and carries its actions out:
//
//	for event := range events {
//		for _, action := range core.Step(event) {
//			switch action := action.(type) {
//			case Take:      // one transaction: owner key, epoch+1; then Step(Taken{…})
//			case Reacquire: // one transaction: owner key with the new lease, same epoch; then Step(Reacquired{…})
//			case Serve:     // the bundle's topics may be opened under the guard
//			case Stop:      // nothing of the bundle may be served any more; then Step(Stopped{…})
//			case Release:   // one transaction: owner key deleted; then Step(Released{…})
//			}
//		}
//	}
//
// Which broker takes a bundle is decided by rendezvous hashing over the live brokers that are neither suspected nor
// draining, as this broker sees them; two brokers that see differently may both try, and one transaction wins.
// A bundle that was never owned waits until somebody asks for it. A broker that joins moves nothing by itself. Where
// the preferred broker leaves a bundle without an owner lying, the next in order takes it after a while.
//
// Suspicion is no vote: one broker's is enough, so it must be fresh. Whoever took a bundle after it was suspected
// reaches etcd, and is left in place until its port refuses connections or its lease ends; what is taken on suspicion
// is not taken so again soon. So brokers that cannot see each other do not pass bundles to and fro. A broker that hears none
// of several peers suspects none of them, since it may be the one that nobody hears.
package ownership
