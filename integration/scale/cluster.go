package scale

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	bookies = 3
	brokers = 2

	pollInterval = 5 * time.Millisecond
	// patience bounds what the cluster has to bring about for one topic, and for all of them.
	patience = 3 * time.Minute
)

// site is the cluster that is measured.
type site struct {
	ctx    context.Context //nolint:containedctx // the measurement's, with an end
	cfg    config
	c      *process.Cluster
	client *client.Client
	etcd   *clientv3.Client
	rng    *rand.Rand
	told   func(format string, args ...any)
	out    measured
}

// settle starts a cluster in a directory. The caller closes it, also after an error.
func settle(ctx context.Context, programs, dir string, cfg config, told func(string, ...any)) (s *site, err error) {
	s = &site{ctx: ctx, cfg: cfg, told: told, rng: rand.New(rand.NewPCG(1, 2)), out: measured{cfg: cfg}} //nolint:gosec // chooses topics
	s.c, err = process.New(ctx, process.Config{
		Programs: programs, Dir: dir, Bookies: bookies, Brokers: brokers,
		// How full this machine's disk is must not matter.
		BookieArgs: []string{"--low-watermark", "0.995", "--high-watermark", "0.998"},
		EtcdArgs:   []string{"--enable-pprof"}, // which has it collect its garbage
	})
	if err != nil {
		return s, err
	}
	starting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.c.StartAll(starting); err != nil {
		return s, err
	}
	if s.etcd, err = clientv3.New(clientv3.Config{Endpoints: s.c.Endpoints(), Logger: zap.NewNop()}); err != nil {
		return s, fmt.Errorf("connect to etcd: %w", err)
	}
	s.client, err = client.Connect(ctx, s.c.URL())
	return s, err
}

func (s *site) close() {
	if s.client != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), time.Second)
		defer cancel()
		_ = s.client.Close(ctx) // with whatever a failure left
	}
	if s.etcd != nil {
		_ = s.etcd.Close()
	}
	if s.c != nil {
		s.c.Close()
	}
}

// limited bounds one step.
func (s *site) limited(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.ctx, d)
}

func (s *site) hold(d time.Duration) error {
	select {
	case <-s.ctx.Done():
		return s.ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// owners tells which broker serves each topic, by what one broker knows.
func (s *site) owners(ctx context.Context, names []string) (map[*process.Process][]int, error) {
	conn, err := grpc.NewClient(s.c.Brokers[0].Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", s.c.Brokers[0].Name, err)
	}
	defer conn.Close()
	at := make([]*process.Process, len(names))
	err = each(ctx, len(names), func(ctx context.Context, i int) error {
		a, err := brokerv1.NewLookupClient(conn).LookupTopic(ctx, &brokerv1.LookupTopicRequest{Topic: names[i]})
		at[i] = s.c.Broker(a.GetBrokerUrl())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look %d topics up: %w", len(names), err)
	}
	out := make(map[*process.Process][]int)
	for i, p := range at {
		out[p] = append(out[p], i)
	}
	return out, nil
}

// cost looks at the cluster once it has come to rest.
func (s *site) cost() (cost, error) {
	if err := s.hold(s.cfg.rest); err != nil {
		return cost{}, err
	}
	ctx, cancel := s.limited(patience)
	defer cancel()
	return costOf(ctx, s.c)
}

// idleCPU looks at the CPU time of a cluster that nobody uses, for a while.
func (s *site) idleCPU() (out span, err error) {
	if out.from, err = cpuNow(s.c); err != nil {
		return out, err
	}
	if err := s.hold(s.cfg.quiet); err != nil {
		return out, err
	}
	out.to, err = cpuNow(s.c)
	return out, err
}
