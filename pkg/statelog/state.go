package statelog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// state is what a log holds, as far as it was applied: a function of its entries, in their order.
type state struct {
	index *Index
	total int64                    // bytes of entries in the chain
	sizes map[entry.LedgerID]int64 // … and of each ledger
	doubt error                    // damage that belongs to an unknown owner
	gaps  map[uint64]gap           // by the hashes of the owners that an entry which cannot be read may have records of
	last  []uint64                 // owners of the last entry
	end   entry.Position           // of the last entry
}

// gap is an entry that could not be read.
type gap struct {
	at  entry.Position
	err error
}

func (g *gap) refuse(owner string) error {
	return &UnreadableError{Owner: owner, Position: g.at, Err: g.err}
}

func newState() state {
	return state{index: NewIndex(), sizes: map[entry.LedgerID]int64{}, gaps: map[uint64]gap{}}
}

// count adds the bytes of an entry to the log's.
func (s *state) count(id entry.LedgerID, n int) {
	s.sizes[id] += int64(n)
	s.total += int64(n)
}

// uncount takes off what lies below a ledger: ledgers go strictly from the oldest on, and the reply to a deletion may be
// lost.
func (s *state) uncount(oldest entry.LedgerID) {
	for id, n := range s.sizes {
		if id < oldest {
			s.total -= n
			delete(s.sizes, id)
		}
	}
}

// UnreadableError says that no bookie gives an entry with an owner's state at the moment. It is worth retrying.
type UnreadableError struct {
	Owner    string
	Position entry.Position
	Err      error
}

// Error says which entry is missed.
func (e *UnreadableError) Error() string {
	return fmt.Sprintf("state of %q lies in entry %v of the state log, which cannot be read: %v", e.Owner, e.Position, e.Err)
}

// Unwrap returns why.
func (e *UnreadableError) Unwrap() error { return e.Err }

const readBytes = 1 << 20

// applyEntry notes an entry, unless it did before: an entry may be read back before the chain tells of it. Damage that
// belongs to nobody puts everybody's state in doubt; a version that is not known is an error.
func (l *Log) applyEntry(s *state, e chain.Entry) error {
	if e.Position.Compare(s.end) <= 0 {
		return nil
	}
	if _, err := parseHeader(e.Body); err != nil {
		return fmt.Errorf("entry %v: %w", e.Position, err)
	}
	s.count(e.Position.Ledger, len(e.Body))
	s.end = e.Position
	err := eachRecord(e.Body, func(i int32, r *stored) error {
		at := e.Position
		at.Batch = i
		s.index.apply(at, r)
		if r.op == opDeleteOwner {
			delete(s.gaps, hashOf(r.owner)) // whatever was in them is older
		}
		return nil
	})
	if err != nil && s.doubt == nil {
		s.doubt = &DamagedError{Position: e.Position, Err: err}
		l.env.Log.Error("state log is damaged", "chain", string(l.c.ID()), "position", e.Position.String(), "error", err)
	}
	return nil
}

// replay applies all entries to an empty state. One that no bookie gives is charged to the owners that the next one names
// for it; if nothing tells whose it is, since the next one is missing too, replay fails, and is worth retrying.
func (l *Log) replay(ctx context.Context, s *state) error {
	var at entry.Position
	var missing *gap
	for {
		entries, next, err := l.c.Read(ctx, at, readBytes)
		var miss *ledger.MissingError
		switch {
		case errors.As(err, &miss) && missing == nil:
			missing = &gap{at: next, err: err}
			at = entry.Position{Ledger: next.Ledger, Entry: next.Entry + 1}
			continue
		case err == nil && len(entries) == 0 && missing != nil:
			return missing.err
		case err != nil:
			return err //nolint:wrapcheck // the caller says what it was for
		case len(entries) == 0:
			return nil
		}
		for i, e := range entries {
			own, before, named := ownersOf(e.Body)
			if i == 0 && missing != nil {
				if !named {
					return missing.err
				}
				l.env.Log.Error("an entry of the state log cannot be read; the owners of what it holds are refused",
					"chain", string(l.c.ID()), "position", missing.at.String(), "owners", len(before), "error", missing.err)
				for _, h := range before {
					s.gaps[h] = *missing
				}
				missing = nil
			}
			if err := l.applyEntry(s, e); err != nil {
				return err
			}
			s.last = own
		}
		at = next
	}
}

// rebuild is a replay beside the log, which goes on.
type rebuild struct {
	done   chan struct{}
	missed []chain.Entry // stored meanwhile
}

// closeGap returns the entry with some of an owner's state that cannot be read, if there is one. If it can be by now,
// everything is replayed, since what it holds may be superseded or deleted by what came after it.
func (l *Log) closeGap(ctx context.Context, owner uint64) (*gap, error) {
	for {
		l.mu.Lock()
		g, missing := l.gaps[owner]
		running := l.rebuild
		l.mu.Unlock()
		if !missing {
			return nil, nil //nolint:nilnil // there is none
		}
		if running != nil {
			if _, err := l.s.Wait(ctx, sched.Channels{running.done}); err != nil {
				return nil, err //nolint:wrapcheck // as a context says it
			}
			continue
		}
		got, _, err := l.c.Read(ctx, g.at, 1)
		if err == nil && (len(got) == 0 || got[0].Position != g.at) {
			err = g.err
		}
		if err != nil {
			return &gap{at: g.at, err: err}, nil //nolint:nilerr // the gap has it
		}
		if err := l.replayAgain(ctx); err != nil {
			return nil, err
		}
	}
}

// closeGaps closes all of them: the state of an owner that is gone, or not in use, is loaded by nobody.
func (l *Log) closeGaps(ctx context.Context) error {
	for {
		l.mu.Lock()
		owners := slices.Sorted(maps.Keys(l.gaps))
		l.mu.Unlock()
		if len(owners) == 0 {
			return nil
		}
		g, err := l.closeGap(ctx, owners[0])
		if err != nil {
			return err
		}
		if g != nil {
			return fmt.Errorf("read entry %v: %w", g.at, g.err)
		}
	}
}

// replayAgain replays the log while it goes on, unless somebody else is at it.
func (l *Log) replayAgain(ctx context.Context) error {
	r := l.startRebuild()
	if r == nil {
		return nil
	}
	fresh := newState()
	return l.endRebuild(r, &fresh, l.replay(ctx, &fresh))
}

// startRebuild has what is stored from now on noted; nil if somebody else is at it.
func (l *Log) startRebuild() *rebuild {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rebuild != nil {
		return nil
	}
	l.rebuild = &rebuild{done: make(chan struct{})}
	return l.rebuild
}

// endRebuild puts what was replayed, and what was stored since, in the place of the log's state, or gives it up.
func (l *Log) endRebuild(r *rebuild, fresh *state, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rebuild = nil
	close(r.done)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	for _, e := range r.missed {
		if err := l.applyEntry(fresh, e); err != nil {
			panic(fmt.Sprintf("statelog: own entry does not parse: %v", err))
		}
		fresh.last = l.last
	}
	fresh.index.pending = l.index.pending
	l.state = *fresh
	return nil
}
