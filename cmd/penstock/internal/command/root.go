package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

const (
	defaultURL     = "penstock://127.0.0.1:7650"
	defaultTimeout = 30 * time.Second
	urlVariable    = "PENSTOCK_URL"
)

// app is what every command needs of its surroundings.
type app struct {
	version string
	in      io.Reader
	out     io.Writer // data
	err     io.Writer // progress, errors

	url     string        // --url
	timeout time.Duration // --timeout
}

// Main runs one command line and returns its exit code. It prints errors itself.
func Main(ctx context.Context, version string, args []string, in io.Reader, out, errOut io.Writer) int {
	a := &app{version: version, in: in, out: out, err: errOut}
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	if err == nil || (errors.Is(err, context.Canceled) && ctx.Err() != nil) {
		return exitOK // the person pressed Ctrl-C: what was to be done is done
	}
	fmt.Fprintf(errOut, "penstock: %v\n", err)
	return exitCode(err)
}

func (a *app) rootCommand() *cobra.Command {
	root := group("penstock", "Penstock: a message broker that keeps what it acknowledged")
	root.SilenceErrors = true
	root.SilenceUsage = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return settings.Usagef("%w%s (see %s --help)", err, suggestFlag(cmd, err), cmd.CommandPath())
	})
	root.PersistentFlags().StringVar(&a.url, "url", "",
		"cluster, as penstock://host:port[,host:port]; default $"+urlVariable+", the current context, "+defaultURL)
	root.PersistentFlags().DurationVar(&a.timeout, "timeout", defaultTimeout, "how long to wait for the cluster")
	root.AddCommand(
		a.produceCommand(), a.consumeCommand(),
		a.topicCommand(), a.subscriptionCommand(), a.namespaceCommand(), a.tenantCommand(),
		a.brokerCommand(), a.bookieCommand(), a.ledgerCommand(), a.segmentCommand(),
		a.standaloneCommand(), a.demoCommand(),
		a.contextCommand(), a.versionCommand(),
	)
	return root
}

// group is a command that only holds others. Without a subcommand it prints help; with an unknown one it names
// the nearest.
func group(use, short string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			var known []string
			for _, c := range cmd.Commands() {
				known = append(known, c.Name())
			}
			hint := ""
			if near := settings.Nearest(args[0], known); near != "" {
				hint = fmt.Sprintf("; did you mean %q?", near)
			}
			return settings.Usagef("unknown command %q for %q%s (see %s --help)", args[0], cmd.CommandPath(), hint, cmd.CommandPath())
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
}

func suggestFlag(cmd *cobra.Command, err error) string {
	name, ok := strings.CutPrefix(err.Error(), "unknown flag: --")
	if !ok {
		return ""
	}
	var known []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
	cmd.InheritedFlags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
	if near := settings.Nearest(name, known); near != "" {
		return fmt.Sprintf("; did you mean --%s?", near)
	}
	return ""
}

func noArgs(cmd *cobra.Command, args []string) error { return exactArgs(0)(cmd, args) }

func exactArgs(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return settings.Usagef("%s takes %d argument(s), not %d: %s", cmd.CommandPath(), n, len(args), cmd.UseLine())
		}
		return nil
	}
}

func maxArgs(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > n {
			return settings.Usagef("%s takes at most %d argument(s), not %d: %s", cmd.CommandPath(), n, len(args), cmd.UseLine())
		}
		return nil
	}
}

// clusterURL is --url, or $PENSTOCK_URL, or the current context's, or the default of a local cluster.
func (a *app) clusterURL() (string, error) {
	if a.url != "" {
		return a.url, nil
	}
	if url := os.Getenv(urlVariable); url != "" {
		return url, nil
	}
	c, err := loadContexts()
	if err != nil {
		return "", err
	}
	if c.Current != "" {
		if err := c.require(c.Current); err != nil {
			return "", err
		}
		return c.Clusters[c.Current].URL, nil
	}
	return defaultURL, nil
}

// connect opens the SDK's client for as long as f runs, f's errors first.
func (a *app) connect(ctx context.Context, f func(ctx context.Context, c *client.Client) error) (failed error) {
	url, err := a.clusterURL()
	if err != nil {
		return err
	}
	dial, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	c, err := client.Connect(dial, url)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.timeout)
		defer cancel()
		if err := c.Close(closing); err != nil && failed == nil {
			failed = err
		}
	}()
	return f(ctx, c)
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		RunE: func(_ *cobra.Command, _ []string) error {
			fmt.Fprintf(a.out, "penstock %s\n", a.version)
			return nil
		},
	}
}

// progress prints a line for a person, beside the data.
func (a *app) progress(format string, args ...any) { fmt.Fprintf(a.err, format+"\n", args...) }
