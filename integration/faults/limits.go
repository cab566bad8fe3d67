//go:build linux

package faults

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Faults of what a process may use, and of its calls to the kernel.

// inject has strace change what a process's system calls do, until the caller ends it.
func (s *site) inject(p *process.Process, calls, what string) (end func(), err error) {
	//nolint:gosec // of a fixed set
	cmd := exec.CommandContext(s.ctx, "strace", "-f", "-q", "-o", "/dev/null", "-e", "trace="+calls, "-e", "inject="+calls+":"+what, "-p", strconv.Itoa(p.PID()))
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it lets go
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("run strace, which this cell needs: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait() // it ends with the process, or is told to
	}()
	end = func() {
		_ = cmd.Process.Signal(os.Interrupt)
		<-done
	}
	attached := func(context.Context) bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
		select {
		case <-done:
			return true
		default:
		}
		return err == nil && !strings.Contains(string(text), "TracerPid:\t0\n")
	}
	if err := s.until("strace has attached", attached); err != nil {
		end()
		return nil, err
	}
	return end, nil
}

const groups = "/sys/fs/cgroup"

// group is a control group, of the kernel's first kind.
type group struct{ dir string }

var madeGroups atomic.Uint32

// group puts processes into a control group of their own, once, until the cell has ended.
func (s *site) group(controller string, all ...*process.Process) (group, error) {
	var members []string
	for _, p := range all {
		members = append(members, strconv.Itoa(p.PID()))
	}
	key := controller + " " + strings.Join(members, " ")
	if dir, ok := s.groups[key]; ok {
		return group{dir}, nil
	}
	sweepGroups(controller)
	g := group{filepath.Join(groups, controller, fmt.Sprintf("penstock-%d-%d", os.Getpid(), madeGroups.Add(1)))}
	if err := os.Mkdir(g.dir, 0o750); err != nil {
		return g, fmt.Errorf("make a control group, which this cell needs: %w", err)
	}
	s.Cleanup(func() { // the processes live a little longer
		members, err := os.ReadFile(filepath.Join(g.dir, "cgroup.procs"))
		if err != nil {
			s.Error(err)
		}
		for _, pid := range strings.Fields(string(members)) {
			_ = os.WriteFile(filepath.Join(groups, controller, "cgroup.procs"), []byte(pid), 0) //nolint:gosec // a process id; it may have ended
		}
		for range 100 { // those that end are in it for a moment
			if err = os.Remove(g.dir); err == nil {
				return
			}
			time.Sleep(pollInterval)
		}
		s.Error(err)
	})
	for _, p := range all {
		if err := g.set("cgroup.procs", strconv.Itoa(p.PID())); err != nil {
			return g, err
		}
	}
	if s.groups == nil {
		s.groups = make(map[string]string)
	}
	s.groups[key] = g.dir
	return g, nil
}

// sweepGroups removes the groups of processes that are gone.
func sweepGroups(controller string) {
	left, _ := filepath.Glob(filepath.Join(groups, controller, "penstock-*"))
	for _, dir := range left {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), "penstock-"), "-")
		if _, err := os.Stat("/proc/" + pid); os.IsNotExist(err) {
			_ = os.Remove(dir)
		}
	}
}

func (g group) set(name, value string) error {
	if err := os.WriteFile(filepath.Join(g.dir, name), []byte(value), 0); err != nil {
		return fmt.Errorf("set %s to %s: %w", name, value, err)
	}
	return nil
}

// deviceOf names the block device of a directory's file system as control groups do.
func deviceOf(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", fmt.Errorf("find the device of %s: %w", dir, err)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), nil
}

// starveCPU lets all brokers and bookies share a fifth of a core.
func starveCPU(s *site) error {
	g, err := s.group("cpu", append(append([]*process.Process(nil), s.c.Brokers...), s.c.Bookies...)...)
	if err != nil {
		return err
	}
	if err := g.set("cpu.cfs_quota_us", "20000"); err != nil {
		return err
	}
	err = s.hold(5 * time.Second)
	return errors.Join(err, g.set("cpu.cfs_quota_us", "-1"))
}

