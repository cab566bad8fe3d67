package topic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Topic is one topic partition at its owner. It is safe for concurrent use.
//
// Everything that has an order is under one lock, held for the few instructions that fix it: the offset of a batch,
// its producer's sequence, and its place in the chain are taken together, and what a ledger confirms becomes visible,
// cached and deduplicated together. Rejected: a goroutine that owns the topic and is sent batches; it costs a wake-up
// for each batch of a quiet topic, and a goroutine for each idle one.
type Topic struct {
	env deps
	cfg Config
	c   *chain.Chain
	// owner is the epoch of the ownership.
	owner entry.Epoch

	cached  *cached
	pending *budget.Budget // this topic's share

	mu          sync.Mutex
	next        entry.Offset // of the next batch
	visible     entry.Offset // readers see what lies below
	lastTime    int64        // broker times do not fall
	outstanding int          // batches in the chain and not done
	failing     error        // batches fail; until the last of them is done
	err         error        // why the topic is of no more use
	watchers    []*watcher
	appended    int64 // bytes since it was opened

	producers map[string]*Producer // the open ones, by name
	left      uint64               // the highest epoch of those that left, without deduplication
	dd        *dedup               // nil until loaded
	ddSince   time.Time            // when it was, by the clock of here
	loading   chan struct{}        // closed when the load under way ends
	saving    chan struct{}        // closed when the snapshot under way ends
	snapped   entry.Offset         // a snapshot covers what lies below
	snapBytes int64                // value of appended at the snapshot
	opened    entry.Offset         // next when the topic was opened
}

// deps is what of Env is needed after Open.
type deps struct {
	Cache   *Cache
	Budget  *budget.Budget
	Log     *slog.Logger
	Metrics *Metrics
	Sched   sched.Scheduler
}

// pending is a batch under way.
type pending struct {
	t        *Topic
	producer *Producer
	state    *producerState // with deduplication
	first    uint64
	lastSeq  uint64
	last     sequence
	epoch    uint64
	level    ledger.AckLevel
	offset   entry.Offset
	pos      entry.Position
	done     func(Receipt, error)
	chained  func(entry.Position, error) // p.finish, bound once
	waiters  []waiter                    // duplicates that came meanwhile

	confirmed, finished bool
}

// waiter is a duplicate of a batch under way.
type waiter struct {
	producer    *Producer
	first, last uint64
	done        func(Receipt, error)
}

var pendings sync.Pool

func getPending() *pending {
	p, ok := pendings.Get().(*pending)
	if !ok {
		p = new(pending)
		p.chained = p.finish
	}
	return p
}

func (p *pending) recycle() {
	*p = pending{chained: p.chained}
	pendings.Put(p)
}

// Open takes a topic over: it shuts the former owner out, recovers what that left open, and knows the next offset.
// Errors are those of chain.Open. The guard is the proof of ownership of the topic's bundle.
func Open(ctx context.Context, env Env, guard meta.Guard, id meta.ChainID, cfg Config) (*Topic, error) {
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	env.Sched = sched.OrReal(env.Sched)
	cfg = cfg.withDefaults()
	t := &Topic{
		owner: guard.Epoch,
		env:   deps{env.Cache, env.Budget, env.Log, env.Metrics, env.Sched}, cfg: cfg,
		cached: &cached{}, pending: budget.NewWaiting(cfg.MaxPendingBytes, func(ctx context.Context, ready <-chan struct{}) error {
			_, err := env.Sched.Wait(ctx, sched.Channels{ready})
			return err //nolint:wrapcheck // as a context says it
		}),
	}
	cc := chain.Config{
		Replication: cfg.Replication, RollBytes: cfg.RollBytes, RollEntries: cfg.RollEntries, RollAge: cfg.RollAge,
		OpenNow: cfg.OpenNow, Describe: describe,
		OnConfirmed: t.onConfirmed, OnLost: t.onLost, Released: t.released,
	}
	var err error
	if t.c, err = chain.Open(ctx, env.Chain, guard, id, cc); err != nil {
		return nil, fmt.Errorf("open topic: %w", err)
	}
	t.next = t.c.NextOffset()
	t.visible, t.opened = t.next, t.next
	for _, r := range t.c.Runs() {
		t.lastTime = max(t.lastTime, r.MaxTime)
	}
	return t, nil
}

// Earliest returns the offset of the oldest message that is stored; Next's, if none is.
func (t *Topic) Earliest() entry.Offset {
	for _, r := range t.c.Runs() {
		if !r.Closed || r.End > r.First {
			return r.First
		}
	}
	return t.Next()
}

// Next returns the offset after the newest message that readers may see.
func (t *Topic) Next() entry.Offset {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.visible
}

// Lost is closed when the ownership is lost, or the topic shut down. Err says why.
func (t *Topic) Lost() <-chan struct{} { return t.c.Lost() }

// Err returns why the topic is of no more use, or takes no messages at the moment; nil when all is well.
func (t *Topic) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return t.err
	}
	return t.failing
}

// Chain returns the topic's ledgers, for describing them.
func (t *Topic) Chain() *chain.Chain { return t.c }

