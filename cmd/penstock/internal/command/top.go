package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

type activity struct {
	Brokers       []brokerActivity       `json:"brokers"`
	Bookies       []bookieActivity       `json:"bookies"`
	Topics        []topicActivity        `json:"topics"`
	Subscriptions []subscriptionActivity `json:"subscriptions"`
}

type trafficRates struct {
	MessagesIn  float64 `json:"messagesInPerSecond"`
	BytesIn     float64 `json:"bytesInPerSecond"`
	MessagesOut float64 `json:"messagesOutPerSecond"`
	BytesOut    float64 `json:"bytesOutPerSecond"`
}

type brokerActivity struct {
	ID      string    `json:"id"`
	URL     string    `json:"url"`
	Error   string    `json:"error,omitempty"`
	Started time.Time `json:"started"`
	trafficRates
	Bundles           uint32 `json:"bundles"`
	Unowned           uint32 `json:"unownedBundles"`
	Topics            uint32 `json:"topics"`
	Producers         uint32 `json:"producers"`
	Consumers         uint32 `json:"consumers"`
	Backlog           uint64 `json:"backlog"`
	PublishBytes      uint64 `json:"publishBytes"`
	PublishLimitBytes uint64 `json:"publishLimitBytes"`
}

type bookieActivity struct {
	ID         string `json:"id"`
	State      string `json:"state"`
	Zone       string `json:"zone"`
	FreeBytes  uint64 `json:"freeBytes"`
	TotalBytes uint64 `json:"totalBytes"`
}

type topicActivity struct {
	Topic  string `json:"topic"`
	Broker string `json:"broker"`
	trafficRates
	StoredBytes uint64 `json:"storedBytes"`
	Producers   uint32 `json:"producers"`
	Consumers   uint32 `json:"consumers"`
}

type subscriptionActivity struct {
	Topic         string  `json:"topic"`
	Subscription  string  `json:"subscription"`
	Broker        string  `json:"broker"`
	LagSeconds    float64 `json:"lagSeconds"`
	Backlog       uint64  `json:"backlog"`
	BacklogBytes  uint64  `json:"backlogBytes"`
	Unacked       uint64  `json:"unacked"`
	Consumers     uint32  `json:"consumers"`
	WaitingReason string  `json:"waitingReason"`
}

type topFlags struct {
	once  bool
	n     int
	every time.Duration
}

func (a *app) topCommand() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use: "top", Short: "Watch what goes on: brokers, bookies, the busiest topics, who is behind", Args: noArgs,
		Long: "Show brokers, bookies, the busiest topics and the subscriptions that are furthest behind, again and again, until it is stopped. Rates " +
			"are over the latest few seconds, by what the brokers counted. Any broker is asked, and asks the others.",
		Example: "  penstock top\n  penstock top --once -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			switch {
			case err != nil:
				return err
			case f.n < 1:
				return settings.Usagef("--number is %d: want more than 0", f.n)
			case f.every < 100*time.Millisecond:
				return settings.Usagef("--every is %v: want 100ms or more", f.every)
			}
			return a.top(cmd.Context(), f, format)
		},
	}
	cmd.Flags().BoolVar(&f.once, "once", false, "show it once; so do all formats but table and wide")
	cmd.Flags().IntVarP(&f.n, "number", "n", 10, "topics and subscriptions to show, at most")
	cmd.Flags().DurationVar(&f.every, "every", 2*time.Second, "time between two looks")
	addOutputFlag(cmd)
	return cmd
}

func (a *app) top(ctx context.Context, f topFlags, format string) error {
	ask := func(ctx context.Context, c *client.Client) (activity, error) {
		ctx, done := a.opening(ctx)
		defer done()
		response, err := c.Admin().GetActivity(ctx, &brokerv1.GetActivityRequest{Top: uint32(f.n)})
		return activityOf(response), err
	}
	return a.connect(ctx, func(ctx context.Context, c *client.Client) error {
		now, err := ask(ctx, c)
		if err != nil {
			return err
		}
		if format != "table" && format != "wide" {
			v := view{kind: "Activity", single: true, rows: []row{{name: "activity", data: now}}}
			return v.print(a.out, format)
		}
		if f.once {
			return printFrame(a.out, now, time.Now(), "")
		}
		again := time.NewTicker(f.every)
		defer again.Stop()
		for trouble := ""; ; {
			if err := a.showFrame(now, trouble); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-again.C:
			}
			switch next, err := ask(ctx, c); {
			case err == nil:
				now, trouble = next, ""
			case ctx.Err() != nil:
				return nil // it was stopped
			default:
				trouble = lineBreaks.ReplaceAllString(err.Error(), " ")
			}
		}
	})
}

