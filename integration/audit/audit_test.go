package audit

import (
	"slices"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// The audit finds what it is there for.
func TestAuditFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	ids := []entry.StorageUUID{{1}, {2}, {3}}
	here := map[entry.StorageUUID]string{ids[0]: "a", ids[1]: "b", ids[2]: "c"}
	for name, c := range map[string]struct {
		copies map[entry.StorageUUID]uint32
		gone   []entry.StorageUUID
		zones  [3]string
		min    int
		bad    bool
	}{
		"three copies":               {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[1]: 1, ids[2]: 1}},
		"two copies":                 {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[2]: 1}},
		"one copy":                   {copies: map[entry.StorageUUID]uint32{ids[0]: 1}, bad: true},
		"one copy, one bookie gone":  {copies: map[entry.StorageUUID]uint32{ids[0]: 1}, gone: ids[1:2]},
		"copies that differ":         {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[1]: 2, ids[2]: 1}, bad: true},
		"two copies in one zone":     {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[1]: 1}, zones: [3]string{"x", "x", "y"}, min: 2, bad: true},
		"two copies in two of zones": {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[2]: 1}, zones: [3]string{"x", "x", "y"}, min: 2},
	} {
		a := ledgerAudit{
			ledger: meta.Ledger{State: meta.LedgerClosed, Replication: meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2, MinZones: c.min}},
			copies: map[entry.EntryID]map[entry.StorageUUID]uint32{0: c.copies},
		}
		f := meta.Fragment{}
		for i, u := range ids {
			f.Slots = append(f.Slots, meta.Slot{UUID: u, Zone: c.zones[i]})
		}
		a.ledger.Fragments = []meta.Fragment{f}
		address := make(map[entry.StorageUUID]string)
		for u, a := range here {
			if !slices.Contains(c.gone, u) {
				address[u] = a
			}
		}
		if n, _, err := a.judge(address); n != 1 || (err != nil) != c.bad {
			t.Errorf("%s: %d entries, %v", name, n, err)
		}
	}
}
