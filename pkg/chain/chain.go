package chain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Chain is the owner's handle of one chain of ledgers. It is safe for concurrent use.
//
// The decisions are [Core]'s. Chain feeds it events under one lock, hands appends to the ledger's writer under
// that lock (which never blocks, and keeps their order), and collects what is to be told to the outside in an
// outbox, which one goroutine at a time empties without the lock: that of the writer's completions mostly, a
// short-lived one otherwise. Opening, preparing and closing a ledger each have a goroutine for as long as they last;
// while appends are in flight, one more watches for the writer to break or to ask for a roll.
type Chain struct {
	env   Env
	cfg   Config
	guard meta.Guard
	id    meta.ChainID

	ctx    context.Context //nolint:containedctx // ends with the chain, for what outlives the call that started it
	cancel context.CancelFunc

	mu         sync.Mutex
	core       *Core
	rec        meta.Chain
	cur        *current     // of the open ledger, or of the one being closed
	prepared   *meta.Ledger // for the next ledger of a roll, not yet in metadata
	opened     *meta.Ledger // the newest ledger in metadata, until its writer is made
	outbox     []Action
	delivering bool
	watching   bool
	stopping   bool          // nothing is started any more but deliveries
	stale      bool          // rec may not be what is in metadata
	running    int           // goroutines
	quiet      chan struct{} // closed when that falls to 0, if somebody waits
	readers    []*runReader
	stats      *Stats        // nil when nothing was recovered
	turn       sched.Turn    // of the transactions on the chain's record, which follow one another
	switched   chan struct{} // closed at the next ActionUse, if somebody waits
	lost       chan struct{}
	ended      chan struct{} // closed as asked; made by Close
}

// Stats says what opening the chain took.
type Stats struct {
	// Recovered tells whether a former owner's ledger had to be recovered; the rest is about that.
	Recovered bool
	Ledger    ledger.Stats
	Took      time.Duration
	// Tail is the recovered ledger's last entry, if it had one.
	Tail *Entry
}

// current is the writer of the open ledger, with its hooks bound once.
type current struct {
	c *Chain
	w *ledger.Writer
}

