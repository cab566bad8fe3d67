package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	demoTopic        = "public/default/demo"
	demoSubscription = "audience"
	demoMessageSize  = 1 << 10
	demoLimit        = 55 * time.Second // the whole demo, whatever happens
	demoStart        = 20 * time.Second // until every process is ready
	demoRollMiB      = 4
	demoProgress     = 2 * time.Second
	demoSnapshotWait = 3 * time.Second
	demoPoll         = 10 * time.Millisecond
	demoAfterKill    = 1_000 // messages acknowledged after a kill before its gap counts as over
)

type demoFlags struct {
	messages uint64
	rate     float64
	keep     bool
}

func (a *app) demoCommand() *cobra.Command {
	var f demoFlags
	cmd := &cobra.Command{
		Use: "demo", Short: "Watch messages survive the death of their broker and of a bookie", Args: noArgs,
		Long: "Start etcd, four bookies and two brokers as real processes on this machine, publish and consume numbered messages, " +
			"and kill -9 first the broker that serves them, then a bookie that stores them. Exits with 1 if a single message is " +
			"lost, repeated in storage or out of order. Nothing is left running.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.messages < 4*demoAfterKill {
				return settings.Usagef("--messages is %d: want at least %d", f.messages, 4*demoAfterKill)
			}
			if f.rate < 100 {
				return settings.Usagef("--rate is %v: want at least 100 a second", f.rate)
			}
			return a.demo(cmd.Context(), f)
		},
	}
	cmd.Flags().Uint64Var(&f.messages, "messages", 20_000, "how many to publish")
	cmd.Flags().Float64Var(&f.rate, "rate", 1_500, "messages a second")
	cmd.Flags().BoolVar(&f.keep, "keep", false, "keep the processes' data and logs")
	return cmd
}

// demo is one showing.
type demo struct {
	app     *app
	flags   demoFlags
	began   time.Time
	cluster *process.Cluster
	client  *client.Client
	run     *workload.Run

	printing sync.Mutex
	problems []string
}

func (a *app) demo(stop context.Context, f demoFlags) (failed error) {
	ctx, cancel := context.WithTimeoutCause(stop, demoLimit, fmt.Errorf("the demo was not over after %v", demoLimit))
	defer cancel()
	programs, err := programDirectory()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "penstock-demo-")
	if err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	d := &demo{app: a, flags: f, began: time.Now()}
	defer func() {
		if failed != nil && stop.Err() == nil { // whatever it was, the demo did not show what it should
			failed = errors.New("the demo failed: " + failed.Error())
		}
		if f.keep || failed != nil && stop.Err() == nil {
			fmt.Fprintf(a.err, "data and logs are in %s\n", dir)
			return
		}
		if err := os.RemoveAll(dir); err != nil && failed == nil {
			failed = fmt.Errorf("clean up: %w", err)
		}
	}()
	return d.show(ctx, process.Config{
		Programs: programs, Dir: dir, Bookies: 4, Brokers: 2,
		BookieArgs: []string{"--segment-mib", "16"},
		BrokerArgs: []string{"--roll-mib", strconv.Itoa(demoRollMiB)}, // so that there are closed ledgers when the owner dies
	})
}

// programDirectory is where the other programs are: beside this one.
func programDirectory() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the programs: %w", err)
	}
	if resolved, err := filepath.EvalSymlinks(self); err == nil {
		self = resolved
	}
	return filepath.Dir(self), nil
}

