package repair

import (
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// What is nearest to being lost comes first, what has failed behind what has not, and what somebody is at, or is to wait, not at all.
func TestDueIsInOrderOfUrgency(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	w := &worker{Runner: &Runner{sched: &clock{Scheduler: sched.Real, now: now}, busy: map[entry.LedgerID]bool{7: true}}}
	page := meta.RepairList{Claims: map[entry.LedgerID]string{8: "b2"}, Repairs: []meta.Repair{
		{Ledger: 1, Causes: meta.CauseDecommission},
		{Ledger: 2, Causes: meta.CauseLost, Counts: meta.RepairCounts{BelowWriteQuorum: 5}, Failures: 3},
		{Ledger: 3, Causes: meta.CauseLost, Counts: meta.RepairCounts{BelowWriteQuorum: 5, BelowAckQuorum: 5}},
		{Ledger: 4, Causes: meta.CauseLost, Counts: meta.RepairCounts{BelowWriteQuorum: 5}},
		{Ledger: 5, Causes: meta.CauseLost, Counts: meta.RepairCounts{Unavailable: 1}, Failures: 9},
		{Ledger: 6, Causes: meta.CauseLost, Retry: now.Add(time.Second)},
		{Ledger: 7, Causes: meta.CauseLost},
		{Ledger: 8, Causes: meta.CauseLost},
		{Ledger: 9, Causes: meta.CauseMisplaced, Retry: now, Failures: 1},
	}}
	for range 20 { // wherever it begins
		var got []entry.LedgerID
		for _, r := range w.due(page) {
			got = append(got, r.Ledger)
		}
		if want := []entry.LedgerID{5, 3, 4, 2, 1, 9}; !slices.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}
