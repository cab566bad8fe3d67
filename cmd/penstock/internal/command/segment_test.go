package command

import (
	"path/filepath"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// sealedSegment writes a small segment.
func sealedSegment(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "segment")
	w, err := segment.Create(vfs.OS(), path, segment.Header{SegmentUUID: entry.UUID{1}, Sequence: 7, Cluster: entry.UUID{2}, Storage: entry.UUID{3}}, 1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	body := []byte("penstock")
	_, err = w.AppendBatch([]segment.Record{
		{Kind: segment.KindEntry, Ledger: 5, Entry: 9, LAC: 8, Nonce: 1, Checksum: entry.Checksum(5, 9, body), Body: body},
		{Kind: segment.KindFence, Ledger: 6, Entry: entry.NoEntry, LAC: entry.NoEntry, Term: 2},
	}, 0)
	if err == nil {
		err = w.Seal()
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}
