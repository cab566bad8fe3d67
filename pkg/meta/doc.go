// Package meta keeps what a cluster must agree on in etcd: typed records, each change one transaction with
// the guards of the ledger protocol, and a cache of what lookups need.
//
//	store := meta.New(client, "demo", log)
//	cluster, err := store.EnsureCluster(ctx)                                  // once, by whoever comes first
//	owner, err := store.TakeBundle(ctx, bundle, me, session.ID(), meta.ExpectNone()) // epoch+1
//	guard := meta.Guard{Bundle: bundle, Epoch: owner.Epoch}
//	chain, err := store.GetChain(ctx, meta.DataChain(topic.UUID, 0))
//	first, err := store.ReserveLedgerIDs(ctx, 16)
//	chain, ledger, err := store.OpenLedger(ctx, guard, chain, meta.Ledger{ID: first, …}, nil)   // T1
//	ledger, err = store.ChangeEnsemble(ctx, ledger, fragments)                                  // T2
//	chain, ledger, err = store.OpenLedger(ctx, guard, chain, next, &meta.Closing{Ledger: ledger, …}) // T3 + T1
//	chain, err = store.DeleteLedger(ctx, guard, chain, first)                                   // T7
//
// # Outcomes
//
// A transaction whose reply is lost is sent again; since each compares a revision or an absent key, at most
// one copy of it applies, and each record carries the identity of the transaction that wrote it, so that the
// second copy recognises the first. Methods retry an etcd that is away until their context ends. Then
// [ErrUnavailable] says that nothing was applied, [ErrUnknownOutcome] that it may have been, or may yet be.
//
// Reads of this package are linearizable. The [Cache] alone is not: it serves lookups, never safety.
//
// # Keys
//
// All below /penstock/<cluster>/ :
//
//	cluster, ledger-ids, bundle-numbers/<tenant>/<namespace>
//	ledgers/<id>                                      ids as in compactID
//	bybookie/<storage uuid, 32 hex digits>/<id>       reverse index, holders and intents; "d" when it is being deleted
//	chains/<chain id>, chain-pages/<chain id>/<page>
//	repair/ledgers/<id>, repair/claims/<id>, repair/census   what is to be repaired, who is at it, what the auditor knows
//	cookies/<bookie id>, retired/<storage uuid>, elections/<name>
//	view/…  what the cache watches: bookies, brokers, owners, epochs, tenants, namespaces, topics,
//	        marks/<storage uuid>, operations/<id>
package meta
