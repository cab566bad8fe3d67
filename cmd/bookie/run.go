package main

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/penstock-mq/penstock/cmd/internal/daemon"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// exitRefused: the data directory is not what it should be.
const exitRefused = 5

// maxSegmentMiB is what fits the four bytes of a record's place.
const maxSegmentMiB = 4095

// options are the settings of the program.
type options struct {
	daemon.Common

	id, dataDir                          string
	listen, grpcListen, http, advertise  string
	zone, hostLabel                      string
	segmentMiB, inFlightMiB              int64
	cacheMiB, indexMiB, compactMiBPerSec int64
	scrubMiBPerSec                       int64
	lowWatermark, highWatermark          float64
	gcInterval, gcGrace                  time.Duration
	syncInterval                         time.Duration
	syncMessages                         int
}

// run is the program, apart from signals.
func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	var o options
	return daemon.Program{
		Name: "bookie", Short: "Run a Penstock storage node", Long: "Run a Penstock storage node: one data directory on one disk.",
		Version: version, Common: &o.Common, AddFlags: o.addFlags, Validate: o.validate, Serve: o.serve, ExitCode: exitCode,
	}.Run(ctx, args, out, errOut)
}

func exitCode(err error) int {
	var listen *bookie.ListenError
	var identity *bookie.IdentityError
	switch {
	case errors.As(err, &listen):
		return daemon.ExitUsage
	case errors.As(err, &identity):
		return exitRefused
	}
	return daemon.ExitFailed
}

func (o *options) addFlags(f *pflag.FlagSet) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	f.StringVar(&o.id, "bookie-id", host, "name of this bookie, unique in the cluster and for good")
	f.StringVar(&o.dataDir, "data-dir", "bookie-data", "directory of the data, on a disk of its own")
	f.StringVar(&o.listen, "listen", ":7651", "address of the data path")
	f.StringVar(&o.grpcListen, "grpc-listen", ":7652", "address of control calls; empty: none")
	f.StringVar(&o.http, "http", ":8081", "address of probes, metrics and profiles; empty: none")
	f.StringVar(&o.advertise, "advertise", "", "host, or host:port of the data path, under which others reach this bookie")
	f.StringVar(&o.zone, "zone", "", "zone that it stands in; placement spreads over zones")
	f.StringVar(&o.hostLabel, "host-label", host, "host that it stands on; no two copies go to one host")
	f.Int64Var(&o.segmentMiB, "segment-mib", 256, "size of a segment file")
	f.Int64Var(&o.inFlightMiB, "in-flight-mib", 128, "adds read and not yet stored, over all connections")
	f.Int64Var(&o.cacheMiB, "cache-mib", 64, "newest entries kept in memory")
	f.Int64Var(&o.indexMiB, "index-mib", 64, "indexes of older segments kept in memory")
	f.Int64Var(&o.compactMiBPerSec, "compact-mib-per-second", 32, "how fast compaction reads")
	f.Int64Var(&o.scrubMiBPerSec, "scrub-mib", 8, "how fast, each second, what is stored is read again to find damage; 0: not at all")
	f.Float64Var(&o.lowWatermark, "low-watermark", 0.90, "use of the disk from which on no new ledgers are taken")
	f.Float64Var(&o.highWatermark, "high-watermark", 0.95, "use of the disk from which on only recovery writes")
	f.DurationVar(&o.syncInterval, "sync-interval", 0, "how long acknowledged entries may be lost to a power cut; 0: never, they are synced first")
	f.IntVar(&o.syncMessages, "sync-messages", 0, "with --sync-interval: how many of them; 0: any number")
	f.DurationVar(&o.gcInterval, "gc-interval", time.Minute, "pause between two looks for ledgers to delete")
	f.DurationVar(&o.gcGrace, "gc-grace", 10*time.Minute, "how long a ledger that went elsewhere is kept")
}

func (o *options) validate() error {
	if err := daemon.Advertised(o.advertise); err != nil {
		return err
	}
	for name, v := range map[string]string{"bookie-id": o.id, "data-dir": o.dataDir, "listen": o.listen, "host-label": o.hostLabel} {
		if v == "" {
			return settings.Usagef("--%s is empty", name)
		}
	}
	if o.lowWatermark <= 0 || o.lowWatermark > o.highWatermark || o.highWatermark > 1 {
		return settings.Usagef("--low-watermark is %v and --high-watermark %v: want 0 < low ≤ high ≤ 1", o.lowWatermark, o.highWatermark)
	}
	if o.syncInterval < 0 || o.syncMessages < 0 || o.syncMessages > 0 && o.syncInterval == 0 {
		return settings.Usagef("--sync-interval is %v and --sync-messages %d: neither is negative, and messages need an interval", o.syncInterval, o.syncMessages)
	}
	if o.scrubMiBPerSec < 0 {
		return settings.Usagef("--scrub-mib is %d: want 0 or more", o.scrubMiBPerSec)
	}
	if o.segmentMiB > maxSegmentMiB {
		return settings.Usagef("--segment-mib is %d: want at most %d", o.segmentMiB, maxSegmentMiB)
	}
	return daemon.Positive(map[string]int64{
		"segment-mib": o.segmentMiB, "in-flight-mib": o.inFlightMiB, "cache-mib": o.cacheMiB, "index-mib": o.indexMiB,
		"compact-mib-per-second": o.compactMiBPerSec, "gc-interval": int64(o.gcInterval), "gc-grace": int64(o.gcGrace),
	})
}

// scrubRate is the setting in bytes: off is negative there, since 0 is the default.
func scrubRate(mib int64) int64 {
	if mib == 0 {
		return -1
	}
	return mib << 20
}

// serve runs the bookie until ctx ends or its disk fails.
func (o *options) serve(ctx context.Context, env daemon.Env) error {
	b, err := bookie.Start(ctx, bookie.Config{
		ID: o.id, DataDir: o.dataDir, Listen: o.listen, GRPCListen: o.grpcListen, HTTPListen: o.http,
		Advertise: o.advertise, Zone: o.zone, HostLabel: o.hostLabel, Version: version,
		ScrubBytesPerSecond: scrubRate(o.scrubMiBPerSec),
		Store: ledgerstore.Config{
			Sync:        ledgerstore.SyncPolicy{Interval: o.syncInterval, Messages: o.syncMessages},
			SegmentSize: o.segmentMiB << 20, CacheBytes: o.cacheMiB << 20, IndexBytes: o.indexMiB << 20,
			LowRatio: o.lowWatermark, HighRatio: o.highWatermark, CompactBytesPerSecond: o.compactMiBPerSec << 20,
		},
		Server: bookie.ServerConfig{InFlightBytes: o.inFlightMiB << 20},
		GC:     bookie.GCConfig{Interval: o.gcInterval, Grace: o.gcGrace},
	}, bookie.Env{
		Meta: env.Meta, FS: vfs.OS(), Log: env.Log, Registerer: env.Registry, Gatherer: env.Registry, NewSession: env.NewSession,
	})
	if err != nil {
		if ctx.Err() != nil && exitCode(err) == daemon.ExitFailed {
			return nil // told to stop before it was up
		}
		return err //nolint:wrapcheck // it says what the bookie could not do
	}
	return o.Await(ctx, env.Log, b.Failed(), b.Shutdown)
}
