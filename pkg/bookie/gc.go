package bookie

import (
	"errors"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Verdict is what a pass of garbage collection does about one ledger.
type Verdict uint8

// The verdicts.
const (
	// Keep: nothing says that it may go.
	Keep Verdict = iota
	// Skip: the metadata could not be read or understood; nothing is decided, and what was seen before stands.
	Skip
	// Watch: it is closed and not this bookie's. If it still is after the grace time it goes.
	Watch
	// Delete: it goes.
	Delete
	// Confirm: it is being deleted, nothing of it is here, and the metadata do not know that yet.
	Confirm
	// Quarantine: there is no record of it, and no tombstone. It is kept; an operator must look.
	Quarantine
)

// Sighting is when a ledger was first seen to be closed and not this bookie's, without having changed here since.
type Sighting struct {
	At time.Time
	// Entries is how many were stored then: more mean that a repair is copying to here.
	Entries int64
}

// Local is what is here of a ledger.
type Local struct {
	Stored  bool
	Entries int64
}

// Judge decides about one ledger on the bookie me. l and err are what a linearizable read of its record returned just
// now. seen is what an earlier pass noted for Watch, or the zero Sighting.
//
// It deletes on a positive statement only: the ledger is being deleted or a tombstone, or it is closed and names
// this bookie neither in a fragment nor in a repair's intent, twice, at least grace apart. A record that is missing, or
// a read that failed, deletes nothing.
func Judge(me entry.StorageUUID, here Local, l meta.Ledger, err error, seen Sighting, now time.Time, grace time.Duration) Verdict {
	switch {
	case errors.Is(err, meta.ErrNotFound):
		if here.Stored {
			return Quarantine
		}
		return Keep
	case err != nil:
		return Skip
	case l.State == meta.LedgerDeleting:
		if here.Stored {
			return Delete
		}
		if unconfirmed(l, me) {
			return Confirm
		}
		return Keep
	case l.State != meta.LedgerClosed || holds(l, me) || !here.Stored:
		return Keep
	case seen.At.IsZero() || seen.Entries != here.Entries || now.Sub(seen.At) < grace:
		return Watch
	}
	return Delete
}

// holds reports whether a fragment or an intent names me.
func holds(l meta.Ledger, me entry.StorageUUID) bool {
	for _, f := range l.Fragments {
		if names(f, me) {
			return true
		}
	}
	for _, intent := range l.Pending {
		if intent.Target == me {
			return true
		}
	}
	return false
}

// unconfirmed reports whether the deletion of l waits for me.
func unconfirmed(l meta.Ledger, me entry.StorageUUID) bool {
	for _, u := range l.DeletedOn {
		if u == me {
			return false
		}
	}
	return holds(l, me)
}

// maxDeletes caps a pass: a mistake in the metadata, or in here, takes a part and not all, and is seen in between.
func maxDeletes(ledgers int, fraction float64) int {
	const always = 16
	return max(always, int(float64(ledgers)*fraction))
}