// showFrame replaces what is on a terminal, and is written behind what was there before elsewhere.
func (a *app) showFrame(now activity, trouble string) error {
	var frame strings.Builder
	if err := printFrame(&frame, now, time.Now(), trouble); err != nil {
		return err
	}
	text := frame.String() + "\n"
	if columns, rows, ok := terminalSize(a.out); ok {
		text = fitFrame(frame.String(), columns, rows)
	}
	_, err := io.WriteString(a.out, text)
	return err //nolint:wrapcheck // the terminal's
}

const (
	cursorHome = "\x1b[H"
	clearLine  = "\x1b[K"
	clearBelow = "\x1b[J"
)

// fitFrame cuts a frame to the size of a terminal, and has it written over the one before.
func fitFrame(frame string, columns, rows int) string {
	lines := strings.Split(strings.TrimRight(frame, "\n"), "\n")
	if len(lines) > rows {
		lines = lines[:rows]
	}
	var out strings.Builder
	out.WriteString(cursorHome)
	for i, line := range lines {
		if r := []rune(line); len(r) > columns {
			line = string(r[:columns])
		}
		if i > 0 {
			out.WriteString("\r\n")
		}
		out.WriteString(line)
		out.WriteString(clearLine)
	}
	out.WriteString(clearBelow)
	return out.String()
}

// terminalSize is that of the terminal behind w, if one is.
func terminalSize(w io.Writer) (columns, rows int, ok bool) {
	o, isOutlet := w.(*outlet)
	if isOutlet {
		w = o.to
	}
	f, isFile := w.(*os.File)
	if !isFile {
		return 0, 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		return 0, 0, false
	}
	return int(size.Col), int(size.Row), true
}

