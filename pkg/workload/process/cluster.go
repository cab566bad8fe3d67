package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Config says what to start.
type Config struct {
	// Programs is the directory of etcd, bookie and broker, as `make build` leaves them.
	Programs string
	// Dir holds data and logs. It must exist; the caller removes it.
	Dir string
	// Etcds, Bookies and Brokers count processes; 0 means 1, 3 and 1.
	Etcds, Bookies, Brokers int
	// BookieArgs, BrokerArgs and EtcdArgs are further flags.
	BookieArgs, BrokerArgs, EtcdArgs []string
	// BookieFlags, when set, gives further flags of one bookie.
	BookieFlags func(index int) []string
	// BookieDir, when set, places the data of a bookie; "" keeps the default place.
	BookieDir func(index int) string
	// Place, when set, says where a process, by its name, runs: the address of its host, and the command that starts a
	// program there, nil for none. It is the loopback interface otherwise.
	Place func(name string) (host string, command []string)
	// Etcd, when set, gives the etcd endpoints that a broker or a bookie, by its name, is told; nil keeps the real ones.
	Etcd func(name string, endpoints []string) []string
}

// Cluster is etcd, bookies and brokers. The slices do not change; their processes may be killed and started.
type Cluster struct {
	Etcds, Bookies, Brokers []*Process

	spawn  *spawner
	others []*Process
}

// Start starts a cluster and waits until every process is ready. After an error nothing is left running.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	c, err := New(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := c.StartAll(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// New prepares a cluster without starting anything: each process has its ports and its directories. The caller closes it.
func New(ctx context.Context, cfg Config) (*Cluster, error) {
	orDefault := func(n, d int) int {
		if n == 0 {
			return d
		}
		return n
	}
	for _, name := range []string{"etcd", "bookie", "broker"} {
		if _, err := os.Stat(filepath.Join(cfg.Programs, name)); err != nil {
			return nil, fmt.Errorf("find %s: %w: run `make build` first", name, err)
		}
	}
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "logs"), 0o700); err != nil {
		return nil, fmt.Errorf("prepare cluster: %w", err)
	}
	c := &Cluster{spawn: newSpawner()}
	err := errors.Join(
		c.addEtcds(ctx, cfg, orDefault(cfg.Etcds, 1)),
		c.addBookies(ctx, cfg, orDefault(cfg.Bookies, 3)),
		c.addBrokers(ctx, cfg, orDefault(cfg.Brokers, 1)),
	)
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("prepare cluster: %w", err)
	}
	return c, nil
}

func (c *Cluster) process(cfg Config, program, name, addr, http string, args ...string) *Process {
	p := &Process{
		Name: name, Addr: addr, HTTP: http, Log: filepath.Join(cfg.Dir, "logs", name+".log"),
		spawn: c.spawn, program: filepath.Join(cfg.Programs, program), args: args, ready: "http://" + http + "/readyz",
	}
	if cfg.Place != nil {
		_, p.command = cfg.Place(name)
	}
	return p
}

// addrs returns the host of a process, and addresses there.
func (cfg Config) addrs(ctx context.Context, name string, n int) (host string, out []string, err error) {
	host = loopback
	if cfg.Place != nil {
		host, _ = cfg.Place(name)
	}
	for range n {
		port, err := freePort(ctx)
		if err != nil {
			return "", nil, err
		}
		out = append(out, net.JoinHostPort(host, port))
	}
	return host, out, nil
}

func (c *Cluster) addEtcds(ctx context.Context, cfg Config, n int) error {
	var members []string
	var a [][]string
	for i := range n {
		name := fmt.Sprintf("etcd-%d", i+1)
		_, its, err := cfg.addrs(ctx, name, 2)
		if err != nil {
			return err
		}
		a = append(a, its)
		members = append(members, fmt.Sprintf("%s=http://%s", name, its[1]))
	}
	for i := range n {
		name, client, peer := fmt.Sprintf("etcd-%d", i+1), a[i][0], a[i][1]
		args := []string{
			"--name", name, "--data-dir", filepath.Join(cfg.Dir, name),
			"--listen-client-urls", "http://" + client, "--advertise-client-urls", "http://" + client,
			"--listen-peer-urls", "http://" + peer, "--initial-advertise-peer-urls", "http://" + peer,
			"--initial-cluster", strings.Join(members, ","), "--initial-cluster-token", filepath.Base(cfg.Dir),
			"--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "warn",
		}
		p := c.process(cfg, "etcd", name, client, client, append(args, cfg.EtcdArgs...)...)
		c.Etcds = append(c.Etcds, p)
	}
	return nil
}

