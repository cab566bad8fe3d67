// Package daemon is what the server programs have in common: how they are started, what they are told about etcd and
// logs, and how they end.
//
//	var o options                                        // embeds daemon.Common
//	return daemon.Program{Name: "broker", …, Common: &o.Common, AddFlags: o.addFlags, Validate: o.validate, Serve: o.serve}.
//		Run(ctx, os.Args[1:], os.Stdout, os.Stderr)      // the exit code
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/measure"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// The exit codes that all programs share. A program may add its own.
const (
	ExitOK     = 0
	ExitFailed = 1
	ExitUsage  = 2
)

// Common are the settings that every server program has.
type Common struct {
	Etcd                      []string
	Cluster                   string
	LeaseTTL, ShutdownTimeout time.Duration
	LogLevel, LogFormat       string
}

// Env is what Serve works with. Run closes it.
type Env struct {
	Log      *slog.Logger
	Meta     *meta.Store
	Registry *prometheus.Registry
	// NewSession makes a session of the configured TTL.
	NewSession func(ctx context.Context) (*lease.Session, error)
}

// Program is a server program. All fields but ExitCode are required.
type Program struct {
	Name, Short, Long, Version string
	Common                     *Common
	// AddFlags adds the program's own flags, Validate checks them: a *settings.UsageError says what is wrong.
	AddFlags func(f *pflag.FlagSet)
	Validate func() error
	// Serve runs until ctx ends or something fails.
	Serve func(ctx context.Context, env Env) error
	// ExitCode, if set, knows codes for errors of the program's own; ExitFailed is none.
	ExitCode func(error) int
}

// Run is the program, apart from signals: it returns when ctx has ended and everything is stopped, or when it failed,
// and prints why on one line.
func (p Program) Run(ctx context.Context, args []string, out, errOut io.Writer) int {
	cmd := &cobra.Command{
		Use: p.Name, Short: p.Short, Version: p.Version, Args: noArgs, SilenceErrors: true, SilenceUsage: true,
		Long: p.Long + " Each flag is also an environment variable (--log-level: PENSTOCK_LOG_LEVEL) and a key of the file that --config names.",
		RunE: func(cmd *cobra.Command, _ []string) error { //nolint:contextcheck // the command has Run's context
			if err := settings.Load(cmd.Flags()); err != nil {
				return err
			}
			if err := p.Common.validate(); err != nil {
				return err
			}
			if err := p.Validate(); err != nil {
				return err
			}
			if settings.PrintWanted(cmd.Flags()) {
				return settings.Print(out, cmd.Flags())
			}
			return p.serve(cmd.Context(), errOut)
		},
	}
	cmd.Flags().SortFlags = false
	p.Common.addFlags(cmd.Flags())
	p.AddFlags(cmd.Flags())
	settings.AddFlags(cmd.Flags())
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(errOut)
	cmd.SetFlagErrorFunc(settings.FlagError)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	fmt.Fprintf(errOut, "%s: %s\n", p.Name, strings.ReplaceAll(err.Error(), "\n", " "))
	return p.exitCode(err)
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return settings.Usagef("unexpected argument %q: settings are flags", args[0])
	}
	return nil
}

func (p Program) exitCode(err error) int {
	var usage *settings.UsageError
	if errors.As(err, &usage) || errors.Is(err, meta.ErrInvalid) {
		return ExitUsage
	}
	if p.ExitCode != nil {
		return p.ExitCode(err)
	}
	return ExitFailed
}

func (c *Common) addFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&c.Etcd, "etcd", []string{"127.0.0.1:2379"}, "etcd endpoints")
	f.StringVar(&c.Cluster, "cluster", "penstock", "name of the cluster in etcd")
	f.DurationVar(&c.LeaseTTL, "lease-ttl", 5*time.Second, "after how long without a sign of life this process counts as gone, if nobody has noticed before")
	f.DurationVar(&c.ShutdownTimeout, "shutdown-timeout", 10*time.Second, "how long to finish in good order after a signal")
	f.StringVar(&c.LogLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&c.LogFormat, "log-format", "text", "text or json")
}

