package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// The exit codes.
const (
	exitOK      = 0
	exitFailed  = 1
	exitUsage   = 2
	exitRefused = 5
)

// options are the settings of the program.
type options struct {
	id, dataDir                          string
	etcd                                 []string
	cluster                              string
	listen, grpcListen, http, advertise  string
	zone, hostLabel                      string
	leaseTTL                             time.Duration
	segmentMiB, inFlightMiB              int64
	cacheMiB, indexMiB, compactMiBPerSec int64
	lowWatermark, highWatermark          float64
	gcInterval, gcGrace                  time.Duration
	shutdownTimeout                      time.Duration
	logLevel, logFormat                  string
}

// run is the program, apart from signals: it returns when ctx has ended and everything is stopped, or when it failed.
func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	var o options
	cmd := &cobra.Command{
		Use:           "bookie",
		Short:         "Run a Penstock storage node",
		Long:          "Run a Penstock storage node: one data directory on one disk. Each flag is also an environment variable (--data-dir: PENSTOCK_DATA_DIR) and a key of the file that --config names.",
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
	fmt.Fprintf(errOut, "bookie: %s\n", strings.ReplaceAll(err.Error(), "\n", " "))
	return exitCode(err)
}

func exitCode(err error) int {
	var usage *settings.UsageError
	var listen *bookie.ListenError
	var identity *bookie.IdentityError
	switch {
	case errors.As(err, &usage), errors.As(err, &listen), errors.Is(err, meta.ErrInvalid), strings.HasPrefix(err.Error(), "unknown command"):
		return exitUsage
	case errors.As(err, &identity):
		return exitRefused
	}
	return exitFailed
}

func (o *options) addFlags(cmd *cobra.Command) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.id, "bookie-id", host, "name of this bookie, unique in the cluster and for good")
	f.StringVar(&o.dataDir, "data-dir", "bookie-data", "directory of the data, on a disk of its own")
	f.StringSliceVar(&o.etcd, "etcd", []string{"127.0.0.1:2379"}, "etcd endpoints")
	f.StringVar(&o.cluster, "cluster", "penstock", "name of the cluster in etcd")
	f.StringVar(&o.listen, "listen", ":7651", "address of the data path")
	f.StringVar(&o.grpcListen, "grpc-listen", ":7652", "address of control calls; empty: none")
	f.StringVar(&o.http, "http", ":8081", "address of probes, metrics and profiles; empty: none")
	f.StringVar(&o.advertise, "advertise", "", "host, or host:port of the data path, under which others reach this bookie")
	f.StringVar(&o.zone, "zone", "", "zone that it stands in; placement spreads over zones")
	f.StringVar(&o.hostLabel, "host-label", host, "host that it stands on; no two copies go to one host")
	f.DurationVar(&o.leaseTTL, "lease-ttl", 5*time.Second, "after how long without a sign of life the bookie counts as gone")
	f.Int64Var(&o.segmentMiB, "segment-mib", 256, "size of a segment file")
	f.Int64Var(&o.inFlightMiB, "in-flight-mib", 128, "adds read and not yet stored, over all connections")
	f.Int64Var(&o.cacheMiB, "cache-mib", 64, "newest entries kept in memory")
	f.Int64Var(&o.indexMiB, "index-mib", 64, "indexes of older segments kept in memory")
	f.Int64Var(&o.compactMiBPerSec, "compact-mib-per-second", 32, "how fast compaction reads")
	f.Float64Var(&o.lowWatermark, "low-watermark", 0.90, "use of the disk from which on no new ledgers are taken")
	f.Float64Var(&o.highWatermark, "high-watermark", 0.95, "use of the disk from which on only recovery writes")
	f.DurationVar(&o.gcInterval, "gc-interval", time.Minute, "pause between two looks for ledgers to delete")
	f.DurationVar(&o.gcGrace, "gc-grace", 10*time.Minute, "how long a ledger that went elsewhere is kept")
	f.DurationVar(&o.shutdownTimeout, "shutdown-timeout", 10*time.Second, "how long to answer what was received before stopping")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	settings.AddFlags(f)
}

