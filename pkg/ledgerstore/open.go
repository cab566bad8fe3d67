package ledgerstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	iofs "io/fs"
	"log/slog"
	"path"
	"slices"
	"strings"
	"syscall"

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
		cfg: cfg, log: log, metrics: m, lock: lock,
		cache:   newTailCache(cfg.CacheBytes),
		footers: newFooterCache(cfg.IndexBytes),
		inbox:   inbox{wake: make(chan struct{}, 1)},
		outbox:  outbox{wake: make(chan struct{}, 1)},
		syncs:   make(chan *Batch, maxInFlight),
		loopEnd: make(chan struct{}),
		kick:    make(chan struct{}, 1),
		fatal:   make(chan error, 1),
	}
	s.fs = &strictFS{FS: fs, broken: func(err error) { s.post(&Broken{Err: err}) }}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if cfg.CompactBytesPerSecond > 0 {
		s.limiter = rate.NewLimiter(rate.Limit(cfg.CompactBytesPerSecond), int(max(cfg.CompactBytesPerSecond, groupBytes)))
	}
	rec := &recovery{store: s, scans: maxScans}
	if h != nil {
		s.cfg.Trash = -1 // that goes by the clock
		h.take(s)
		rec.scans = 1 // in the same order each time
	}
	if err := rec.run(ctx); err != nil {
		s.cancel()
		rec.abandon()
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), lock.Close())
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
	if err := r.dropEmpty(); err != nil {
		return err
	}
	if !damaged { // before a file is made: a full disk gets back what is reserved behind the batches
		if err := r.seal(); err != nil {
			return err
		}
	}
	active, err := s.firstActive()
	if err != nil {
		return err
	}
	s.core = newCore(s.table, active, s.cfg.PendingBytes, 1, s.cfg.SegmentSize/32)
	s.core.trash = s.table.inTrash()
	s.log.Info("store recovered", "dir", s.cfg.Dir, "segments", len(r.found), "scanned", scanned, "damaged", damaged)
	return nil
}

// firstActive makes the segment that the store begins with. On a full disk that is the last spare file, which nothing
// else takes, and without it whatever there is room for: a few control records are enough to free space.
func (s *Store) firstActive() (*Segment, error) {
	active, err := s.prepare(ordinary)
	if errors.Is(err, syscall.ENOSPC) {
		active, err = s.prepare(lastReserve)
	}
	for size := s.cfg.SegmentSize / 2; errors.Is(err, syscall.ENOSPC) && size >= minSegmentSize/2; size /= 2 {
		active, err = s.prepareSized(size, lastReserve)
	}
	return active, err
}

