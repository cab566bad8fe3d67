package statelog

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// limit is what the log may take. mu is held.
func (l *Log) limit() int64 {
	live, _ := l.index.Live()
	return max(l.cfg.FloorBytes, growth*live)
}

// rollBytes makes ledgers small enough that one more or less does not matter to the limit.
func (l *Log) rollBytes() int64 { return max(l.limit()/16, 64<<10) }

// mostLedgers is how many ledgers with anything in them a log may have. Whoever takes it over reads them one after the other, and
// each takeover adds one.
const mostLedgers = 24

// maybeRewrite starts to make the log shorter if it is at three quarters of its limit, so that appends that go on
// meanwhile stay below, or has too many ledgers. mu is held.
func (l *Log) maybeRewrite() {
	if l.total <= l.limit()/4*3 && len(l.sizes) <= mostLedgers {
		return
	}
	if l.rewriting || l.stuck || l.doubt != nil || l.err != nil || l.env.Now().Before(l.notBefore) {
		return
	}
	l.rewriting = true
	l.g.Go(func() {
		err := l.closeGaps(l.ctx)
		if err == nil {
			err = l.shorten()
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.rewriting = false
		l.wakeWaiters()
		if err != nil && l.ctx.Err() == nil {
			// Tried again after a pause: nothing is lost by a log that is too long for a while.
			l.notBefore = l.env.Now().Add(rewritePause)
			l.env.Log.Warn("state log not shortened", "chain", string(l.c.ID()), "error", err)
		}
	})
}

// rewritePause is how long a log that could not be shortened is left alone.
const rewritePause = 5 * time.Second

// patience is how long an append waits for the log to become shorter.
const patience = time.Second

// awaitRoom holds an append back while the log is near its limit, with what is under way, and is being shortened. That needs the metadata store: if
// there is no progress for long, appends pass until there is, and the log grows. mu is held, but not while it waits.
func (l *Log) awaitRoom(ctx context.Context, size int64) error {
	var passed <-chan struct{}
	for l.err == nil && l.patient && (l.rewriting || l.inFlight > 0) && l.total+l.unstored+size > l.limit()/8*7 {
		if l.room == nil {
			l.room = make(chan struct{})
		}
		room := l.room
		if passed == nil {
			after, stop := sched.After(l.s, patience)
			defer stop()
			passed = after
		}
		l.mu.Unlock()
		i, err := l.s.Wait(ctx, sched.Channels{room, passed})
		l.mu.Lock()
		if i == 1 {
			l.patient = false
		}
		if err != nil {
			return fmt.Errorf("append %d bytes: wait for the log to be shortened: %w", size, err)
		}
	}
	return nil
}

// wakeWaiters has appends look again. mu is held.
func (l *Log) wakeWaiters() {
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

// shorten rewrites the oldest live records and trims until the log is at half of its limits.
func (l *Log) shorten() error {
	for {
		if err := l.ctx.Err(); err != nil {
			return err //nolint:wrapcheck // only told apart from others
		}
		runs := l.c.Runs()
		if len(runs) == 0 {
			return nil
		}
		l.mu.Lock()
		l.uncount(runs[0].Ledger)
		if l.err != nil || l.total <= l.limit()/2 && len(l.sizes) <= mostLedgers/2 {
			l.mu.Unlock()
			return nil //nolint:nilerr // l.err, not err: the log is over, which is no failure of this
		}
		if !runs[0].Closed {
			l.mu.Unlock()
			if err := l.c.RollAndWait(l.ctx, runs[0].Ledger); err != nil {
				return err //nolint:wrapcheck // says what it was for
			}
			continue
		}
		batch, waiting := l.index.toRewrite(runs[0].Ledger, flushBytes/2)
		var wait chan struct{}
		if len(batch) == 0 && waiting {
			wait = l.barrier()
		}
		l.mu.Unlock()
		switch {
		case len(batch) > 0:
			if err := l.writeAgain(batch); err != nil {
				return err
			}
		case wait != nil:
			_, _ = l.s.Wait(l.ctx, sched.Channels{wait}) // the loop asks ctx
		default:
			if err := l.trim(runs[0]); err != nil {
				return err
			}
		}
	}
}

// barrier returns a channel that is closed once everything appended until now is done. mu is held.
func (l *Log) barrier() chan struct{} {
	done := make(chan struct{})
	g := l.gather()
	g.dones = append(g.dones, func(error) { close(done) })
	l.full()
	l.flush()
	return done
}

func (l *Log) trim(run meta.Run) error {
	freed, err := l.c.Trim(l.ctx, func(r meta.Run) bool { return r.Ledger == run.Ledger })
	l.mu.Lock()
	if len(freed) > 0 {
		l.uncount(run.Ledger + 1)
		l.patient = true
	}
	l.wakeWaiters()
	l.mu.Unlock()
	if err != nil {
		return fmt.Errorf("trim: %w", err)
	}
	return nil
}

// writeAgain appends live records at the tail, those that are still live and not about to be superseded.
func (l *Log) writeAgain(batch []rewrite) error {
	if err := l.values(l.ctx, batch); err != nil {
		return fmt.Errorf("read what is live: %w", err)
	}
	done := make(chan struct{})
	var outcome error
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return nil //nolint:nilerr // l.err, not err: the log is over, which is no failure of this
	}
	n := 0
	for i := range batch {
		r := &batch[i]
		if !l.index.current(r.it, r.at) || l.index.superseded(r.it) {
			continue
		}
		if r.bad != nil {
			l.stuck = true
			r.it.bad = r.bad
			err := &DamagedError{Owner: r.it.owner.name, Kind: r.it.name[0], Key: []byte(r.it.name[1:]), Position: r.at, Err: r.bad}
			l.mu.Unlock()
			return err
		}
		if g := l.gathering; g != nil && len(g.body)+encodedSize(r.it.owner.name, nil, r.value)+len(r.it.name) > headerSize+MaxEntry {
			l.full()
		}
		g := l.gather()
		g.body = appendRecord(g.body, opPut, r.it.name[0], r.it.owner.name, []byte(r.it.name[1:]), r.value)
		g.count++
		g.owners = append(g.owners, hashOf(r.it.owner.name))
		l.unstored += int64(encodedSize(r.it.owner.name, nil, r.value) + len(r.it.name) - 1)
		n++
	}
	if n == 0 {
		l.mu.Unlock()
		return nil
	}
	g := l.gather()
	g.dones = append(g.dones, func(err error) { outcome = err; close(done) })
	l.full()
	l.flush()
	l.mu.Unlock()
	l.env.Metrics.rewrote(n)
	if _, err := l.s.Wait(l.ctx, sched.Channels{done}); err != nil {
		return err //nolint:wrapcheck // only told apart from others
	}
	return outcome
}

// notWritten is the error of what never reached a ledger.
func notWritten(err error) error {
	return &ledger.AppendError{Entry: entry.NoEntry, Outcome: ledger.NotWritten, Err: err}
}
