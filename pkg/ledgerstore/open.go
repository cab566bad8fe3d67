package ledgerstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Open locks the directory, recovers what is in it, and returns a store that is ready to serve: each segment is
// sealed, the index complete, and what may have been lost is in limbo and fenced, durably. It scans only segments
// that were not sealed. A nil reg leaves the metrics unregistered. Errors: vfs.ErrLocked if another process has the
// directory; an identity that is not the configured one; disk errors.
func Open(ctx context.Context, cfg Config, fs vfs.FS, log *slog.Logger, reg prometheus.Registerer) (*Store, error) {
	return open(ctx, cfg, fs, log, reg, nil)
}

// open is Open; with h, which may be nil, the store gets no goroutines.
func open(ctx context.Context, cfg Config, fs vfs.FS, log *slog.Logger, reg prometheus.Registerer, h *ByHand) (_ *Store, err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return nil, fmt.Errorf("configure store: %w", err)
	}
	m, err := newMetrics(reg)
	if err != nil {
		return nil, err
	}
	if err := makeDir(fs, cfg.Dir); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	lock, err := fs.Lock(path.Join(cfg.Dir, lockName))
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	s := &Store{
		cfg: cfg, log: log, metrics: m,
		cache:   newTailCache(cfg.CacheBytes),
		footers: newFooterCache(cfg.IndexBytes),
		inbox:   inbox{wake: make(chan struct{}, 1)},
		outbox:  outbox{wake: make(chan struct{}, 1)},
		syncs:   make(chan *Batch, maxInFlight),
		loopEnd: make(chan struct{}),
		kick:    make(chan struct{}, 1),
		fatal:   make(chan error, 1),
	}
	strict, err := newStrictFS(fs, cfg.Dir, func(err error) { s.post(&Broken{Err: err}) })
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open data directory: %w", err), lock.Close())
	}
	s.fs, s.lock = strict, closers{strict, lock}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if cfg.CompactBytesPerSecond > 0 {
		s.limiter = rate.NewLimiter(rate.Limit(cfg.CompactBytesPerSecond), int(max(cfg.CompactBytesPerSecond, groupBytes)))
	}
	if cfg.Sync.Interval > 0 && h == nil {
		s.lazy = newLazySync(cfg.Sync)
		m.syncInterval.Set(cfg.Sync.Interval.Seconds())
	}
	m.lowWatermark.Set(cfg.LowRatio)
	m.highWatermark.Set(cfg.HighRatio)
	rec := &recovery{store: s, scans: maxScans}
	if h != nil {
		h.take(s)
		rec.scans = 1 // in the same order each time
	}
	if err := rec.run(ctx); err != nil {
		s.cancel()
		rec.abandon()
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), s.lock.Close())
	}
	if err := registerLedgers(reg, s.table); err != nil {
		s.cancel()
		rec.abandon()
		return nil, errors.Join(err, s.lock.Close())
	}
	if h != nil {
		return s, rec.finish(ctx)
	}
	s.start()
	if err := rec.finish(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), s.Close())
	}
	if err := s.startSpace(); err != nil {
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), s.Close())
	}
	return s, nil
}

func makeDir(fs vfs.FS, dir string) error {
	dir = path.Clean(dir)
	var missing []string
	for at := dir; ; at = path.Dir(at) {
		if _, err := fs.Stat(at); err == nil || at == path.Dir(at) {
			break
		}
		missing = append(missing, at)
	}
	if err := fs.MkdirAll(dir); err != nil {
		return err
	}
	for _, made := range missing { // each name is durable only with its own parent
		if err := fs.SyncDir(path.Dir(made)); err != nil {
			return err
		}
	}
	return nil
}

// start runs the goroutines that serve requests.
func (s *Store) start() {
	go s.run()
	s.workers.Go(s.complete)
	for range maxInFlight {
		s.workers.Go(s.syncer)
	}
	if s.lazy != nil {
		s.workers.Go(func() { s.lazy.run(s.ctx) })
	}
}

// startSpace runs those that look after space.
func (s *Store) startSpace() error {
	state, err := s.measure()
	if err != nil {
		return fmt.Errorf("read the disk's usage: %w", err)
	}
	s.setState(state)
	s.post(&Space{State: state})
	s.workers.Go(s.watch)
	if s.cfg.CompactBytesPerSecond > 0 {
		s.workers.Go(s.compactor)
	}
	return nil
}

// recovery is one Open.
type recovery struct {
	store *Store
	scans int // at once
	found []*recovered
	lost  []manifestSegment
	all   bool // it cannot be told whose records were lost
	loss  []entry.LedgerID
	// noList: the manifest is lost. What is on disk stays as it is until a new one can be written that lists the loss.
	noList bool
	// last is the last segment of a disk that has no room for another one, if it can be appended to.
	last *recovered
}

