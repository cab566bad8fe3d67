package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Two disks of three lose their log, or a part of it, and keep their names, while the third bookie and the owner are
// down: those bookies refuse to start, or do not know, and nobody takes that for "there was nothing". Nothing is
// acknowledged, closed or deleted meanwhile; when one log is back, everything acknowledged is there.
func TestLostLogs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		manifest bool // is lost
		segments bool // are lost
		empty    bool // they are there, without a byte
	}{
		{name: "all", manifest: true, segments: true},
		{name: "manifest", manifest: true},
		{name: "segments", segments: true},
		{name: "emptied", manifest: true, segments: true, empty: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, dirs := village(t, process.Config{Bookies: 3}, 3)
			run := w.load(nil)
			w.more(run, 1500)
			w.strike(run, w.killAll)
			kept := make([]string, 2)
			for i := range kept {
				kept[i] = filepath.Join(t.TempDir(), "kept")
				w.check(os.CopyFS(kept[i], os.DirFS(dirs[i])))
				w.lose(filepath.Join(dirs[i], "ledgers"), func(name string) bool {
					return c.manifest && name == "MANIFEST" || c.segments && strings.HasSuffix(name, ".seg") && !strings.HasPrefix(name, "spare-")
				}, c.empty)
			}
			for _, p := range w.c.Etcds {
				w.check(p.Start(w.ctx))
			}
			refuse := c.manifest && c.segments && !c.empty
			for _, p := range w.c.Bookies[:2] {
				w.check(p.Launch())
				if !refuse {
					w.check(p.WaitReady(w.ctx))
					continue
				}
				select {
				case <-p.Exited():
				case <-w.ctx.Done():
					t.Fatal("it runs")
				}
				if text := p.LogTail(); p.ExitCode() != 5 || !strings.Contains(text, "none of its data") || !strings.Contains(text, "--bookie-id") {
					t.Fatalf("exit code %d: %s", p.ExitCode(), text)
				}
			}
			for _, p := range w.c.Brokers {
				w.check(p.Start(w.ctx))
			}
			w.stalls(run, 4*time.Second)
			_, acknowledged, _ := run.Counts()
			// The bookies come back with what they had.
			for i, p := range w.c.Bookies[:2] {
				if !refuse {
					w.check(p.Kill())
				}
				ledgers := filepath.Join(dirs[i], "ledgers")
				w.check(os.RemoveAll(ledgers))
				w.check(os.CopyFS(ledgers, os.DirFS(filepath.Join(kept[i], "ledgers"))))
				w.check(p.Start(w.ctx))
			}
			w.check(w.c.Bookies[2].Start(w.ctx))
			w.readAll(topic, acknowledged)
			w.more(run, 200)
			w.finish(run)
		})
	}
}

// lose removes files of a directory, or all that is in them.
func (w *town) lose(dir string, which func(name string) bool, empty bool) {
	w.Helper()
	names, err := os.ReadDir(dir)
	w.check(err)
	n := 0
	for _, f := range names {
		if !which(f.Name()) {
			continue
		}
		n++
		if at := filepath.Join(dir, f.Name()); empty {
			w.check(os.Truncate(at, 0))
		} else {
			w.check(os.Remove(at))
		}
	}
	if n == 0 {
		w.Fatalf("%s has none of the files to lose", dir)
	}
}
