package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// options are the settings of the program.
type options struct {
	id                            string
	etcd                          []string
	cluster                       string
	listen, http, advertise       string
	replication                   meta.Replication
	autoCreate                    bool
	maxMessageKiB                 int64
	publishMiB, cacheMiB, readMiB int64
	rollMiB                       int64
	rollAge, housekeeping         time.Duration
	leaseTTL, shutdownTimeout     time.Duration
	logLevel, logFormat           string
}

// run is the program, apart from signals: it returns when ctx has ended and everything is stopped, or when it failed.
func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	var o options
	cmd := &cobra.Command{
		Use:           "broker",
		Short:         "Run a Penstock broker",
		Long:          "Run a Penstock broker, which serves topics and holds no data. Each flag is also an environment variable (--listen: PENSTOCK_LISTEN) and a key of the file that --config names.",
		Version:       version,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error { //nolint:contextcheck // the command has run's context
			if err := settings.Load(cmd.Flags()); err != nil {
				return err
			}
			if err := o.validate(); err != nil {
				return err
			}
			if settings.PrintWanted(cmd.Flags()) {
				return settings.Print(out, cmd.Flags())
			}
			return o.serve(cmd.Context(), errOut)
		},
	}
	o.addFlags(cmd)
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(errOut)
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &settings.UsageError{Err: err} })
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	fmt.Fprintf(errOut, "broker: %s\n", strings.ReplaceAll(err.Error(), "\n", " "))
	return exitCode(err)
}

func exitCode(err error) int {
	var usage *settings.UsageError
	var listen *broker.ListenError
	if errors.As(err, &usage) || errors.As(err, &listen) || errors.Is(err, meta.ErrInvalid) || strings.HasPrefix(err.Error(), "unknown command") {
		return exitUsage
	}
	return exitFailed
}

func (o *options) addFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.id, "broker-id", "", "name of this broker, unique among live ones; default: made of the advertised address")
	f.StringSliceVar(&o.etcd, "etcd", []string{"127.0.0.1:2379"}, "etcd endpoints")
	f.StringVar(&o.cluster, "cluster", "penstock", "name of the cluster in etcd")
	f.StringVar(&o.listen, "listen", ":7650", "address for clients and other brokers")
	f.StringVar(&o.http, "http", ":8080", "address of probes, metrics and profiles; empty: none")
	f.StringVar(&o.advertise, "advertise", "", "host, or host:port, under which clients and other brokers reach this broker")
	f.IntVar(&o.replication.Ensemble, "ensemble", 3, "bookies that a ledger is spread over, where a namespace says nothing")
	f.IntVar(&o.replication.WriteQuorum, "write-quorum", 3, "copies of each entry, where a namespace says nothing")
	f.IntVar(&o.replication.AckQuorum, "ack-quorum", 2, "copies that must be on disk before an entry counts, where a namespace says nothing")
	f.IntVar(&o.replication.MinZones, "min-zones", 0, "zones that those copies must span, where a namespace says nothing")
	f.BoolVar(&o.autoCreate, "auto-create-topics", true, "whether naming a topic creates it, where a namespace says nothing")
	f.Int64Var(&o.maxMessageKiB, "max-message-kib", 5<<10, "largest message")
	f.Int64Var(&o.publishMiB, "publish-mib", 256, "memory for batches on their way to bookies; producers wait beyond it")
	f.Int64Var(&o.cacheMiB, "cache-mib", 128, "memory for the newest entries, from which consumers that keep up are served")
	f.Int64Var(&o.readMiB, "read-mib", 64, "memory for entries read for consumers and not yet sent")
	f.Int64Var(&o.rollMiB, "roll-mib", 256, "size at which a ledger is closed and the next one opened")
	f.DurationVar(&o.rollAge, "roll-age", 4*time.Hour, "age at which a ledger is closed when something is appended")
	f.DurationVar(&o.housekeeping, "housekeeping-interval", 10*time.Second, "pause between two looks at retention, quotas and expiry")
	f.DurationVar(&o.leaseTTL, "lease-ttl", 5*time.Second, "after how long without a sign of life the broker counts as gone, if its peers have not noticed before")
	f.DurationVar(&o.shutdownTimeout, "shutdown-timeout", 10*time.Second, "how long to hand bundles over before stopping")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	f.String("zone", "", "zone that it stands in; brokers hold no data, so nothing is placed by it")
	f.String("host-label", "", "host that it stands on; likewise")
	settings.AddFlags(f)
}

