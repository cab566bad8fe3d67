package ledgerstore

import (
	"errors"
	"path"
	"slices"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/segment"
)

// spaceEvery is how often the disk's usage is looked at.
const spaceEvery = time.Second

// prewriteChunks is how many chunks, of 1 MiB, are written ahead in a tick.
const prewriteChunks = 16

// watch keeps the state up to date, and the reserve filled, until the store is closed.
func (s *Store) watch() {
	tick := time.NewTicker(spaceEvery)
	defer tick.Stop()
	var ahead prewriting
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
			s.look()
			ahead.goOn(s)
		}
	}
}

// prewriting writes the next segment ahead while the disk is idle: while, and for as long as, no group was written for
// a tick.
type prewriting struct {
	writes  int64 // as of the last tick
	segment *Segment
	offset  int64
}

// goOn writes up to a tick's worth, and stops at the first sign of work. A chunk is small, synced by itself, and locks
// nothing that adds to the active segment need.
func (p *prewriting) goOn(s *Store) {
	seg := s.next.Load()
	if seg != p.segment {
		p.segment, p.offset = seg, 0
	}
	idle := p.writes == s.writes.Load()
	p.writes = s.writes.Load()
	if !idle || seg == nil || s.State() == Full {
		return
	}
	src, err := seg.handle.acquire(s.fs, seg.path)
	if err != nil {
		return // it was given up
	}
	defer seg.handle.release()
	w, unsealed := src.(*segment.Writer)
	for range prewriteChunks {
		if !unsealed || s.ctx.Err() != nil || p.writes != s.writes.Load() {
			return
		}
		next, done, err := w.Prewrite(p.offset)
		if err != nil {
			s.log.Warn("cannot write the next segment ahead", "path", seg.path, "error", err)
		}
		if done {
			s.next.CompareAndSwap(seg, nil)
			return
		}
		p.offset = next
	}
}

// look reads the disk's usage and tells the core.
func (s *Store) look() {
	state, err := s.measure()
	if err != nil {
		s.log.Error("cannot read the disk's usage: state is kept", "dir", s.cfg.Dir, "error", err)
		return
	}
	if err := s.fillReserve(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		s.log.Error("cannot fill the reserve", "error", err)
	}
	s.post(&Space{State: state})
	short := s.shortage()
	s.post(&Expire{Before: s.trashBefore(), Bytes: short})
	if short > 0 {
		s.kickCompaction()
	}
}

// measure derives the state from the disk.
func (s *Store) measure() (State, error) {
	disk, err := s.fs.Usage(s.cfg.Dir)
	if err != nil {
		return Writable, err
	}
	u := Usage{Total: disk.Total, Free: disk.Free}
	s.segments.mu.RLock()
	spares := slices.Clone(s.segments.spares)
	s.segments.mu.RUnlock()
	for _, name := range spares {
		if info, err := s.fs.Stat(path.Join(s.cfg.Dir, name)); err == nil {
			u.Free += uint64(info.Size)
		}
	}
	u.Free = min(u.Free, u.Total)
	for _, seg := range s.segments.list() {
		live := max(seg.live.Load(), 0)
		u.Segments++
		u.Live += uint64(live)
		u.Dead += uint64(max(seg.size.Load()-live, 0))
	}
	s.usage.Store(&u)
	s.metrics.used(&u)
	used := 1.0
	if u.Total > 0 {
		used = 1 - float64(u.Free)/float64(u.Total)
	}
	switch {
	case used >= s.cfg.HighRatio, u.Free < uint64(s.cfg.SegmentSize):
		// Without room for another segment the next roll would find the disk full, whatever the ratio says, and the
		// state would go to and fro between what the disk says and what the log meets.
		return Full, nil
	case used >= s.cfg.LowRatio:
		return ReadOnly, nil
	}
	return Writable, nil
}

// setState publishes what the core says.
func (s *Store) setState(state State) {
	if old := State(s.state.Swap(uint32(state))); old != state {
		s.metrics.state.Set(float64(state))
		s.log.Info("store changes state", "from", old.String(), "to", state.String())
		s.changed.notify()
	}
}
