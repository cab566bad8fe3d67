//go:build linux && !noroot

package integration

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// smallDisk mounts a volume of its own for one bookie. That needs root; without it, `go test -tags noroot` builds these
// tests without the one that mounts.
func smallDisk(t *testing.T, megabytes string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+megabytes+"m"); err != nil {
		t.Fatalf("mount a small volume: %v: this test needs root; `go test -tags noroot` leaves it out", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// fill takes all space of a volume but a few pages; the file is to be removed again.
func fill(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for chunk := make([]byte, 1<<20); len(chunk) >= 4096; {
		if _, err := f.Write(chunk); err != nil {
			chunk = chunk[:len(chunk)/2]
		}
	}
	if err := f.Close(); err != nil {
		t.Logf("close filler: %v", err)
	}
	return path
}

func (w *town) states() map[string]string {
	w.Helper()
	all, err := w.client.Admin().ListBookies(w.ctx, &brokerv1.ListBookiesRequest{})
	w.check(err)
	states := make(map[string]string)
	for _, b := range all.GetBookies() {
		states[b.GetId()] = b.GetState()
	}
	return states
}

// One disk is full: publishing goes on without it. All are: nothing is acknowledged, everything stored can be read, and
// processes live. Space is back: so is everything, by itself.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	var dirs []string
	for range 3 {
		dirs = append(dirs, smallDisk(t, "128"))
	}
	w := settle(t, process.Config{
		BookieDir:  func(i int) string { return filepath.Join(dirs[i], "data") },
		BookieArgs: []string{"--segment-mib", "2", "--low-watermark", "0.9", "--high-watermark", "0.95"},
	})
	run := w.load(nil)
	hasty := w.load(func(c *workload.Config) { c.Topic, c.Timeout, c.Rate = "hasty", time.Second, 100 })
	w.more(run, 1000)

	filler := []string{fill(t, dirs[0])}
	w.until("the first bookie is full", func() bool { return w.states()["bookie-1"] == "FULL" })
	w.more(run, 1000)

	filler = append(filler, fill(t, dirs[1]), fill(t, dirs[2]))
	w.until("all bookies are full", func() bool {
		s := w.states()
		return s["bookie-1"] == "FULL" && s["bookie-2"] == "FULL" && s["bookie-3"] == "FULL"
	})
	w.until("a message fails", func() bool { return len(hasty.Failures()) > 0 })
	w.stalls(run, time.Second)
	_, before, _ := run.Counts()
	for range 4 { // they start on a full disk, too, more often than there are files in their reserve
		for _, p := range w.c.Bookies {
			w.check(p.Kill())
			w.check(p.Start(w.ctx))
		}
	}
	w.until("all bookies know that they are full", func() bool {
		s := w.states()
		return s["bookie-1"] == "FULL" && s["bookie-2"] == "FULL" && s["bookie-3"] == "FULL"
	})
	w.readAll(topic, before)

	for _, path := range filler {
		w.check(os.Remove(path))
	}
	w.until("all bookies are writable", func() bool {
		s := w.states()
		return s["bookie-1"] == "WRITABLE" && s["bookie-2"] == "WRITABLE" && s["bookie-3"] == "WRITABLE"
	})
	w.more(run, 1000)
	w.more(hasty, 100)
	for _, p := range w.c.All() {
		if !p.Running() {
			t.Errorf("%s died", p.Name)
		}
	}
	w.finish(run)
	w.end(hasty)
}
