package ledgerstore

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Footers are found through the cache, past it if they are too large for it, and it stays within its budget.
func TestFooterCache(t *testing.T) {
	t.Parallel()
	for _, limit := range []int64{1, 2 << 10, 1 << 20} {
		cfg := small()
		cfg.CacheBytes, cfg.IndexBytes = 1, limit
		s := openStore(t, cfg, vfs.NewMem())
		for l := entry.LedgerID(1); l <= 10; l++ {
			fill(t, s, l, 0, 60, 100)
		}
		s = reopen(t, s)
		for range 2 {
			for e := range entry.EntryID(60) {
				for l := entry.LedgerID(1); l <= 10; l++ {
					wantEntry(t, s, l, e, body(l, e, 100))
				}
			}
		}
		if s.footers.used > limit || limit > 1<<19 && len(s.footers.parts) < 10 {
			t.Errorf("limit %d: %d bytes in %d parts", limit, s.footers.used, len(s.footers.parts))
		}
		for _, seg := range s.segments.list() {
			s.footers.drop(seg)
		}
		if s.footers.used != 0 || len(s.footers.parts) != 0 || s.footers.order.Len() != 0 {
			t.Errorf("%d bytes in %d parts are left", s.footers.used, len(s.footers.parts))
		}
	}
}
