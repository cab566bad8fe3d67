package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

const (
	defaultURL     = "penstock://127.0.0.1:7650"
	defaultTimeout = 30 * time.Second
	sayAfter       = 2 * time.Second // how long to wait for the cluster in silence
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

// Main runs one command line and returns its exit code. It prints errors itself, each on one line. Commands that go on
// until they are stopped return nil when ctx ends; of the others that is a failure, whatever they had done by then.
func Main(ctx context.Context, version string, args []string, in io.Reader, out, errOut io.Writer) int {
	data := &outlet{to: out}
	a := &app{version: version, in: in, out: data, err: errOut}
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	if err == nil && data.failed != nil {
		err = fmt.Errorf("print: %w", data.failed)
	}
	if err == nil {
		return exitOK
	}
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		err = &interruptedError{err}
	}
	fmt.Fprintf(errOut, "penstock: %s\n", lineBreaks.ReplaceAllString(err.Error(), " "))
	return exitCode(err)
}

var lineBreaks = regexp.MustCompile(`\s*\n\s*`)

// interruptedError is what became of a command that was stopped before it was done.
type interruptedError struct{ err error }

func (e *interruptedError) Error() string { return "interrupted: " + e.err.Error() }

// outlet remembers that data could not be written, for all who print and do not ask.
type outlet struct {
	to     io.Writer
	failed error
}

// Write passes p on until a write has failed.
func (o *outlet) Write(p []byte) (int, error) {
	if o.failed != nil {
		return 0, o.failed
	}
	n, err := o.to.Write(p)
	o.failed = err
	return n, err //nolint:wrapcheck // whoever prints wraps it
}

func (a *app) rootCommand() *cobra.Command {
	root := group("penstock", "Penstock: a message broker that keeps what it acknowledged")
	root.SilenceErrors = true
	root.SilenceUsage = true
	root.SetFlagErrorFunc(settings.FlagError)
	root.Version = a.version
	root.SetOut(a.out) // before completion, which keeps it
	root.SetVersionTemplate("penstock {{.Version}}\n")
	root.PersistentFlags().StringVar(&a.url, "url", "",
		"cluster, as penstock://host:port[,host:port]; default $"+urlVariable+", the current context, "+defaultURL)
	root.PersistentFlags().DurationVar(&a.timeout, "timeout", defaultTimeout, "how long to wait for the cluster")
	root.AddCommand(
		a.produceCommand(), a.consumeCommand(),
		a.topicCommand(), a.subscriptionCommand(), a.namespaceCommand(), a.tenantCommand(),
		a.topCommand(), a.brokerCommand(), a.bookieCommand(), a.ledgerCommand(), a.segmentCommand(), a.operationCommand(),
		a.standaloneCommand(), a.demoCommand(), a.verifyCommand(), a.benchCommand(),
		a.contextCommand(), a.versionCommand(),
	)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "help":
			c.Args = func(_ *cobra.Command, args []string) error { return helpWanted(root, args) }
		case "completion":
			c.Args, c.RunE = subcommandWanted, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	return root
}

// group is a command that only holds others. Without a subcommand it prints help; with an unknown one it names
// the nearest.
func group(use, short string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short,
		Args: subcommandWanted,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
}

// helpWanted finds out whether there is such a command to help with.
func helpWanted(root *cobra.Command, args []string) error {
	cmd, rest, err := root.Find(args)
	if err == nil && cmd.HasSubCommands() {
		err = subcommandWanted(cmd, rest)
	}
	return err
}

func subcommandWanted(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var known []string
	for _, c := range cmd.Commands() {
		known = append(known, c.Name())
	}
	return settings.Usagef("unknown command %q for %q%s (see %s --help)", args[0], cmd.CommandPath(), didYouMean(args[0], known), cmd.CommandPath())
}

// didYouMean is the end of an error about a name that is none of known.
func didYouMean(name string, known []string) string {
	if near := settings.Nearest(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
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
	if a.timeout <= 0 {
		return settings.Usagef("--timeout is %v: want more than 0", a.timeout)
	}
	c, err := client.Connect(ctx, url)
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
	return a.explain(ctx, c, url, f(ctx, c))
}

// explain adds to an error what a person can do about it: the name that was meant, or where the cluster's address
// comes from.
func (a *app) explain(ctx context.Context, c *client.Client, url string, err error) error {
	var failed *client.Error
	if !errors.As(err, &failed) || ctx.Err() != nil {
		return err
	}
	hint := ""
	switch {
	case failed.Code == client.CodeNotFound && failed.Topic != "":
		hint = a.nearTopic(ctx, c, failed.Topic)
	case failed.Code == client.CodeTimeout && strings.Contains(err.Error(), "connection error"): // gRPC has only text for it
		hint = fmt.Sprintf("; is %s the cluster? (--url, $%s or penstock context says so; penstock standalone starts one)", url, urlVariable)
	}
	if hint == "" {
		return err
	}
	return fmt.Errorf("%w%s", err, hint)
}

// nearTopic names the topic that was meant, if name is not one itself.
func (a *app) nearTopic(ctx context.Context, c *client.Client, name string) string {
	topic, err := topicname.Parse(name)
	if err != nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	response, err := c.Admin().ListTopics(ctx, &brokerv1.ListTopicsRequest{Namespace: topic.NamespaceName()})
	if err != nil {
		return ""
	}
	known := make([]string, len(response.GetTopics()))
	for i, t := range response.GetTopics() {
		known[i] = strings.TrimPrefix(t.GetTopic(), topic.NamespaceName()+"/")
	}
	if slices.Contains(known, topic.Topic) {
		return "" // something else is missing
	}
	return didYouMean(topic.Topic, known)
}

// opening bounds by --timeout what needs the cluster's answer, and says after a while that it waits. The caller calls done
// once there is an answer, or none.
func (a *app) opening(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	answered := a.unlessSoon("no answer yet; trying for %v", a.timeout)
	return ctx, func() {
		answered()
		cancel()
	}
}

// unlessSoon says something after a while. Once the stop that it returns has returned, it says nothing any more.
func (a *app) unlessSoon(format string, args ...any) (stop func()) {
	said := make(chan struct{})
	patience := time.AfterFunc(sayAfter, func() {
		defer close(said)
		a.progress(format, args...)
	})
	return sync.OnceFunc(func() {
		if !patience.Stop() {
			<-said
		}
	})
}

func (a *app) versionCommand() *cobra.Command {
	type version struct {
		Version string `json:"version"`
	}
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			v := view{kind: "Version", single: true, plain: true, rows: []row{{
				name: a.version, cells: []string{"penstock " + a.version}, data: version{a.version},
			}}}
			return v.print(a.out, format)
		},
	}
	addOutputFlag(cmd)
	return cmd
}

// progress prints a line for a person, beside the data.
func (a *app) progress(format string, args ...any) { fmt.Fprintf(a.err, format+"\n", args...) }
