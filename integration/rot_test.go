package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// rot damages what a bookie, which must not run, stored last: a few bytes in the middle of what is written.
func (w *town) rot(dir string) {
	w.Helper()
	var newest string
	var at time.Time
	w.check(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".seg") {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Size() > 0 && info.ModTime().After(at) {
			newest, at = path, info.ModTime()
		}
		return err
	}))
	data, err := os.ReadFile(newest)
	w.check(err)
	end := len(data)
	for end > 0 && data[end-1] == 0 {
		end--
	}
	for i := range 64 {
		data[end/2+i] ^= 0xff
	}
	f, err := os.OpenFile(newest, os.O_WRONLY, 0)
	w.check(err)
	_, err = f.WriteAt(data[end/2:end/2+64], int64(end/2))
	w.check(err)
	w.check(f.Close())
}

// A sector rots under the newest entries of one bookie, which are on one other disk besides. That bookie knows that it
// does not know. The owner dies, and for as long as the other copy cannot be heard, the next owner must not believe that
// those entries never were.
func TestRottenDisk(t *testing.T) {
	t.Parallel()
	w, dirs := village(t, process.Config{Bookies: 3}, 3)
	rotten, good, late := w.c.Bookies[0], w.c.Bookies[1], w.c.Bookies[2]
	run := w.load(nil)
	w.more(run, 1000)
	w.check(late.Kill()) // it misses what comes now
	w.more(run, 500)
	owner := w.owner()
	w.strike(run, owner.Kill)
	w.check(rotten.Kill())
	w.rot(dirs[0])
	w.damaged = rotten
	w.check(good.Pause())
	w.check(rotten.Start(w.ctx))
	if !strings.Contains(rotten.LogTail(), "damaged=true") {
		t.Errorf("the bookie has not noticed: %s", rotten.LogTail())
	}
	w.check(late.Start(w.ctx))
	w.stalls(run, 4*time.Second)
	w.check(good.Resume())
	w.more(run, 500)
	w.check(owner.Start(w.ctx))
	w.finish(run)
}