// Close closes the topic's ledger, so that the next owner has nothing to recover, after a snapshot of what changed
// of the producers. If ctx ends first, the topic is shut down all the same.
func (t *Topic) Close(ctx context.Context) error {
	t.refuse(ErrClosed)
	if t.snapshotWorthwhile() {
		if err := t.Snapshot(ctx); err != nil {
			// The next owner reads more entries instead.
			t.env.Log.Info("topic closes without a snapshot", "chain", string(t.c.ID()), "error", err)
		}
	}
	err := t.c.Close(ctx)
	t.cached.clear()
	if err != nil && !errors.Is(err, chain.ErrClosed) {
		return fmt.Errorf("close topic: %w", err)
	}
	return nil
}

// Shutdown drops the topic: batches in flight end with an unknown outcome. It returns once all are told.
func (t *Topic) Shutdown() {
	t.refuse(ErrClosed)
	t.c.Shutdown()
	t.cached.clear()
}

// Delete closes the topic and deletes all its ledgers.
func (t *Topic) Delete(ctx context.Context) error {
	t.refuse(ErrClosed)
	err := t.c.Delete(ctx)
	t.cached.clear()
	if err != nil {
		return fmt.Errorf("delete topic: %w", err)
	}
	return nil
}

// refuse lets no batch in any more.
func (t *Topic) refuse(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
	}
}

// onConfirmed makes entries visible. It runs on one goroutine at a time.
func (t *Topic) onConfirmed(entries []chain.ConfirmedEntry) {
	if t.env.Cache != nil {
		t.env.Cache.push(t.cached, entries)
	}
	var late []pendingWaiters
	t.mu.Lock()
	for i := range entries {
		e := &entries[i]
		t.visible = e.Offset + entry.Offset(e.Span)
		p, ok := e.Tag.(*pending)
		if !ok {
			panic("topic: a foreign entry was confirmed")
		}
		p.pos, p.confirmed = e.Position, true
		if p.state != nil {
			p.state.confirm(p.epoch, p.last, e.Time)
			p.state.leave(p)
			p.state.awaitCopies(p)
		}
		if p.finished {
			if len(p.waiters) > 0 {
				late = append(late, pendingWaiters{p.receipt(), p.waiters})
			}
			p.recycle()
		}
	}
	for _, w := range t.watchers {
		w.tell()
	}
	t.mu.Unlock()
	for _, l := range late {
		l.tell(nil)
	}
}

// pendingWaiters are duplicates to be told, without the lock.
type pendingWaiters struct {
	receipt Receipt
	waiters []waiter
}

func (w pendingWaiters) tell(err error) {
	for _, d := range w.waiters {
		r := w.receipt
		r.FirstSeq, r.LastSeq, r.Duplicate = d.first, d.last, err == nil
		d.done(r, err)
	}
}

func (p *pending) receipt() Receipt {
	return Receipt{FirstSeq: p.first, LastSeq: p.lastSeq, Position: p.pos, Offset: p.offset}
}

// finish is the chain's word on a batch.
func (p *pending) finish(pos entry.Position, err error) {
	t := p.t
	t.mu.Lock()
	t.outstanding--
	if !p.confirmed {
		p.pos = pos
	}
	p.finished = true
	r, done := p.receipt(), p.done
	if p.state != nil {
		p.state.settleCopies(p, err)
	}
	var waiters []waiter
	if err != nil {
		var failed *ledger.AppendError
		if errors.As(err, &failed) && failed.Outcome == ledger.NotWritten {
			if t.failing == nil {
				t.failing = err
			}
			if p.state != nil {
				p.state.leave(p)
			}
			p.producer.missing(p.first)
			for _, w := range p.waiters { // of the same producer, come back, mostly
				w.producer.missing(w.first)
			}
		}
	}
	if p.confirmed || err != nil {
		// A duplicate of a batch that is done early waits for it to be confirmed.
		waiters, p.waiters = p.waiters, nil
	}
	if p.confirmed {
		p.recycle()
	}
	if t.outstanding == 0 && t.failing != nil {
		if next, ok := t.c.Resume(); ok {
			t.next, t.failing = next, nil
		}
	}
	t.mu.Unlock()
	done(r, err)
	pendingWaiters{r, waiters}.tell(err)
}

// onLost is told before what fails of it is done.
func (t *Topic) onLost(err error) {
	if errors.Is(err, chain.ErrClosed) {
		err = ErrClosed
	}
	var late []pendingWaiters
	t.mu.Lock()
	if t.err == nil || errors.Is(t.err, ErrClosed) {
		t.err = err
	}
	if t.dd != nil {
		for _, s := range t.dd.producers {
			for _, p := range s.inflight() {
				if p.finished && len(p.waiters) > 0 { // done early, never confirmed
					late = append(late, pendingWaiters{p.receipt(), p.waiters})
					p.waiters = nil
				}
			}
		}
	}
	for _, w := range t.watchers {
		w.tell()
	}
	t.mu.Unlock()
	for _, l := range late {
		l.tell(&ledger.AppendError{Entry: entry.NoEntry, Outcome: ledger.Unknown, Err: err})
	}
}

// released gives bytes back that no bookie needs any more.
func (t *Topic) released(n int) {
	t.pending.Release(int64(n))
	if t.env.Budget != nil {
		t.env.Budget.Release(int64(n))
	}
}

// PendingBytes returns the bytes of batches that are charged to the budget for this topic.
func (t *Topic) PendingBytes() int64 { return t.pending.Used() }
