package process

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shell is a process that runs a script; ready as soon as ready answers.
func shell(t *testing.T, script string, ready http.HandlerFunc) *Process {
	t.Helper()
	server := httptest.NewServer(ready)
	t.Cleanup(server.Close)
	c := &Cluster{spawn: newSpawner()}
	p := &Process{
		Name: "shell", HTTP: server.Listener.Addr().String(), Log: filepath.Join(t.TempDir(), "log"),
		spawn: c.spawn, program: "/bin/sh", args: []string{"-c", script}, ready: server.URL,
	}
	c.Brokers = []*Process{p}
	t.Cleanup(c.Close)
	return p
}

func fine(http.ResponseWriter, *http.Request) {}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func TestLife(t *testing.T) {
	t.Parallel()
	p := shell(t, "echo up; sleep 100 & wait", fine)
	if err := p.Kill(); err == nil {
		t.Error("killed what does not run")
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Launch(); err == nil {
		t.Error("started twice")
	}
	first := p.PID()
	for _, step := range []func() error{p.Pause, p.Resume, p.Pause, p.Kill} { // a paused process dies too
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if p.Running() || alive(first) || p.ExitCode() != -1 {
		t.Fatal("it lives")
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Terminate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if p.Running() || p.PID() == first {
		t.Fatal("it lives, or is the first one")
	}
}

// What does not stop when asked is killed, and that is told.
func TestTerminateKills(t *testing.T) {
	t.Parallel()
	p := shell(t, "trap '' TERM; echo deaf; while :; do sleep 1; done", fine)
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for !strings.Contains(p.LogTail(), "deaf") {
		if t.Context().Err() != nil || !p.Running() {
			t.Fatal(p.LogTail())
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Terminate(ctx); err == nil || p.Running() {
		t.Fatalf("running %v, error %v", p.Running(), err)
	}
}

// A start tells of a process that ends instead of getting ready, with what it said.
func TestStartFails(t *testing.T) {
	t.Parallel()
	p := shell(t, "echo no such disk >&2; exit 5", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	err := p.Start(t.Context())
	if err == nil || !strings.Contains(err.Error(), "exit code 5") || !strings.Contains(err.Error(), "no such disk") || p.ExitCode() != 5 {
		t.Fatalf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var probes atomic.Int32
	p = shell(t, "sleep 100", func(w http.ResponseWriter, _ *http.Request) {
		if probes.Add(1) == 2 { // the first answer has been read
			cancel()
		}
		http.Error(w, "warming up", http.StatusServiceUnavailable)
	})
	if err := p.Start(ctx); err == nil || !strings.Contains(err.Error(), "warming up") {
		t.Fatalf("%v", err)
	}
}

// Closing leaves nothing behind, twice over.
func TestClose(t *testing.T) {
	t.Parallel()
	c := &Cluster{spawn: newSpawner()}
	var pids []int
	for i := range 3 {
		p := &Process{Name: "x", Log: filepath.Join(t.TempDir(), "log"), spawn: c.spawn, program: "/bin/sh", args: []string{"-c", "sleep 100"}}
		c.Bookies = append(c.Bookies, p)
		if err := p.Launch(); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			if err := p.Pause(); err != nil {
				t.Fatal(err)
			}
		}
		pids = append(pids, p.PID())
	}
	c.Close()
	c.Close()
	for _, pid := range pids {
		if alive(pid) {
			t.Errorf("%d lives", pid)
		}
	}
}

func TestMetric(t *testing.T) {
	t.Parallel()
	p := shell(t, "", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("# HELP a_total 9\na_total{x=\"} 5\"} 2\na_total 1e3\na_total_more 7\na 8\n"))
	})
	if v, err := p.Metric(t.Context(), "a_total"); err != nil || v != 1002 {
		t.Errorf("%v, %v", v, err)
	}
	if _, err := p.Metric(t.Context(), "b"); err == nil {
		t.Error("a metric that is not there")
	}
}

// Programs that are not built are told of, with what to do.
func TestNeedsPrograms(t *testing.T) {
	t.Parallel()
	_, err := New(t.Context(), Config{Programs: t.TempDir(), Dir: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "make build") {
		t.Fatal(err)
	}
}

// No two processes get one address, settings of the surroundings reach none.
func TestPortsAndEnvironment(t *testing.T) {
	seen := make(map[string]bool)
	for range 100 {
		p, err := freePort(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if seen[p] {
			t.Fatalf("%s twice", p)
		}
		seen[p] = true
	}
	t.Setenv("PENSTOCK_CLUSTER", "production")
	for _, v := range environment() {
		if strings.HasPrefix(v, "PENSTOCK_") {
			t.Error(v)
		}
	}
	if len(environment()) >= len(os.Environ()) {
		t.Error("nothing left out")
	}
}

// A group of other programs starts, again and again, and leaves nothing behind.
func TestGroup(t *testing.T) {
	t.Parallel()
	programs := t.TempDir()
	if err := os.Symlink("/bin/sh", filepath.Join(programs, "shell")); err != nil {
		t.Fatal(err)
	}
	ready := httptest.NewServer(http.HandlerFunc(fine))
	t.Cleanup(ready.Close)
	g, err := NewGroup(programs, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	if err := g.Add(Program{Program: "other", Name: "x"}); err == nil || !strings.Contains(err.Error(), "make bin/other") {
		t.Error(err)
	}
	var pids []int
	start := func() {
		t.Helper()
		if err := g.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, p := range g.Processes {
			pids = append(pids, p.PID())
		}
	}
	for _, name := range []string{"a", "b"} {
		if err := g.Add(Program{Program: "shell", Name: name, Args: []string{"-c", "exec sleep 100"}, Ready: ready.URL}); err != nil {
			t.Fatal(err)
		}
	}
	start()
	if err := g.Processes[0].Kill(); err != nil {
		t.Fatal(err)
	}
	start() // starts what does not run, and leaves the other
	if pids[2] == pids[0] || pids[3] != pids[1] {
		t.Errorf("started %v", pids)
	}
	g.Close()
	g.Close()
	for _, pid := range pids {
		if alive(pid) {
			t.Errorf("%d lives", pid)
		}
	}
}