// starveFiles lets the owner, and a bookie, open hardly one file or connection more, while many connections come.
func starveFiles(s *site) error {
	owner, err := s.owner()
	if err != nil {
		return err
	}
	bookie, err := s.victim()
	if err != nil {
		return err
	}
	for _, p := range []*process.Process{owner, bookie} {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
		if err != nil {
			return err
		}
		var before unix.Rlimit
		few := unix.Rlimit{Cur: uint64(len(open) + 3)}
		if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, nil, &before); err != nil {
			return err
		}
		few.Max = before.Max
		if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
			return err
		}
		pid := p.PID()
		defer func() { _ = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &before, nil) }() // unless it has ended
	}
	for range 20 {
		if c, err := (&net.Dialer{Timeout: time.Second}).DialContext(s.ctx, "tcp", owner.Addr); err == nil {
			defer c.Close()
		}
	}
	if err := s.hold(5 * time.Second); err != nil {
		return err
	}
	for _, p := range []*process.Process{owner, bookie} {
		if !p.Running() { // whoever supervises it starts it again
			s.expect(false, "%s, which could open no more files, has ended", p.Name)
			if err := s.startAll(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// What overload publishes: more than any disk here takes in the time that messages have.
const (
	floodMessages = 3000
	floodBody     = 32 << 10
	floodLife     = time.Second
)

// overload publishes far more than the cluster can take, with little patience. Each message must be answered in time, by an
// acknowledgement or a typed error, some by an error; then what was acknowledged is read back.
func overload(s *site) error {
	s.floods++
	topic := fmt.Sprintf("%s/flood-%d", keeping, s.floods)
	p, err := s.client.Producer(s.ctx, topic, client.WithMaxPending(2000, 64<<20))
	if err != nil {
		return fmt.Errorf("open the flood's producer: %w", err)
	}
	defer func() {
		closing, cancel := context.WithTimeout(s.ctx, 2*floodLife)
		defer cancel()
		_ = p.Close(closing)
	}()
	began := time.Now()
	life, end := context.WithTimeout(s.ctx, floodLife)
	defer end()
	sent := make([]*client.Receipt, floodMessages)
	for i := range sent {
		body := make([]byte, floodBody)
		binary.BigEndian.PutUint64(body, uint64(i))
		sent[i] = p.PublishAsync(life, &client.Message{Value: body})
	}
	acked := make(map[uint64]bool)
	refused := 0
	for i, r := range sent {
		ctx, cancel := context.WithDeadline(s.ctx, began.Add(patience))
		_, err := r.Wait(ctx)
		gone := ctx.Err()
		cancel()
		var e *client.Error
		switch {
		case gone != nil:
			return fmt.Errorf("message %d of a flood was not answered within %v", i, patience)
		case err == nil:
			acked[uint64(i)] = true
		case !errors.As(err, &e):
			return fmt.Errorf("message %d of a flood: not a typed error: %w", i, err)
		default:
			refused++
		}
	}
	s.expect(time.Since(began) < 2*floodLife, "messages with %v to live were answered after %v", floodLife, time.Since(began).Round(100*time.Millisecond))
	if refused == 0 {
		return fmt.Errorf("%d messages of %d KiB were all taken within %v: that is no overload", floodMessages, floodBody>>10, floodLife)
	}
	return s.auditFlood(topic, acked)
}

// auditFlood reads a flood's topic: what was acknowledged is there, and nothing that was not sent. What has no known outcome may be
// there too.
func (s *site) auditFlood(topic string, acked map[uint64]bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	r, err := s.client.Reader(ctx, topic, client.Earliest())
	if err != nil {
		return fmt.Errorf("read the flood's topic: %w", err)
	}
	defer func() { _ = r.Close(ctx) }()
	for missing := len(acked); missing > 0; {
		d, err := r.Receive(ctx)
		if err != nil {
			return fmt.Errorf("read the flood's topic, of which %d of %d acknowledged messages are missing: %w", missing, len(acked), err)
		}
		if len(d.Value) != floodBody {
			return fmt.Errorf("the flood's topic has a message of %d bytes, which was never sent", len(d.Value))
		}
		n := binary.BigEndian.Uint64(d.Value)
		if n >= floodMessages {
			return fmt.Errorf("the flood's topic has message %d, which was never sent", n)
		}
		if acked[n] {
			delete(acked, n)
			missing--
		}
	}
	_, err = s.client.Admin().DeleteTopic(ctx, &brokerv1.DeleteTopicRequest{Topic: topic, Force: true})
	if err != nil {
		return fmt.Errorf("delete the flood's topic: %w", err)
	}
	return nil
}

// memoryLimit is what each process may use, in MiB.
const memoryLimit = 256

// inLittleMemory gives processes small budgets.
func inLittleMemory(_ *site, cfg *process.Config) {
	cfg.BrokerArgs = append(cfg.BrokerArgs, "--publish-mib", "24", "--cache-mib", "16", "--read-mib", "16")
	cfg.BookieArgs = append(cfg.BookieArgs, "--in-flight-mib", "24", "--cache-mib", "16", "--index-mib", "8")
	cfg.Place = func(string) (string, []string) {
		return "127.0.0.1", []string{"env", fmt.Sprintf("GOMEMLIMIT=%dMiB", memoryLimit*3/4)}
	}
}

// starveMemory bounds the memory of brokers and bookies, and has one bookie stand still and one consumer take nothing while
// large messages are published.
func starveMemory(s *site) error {
	for _, p := range append(append([]*process.Process(nil), s.c.Brokers...), s.c.Bookies...) {
		g, err := s.group("memory", p)
		if err != nil {
			return err
		}
		if err := g.set("memory.limit_in_bytes", strconv.Itoa(memoryLimit<<20)); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	const topic = "public/default/large"
	idle, err := s.client.Subscribe(ctx, topic, "idle", client.WithStart(client.Earliest()), client.WithPrefetch(10, 1<<20))
	if err != nil {
		return err
	}
	p, err := s.victim()
	if err != nil {
		return err
	}
	run, err := workload.Start(s.ctx, s.client, workload.Config{Topic: topic, Size: 64 << 10, Rate: 200, Timeout: patience})
	if err != nil {
		return err
	}
	if err := s.stop(p, 5*time.Second); err != nil {
		return err
	}
	run.StopProducing()
	report, err := run.Wait(ctx)
	if err == nil && report.Acknowledged != report.Sent {
		err = fmt.Errorf("of the large messages, %v", report)
	}
	most := 0.0
	for _, p := range append(append([]*process.Process(nil), s.c.Brokers...), s.c.Bookies...) {
		if !p.Running() {
			return fmt.Errorf("%s did not live on %d MiB", p.Name, memoryLimit)
		}
		if v, metricErr := p.Metric(ctx, "process_resident_memory_bytes"); metricErr == nil {
			most = max(most, v)
		}
	}
	s.goal = fmt.Sprintf("most resident: %.0f MiB of %d", most/(1<<20), memoryLimit)
	s.expect(most <= memoryLimit<<20, "more memory than the limit")
	return errors.Join(err, idle.Unsubscribe(ctx))
}
