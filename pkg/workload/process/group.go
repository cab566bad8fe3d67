package process

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// Group is processes of other programs than a [Cluster]'s: those of another broker, say, to compare with. It is not safe
// for concurrent use; its processes are.
type Group struct {
	// Processes are in the order in which they were added.
	Processes []*Process

	programs, dir string
	spawn         *spawner
}

// Program is a process to be.
type Program struct {
	// Program is the name of the executable in the group's directory of programs.
	Program string
	// Name is unique in the group, and names the log.
	Name string
	Args []string
	// Addr is where clients reach it, host:port; told on, and not used.
	Addr string
	// Ready is a URL that answers 200 once it serves.
	Ready string
}

// NewGroup makes a group of programs out of a directory. Logs go to dir/logs. The caller closes it.
func NewGroup(programs, dir string) (*Group, error) {
	if err := os.MkdirAll(filepath.Join(dir, "logs"), 0o700); err != nil {
		return nil, fmt.Errorf("prepare processes: %w", err)
	}
	return &Group{programs: programs, dir: dir, spawn: newSpawner()}, nil
}

// Add adds a process that does not run yet.
func (g *Group) Add(p Program) error {
	path := filepath.Join(g.programs, p.Program)
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("find %s: %w: run `make bin/%s` first", p.Program, err, p.Program)
	}
	g.Processes = append(g.Processes, &Process{
		Name: p.Name, Addr: p.Addr, Log: filepath.Join(g.dir, "logs", p.Name+".log"),
		spawn: g.spawn, program: path, args: p.Args, ready: p.Ready,
	})
	return nil
}

// Start starts whatever does not run, all at once, and waits until everything is ready.
func (g *Group) Start(ctx context.Context) error { return startAll(ctx, g.Processes) }

// Close kills whatever runs and waits until it is gone. It may be called again; afterwards nothing can be started.
func (g *Group) Close() {
	killAll(g.Processes)
	g.spawn.close()
}

func startAll(ctx context.Context, all []*Process) error {
	for _, p := range all {
		if !p.Running() {
			if err := p.Launch(); err != nil {
				return err
			}
		}
	}
	for _, p := range all {
		if err := p.WaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

func killAll(all []*Process) {
	for _, p := range all {
		_ = p.signal(syscall.SIGKILL) // one that does not run needs none
	}
}

// FreeAddress returns host:port of the loopback interface that nothing listens on, and that this program did not hand out
// before.
func FreeAddress(ctx context.Context) (string, error) {
	port, err := freePort(ctx)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(loopback, port), nil
}
