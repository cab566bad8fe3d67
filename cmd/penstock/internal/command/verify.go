package command

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
)

const (
	verifyAlong    = "along"  // the subscription that is read while messages are published
	verifyBehind   = "behind" // the one that is read afterwards, and keeps everything until then
	verifyProgress = 10 * time.Second
	verifyPoll     = 50 * time.Millisecond
)

type verifyFlags struct {
	duration, every time.Duration
	rate            float64
	size            int
	producers       int
	partitions      uint32
	ack             string
	dedup, keep     bool
	faults          []string
}

func (a *app) verifyCommand() *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use: "verify [TOPIC]", Short: "Publish numbered messages to a cluster, read them back, and judge what came out", Args: maxArgs(1),
		Long: "Make a topic, publish numbered messages to it, consume them at the same time and read all of them once more at the end: " +
			"nothing acknowledged may be lost, stored twice or out of order, and nothing may come that was not sent. Commands given " +
			"with --fault are run meanwhile, in turn, to break something. The topic is deleted again, unless something was wrong. " +
			"Exits with 1 if a promise was broken.",
		Example: "  penstock verify --duration 10m --rate 2000\n  penstock verify --fault 'kubectl delete pod broker-0' --fault 'kubectl delete pod bookie-1' --every 20s -o json",
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			if err := f.validate(); err != nil {
				return err
			}
			topic := "public/default/" + randomName("verify")
			if len(args) > 0 {
				topic = args[0]
			}
			return a.connect(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				return a.verify(ctx, c, topic, format, f)
			})
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&f.duration, "duration", time.Minute, "how long to publish")
	flags.Float64Var(&f.rate, "rate", 500, "messages a second, of all producers together; 0 is as fast as they are acknowledged")
	flags.IntVar(&f.size, "size", 256, "size of a message in bytes, at least 32")
	flags.IntVar(&f.producers, "producers", 2, "producers side by side")
	flags.Uint32Var(&f.partitions, "partitions", 0, "partitions of the topic; 0 is a topic without partitions")
	flags.StringVar(&f.ack, "ack", "quorum", "what an acknowledgement means: none, one, quorum, all; what is not durable may be lost")
	flags.BoolVar(&f.dedup, "dedup", true, "ask for deduplication, so that nothing may be stored twice")
	flags.StringArrayVar(&f.faults, "fault", nil, "a command for sh that breaks something; may be given more than once: they take turns")
	flags.DurationVar(&f.every, "every", 20*time.Second, "pause before each fault")
	flags.BoolVar(&f.keep, "keep", false, "do not delete the topic")
	registerFlagCompletion(cmd, "ack", []string{"none", "one", "quorum", "all"})
	addOutputFlag(cmd)
	return cmd
}

func (f verifyFlags) validate() error {
	switch {
	case f.duration <= 0 || f.every <= 0:
		return settings.Usagef("--duration and --every are more than 0")
	case f.size < workload.MinSize:
		return settings.Usagef("--size is %d: want at least %d", f.size, workload.MinSize)
	case f.producers < 1 || !(f.rate >= 0):
		return settings.Usagef("--producers is at least 1, and --rate not below 0")
	}
	if _, ok := ackLevels[f.ack]; !ok {
		return settings.Usagef("--ack: %q is none of none, one, quorum, all", f.ack)
	}
	return nil
}

// randomName makes a name that nobody else has.
func randomName(kind string) string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return kind + "-" + hex.EncodeToString(b[:])
}

// verification is one.
type verification struct {
	app    *app
	client *client.Client
	topic  string
	flags  verifyFlags

	began   time.Time
	run     *workload.Run
	behind  atomic.Uint64 // messages read of the second subscription
	faults  faultRunner
	watch   *workload.Watch
	results []verifyResult
}

// verifyResult is one reading, judged.
type verifyResult struct {
	reading    string
	report     workload.Report
	unfinished bool // it could not be read to its end, so what is missing may be there
	stall      time.Duration
	delay      time.Duration
}

func (r verifyResult) verdict() string {
	switch {
	case r.unfinished:
		return "unfinished"
	case r.report.Err() != nil:
		return "wrong"
	}
	return "ok"
}

func (a *app) verify(ctx context.Context, c *client.Client, topic, format string, f verifyFlags) error {
	v := &verification{app: a, client: c, topic: topic, flags: f, began: time.Now()}
	if err := v.prepare(ctx); err != nil {
		return err
	}
	err := v.show(ctx)
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), v.leave(ctx, false))
	}
	if len(v.results) == 0 {
		return err
	}
	if printErr := v.view().print(a.out, format); printErr != nil {
		return printErr
	}
	if err == nil {
		err = v.judge()
	}
	if leaveErr := v.leave(ctx, err != nil); err == nil {
		err = leaveErr
	}
	return err
}

