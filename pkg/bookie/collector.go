package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Collection is what garbage collection asks of a store; [*ledgerstore.Store] is one.
type Collection interface {
	Ledgers(yield func(ledgerstore.LedgerInfo) bool)
	Ledger(id entry.LedgerID) (ledgerstore.LedgerInfo, bool)
	Mark(id entry.LedgerID) uint64
	DeleteLedger(ctx context.Context, id entry.LedgerID, mark uint64) error
}

// Records is what garbage collection asks of the metadata; [*meta.Store] is one. All reads are linearizable.
type Records interface {
	Ledgers
	GetCluster(ctx context.Context) (meta.ClusterInfo, error)
	Holdings(ctx context.Context, u entry.StorageUUID) (meta.Holdings, error)
	Revision(ctx context.Context) (int64, error)
	ConfirmDeleted(ctx context.Context, id entry.LedgerID, u entry.StorageUUID) error
	RaiseRestoreGeneration(ctx context.Context) error
}

// GCConfig configures garbage collection. Zero values become the defaults.
type GCConfig struct {
	// Interval is the pause between passes. Default 1 min.
	Interval time.Duration
	// Grace is how long a closed ledger must have been seen not to be this bookie's. Default 10 min.
	Grace time.Duration
	// MaxFraction of the ledgers here is the most that a pass deletes (but always up to 16). Default 0.25.
	MaxFraction float64
	// ReadsPerSecond limits the metadata reads of a pass. Default 1000.
	ReadsPerSecond float64
	// Sched is the clock, and how it waits; nil is the real one.
	Sched sched.Scheduler
}

// WithDefaults fills in what is zero.
func (c GCConfig) WithDefaults() GCConfig {
	setDefault(&c.Interval, time.Minute)
	setDefault(&c.Grace, 10*time.Minute)
	setDefault(&c.MaxFraction, 0.25)
	setDefault(&c.ReadsPerSecond, 1000)
	c.Sched = sched.OrReal(c.Sched)
	return c
}

// Pass is the outcome of one pass.
type Pass struct {
	// Deleted ledgers are buried here; Quarantined ones have no record; Skipped ones could not be decided;
	// Postponed ones may go and exceed the cap, or a repair added to them meanwhile.
	Deleted, Quarantined, Skipped, Postponed int
}

const (
	// sweepPerPass is how many of the ledgers that nothing is known to be due for are read all the same in a pass, in
	// turn: the index that spares the reading is believed, and checked.
	sweepPerPass = 256
	// lookInterval is how often etcd's revision is looked at between passes: a restored etcd must be noticed before it
	// has made as many revisions as it lost.
	lookInterval = 5 * time.Second
)

// Collector carries out what [Judge] decides, over all ledgers stored here and all that the metadata place here.
//
// A pass lists the reverse index of this bookie, which says which ledgers are placed here and which of them are being
// deleted, and reads the records of those and of what is stored here and not placed here, besides a few of the
// others. To read every record in each pass was rejected: with 100,000 ledgers that kept etcd at 1000 reads a second for
// most of the time, to find nothing.
type Collector struct {
	cfg     GCConfig
	me      Identity
	store   Collection
	records Records
	seenRev *revisions
	log     *slog.Logger
	metrics *gcMetrics
	limiter *rate.Limiter
	sched   sched.Scheduler

	busy        sched.Turn // one pass at a time
	seen        map[entry.LedgerID]Sighting
	quarantined map[entry.LedgerID]bool
	swept       entry.LedgerID // the last one that was read in turn
	raised      bool           // the restore generation, by this process
}

// NewCollector makes a collector. fs and file are where the highest revision of etcd is kept; registerer may be nil.
func NewCollector(cfg GCConfig, me Identity, store Collection, records Records, fs vfs.FS, file string, log *slog.Logger, registerer prometheus.Registerer) *Collector {
	cfg = cfg.WithDefaults()
	return &Collector{
		cfg: cfg, me: me, store: store, records: records, log: log, metrics: newGCMetrics(registerer),
		seenRev: newRevisions(fs, file), limiter: rate.NewLimiter(rate.Limit(cfg.ReadsPerSecond), 100), sched: cfg.Sched,
		seen: make(map[entry.LedgerID]Sighting), quarantined: make(map[entry.LedgerID]bool),
	}
}