// recordLoss says in the log, durably, that every ledger is in limbo, before the first manifest lists the log: a start
// that is cut short before finds the manifest lost again.
func (r *recovery) recordLoss() error {
	s := r.store
	known := s.table.snapshot()
	slices.SortFunc(known, func(a, b *ledger) int { return cmp.Compare(a.id, b.id) })
	var recs []segment.Record
	for _, l := range known {
		if l.term == 0 && l.id != everyLedger {
			recs = append(recs, segment.Record{Kind: segment.KindFence, Ledger: l.id, Term: 1})
		}
		if !l.limbo && l.id != everyLedger {
			recs = append(recs, segment.Record{Kind: segment.KindLimbo, Ledger: l.id})
		}
	}
	recs = append(recs, segment.Record{Kind: segment.KindLimbo, Ledger: everyLedger})
	seg := &Segment{seq: s.nextSequence()}
	size := mib/16 + int64(len(recs))*3*segment.RecordOverhead // with its row in the footer
	w, err := s.create(seg, size, ordinary)
	if errors.Is(err, syscall.ENOSPC) {
		w, err = s.create(seg, size, lastReserve)
	}
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(recs, maxGroupRecords) {
		if _, err := w.AppendBatch(batch, 0); err != nil {
			return err
		}
	}
	if err := w.Seal(); err != nil {
		return err
	}
	seg.handle.close()
	listed := manifestSegment{sequence: seg.seq, rewrite: seg.gen, uuid: seg.uuid}
	if err := s.publish(true, func(m *manifest) { m.add(listed) }); err != nil {
		return err
	}
	f, err := r.openSegment(listed, 0)
	if err != nil || f == nil {
		return errors.Join(fmt.Errorf("read the record of the loss in %s", seg.path), err)
	}
	r.found = append(r.found, f)
	for _, c := range f.controls {
		r.loadControl(f.seg, c)
	}
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

// readManifest returns the manifest in force; a fresh one in an empty directory; and one made up from the files if
// it is damaged or gone.
func (r *recovery) readManifest() (*manifest, error) {
	s := r.store
	m, err := readManifest(s.fs, s.cfg.Dir)
	switch {
	case err == nil && m != nil:
		if m.cluster != s.cfg.Cluster || m.storage != s.cfg.Storage {
			return nil, fmt.Errorf("the data belongs to storage %s of cluster %s, this is %s of %s: start with the right directory, or empty it to begin as a new bookie",
				m.storage, m.cluster, s.cfg.Storage, s.cfg.Cluster)
		}
		return m, nil
	case err != nil && !errors.Is(err, errManifest):
		return nil, err
	}
	fresh := &manifest{next: 1, cluster: s.cfg.Cluster, storage: s.cfg.Storage}
	names, listErr := s.fs.List(s.cfg.Dir)
	if listErr != nil {
		return nil, fmt.Errorf("list data directory: %w", listErr)
	}
	for _, name := range names {
		if seq, rewrite, ok := parseSegmentName(name); ok {
			r.adopt(fresh, name, seq, rewrite)
			fresh.next = max(fresh.next, seq+1) // also of a file that is left alone
		}
	}
	if err != nil || len(fresh.segments) > 0 {
		// Without the list it cannot be told whether a segment is missing.
		r.all, r.noList = true, true
		s.log.Error("manifest is lost: every ledger is put in limbo", "dir", s.cfg.Dir, "segments", len(fresh.segments), "error", err)
	}
	if r.noList {
		return fresh, nil
	}
	fresh.edition = 1
	if err := writeManifest(s.fs, s.cfg.Dir, fresh); err != nil {
		return nil, err
	}
	return fresh, nil
}

// adopt lists a segment file that a lost manifest may have listed. Of rewrites the newest that is whole counts.
func (r *recovery) adopt(m *manifest, name string, seq uint64, rewrite uint32) {
	s := r.store
	at := path.Join(s.cfg.Dir, name)
	h, err := segment.ReadHeader(s.fs, at)
	if err != nil || h.Sequence != seq || h.Storage != s.cfg.Storage {
		s.log.Error("file is not a segment of this store and is left alone", "path", at, "error", err)
		return
	}
	if rewrite > 0 {
		whole, err := segment.Open(s.fs, at)
		if err != nil {
			return
		}
		_ = whole.Close() // only read
	}
	m.add(manifestSegment{sequence: seq, rewrite: rewrite, uuid: h.SegmentUUID})
}

// cleanUp removes what no manifest lists: it was never acknowledged, or lives on elsewhere. Anything that does not
// look like a file of this store is left alone.
func (r *recovery) cleanUp(m *manifest) error {
	s := r.store
	names, err := s.fs.List(s.cfg.Dir)
	if err != nil {
		return fmt.Errorf("list data directory: %w", err)
	}
	for _, name := range names {
		remove := name == manifestTemp || strings.HasPrefix(name, "spare-") && strings.HasSuffix(name, ".tmp")
		if seq, rewrite, ok := parseSegmentName(name); ok {
			remove = !r.all && !slices.ContainsFunc(m.segments, func(l manifestSegment) bool { return l.sequence == seq && l.rewrite == rewrite })
		}
		if n, ok := parseSpareName(name); ok {
			s.segments.nextSpare = max(s.segments.nextSpare, n)
			// One that was being taken when the power went is retired no more.
			_, err := segment.ReadHeader(s.fs, path.Join(s.cfg.Dir, name))
			remove = s.spareCount() == s.maxSpares() || !errors.Is(err, segment.ErrRetired)
			if !remove {
				s.addSpare(name)
			}
		}
		if remove {
			if err := s.fs.Remove(path.Join(s.cfg.Dir, name)); err != nil {
				return fmt.Errorf("remove leftover: %w", err)
			}
		}
	}
	return nil
}

// maxScans is how many segments are opened or scanned at once: the disk and the checksums take turns otherwise.
const maxScans = 4

// openSegments opens what is sealed and scans what is not. Each segment tells how much of the one before it must be
// there. They are scanned side by side nevertheless, as if nothing was known of that, and one whose verdict it can
// change is scanned again.
func (r *recovery) openSegments(ctx context.Context, m *manifest) error {
	found := make([]*recovered, len(m.segments))
	g, scanCtx := errgroup.WithContext(ctx)
	g.SetLimit(r.scans)
	for i := range slices.Backward(m.segments) {
		g.Go(func() error {
			if err := scanCtx.Err(); err != nil {
				return err
			}
			f, err := r.openSegment(m.segments[i], 0)
			found[i] = f
			return err
		})
	}
	err := g.Wait()
	for i, f := range slices.Backward(found) {
		switch {
		case f == nil:
			if err == nil {
				r.all = true
				r.lost = append(r.lost, m.segments[i])
			}
			continue
		case err == nil && f.scan != nil:
			durable := int64(0)
			if i+1 < len(found) && found[i+1] != nil && found[i+1].seg.seq == f.seg.seq+1 {
				durable = found[i+1].prevDurable()
			}
			if f, err = r.judge(f, m.segments[i], durable); err != nil {
				return err
			}
			found[i] = f
		}
		r.found = append(r.found, f)
	}
	slices.Reverse(r.found)
	return err
}

// judge returns a scan whose verdict takes in how much of the segment was durable.
func (r *recovery) judge(f *recovered, listed manifestSegment, durable int64) (*recovered, error) {
	if durable > f.scan.End || f.scan.Corrupt != nil {
		again, err := r.openSegment(listed, durable)
		if err != nil {
			return nil, err
		}
		if again == nil {
			return nil, fmt.Errorf("segment %s was readable and is no more", f.seg.path)
		}
		f = again
	}
	r.noteDamage(f)
	return f, nil
}

// prevDurable is how much of the segment before was durable, as far as this one knows.
func (f *recovered) prevDurable() int64 {
	if f.reader != nil {
		return f.reader.PrevDurable()
	}
	return f.scan.PrevDurable
}

// openSegment returns nil without an error for a segment that is lost.
func (r *recovery) openSegment(listed manifestSegment, durable int64) (*recovered, error) {
	s := r.store
	seg := &Segment{seq: listed.sequence, gen: listed.rewrite, uuid: listed.uuid}
	seg.path = path.Join(s.cfg.Dir, segmentName(seg.seq, seg.gen))
	f := &recovered{seg: seg}
	err := f.open(s.fs, durable)
	var damage *segment.CorruptError
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, iofs.ErrNotExist), errors.Is(err, segment.ErrBlank), errors.Is(err, segment.ErrRetired),
		errors.Is(err, errForeign), errors.As(err, &damage):
		seg.handle.close()
		s.log.Error("segment is lost: every ledger is put in limbo", "path", seg.path, "error", err)
		return nil, nil //nolint:nilnil // lost is an answer
	}
	seg.handle.close()
	return nil, fmt.Errorf("open segment: %w", err)
}

