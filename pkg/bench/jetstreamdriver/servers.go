package jetstreamdriver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// ServersConfig says what to start.
type ServersConfig struct {
	// Programs is the directory of nats-server, as `make bin/nats-server` leaves it.
	Programs string
	// Dir holds data, configuration and logs. It must exist; the caller removes it.
	Dir string
	// Servers counts them; 0 means 3.
	Servers int
	// SyncAlways has servers sync each message before they acknowledge it. Otherwise they sync at times, as they do by
	// default.
	SyncAlways bool
}

// StartServers starts a cluster of servers on the loopback interface, and waits until each can serve and the cluster has a
// leader. After an error nothing is left running. The caller closes the group.
func StartServers(ctx context.Context, cfg ServersConfig) (*process.Group, error) {
	g, err := process.NewGroup(cfg.Programs, cfg.Dir)
	if err != nil {
		return nil, err
	}
	if err := addServers(ctx, g, cfg); err != nil {
		g.Close()
		return nil, fmt.Errorf("prepare servers: %w", err)
	}
	if err := g.Start(ctx); err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

func addServers(ctx context.Context, g *process.Group, cfg ServersConfig) error {
	n := cfg.Servers
	if n == 0 {
		n = 3
	}
	var addrs [][3]string // of clients, probes and other servers
	var routes []string
	for range n {
		var a [3]string
		for i := range a {
			var err error
			if a[i], err = process.FreeAddress(ctx); err != nil {
				return err
			}
		}
		addrs = append(addrs, a)
		routes = append(routes, fmt.Sprintf("%q", "nats://"+a[2]))
	}
	for i, a := range addrs {
		name := fmt.Sprintf("nats-%d", i+1)
		path := filepath.Join(cfg.Dir, name+".conf")
		if err := os.WriteFile(path, []byte(cfg.file(name, a, routes)), 0o600); err != nil {
			return err //nolint:wrapcheck // it names the file
		}
		err := g.Add(process.Program{Program: "nats-server", Name: name, Args: []string{"-c", path}, Addr: a[0], Ready: "http://" + a[1] + "/healthz"})
		if err != nil {
			return err //nolint:wrapcheck // it says what is missing
		}
	}
	return nil
}

// file is a server's configuration: the defaults, where nothing else is needed.
func (cfg ServersConfig) file(name string, a [3]string, routes []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "server_name: %s\nlisten: %s\nhttp: %s\n", name, a[0], a[1])
	fmt.Fprintf(&b, "jetstream {\n  store_dir: %q\n", filepath.Join(cfg.Dir, name))
	if cfg.SyncAlways {
		b.WriteString("  sync_interval: always\n")
	}
	b.WriteString("}\n")
	if len(routes) > 1 {
		fmt.Fprintf(&b, "cluster { name: bench, listen: %s, routes: [%s] }\n", a[2], strings.Join(routes, ", "))
	}
	return b.String()
}

// URLs returns where clients reach servers.
func URLs(servers *process.Group) []string {
	var out []string
	for _, p := range servers.Processes {
		out = append(out, "nats://"+p.Addr)
	}
	return out
}
