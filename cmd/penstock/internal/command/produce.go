package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

// maxLine bounds a line of standard input; a broker's own limit is usually lower and is told by the broker.
const maxLine = 64 << 20

type produceFlags struct {
	messages    []string
	key         string
	rate        float64
	count       int64
	size        int
	ack         string
	compression string
	name        string
	dedup       bool
	quiet       bool
}

var ackLevels = map[string]client.AckLevel{
	"none": client.AckNone, "one": client.AckOne, "quorum": client.AckQuorum, "all": client.AckAll,
}

func (a *app) produceCommand() *cobra.Command {
	var f produceFlags
	cmd := &cobra.Command{
		Use: "produce TOPIC", Short: "Publish messages: lines of standard input, -m, or --count messages of --size bytes", Args: exactArgs(1),
		Example: "  echo hello | penstock produce orders\n  penstock produce orders -m one -m two --key k1\n  penstock produce orders --count 100000 --size 1024 --rate 5000",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.produce(cmd.Context(), args[0], f)
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVarP(&f.messages, "message", "m", nil, "a message; may be given more than once; instead of standard input")
	flags.StringVar(&f.key, "key", "", "key of every message")
	flags.Float64Var(&f.rate, "rate", 0, "at most so many messages a second; 0 is as fast as they are acknowledged")
	flags.Int64Var(&f.count, "count", 0, "publish so many generated messages instead of standard input")
	flags.IntVar(&f.size, "size", 100, "size in bytes of a generated message")
	flags.StringVar(&f.ack, "ack", "quorum", "what an acknowledgement means: none, one, quorum, all")
	flags.StringVar(&f.compression, "compression", "none", "none, lz4, zlib, zstd, snappy")
	flags.StringVar(&f.name, "producer-name", "", "name of the producer; default: one that the broker chooses")
	flags.BoolVar(&f.dedup, "dedup", false, "keep each (producer name, sequence id) at most once; needs --producer-name")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "do not say how many were published")
	registerFlagCompletion(cmd, "ack", []string{"none", "one", "quorum", "all"})
	registerFlagCompletion(cmd, "compression", []string{"none", "lz4", "zlib", "zstd", "snappy"})
	return cmd
}

func (f produceFlags) options() ([]client.ProducerOption, error) {
	ack, ok := ackLevels[f.ack]
	if !ok {
		return nil, settings.Usagef("--ack: %q is none of none, one, quorum, all", f.ack)
	}
	compression, err := client.ParseCompression(f.compression)
	if err != nil {
		return nil, settings.Usagef("--compression: %w", err)
	}
	if f.count > 0 && len(f.messages) > 0 {
		return nil, settings.Usagef("--count and --message exclude each other")
	}
	if f.count < 0 || f.size < 0 || !(f.rate >= 0) {
		return nil, settings.Usagef("--count, --size and --rate are not below 0")
	}
	if f.dedup && f.name == "" {
		return nil, settings.Usagef("--dedup needs --producer-name: it tells this producer's sequence ids from others'")
	}
	options := []client.ProducerOption{client.WithAckLevel(ack), client.WithCompression(compression)}
	if f.name != "" {
		options = append(options, client.WithProducerName(f.name))
	}
	if f.dedup {
		options = append(options, client.WithDedup())
	}
	return options, nil
}

// values yields what to publish.
func (f produceFlags) values(in io.Reader) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		switch {
		case f.count > 0:
			for i := range f.count {
				if !yield(generated(i, f.size), nil) {
					return
				}
			}
		case len(f.messages) > 0:
			for _, m := range f.messages {
				if !yield([]byte(m), nil) {
					return
				}
			}
		default:
			lines := bufio.NewScanner(in)
			lines.Buffer(nil, maxLine)
			for lines.Scan() {
				if !yield([]byte(lines.Text()), nil) {
					return
				}
			}
			if err := lines.Err(); err != nil {
				yield(nil, fmt.Errorf("read standard input: %w", err))
			}
		}
	}
}

// generated is a message that tells its number, filled up to size bytes.
func generated(number int64, size int) []byte {
	value := make([]byte, 0, size)
	value = strconv.AppendInt(value, number, 10)
	for len(value) < size {
		value = append(value, '.')
	}
	return value
}

func (a *app) produce(ctx context.Context, topic string, f produceFlags) error {
	options, err := f.options()
	if err != nil {
		return err
	}
	return a.connect(ctx, func(ctx context.Context, c *client.Client) error {
		opening, done := a.opening(ctx)
		p, err := c.Producer(opening, topic, options...)
		done()
		if err != nil {
			return err
		}
		sent, start := int64(0), time.Now()
		err = a.publishAll(ctx, p, f, &sent)
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.timeout)
		defer cancel()
		if closeErr := p.Close(closing); closeErr != nil && err == nil {
			err = closeErr
		}
		if !f.quiet {
			elapsed := time.Since(start)
			a.progress("%d acknowledged in %.2f s (%.0f a second)", sent, elapsed.Seconds(), float64(sent)/max(elapsed.Seconds(), 1e-9))
		}
		return err
	})
}

// await waits for the acknowledgement of the oldest message that has none, as long as --timeout allows.
func (a *app) await(ctx context.Context, r *client.Receipt) error {
	select {
	case <-r.Done(): // most are, when their turn comes
	default:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, a.timeout, fmt.Errorf("nothing was acknowledged for %v (penstock bookie list, and the broker's log, tell more)", a.timeout))
		defer cancel()
	}
	_, err := r.Wait(ctx)
	return err //nolint:wrapcheck // it says what was published where
}

// publishAll keeps the order of acknowledgements, so that sent counts a prefix of what was given. The window of
// receipts is bounded by the producer's own back-pressure.
func (a *app) publishAll(ctx context.Context, p *client.Producer, f produceFlags, sent *int64) error {
	limiter := rate.NewLimiter(rate.Inf, 1)
	if f.rate > 0 {
		limiter.SetLimit(rate.Limit(f.rate))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	receipts := make(chan *client.Receipt, 10_000)
	waited := make(chan error, 1)
	go func() {
		waited <- func() error {
			for r := range receipts {
				if err := a.await(ctx, r); err != nil {
					cancel(err) // no more is published after a failure
					for range receipts {
					}
					return err
				}
				*sent++
			}
			return nil
		}()
	}()
	var failed error
	for value, err := range f.values(&interruptible{ctx: ctx, in: a.in}) {
		if err == nil {
			err = limiter.Wait(ctx)
		}
		if err != nil {
			failed = err
			break
		}
		receipts <- p.PublishAsync(ctx, &client.Message{Value: value, Key: f.key})
	}
	close(receipts)
	if err := <-waited; err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return failed
}
