//go:build linux && !noroot

package integration

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

var (
	powerCuts        = flag.Int("powercuts", 3, "power cuts of bookies: of one, of a quorum, of all, in turn")
	powerCutsResults = flag.String("powercuts.results", "", "file that takes the table of power cuts")
)

// newVolume makes a volume for the length of a test.
func newVolume(t *testing.T, kind volume.Kind, megabytes int64) *volume.Volume {
	t.Helper()
	v, err := volume.New(kind, t.TempDir(), megabytes<<20)
	if err != nil {
		t.Fatalf("%v: this test needs root, and mkfs of the file system; `go test -tags noroot` leaves it out", err)
	}
	t.Cleanup(func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	})
	return v
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

// cutsATown is how many power cuts one cluster goes through.
const cutsATown = 3

// One bookie, a quorum of them, or all at once together with their broker lose power in the middle of writing: what was
// acknowledged is there when they are back, on as many disks as was promised, and everything goes on unattended.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	reports := make([]*blackouts, (*powerCuts+cutsATown-1)/cutsATown)
	t.Run("towns", func(t *testing.T) {
		for i := range reports {
			reports[i] = &blackouts{first: i, how: []volume.How{volume.DropLog, volume.KeepLog}[i%2]}
			t.Run(strconv.Itoa(i), func(t *testing.T) {
				if i < 2 { // more at once would only wait for each other
					t.Parallel()
				}
				reports[i].run(t, min(cutsATown, *powerCuts-i*cutsATown))
			})
		}
	})
	if *powerCutsResults == "" || t.Failed() {
		return
	}
	if err := os.WriteFile(*powerCutsResults, []byte(blackoutTable(reports, figures.BuiltFrom(programs(t)))), 0o644); err != nil {
		t.Fatal(err)
	}
}

// blackouts are power cuts of one cluster, whose disks have file systems of both kinds.
type blackouts struct {
	first  int
	how    volume.How
	cuts   [3]int // of one, a quorum, all
	report workload.Report
}

var blackoutScopes = [...]string{"one bookie of three", "two bookies of three", "all bookies, and the broker"}

func (b *blackouts) run(t *testing.T, cuts int) {
	t.Helper()
	var disks []*volume.Volume
	for i := range 3 {
		disks = append(disks, newVolume(t, volume.Kinds()[(b.first+i)%2], 400))
	}
	w := settle(t, process.Config{
		BookieDir: func(i int) string { return filepath.Join(disks[i].Dir(), "data") },
		Brokers:   1,
	})
	run := w.load(nil)
	for i := range cuts {
		w.more(run, 1000)
		scope := i % len(blackoutScopes)
		hit := []int{0, 1, 2}
		for len(hit) > scope+1 {
			at := rand.IntN(len(hit))
			hit = slices.Delete(hit, at, at+1)
		}
		b.cuts[scope]++
		w.blackout(run, disks, hit, b.how)
	}
	w.more(run, 500)
	b.report = w.finish(run)
}

// blackout cuts the power of some bookies, and starts them again.
func (w *town) blackout(run *workload.Run, disks []*volume.Volume, hit []int, how volume.How) {
	w.Helper()
	w.strike(run, func() error {
		// Nobody answers once the power is gone, whatever a call that was under way then returns.
		for _, i := range hit {
			if err := freeze(w.ctx, w.c.Bookies[i]); err != nil {
				return err
			}
		}
		for _, i := range hit {
			if err := disks[i].Cut(how); err != nil {
				return err
			}
		}
		return nil
	})
	dead := make([]*process.Process, 0, 4)
	for _, i := range hit {
		dead = append(dead, w.c.Bookies[i])
	}
	if len(hit) == len(disks) {
		dead = append(dead, w.c.Brokers...)
	}
	for _, p := range dead {
		w.check(p.Kill())
	}
	for _, i := range hit {
		w.check(disks[i].Remount())
	}
	for _, p := range dead {
		w.check(p.Launch())
	}
	for _, p := range dead {
		w.check(p.WaitReady(w.ctx))
	}
}

func blackoutTable(reports []*blackouts, commit string) string {
	var b strings.Builder
	b.WriteString(`# Power cuts of bookies

Written by ` + "`make test-powercut`" + `. Clusters of etcd, three bookies and a broker, whose bookies' disks are ext4 and XFS by turns, lose
power in the middle of publishing (3 copies, acknowledged at 2, dedup on): the file system's shutdown ioctl stops the disk of a
bookie that is stopped just before, with the log dropped or kept. Then it is mounted and started again. In the end every message
is compared with what was sent, and every copy of every entry is read from its bookie.

| | log dropped | log kept |
|---|---|---|
`)
	var total workload.Report
	cuts := map[volume.How]*[3]int{volume.DropLog: {}, volume.KeepLog: {}}
	for _, r := range reports {
		for i, n := range r.cuts {
			cuts[r.how][i] += n
		}
		total.Sent += r.report.Sent
		total.Acknowledged += r.report.Acknowledged
	}
	for i, scope := range blackoutScopes {
		fmt.Fprintf(&b, "| %s | %d | %d |\n", scope, cuts[volume.DropLog][i], cuts[volume.KeepLog][i])
	}
	fmt.Fprintf(&b, "\nSent: %d messages; acknowledged: %d; lost, doubled, out of order or never sent: 0; entries with too few copies: 0. Brokers and bookies of `%s`.\n",
		total.Sent, total.Acknowledged, commit)
	return b.String()
}
