package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/bench/penstockdriver"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/standalone"
)

// standaloneBookies are as many as keep three copies of each message, which is what a cluster is measured for.
const standaloneBookies = 3

// benching is one call of penstock bench.
type benching struct {
	app       *app
	flags     benchFlags
	scenarios []bench.Scenario
	processes []bench.Process
	self      string // what this process is called
	format    string
	report    io.Writer // nil: none is wanted
	results   []*bench.Result
}

// onStandalone runs the scenarios on a cluster that lives as long as they do.
func (b *benching) onStandalone(ctx context.Context) (failed error) {
	a := b.app
	if a.url != "" {
		return settings.Usagef("--standalone starts a cluster, --url names one: they exclude each other")
	}
	dir, err := os.MkdirTemp(b.flags.dir, "penstock-bench-")
	if err != nil {
		return fmt.Errorf("make directory for the cluster: %w", err)
	}
	defer func() {
		if err := os.RemoveAll(dir); err != nil && failed == nil {
			failed = fmt.Errorf("remove the cluster's directory: %w", err)
		}
	}()
	a.warnOfMemory(dir)
	c, err := standalone.Start(ctx, standalone.Config{Dir: dir, Bookies: standaloneBookies, Version: a.version},
		slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: slog.LevelError})))
	if err != nil {
		return err //nolint:wrapcheck // it says what could not be started
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if err := c.Close(stop); err != nil && failed == nil {
			failed = err
		}
	}()
	a.url, b.self = c.URL(), "bench and cluster"
	a.progress("a cluster with %d bookies is up in this process, data in %s", standaloneBookies, dir)
	return a.connect(ctx, b.all)
}

// warnOfMemory says that a directory is not on a disk.
func (a *app) warnOfMemory(dir string) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC) {
		a.progress("note: %s is in memory, where syncing costs nothing: --dir names a directory on a disk", dir)
	}
}

// all runs the scenarios one after the other, and prints each result; a document at the end holds all of them.
func (b *benching) all(ctx context.Context, c *client.Client) error {
	options := bench.Options{
		Processes: b.processes, Self: b.self, ProbeDir: b.flags.probeDir, Patience: b.app.timeout, Keep: b.flags.keep,
		Progress: b.progress, Say: func(text string) { b.app.progress("%s", text) },
	}
	var err error
	if options.Metrics, err = b.syncPages(ctx, c); err != nil {
		return err
	}
	driver := penstockdriver.New(c)
	for i, s := range b.scenarios {
		if len(b.scenarios) > 1 {
			b.app.progress("scenario %d of %d: %s", i+1, len(b.scenarios), s)
		}
		var result *bench.Result
		result, err = bench.Run(ctx, driver, s, options)
		if result != nil && len(result.Phases) > 0 {
			b.results = append(b.results, result)
			if printErr := b.printOne(result); printErr != nil {
				return printErr
			}
		}
		if err != nil {
			break
		}
	}
	if err = errors.Join(err, b.finish()); err != nil {
		return err
	}
	return b.judge()
}

// judge is what was wrong with results.
func (b *benching) judge() error {
	for _, r := range b.results {
		if err := r.Err(); err != nil {
			return fmt.Errorf("%s: %w", r.Scenario, err)
		}
	}
	return nil
}

func (b *benching) printOne(r *bench.Result) error {
	if b.format != "table" && b.format != "wide" {
		return nil
	}
	if len(b.results) > 1 {
		fmt.Fprintln(b.app.out)
	}
	return r.WriteTable(b.app.out) //nolint:wrapcheck // it says what it printed
}

// finish prints what holds all results.
func (b *benching) finish() error {
	if b.report != nil {
		if err := bench.WriteHTML(b.report, "penstock bench", b.results); err != nil {
			return err //nolint:wrapcheck // it says what it wrote
		}
		b.app.progress("report: %s", b.flags.html)
	}
	if b.format == "table" || b.format == "wide" {
		return nil
	}
	out := view{kind: "BenchList"}
	for _, r := range b.results {
		out.rows = append(out.rows, row{name: r.Scenario.String(), data: r})
	}
	return out.print(b.app.out, b.format)
}

// progress prints a second of a run.
func (b *benching) progress(p bench.Point) {
	line := fmt.Sprintf("%6.1fs  %-8s  published %9s/s  p50 %s  p99 %s  max %s ms", p.Seconds, p.Phase,
		grouped(uint64(p.PublishedPerSecond+0.5)), threeDigits(p.PublishP50Ms), threeDigits(p.PublishP99Ms), threeDigits(p.PublishMaxMs))
	if p.ReceivedPerSecond > 0 {
		line += fmt.Sprintf("  received %9s/s  p50 %s  p99 %s ms", grouped(uint64(p.ReceivedPerSecond+0.5)), threeDigits(p.EndToEndP50Ms), threeDigits(p.EndToEndP99Ms))
	}
	if p.Failed > 0 {
		line += "  FAILED " + grouped(p.Failed)
	}
	b.app.progress("%s", line)
}

// threeDigits formats milliseconds in a column.
func threeDigits(ms float64) string {
	switch {
	case ms == 0:
		return "    –"
	case ms < 10:
		return fmt.Sprintf("%5.2f", ms)
	case ms < 100:
		return fmt.Sprintf("%5.1f", ms)
	}
	return fmt.Sprintf("%5.0f", ms)
}

// syncPages are the pages that count bookies' syncs; none if this machine cannot reach them all.
func (b *benching) syncPages(ctx context.Context, c *client.Client) ([]string, error) {
	asking, done := b.app.opening(ctx)
	defer done()
	bookies, err := c.Admin().ListBookies(asking, &brokerv1.ListBookiesRequest{})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what failed
	}
	var pages []string
	for _, k := range bookies.GetBookies() {
		if k.GetHttp() != "" {
			pages = append(pages, metricsPage(k.GetHttp()))
		}
	}
	if len(pages) == 0 { // all in one process
		brokers, err := c.Admin().ListBrokers(asking, &brokerv1.ListBrokersRequest{})
		if err != nil {
			return nil, err //nolint:wrapcheck // likewise
		}
		for _, k := range brokers.GetBrokers() {
			if k.GetHttp() != "" {
				pages = append(pages, metricsPage(k.GetHttp()))
				break // one page tells of all
			}
		}
	}
	if _, err := bench.CountSyncs(asking, pages); err != nil {
		b.app.progress("syncs are not counted: %v", err)
		return nil, nil
	}
	return pages, nil
}

func metricsPage(http string) string {
	if !strings.Contains(http, "://") {
		http = "http://" + http
	}
	return strings.TrimSuffix(http, "/") + "/metrics"
}
