package chain

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// load reads the record and shuts the former owner out. It returns the next ledger if that was opened.
func (c *Chain) load(ctx context.Context) (*meta.Ledger, error) {
	started := c.env.Sched.Now()
	var opened *meta.Ledger
	for attempt := 0; ; attempt++ {
		rec, err := c.env.Meta.GetChain(ctx, c.id)
		if err != nil {
			return nil, fmt.Errorf("read chain: %w", err)
		}
		c.rec = rec
		n := len(rec.Runs)
		if n == 0 || rec.Runs[n-1].Closed {
			break
		}
		if attempt == 3 {
			return nil, fmt.Errorf("ledger %d is closed, its run is not: %w", rec.Runs[n-1].Ledger, meta.ErrConflict)
		}
		adopted := false
		c.stats = &Stats{Recovered: true}
		if opened, adopted, err = c.recover(ctx, rec.Runs[n-1]); err != nil {
			return nil, err
		}
		c.stats.Took = c.env.Sched.Now().Sub(started)
		c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.recovered }, 1)
		if !adopted {
			break
		}
		// Closed by a transaction of ours whose reply was lost, or by another owner: read what came of it.
	}
	if opened == nil && c.cfg.OpenNow {
		l, err := c.place(ctx, c.rec.LastLedger)
		if err != nil {
			return nil, err
		}
		rec, l, err := c.env.Meta.OpenLedger(ctx, c.guard, c.rec, l, nil)
		if err != nil {
			return nil, fmt.Errorf("open ledger: %w", err)
		}
		c.rec, opened = rec, &l
	}
	return opened, nil
}

// recover closes the ledger of run, and opens the next one in the same transaction with OpenNow, or if there is anything in the
// ledger: somebody was appending to it, and will go on. adopted tells that somebody else closed it.
func (c *Chain) recover(ctx context.Context, run meta.Run) (opened *meta.Ledger, adopted bool, err error) {
	finish := func(ctx context.Context, m meta.Ledger, last entry.EntryID, length int64, tail []meta.Fragment) (meta.Ledger, error) {
		closing, err := c.describe(ctx, run, m, last, length, tail)
		if err != nil {
			return meta.Ledger{}, err
		}
		if c.cfg.OpenNow || last != entry.NoEntry {
			next, err := c.place(ctx, c.rec.LastLedger)
			if err == nil {
				rec, l, err := c.env.Meta.OpenLedger(ctx, c.guard, c.rec, next, &closing)
				switch {
				case err == nil:
					c.rec, opened = rec, &l
					m.State, m.Last, m.Length = meta.LedgerClosed, last, length
					return m, nil
				case c.cfg.OpenNow || !errors.Is(err, meta.ErrDeleting) && !errors.Is(err, meta.ErrNotFound):
					return meta.Ledger{}, err //nolint:wrapcheck // the recovery decides by it
				}
			}
			// Without enough bookies for the next ledger, what is stored can still be served; of a topic that is being deleted
			// the ledger is closed all the same.
			c.env.Log.Info("recovered without opening the next ledger", "bundle", c.guard.Bundle, "epoch", uint64(c.guard.Epoch), "chain", string(c.id), "error", err)
		}
		rec, closed, err := c.env.Meta.CloseLedger(ctx, c.guard, c.rec, closing)
		if err != nil {
			return meta.Ledger{}, err //nolint:wrapcheck // likewise
		}
		c.rec = rec
		return closed, nil
	}
	// The ids at hand are often below those of the former owner. New ones are reserved while the ledger is recovered.
	ahead, cancel := context.WithCancel(ctx)
	reserving, above := sched.NewGroup(c.env.Sched), c.rec.LastLedger
	reserving.Go(func() { _ = c.env.IDs.Reserve(ahead, c.env.Sched, above) }) // tried again when one is needed
	defer reserving.Wait()
	defer cancel()
	_, stats, err := ledger.Recover(ctx, c.env.Ledger, run.Ledger, ledger.RecoverOptions{Finish: finish, MaxLength: 2 * c.cfg.RollBytes})
	c.stats.Ledger = stats
	if err != nil {
		return nil, false, fmt.Errorf("recover ledger %d: %w", run.Ledger, err)
	}
	return opened, stats.Adopted, nil
}