// Open takes a chain over: it reads the chain's record, recovers and closes the one ledger that may not be closed,
// and opens the next one now (Config.OpenNow) or on the first append. Nothing may be read or appended by an older
// owner's rules from then on. The chain is created if it does not exist.
//
// Errors: meta.ErrEpoch when the guard is not the owner's; meta.ErrUnavailable; a recovery's errors; with OpenNow a
// *[NotEnoughBookiesError]. ctx bounds Open alone.
func Open(ctx context.Context, env Env, guard meta.Guard, id meta.ChainID, cfg Config) (*Chain, error) {
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	env.Sched = sched.OrReal(env.Sched)
	if env.Ledger.Sched == nil {
		env.Ledger.Sched = env.Sched
	}
	if env.Now == nil {
		env.Now = env.Sched.Now
	}
	if env.Ledger.Metadata == nil {
		env.Ledger.Metadata = env.Meta
		if store, ok := env.Meta.(*meta.Store); ok {
			env.Ledger.Metadata = store.Owned(guard) // T2 and T4 compare the epoch too
		}
	}
	cfg = cfg.withDefaults()
	if err := cfg.Replication.Validate(); err != nil {
		return nil, fmt.Errorf("open chain %s: %w", id, err)
	}
	c := &Chain{
		env: env, cfg: cfg, guard: guard, id: id,
		lost: make(chan struct{}),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	opened, err := c.load(ctx)
	if err != nil {
		c.cancel()
		return nil, fmt.Errorf("open chain %s: %w", id, err)
	}
	c.core = NewCore(Limits{Bytes: cfg.RollBytes, Entries: cfg.RollEntries, Age: cfg.RollAge}, c.rec.NextOffset)
	if opened != nil {
		c.mu.Lock()
		c.core.phase = PhaseOpening
		c.opened = opened
		c.carryOut(c.core.Step(Event{Kind: EventOpened, Ledger: opened.ID, Now: env.Now()}))
		c.mu.Unlock()
	}
	return c, nil
}

// Append hands one entry in. It never blocks: bound the bytes in flight by Config.Released.
func (c *Chain) Append(a Append) {
	if a.Span == 0 {
		panic("chain: append without a span")
	}
	it := getItem()
	it.Load, it.Span, it.Time, it.Size = a, a.Span, a.Time, len(a.Body)
	c.mu.Lock()
	c.carryOut(c.core.Step(Event{Kind: EventAppended, Item: it, Now: c.env.Now()}))
	c.keepWatch()
	c.handOver()
}

// keepWatch has somebody watch the open ledger's writer, if anything is in its hands. mu is held.
func (c *Chain) keepWatch() {
	if c.cur == nil || c.watching || c.stopping || c.core.Pending() == 0 {
		return
	}
	c.watching = true
	w := c.cur.w
	c.start(func() { c.watch(w) })
}

// NextOffset returns the offset that the next append takes.
func (c *Chain) NextOffset() entry.Offset {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.NextOffset()
}

// Phase returns what the chain is doing, and why when it is failed or lost.
func (c *Chain) Phase() (Phase, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.Phase(), c.core.Err()
}

// Opening returns what opening the chain took.
func (c *Chain) Opening() Stats {
	if c.stats == nil {
		return Stats{}
	}
	return *c.stats
}

// ID returns the chain's name.
func (c *Chain) ID() meta.ChainID { return c.id }

// Lost is closed when the ownership is lost. Phase says why.
func (c *Chain) Lost() <-chan struct{} { return c.lost }

// Resume takes up again after appends failed because no ledger could be opened: call it when the last of them is
// done. It returns the offset of the next append, and false if the chain is not failed or failures are still to be
// told.
func (c *Chain) Resume() (entry.Offset, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.core.Phase() != PhaseFailed {
		return c.core.NextOffset(), false
	}
	c.core.Step(Event{Kind: EventResumed})
	return c.core.NextOffset(), c.core.Phase() == PhaseIdle
}

// SetRollBytes changes the size at which ledgers roll, from the next append on.
func (c *Chain) SetRollBytes(n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg.RollBytes = n
	c.core.SetLimits(Limits{Bytes: n, Entries: c.cfg.RollEntries, Age: c.cfg.RollAge})
}

// Roll asks for the open ledger to be closed and followed by another, unless it is empty. It does not wait.
func (c *Chain) Roll() {
	c.mu.Lock()
	c.carryOut(c.core.Step(Event{Kind: EventRollWanted}))
	c.handOver()
}

// CandidatesChanged tells the open ledger's writer to look at the bookies: one of its ensemble may have to be replaced though
// nothing is appended. It does not wait.
func (c *Chain) CandidatesChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cur != nil && !c.stopping {
		c.cur.w.CandidatesChanged()
	}
}

// Retire closes the open ledger, so that it can be trimmed, if appends to it cannot go on for full disks, nor in another
// one; they are then refused, as they are without an open ledger. Otherwise it does nothing: ledgers roll by themselves.
func (c *Chain) Retire() {
	c.mu.Lock()
	if c.cur == nil {
		c.mu.Unlock()
		return
	}
	l := c.cur.w.Ledger()
	c.mu.Unlock()
	slots := l.Fragments[len(l.Fragments)-1].Slots
	zones := make([]string, len(slots))
	var full quorum.Set
	candidates := c.env.Ledger.Candidates()
	for i, s := range slots {
		zones[i] = s.Zone
		if slices.ContainsFunc(candidates, func(k ledger.Candidate) bool { return k.Full && k.UUID == s.UUID }) {
			full |= 1 << i
		}
	}
	r := l.Replication
	q, err := quorum.New(quorum.Config{
		Ensemble: r.Ensemble, WriteQuorum: r.WriteQuorum, AckQuorum: r.AckQuorum, MinZones: r.MinZones,
	}, zones)
	if err != nil || full == 0 || q.AlwaysValid(full) {
		return
	}
	if _, _, err := c.arrange(candidates, false); err == nil {
		return
	}
	c.mu.Lock()
	c.carryOut(c.core.Step(Event{Kind: EventRetired}))
	c.deliver()
}

