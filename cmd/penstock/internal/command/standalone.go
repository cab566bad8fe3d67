package command

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/penstock-mq/penstock/cmd/internal/daemon"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/standalone"
)

const shutdownTimeout = 10 * time.Second

type standaloneFlags struct {
	bookies               int
	dataDir, listen, http string
	logLevel              string
}

func (a *app) standaloneCommand() *cobra.Command {
	var f standaloneFlags
	cmd := &cobra.Command{
		Use: "standalone", Short: "Run a whole cluster in this process: etcd, bookies and a broker", Args: noArgs,
		Example: "  penstock standalone\n  penstock standalone --bookies 3 --data-dir /var/lib/penstock",
		RunE: func(cmd *cobra.Command, _ []string) error {
			own := cmd.LocalFlags() // --url and --timeout are about a cluster elsewhere
			if err := settings.Load(own); err != nil {
				return err
			}
			level, err := f.validate()
			if err != nil {
				return err
			}
			if settings.PrintWanted(own) {
				return settings.Print(a.out, own)
			}
			return a.standalone(cmd.Context(), f, level)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.IntVar(&f.bookies, "bookies", 1, "number of bookies: 1 keeps one copy of each message, 3 keeps three")
	flags.StringVar(&f.dataDir, "data-dir", "penstock-data", "directory of all data")
	flags.StringVar(&f.listen, "listen", "127.0.0.1:7650", "address for clients")
	flags.StringVar(&f.http, "http", "127.0.0.1:8080", "address of probes, metrics and profiles")
	flags.StringVar(&f.logLevel, "log-level", "warn", "debug, info, warn or error")
	settings.AddFlags(flags)
	return cmd
}

func (f standaloneFlags) validate() (level slog.Level, err error) {
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return level, settings.Usagef("--log-level is %q: want debug, info, warn or error", f.logLevel)
	}
	if f.bookies < 1 || f.bookies > 9 {
		return level, settings.Usagef("--bookies is %d: want 1 to 9", f.bookies)
	}
	if f.dataDir == "" {
		return level, settings.Usagef("--data-dir is empty")
	}
	for name, addr := range map[string]string{"listen": f.listen, "http": f.http} {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return level, settings.Usagef("--%s is %q: want host:port: %w", name, addr, err)
		}
	}
	return level, nil
}

func (a *app) standalone(ctx context.Context, f standaloneFlags, level slog.Level) error {
	log, logs := daemon.NewLogger(a.err, level, "text")
	started := time.Now()
	c, err := standalone.Start(ctx, standalone.Config{
		Dir: f.dataDir, Bookies: f.bookies, Listen: f.listen, HTTPListen: f.http, Version: a.version,
		Collectors: []prometheus.Collector{logs},
	}, log)
	if err != nil {
		if ctx.Err() != nil && exitCode(err) == exitFailed {
			return nil // told to stop before it was up
		}
		return err //nolint:wrapcheck // it says what could not be started
	}
	where := "no TLS"
	if host, _, _ := net.SplitHostPort(f.listen); net.ParseIP(host).IsLoopback() || host == "localhost" {
		where = "no TLS, loopback only"
	}
	fmt.Fprintf(a.out, "penstock %s ready in %.1fs    %s, data in %s\n  broker    %s\n  http      %s    (/metrics, /livez, /readyz, /debug/pprof)\n",
		a.version, time.Since(started).Seconds(), where, f.dataDir, c.URL(), c.HTTP())
	quiet, end := context.WithCancel(ctx)
	var giving sync.WaitGroup
	giving.Go(func() { giveMemoryBack(quiet) })
	defer giving.Wait()
	defer end()
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-c.Failed():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := c.Close(stop); failure == nil && err != nil {
		failure = err
	}
	return failure
}
