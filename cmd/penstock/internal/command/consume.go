package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

var subscriptionTypes = map[string]client.SubscriptionType{
	"exclusive": client.Exclusive, "failover": client.Failover, "shared": client.Shared,
}

type consumeFlags struct {
	subscription string
	from         string
	count        int64
	kind         string
	output       string
	wait         time.Duration
}

type consumedMessage struct {
	Topic       string            `json:"topic"`
	Offset      uint64            `json:"offset"`
	Position    string            `json:"position"`
	Partition   int               `json:"partition"`
	Key         string            `json:"key,omitempty"`
	Value       string            `json:"value"`
	Properties  map[string]string `json:"properties,omitempty"`
	Redelivered int               `json:"redelivered"`
}

func (a *app) consumeCommand() *cobra.Command {
	var f consumeFlags
	cmd := &cobra.Command{
		Use: "consume TOPIC -s SUBSCRIPTION", Short: "Print messages and acknowledge each once it is printed", Args: exactArgs(1),
		Example: "  penstock consume orders -s demo --from earliest -n 1",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.consume(cmd.Context(), args[0], f)
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&f.subscription, "subscription", "s", "", "subscription; created if it does not exist")
	flags.StringVar(&f.from, "from", "latest", "where a new subscription starts: "+startForms)
	flags.Int64VarP(&f.count, "count", "n", 0, "end after so many messages; 0 is never")
	flags.StringVar(&f.kind, "type", "exclusive", "exclusive, failover or shared")
	flags.StringVarP(&f.output, "output", "o", "value", "what to print of a message: value, or jsonl for everything")
	flags.DurationVar(&f.wait, "wait", 0, "end when nothing has come for so long; 0 is never")
	registerFlagCompletion(cmd, "type", []string{"exclusive", "failover", "shared"})
	registerFlagCompletion(cmd, "output", []string{"value", "jsonl"})
	return cmd
}

func (f consumeFlags) options() ([]client.SubscribeOption, error) {
	kind, ok := subscriptionTypes[f.kind]
	if !ok {
		known := []string{"exclusive", "failover", "shared"}
		return nil, settings.Usagef("--type: unknown subscription type %q: want %s%s", f.kind, strings.Join(known, ", "), didYouMean(f.kind, known))
	}
	if f.subscription == "" {
		return nil, settings.Usagef("a subscription is needed: -s NAME")
	}
	if !slices.Contains([]string{"value", "jsonl"}, f.output) {
		return nil, settings.Usagef("--output: %q is neither value nor jsonl", f.output)
	}
	if f.count < 0 || f.wait < 0 {
		return nil, settings.Usagef("--count and --wait are not below 0")
	}
	start, err := parseStart(f.from, time.Now())
	if err != nil {
		return nil, settings.Usagef("--from: %w", err)
	}
	return []client.SubscribeOption{client.WithType(kind), client.WithStart(start)}, nil
}

func (a *app) consume(ctx context.Context, topic string, f consumeFlags) error {
	options, err := f.options()
	if err != nil {
		return err
	}
	return a.connect(ctx, func(ctx context.Context, c *client.Client) error {
		opening, done := a.opening(ctx)
		consumer, err := c.Subscribe(opening, topic, f.subscription, options...)
		done()
		if err != nil {
			return err
		}
		last, err := a.print(ctx, consumer, topic, f)
		closing, done := a.confirming(ctx)
		defer done()
		if last != nil {
			err = ack(ctx, closing, last)
		}
		if closeErr := consumer.Close(closing); closeErr != nil && (err == nil || client.OutcomeUnknown(err) && client.OutcomeUnknown(closeErr)) {
			err = closeErr // of all that was acknowledged, not only the last
		}
		if client.OutcomeUnknown(err) && closing.Err() != nil {
			return &unconfirmedError{err}
		}
		return err
	})
}

// confirming bounds by --timeout, whatever becomes of ctx, the wait for the confirmation of acknowledgements, and says after
// a while that it waits. The caller calls done.
func (a *app) confirming(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), a.timeout,
		fmt.Errorf("nothing was confirmed for %v (penstock bookie list, and the broker's log, tell more)", a.timeout))
	confirmed := a.unlessSoon("not everything is acknowledged yet; trying for %v", a.timeout)
	return ctx, func() {
		confirmed()
		cancel()
	}
}

// ack acknowledges d and waits for that, until either context ends.
func ack(stopped, bound context.Context, d *client.Delivery) error {
	ctx, cancel := context.WithCancelCause(bound)
	defer cancel(nil)
	defer context.AfterFunc(stopped, func() { cancel(context.Cause(stopped)) })()
	return d.Ack(ctx) //nolint:wrapcheck // it says what was acknowledged where
}

// unconfirmedError says that messages were printed whose acknowledgements nobody confirmed in time.
type unconfirmedError struct{ err error }

// Error says which, and why.
func (e *unconfirmedError) Error() string {
	return "messages may come again: " + e.err.Error()
}

// Unwrap returns the client's error.
func (e *unconfirmedError) Unwrap() error { return e.err }

// print prints messages and acknowledges them, the last of -n excepted, which it returns.
func (a *app) print(ctx context.Context, consumer *client.Consumer, topic string, f consumeFlags) (last *client.Delivery, _ error) {
	for n := int64(0); f.count == 0 || n < f.count; n++ {
		d, err := receive(ctx, consumer, f.wait)
		if err != nil {
			if errors.Is(err, errNothingCame) || ctx.Err() != nil && f.count == 0 {
				return nil, nil // it ends by being stopped
			}
			return nil, err
		}
		if err := a.printMessage(topic, d, f.output); err != nil {
			return nil, err
		}
		if n+1 == f.count {
			return d, nil // it is to be durable before the command ends
		}
		d.AckAsync()
	}
	return nil, nil
}

var errNothingCame = errors.New("nothing came")

func receive(ctx context.Context, consumer *client.Consumer, wait time.Duration) (*client.Delivery, error) {
	if wait == 0 {
		return consumer.Receive(ctx)
	}
	waiting, cancel := context.WithTimeoutCause(ctx, wait, errNothingCame)
	defer cancel()
	d, err := consumer.Receive(waiting)
	if err != nil && errors.Is(context.Cause(waiting), errNothingCame) {
		return nil, errNothingCame
	}
	return d, err
}

func (a *app) printMessage(topic string, d *client.Delivery, output string) error {
	if output == "value" {
		if _, err := fmt.Fprintf(a.out, "%s\n", d.Value); err != nil {
			return fmt.Errorf("print message: %w", err)
		}
		return nil
	}
	err := json.NewEncoder(a.out).Encode(consumedMessage{
		Topic: topic, Offset: uint64(d.ID.Offset), Position: d.ID.Position.String(), Partition: d.ID.Partition,
		Key: d.Key, Value: string(d.Value), Properties: d.Properties, Redelivered: d.RedeliveryCount,
	})
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("print message: %w", err)
	}
	return err
}