// Run makes a pass per interval, and looks at etcd's revision in between, until ctx ends.
func (c *Collector) Run(ctx context.Context) {
	next := c.sched.Now().Add(c.cfg.Interval)
	failing := ""
	for {
		var err error
		if c.sched.Now().Before(next) {
			err = c.Look(ctx)
		} else {
			_, err = c.Pass(ctx)
			next = c.sched.Now().Add(c.cfg.Interval)
		}
		if ctx.Err() != nil {
			return
		}
		switch {
		case err != nil && failing != err.Error():
			failing = err.Error()
			c.log.Warn("garbage collection cannot go on, nothing is deleted", slog.Any("error", err))
		case err == nil && failing != "":
			failing = ""
			c.log.Info("garbage collection goes on")
		}
		if sched.Sleep(ctx, c.sched, min(lookInterval, c.cfg.Interval)) != nil {
			return
		}
	}
}

func (c *Collector) end(err error) {
	stopped := 0.0
	if err != nil {
		stopped = 1
	}
	c.metrics.stopped.Set(stopped)
	c.busy.Give()
}

// pace waits until the next record may be read.
func (c *Collector) pace(ctx context.Context) error {
	now := c.sched.Now()
	if wait := c.limiter.ReserveN(now, 1).DelayFrom(now); wait > 0 {
		return sched.Sleep(ctx, c.sched, wait)
	}
	return ctx.Err()
}

// Look checks that etcd has not gone back behind what this bookie has seen of it.
func (c *Collector) Look(ctx context.Context) (err error) {
	if err := c.busy.Take(ctx, c.sched); err != nil {
		return err
	}
	defer func() { c.end(err) }()
	rev, err := c.records.Revision(ctx)
	if err != nil {
		return fmt.Errorf("read etcd's revision: %w", err)
	}
	return c.note(ctx, rev)
}

// note takes a revision that etcd has just told. An etcd that was restored has forgotten which ledger ids it gave away, and
// gives them again: bookies that have those ledgers refuse what is appended to them. So whoever sees that makes it give higher
// ones. Each bookie does so each time it starts, which is harmless: there are 32,767 generations.
func (c *Collector) note(ctx context.Context, rev int64) error {
	err := c.seenRev.note(rev)
	var back *wentBackError
	if !errors.As(err, &back) || c.raised {
		return err
	}
	cluster, failed := c.records.GetCluster(ctx)
	switch {
	case failed != nil:
		return errors.Join(err, fmt.Errorf("read cluster: %w", failed))
	case cluster.UUID != c.me.Cluster:
		return errors.Join(err, fmt.Errorf("etcd holds cluster %s, this bookie's is %s", cluster.UUID, c.me.Cluster))
	}
	if failed := c.records.RaiseRestoreGeneration(ctx); failed != nil {
		return errors.Join(err, failed)
	}
	c.raised = true
	c.log.Warn("etcd was restored from an older copy: new ledgers get ids above all that it can have forgotten")
	return err
}

// Pass looks once at every ledger that something may be due for. An error means that the pass ended early; what it
// deleted before stays deleted.
func (c *Collector) Pass(ctx context.Context) (p Pass, err error) {
	if err := c.busy.Take(ctx, c.sched); err != nil {
		return p, err
	}
	defer func() { c.end(err) }()
	cluster, err := c.records.GetCluster(ctx)
	if err != nil {
		return p, fmt.Errorf("read cluster: %w", err)
	}
	if cluster.UUID != c.me.Cluster {
		return p, fmt.Errorf("etcd holds cluster %s, this bookie's is %s", cluster.UUID, c.me.Cluster)
	}
	placed, err := c.records.Holdings(ctx, c.me.Storage)
	if err != nil {
		return p, fmt.Errorf("list ledgers placed here: %w", err)
	}
	if err := c.note(ctx, placed.Revision); err != nil {
		return p, err
	}
	if err := c.seenRev.save(); err != nil {
		return p, fmt.Errorf("keep etcd's revision: %w", err)
	}
	ids, stored := c.due(placed)
	limit := maxDeletes(stored, c.cfg.MaxFraction)
	seen := make(map[entry.LedgerID]Sighting)
	for _, id := range ids {
		if err := c.pace(ctx); err != nil {
			return p, fmt.Errorf("wait for a read: %w", err)
		}
		if err := c.one(ctx, id, &p, limit, seen); err != nil {
			return p, err
		}
	}
	c.seen = seen
	c.metrics.quarantined.Set(float64(p.Quarantined))
	c.metrics.passes.Inc()
	return p, nil
}