var errForeign = errors.New("the file is another segment than the manifest lists")

func (f *recovered) open(fs vfs.FS, durable int64) error {
	r, err := segment.Open(fs, f.seg.path)
	if err == nil {
		f.reader = r
		f.seg.handle.reader, f.seg.handle.sealed = r, true
		if r.Header().SegmentUUID != f.seg.uuid {
			return errForeign
		}
		if f.ledgers, err = r.Ledgers(); err == nil {
			f.controls, err = r.Controls()
		}
		if err == nil {
			err = f.seg.load(r)
			f.seg.sealed.Store(true)
			f.seg.handle.trim() // there are more segments than descriptors
			return err
		}
		f.reader = nil
		f.seg.handle.trim()
		f.seg.handle.sealed = false
	}
	var damage *segment.CorruptError
	if !errors.Is(err, segment.ErrUnsealed) && !errors.As(err, &damage) {
		return err
	}
	// Not sealed, or its footer is damaged: the batches tell what the footer would.
	if f.scan, err = segment.Recover(fs, f.seg.path, durable); err != nil {
		return err
	}
	if f.scan.Header.SegmentUUID != f.seg.uuid {
		return errForeign
	}
	f.ledgers, f.controls = f.scan.Ledgers(), f.scan.Controls()
	return nil
}