// recovered is a segment that is there.
type recovered struct {
	seg      *Segment
	reader   *segment.Reader    // if it was sealed
	scan     *segment.Recovered // if it was not
	ledgers  []segment.LedgerInfo
	controls []segment.Control
}

// run brings the table up to what the disk says, and makes a segment to append to.
func (r *recovery) run(ctx context.Context) error {
	s := r.store
	m, err := r.readManifest()
	if err != nil {
		return err
	}
	s.segments.manifest = m
	if err := r.cleanUp(m); err != nil {
		return err
	}
	if err := r.openSegments(ctx, m); err != nil {
		return err
	}
	s.table = newTable(m.edition << 20)
	r.load()
	if r.noList {
		if err := r.recordLoss(); err != nil {
			return err
		}
	}
	scanned := 0
	for _, f := range r.found {
		s.segments.insert(f.seg)
		if f.scan != nil {
			scanned++
		}
	}
	damaged := r.all || len(r.loss) > 0
	if err := r.keepLast(); err != nil {
		return err
	}
	if err := r.dropEmpty(); err != nil {
		return err
	}
	if !damaged { // before a file is made: a full disk gets back what is reserved behind the batches
		if err := r.seal(); err != nil {
			return err
		}
	}
	active, stated, err := r.firstActive()
	if err != nil {
		return err
	}
	s.core = newCore(s.table, active, s.cfg.PendingBytes, 1, s.cfg.SegmentSize/32)
	if stated != nil {
		s.core.vouchFor(stated)
	}
	s.core.trash = s.table.inTrash()
	s.core.lazy = s.lazy != nil
	s.log.Info("store recovered", "dir", s.cfg.Dir, "segments", len(r.found), "scanned", scanned, "damaged", damaged)
	return nil
}

// abandon closes what a failed run has opened.
func (r *recovery) abandon() {
	for _, f := range r.found {
		f.seg.handle.close()
	}
	for _, seg := range r.store.segments.list() {
		seg.handle.close()
	}
}

// finish makes the damage durable knowledge, and only then seals what was scanned: the seal forgets whom it affects.
func (r *recovery) finish(ctx context.Context) error {
	s := r.store
	if r.all {
		r.loss = []entry.LedgerID{everyLedger}
		for _, l := range s.table.snapshot() {
			if l.id != everyLedger {
				r.loss = append(r.loss, l.id)
			}
		}
	}
	slices.Sort(r.loss)
	r.loss = slices.Compact(r.loss)
	if err := s.limbo(ctx, false, r.loss); err != nil {
		return err
	}
	s.loss.Ledgers = slices.DeleteFunc(r.loss, func(id entry.LedgerID) bool { return id == everyLedger })
	if err := r.seal(); err != nil {
		return err
	}
	return r.dropLost()
}

// seal writes the footers that are missing.
func (r *recovery) seal() error {
	var g errgroup.Group
	g.SetLimit(r.scans)
	for _, f := range r.found {
		if f.scan != nil && f != r.last && !f.seg.sealed.Load() {
			g.Go(func() error { return f.seal(r.store.fs) })
		}
	}
	return g.Wait()
}

func (f *recovered) seal(fs vfs.FS) error {
	if err := segment.SealRecovered(fs, f.seg.path, f.scan); err != nil {
		return err
	}
	f.seg.handle.seal()
	reader, err := f.seg.handle.acquireReader(fs, f.seg.path)
	if err != nil {
		return err
	}
	defer f.seg.handle.release()
	if err := f.seg.load(reader); err != nil {
		return err
	}
	f.seg.sealed.Store(true)
	return nil
}

// dropEmpty drops segments that hold nothing: they were made ahead.
func (r *recovery) dropEmpty() error {
	s := r.store
	var empty []*recovered
	r.found = slices.DeleteFunc(r.found, func(f *recovered) bool {
		is := f != r.last && f.scan != nil && f.scan.Entries() == 0 && len(f.controls) == 0 && f.scan.Corrupt == nil
		if is {
			empty = append(empty, f)
		}
		return is
	})
	if len(empty) == 0 {
		return nil
	}
	err := s.publish(true, func(m *manifest) {
		for _, f := range empty {
			m.remove(f.seg.seq)
		}
	})
	if err != nil {
		return err
	}
	for _, f := range empty {
		s.segments.drop(f.seg)
		if err := s.discard(f.seg); err != nil {
			return err
		}
	}
	return s.fs.SyncDir(s.cfg.Dir)
}