// RollAndWait is Roll, and waits until the ledger of that id is no longer the open one. The error is that of ctx, or why
// the chain is lost.
func (c *Chain) RollAndWait(ctx context.Context, id entry.LedgerID) error {
	for {
		c.mu.Lock()
		if c.cur == nil || c.core.ledger != id {
			c.mu.Unlock()
			return nil
		}
		if c.switched == nil {
			c.switched = make(chan struct{})
		}
		switched := c.switched
		c.carryOut(c.core.Step(Event{Kind: EventRollWanted}))
		c.handOver()
		i, err := c.env.Sched.Wait(ctx, sched.Channels{switched, c.lost})
		if err != nil {
			return fmt.Errorf("roll chain %s: %w", c.id, err)
		}
		if i == 1 {
			_, err := c.Phase()
			return err
		}
	}
}

// Runs returns the chain's runs, oldest first. The last one, while open, has the figures of what was appended.
func (c *Chain) Runs() []meta.Run {
	c.mu.Lock()
	defer c.mu.Unlock()
	runs := append([]meta.Run(nil), c.rec.Runs...)
	if n := len(runs); n > 0 && !runs[n-1].Closed {
		runs[n-1].Bytes, _, _ = c.core.OpenBytes()
		runs[n-1].End, runs[n-1].MaxTime = c.core.EndAt(c.core.lac)
	}
	return runs
}

// Close closes the open ledger, so that the next owner has nothing to recover, once everything appended before is
// done. The chain takes no more appends. If ctx ends first, the chain is shut down and the context's error returned.
func (c *Chain) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.ended == nil {
		c.ended = make(chan struct{})
	}
	ended := c.ended
	c.carryOut(c.core.Step(Event{Kind: EventCloseAsked}))
	c.handOver()
	i, err := c.env.Sched.Wait(ctx, sched.Channels{ended, c.lost})
	switch {
	case err != nil:
		err = fmt.Errorf("close chain %s: %w", c.id, err)
	case i == 1:
		_, err = c.Phase()
	}
	c.Shutdown()
	return err
}

// Shutdown drops the chain without closing its ledger: appends in flight end with an unknown outcome, those that wait
// as not written. It returns once all are told and nothing runs any more. Closing twice is fine.
func (c *Chain) Shutdown() {
	c.mu.Lock()
	c.stopping = true
	cur := c.cur
	c.carryOut(c.core.Step(Event{Kind: EventWithdrawn, Err: ErrClosed}))
	c.handOver()
	c.cancel()
	if cur != nil {
		cur.w.Shutdown()
	}
	c.mu.Lock()
	for c.running > 0 {
		if c.quiet == nil {
			c.quiet = make(chan struct{})
		}
		quiet := c.quiet
		c.mu.Unlock()
		_, _ = c.env.Sched.Wait(context.Background(), sched.Channels{quiet}) // never canceled
		c.mu.Lock()
	}
	c.mu.Unlock()
}

// adopt makes c.opened the open ledger. mu is held.
func (c *Chain) adopt() {
	cur := &current{c: c}
	env := c.env.Ledger
	env.OnConfirmed = cur.onConfirmed
	env.OnDropped = nil // the core keeps what is not confirmed
	env.Config.Released = c.cfg.Released
	env.Config.Urgent = c.cfg.Urgent
	cur.w = ledger.NewWriter(env, *c.opened)
	c.opened = nil
	c.cur = cur
	c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.opened }, 1)
}