func (c *Common) validate() error {
	var level slog.Level
	switch {
	case len(c.Etcd) == 0:
		return settings.Usagef("--etcd is empty: name at least one endpoint")
	case c.Cluster == "" || strings.Contains(c.Cluster, "/"):
		return settings.Usagef("--cluster is %q: want a name without /", c.Cluster)
	case c.LeaseTTL < time.Second:
		return settings.Usagef("--lease-ttl is %v: want at least 1s", c.LeaseTTL)
	case c.ShutdownTimeout <= 0:
		return settings.Usagef("--shutdown-timeout is %v: want more than 0", c.ShutdownTimeout)
	case c.LogFormat != "text" && c.LogFormat != "json":
		return settings.Usagef("--log-format is %q: want text or json", c.LogFormat)
	case level.UnmarshalText([]byte(c.LogLevel)) != nil:
		return settings.Usagef("--log-level is %q: want debug, info, warn or error", c.LogLevel)
	}
	return nil
}

func (c *Common) logger(w io.Writer) (*slog.Logger, *Logs) {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.LogLevel)) // validated
	return NewLogger(w, level, c.LogFormat)
}

// reconnect is how etcd is looked for while it is away. gRPC's default waits longer the longer it was, up to two
// minutes; whoever waits for etcd would wait that much longer than etcd was away.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
	MinConnectTimeout: 3 * time.Second,
}

// serve connects to etcd and runs the program. Being told to stop before it was up is no failure.
func (p Program) serve(ctx context.Context, errOut io.Writer) error {
	log, logs := p.Common.logger(errOut)
	client, err := clientv3.New(clientv3.Config{
		Endpoints: p.Common.Etcd, DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		MaxCallRecvMsgSize: math.MaxInt32, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(reconnect)},
	})
	if err != nil {
		return settings.Usagef("--etcd is %q: %w", strings.Join(p.Common.Etcd, ","), err)
	}
	defer client.Close()
	registry := prometheus.NewRegistry()
	registry.MustRegister(logs, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	store := meta.New(client, p.Common.Cluster, log)
	if err := errors.Join(store.Register(registry), measure.RegisterBuild(registry, p.Version)); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	return p.Serve(ctx, Env{
		Log: log, Meta: store, Registry: registry,
		NewSession: func(ctx context.Context) (*lease.Session, error) {
			return lease.NewSession(ctx, client, p.Common.LeaseTTL, log)
		},
	})
}

// Await runs a part that has started, until ctx ends or the part fails, and then stops it within ShutdownTimeout.
func (c *Common) Await(ctx context.Context, log *slog.Logger, failed <-chan error, shutdown func(context.Context) error) error {
	var failure error
	select {
	case <-ctx.Done():
		log.Info("stopping")
	case failure = <-failed:
		log.Error("cannot go on", slog.Any("error", failure))
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.ShutdownTimeout)
	defer cancel()
	if err := shutdown(stop); failure == nil && err != nil {
		failure = err
	}
	return failure
}

// Advertised checks what --advertise says: a host, or a host and a port; empty is right.
func Advertised(value string) error {
	host := value
	if h, port, err := net.SplitHostPort(value); err == nil {
		host = h
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return settings.Usagef("--advertise is %q: want a port above 0 after the colon, or none", value)
		}
	}
	if value == "" || net.ParseIP(host) != nil {
		return nil
	}
	odd := strings.ContainsFunc(host, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-._", r))
	})
	if host == "" || odd {
		return settings.Usagef("--advertise is %q: want a host name or address, with or without :port", value)
	}
	return nil
}

// Positive checks numbers that must be above 0, by the names of their flags; those of sizes in MiB or KiB must fit
// into bytes.
func Positive(values map[string]int64) error {
	for name, v := range values {
		scaled := strings.HasSuffix(name, "-mib") || strings.HasSuffix(name, "-kib") || strings.Contains(name, "-mib-")
		if v <= 0 || scaled && v > math.MaxInt64>>20 {
			return settings.Usagef("--%s is %d: want a number above 0", name, v)
		}
	}
	return nil
}
