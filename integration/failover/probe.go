package failover

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// probes watch the machine while the cluster works: how late a timer is, which tells that the processors are busy elsewhere, and
// how long a small write and its sync take on the disk of the bookies.
type probes struct {
	mu    sync.Mutex
	late  []reading
	syncs []reading
}

// reading is one, and when it ended.
type reading struct {
	at   time.Time
	took time.Duration
}

const (
	probeEvery  = 5 * time.Millisecond
	syncEvery   = 25 * time.Millisecond // seldom enough to be no load
	probeBytes  = 4096
	maxReadings = 20_000 // of one strike
)

func (p *probes) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late, p.syncs = nil, nil
}

func (p *probes) add(to *[]reading, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(*to) < maxReadings {
		*to = append(*to, reading{time.Now(), took})
	}
}

// clock measures how late timers are, until ctx ends.
func (p *probes) clock(ctx context.Context) {
	for {
		due := time.Now().Add(probeEvery)
		select {
		case <-ctx.Done():
			return
		case <-time.After(probeEvery):
			p.add(&p.late, time.Since(due))
		}
	}
}

// disk measures small writes with their sync, over and over the same bytes of a file, until ctx ends.
func (p *probes) disk(ctx context.Context, dir string) error {
	f, err := os.Create(filepath.Join(dir, "probe"))
	if err != nil {
		return fmt.Errorf("probe the disk: %w", err)
	}
	defer f.Close()
	block := make([]byte, probeBytes)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(syncEvery):
		}
		began := time.Now()
		if _, err := f.WriteAt(block, 0); err != nil {
			return fmt.Errorf("probe the disk: %w", err)
		}
		if err := f.Sync(); err != nil {
			return fmt.Errorf("probe the disk: %w", err)
		}
		p.add(&p.syncs, time.Since(began))
	}
}

// worst returns the longest readings that overlap a stretch of time.
func (p *probes) worst(from, until time.Time) (late, sync time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return longest(p.late, from, until), longest(p.syncs, from, until)
}

func longest(of []reading, from, until time.Time) (most time.Duration) {
	for _, r := range of {
		if !r.at.Before(from) && !r.at.Add(-r.took).After(until) {
			most = max(most, r.took)
		}
	}
	return most
}
