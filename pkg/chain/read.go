package chain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// runReader reads one ledger. Closed ones know their last entry.
type runReader struct {
	id     entry.LedgerID
	r      *ledger.Reader
	closed bool
	last   entry.EntryID
}

// maxReaders bounds the ledger readers that a chain keeps; they are cheap to make again.
const maxReaders = 4

// Read reads confirmed entries from a position on, at least one if there is one, at most about maxBytes beyond that,
// all of one ledger. next is where to go on; it may lie in a later ledger. No entries and no error mean that there
// is nothing confirmed at or after from yet. A from before the chain's first entry reads from there; batch indices
// are ignored. The bodies are the caller's.
//
// Errors: [ErrTrimmed] when the ledger was deleted meanwhile: read again; *ledger.MissingError and others of the
// ledger reader.
func (c *Chain) Read(ctx context.Context, from entry.Position, maxBytes int) ([]Entry, entry.Position, error) {
	from.Batch = 0
	for {
		run, upTo, ok := c.find(&from)
		if !ok {
			return nil, from, nil
		}
		rr, err := c.reader(ctx, run)
		if err != nil {
			return nil, from, err
		}
		if run.Closed {
			upTo = rr.last
		}
		if from.Entry > upTo {
			if !run.Closed {
				return nil, from, nil
			}
			from = entry.Position{Ledger: run.Ledger + 1}
			continue
		}
		got, err := rr.r.Read(ctx, from.Entry, upTo, maxBytes)
		if err != nil {
			if errors.Is(err, meta.ErrNotFound) || !c.has(run.Ledger) {
				err = c.gone(ctx, run.Ledger)
			}
			return nil, from, fmt.Errorf("read ledger %d of chain %s from entry %d: %w", run.Ledger, c.id, from.Entry, err)
		}
		out := make([]Entry, len(got))
		for i, e := range got {
			out[i] = Entry{Position: entry.Position{Ledger: run.Ledger, Entry: e.ID}, Body: e.Body}
		}
		from.Entry += entry.EntryID(len(got))
		return out, from, nil
	}
}

// find returns the first run with something to read at or after from, which it moves there, and the bound of an
// open run. Where there is none yet, it returns false and leaves from where a later call goes on.
func (c *Chain) find(from *entry.Position) (meta.Run, entry.EntryID, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	runs := c.rec.Runs
	i := sort.Search(len(runs), func(i int) bool { return runs[i].Ledger >= from.Ledger })
	for ; i < len(runs); i++ {
		run := runs[i]
		if run.Ledger > from.Ledger {
			*from = entry.Position{Ledger: run.Ledger}
		}
		if run.Closed {
			if run.End == run.First {
				continue
			}
			return run, 0, true
		}
		if c.cur == nil || c.core.ledger != run.Ledger {
			return run, 0, false // opened a moment ago
		}
		return run, c.core.lac, from.Entry <= c.core.lac
	}
	return meta.Run{}, 0, false
}

func (c *Chain) has(id entry.LedgerID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.rec.Runs, func(r meta.Run) bool { return r.Ledger == id })
}

// gone explains why a ledger is not there: ErrTrimmed, once the chain does not have it any more either. If it does, the
// reply to its deletion was lost, or a newer owner deleted it: the record is read again, so that whoever looks again
// finds what is left, or that the chain is lost.
func (c *Chain) gone(ctx context.Context, id entry.LedgerID) error {
	if c.has(id) {
		if err := c.refresh(ctx); err != nil {
			return err
		}
	}
	if c.has(id) {
		return fmt.Errorf("the chain has it, and its record is gone: %w", meta.ErrConflict)
	}
	return ErrTrimmed
}

// refresh reads the chain's record again.
func (c *Chain) refresh(ctx context.Context) error {
	c.mu.Lock()
	c.stale = true
	c.mu.Unlock()
	return c.lostIf(c.transact(ctx, func(rec meta.Chain) (meta.Chain, error) { return rec, nil }))
}

// lostIf withdraws the chain if err says that another owner took over. It returns err.
func (c *Chain) lostIf(err error) error {
	if errors.Is(err, meta.ErrEpoch) {
		err = c.lostBecause(err)
		c.mu.Lock()
		c.carryOut(c.core.Step(Event{Kind: EventWithdrawn, Err: err}))
		c.deliver()
	}
	return err
}

