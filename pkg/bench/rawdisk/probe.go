package rawdisk

import (
	"context"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

const (
	// ProbeBytes is what a probe writes and syncs at a time.
	ProbeBytes = 4 << 10
	// ProbePause is how long it waits in between: without a pause it would be a load itself.
	ProbePause = 5 * time.Millisecond

	probeFileBytes = 16 << 20
)

// Probe writes 4 KiB and syncs them, over and over with a pause, until it is closed.
type Probe struct {
	disk *Disk
	stop context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	latency *hdrhistogram.Histogram // since the last Take
	err     error
}

// StartProbe starts one that writes in an existing directory, until it is closed. ctx bounds the start alone.
func StartProbe(ctx context.Context, dir string) (*Probe, error) {
	disk, err := Open(ctx, Config{Dir: dir, Files: 1, FileBytes: probeFileBytes})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	p := &Probe{disk: disk, stop: stop, done: make(chan struct{}), latency: newHistogram()}
	go p.run(ctx)
	return p, nil
}

func (p *Probe) run(ctx context.Context) {
	defer close(p.done)
	buf := noise(ProbeBytes)
	pause := time.NewTicker(ProbePause)
	defer pause.Stop()
	for {
		began := time.Now()
		err := p.disk.files[0].writeGroup(buf)
		p.mu.Lock()
		if p.err = err; err == nil {
			_ = p.latency.RecordValue(min(int64(time.Since(began)), maxLatency)) // fails only beyond its range
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
		pause.Reset(ProbePause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return
		}
	}
}

// Take returns the latencies since it was last called, in nanoseconds.
func (p *Probe) Take() *hdrhistogram.Histogram {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.latency
	p.latency = newHistogram()
	return h
}

// Close ends the probe and removes its file. It returns the error that ended it before, if one did.
func (p *Probe) Close() error {
	p.stop()
	<-p.done
	if err := p.disk.Close(); p.err == nil {
		return err
	}
	return p.err
}
