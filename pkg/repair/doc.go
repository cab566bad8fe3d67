// Package repair makes copies that are missing, elsewhere or in place, until each entry has as many as its ledger asks for, on
// bookies that are there to stay.
//
//	r := repair.New(repair.Config{Worker: id}, repair.Env{Meta: store, Topology: cache, Session: session, …})
//	go r.Run(ctx)          // audits, if it is this process's turn, and works
//	r.Hint(hint)           // of copies that a writer gave up
//
// # What is damaged
//
// One of the runners is the auditor, by a key under its lease. It keeps the replication census: which ledgers are not as
// their records promise. It is derived from linearizable reads of the metadata and from what bookies say that they have, never
// from what was once seen:
//
//   - a bookie that is not registered for [Config.Delay], or that a person declared dead, or that is to be emptied: the reverse
//     index names the ledgers. So looking costs what is damaged, and nothing for what is not;
//   - hints of writers, which leave copies behind when they change an ensemble;
//   - what bookies found unreadable, by scrubs and by reads, and ledgers of which they do not know what they lost;
//   - all ledgers in turn, slowly: the entries that each bookie lists are held against the record.
//
// A damaged ledger has one small record in etcd ([meta.Repair]), some thousands at most; more are counted, and follow as these
// are done. census.go is the auditor's state machine, auditor.go carries it out.
//
// # What is done
//
// Every runner works, on a few ledgers at a time. It claims one by a key under its lease, surveys it (what do the record, the
// bookies and people say now?), and takes the first step that helps; then it surveys it again, until nothing is left. [Job] decides,
// as a function of what was surveyed; worker.go carries out. So whatever a crash leaves behind is one more state to go on from.
//
// A slot goes to another bookie by the ledger protocol: an intent in the ledger's record, which keeps the target from
// deleting what it gets; copies, each checked, with the recovery flag; the target lists that it has all of its entries; the swap,
// which compares that the intent was there all the time. What a bookie of the ledger lacks, or cannot read, is sent to it from
// another one. Where a fragment is empty there is nothing to copy, and the slot is swapped all the same.
//
// The open fragment is its writer's. If it names a bookie that is gone or to go, the owner is asked to close the ledger; if there is none, the
// topic is opened, which recovers and closes it.
//
// # Decisions
//
// Brokers work, not bookies: they have readers, placement and connections already, and a bookie knows nothing of who else has
// a ledger. There is one budget in bytes per second for the cluster, [Config.BytesPerSecond], of which each live broker takes an equal
// part; so neither the number of brokers nor that of damaged disks decides how much of the network repair takes.
//
// All copies of a slot are sent, also those that the target has already: it takes them for what they are without writing them again,
// and learns that it must not delete them. Asking it first what it has, and sending the rest, was rejected: a bookie may be about to
// delete what it had before.
//
// A queue of single copies in etcd was rejected: a bookie has millions of entries; and so was a plan that is stored and followed: it is
// wrong as soon as a second bookie dies.
package repair