func (u *current) onConfirmed(lac entry.EntryID) {
	c := u.c
	c.mu.Lock()
	if c.cur == u {
		c.carryOut(c.core.Step(Event{Kind: EventConfirmed, Entry: lac}))
	}
	c.deliver()
}

// onDone is the writer's word on an item.
func (it *Item) onDone(id entry.EntryID, err error) {
	u := it.by
	c := u.c
	ev := Event{Kind: EventCompleted, Item: it, Outcome: Stored, Err: err}
	if err != nil {
		ev.Outcome = Unknown
		var failed *ledger.AppendError
		if errors.As(err, &failed) && failed.Outcome == ledger.NotWritten {
			ev.Outcome = NotWritten
		}
	}
	c.mu.Lock()
	if c.cur != u {
		c.mu.Unlock()
		panic("chain: a writer completed an append after its ledger was drained")
	}
	if err == nil && id != it.Entry {
		panic(fmt.Sprintf("chain: entry %d of ledger %d was expected to be %d", id, c.core.ledger, it.Entry))
	}
	c.carryOut(c.core.Step(ev))
	if ev.Outcome == Unknown {
		select {
		case <-u.w.Broken():
			c.carryOut(c.core.Step(Event{Kind: EventWithdrawn, Err: c.lostBecause(u.w.Err())}))
		default: // an AckAll append whose last copy is in doubt; the ledger goes on
		}
	}
	c.deliver()
}

func (c *Chain) lostBecause(err error) error {
	if err == nil {
		return ErrLost
	}
	return fmt.Errorf("%w: %w", ErrLost, err)
}

// carryOut does what the core says. mu is held, and stays so: what may block gets a goroutine, what leaves the
// chain goes to the outbox.
func (c *Chain) carryOut(actions []Action) {
	for _, a := range actions {
		switch a.Kind {
		case ActionUse:
			c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.moved }, a.Moved)
			c.cur = nil
			if c.switched != nil {
				close(c.switched)
				c.switched = nil
			}
			if a.Ledger != 0 {
				c.adopt()
			}
		case ActionSend:
			a.Item.by = c.cur
			c.cur.w.Append(a.Item.Load.Body, a.Item.Load.Level, a.Item.cb)
		case ActionOpenNext:
			c.start(c.openNext)
		case ActionPrepare:
			c.start(func() { c.prepare(a.Delay, a.Fruitless) })
		case ActionCloseCurrent:
			cur := c.cur
			c.start(func() { c.closeCurrent(cur, a.Next, a.Delay) })
		case ActionShow, ActionFinish, ActionForget, ActionStop, ActionEnd:
			if c.outbox == nil {
				c.outbox = getOutbox()
			}
			c.outbox = append(c.outbox, a)
		}
	}
}

// start runs fn on a goroutine that Shutdown waits for. mu is held.
func (c *Chain) start(fn func()) {
	if !c.stopping {
		c.spawn(fn)
	}
}

// spawn is start for what must run even then: the last deliveries may be started while Shutdown waits already.
func (c *Chain) spawn(fn func()) {
	c.running++
	c.env.Sched.Go(func() {
		fn()
		// Not deferred: an assertion that fails under mu must stop the process, and would wait here for ever.
		c.mu.Lock()
		c.running--
		if c.running == 0 && c.quiet != nil {
			close(c.quiet)
			c.quiet = nil
		}
		c.mu.Unlock()
	})
}

// handOver releases mu and leaves the outbox to a goroutine: the caller may hold locks that callbacks take.
func (c *Chain) handOver() {
	if len(c.outbox) == 0 || c.delivering {
		c.mu.Unlock()
		return
	}
	c.delivering = true
	c.spawn(c.empty)
	c.mu.Unlock()
}

// deliver releases mu and empties the outbox, if nobody else is at it.
func (c *Chain) deliver() {
	if len(c.outbox) == 0 || c.delivering {
		c.mu.Unlock()
		return
	}
	c.delivering = true
	c.mu.Unlock()
	c.empty()
}

