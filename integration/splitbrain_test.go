//go:build linux && !noroot

package integration

import (
	"path/filepath"
	"testing"

	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Case 31: one member loses what it had not synced, by a power failure, and the others stand still in turns meanwhile, while
// owners change: two histories come to be where the member that forgot makes a majority. Here what a bookie has answered
// is on its disk, so every entry has one value on all of them (the audit at the end compares all copies), and what was
// acknowledged is there.
func TestCase31PowerFailureAndPauses(t *testing.T) {
	t.Parallel()
	disk := newVolume(t, volume.Ext4, 400)
	w := settle(t, process.Config{BookieDir: func(i int) string {
		if i == 0 {
			return filepath.Join(disk.Dir(), "data")
		}
		return ""
	}})
	run := w.load(nil)
	for round := range 4 {
		w.more(run, 300)
		still := w.c.Bookies[1+round%2]
		w.check(still.Pause())
		w.more(run, 100) // by the other two
		w.blackout(run, []*volume.Volume{disk, nil, nil}, []int{0}, volume.DropLog)
		owner := w.owner()
		w.check(owner.Kill())
		w.more(run, 100) // the next owner decides with a bookie that stands still and one that lost its power
		w.check(still.Resume())
		w.check(owner.Start(w.ctx))
	}
	w.more(run, 300)
	w.finish(run)
}
