// Package operation decides how a bookie is emptied for good: what must hold before it begins, and what comes next.
//
//	plan := operation.MakePlan(request, cluster, ledgers)          // pure: figures and checks
//	op, err := store.StartOperation(ctx, …)                        // the record and the bookie's mark, in one transaction
//	var core operation.Core
//	for {
//		d := core.Step(op, survey)                             // what names the bookie still, and what is known of it
//		for _, l := range d.Confirm { … }                      // confirm a deletion for a disk that is dead
//		if d.Finish { op, err = store.FinishOperation(ctx, d.Op) } else if d.Write { op, err = store.UpdateOperation(ctx, d.Op) }
//	}
//
// Nothing here moves a byte. The mark makes owners take the bookie out of the ledgers that they write, and repair copy
// what is settled; this package watches the reverse index until it is empty, says what holds it up, and has the identity
// retired in the transaction that proves it. So whoever runs an operation may die at any point, and the next one knows
// all it needs from metadata; two that run one at once get in each other's way, not in the cluster's, for each change
// compares what was seen.
//
// One broker at a time runs all operations: the one that has the role "operations", under its lease. An operation of its
// own for each ledger, with a cursor of how far it came, was rejected: the reverse index is that cursor, and can't be
// behind.
package operation