// empty tells the outside, in order, until nothing is left. One goroutine at a time is in it.
func (c *Chain) empty() {
	var shown []ConfirmedEntry
	for {
		c.mu.Lock()
		batch := c.outbox
		c.outbox = nil
		if len(batch) == 0 {
			c.delivering = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		shown = c.tell(batch, shown)
		putOutbox(batch)
	}
}

func (c *Chain) tell(batch []Action, shown []ConfirmedEntry) []ConfirmedEntry {
	flush := func() {
		if len(shown) > 0 {
			c.cfg.OnConfirmed(shown)
			clear(shown)
			shown = shown[:0]
		}
	}
	for i, a := range batch {
		switch a.Kind {
		case ActionShow:
			if c.cfg.OnConfirmed != nil {
				l := &a.Item.Load
				shown = append(shown, ConfirmedEntry{
					Position: a.Position, Offset: a.Item.Offset, Span: l.Span, Time: l.Time, Body: l.Body, Tag: l.Tag,
				})
			}
		case ActionFinish:
			flush()
			if a.Item.Load.Done != nil {
				a.Item.Load.Done(a.Position, c.appendError(a))
			}
		case ActionForget:
			if a.Held && c.cfg.Released != nil {
				c.cfg.Released(len(a.Item.Load.Body))
			}
			flush() // before the item, and the body with it, is let go
			putItem(a.Item)
			batch[i].Item = nil
		case ActionStop:
			flush()
			if !errors.Is(a.Err, ErrClosed) {
				c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.lost }, 1)
				c.env.Log.Warn("chain lost", "bundle", c.guard.Bundle, "epoch", uint64(c.guard.Epoch), "chain", string(c.id), "error", a.Err)
			}
			if c.cfg.OnLost != nil {
				c.cfg.OnLost(a.Err)
			}
			close(c.lost) // who wakes by it may ask the owner of OnLost why
		case ActionEnd:
			flush()
			close(c.ended)
		case ActionUse, ActionSend, ActionOpenNext, ActionPrepare, ActionCloseCurrent:
		}
	}
	flush()
	return shown
}

func (c *Chain) appendError(a Action) error {
	if a.Outcome == Stored {
		return nil
	}
	var failed *ledger.AppendError
	if errors.As(a.Err, &failed) {
		return a.Err
	}
	e := &ledger.AppendError{Ledger: a.Position.Ledger, Entry: entry.NoEntry, Outcome: ledger.Unknown, Err: a.Err}
	if a.Outcome == NotWritten {
		e.Outcome = ledger.NotWritten
	}
	return e
}

// watch waits, while appends are in flight, for the writer to break or to ask for a roll.
func (c *Chain) watch(w *ledger.Writer) {
	idle, stop := sched.After(c.env.Sched, watchIdle)
	defer func() { stop() }()
	wanted := w.RollWanted()
	for {
		i, err := c.env.Sched.Wait(c.ctx, sched.Channels{w.Broken(), wanted, idle})
		c.mu.Lock()
		if err != nil {
			c.watching = false
			c.mu.Unlock()
			return
		}
		ours := c.cur != nil && c.cur.w == w
		switch i {
		case 0:
			if ours {
				c.carryOut(c.core.Step(Event{Kind: EventWithdrawn, Err: c.lostBecause(w.Err())}))
			}
		case 1:
			wanted = nil
			if ours {
				c.carryOut(c.core.Step(Event{Kind: EventRollWanted}))
			}
		case 2:
			idle, stop = sched.After(c.env.Sched, watchIdle)
		}
		switch {
		case c.core.Phase() == PhaseLost || c.core.Phase() == PhaseClosed || c.core.Pending() == 0:
			c.watching = false
			c.deliver()
			return
		case c.cur != nil && c.cur.w != w: // rolled: watch the new one
			w = c.cur.w
			wanted = w.RollWanted()
		}
		c.deliver()
	}
}

// watchIdle is how long a chain's watcher stays after the last append in flight, at most.
const watchIdle = time.Second
