package ledgerstore

import (
	"errors"
	"path"
	"slices"
	"syscall"
	"time"
)

// spaceEvery is how often the disk's usage is looked at.
const spaceEvery = time.Second

// watch keeps the state up to date, and the reserve filled, until the store is closed.
func (s *Store) watch() {
	tick := time.NewTicker(spaceEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
			s.look()
		}
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
	s.metrics.segments.Set(float64(u.Segments))
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
