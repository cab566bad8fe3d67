package command

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/bench"
)

type benchFlags struct {
	scenario   bench.Scenario
	standalone bool
	dir        string
	html       string
	processes  []string
	probeDir   string
	keep       bool
}

func (a *app) benchCommand() *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use: "bench [FILE]", Short: "Put load on a cluster, and measure rates, latencies and what they cost", Args: benchArgs,
		Long: "Publish to topics made for it and consume them, and tell how many messages a second went through, how late they were, and " +
			"what a message cost each process. FILE holds scenarios as YAML, with keys named like the flags; flags given beside it " +
			"count for each of them. Latencies are from when a message was due; everything acknowledged must come back to each " +
			"subscription, or bench exits with 1. docs/benchmarks.md tells how to read the figures.",
		Example: "  penstock bench --standalone --duration 10s --html report.html\n  penstock bench --rate 2000 --batch-messages 1\n" +
			"  penstock bench --producers 64 --in-flight 1\n  penstock bench --backlog 1000000\n" +
			"  penstock bench --process broker=$(pidof broker) scenarios.yaml -o json\n  penstock bench disk",
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.bench(cmd.Context(), f, cmd.Flags(), args, format)
		},
	}
	f.addTo(cmd)
	addOutputFlag(cmd)
	cmd.AddCommand(a.benchDiskCommand())
	return cmd
}

// benchArgs tells a misspelt subcommand from a file that is not there.
func benchArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case len(args) > 1:
		return settings.Usagef("%s takes one file, not %d: %s", cmd.CommandPath(), len(args), cmd.UseLine())
	}
	if _, err := os.Stat(args[0]); err != nil && !strings.ContainsAny(args[0], "./") {
		return settings.Usagef("%q is neither a file with scenarios nor a command of penstock bench%s (see penstock bench --help)",
			args[0], didYouMean(args[0], []string{"disk"}))
	}
	return nil
}

func (f *benchFlags) addTo(cmd *cobra.Command) {
	flags, s := cmd.Flags(), &f.scenario
	flags.SortFlags = false
	flags.IntVar(&s.Topics, "topics", 1, "topics")
	flags.IntVar(&s.Partitions, "partitions", 1, "partitions of each topic; 1 is a topic without partitions")
	flags.IntVar(&s.Producers, "producers", 1, "producers on each topic")
	flags.IntVar(&s.Subscriptions, "subscriptions", 1, "subscriptions of each topic, which all get every message; 0 is none")
	flags.IntVar(&s.Consumers, "consumers", 1, "consumers of each subscription, which share its messages")
	flags.IntVar(&s.Size, "size", 1024, fmt.Sprintf("size in bytes of a message, at least %d", bench.MinSize))
	flags.Float64Var(&s.Rate, "rate", 0, "messages a second that are due, of all producers together; 0 is as fast as they are acknowledged")
	flags.IntVar(&s.InFlight, "in-flight", 10_000, "messages of a producer without an acknowledgement, at most; 1 publishes one after the other")
	flags.IntVar(&s.Batching.Messages, "batch-messages", 0, "messages that fill a batch; 1 is no batching; 0 is the client's default")
	flags.IntVar(&s.Batching.Bytes, "batch-bytes", 0, "bytes that fill a batch; 0 is the client's default")
	flags.DurationVar(&s.Batching.Delay, "batch-delay", 0, "how long a batch waits for company; 0 is the client's default")
	flags.StringVar((*string)(&s.Ack), "ack", "quorum", "what an acknowledgement means: none, one, quorum, all")
	flags.StringVar((*string)(&s.Keys), "keys", "none", "how messages are spread over keys: none, in-turn, uniform, zipf")
	flags.IntVar(&s.KeyCount, "key-count", 10_000, "how many keys there are")
	flags.DurationVar(&s.WarmUp, "warm-up", 5*time.Second, "how long the load runs before it is measured")
	flags.DurationVar(&s.Duration, "duration", 30*time.Second, "how long it is measured")
	flags.Int64Var(&s.Backlog, "backlog", 0, "publish so many messages before the first is consumed, and measure how fast they are caught up with")
	flags.BoolVar(&s.Live, "live", false, "go on publishing while a backlog is consumed")
	flags.BoolVar(&f.standalone, "standalone", false, "start a cluster with three bookies in this process, and remove it at the end")
	flags.StringVar(&f.dir, "dir", ".", "where --standalone makes a directory for its data; it should be on a disk")
	flags.StringArrayVar(&f.processes, "process", nil, "NAME=PID of a process on this machine whose cost is measured, too; may be given more than once")
	flags.StringVar(&f.probeDir, "disk-probe", "", "directory in which 4 KiB are written and synced now and then meanwhile, to compare with")
	flags.StringVar(&f.html, "html", "", "file for a report with plots")
	flags.BoolVar(&f.keep, "keep", false, "do not delete the topics")
	registerFlagCompletion(cmd, "ack", []string{"none", "one", "quorum", "all"})
	registerFlagCompletion(cmd, "keys", []string{"none", "in-turn", "uniform", "zipf"})
}