// due returns the ledgers whose records a pass reads, by id, and how many are stored here.
func (c *Collector) due(placed meta.Holdings) (ids []entry.LedgerID, stored int) {
	ids = append(ids, placed.Deleting...)
	rest := placed.Ledgers
	c.store.Ledgers(func(l ledgerstore.LedgerInfo) bool {
		stored++
		if _, found := slices.BinarySearch(placed.Ledgers, l.Ledger); !found {
			ids = append(ids, l.Ledger)
		}
		return true
	})
	from, found := slices.BinarySearch(rest, c.swept)
	if found {
		from++
	}
	n := min(sweepPerPass, len(rest))
	for i := range n {
		c.swept = rest[(from+i)%len(rest)]
		ids = append(ids, c.swept)
	}
	slices.Sort(ids)
	return slices.Compact(ids), stored
}

// one judges a ledger and acts. The mark is read before the record: a copy that counts by a later record has moved it by
// the time of the deletion, or comes behind the deletion and is refused. To count the entries instead is not enough: a repair
// may send what is here already, and may do so after the count.
func (c *Collector) one(ctx context.Context, id entry.LedgerID, p *Pass, limit int, seen map[entry.LedgerID]Sighting) error {
	mark := c.store.Mark(id)
	l, err := c.records.GetLedger(ctx, id)
	info, stored := c.store.Ledger(id)
	here := Local{Stored: stored, Entries: info.Entries}
	verdict := Judge(c.me.Storage, here, l, err, c.seen[id], c.sched.Now(), c.cfg.Grace)
	if verdict != Quarantine {
		delete(c.quarantined, id)
	}
	switch verdict {
	case Keep:
	case Skip:
		if ctx.Err() != nil || errors.Is(err, meta.ErrUnavailable) {
			return fmt.Errorf("read ledger %d: %w", id, err)
		}
		p.Skipped++
		c.metrics.skipped.Inc()
		if s, ok := c.seen[id]; ok {
			seen[id] = s
		}
	case Watch:
		s := c.seen[id]
		if s.At.IsZero() || s.Entries != here.Entries {
			s = Sighting{At: c.sched.Now(), Entries: here.Entries}
		}
		seen[id] = s
	case Quarantine:
		p.Quarantined++
		if !c.quarantined[id] {
			c.quarantined[id] = true
			c.log.Warn("ledger has no record and no tombstone, kept in quarantine", slog.Uint64("ledger", uint64(id)))
		}
	case Delete:
		if p.Deleted >= limit {
			p.Postponed++
			if s, ok := c.seen[id]; ok {
				seen[id] = s
			}
			return nil
		}
		switch err := c.store.DeleteLedger(ctx, id, mark); {
		case errors.Is(err, ledgerstore.ErrMarked): // the grace time begins anew
			p.Postponed++
			return nil
		case err != nil:
			return err
		}
		p.Deleted++
		c.metrics.deleted.Inc()
		c.log.Info("ledger deleted", slog.Uint64("ledger", uint64(id)), slog.String("state", l.State.String()))
		if l.State == meta.LedgerDeleting && unconfirmed(l, c.me.Storage) {
			return c.confirm(ctx, id)
		}
	case Confirm:
		return c.confirm(ctx, id)
	}
	return nil
}

func (c *Collector) confirm(ctx context.Context, id entry.LedgerID) error {
	if err := c.records.ConfirmDeleted(ctx, id, c.me.Storage); err != nil {
		return fmt.Errorf("confirm deletion of ledger %d: %w", id, err)
	}
	return nil
}

// gcMetrics are a collector's.
type gcMetrics struct {
	passes      prometheus.Counter
	stopped     prometheus.Gauge
	deleted     prometheus.Counter
	skipped     prometheus.Counter
	quarantined prometheus.Gauge
}

func newGCMetrics(registerer prometheus.Registerer) *gcMetrics {
	m := &gcMetrics{
		passes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookie_gc_passes_total", Help: "Passes of garbage collection that went through.",
		}),
		stopped: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "penstock_bookie_gc_stopped", Help: "1 while garbage collection deletes nothing, because etcd is away, is another cluster's or went back.",
		}),
		deleted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookie_gc_deleted_ledgers_total", Help: "Ledgers that garbage collection deleted.",
		}),
		skipped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_bookie_gc_skipped_ledgers_total", Help: "Ledgers about which garbage collection could not decide.",
		}),
		quarantined: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "penstock_bookie_gc_quarantined_ledgers", Help: "Ledgers stored here of which the metadata have neither record nor tombstone.",
		}),
	}
	if registerer != nil {
		registerer.MustRegister(m.passes, m.stopped, m.deleted, m.skipped, m.quarantined)
	}
	return m
}