// prepare makes the topic and the subscription that keeps what is published to it.
func (v *verification) prepare(ctx context.Context) error {
	opening, done := v.app.opening(ctx)
	defer done()
	if _, err := v.client.Admin().CreateTopic(opening, &brokerv1.CreateTopicRequest{Topic: v.topic, Partitions: v.flags.partitions}); err != nil {
		return err //nolint:wrapcheck // it says what failed on which topic
	}
	s, err := v.client.Subscribe(opening, v.topic, verifyBehind, client.WithStart(client.Earliest())) // of each partition
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	return s.Close(opening) //nolint:wrapcheck // likewise
}

// leave deletes the topic, unless it is to be looked at.
func (v *verification) leave(ctx context.Context, wrong bool) error {
	if wrong || v.flags.keep {
		v.app.progress("the topic is kept: %s", v.topic)
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), v.app.timeout)
	defer cancel()
	for {
		_, err := v.client.Admin().DeleteTopic(ctx, &brokerv1.DeleteTopicRequest{Topic: v.topic, Force: true})
		var e *client.Error
		switch {
		case err == nil, errors.As(err, &e) && e.Code == client.CodeNotFound:
			return nil
		case ctx.Err() == nil && (client.OutcomeUnknown(err) || e != nil && e.Retryable):
			continue
		}
		return fmt.Errorf("everything was as promised, but the topic could not be deleted: %w", err)
	}
}

// show publishes, breaks and reads. Its error is why something did not come to its end.
func (v *verification) show(ctx context.Context) error {
	living, end := context.WithCancelCause(ctx)
	defer end(nil)
	patience := time.AfterFunc(v.app.timeout, func() {
		end(fmt.Errorf("open producers and a consumer: no answer for %v: %w", v.app.timeout, context.DeadlineExceeded))
	})
	run, err := workload.Start(living, v.client, workload.Config{
		Topic: v.topic, Producers: v.flags.producers, Rate: v.flags.rate, Size: v.flags.size, Dedup: v.flags.dedup,
		Timeout: v.app.timeout, Subscription: verifyAlong,
		ProducerOptions: []client.ProducerOption{client.WithAckLevel(ackLevels[v.flags.ack])},
	})
	if !patience.Stop() && err == nil { // it may have fired, and ended the run
		err = context.Cause(living)
	}
	if run == nil {
		return err //nolint:wrapcheck // it says what failed
	}
	v.run, v.watch = run, run.Watch()
	var beside sync.WaitGroup
	publishing, stop := context.WithTimeout(living, v.flags.duration)
	beside.Go(func() { v.faults.run(publishing, v) })
	beside.Go(func() { v.progress(publishing) })
	<-publishing.Done()
	run.StopProducing()
	stop()
	beside.Wait()
	if err := v.finish(living); err != nil {
		return err
	}
	return v.readBehind(living)
}

// progress tells how far the messages are, for as long as they are published.
func (v *verification) progress(ctx context.Context) {
	tick := time.NewTicker(verifyProgress)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			sent, acked, received := v.run.Counts()
			v.say("%s sent, %s acknowledged, %s delivered", grouped(sent), grouped(acked), grouped(received))
		}
	}
}

func (v *verification) say(format string, args ...any) {
	v.app.progress("%6.1fs  %s", time.Since(v.began).Seconds(), fmt.Sprintf(format, args...))
}

// finish waits until everything has its outcome and was delivered.
func (v *verification) finish(ctx context.Context) error {
	moving, done := v.whileMoving(ctx)
	report, err := v.run.Wait(moving)
	done()
	result := verifyResult{reading: "delivered", report: report, stall: v.watch.Stop(), delay: v.run.Delay()}
	result.unfinished = err != nil && !v.run.Ended()
	v.results = append(v.results, result)
	if err != nil && report.Err() == nil || result.unfinished {
		return v.stuck(moving, err)
	}
	return nil
}

