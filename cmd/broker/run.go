package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/pflag"

	"github.com/penstock-mq/penstock/cmd/internal/daemon"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// maxMessageKiB bounds the largest message that can be configured; bookies take entries of about that size.
const maxMessageKiB = 64 << 10

// options are the settings of the program.
type options struct {
	daemon.Common

	id, listen, http, advertise   string
	replication                   meta.Replication
	autoCreate                    bool
	maxMessageKiB                 int64
	publishMiB, cacheMiB, readMiB int64
	rollMiB                       int64
	rollAge, housekeepingInterval time.Duration
	repairDelay                   time.Duration
	repairMiB                     int64
}

// run is the program, apart from signals.
func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	var o options
	return daemon.Program{
		Name: "broker", Short: "Run a Penstock broker", Long: "Run a Penstock broker, which serves topics and holds no data.",
		Version: version, Common: &o.Common, AddFlags: o.addFlags, Validate: o.validate, Serve: o.serve, ExitCode: exitCode,
	}.Run(ctx, args, out, errOut)
}

// exitRefused says that another process has the broker's id.
const exitRefused = 5

func exitCode(err error) int {
	var listen *broker.ListenError
	var taken *ownership.IDTakenError
	switch {
	case errors.As(err, &listen):
		return daemon.ExitUsage
	case errors.As(err, &taken):
		return exitRefused
	}
	return daemon.ExitFailed
}

func (o *options) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.id, "broker-id", "", "name of this broker, unique among live ones; default: made of the advertised address")
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
	f.DurationVar(&o.housekeepingInterval, "housekeeping-interval", 10*time.Second, "pause between two looks at retention, quotas and expiry")
	f.DurationVar(&o.repairDelay, "repair-delay", 10*time.Minute, "how long a bookie is away before its copies are made anew elsewhere")
	f.Int64Var(&o.repairMiB, "repair-mib", 100, "how much is copied each second to repair ledgers, in the whole cluster")
	f.String("zone", "", "zone that it stands in; brokers hold no data, so nothing is placed by it")
	f.String("host-label", "", "host that it stands on; likewise")
}

func (o *options) validate() error {
	if err := daemon.Advertised(o.advertise); err != nil {
		return err
	}
	if err := daemon.Positive(map[string]int64{
		"max-message-kib": o.maxMessageKiB, "publish-mib": o.publishMiB, "cache-mib": o.cacheMiB, "read-mib": o.readMiB, "repair-mib": o.repairMiB,
		"roll-mib": o.rollMiB, "roll-age": int64(o.rollAge), "housekeeping-interval": int64(o.housekeepingInterval),
	}); err != nil {
		return err
	}
	if o.repairDelay < 0 {
		return settings.Usagef("--repair-delay is %v: want 0 or more", o.repairDelay)
	}
	if o.maxMessageKiB > maxMessageKiB {
		return settings.Usagef("--max-message-kib is %d: want at most %d", o.maxMessageKiB, maxMessageKiB)
	}
	if err := o.replication.Validate(); err != nil {
		return settings.Usagef("--ensemble, --write-quorum, --ack-quorum, --min-zones: %w", err)
	}
	return nil
}

// delay is the setting: none is negative there, since 0 is the default.
func delay(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

// serve runs the broker until ctx ends.
func (o *options) serve(ctx context.Context, env daemon.Env) error {
	node, err := broker.StartNode(ctx, broker.NodeConfig{
		ID: o.id, Listen: o.listen, HTTPListen: o.http, Advertise: o.advertise, Version: version,
		Broker: broker.Config{
			Replication: o.replication, DisableAutoCreate: !o.autoCreate, MaxMessageSize: int(o.maxMessageKiB << 10),
			PublishBytes: o.publishMiB << 20, CacheBytes: o.cacheMiB << 20, ReadBytes: o.readMiB << 20,
			RollBytes: o.rollMiB << 20, RollAge: o.rollAge, HousekeepingEvery: o.housekeepingInterval,
			Repair: repair.Config{Delay: delay(o.repairDelay), BytesPerSecond: o.repairMiB << 20},
		},
	}, broker.NodeEnv{
		Meta: env.Meta, Log: env.Log, Registerer: env.Registry, Gatherer: env.Registry, NewSession: env.NewSession,
	})
	if err != nil {
		if ctx.Err() != nil && exitCode(err) == daemon.ExitFailed {
			return nil // told to stop before it was up
		}
		return err //nolint:wrapcheck // it says what the broker could not do
	}
	return o.Await(ctx, env.Log, node.Failed(), node.Shutdown)
}