// LastEntry returns the last entry of a run that is readable; entry.NoEntry when it is empty or nothing of it is
// confirmed.
func (c *Chain) LastEntry(ctx context.Context, id entry.LedgerID) (entry.EntryID, error) {
	from := entry.Position{Ledger: id}
	run, lac, ok := c.find(&from)
	if !ok || run.Ledger != id {
		if !c.has(id) {
			return 0, fmt.Errorf("ledger %d of chain %s: %w", id, c.id, ErrTrimmed)
		}
		return entry.NoEntry, nil
	}
	if !run.Closed {
		return lac, nil
	}
	rr, err := c.reader(ctx, run)
	if err != nil {
		return 0, err
	}
	return rr.last, nil
}

// reader returns a reader of the run's ledger, from those at hand if one is as far as the run.
func (c *Chain) reader(ctx context.Context, run meta.Run) (*runReader, error) {
	c.mu.Lock()
	i := slices.IndexFunc(c.readers, func(r *runReader) bool { return r.id == run.Ledger && r.closed == run.Closed })
	if i >= 0 {
		rr := c.readers[i]
		c.readers = append(slices.Delete(c.readers, i, i+1), rr) // newest use last
		c.mu.Unlock()
		return rr, nil
	}
	c.mu.Unlock()
	l, err := c.env.Meta.GetLedger(ctx, run.Ledger)
	if errors.Is(err, meta.ErrNotFound) || err == nil && l.State == meta.LedgerDeleting {
		err = c.gone(ctx, run.Ledger)
	}
	if err != nil {
		return nil, fmt.Errorf("read ledger %d of chain %s: %w", run.Ledger, c.id, err)
	}
	if run.Closed && l.State != meta.LedgerClosed {
		return nil, fmt.Errorf("read ledger %d of chain %s: closed in the chain, %v in its record: %w",
			run.Ledger, c.id, l.State, meta.ErrConflict)
	}
	rr := &runReader{id: run.Ledger, r: ledger.NewReader(c.env.Ledger, l), closed: run.Closed, last: l.Last}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readers = slices.DeleteFunc(c.readers, func(r *runReader) bool { return r.id == run.Ledger })
	if len(c.readers) >= maxReaders {
		c.readers = slices.Delete(c.readers, 0, 1)
	}
	c.readers = append(c.readers, rr)
	return rr, nil
}

// Trim deletes the closed runs that pick says may go, oldest first, each in a transaction of its own. It returns
// those that it deleted, also with an error; not one whose outcome was unknown, and turned out to be deleted. An owner that is none
// any more deletes nothing: meta.ErrEpoch.
func (c *Chain) Trim(ctx context.Context, pick func(meta.Run) bool) ([]meta.Run, error) {
	var freed []meta.Run
	c.mu.Lock()
	stale := c.stale
	c.mu.Unlock()
	if stale {
		if err := c.refresh(ctx); err != nil {
			return nil, fmt.Errorf("trim chain %s: %w", c.id, err)
		}
	}
	c.mu.Lock()
	runs := slices.Clone(c.rec.Runs)
	c.mu.Unlock()
	for _, run := range runs {
		if !run.Closed || !pick(run) {
			continue
		}
		err := c.transact(ctx, func(rec meta.Chain) (meta.Chain, error) {
			return c.env.Meta.DeleteLedger(ctx, c.guard, rec, run.Ledger)
		})
		if err = c.lostIf(err); err != nil {
			return freed, fmt.Errorf("trim ledger %d of chain %s: %w", run.Ledger, c.id, err)
		}
		freed = append(freed, run)
		c.mu.Lock()
		c.readers = slices.DeleteFunc(c.readers, func(r *runReader) bool { return r.id == run.Ledger })
		c.mu.Unlock()
		c.env.Metrics.add(func(m *Metrics) prometheus.Counter { return m.trimmed }, 1)
	}
	return freed, nil
}

// Delete closes the chain and deletes all its ledgers and its record: the topic or bundle goes for good.
func (c *Chain) Delete(ctx context.Context) error {
	if err := c.Close(ctx); err != nil {
		return err
	}
	if _, err := c.Trim(ctx, func(meta.Run) bool { return true }); err != nil {
		return err
	}
	err := c.transact(ctx, func(rec meta.Chain) (meta.Chain, error) {
		return meta.Chain{ID: c.id, Bundle: rec.Bundle}, c.env.Meta.DeleteChain(ctx, c.guard, rec)
	})
	if err != nil {
		return fmt.Errorf("delete chain %s: %w", c.id, err)
	}
	return nil
}
