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

// failSyncs has the kernel refuse a process's syncs from now on with EIO, or only the first one of each of its threads,
// until the process ends.
func (w *town) failSyncs(p *process.Process, once bool) {
	w.Helper()
	inject := "inject=fsync,fdatasync:error=EIO"
	if once {
		inject += ":when=1"
	}
	c := exec.CommandContext(w.ctx, "strace", "-f", "-q", "-o", filepath.Join(w.TempDir(), "strace"), "-e", "trace=fsync,fdatasync", "-e", inject, "-p", strconv.Itoa(p.PID()))
	if err := c.Start(); err != nil {
		w.Fatalf("strace: %v: this test needs it, and root; `go test -tags noroot` leaves it out", err)
	}
	w.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait() // it was killed, or has ended with the process
	})
}

// dies waits until a process has ended by itself, because its disk failed.
func (w *town) dies(p *process.Process) {
	w.Helper()
	select {
	case <-p.Exited():
	case <-w.ctx.Done():
		w.Fatalf("%s goes on: %s", p.Name, p.LogTail())
	}
	if code := p.ExitCode(); code != 1 || !strings.Contains(p.LogTail(), "the store has stopped") {
		w.Fatalf("%s ended with exit code %d: %s", p.Name, code, p.LogTail())
	}
}

// A sync fails, once and then for good, on one bookie and then on all: those end, and say why. What was acknowledged is
// there when they are started again on the same disks.
func TestFailedSync(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{Brokers: 1})
	run := w.load(nil)
	for _, c := range []struct {
		bookies []*process.Process
		once    bool
	}{{w.c.Bookies[:1], true}, {w.c.Bookies, false}} {
		w.more(run, 500)
		w.strike(run, func() error {
			for _, p := range c.bookies {
				w.failSyncs(p, c.once)
			}
			return nil
		})
		for _, p := range c.bookies {
			w.dies(p)
		}
		if len(c.bookies) == 1 {
			w.more(run, 200) // the others take it
		}
		for _, p := range c.bookies {
			w.check(p.Launch())
		}
		for _, p := range c.bookies {
			w.check(p.WaitReady(w.ctx))
		}
	}
	w.more(run, 500)
	w.finish(run)
}

// The file system of a bookie finds itself broken and lets nobody write any more: as good as a failed sync.
func TestReadOnlyFileSystem(t *testing.T) {
	t.Parallel()
	disk := newVolume(t, volume.Ext4, 160)
	w := settle(t, process.Config{
		Brokers: 1,
		BookieDir: func(i int) string {
			if i == 0 {
				return filepath.Join(disk.Dir(), "data")
			}
			return ""
		},
	})
	run := w.load(nil)
	w.more(run, 500)
	w.strike(run, disk.Fail)
	w.dies(w.c.Bookies[0])
	w.more(run, 300)
	// It does not come back by itself as long as the disk is what it is.
	w.check(w.c.Bookies[0].Launch())
	select {
	case <-w.c.Bookies[0].Exited():
	case <-w.ctx.Done():
		t.Fatal("it runs on a disk that takes no writes")
	}
	if code := w.c.Bookies[0].ExitCode(); code == 0 {
		t.Fatalf("exit code %d", code)
	}
	w.check(disk.Remount())
	w.check(w.c.Bookies[0].Start(w.ctx))
	w.more(run, 300)
	w.finish(run)
}
