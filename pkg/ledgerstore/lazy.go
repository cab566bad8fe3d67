package ledgerstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"sync"
	"time"
)

// SyncPolicy says when what is acknowledged has to be on the disk. Its zero value: before it is acknowledged.
type SyncPolicy struct {
	// Interval is how long writers' entries and LACs may stay in the kernel's cache after they were acknowledged: they
	// survive the end of the process, and not that of the kernel. Whoever opens a store after that must put its
	// ledgers in limbo (see [Store.SetLimbo]), since it denies entries that it had acknowledged. What others rest on is
	// synced before it is acknowledged all the same, with everything written before it: fences, limbo, tombstones,
	// recoveries' writes.
	Interval time.Duration
	// Messages, if not 0, bounds how many records stay there: the one that reaches it waits for a sync of all.
	Messages int
}

// String is for operators.
func (p SyncPolicy) String() string {
	switch {
	case p.Interval == 0:
		return "before every acknowledgement"
	case p.Messages == 0:
		return fmt.Sprintf("every %v", p.Interval)
	}
	return fmt.Sprintf("every %v or %d messages", p.Interval, p.Messages)
}

// lazySync leaves syncs out, by policy. The core takes what it leaves out for synced; that batches' headers do not say so
// is seen to here.
type lazySync struct {
	policy SyncPolicy

	flushing sync.Mutex // over syncing; taken before mu
	mu       sync.Mutex
	dirty    map[*Segment]int64 // what is written, up to where
	records  int                // since the last flush began
}

func newLazySync(p SyncPolicy) *lazySync {
	return &lazySync{policy: p, dirty: make(map[*Segment]int64)}
}

// durable is what the header of a batch may say.
func (l *lazySync) durable(b *Batch, previous *Segment) (upto, before int64) {
	upto, before = min(b.DurableUpto, b.Segment.synced.Load()), b.PreviousDurable
	if previous != nil {
		before = min(before, previous.synced.Load())
	}
	return upto, before
}

// wrote notes a batch that was written up to end. Batches are noted in the order of the log, and before anything of
// a later one is written or synced: a flush that is begun for one covers all before it, in whatever order the syncers
// get to them.
func (l *lazySync) wrote(b *Batch, end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dirty[b.Segment] = end
	l.records += len(b.Records)
	b.full = l.policy.Messages > 0 && l.records >= l.policy.Messages
}

// flush syncs everything that was noted.
func (l *lazySync) flush() error {
	l.flushing.Lock()
	defer l.flushing.Unlock()
	l.mu.Lock()
	dirty := maps.Clone(l.dirty)
	l.records = 0
	l.mu.Unlock()
	for seg, end := range dirty {
		if err := seg.handle.writer.Sync(); err != nil {
			return err
		}
		seg.synced.Store(end)
		l.mu.Lock()
		if l.dirty[seg] == end {
			delete(l.dirty, seg)
		}
		l.mu.Unlock()
	}
	return nil
}

// settled notes that a seal has synced all of a segment, before its file is taken away.
func (l *lazySync) settled(seg *Segment) {
	if l == nil {
		return
	}
	l.flushing.Lock()
	defer l.flushing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.dirty, seg)
	seg.synced.Store(math.MaxInt64)
}

// run flushes once in each interval. A flush that fails has told the store, as each sync that fails.
func (l *lazySync) run(ctx context.Context) {
	tick := time.NewTicker(l.policy.Interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if l.flush() != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// flush makes everything durable that was acknowledged.
func (s *Store) flush() error {
	if s.lazy == nil {
		return nil
	}
	if err := s.stopped(); err != nil {
		return errors.Join(errors.New("what was acknowledged is not synced"), err)
	}
	return s.lazy.flush()
}