// scenarios are those of the file, changed as flags say, or the one that the flags describe.
func (f *benchFlags) scenarios(flags *pflag.FlagSet, args []string) ([]bench.Scenario, error) {
	if len(args) == 0 {
		var one bench.Scenario
		f.override(&one, func(string) bool { return true })
		if !flags.Changed("in-flight") { // as many as there is memory for
			one.InFlight = bench.Scenario{Topics: one.Topics, Producers: one.Producers, Size: one.Size}.WithDefaults().InFlight
		}
		return checkedScenarios([]bench.Scenario{one})
	}
	in, err := os.Open(args[0])
	if err != nil {
		return nil, fmt.Errorf("read scenarios: %w", err)
	}
	defer in.Close()
	all, err := bench.ReadScenarios(in)
	if err != nil {
		return nil, settings.Usagef("%s: %w", args[0], err)
	}
	for i := range all {
		f.override(&all[i], flags.Changed)
	}
	return checkedScenarios(all)
}

func checkedScenarios(all []bench.Scenario) ([]bench.Scenario, error) {
	for _, s := range all {
		if err := s.Validate(); err != nil {
			return nil, &settings.UsageError{Err: err}
		}
	}
	return all, nil
}

// override sets what flags say, of those that are wanted.
func (f *benchFlags) override(s *bench.Scenario, wanted func(flag string) bool) {
	from := &f.scenario
	for flag, set := range map[string]func(){
		"topics": func() { s.Topics = from.Topics }, "partitions": func() { s.Partitions = from.Partitions },
		"producers": func() { s.Producers = from.Producers }, "subscriptions": func() { s.Subscriptions = zeroIsNone(from.Subscriptions) },
		"consumers": func() { s.Consumers = from.Consumers }, "size": func() { s.Size = from.Size }, "rate": func() { s.Rate = from.Rate },
		"in-flight": func() { s.InFlight = from.InFlight }, "batch-messages": func() { s.Batching.Messages = from.Batching.Messages },
		"batch-bytes": func() { s.Batching.Bytes = from.Batching.Bytes }, "batch-delay": func() { s.Batching.Delay = from.Batching.Delay },
		"ack": func() { s.Ack = from.Ack }, "keys": func() { s.Keys = from.Keys }, "key-count": func() { s.KeyCount = from.KeyCount },
		"warm-up": func() { s.WarmUp = zeroIsNone(from.WarmUp) }, "duration": func() { s.Duration = from.Duration },
		"backlog": func() { s.Backlog = from.Backlog }, "live": func() { s.Live = from.Live },
	} {
		if wanted(flag) {
			set()
		}
	}
}

// zeroIsNone is -1 for a 0 that was meant.
func zeroIsNone[T int | time.Duration](v T) T {
	if v == 0 {
		return -1
	}
	return v
}

// namedProcesses reads NAME=PID.
func namedProcesses(texts []string) (all []bench.Process, err error) {
	for _, text := range texts {
		name, number, ok := strings.Cut(text, "=")
		pid, err := strconv.Atoi(strings.TrimSpace(number))
		if !ok || name == "" || err != nil || pid < 1 {
			return nil, settings.Usagef("--process is %q: want NAME=PID, as broker=4711; one process each", text)
		}
		all = append(all, bench.Process{Name: name, PID: pid})
	}
	return all, nil
}

func (a *app) bench(ctx context.Context, f benchFlags, flags *pflag.FlagSet, args []string, format string) (failed error) {
	scenarios, err := f.scenarios(flags, args)
	if err != nil {
		return err
	}
	processes, err := namedProcesses(f.processes)
	if err != nil {
		return err
	}
	b := &benching{app: a, flags: f, scenarios: scenarios, processes: processes, format: format}
	if f.html != "" {
		report, err := os.Create(f.html) // before the work, not after it
		if err != nil {
			return fmt.Errorf("make report: %w", err)
		}
		defer func() {
			if err := report.Close(); err != nil && failed == nil {
				failed = fmt.Errorf("write report: %w", err)
			}
		}()
		b.report = report
	}
	if f.standalone {
		return b.onStandalone(ctx)
	}
	err = a.connect(ctx, b.all)
	if len(b.results) == 0 && ctx.Err() == nil && exitCode(err) == exitUnreachable {
		return fmt.Errorf("%w; penstock bench --standalone brings a cluster along", err)
	}
	return err
}
