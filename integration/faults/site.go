//go:build linux

package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/integration/hosts"
	"github.com/penstock-mq/penstock/integration/relay"
	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	bookies = 4 // three that are written to, and a spare
	brokers = 3

	leaseTTL     = 2 * time.Second
	pollInterval = 20 * time.Millisecond
	// patience bounds what must happen in the end, on any machine.
	patience = 3 * time.Minute
	// soon is the aim for the same.
	soon = 30 * time.Second
)

// site is where a cell's fault takes place.
type site struct {
	testing.TB
	ctx    context.Context //nolint:containedctx // the cell's, with an end
	c      *process.Cluster
	client *client.Client
	rng    *rand.Rand
	long   time.Duration // how long the cell takes
	loads  []load

	network *hosts.Network
	wires   map[string]*hosts.Wire
	disks   []*volume.Volume // of bookies
	dirs    []string         // of bookies' data
	lines   map[string]*relay.Relay
	groups  map[string]string // control groups, by process
	skews   map[string]string // files with a clock's error, by process
	rotten  *process.Process  // has lost entries, and says so

	target load // whose topic is struck
	floods int  // so far
	notes  []string
	unmet  bool
	goal   string // what was measured, where it is not the longest stall
}

// note tells something beside the table, once.
func (s *site) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	for _, n := range s.notes {
		if n == text {
			return
		}
	}
	s.notes = append(s.notes, text)
}

// expect notes that the goal was not met.
func (s *site) expect(ok bool, format string, args ...any) {
	if !ok {
		s.unmet = true
		s.note(format, args...)
	}
}

// hold lets a fault last.
func (s *site) hold(d time.Duration) error {
	select {
	case <-s.ctx.Done():
		return s.ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// until waits for what must happen in the end.
func (s *site) until(what string, ok func(ctx context.Context) bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	for !ok(ctx) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited in vain until %s", what)
		case <-time.After(pollInterval):
		}
	}
	return nil
}

// within tells whether something happens in time.
func (s *site) within(d time.Duration, ok func(ctx context.Context) bool) bool {
	ctx, cancel := context.WithTimeout(s.ctx, d)
	defer cancel()
	for !ok(ctx) {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pollInterval):
		}
	}
	return true
}

// owner is the broker that serves the topic that is struck.
func (s *site) owner() (*process.Process, error) {
	var p *process.Process
	err := s.until("a broker serves "+s.target.topic(), func(ctx context.Context) bool {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		t, err := s.client.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: s.target.topic()})
		if err == nil {
			p = s.c.Broker(t.GetBrokerUrl())
		}
		return p != nil
	})
	return p, err
}

// ensemble are the bookies that the topic that is struck is being written to.
func (s *site) ensemble() (found []*process.Process, err error) {
	err = s.until("there is an open ledger of "+s.target.topic(), func(ctx context.Context) bool {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		all, err := s.client.Admin().ListLedgers(ctx, &brokerv1.ListLedgersRequest{Topic: s.target.topic()})
		if err != nil {
			return false
		}
		for _, l := range all.GetLedgers() {
			if n := len(l.GetFragments()); l.GetState() == "OPEN" && n > 0 {
				found = nil
				for _, slot := range l.GetFragments()[n-1].GetSlots() {
					found = append(found, s.c.Bookie(slot.GetBookie()))
				}
			}
		}
		return len(found) > 0
	})
	s.rng.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	return found, err
}

// victim is one of them.
func (s *site) victim() (*process.Process, error) {
	all, err := s.ensemble()
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

func (s *site) index(bookie *process.Process) int {
	for i, p := range s.c.Bookies {
		if p == bookie {
			return i
		}
	}
	return -1
}

// killAll kills processes all at once: none sees another die first.
func killAll(all []*process.Process) error {
	killed := make(chan error, len(all))
	for _, p := range all {
		go func() { killed <- p.Kill() }()
	}
	var err error
	for range all {
		err = errors.Join(err, <-killed)
	}
	return err
}

// startAll starts processes, and waits until they are ready.
func (s *site) startAll(all ...*process.Process) error {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	for _, p := range all {
		if err := p.Launch(); err != nil {
			return err
		}
	}
	for _, p := range all {
		if err := p.WaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// ends waits until a process has ended by itself, and tells its exit code.
func (s *site) ends(p *process.Process, within time.Duration) (code int, ok bool) {
	select {
	case <-p.Exited():
		return p.ExitCode(), true
	case <-time.After(within):
		return 0, false
	}
}

// freeze stops processes, and waits until none of their threads runs; those that are in a call stop when they leave it.
func (s *site) freeze(all ...*process.Process) error {
	for _, p := range all {
		if err := p.Pause(); err != nil {
			return err
		}
	}
	return s.until("stopped processes stand still", func(context.Context) bool {
		for _, p := range all {
			tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.PID()))
			if err != nil {
				return false
			}
			for _, path := range tasks {
				text, err := os.ReadFile(path)
				if err != nil || strings.HasPrefix(string(text[strings.LastIndexByte(string(text), ')')+1:]), " R") {
					return false
				}
			}
		}
		return true
	})
}

// panics finds in the processes' logs what must never be there.
func (s *site) panics() (found []string) {
	for _, p := range s.c.All() {
		text, err := os.ReadFile(p.Log)
		if err != nil {
			continue
		}
		for _, sign := range []string{"panic: ", "fatal error: ", "\ngoroutine "} {
			if i := strings.Index(string(text), sign); i >= 0 {
				end := min(len(text), i+500)
				found = append(found, fmt.Sprintf("%s: %s", p.Name, text[i:end]))
				break
			}
		}
	}
	return found
}

// states are those of the bookies, as the brokers see them.
func (s *site) states(ctx context.Context) map[string]string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	states := make(map[string]string)
	all, err := s.client.Admin().ListBookies(ctx, &brokerv1.ListBookiesRequest{})
	if err == nil {
		for _, b := range all.GetBookies() {
			states[b.GetId()] = b.GetState()
		}
	}
	return states
}

// newestSegment is the file that a bookie, which must not run, wrote last.
func newestSegment(dir string) (newest string, err error) {
	var at time.Time
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".seg") || strings.HasPrefix(d.Name(), "spare-") {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Size() > 0 && info.ModTime().After(at) {
			newest, at = path, info.ModTime()
		}
		return err
	})
	if err == nil && newest == "" {
		err = fmt.Errorf("no segment in %s", dir)
	}
	return newest, err
}
