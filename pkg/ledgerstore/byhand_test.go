package ledgerstore

import (
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Nothing is answered before its tasks are done, and what was answered is there after a power cut.
func TestByHand(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	h, err := OpenByHand(crashConfig(), fs)
	must(t, err)
	answered := 0
	add := func(e entry.EntryID) {
		b := body(1, e, 100)
		h.Add(&Add{
			Add:        bookiewire.Add{Ledger: 1, Entry: e, LAC: e - 1, Checksum: entry.Checksum(1, e, b), Body: b},
			Generation: 1 << 20, Done: func(err error) {
				must(t, err)
				answered++
			},
		})
	}
	kinds := func() string {
		var s strings.Builder
		for _, task := range h.Tasks() {
			s.WriteString(task.Kind.String() + " ")
			if task.Kind == TaskWrite || answered == 0 && task.Kind == TaskSync {
				h.Do(task)
			}
		}
		return s.String()
	}
	_, generation := h.Admission(1)
	if generation != 1<<20 {
		t.Fatalf("generation %d", generation)
	}
	add(0)
	if s := kinds(); s != "write " || answered != 0 {
		t.Fatalf("tasks %s, answered %d", s, answered)
	}
	if s := kinds(); s != "sync prepare " || answered != 1 {
		t.Fatalf("tasks %s, answered %d", s, answered)
	}
	add(1)
	if s := kinds(); s != "write " || answered != 1 {
		t.Fatalf("tasks %s, answered %d", s, answered)
	}
	h.Abandon()
	fs.Crash(nil) // what was not synced is gone
	h, err = OpenByHand(crashConfig(), fs)
	must(t, err)
	if in, ok := h.Ledger(1); !ok || in.Entries != 1 {
		t.Fatalf("after the power cut: %+v", in)
	}
	h.AtOnce(func() { must(t, h.DeleteLedger(t.Context(), 1, h.Mark(1))) })
	if !h.Tombstoned(1) || h.Failed() != nil {
		t.Fatal("a deletion that was waited for is not done")
	}
	h.Abandon()
}