func (o *options) validate() error {
	positive := func(name string, v int64) error {
		if v <= 0 || v > math.MaxInt64>>20 {
			return settings.Usagef("--%s is %d: want a number above 0", name, v)
		}
		return nil
	}
	required := func(name, v string) error {
		if v == "" {
			return settings.Usagef("--%s is empty", name)
		}
		return nil
	}
	if o.lowWatermark <= 0 || o.lowWatermark > o.highWatermark || o.highWatermark > 1 {
		return settings.Usagef("--low-watermark is %v and --high-watermark %v: want 0 < low ≤ high ≤ 1", o.lowWatermark, o.highWatermark)
	}
	if strings.Contains(o.cluster, "/") {
		return settings.Usagef("--cluster is %q: want a name without /", o.cluster)
	}
	if len(o.etcd) == 0 {
		return settings.Usagef("--etcd is empty: name at least one endpoint")
	}
	if o.logFormat != "text" && o.logFormat != "json" {
		return settings.Usagef("--log-format is %q: want text or json", o.logFormat)
	}
	if o.leaseTTL < time.Second {
		return settings.Usagef("--lease-ttl is %v: want at least 1s", o.leaseTTL)
	}
	if o.segmentMiB > 4095 {
		return settings.Usagef("--segment-mib is %d: want at most 4095", o.segmentMiB)
	}
	return firstOf(
		required("bookie-id", o.id), required("data-dir", o.dataDir), required("cluster", o.cluster), required("listen", o.listen),
		required("host-label", o.hostLabel),
		positive("segment-mib", o.segmentMiB), positive("in-flight-mib", o.inFlightMiB), positive("cache-mib", o.cacheMiB),
		positive("index-mib", o.indexMiB), positive("compact-mib-per-second", o.compactMiBPerSec),
		positive("gc-interval", int64(o.gcInterval)), positive("gc-grace", int64(o.gcGrace)),
		positive("shutdown-timeout", int64(o.shutdownTimeout)), validLevel(o.logLevel),
	)
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func validLevel(s string) error {
	var l slog.Level
	if err := l.UnmarshalText([]byte(s)); err != nil {
		return settings.Usagef("--log-level is %q: want debug, info, warn or error", s)
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

// serve runs the bookie until ctx ends or its disk fails.
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
	b, err := bookie.Start(ctx, bookie.Config{
		ID: o.id, DataDir: o.dataDir, Listen: o.listen, GRPCListen: o.grpcListen, HTTPListen: o.http,
		Advertise: o.advertise, Zone: o.zone, HostLabel: o.hostLabel, Version: version,
		Store: ledgerstore.Config{
			SegmentSize: o.segmentMiB << 20, CacheBytes: o.cacheMiB << 20, IndexBytes: o.indexMiB << 20,
			LowRatio: o.lowWatermark, HighRatio: o.highWatermark, CompactBytesPerSecond: o.compactMiBPerSec << 20,
		},
		Server: bookie.ServerConfig{InFlightBytes: o.inFlightMiB << 20},
		GC:     bookie.GCConfig{Interval: o.gcInterval, Grace: o.gcGrace},
	}, bookie.Env{
		Meta: store, FS: vfs.OS(), Log: log, Registerer: registry, Gatherer: registry,
		NewSession: func(ctx context.Context) (*lease.Session, error) {
			return lease.NewSession(ctx, client, o.leaseTTL, log)
		},
	})
	if err != nil {
		if ctx.Err() != nil && !isRefusal(err) {
			return nil // told to stop before it was up
		}
		return err
	}
	var failure error
	select {
	case <-ctx.Done():
		log.Info("stopping")
	case failure = <-b.Failed():
		log.Error("cannot go on", slog.Any("error", failure))
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.shutdownTimeout)
	defer cancel()
	if err := b.Shutdown(stop); failure == nil && err != nil {
		failure = err
	}
	return failure
}

func isRefusal(err error) bool { return exitCode(err) != exitFailed }