// describe reads where a recovered ledger ends, from its last entry.
func (c *Chain) describe(ctx context.Context, run meta.Run, m meta.Ledger, last entry.EntryID, length int64, tail []meta.Fragment) (meta.Closing, error) {
	closing := meta.Closing{
		Ledger: m, Last: last, Length: length, Tail: tail, End: run.First, Recovery: true, Term: m.Term,
	}
	if last == entry.NoEntry {
		return closing, nil
	}
	view := m // as the recovery leaves it
	if len(tail) > 0 {
		keep := slices.IndexFunc(m.Fragments, func(f meta.Fragment) bool { return f.First >= tail[0].First })
		if keep < 0 {
			keep = len(m.Fragments)
		}
		view.Fragments = append(slices.Clone(m.Fragments[:keep]), tail...)
	}
	got, err := ledger.NewReader(c.env.Ledger, view).Read(ctx, last, last, 1)
	if err != nil {
		return closing, fmt.Errorf("read last entry %d of ledger %d: %w", last, m.ID, err)
	}
	if closing.End, closing.MaxTime, err = c.cfg.Describe(got[0].Body); err != nil {
		return closing, fmt.Errorf("describe last entry %d of ledger %d: %w", last, m.ID, err)
	}
	c.stats.Tail = &Entry{Position: entry.Position{Ledger: m.ID, Entry: last}, Body: got[0].Body}
	return closing, nil
}

// place chooses the bookies of a new ledger above id, with a smaller ensemble if it must be.
func (c *Chain) place(ctx context.Context, above entry.LedgerID) (meta.Ledger, error) {
	candidates := c.env.Ledger.Candidates()
	r, slots, err := c.arrange(candidates, false)
	if err != nil && c.cfg.Urgent {
		if fuller, some, fullErr := c.arrange(candidates, true); fullErr == nil {
			r, slots, err = fuller, some, nil
		}
	}
	if err != nil {
		return meta.Ledger{}, err
	}
	id, err := c.env.IDs.Next(ctx, c.env.Sched, above)
	if err != nil {
		return meta.Ledger{}, err
	}
	return meta.Ledger{
		// The nonce tells the ledger's adds from those of a writer that never opened it.
		ID: id, State: meta.LedgerOpen, Nonce: c.env.Sched.Uint64(), Replication: r, Last: entry.NoEntry, Chain: c.id,
		Fragments: []meta.Fragment{{First: 0, Slots: slots}},
	}, nil
}

// arrange chooses the bookies for as large an ensemble as can be had, full ones too if full.
func (c *Chain) arrange(candidates []ledger.Candidate, full bool) (meta.Replication, []meta.Slot, error) {
	r := c.cfg.Replication
	var slots []meta.Slot
	var err error
	for ; r.Ensemble >= r.WriteQuorum; r.Ensemble-- {
		slots, err = ledger.Place(ledger.PlaceRequest{
			Replication: r, Candidates: candidates, Full: full, Rand: rand.New(rand.NewPCG(c.env.Sched.Uint64(), c.env.Sched.Uint64())), //nolint:gosec // spreads load
		})
		if err == nil {
			return r, slots, nil
		}
	}
	e := &NotEnoughBookiesError{Replication: c.cfg.Replication, Known: len(candidates), Err: err}
	for _, b := range candidates {
		if b.Writable && !b.Draining {
			e.Writable++
		}
	}
	return r, nil, e
}

// transact runs one transaction on the chain's record; they follow one another. After one whose outcome is not known,
// the record is read again first: only this owner changes it, so what it finds is one of its own.
func (c *Chain) transact(ctx context.Context, fn func(rec meta.Chain) (meta.Chain, error)) error {
	if err := c.turn.Take(ctx, c.env.Sched); err != nil {
		return err //nolint:wrapcheck // as a context says it
	}
	defer c.turn.Give()
	c.mu.Lock()
	rec, stale := c.rec, c.stale
	c.mu.Unlock()
	if stale {
		now, err := c.env.Meta.GetChain(ctx, c.id)
		if err != nil {
			return fmt.Errorf("read chain: %w", err)
		}
		if now.LastLedger != rec.LastLedger {
			return fmt.Errorf("chain has ledger %d, not opened here: %w", now.LastLedger, meta.ErrEpoch)
		}
		rec = now
	}
	after, err := fn(rec)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		var state *meta.LedgerStateError
		c.stale = c.stale || errors.Is(err, meta.ErrUnknownOutcome) || errors.Is(err, meta.ErrConflict) ||
			errors.Is(err, meta.ErrNotFound) || errors.As(err, &state)
		return err
	}
	c.rec, c.stale = after, false
	return nil
}

