package ledgerstore

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/segment"
)

// inbox holds events for run. What it holds is bounded: adds by whoever takes their bytes in, the rest by the
// requests that wait for an answer.
type inbox struct {
	mu     sync.Mutex
	events []Event
	closed bool
	wake   chan struct{}
	drive  func() // instead of wake, of a store without goroutines
}

// outbox holds replies for the completion goroutine, which is never waited for by run.
type outbox struct {
	mu      sync.Mutex
	replies []Reply
	closed  bool
	wake    chan struct{}
}

type checkQueue struct {
	mu     sync.Mutex
	checks []*Check
	busy   bool
}

// submit hands a request to run.
func (s *Store) submit(ev Event) {
	s.inbox.mu.Lock()
	closed := s.inbox.closed
	if !closed {
		s.inbox.events = append(s.inbox.events, ev)
	}
	s.inbox.mu.Unlock()
	if closed {
		if it := requestOf(ev); it != nil {
			s.outbox.push(Reply{item: it, err: errClosed})
		}
		return
	}
	s.inbox.signal()
}

// post feeds the outcome of an action back. It is not refused by Close, which waits for it.
func (s *Store) post(ev Event) {
	s.inbox.mu.Lock()
	s.inbox.events = append(s.inbox.events, ev)
	s.inbox.mu.Unlock()
	s.inbox.signal()
}

func (b *inbox) signal() {
	if b.drive != nil {
		b.drive()
		return
	}
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *inbox) take(into []Event) ([]Event, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	events := b.events
	b.events = into[:0]
	return events, b.closed
}

// run owns the core until the store is closed and everything accepted is answered.
func (s *Store) run() {
	defer close(s.loopEnd)
	var events []Event
	for range s.inbox.wake {
		var closed bool
		events, closed = s.inbox.take(events)
		for i, ev := range events {
			s.core.Step(ev)
			events[i] = nil
		}
		s.carryOut()
		if closed && s.core.Idle() {
			return
		}
	}
}

// carryOut does what the core asks for, until nothing is to be written.
func (s *Store) carryOut() {
	for {
		rd := s.core.Ready()
		if rd.Fatal != nil {
			s.stop(rd.Fatal)
		}
		for _, b := range rd.Syncs {
			s.syncs <- b // there are as many workers as groups in flight
		}
		if len(rd.Checks) > 0 {
			s.check(rd.Checks)
		}
		if rd.Prepare || rd.Reserve {
			s.job(func() Event { return s.prepared(rd.Reserve) })
		}
		for _, seg := range rd.Seals {
			s.job(func() Event { return &Sealed{Segment: seg, Err: s.seal(seg)} })
		}
		s.outbox.push(rd.Replies...)
		s.setState(s.core.State())
		if rd.Append == nil {
			return
		}
		s.core.Step(s.write(rd.Append))
	}
}

func (s *Store) prepared(fromReserve bool) *Prepared {
	d := ordinary
	if fromReserve {
		d = reserve
	}
	seg, err := s.prepare(d)
	return &Prepared{Segment: seg, Err: err}
}

// job runs fn on a goroutine that Close waits for, and posts its outcome.
func (s *Store) job(fn func() Event) {
	s.jobs.Add(1)
	go func() {
		defer s.jobs.Done()
		s.post(fn())
	}()
}

func (s *Store) write(b *Batch) *Written {
	s.writes.Add(1)
	w := b.Segment.handle.writer
	durable, previous := b.DurableUpto, b.PreviousDurable
	if s.lazy != nil {
		durable, previous = s.lazy.durable(b, s.core.previous)
	}
	w.SetPrevDurable(previous)
	locs, err := w.AppendBatch(b.Records, durable)
	if err == nil {
		s.cache.put(b.Segment.seq, b.Records, locs)
		var bytes int64
		for i := range locs {
			bytes += int64(locs[i].Length)
		}
		b.Segment.size.Store(w.Size())
		if s.lazy != nil {
			s.lazy.wrote(b, w.Size())
		}
		s.metrics.groupEntries.Observe(float64(len(locs)))
		s.metrics.groupBytes.Observe(float64(bytes))
	}
	return &Written{Batch: b, Locations: locs, End: w.Size(), Err: err}
}

func (s *Store) syncer() {
	for b := range s.syncs {
		s.post(s.sync(b))
	}
}

func (s *Store) sync(b *Batch) *Synced {
	if s.lazy != nil && !b.hard && !b.full {
		return &Synced{Batch: b, Skipped: true}
	}
	began := time.Now()
	var err error
	if s.lazy != nil {
		err = s.lazy.flush()
	} else {
		err = b.Segment.handle.writer.Sync()
	}
	s.metrics.syncSeconds.Observe(time.Since(began).Seconds())
	return &Synced{Batch: b, Err: err}
}

