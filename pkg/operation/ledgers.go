package operation

import (
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// BytesOn estimates the bytes of a closed ledger's entries that are on a disk, as if all entries had the same size. Of an
// open ledger metadata knows no size: 0.
func BytesOn(l meta.Ledger, u entry.StorageUUID) int64 {
	if l.State != meta.LedgerClosed || l.Last < 0 {
		return 0
	}
	var entries int64
	for i, f := range l.Fragments {
		end := l.Last + 1
		if i+1 < len(l.Fragments) {
			end = min(end, l.Fragments[i+1].First)
		}
		if names(f, u) && end > f.First {
			entries += int64(end - f.First)
		}
	}
	share := float64(entries) / float64(l.Last+1) * float64(l.WriteQuorum) / float64(l.Ensemble)
	return int64(share * float64(l.Length))
}

// OpenOn reports whether a ledger is not closed and names the disk where it is written now.
func OpenOn(l meta.Ledger, u entry.StorageUUID) bool {
	return (l.State == meta.LedgerOpen || l.State == meta.LedgerInRecovery) && names(l.Fragments[len(l.Fragments)-1], u)
}

func names(f meta.Fragment, u entry.StorageUUID) bool {
	return slices.ContainsFunc(f.Slots, func(s meta.Slot) bool { return s.UUID == u })
}