func (r *recovery) noteDamage(f *recovered) {
	c := f.scan.Corrupt
	if c == nil {
		return
	}
	r.store.log.Error("segment has lost records that were acknowledged: their ledgers are put in limbo",
		"path", f.seg.path, "gaps", len(c.Gaps), "ledgers", len(c.Ledgers), "all", c.AllLedgers)
	r.all = r.all || c.AllLedgers
	r.loss = append(r.loss, c.Ledgers...)
}

// load fills the table. Tombstones first: they tell which of the other records count.
func (r *recovery) load() {
	t := r.store.table
	for _, f := range r.found {
		for _, c := range f.controls {
			if c.Kind != segment.KindTombstone {
				continue
			}
			at := logPlace{seq: f.seg.seq, offset: c.Location.Offset}
			if c.Nonce != 0 { // carried forward
				at = logPlace{seq: c.Nonce, offset: int64(c.Term)}
			}
			sh := t.shard(c.Ledger)
			if old, ok := sh.tombs[c.Ledger]; !ok || !old.at.after(at) {
				sh.tombs[c.Ledger] = tomb{at: at, in: f.seg.seq, deleted: int64(c.Entry)}
			}
		}
	}
	for _, f := range r.found {
		for _, c := range f.controls {
			r.loadControl(f.seg, c)
		}
		for _, in := range f.ledgers {
			r.loadRun(f.seg, in)
		}
	}
}

func (r *recovery) ledger(id entry.LedgerID) *ledger {
	l := r.store.table.lookup(id)
	if l == nil {
		l = r.store.table.create(id)
		l.durable = true
	}
	return l
}

func (r *recovery) loadControl(seg *Segment, c segment.Control) {
	t := r.store.table
	at := logPlace{seq: seg.seq, offset: c.Location.Offset}
	if tomb, ok := t.tomb(c.Ledger); c.Kind == segment.KindTombstone || ok && !at.after(tomb.at) {
		return
	}
	l := r.ledger(c.Ledger)
	switch c.Kind { //nolint:exhaustive // entries are no controls, tombstones were loaded before
	case segment.KindFence:
		if c.Term >= l.term {
			l.term, l.acceptedTerm, l.termIn = c.Term, c.Term, seg.seq
		}
	case segment.KindLAC:
		if c.LAC >= l.lac {
			l.lac, l.lacIn = c.LAC, seg.seq
		}
	case segment.KindLimbo, segment.KindLimboCleared:
		l.limbo, l.limboIn = c.Kind == segment.KindLimbo, seg.seq
		l.acceptedLimbo = l.limbo
		if l.id == everyLedger {
			t.lossAll.Store(l.limbo)
		}
	}
}

func (r *recovery) loadRun(seg *Segment, in segment.LedgerInfo) {
	if in.Entries == 0 {
		return
	}
	held := &run{seg: seg, first: in.First, last: in.Last, count: in.Entries, bytes: in.Bytes}
	if tomb, ok := r.store.table.tomb(in.Ledger); ok && seg.seq <= tomb.at.seq {
		if !r.store.expired(tomb.deleted) {
			tomb.runs = append(tomb.runs, held)
			r.store.table.shard(in.Ledger).tombs[in.Ledger] = tomb
			seg.trash.Add(in.Bytes)
		}
		return
	}
	l := r.ledger(in.Ledger)
	l.addRun(held)
	seg.live.Add(in.Bytes)
	if in.LAC > l.lac {
		l.lac, l.lacIn = in.LAC, seg.seq
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
		if f.scan != nil && !f.seg.sealed.Load() {
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
		is := f.scan != nil && f.scan.Entries() == 0 && len(f.controls) == 0 && f.scan.Corrupt == nil
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

// dropLost forgets segments that are lost, once the limbo is durable that they leave behind.
func (r *recovery) dropLost() error {
	s := r.store
	if len(r.lost) == 0 {
		return nil
	}
	err := s.publish(true, func(m *manifest) {
		for _, l := range r.lost {
			m.remove(l.sequence)
		}
	})
	if err != nil {
		return err
	}
	for _, l := range r.lost {
		at := path.Join(s.cfg.Dir, segmentName(l.sequence, l.rewrite))
		if err := s.fs.Rename(at, at+".lost"); err != nil && !errors.Is(err, iofs.ErrNotExist) {
			return fmt.Errorf("set lost segment aside: %w", err)
		}
	}
	return s.fs.SyncDir(s.cfg.Dir)
}