func (c *Cluster) addBookies(ctx context.Context, cfg Config, n int) error {
	for i := range n {
		name := fmt.Sprintf("bookie-%d", i+1)
		host, a, err := cfg.addrs(ctx, name, 3)
		if err != nil {
			return err
		}
		dir := filepath.Join(cfg.Dir, name)
		if cfg.BookieDir != nil {
			if d := cfg.BookieDir(i); d != "" {
				dir = d
			}
		}
		args := []string{
			"--bookie-id", name, "--host-label", name, "--data-dir", dir, "--etcd", strings.Join(cfg.endpoints(c, name), ","),
			"--listen", a[0], "--grpc-listen", a[1], "--http", a[2], "--advertise", host,
		}
		args = append(args, cfg.BookieArgs...)
		if cfg.BookieFlags != nil {
			args = append(args, cfg.BookieFlags(i)...)
		}
		p := c.process(cfg, "bookie", name, a[0], a[2], args...)
		p.Control = a[1]
		c.Bookies = append(c.Bookies, p)
	}
	return nil
}

func (c *Cluster) addBrokers(ctx context.Context, cfg Config, n int) error {
	for i := range n {
		name := fmt.Sprintf("broker-%d", i+1)
		host, a, err := cfg.addrs(ctx, name, 2)
		if err != nil {
			return err
		}
		args := []string{
			"--broker-id", name, "--etcd", strings.Join(cfg.endpoints(c, name), ","), "--listen", a[0], "--http", a[1], "--advertise", host,
		}
		c.Brokers = append(c.Brokers, c.process(cfg, "broker", name, a[0], a[1], append(args, cfg.BrokerArgs...)...))
	}
	return nil
}

// endpoints are what a process is told.
func (cfg Config) endpoints(c *Cluster, name string) []string {
	endpoints := c.Endpoints()
	if cfg.Etcd != nil {
		if e := cfg.Etcd(name, endpoints); e != nil {
			return e
		}
	}
	return endpoints
}

// EtcdLeader returns the etcd that leads the others, by what it says itself.
func (c *Cluster) EtcdLeader(ctx context.Context) (*Process, error) {
	for {
		for _, p := range c.Etcds {
			if v, err := p.Metric(ctx, "etcd_server_is_leader"); err == nil && v == 1 {
				return p, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("find etcd's leader: %w", ctx.Err())
		case <-time.After(pollInterval):
		}
	}
}

// Endpoints returns etcd's client addresses.
func (c *Cluster) Endpoints() []string {
	var out []string
	for _, p := range c.Etcds {
		out = append(out, p.Addr)
	}
	return out
}

// URL names every broker, for the SDK.
func (c *Cluster) URL() string {
	var out []string
	for _, p := range c.Brokers {
		out = append(out, p.Addr)
	}
	return "penstock://" + strings.Join(out, ",")
}

// All returns every process: etcd, then bookies, then brokers.
func (c *Cluster) All() []*Process { return slices.Concat(c.Etcds, c.Bookies, c.Brokers) }

// Broker returns the broker with this URL, nil if there is none.
func (c *Cluster) Broker(url string) *Process {
	for _, p := range c.Brokers {
		if strings.TrimPrefix(url, "penstock://") == p.Addr {
			return p
		}
	}
	return nil
}

// Bookie returns the bookie with this id, nil if there is none.
func (c *Cluster) Bookie(id string) *Process {
	for _, p := range c.Bookies {
		if p.Name == id {
			return p
		}
	}
	return nil
}

// StartAll starts whatever does not run, all at once, and waits until everything is ready.
func (c *Cluster) StartAll(ctx context.Context) error { return startAll(ctx, c.All()) }

// Close kills whatever runs, paused processes too, and waits until it is gone. It may be called again; afterwards nothing
// can be started.
func (c *Cluster) Close() {
	killAll(append(c.All(), c.others...))
	c.spawn.close()
}

// Add makes one more process of the cluster: a program beside the others, with flags, and with settings added to its
// environment. It has no address and no probes; its logs are kept, and Close kills it, like the others'.
func (c *Cluster) Add(program, name string, args []string, env ...string) (*Process, error) {
	if len(c.Etcds) == 0 {
		return nil, errors.New("add a process: the cluster has none")
	}
	beside := c.Etcds[0]
	p := &Process{
		Name: name, Log: filepath.Join(filepath.Dir(beside.Log), name+".log"),
		spawn: c.spawn, program: filepath.Join(filepath.Dir(beside.program), program), args: args, env: env,
	}
	c.others = append(c.others, p)
	return p, nil
}
