package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/bench/jetstreamdriver"
	"github.com/penstock-mq/penstock/pkg/bench/penstockdriver"
	"github.com/penstock-mq/penstock/pkg/bench/rawdisk"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	startPatience = time.Minute
	// lazySync is how long bookies keep from the disk what they acknowledged, in the runs without fsync: longer than any
	// run, and what JetStream does by default.
	lazySync = "2m"
)

// contest has contestants take turns.
type contest struct {
	programs, dir string
	say           func(line string)
}

// hold runs the plan so many times. It goes on after a run that fails, which is told of, and stops when ctx ends.
func (c *contest) hold(ctx context.Context, plan []workload, rounds int) (runs []figures, problems []string) {
	for round := range rounds {
		for _, w := range plan {
			entries := slices.Clone(w.entries)
			if round%2 == 1 {
				slices.Reverse(entries)
			}
			for _, e := range entries {
				if ctx.Err() != nil {
					return runs, problems
				}
				name := fmt.Sprintf("round %d of %d, %s, %s", round+1, rounds, w.name, e.key())
				f, err := c.run(ctx, w, e)
				if err != nil {
					problems = append(problems, fmt.Sprintf("%s: %v", name, err))
					c.say(problems[len(problems)-1])
					continue
				}
				f.Round = round + 1
				runs = append(runs, f)
				c.say(name + ": " + f.String())
			}
		}
	}
	return runs, problems
}

// key names an entry in its workload.
func (e entry) key() string { return strings.TrimSpace(e.contestant + " " + e.variant) }

// run carries out one run in a directory of its own, and leaves the disk idle.
func (c *contest) run(ctx context.Context, w workload, e entry) (f figures, err error) {
	dir := filepath.Join(c.dir, "run")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return figures{}, fmt.Errorf("make directory for data: %w", err)
	}
	defer func() {
		if clean := wipe(dir); clean != nil {
			err = errors.Join(err, fmt.Errorf("remove data: %w", clean))
		}
	}()
	if e.diskFiles > 0 {
		f, err = measureDisk(ctx, dir, e)
	} else {
		f, err = c.measureBroker(ctx, dir, w, e)
	}
	f.Workload, f.Contestant = w.name, e.key()
	return f, err
}

// wipe removes a directory, and waits until the disk has heard of it: what the file system puts off would befall the next
// run.
func wipe(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err //nolint:wrapcheck // it names the file
	}
	parent, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	defer parent.Close()
	return unix.Syncfs(int(parent.Fd())) //nolint:wrapcheck // one cause
}

// maxFileBytes is more than a new file comes to.
const maxFileBytes = 1 << 40

func measureDisk(ctx context.Context, dir string, e entry) (f figures, err error) {
	cfg := rawdisk.Config{Dir: dir, Files: e.diskFiles}
	if e.contestant == disk {
		cfg.New, cfg.FileBytes = true, maxFileBytes
	}
	d, err := rawdisk.Open(ctx, cfg)
	if err != nil {
		return figures{}, err //nolint:wrapcheck // it says what failed
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	m, err := d.Write(ctx, e.diskFiles, e.diskGroup, e.scenario.Duration)
	if err != nil {
		return figures{}, err //nolint:wrapcheck // likewise
	}
	f.DiskBytes = m.BytesPerSecond()
	f.Rate = m.GroupsPerSecond()
	f.publish(bench.Summarize(m.Latency))
	return f, nil
}

// cluster is a contestant that runs.
type cluster struct {
	driver    bench.Driver
	processes []*process.Process
	bookies   []*process.Process
	brokers   []*process.Process
	close     func() // kills: what is left would only be removed
}

func (c *contest) measureBroker(ctx context.Context, dir string, w workload, e entry) (f figures, err error) {
	k, err := c.start(ctx, dir, e.contestant)
	if err != nil {
		return figures{}, fmt.Errorf("start: %w", err)
	}
	defer k.close()
	options := bench.Options{Self: "client"}
	for _, p := range k.processes {
		options.Processes = append(options.Processes, bench.Process{Name: p.Name, PID: p.PID()})
	}
	for _, p := range k.bookies {
		options.Metrics = append(options.Metrics, "http://"+p.HTTP+"/metrics")
	}
	if e.probe {
		options.ProbeDir = dir
	}
	result, err := bench.Run(ctx, k.driver, e.scenario, options)
	if err == nil {
		err = result.Err()
	}
	if err != nil {
		return figures{}, fmt.Errorf("%w%s", err, k.lastWords())
	}
	f = summarize(result, w.reads)
	if f.ReadThrough, err = k.readThrough(ctx); err != nil {
		return figures{}, err
	}
	return f, k.driver.Close(ctx) //nolint:wrapcheck // it says what failed
}

// lastWords are the ends of logs of processes that are gone.
func (k *cluster) lastWords() string {
	var b strings.Builder
	for _, p := range k.processes {
		if !p.Running() {
			fmt.Fprintf(&b, "\n%s has ended: %s", p.Name, p.LogTail())
		}
	}
	return b.String()
}

// readThrough is how many entries were read from bookies for each that was appended.
func (k *cluster) readThrough(ctx context.Context) (float64, error) {
	var read, appended float64
	for _, p := range k.brokers {
		for name, sum := range map[string]*float64{"penstock_topic_read_through_entries_total": &read, "penstock_topic_appended_entries_total": &appended} {
			v, err := p.Metric(ctx, name)
			if err != nil {
				return 0, fmt.Errorf("read metric of %s: %w", p.Name, err)
			}
			*sum += v
		}
	}
	if appended == 0 {
		return 0, nil
	}
	return read / appended, nil
}

// start starts a contestant.
func (c *contest) start(ctx context.Context, dir, contestant string) (*cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	switch contestant {
	case penstock:
		return c.startPenstock(ctx, dir)
	case penstockLazy:
		return c.startPenstock(ctx, dir, "--sync-interval", lazySync)
	case jetstream:
		return c.startJetStream(ctx, dir, true)
	case jetstreamLax:
		return c.startJetStream(ctx, dir, false)
	}
	panic("no contestant is called " + contestant)
}

func (c *contest) startPenstock(ctx context.Context, dir string, bookieArgs ...string) (*cluster, error) {
	// How full the disk is of other things does not matter here.
	bookieArgs = append(bookieArgs, "--low-watermark", "0.99", "--high-watermark", "0.995")
	p, err := process.Start(ctx, process.Config{Programs: c.programs, Dir: dir, Brokers: 2, BookieArgs: bookieArgs})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what failed
	}
	driver, err := penstockdriver.Open(ctx, p.URL())
	if err != nil {
		p.Close()
		return nil, err //nolint:wrapcheck // likewise
	}
	return &cluster{driver: driver, processes: p.All(), bookies: p.Bookies, brokers: p.Brokers, close: p.Close}, nil
}

func (c *contest) startJetStream(ctx context.Context, dir string, always bool) (*cluster, error) {
	servers, err := jetstreamdriver.StartServers(ctx, jetstreamdriver.ServersConfig{Programs: c.programs, Dir: dir, SyncAlways: always})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what failed
	}
	setup := "default"
	if always {
		setup = "sync=always"
	}
	driver, err := jetstreamdriver.Open(ctx, jetstreamdriver.URLs(servers), len(servers.Processes), setup)
	if err != nil {
		servers.Close()
		return nil, err //nolint:wrapcheck // likewise
	}
	return &cluster{driver: driver, processes: servers.Processes, close: servers.Close}, nil
}