// openNext opens a ledger for appends that wait.
func (c *Chain) openNext() {
	patience, cancel := c.env.Sched.WithTimeout(c.ctx, c.cfg.OpenPatience)
	defer cancel()
	var opened meta.Ledger
	err := c.transact(patience, func(rec meta.Chain) (meta.Chain, error) {
		var err error
		for {
			var l meta.Ledger
			if l, err = c.place(patience, rec.LastLedger); err != nil {
				return rec, err
			}
			var after meta.Chain
			after, opened, err = c.openTxn(patience, rec, l, nil)
			if !errors.Is(err, meta.ErrRetired) && !errors.Is(err, meta.ErrLedgerOrder) {
				return after, err
			}
			if patience.Err() != nil {
				return rec, err
			}
		}
	})
	c.mu.Lock()
	switch {
	case err == nil && c.core.Phase() == PhaseOpening:
		c.opened = &opened
		c.carryOut(c.core.Step(Event{Kind: EventOpened, Ledger: opened.ID, Now: c.env.Now()}))
		c.keepWatch() // over what has waited: nothing else may be appended
	case err == nil: // dropped meanwhile
	case c.core.Phase() != PhaseOpening:
	case retriable(err):
		c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.refused }, 1)
		c.carryOut(c.core.Step(Event{Kind: EventOpenFailed, Err: fmt.Errorf("open ledger of chain %s: %w", c.id, err)}))
	default:
		c.carryOut(c.core.Step(Event{Kind: EventWithdrawn, Err: c.lostBecause(err)}))
	}
	c.deliver()
}

// retriable tells errors after which nothing was opened, and that may pass.
func retriable(err error) bool {
	var few *NotEnoughBookiesError
	return errors.As(err, &few) || errors.Is(err, meta.ErrUnavailable) ||
		errors.Is(err, meta.ErrRetired) || errors.Is(err, meta.ErrConflict) ||
		errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, meta.ErrUnknownOutcome)
}

// openTxn runs T1, with T3 if closing is given, to a definite outcome: patience bounds the first attempt, of which
// meta.ErrUnavailable says that it certainly was not applied; after meta.ErrUnknownOutcome the metadata is asked, and
// the transaction sent again, for as long as the chain lives. At most one copy applies: each names the same new ledger.
func (c *Chain) openTxn(patience context.Context, rec meta.Chain, l meta.Ledger, closing *meta.Closing) (meta.Chain, meta.Ledger, error) {
	after, opened, err := c.env.Meta.OpenLedger(patience, c.guard, rec, l, closing)
	if err == nil || !errors.Is(err, meta.ErrUnknownOutcome) {
		return after, opened, err //nolint:wrapcheck // its class matters
	}
	applied := func() (bool, error) {
		got, err := c.env.Meta.GetLedger(c.ctx, l.ID)
		if errors.Is(err, meta.ErrNotFound) || err == nil && got.Nonce != l.Nonce {
			return false, nil
		}
		if err == nil && got.State != meta.LedgerOpen {
			// Applied, and taken over since: nothing was ever written to it.
			err = &meta.LedgerStateError{Op: "open ledger", Current: got}
		}
		if err == nil {
			opened = got
			after, err = c.env.Meta.GetChain(c.ctx, c.id)
		}
		return err == nil, err
	}
	for {
		done, readErr := applied()
		if done {
			return after, opened, nil
		}
		if readErr != nil {
			return rec, l, fmt.Errorf("%w: %w", err, readErr)
		}
		after, opened, err = c.env.Meta.OpenLedger(c.ctx, c.guard, rec, l, closing) //nolint:contextcheck // patience bounds the first attempt alone
		if err == nil {
			return after, opened, nil
		}
		if c.ctx.Err() != nil {
			return rec, l, err //nolint:wrapcheck // likewise
		}
		if !errors.Is(err, meta.ErrUnknownOutcome) {
			// Refused, perhaps because the first copy was applied in between.
			if done, readErr = applied(); done {
				return after, opened, nil
			}
			if readErr != nil {
				return rec, l, fmt.Errorf("%w: %w", meta.ErrUnknownOutcome, readErr)
			}
			return rec, l, err //nolint:wrapcheck // likewise
		}
	}
}

// rollPause is how long a roll waits that follows so many ledgers in a row which were closed with nothing in them. Whatever
// refuses all that is appended to a ledger, and to the next one, will not end soon: after a restore of etcd from an older copy
// there may be any number of ledgers whose ids bookies know already.
func rollPause(fruitless int) time.Duration {
	if fruitless == 0 {
		return 0
	}
	return sched.Doubled(rollPauseMin, fruitless-1, rollPauseMax)
}

const (
	rollPauseMin = 50 * time.Millisecond
	rollPauseMax = 5 * time.Second
)