// readBehind reads everything from the beginning.
func (v *verification) readBehind(ctx context.Context) error {
	if !v.run.Ended() {
		return nil
	}
	moving, done := v.whileMoving(ctx)
	defer done()
	s, err := v.client.Subscribe(moving, v.topic, verifyBehind)
	if err != nil {
		return v.stuck(moving, err)
	}
	report, err := v.run.Follow(moving, func(ctx context.Context) (*client.Delivery, error) {
		d, err := s.Receive(ctx)
		if err == nil {
			v.behind.Add(1)
			d.AckAsync()
		}
		return d, err
	})
	v.results = append(v.results, verifyResult{reading: "stored", report: report})
	if closeErr := s.Close(moving); err == nil && closeErr != nil {
		return v.stuck(moving, closeErr)
	}
	if err != nil && report.Err() == nil {
		return v.stuck(moving, err)
	}
	return nil
}

// stuck is an error of something that stood still, or failed before.
func (v *verification) stuck(moving context.Context, err error) error {
	if cause := context.Cause(moving); cause != nil && errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %v", cause, err) //nolint:errorlint // the cause decides
	}
	return err
}

// whileMoving ends when nothing was acknowledged or read for as long as --timeout says.
func (v *verification) whileMoving(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		tick := time.NewTicker(verifyPoll)
		defer tick.Stop()
		last, since := uint64(0), time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			_, acked, received := v.run.Counts()
			if now := acked + received + v.behind.Load(); now != last {
				last, since = now, time.Now()
			}
			if time.Since(since) > v.app.timeout {
				cancel(fmt.Errorf("nothing was acknowledged or delivered for %v: %w", v.app.timeout, context.DeadlineExceeded))
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-over
	}
}

// judge is the error of a verification that came to its end.
func (v *verification) judge() error {
	var wrong []string
	for _, r := range v.results {
		for _, x := range r.report.Violations {
			wrong = append(wrong, fmt.Sprintf("%s, %s", r.reading, x))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("not as promised: %s", strings.Join(wrong, "; "))
	}
	if r := v.results[0].report; r.Acknowledged == 0 {
		return fmt.Errorf("nothing was acknowledged, so nothing is verified: %w", errors.Join(v.run.Failures()...))
	}
	return v.faults.err()
}

type verifyItem struct {
	Reading                string   `json:"reading"`
	Sent                   uint64   `json:"sent"`
	Acknowledged           uint64   `json:"acknowledged"`
	Refused                uint64   `json:"refused"`
	Unknown                uint64   `json:"unknown"`
	Received               uint64   `json:"received"`
	Redelivered            uint64   `json:"redelivered"`
	Lost                   uint64   `json:"lost"`
	Duplicated             uint64   `json:"duplicated"`
	Reordered              uint64   `json:"reordered"`
	OtherwiseWrong         uint64   `json:"otherwiseWrong"`
	LongestStallSeconds    *float64 `json:"longestStallSeconds,omitempty"`
	SlowestDeliverySeconds *float64 `json:"slowestDeliverySeconds,omitempty"`
	Faults                 int      `json:"faults"`
	Verdict                string   `json:"verdict"`
	Violations             []string `json:"violations"`
}

// view is the table: one reading a row.
func (v *verification) view() view {
	out := view{kind: "VerificationList", columns: []string{"READING"}}
	for _, c := range workload.Columns {
		out.columns = append(out.columns, strings.ToUpper(c))
	}
	out.columns = append(out.columns, "LONGEST STALL", "SLOWEST DELIVERY", "VERDICT")
	for _, r := range v.results {
		x := r.report
		item := verifyItem{
			Reading: r.reading, Sent: x.Sent, Acknowledged: x.Acknowledged, Refused: x.Refused, Unknown: x.Unknown + x.Unsettled,
			Received: x.Received, Redelivered: x.Redelivered, Lost: x.Count(workload.Lost), Duplicated: x.StoredTwice,
			Reordered: x.Count(workload.Reordered), OtherwiseWrong: x.OtherwiseWrong(), Faults: v.faults.ran, Verdict: r.verdict(),
			Violations: []string{},
		}
		for _, violation := range x.Violations {
			item.Violations = append(item.Violations, violation.String())
		}
		stall, delay := "-", "-"
		if r.reading == "delivered" {
			s, d := r.stall.Seconds(), r.delay.Seconds()
			item.LongestStallSeconds, item.SlowestDeliverySeconds = &s, &d
			stall, delay = fmt.Sprintf("%.2fs", s), fmt.Sprintf("%.2fs", d)
		}
		cells := append(append([]string{r.reading}, x.Cells()...), stall, delay, r.verdict())
		out.rows = append(out.rows, row{name: r.reading + " " + r.verdict(), cells: cells, data: item})
	}
	return out
}
