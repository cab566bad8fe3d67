package repair_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// A bookie counts as lost once it has been away for the delay, by whoever audits: the next auditor goes on from what the former knew. It is
// not lost any more when it is back.
func TestCensusOfAbsentBookies(t *testing.T) {
	t.Parallel()
	at := func(s int) time.Time { return time.Unix(int64(1000+s), 0) }
	cookies := []meta.Cookie{{ID: "k1", UUID: uuid(1)}, {ID: "k2", UUID: uuid(2)}, {ID: "old", UUID: uuid(3), Retired: true}}
	here := map[entry.StorageUUID]bool{uuid(1): true, uuid(2): true}
	look := func(c *repair.Census, s int) []entry.StorageUUID {
		return c.Look(at(s), cookies, func(u entry.StorageUUID) bool { return here[u] })
	}
	view := func(c *repair.Census, s int) repair.View {
		return repair.NewView(at(s), cookies, c.Absent(), nowhere{}, 1)
	}
	c := repair.NewCensus(time.Minute, at(0), meta.RepairCensus{})
	if missed := look(c, 0); len(missed) > 0 {
		t.Fatalf("missed %v", missed)
	}
	here[uuid(2)] = false
	if missed := look(c, 5); !reflect.DeepEqual(missed, []entry.StorageUUID{uuid(2)}) {
		t.Fatalf("missed %v", missed)
	}
	c.Holds(uuid(2), 17)
	if got := c.Absent(); len(got) != 1 || got[0] != (meta.AbsentBookie{ID: "k2", UUID: uuid(2), Since: at(5), Lost: at(65), Ledgers: 17}) {
		t.Fatalf("absent are %+v", got)
	}
	if list, changed := c.Relieved(view(c, 64)); len(list) > 0 || changed {
		t.Fatalf("relieved before its time: %v, %t", list, changed)
	}
	before := meta.RepairCensus{At: at(64), Absent: c.Absent()}
	if c := repair.NewCensus(time.Minute, at(64+120), before); len(look(c, 64+120)) != 1 {
		t.Fatal("what the auditor before knew two minutes ago is believed")
	}
	c = repair.NewCensus(time.Minute, at(65), before)
	if missed := look(c, 65); len(missed) > 0 {
		t.Fatalf("the next auditor misses %v anew", missed)
	}
	if list, changed := c.Relieved(view(c, 65)); !reflect.DeepEqual(list, []entry.StorageUUID{uuid(2)}) || !changed {
		t.Fatalf("relieved are %v, %t", list, changed)
	}
	here[uuid(2)] = true
	look(c, 70)
	if list, changed := c.Relieved(view(c, 70)); len(list) > 0 || !changed || len(c.Absent()) > 0 {
		t.Fatalf("it is back: %v, %t, %v", list, changed, c.Absent())
	}
}

// nowhere is a topology without anything.
type nowhere struct{}

func (nowhere) Bookies() []meta.BookieInfo   { return nil }
func (nowhere) Brokers() []meta.BrokerInfo   { return nil }
func (nowhere) Marks() []meta.Mark           { return nil }
func (nowhere) Operations() []meta.Operation { return nil }

// As many ledgers are noted as there is room for; the others are counted, and follow. Those that are being deleted are left alone.
func TestCensusNotesWhatThereIsRoomFor(t *testing.T) {
	t.Parallel()
	c := repair.NewCensus(0, time.Unix(1000, 0), meta.RepairCensus{})
	now := time.Unix(1000, 0)
	c.Listed(now, uuid(1), meta.Holdings{Ledgers: []entry.LedgerID{1, 2, 3, 4, 5}, Deleting: []entry.LedgerID{4}})
	c.Listed(now, uuid(2), meta.Holdings{Ledgers: []entry.LedgerID{3, 6}})
	steps := []struct {
		recorded map[entry.LedgerID]bool
		room     int
		ids      []entry.LedgerID
		waiting  uint64
	}{
		{map[entry.LedgerID]bool{2: true}, 2, []entry.LedgerID{1, 3}, 2},
		{map[entry.LedgerID]bool{1: true, 3: true}, 0, []entry.LedgerID{}, 2},
		{map[entry.LedgerID]bool{1: true}, 9, []entry.LedgerID{5, 6}, 0},
		{map[entry.LedgerID]bool{}, 9, nil, 0},
	}
	for i, s := range steps {
		ids, waiting := c.ToNote(s.recorded, s.room)
		if len(ids) != len(s.ids) || len(ids) > 0 && !reflect.DeepEqual(ids, s.ids) || waiting != s.waiting {
			t.Fatalf("step %d: got %v and %d, want %v and %d", i, ids, waiting, s.ids, s.waiting)
		}
	}
}

// What a bookie says once more is not news; what it says otherwise is.
func TestCensusOfDamage(t *testing.T) {
	t.Parallel()
	c := repair.NewCensus(0, time.Unix(1000, 0), meta.RepairCensus{})
	a, b := bookieclient.Damage{Ledger: 1, Entries: "3-4"}, bookieclient.Damage{Ledger: 2, Limbo: true}
	for i, s := range []struct{ says, news []bookieclient.Damage }{
		{[]bookieclient.Damage{b, a}, []bookieclient.Damage{a, b}},
		{[]bookieclient.Damage{a, b}, nil},
		{[]bookieclient.Damage{b}, nil},
		{[]bookieclient.Damage{a, {Ledger: 2, Limbo: true, Entries: "9-9"}}, []bookieclient.Damage{a, {Ledger: 2, Limbo: true, Entries: "9-9"}}},
	} {
		if got := c.Damaged(uuid(1), s.says); !reflect.DeepEqual(got, s.news) {
			t.Fatalf("step %d: got %v, want %v", i, got, s.news)
		}
	}
	if got := c.Damaged(uuid(2), []bookieclient.Damage{a}); len(got) != 1 {
		t.Fatalf("another bookie's word: %v", got)
	}
}