// errPostponed says that a segment stays without a footer until a restart writes one: its batches are durable.
var errPostponed = errors.New("no space for the footer")

func (s *Store) seal(seg *Segment) error {
	if err := seg.handle.writer.Sync(); err != nil {
		return err
	}
	switch err := seg.handle.writer.Seal(); {
	case errors.Is(err, syscall.ENOSPC): // only where the disk does not keep what was allocated
		s.log.Warn("no space for a segment's footer: a restart will have to scan it", "path", seg.path, "error", err)
		return errPostponed
	case err != nil:
		return err
	}
	s.lazy.settled(seg)
	seg.handle.seal()
	src, err := s.openSealed(seg)
	if err != nil {
		return err
	}
	defer seg.handle.release()
	return seg.load(src)
}

// openSealed opens a segment that has its footer now, as soon as there are file descriptors.
func (s *Store) openSealed(seg *Segment) (*segment.Reader, error) {
	for {
		src, err := seg.handle.acquireReader(s.fs, seg.path)
		switch {
		case err == nil:
			return src, nil
		case !noFiles(err):
			return nil, fmt.Errorf("open sealed segment: %w", err)
		case s.inbox.drive != nil:
			return nil, errPostponed // of a store that is driven by hand nothing waits
		}
		select {
		case <-time.After(spaceEvery / 10):
		case <-s.ctx.Done():
			return nil, errPostponed // it has its footer
		}
	}
}

// load takes over what must be known of a sealed segment.
func (s *Segment) load(r *segment.Reader) error {
	infos, err := r.Ledgers()
	if err != nil {
		return err
	}
	s.ledgers = s.ledgers[:0]
	for _, in := range infos {
		s.ledgers = append(s.ledgers, in.Ledger)
	}
	s.size.Store(r.Size())
	return nil
}

// check looks the doubtful adds up, one after the other, on a goroutine that lives as long as there are some.
func (s *Store) check(checks []*Check) {
	q := &s.checks
	q.mu.Lock()
	defer q.mu.Unlock()
	q.checks = append(q.checks, checks...)
	if q.busy {
		return
	}
	q.busy = true
	s.jobs.Add(1)
	go func() {
		defer s.jobs.Done()
		for {
			q.mu.Lock()
			if len(q.checks) == 0 {
				q.busy = false
				q.mu.Unlock()
				return
			}
			next := q.checks[0]
			q.checks = q.checks[1:]
			q.mu.Unlock()
			s.post(s.answer(next))
		}
	}()
}

// stop makes every read answer Unknown from here on.
func (s *Store) stop(err error) {
	s.failed.Store(&err)
	s.fatal <- err // the core fails once
}

func (o *outbox) push(replies ...Reply) {
	if len(replies) == 0 {
		return
	}
	o.mu.Lock()
	closed := o.closed
	if !closed {
		o.replies = append(o.replies, replies...)
	}
	o.mu.Unlock()
	if closed {
		for _, r := range replies {
			r.Do()
		}
		return
	}
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// complete calls the Dones, in order.
func (s *Store) complete() {
	var replies []Reply
	for range s.outbox.wake {
		s.outbox.mu.Lock()
		replies, s.outbox.replies = s.outbox.replies, replies[:0]
		closed := s.outbox.closed
		s.outbox.mu.Unlock()
		for i, r := range replies {
			if r.err != nil && r.item != nil && r.item.add != nil {
				s.metrics.addsRefused.Inc()
			}
			r.Do()
			replies[i] = Reply{}
		}
		if closed {
			return
		}
	}
}

// shutdown stops everything, from the requests inwards.
func (s *Store) shutdown() error {
	s.cancel() // the space watch and compaction
	s.inbox.mu.Lock()
	s.inbox.closed = true
	s.inbox.events = append(s.inbox.events, &quit{})
	s.inbox.mu.Unlock()
	s.inbox.signal()
	<-s.loopEnd
	s.jobs.Wait()
	close(s.syncs)
	s.outbox.mu.Lock()
	s.outbox.closed = true
	s.outbox.mu.Unlock()
	select {
	case s.outbox.wake <- struct{}{}:
	default:
	}
	s.workers.Wait()
	err := s.flush() // of what a policy has left
	for _, seg := range s.segments.list() {
		seg.handle.close()
	}
	if lockErr := s.lock.Close(); lockErr != nil {
		err = errors.Join(err, fmt.Errorf("unlock data directory: %w", lockErr))
	}
	return err
}