// say prints a line of the story.
func (d *demo) say(format string, args ...any) {
	d.printing.Lock()
	defer d.printing.Unlock()
	fmt.Fprintf(d.app.out, "%5.1fs  %s\n", time.Since(d.began).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demo) problem(format string, args ...any) {
	d.problems = append(d.problems, fmt.Sprintf(format, args...))
}

func (d *demo) show(ctx context.Context, cfg process.Config) (failed error) {
	d.say("starting 1 etcd, %d bookies and %d brokers, each a process of its own on 127.0.0.1", cfg.Bookies, cfg.Brokers)
	starting, cancel := context.WithTimeout(ctx, demoStart)
	defer cancel()
	cluster, err := process.Start(starting, cfg)
	if err != nil {
		return err
	}
	defer cluster.Close()
	d.cluster = cluster
	if d.client, err = client.Connect(ctx, cluster.URL()); err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := d.client.Close(closing); err != nil && failed == nil {
			failed = err
		}
	}()
	d.run, err = workload.Start(ctx, d.client, workload.Config{
		Topic: demoTopic, Subscription: demoSubscription, Messages: d.flags.messages, Rate: d.flags.rate, Size: demoMessageSize, Dedup: true,
	})
	if err != nil {
		return err
	}
	progressing, stop := context.WithCancel(ctx)
	var progress sync.WaitGroup
	progress.Go(func() { d.progress(progressing) })
	gaps, err := d.story(ctx)
	if err != nil {
		d.run.StopProducing()
	}
	report, waitErr := d.run.Wait(ctx)
	stop()
	progress.Wait()
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err() // a person had enough
	}
	for _, err := range []error{err, waitErr} {
		if err != nil {
			d.problem("%v", err)
		}
	}
	return d.verdict(report, gaps)
}

// progress tells how far the messages are.
func (d *demo) progress(ctx context.Context) {
	tick := time.NewTicker(demoProgress)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_, acked, received := d.run.Counts()
			d.say("        %s acknowledged, %s delivered", grouped(acked), grouped(received))
		}
	}
}

// demoGaps is how long publishing stood still.
type demoGaps struct{ broker, bookie time.Duration }

func (d *demo) story(ctx context.Context) (gaps demoGaps, err error) {
	t, err := d.client.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: demoTopic})
	if err != nil {
		return gaps, err
	}
	owner := d.cluster.Broker(t.GetBrokerUrl())
	if owner == nil {
		return gaps, fmt.Errorf("the topic is served at %s, which is no broker of this demo", t.GetBrokerUrl())
	}
	d.say("ready. A producer publishes %s numbered messages of %s to %s, %.0f a second;", grouped(d.flags.messages), bytesText(demoMessageSize), demoTopic, d.flags.rate)
	d.say("        a consumer acknowledges each. %s serves the topic. A message counts once 2 of its 3 bookies have it on disk", owner.Name)
	if err := d.run.AwaitAcknowledged(ctx, d.flags.messages*9/20); err != nil {
		return gaps, err
	}
	if gaps.broker, err = d.killBroker(ctx, owner); err != nil {
		return gaps, err
	}
	if err := d.run.AwaitAcknowledged(ctx, d.flags.messages*11/20); err != nil {
		return gaps, err
	}
	gaps.bookie, err = d.killBookie(ctx)
	return gaps, err
}

// kill kills a process and waits until messages flow again. The watch that it returns goes on.
func (d *demo) kill(ctx context.Context, p *process.Process, why string) (*workload.Watch, error) {
	_, before, _ := d.run.Counts()
	d.say("kill -9 %s (process %d), %s", p.Name, p.PID(), why)
	watch := d.run.Watch()
	if err := p.Kill(); err != nil {
		return nil, err
	}
	return watch, d.run.AwaitAcknowledged(ctx, min(before+demoAfterKill, d.flags.messages))
}

func (d *demo) killBroker(ctx context.Context, owner *process.Process) (time.Duration, error) {
	before, err := d.settledHoldings(ctx)
	if err != nil {
		return 0, err
	}
	watch, err := d.kill(ctx, owner, "the broker that serves the topic")
	if err != nil {
		return 0, err
	}
	gap := watch.Stop()
	t, err := d.client.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: demoTopic})
	if err != nil {
		return 0, err
	}
	heir := d.cluster.Broker(t.GetBrokerUrl())
	if heir == nil || heir == owner {
		return 0, fmt.Errorf("the topic is served at %s, which is not the other broker", t.GetBrokerUrl())
	}
	d.say("%s serves the topic now. Publishing stood still for %d ms", heir.Name, gap.Milliseconds())
	after, err := d.holdings(ctx)
	if err != nil {
		return 0, err
	}
	copied := before.copied(after)
	d.say("        closed-ledger bytes copied: %s, of %s that %d closed ledgers hold; recovery tail: %s",
		grouped(copied), bytesText(before.bytes()), len(before.closed), bytesText(t.GetRecoveredTailBytes()))
	if copied > 0 {
		d.problem("%d bytes of closed ledgers were copied for the failover", copied)
	}
	if changed := before.moved(after); len(changed) > 0 {
		d.problem("closed ledgers changed their bookies: %v", changed)
	}
	return gap, nil
}

