//go:build linux && !noroot

package integration

import (
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// A bookie that syncs by an interval loses the file system under it, cannot note that there, and comes back once it is
// mounted again, under the same kernel: what it acknowledged last is gone, and it does not deny it. A kill before
// loses nothing, and puts nothing in limbo. The operator's command ends what is.
func TestUnsyncedEntriesMeanLimboAfterARemount(t *testing.T) {
	t.Parallel()
	for kind, megabytes := range map[volume.Kind]int64{volume.Ext4: 160, volume.XFS: 400} {
		t.Run(string(kind), func(t *testing.T) {
			disk := newVolume(t, kind, megabytes)
			w := settle(t, process.Config{
				Brokers: 1,
				BookieDir: func(i int) string {
					if i == 0 {
						return filepath.Join(disk.Dir(), "data")
					}
					return ""
				},
				BookieFlags: func(i int) []string {
					if i == 0 {
						return []string{"--sync-interval", "1h"}
					}
					return nil
				},
			})
			b := w.c.Bookies[0]
			limbo := func() bool { return strings.Contains(b.LogTail(), "in limbo until") }
			run := w.load(nil)
			w.more(run, 300)
			w.check(b.Kill())
			w.check(b.Start(w.ctx))
			if limbo() {
				t.Fatalf("a kill puts ledgers in limbo: %s", b.LogTail())
			}
			w.more(run, 300)
			w.strike(run, func() error { return disk.Cut(volume.DropLog) })
			w.dies(b)
			if !strings.Contains(b.LogTail(), "cannot note on the disk") {
				t.Fatalf("it has noted the failure on a disk that is gone: %s", b.LogTail())
			}
			w.check(disk.Remount())
			w.check(b.Start(w.ctx))
			if !limbo() {
				t.Fatalf("it denies what it has lost: %s", b.LogTail())
			}
			// The broker lives and the other two have all of it, so that an operator may give it up here.
			penstock := filepath.Join(programs(t), "penstock")
			endLimbo := func() []string {
				out, err := exec.CommandContext(w.ctx, penstock, "bookie", "end-limbo", b.Control, "--all").Output()
				w.check(err)
				return strings.Fields(string(out))
			}
			ended := endLimbo()
			for _, id := range ended {
				_, err := strconv.ParseUint(id, 10, 63)
				w.check(err)
			}
			if len(ended) == 0 || !strings.Contains(b.LogTail(), "limbo was ended by hand") {
				t.Fatalf("limbo of %q was ended: %s", ended, b.LogTail())
			}
			if again := endLimbo(); len(again) > 0 {
				t.Errorf("limbo of %q was ended twice", again)
			}
			w.more(run, 300)
			run.StopProducing()
			report, err := run.Wait(w.ctx)
			w.judge(report, err)
			report, err = run.Reread(w.ctx) // and not every copy is looked for: this bookie cannot tell which it has
			w.judge(report, err)
		})
	}
}
