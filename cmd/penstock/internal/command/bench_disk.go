package command

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/bench/rawdisk"
)

type benchDiskFlags struct {
	dir      string
	files    int
	size     int
	duration time.Duration
}

// diskFileBytes is the size of each file that is written to.
const diskFileBytes = 256 << 20

func (a *app) benchDiskCommand() *cobra.Command {
	var f benchDiskFlags
	cmd := &cobra.Command{
		Use: "disk", Short: "Measure what the disk can do at best: writes that are synced, without a broker", Args: noArgs,
		Long: "Write to files as bookies write their logs, each group synced with fdatasync before the next: first all files at once " +
			"with large groups, the limit of throughput; then one file with 4 KiB at a time, the limit of latency. The files are " +
			"written once before anything is measured, and removed at the end. What a sync takes varies with who else uses the disk: measure more than once.",
		Example: "  penstock bench disk --dir /var/lib/penstock\n  penstock bench disk --files 1 --size 65536 -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			switch {
			case f.files < 1 || f.files > 64:
				return settings.Usagef("--files is %d: want 1 to 64", f.files)
			case f.size < rawdisk.ProbeBytes || f.size > diskFileBytes:
				return settings.Usagef("--size is %d: want %d to %d bytes", f.size, rawdisk.ProbeBytes, diskFileBytes)
			case f.duration <= 0:
				return settings.Usagef("--duration is %v: want more than 0", f.duration)
			}
			return a.benchDisk(cmd.Context(), f, format)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.dir, "dir", ".", "a directory on the disk")
	flags.IntVar(&f.files, "files", 3, "files that are written at once, as by bookies that share a disk")
	flags.IntVar(&f.size, "size", 1<<20, "bytes of a group")
	flags.DurationVar(&f.duration, "duration", 5*time.Second, "how long each of the two is measured")
	addOutputFlag(cmd)
	return cmd
}

type benchDiskItem struct {
	Files           int            `json:"files"`
	GroupBytes      int            `json:"groupBytes"`
	Seconds         float64        `json:"seconds"`
	BytesPerSecond  float64        `json:"bytesPerSecond"`
	GroupsPerSecond float64        `json:"groupsPerSecond"`
	Latency         *bench.Latency `json:"latency"`
}

func (a *app) benchDisk(ctx context.Context, f benchDiskFlags, format string) (failed error) {
	a.warnOfMemory(f.dir)
	a.progress("write %s of %s", counted(f.files, "file"), bytesText(diskFileBytes))
	d, err := rawdisk.Open(ctx, rawdisk.Config{Dir: f.dir, Files: f.files, FileBytes: diskFileBytes})
	if err != nil {
		return err //nolint:wrapcheck // it says what it tried
	}
	defer func() {
		if err := d.Close(); err != nil && failed == nil {
			failed = err
		}
	}()
	var all []rawdisk.Measured
	for _, m := range []struct{ files, size int }{{f.files, f.size}, {1, rawdisk.ProbeBytes}} {
		a.progress("%s written with groups of %s for %v", counted(m.files, "file"), bytesText(uint64(m.size)), f.duration)
		got, err := d.Write(ctx, m.files, m.size, f.duration)
		if err != nil {
			return err //nolint:wrapcheck // it says what it tried
		}
		all = append(all, got)
	}
	return diskView(all).print(a.out, format)
}

func counted(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return strconv.Itoa(n) + " " + thing + "s"
}

func diskView(all []rawdisk.Measured) view {
	out := view{kind: "DiskBenchList", columns: []string{"FILES", "GROUP", "MB/S", "SYNCS/S", "P50 ms", "P99 ms", "P99.9 ms", "MAX ms"}}
	for _, m := range all {
		l := bench.Summarize(m.Latency)
		cells := []string{
			strconv.Itoa(m.Files), bytesText(uint64(m.GroupBytes)), fmt.Sprintf("%.1f", m.BytesPerSecond()/1e6), fmt.Sprintf("%.0f", m.GroupsPerSecond()),
			fmt.Sprintf("%.2f", l.P50Ms), fmt.Sprintf("%.2f", l.P99Ms), fmt.Sprintf("%.2f", l.P999Ms), fmt.Sprintf("%.2f", l.MaxMs),
		}
		out.rows = append(out.rows, row{
			name: fmt.Sprintf("%dx%d", m.Files, m.GroupBytes), cells: cells,
			data: benchDiskItem{
				Files: m.Files, GroupBytes: m.GroupBytes, Seconds: m.Elapsed.Seconds(), BytesPerSecond: m.BytesPerSecond(),
				GroupsPerSecond: m.GroupsPerSecond(), Latency: l,
			},
		})
	}
	return out
}
