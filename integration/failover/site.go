package failover

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	etcds   = 3
	bookies = 4 // three that are written to, and a spare
	brokers = 2

	pollInterval = 10 * time.Millisecond
	// patience bounds everything that the cluster has to bring about.
	patience = time.Minute
	// keeping is a namespace whose topics keep what was read, so that it can be read again.
	keeping = "public/keeping"
	cluster = "/penstock/penstock/" // where the cluster's records begin in etcd
)

// site is a cluster, a client, and what watches them.
type site struct {
	ctx    context.Context //nolint:containedctx // the measurement's, with an end
	c      *process.Cluster
	client *client.Client
	views  map[*process.Process]*grpc.ClientConn // each broker's own
	events timeline
	probes probes
	rng    *rand.Rand

	etcd     *clientv3.Client
	cancel   context.CancelFunc
	watching sync.WaitGroup

	topic  string        // of the kind that is struck
	bundle string        // of the topic, once its owner was asked for
	run    *workload.Run // of the kind
}

// settle starts a cluster in a directory, and everything around it. The caller closes it, also after an error.
func settle(ctx context.Context, programs, dir string) (s *site, err error) {
	s = &site{views: make(map[*process.Process]*grpc.ClientConn), rng: rand.New(rand.NewPCG(1, 2))} //nolint:gosec // chooses victims
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.c, err = process.New(ctx, process.Config{
		Programs: programs, Dir: dir, Etcds: etcds, Bookies: bookies, Brokers: brokers,
		// How full this machine's disk is must not matter.
		BookieArgs: []string{"--low-watermark", "0.995", "--high-watermark", "0.998"},
	})
	if err != nil {
		return s, err
	}
	starting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.c.StartAll(starting); err != nil {
		return s, err
	}
	for _, p := range s.c.Brokers {
		// A broker that comes back is asked again at once.
		s.views[p], err = grpc.NewClient(p.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: pollInterval, Multiplier: 1.2, MaxDelay: 100 * time.Millisecond}, MinConnectTimeout: time.Second}))
		if err != nil {
			return s, fmt.Errorf("connect to %s: %w", p.Name, err)
		}
	}
	if s.etcd, err = clientv3.New(clientv3.Config{Endpoints: s.c.Endpoints(), Logger: zap.NewNop()}); err != nil {
		return s, fmt.Errorf("connect to etcd: %w", err)
	}
	if s.client, err = client.Connect(ctx, s.c.URL(), client.WithLogger(s.events.clientLog())); err != nil {
		return s, err
	}
	s.watching.Go(func() { s.events.follow(s.ctx, s.etcd, cluster) })
	s.watching.Go(func() { s.probes.clock(s.ctx) })
	s.watching.Go(func() { _ = s.probes.disk(s.ctx, dir) }) // without it, the page says 0
	if err := s.whole(); err != nil {
		return s, err
	}
	_, err = s.client.Admin().CreateNamespace(starting, &brokerv1.CreateNamespaceRequest{
		Namespace: keeping, Policies: &brokerv1.Policies{RetentionTime: durationpb.New(365 * 24 * time.Hour)},
	})
	return s, err
}

// close ends everything that settle started.
func (s *site) close() {
	s.cancel()
	if s.client != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), time.Second)
		defer cancel()
		_ = s.client.Close(ctx) // with whatever a failure left
	}
	s.watching.Wait()
	if s.etcd != nil {
		_ = s.etcd.Close()
	}
	for _, v := range s.views {
		_ = v.Close()
	}
	if s.c != nil {
		s.c.Close()
	}
}

func (s *site) hold(d time.Duration) error {
	select {
	case <-s.ctx.Done():
		return s.ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// until waits for what the cluster brings about. An error on the way is told only when it does not.
func (s *site) until(what string, ok func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	for {
		done, err := ok(ctx)
		if done {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited in vain until %s: %w", what, errors.Join(ctx.Err(), err))
		case <-time.After(pollInterval):
		}
	}
}

// whole waits until nothing of the cluster is missing: each process is ready, and each broker knows all of them.
func (s *site) whole() error {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	for _, p := range s.c.All() {
		if err := p.WaitReady(ctx); err != nil {
			return err
		}
	}
	for p, view := range s.views {
		admin := brokerv1.NewAdminClient(view)
		err := s.until(p.Name+" knows every broker and every bookie", func(ctx context.Context) (bool, error) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			known, err := admin.ListBrokers(ctx, &brokerv1.ListBrokersRequest{})
			if err != nil || len(known.GetBrokers()) != brokers {
				return false, err
			}
			all, err := admin.ListBookies(ctx, &brokerv1.ListBookiesRequest{})
			writable := 0
			for _, b := range all.GetBookies() {
				if b.GetState() == "WRITABLE" {
					writable++
				}
			}
			return writable == bookies, err
		})
		if err != nil {
			return err
		}
	}
	_, err := s.c.EtcdLeader(ctx)
	return err
}

// flows waits until so many more messages are acknowledged and received.
func (s *site) flows(more uint64) error {
	_, acked, received := s.run.Counts()
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	if err := s.run.AwaitAcknowledged(ctx, acked+more); err != nil {
		return err
	}
	return s.run.AwaitReceived(ctx, received+more)
}

// owner is the broker that serves the topic.
func (s *site) owner() (p *process.Process, err error) {
	err = s.until("a broker serves "+s.topic, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		t, err := s.client.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: s.topic})
		p, s.bundle = s.c.Broker(t.GetBrokerUrl()), t.GetBundle()
		return err == nil && p != nil, err
	})
	return p, err
}

// ensemble are the bookies that the topic is being written to; none while it has no open ledger.
func (s *site) ensemble(ctx context.Context) (found []*process.Process, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	all, err := s.client.Admin().ListLedgers(ctx, &brokerv1.ListLedgersRequest{Topic: s.topic})
	for _, l := range all.GetLedgers() {
		if n := len(l.GetFragments()); l.GetState() == "OPEN" && n > 0 {
			found = nil
			for _, slot := range l.GetFragments()[n-1].GetSlots() {
				found = append(found, s.c.Bookie(slot.GetBookie()))
			}
		}
	}
	return found, err
}

// bookie is one of them.
func (s *site) bookie() (p *process.Process, err error) {
	err = s.until("there is an open ledger of "+s.topic, func(ctx context.Context) (bool, error) {
		all, err := s.ensemble(ctx)
		if err != nil || len(all) == 0 || slices.Contains(all, nil) {
			return false, err
		}
		p = all[s.rng.IntN(len(all))]
		return true, nil
	})
	return p, err
}

func (s *site) etcdLeader() (*process.Process, error) {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	return s.c.EtcdLeader(ctx)
}

// programDirectory is where `make build` leaves the programs.
const programDirectory = "../../bin"

func logsOf(all []*process.Process) string {
	var text strings.Builder
	for _, p := range all {
		if _, err := os.Stat(p.Log); err == nil {
			fmt.Fprintf(&text, "the end of the log of %s:\n%s\n", p.Name, p.LogTail())
		}
	}
	return text.String()
}
