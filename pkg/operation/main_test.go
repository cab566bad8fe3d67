package operation_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/operation"
)

var noon = time.UnixMilli(1_800_000_000_000)

func storage(n byte) entry.StorageUUID { return entry.StorageUUID{0: n, 15: 0xee} }

func fragment(first entry.EntryID, bookies ...byte) meta.Fragment {
	f := meta.Fragment{First: first}
	for _, n := range bookies {
		f.Slots = append(f.Slots, meta.Slot{UUID: storage(n)})
	}
	return f
}

func closed(id entry.LedgerID, entries int64, length int64, qw int, fragments ...meta.Fragment) meta.Ledger {
	return meta.Ledger{
		ID: id, State: meta.LedgerClosed, Last: entry.EntryID(entries - 1), Length: length, Fragments: fragments,
		Replication: meta.Replication{Ensemble: len(fragments[0].Slots), WriteQuorum: qw, AckQuorum: 1},
	}
}

func TestBytesOn(t *testing.T) {
	t.Parallel()
	open := closed(1, 10, 1000, 3, fragment(0, 1, 2, 3))
	open.State = meta.LedgerOpen
	for name, c := range map[string]struct {
		l    meta.Ledger
		want int64
	}{
		"every entry":    {closed(1, 10, 1000, 3, fragment(0, 1, 2, 3)), 1000},
		"none":           {closed(1, 10, 1000, 3, fragment(0, 4, 2, 3)), 0},
		"empty":          {closed(1, 0, 0, 3, fragment(0, 1, 2, 3)), 0},
		"striped":        {closed(1, 10, 1000, 2, fragment(0, 1, 2, 3, 4)), 500},
		"a first part":   {closed(1, 10, 1000, 3, fragment(0, 1, 2, 3), fragment(4, 4, 2, 3)), 400},
		"a last part":    {closed(1, 10, 1000, 3, fragment(0, 4, 2, 3), fragment(4, 1, 2, 3)), 600},
		"an empty part":  {closed(1, 10, 1000, 3, fragment(0, 4, 2, 3), fragment(10, 1, 2, 3)), 0},
		"of one not yet": {open, 0},
	} {
		if got := operation.BytesOn(c.l, storage(1)); got != c.want {
			t.Errorf("%s: %d bytes, want %d", name, got, c.want)
		}
	}
	if !operation.OpenOn(open, storage(1)) || operation.OpenOn(open, storage(4)) || operation.OpenOn(closed(1, 10, 1000, 3, fragment(0, 1, 2, 3)), storage(1)) {
		t.Error("what is open there")
	}
}

// town is five bookies in three zones, on hosts of their own, with 1,000 bytes free each.
func town() operation.Cluster {
	c := operation.Cluster{WriteQuorum: 3}
	for n := byte(1); n <= 5; n++ {
		id := "k" + string('0'+n)
		c.Cookies = append(c.Cookies, meta.Cookie{ID: id, UUID: storage(n)})
		c.Bookies = append(c.Bookies, meta.BookieInfo{ID: id, UUID: storage(n), Zone: string('a' + n%3), Host: "h" + string('0'+n), FreeBytes: 1000})
	}
	return c
}

func TestPlan(t *testing.T) {
	t.Parallel()
	ledgers := []meta.Ledger{closed(1, 10, 900, 3, fragment(0, 1, 2, 3)), closed(2, 10, 100, 3, fragment(0, 1, 4, 5))}
	without := func(n byte) func(*operation.Cluster, *operation.Request, []meta.Ledger) {
		return func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			c.Bookies = slices.DeleteFunc(c.Bookies, func(k meta.BookieInfo) bool { return k.UUID == storage(n) })
		}
	}
	for name, c := range map[string]struct {
		kind   meta.OperationKind
		change func(*operation.Cluster, *operation.Request, []meta.Ledger)
		want   string // of the one check that does not hold; empty: all do
	}{
		"fine":                {meta.OperationDecommission, func(*operation.Cluster, *operation.Request, []meta.Ledger) {}, ""},
		"dead":                {meta.OperationRecover, without(1), ""},
		"recover a live one":  {meta.OperationRecover, func(*operation.Cluster, *operation.Request, []meta.Ledger) {}, "bookie k1 is down"},
		"empty a dead one":    {meta.OperationDecommission, without(1), "bookie k1 is up"},
		"another one is down": {meta.OperationDecommission, without(2), "all other bookies are up: down are k2"},
		"a retired one is not down": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			c.Cookies = append(c.Cookies, meta.Cookie{ID: "k9", UUID: storage(9), Retired: true})
		}, ""},
		"too few hosts": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			for i := 1; i < 5; i++ {
				c.Bookies[i].Host = "h" + string('0'+byte(i%2))
			}
		}, "copies on 3 hosts ≤ 2 left that can take them"},
		"too few that are writable": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			c.Bookies[1].State, c.Bookies[2].Draining = meta.BookieReadOnly, true
		}, "copies on 3 hosts ≤ 2 left that can take them"},
		"too few zones": {meta.OperationDecommission, func(_ *operation.Cluster, _ *operation.Request, l []meta.Ledger) {
			l[0].MinZones = 4
		}, "zones ≥ 4 per ledger, with 3 left"},
		"zones relaxed": {meta.OperationDecommission, func(_ *operation.Cluster, r *operation.Request, l []meta.Ledger) {
			l[0].MinZones, r.RelaxZones = 4, true
		}, ""},
		"disks too full": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			for i := range c.Bookies {
				c.Bookies[i].FreeBytes = 300
			}
		}, "disks: 1000 B to copy ≤ 75 % of the 1.17 KiB free on the others"},
		"copies are missing": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) { c.Damaged = 4 }, "under-replicated now: 4"},
		"it is under way": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			c.Marked = &meta.Mark{Kind: meta.MarkEmptying, Operation: "op-7"}
		}, "no other operation empties it: op-7 does"},
		"it is in maintenance": {meta.OperationDecommission, func(c *operation.Cluster, _ *operation.Request, _ []meta.Ledger) {
			c.Marked = &meta.Mark{Kind: meta.MarkMaintenance}
		}, ""},
		"the only copy": {meta.OperationRecover, func(c *operation.Cluster, r *operation.Request, l []meta.Ledger) {
			without(1)(c, r, l)
			l[1].WriteQuorum = 1
		}, "ledgers without a copy elsewhere: 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster, all := town(), slices.Clone(ledgers)
			request := operation.Request{Kind: c.kind, Bookie: cluster.Cookies[0]}
			c.change(&cluster, &request, all)
			p := operation.MakePlan(request, cluster, all)
			if p.Ledgers != 2 || slices.Contains(p.Targets, "k1") {
				t.Errorf("plan %+v", p)
			}
			var refused []string
			for _, check := range p.Refused() {
				refused = append(refused, check.Text)
				if check.Advice == "" {
					t.Errorf("no advice for %q", check.Text)
				}
			}
			if got := strings.Join(refused, "; "); got != c.want {
				t.Errorf("refused: %q, want %q", got, c.want)
			}
		})
	}
}