func printFrame(w io.Writer, now activity, at time.Time, trouble string) error {
	var all trafficRates
	var backlog uint64
	var unowned uint32
	for _, b := range now.Brokers {
		all.MessagesIn += b.MessagesIn
		all.BytesIn += b.BytesIn
		all.MessagesOut += b.MessagesOut
		all.BytesOut += b.BytesOut
		backlog += b.Backlog
		unowned = max(unowned, b.Unowned) // each sees all of them
	}
	fmt.Fprintf(w, "%s   in %s msg/s, %s/s   out %s msg/s, %s/s   backlog %d", at.Format(time.TimeOnly),
		rateText(all.MessagesIn), bytesText(uint64(all.BytesIn)), rateText(all.MessagesOut), bytesText(uint64(all.BytesOut)), backlog)
	if unowned > 0 {
		fmt.Fprintf(w, "   UNOWNED BUNDLES %d", unowned)
	}
	fmt.Fprintln(w)
	if trouble != "" {
		fmt.Fprintf(w, "as it was before: %s\n", trouble)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	section := func(columns ...string) { fmt.Fprintf(tw, "\n%s\n", strings.Join(columns, "\t")) }
	line := func(cells ...string) { fmt.Fprintln(tw, strings.Join(cells, "\t")) }
	section("BROKER", "UP", "IN msg/s", "IN/s", "OUT msg/s", "OUT/s", "BACKLOG", "BUNDLES", "TOPICS", "PRODUCERS", "CONSUMERS", "MEMORY")
	for _, b := range now.Brokers {
		if b.Error != "" {
			line(b.ID, b.Error)
			continue
		}
		line(b.ID, at.Sub(b.Started).Round(time.Second).String(), rateText(b.MessagesIn), bytesText(uint64(b.BytesIn)), rateText(b.MessagesOut),
			bytesText(uint64(b.BytesOut)), decimal(b.Backlog), decimal(uint64(b.Bundles)), decimal(uint64(b.Topics)), decimal(uint64(b.Producers)),
			decimal(uint64(b.Consumers)), percentText(b.PublishBytes, b.PublishLimitBytes))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	section("BOOKIE", "STATE", "ZONE", "USED", "FREE")
	for _, b := range now.Bookies {
		line(b.ID, b.State, orNone(b.Zone), percentText(b.TotalBytes-b.FreeBytes, b.TotalBytes), bytesText(b.FreeBytes))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	section("TOPIC", "IN msg/s", "IN/s", "OUT msg/s", "OUT/s", "STORED", "PRODUCERS", "CONSUMERS", "BROKER")
	for _, t := range now.Topics {
		line(t.Topic, rateText(t.MessagesIn), bytesText(uint64(t.BytesIn)), rateText(t.MessagesOut), bytesText(uint64(t.BytesOut)),
			bytesText(t.StoredBytes), decimal(uint64(t.Producers)), decimal(uint64(t.Consumers)), t.Broker)
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	section("SUBSCRIPTION", "TOPIC", "LAG", "BACKLOG", "BYTES", "UNACKED", "CONSUMERS", "WAITS FOR")
	for _, s := range now.Subscriptions {
		line(s.Subscription, s.Topic, lagText(s.LagSeconds), decimal(s.Backlog), bytesText(s.BacklogBytes), decimal(s.Unacked),
			decimal(uint64(s.Consumers)), s.WaitingReason)
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

func rateText(perSecond float64) string {
	if perSecond >= 10 || perSecond == 0 {
		return fmt.Sprintf("%.0f", perSecond)
	}
	return fmt.Sprintf("%.1f", perSecond)
}

func percentText(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100*float64(part)/float64(whole))
}

func lagText(seconds float64) string {
	if seconds == 0 {
		return "-"
	}
	d := time.Duration(seconds * float64(time.Second))
	if d >= 10*time.Second {
		return d.Round(time.Second).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

func ratesOf(t *brokerv1.Traffic) trafficRates {
	return trafficRates{MessagesIn: t.GetMessagesIn(), BytesIn: t.GetBytesIn(), MessagesOut: t.GetMessagesOut(), BytesOut: t.GetBytesOut()}
}

func activityOf(r *brokerv1.GetActivityResponse) activity {
	out := activity{Brokers: []brokerActivity{}, Bookies: []bookieActivity{}, Topics: []topicActivity{}, Subscriptions: []subscriptionActivity{}}
	for _, b := range r.GetBrokers() {
		out.Brokers = append(out.Brokers, brokerActivity{
			ID: b.GetId(), URL: b.GetUrl(), Error: b.GetError(), Started: b.GetStarted().AsTime(), trafficRates: ratesOf(b.GetTraffic()),
			Bundles: b.GetBundles(), Unowned: b.GetUnownedBundles(), Topics: b.GetTopics(), Producers: b.GetProducers(), Consumers: b.GetConsumers(),
			Backlog: b.GetBacklog(), PublishBytes: b.GetPublishBytes(), PublishLimitBytes: b.GetPublishLimitBytes(),
		})
	}
	for _, b := range r.GetBookies() {
		out.Bookies = append(out.Bookies, bookieActivity{b.GetId(), b.GetState(), b.GetZone(), b.GetFreeBytes(), b.GetTotalBytes()})
	}
	for _, t := range r.GetTopics() {
		out.Topics = append(out.Topics, topicActivity{
			Topic: t.GetTopic(), Broker: t.GetBroker(), trafficRates: ratesOf(t.GetTraffic()), StoredBytes: t.GetStoredBytes(),
			Producers: t.GetProducers(), Consumers: t.GetConsumers(),
		})
	}
	for _, s := range r.GetSubscriptions() {
		out.Subscriptions = append(out.Subscriptions, subscriptionActivity{
			s.GetTopic(), s.GetSubscription(), s.GetBroker(), s.GetLagSeconds(), s.GetBacklog(), s.GetBacklogBytes(), s.GetUnacked(),
			s.GetConsumers(), s.GetWaitingReason(),
		})
	}
	return out
}
