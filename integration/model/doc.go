// Package model explores every interleaving of a small cluster: one ledger, three to five bookies, two or three entries, its
// writer, up to two recoveries, repair, garbage collection, deletion, lost disks, in a breadth-first search over all states.
//
//	r := model.Explore(model.Configs()[0]) // States, Closed, …
//	if v := r.Violation; v != nil {
//		fmt.Println(v) // the rule, and the shortest story that leads to it
//	}
//
// What the parts of the cluster decide is the product's own code wherever it can be:
//
//	writer        ledger.WriterCore, with ledger.Place
//	recovery      ledger.RecoveryCore, likewise
//	etcd          meta.Store over sim/etcdmodel; ledger.ResolveChange and CloseResult
//	admission     bookie.Admit
//	collection    bookie.Judge
//	arithmetic    quorum.Quorum, in those and in the checks
//	bookie        restated, in bookie.go: what is durable, terms, limbo, tombstones, marks; a test compares it with ledgerstore
//	repair        restated, in moves.go: the product has its transactions and its admission, and no repair yet
//
// A state of the product's machines cannot be copied, nor is it comparable. So a machine is known by the shortest
// history that leads to it, and is built anew from that to take one more event; two machines are the same if all
// their fields, unexported ones too, are. Each (machine, event) is carried out once and remembered, so that the
// search itself handles numbers: a state of the cluster is a number for each machine, and a few bytes for each bookie
// and for the network. The set of visited states holds the states themselves, not their hashes: nothing is missed by a
// collision.
//
// The network delays, reorders and loses requests without bound: a request is in it from when it was sent, and may be
// carried out at any later time or never. An answer comes with the request or later; requests to etcd take effect and are
// answered at different times. Time stands still: whatever a machine would do when time passes, its configuration lets it do
// at once, or there is an event for it. Bookies answer after the disk, so that a crash of one is no event of its own; that
// they do is what ledgerstore's own tests and the simulation are about.
//
// Each rule that is restated here can be left out ([Config.Without]), and each configuration that leaves one out must be
// violated. Rules within the product's machines are left out by planting a bug in the source: see the command in
// plant.
//
// The alternative, a model of the protocol in a language of its own, was rejected: it would show that the protocol is
// right, and nothing of the code, and would be true only until the code changes.
package model
