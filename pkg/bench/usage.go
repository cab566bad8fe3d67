package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Process is one whose cost is told beside what it does.
type Process struct {
	Name string
	PID  int
}

// usage is what a process has used since it began, and holds now.
type usage struct {
	cpu     time.Duration // user and system, of all threads, those that ended included
	rss     int64         // bytes
	written int64         // bytes that it made dirty or wrote past the cache; -1: not told, as of other users' processes
}

// userTicks a second is the unit of CPU times in /proc, on every Linux.
const userTicks = 100

// readUsage reads what the kernel tells of a process. Elsewhere than on Linux there is no /proc, and an error.
func readUsage(proc string, pid int) (usage, error) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return usage{}, fmt.Errorf("read usage of process %d: %w", pid, err)
	}
	u, err := parseStat(stat)
	if err != nil {
		return usage{}, fmt.Errorf("read usage of process %d: %w", pid, err)
	}
	u.written = -1
	if text, err := os.ReadFile(filepath.Join(dir, "io")); err == nil {
		u.written = parseWritten(text)
	}
	return u, nil
}

// parseStat reads /proc/PID/stat. The second field is a name in parentheses, which may hold anything.
func parseStat(stat []byte) (usage, error) {
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const user, system, rss = 14 - 3, 15 - 3, 24 - 3 // as proc(5) numbers them, less the first two and counted from 0
	if len(fields) <= rss {
		return usage{}, errors.New("its stat is short")
	}
	var values [3]int64
	for i, at := range []int{user, system, rss} {
		v, err := strconv.ParseInt(string(fields[at]), 10, 64)
		if err != nil {
			return usage{}, fmt.Errorf("field %d of its stat: %w", at+3, err)
		}
		values[i] = v
	}
	return usage{
		cpu: time.Duration(values[0]+values[1]) * (time.Second / userTicks),
		rss: values[2] * int64(os.Getpagesize()),
	}, nil
}

// parseWritten reads write_bytes of /proc/PID/io; -1 if it is not there.
func parseWritten(text []byte) int64 {
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "write_bytes: "); ok {
			if n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}

// SyncMetric counts a bookie's fdatasyncs, in the text format of its /metrics.
const SyncMetric = "penstock_ledgerstore_sync_seconds_count"

// maxMetrics bounds what is read of a /metrics page.
const maxMetrics = 64 << 20

// CountSyncs adds up the syncs that bookies' /metrics pages tell of.
func CountSyncs(ctx context.Context, urls []string) (sum float64, err error) {
	for _, url := range urls {
		n, err := readSyncsOf(ctx, url)
		if err != nil {
			return 0, fmt.Errorf("count syncs at %s: %w", url, err)
		}
		sum += n
	}
	return sum, nil
}

func readSyncsOf(ctx context.Context, url string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	transport := &http.Transport{DisableKeepAlives: true} // a few requests in a run leave no connection behind
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("it answers %s", resp.Status)
	}
	sum, found, err := process.SumMetric(io.LimitReader(resp.Body, maxMetrics), SyncMetric)
	if err == nil && !found {
		err = fmt.Errorf("there is no %s: is it a bookie's page?", SyncMetric)
	}
	return sum, err
}
