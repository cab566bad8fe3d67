//go:build linux && !noroot

package integration

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// The ioctl that stops an ext4 in its tracks, and the flag with which not even its journal is written out.
const (
	ext4Shutdown      = 0x8004587d
	shutdownDropsLogs = 2
)

// disk is a file system of its own, in a file, whose power can be cut: what was not synced is gone then.
type disk struct {
	*testing.T
	image, dir string
}

func newDisk(t *testing.T, megabytes int64) *disk {
	t.Helper()
	d := &disk{T: t, image: filepath.Join(t.TempDir(), "image"), dir: t.TempDir()}
	f, err := os.Create(d.image)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(megabytes << 20); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	d.run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.image)
	d.mount()
	t.Cleanup(d.unmount)
	return d
}

func (d *disk) run(program string, args ...string) {
	d.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		d.Fatalf("%s: %v: %s: this test needs root; `go test -tags noroot` leaves it out", program, err, out)
	}
}

func (d *disk) mount() { d.run("mount", "-o", "loop", d.image, d.dir) }

// unmount ends the file system, and makes sure that nobody else keeps it: two on one image would destroy it.
func (d *disk) unmount() {
	d.Helper()
	d.run("umount", d.dir)
	for patience := time.Now().Add(5 * time.Second); ; {
		switch out, err := exec.Command("losetup", "--associated", d.image).CombinedOutput(); {
		case err != nil:
			d.Fatalf("losetup: %v: %s", err, out)
		case len(out) == 0:
			return
		case time.Now().After(patience):
			d.Fatalf("another mount namespace keeps a volume: %s", out)
		}
	}
}

// cut cuts the power: from now on nothing reaches the disk.
func (d *disk) cut() error {
	f, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := uint32(shutdownDropsLogs)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ext4Shutdown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return fmt.Errorf("shut ext4 down: %w", errno)
	}
	return nil
}

// freeze stops a process, and waits until none of its threads runs; those that are in a call stop when they leave it.
func freeze(ctx context.Context, p *process.Process) error {
	if err := p.Pause(); err != nil {
		return err
	}
	for ctx.Err() == nil {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.PID()))
		if err != nil {
			return err
		}
		running := false
		for _, path := range tasks {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			running = running || strings.HasPrefix(string(text[bytes.LastIndexByte(text, ')')+1:]), " R")
		}
		if !running {
			return nil
		}
	}
	return ctx.Err()
}

// All bookies lose power at once, in the middle of writing, together with their broker: what was acknowledged is there
// when they are back, on as many disks as was promised, and everything goes on unattended.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	var disks []*disk
	for range 3 {
		disks = append(disks, newDisk(t, 160))
	}
	w := settle(t, process.Config{
		BookieDir: func(i int) string { return filepath.Join(disks[i].dir, "data") },
		Brokers:   1,
	})
	run := w.load(nil)
	for range 2 {
		w.more(run, 1000)
		w.strike(run, func() error {
			// Nobody answers once the power is gone, whatever a call that was under way then returns.
			for _, p := range w.c.Bookies {
				if err := freeze(w.ctx, p); err != nil {
					return err
				}
			}
			for _, d := range disks {
				if err := d.cut(); err != nil {
					return err
				}
			}
			return nil
		})
		for _, p := range slices.Concat(w.c.Bookies, w.c.Brokers) {
			w.check(p.Kill())
		}
		for _, d := range disks {
			d.unmount()
			d.mount()
		}
		w.check(w.c.StartAll(w.ctx))
	}
	w.more(run, 500)
	w.finish(run)
}