func (o *options) validate() error {
	for name, v := range map[string]int64{
		"max-message-kib": o.maxMessageKiB, "publish-mib": o.publishMiB, "cache-mib": o.cacheMiB, "read-mib": o.readMiB,
		"roll-mib": o.rollMiB, "roll-age": int64(o.rollAge), "housekeeping-interval": int64(o.housekeeping), "shutdown-timeout": int64(o.shutdownTimeout),
	} {
		if v <= 0 || v > math.MaxInt64>>20 && !strings.Contains(name, "-age") && !strings.Contains(name, "-interval") && !strings.Contains(name, "-timeout") {
			return settings.Usagef("--%s is %d: want a number above 0", name, v)
		}
	}
	if o.maxMessageKiB > 64<<10 {
		return settings.Usagef("--max-message-kib is %d: want at most %d", o.maxMessageKiB, 64<<10)
	}
	if err := o.replication.Validate(); err != nil {
		return settings.Usagef("--ensemble, --write-quorum, --ack-quorum, --min-zones: %w", err)
	}
	if strings.Contains(o.cluster, "/") || o.cluster == "" {
		return settings.Usagef("--cluster is %q: want a name without /", o.cluster)
	}
	if len(o.etcd) == 0 {
		return settings.Usagef("--etcd is empty: name at least one endpoint")
	}
	if o.leaseTTL < time.Second {
		return settings.Usagef("--lease-ttl is %v: want at least 1s", o.leaseTTL)
	}
	if o.logFormat != "text" && o.logFormat != "json" {
		return settings.Usagef("--log-format is %q: want text or json", o.logFormat)
	}
	var l slog.Level
	if err := l.UnmarshalText([]byte(o.logLevel)); err != nil {
		return settings.Usagef("--log-level is %q: want debug, info, warn or error", o.logLevel)
	}
	return nil
}

func (o *options) logger(w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(o.logLevel)) // validated
	handler := &slog.HandlerOptions{Level: level}
	if o.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, handler))
	}
	return slog.New(slog.NewTextHandler(w, handler))
}

// serve runs the broker until ctx ends.
func (o *options) serve(ctx context.Context, errOut io.Writer) error {
	log := o.logger(errOut)
	client, err := clientv3.New(clientv3.Config{
		Endpoints: o.etcd, DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		MaxCallRecvMsgSize: math.MaxInt32, Logger: zap.NewNop(),
	})
	if err != nil {
		return settings.Usagef("--etcd is %q: %w", strings.Join(o.etcd, ","), err)
	}
	defer client.Close()
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	store := meta.New(client, o.cluster, log)
	if err := store.Register(registry); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	node, err := broker.StartNode(ctx, broker.NodeConfig{
		ID: o.id, Listen: o.listen, HTTPListen: o.http, Advertise: o.advertise, Version: version,
		Broker: broker.Config{
			Replication: o.replication, DisableAutoCreate: !o.autoCreate, MaxMessageSize: int(o.maxMessageKiB << 10),
			PublishBytes: o.publishMiB << 20, CacheBytes: o.cacheMiB << 20, ReadBytes: o.readMiB << 20,
			RollBytes: o.rollMiB << 20, RollAge: o.rollAge, HousekeepingEvery: o.housekeeping,
		},
	}, broker.NodeEnv{
		Meta: store, Log: log, Registerer: registry, Gatherer: registry,
		NewSession: func(ctx context.Context) (*lease.Session, error) {
			return lease.NewSession(ctx, client, o.leaseTTL, log)
		},
	})
	if err != nil {
		if ctx.Err() != nil && exitCode(err) == exitFailed {
			return nil // told to stop before it was up
		}
		return err
	}
	var failure error
	select {
	case <-ctx.Done():
		log.Info("handing over and stopping")
	case failure = <-node.Failed():
		log.Error("cannot go on", "error", failure)
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.shutdownTimeout)
	defer cancel()
	if err := node.Shutdown(stop); failure == nil && err != nil {
		failure = err
	}
	return failure
}