// prepare gets all that a roll needs before the open ledger is frozen: a live metadata store, an id, bookies.
func (c *Chain) prepare(delay bool, fruitless int) {
	if pause := rollPause(fruitless); pause > 0 && !c.sleep(c.jitter(pause)) {
		return
	}
	pause := 50 * time.Millisecond
	for {
		if delay {
			c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.rollsRetry }, 1)
			if !c.sleep(c.jitter(pause)) {
				return
			}
			pause = min(2*pause, 2*time.Second)
		}
		delay = true
		c.mu.Lock()
		wanted := c.core.preparing
		c.mu.Unlock()
		if !wanted {
			return // the ledger was retired
		}
		attempt, cancel := c.env.Sched.WithTimeout(c.ctx, c.cfg.ClosePatience)
		next, err := c.ready(attempt)
		cancel()
		if err != nil {
			if c.ctx.Err() != nil {
				return
			}
			c.env.Log.Debug("roll waits", "bundle", c.guard.Bundle, "epoch", uint64(c.guard.Epoch), "chain", string(c.id), "error", err)
			continue
		}
		c.mu.Lock()
		c.prepared = &next
		c.carryOut(c.core.Step(Event{Kind: EventPrepared}))
		c.deliver()
		return
	}
}

func (c *Chain) ready(ctx context.Context) (meta.Ledger, error) {
	c.mu.Lock()
	above := c.rec.LastLedger
	c.mu.Unlock()
	next, err := c.place(ctx, above)
	if err != nil {
		return next, err
	}
	if _, err := c.env.Meta.GetChain(ctx, c.id); err != nil {
		return next, fmt.Errorf("read chain: %w", err)
	}
	return next, nil
}

// closeCurrent closes the open ledger, and opens the prepared one in the same transaction if withNext.
func (c *Chain) closeCurrent(cur *current, withNext, delay bool) {
	if delay && !c.sleep(c.jitter(200*time.Millisecond)) {
		return
	}
	var opened meta.Ledger
	closed, err := cur.w.CloseWith(c.ctx, func(ctx context.Context, last entry.EntryID, length int64) (meta.Ledger, error) {
		closed := cur.w.Ledger()
		err := c.transact(ctx, func(rec meta.Chain) (meta.Chain, error) {
			c.mu.Lock()
			next := c.prepared
			end, newest := c.core.EndAt(last)
			c.mu.Unlock()
			closing := meta.Closing{Ledger: closed, Last: last, Length: length, End: end, MaxTime: newest}
			patience, cancel := c.env.Sched.WithTimeout(ctx, c.cfg.ClosePatience)
			defer cancel()
			if withNext {
				after, l, err := c.openTxn(patience, rec, *next, &closing)
				if err == nil {
					opened = l
					closed.State, closed.Last, closed.Length = meta.LedgerClosed, last, length
				}
				return after, err
			}
			after, l, err := c.env.Meta.CloseLedger(ctx, c.guard, rec, closing)
			if err == nil {
				closed = l
			}
			return after, err //nolint:wrapcheck // the writer decides by it
		})
		return closed, err
	})
	if err == nil {
		cur.w.Shutdown() // all of it is done; this waits for its goroutines
	}
	c.mu.Lock()
	switch {
	case err == nil:
		if opened.ID != 0 {
			c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.rolled }, 1)
			c.env.Log.Debug("ledger is rolled", "bundle", c.guard.Bundle, "epoch", uint64(c.guard.Epoch), "chain", string(c.id),
				"ledger", closed.ID, "last", closed.Last, "next", opened.ID)
		}
		c.opened, c.prepared = &opened, nil
		c.carryOut(c.core.Step(Event{Kind: EventLedgerClosed, Entry: closed.Last, Ledger: opened.ID, Now: c.env.Now()}))
	case cur.w.Err() != nil:
		c.carryOut(c.core.Step(Event{Kind: EventWithdrawn, Err: c.lostBecause(err)}))
	default:
		c.env.Log.Info("ledger not closed, goes on", "bundle", c.guard.Bundle, "epoch", uint64(c.guard.Epoch), "chain", string(c.id), "ledger", closed.ID, "error", err)
		c.carryOut(c.core.Step(Event{Kind: EventCloseFailed}))
	}
	c.deliver()
}

// sleep waits, or returns false if the chain ends first.
func (c *Chain) sleep(d time.Duration) bool { return sched.Sleep(c.ctx, c.env.Sched, d) == nil }

// jitter spreads retries between half of d and d.
func (c *Chain) jitter(d time.Duration) time.Duration { return d/2 + sched.N(c.env.Sched, d/2+1) }
