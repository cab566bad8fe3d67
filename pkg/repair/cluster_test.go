package repair_test

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// A bookie is lost: whatever it had has as many copies as before in the end, with the same bytes, empty ledgers and striped ones and
// older fragments included.
func TestLostBookie(t *testing.T) {
	t.Parallel()
	w := newTown(t, 5)
	for i := range entry.EntryID(20) {
		w.write(10 * i) // the first one is empty
	}
	w.writeAs(plan{
		replication: meta.Replication{Ensemble: 4, WriteQuorum: 2, AckQuorum: 2}, entries: 101,
		fragments: []meta.Fragment{w.fragment(0, 0, 1, 2, 3)},
	})
	w.writeAs(plan{
		replication: three, entries: 40,
		fragments: []meta.Fragment{w.fragment(0, 0, 1, 2), w.fragment(17, 1, 2, 3), w.fragment(40, 0, 2, 3)},
	})
	w.stop(0)
	w.run(brisk("a"), nil)
	w.run(brisk("b"), nil)
	w.mended()
	w.audit()
	if h, err := w.meta.LedgersOn(w.ctx, w.uuids[0]); err != nil || len(h) > 0 {
		t.Fatalf("the lost bookie is still named by %v, %v", h, err)
	}
}