func (d *demo) killBookie(ctx context.Context) (time.Duration, error) {
	open, err := d.freshLedger(ctx)
	if err != nil {
		return 0, err
	}
	slots := open.GetFragments()[len(open.GetFragments())-1].GetSlots()
	victim := d.cluster.Bookie(slots[0].GetBookie())
	if victim == nil {
		return 0, fmt.Errorf("ledger %d is on bookie %q, which is none of this demo", open.GetId(), slots[0].GetBookie())
	}
	killed := time.Now()
	watch, err := d.kill(ctx, victim, fmt.Sprintf("one of the 3 bookies of ledger %d, which is being written", open.GetId()))
	if err != nil {
		return 0, err
	}
	text, err := d.replacement(ctx, open.GetId(), victim.Name)
	if err != nil {
		return 0, err
	}
	gap := watch.Stop()
	d.say("%s, after %.1f s on two bookies. Publishing stood still for %d ms", text, time.Since(killed).Seconds(), gap.Milliseconds())
	return gap, nil
}

// published tells whether every message is acknowledged.
func (d *demo) published() bool {
	_, acked, _ := d.run.Counts()
	return acked >= d.flags.messages
}

// replacement waits until another bookie has the place of the victim, or the ledger has ended without it, and tells so.
func (d *demo) replacement(ctx context.Context, ledger uint64, victim string) (string, error) {
	for {
		now, err := d.client.Admin().DescribeLedger(ctx, &brokerv1.DescribeLedgerRequest{Id: ledger})
		if err != nil {
			return "", err
		}
		l := now.GetLedger()
		newest := l.GetFragments()[len(l.GetFragments())-1]
		for i, s := range newest.GetSlots() {
			if old := l.GetFragments()[0].GetSlots()[i].GetBookie(); old == victim && s.GetBookie() != victim {
				return fmt.Sprintf("%s took the place of %s in ledger %d, from entry %d on", s.GetBookie(), victim, ledger, newest.GetFirstEntry()), nil
			}
		}
		if l.GetState() == "CLOSED" {
			return fmt.Sprintf("ledger %d was full, and its successor has other bookies", ledger), nil
		}
		if d.published() { // nothing is written any more, so no bookie is missed
			return fmt.Sprintf("every message was published before %s had to be replaced", victim), nil
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(demoPoll):
		}
	}
}

// verdict prints what came out; anything wrong is an error.
func (d *demo) verdict(r workload.Report, gaps demoGaps) error {
	out := d.app.out
	line := func(name, value string) { fmt.Fprintf(out, "  %-28s %s\n", name, value) }
	fmt.Fprintln(out)
	line("sent", grouped(r.Sent))
	line("acknowledged", grouped(r.Acknowledged))
	line("received", grouped(r.Received))
	line("lost", grouped(r.Count(workload.Lost)))
	line("missing offsets", grouped(r.Count(workload.Gap)))
	line("out of order", grouped(r.Count(workload.Reordered)))
	line("stored twice", grouped(r.StoredTwice))
	line("delivered again", grouped(r.Redelivered)) // allowed: what was acknowledged may not be durable when a broker dies
	line("publish gap, broker killed", fmt.Sprintf("%d ms", gaps.broker.Milliseconds()))
	line("publish gap, bookie killed", fmt.Sprintf("%d ms", gaps.bookie.Milliseconds()))
	fmt.Fprintln(out)
	if r.Sent != d.flags.messages || r.Acknowledged != r.Sent || r.Received != r.Sent {
		d.problem("sent %d of %d, acknowledged %d, received %d", r.Sent, d.flags.messages, r.Acknowledged, r.Received)
	}
	for _, v := range r.Violations {
		d.problem("%v", v)
	}
	for _, err := range d.run.Failures() {
		d.problem("a message failed: %v", err)
	}
	if len(d.problems) > 0 {
		for _, p := range d.problems {
			line("NOT AS PROMISED", p)
		}
		return fmt.Errorf("not as promised in %d points", len(d.problems))
	}
	d.say("every message that was sent is stored once and was received in order")
	return nil
}

// grouped writes a number for people: 20,000.
func grouped(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
