package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is one program that runs, ran, or will. Its methods are safe for concurrent use, Start against Start excepted.
type Process struct {
	// Name is unique in its cluster: "broker-1".
	Name string
	// Addr is where clients reach it, host:port: etcd's client port, a bookie's data port, a broker's gRPC port.
	Addr string
	// HTTP is the host:port of its probes and metrics.
	HTTP string
	// Control is a bookie's gRPC address, host:port.
	Control string
	// Log is the file that gets what it prints.
	Log string

	spawn   *spawner
	command []string // starts the program elsewhere
	program string
	args    []string
	env     []string // added to the surroundings'
	ready   string   // URL that answers 200 once it serves

	mu      sync.Mutex
	cmd     *exec.Cmd
	exited  chan struct{} // of the newest start; nil before the first
	stopped bool          // between Pause and Resume
}

const (
	pollInterval = 10 * time.Millisecond
	pollTimeout  = time.Second
	logTail      = 2 << 10
)

// Launch starts the program and returns at once.
func (p *Process) Launch() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return fmt.Errorf("start %s: it runs", p.Name)
	}
	out, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	defer out.Close() // the process has its own
	line := slices.Concat(p.command, []string{p.program}, p.args)
	cmd := exec.Command(line[0], line[1:]...) //nolint:gosec,noctx // programs of this project; the cluster ends them
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(environment(), p.env...)
	if err := p.spawn.start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	exited := make(chan struct{})
	p.cmd, p.exited, p.stopped = cmd, exited, false
	p.spawn.waiting.Go(func() {
		_ = cmd.Wait() // its state tells
		close(exited)
	})
	return nil
}

// environment is this process's without settings of Penstock and etcd, which would reach programs unasked.
func environment() []string {
	var kept []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PENSTOCK_") && !strings.HasPrefix(v, "ETCD_") {
			kept = append(kept, v)
		}
	}
	return kept
}

// Start starts the program and waits until it is ready.
func (p *Process) Start(ctx context.Context) error {
	if err := p.Launch(); err != nil {
		return err
	}
	return p.WaitReady(ctx)
}

// WaitReady waits until the process says that it can serve. It fails early if the process ends.
func (p *Process) WaitReady(ctx context.Context) error {
	exited := p.Exited()
	var last error
	for {
		err := p.probe(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil { // what it said before ctx ended tells more
			last = err
		}
		select {
		case <-exited:
			return fmt.Errorf("%s ended with exit code %d; the end of %s:\n%s", p.Name, p.ExitCode(), p.Log, p.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (%w); the end of %s:\n%s", p.Name, ctx.Err(), last, p.Log, p.LogTail())
		case <-time.After(pollInterval):
		}
	}
}

var probing = &http.Client{Timeout: pollTimeout, Transport: &http.Transport{DisableKeepAlives: true}}

func (p *Process) probe(ctx context.Context) error {
	body, err := get(ctx, p.ready)
	if err == nil {
		return body.Close()
	}
	return err
}

// get returns the body of a 200; any other answer is an error.
func get(ctx context.Context, url string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	response, err := probing.Do(request)
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, logTail))
		_ = response.Body.Close()
		return nil, fmt.Errorf("get %s: %s: %s", url, response.Status, strings.TrimSpace(string(text)))
	}
	return response.Body, nil
}

// running tells whether the newest start has not ended. The lock is held.
func (p *Process) running() bool {
	if p.exited == nil {
		return false
	}
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// Running tells whether it runs.
func (p *Process) Running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running()
}

// Exited is closed once the newest start has ended; nil before the first start.
func (p *Process) Exited() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exited
}

// PID is the process id of the newest start, 0 before the first.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// ExitCode is the newest start's, -1 if a signal ended it or it has not ended.
func (p *Process) ExitCode() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.running() {
		return -1
	}
	return p.cmd.ProcessState.ExitCode()
}

// LogTail returns the last lines that it printed.
func (p *Process) LogTail() string {
	text, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	if len(text) > logTail {
		text = text[len(text)-logTail:]
	}
	return string(text)
}

// signal reaches this process only if it was started here and has not ended: a process id is not used again before the
// process was waited for.
func (p *Process) signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return fmt.Errorf("signal %s: it does not run", p.Name)
	}
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", p.Name, err)
	}
	switch s { //nolint:exhaustive // the others change nothing here
	case syscall.SIGSTOP:
		p.stopped = true
	case syscall.SIGCONT:
		p.stopped = false
	}
	return nil
}

// Kill is kill -9. It returns when the process is gone.
func (p *Process) Kill() error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.Exited() // nothing can delay it but a disk that hangs
	return nil
}

// Pause stops the process in its tracks, as SIGSTOP does, until Resume.
func (p *Process) Pause() error { return p.signal(syscall.SIGSTOP) }

// Resume lets a paused process go on.
func (p *Process) Resume() error { return p.signal(syscall.SIGCONT) }

// Terminate asks the process to stop and waits until it has; when ctx ends first it is killed, and that is an error.
func (p *Process) Terminate(ctx context.Context) error {
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.Exited():
		return nil
	case <-ctx.Done():
		_ = p.Kill()
		return fmt.Errorf("stop %s: %w; killed", p.Name, ctx.Err())
	}
}

// Metric sums the values of a metric over its labels.
func (p *Process) Metric(ctx context.Context, name string) (float64, error) {
	body, err := get(ctx, "http://"+p.HTTP+"/metrics")
	if err != nil {
		return 0, err
	}
	defer body.Close()
	sum, found, err := SumMetric(body, name)
	if err == nil && !found {
		err = errors.New("no such metric")
	}
	if err != nil {
		return 0, fmt.Errorf("read metric %s of %s: %w", name, p.Name, err)
	}
	return sum, nil
}
