package repair

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// worker takes damaged ledgers up.
type worker struct {
	*Runner
	jobs  *sched.Group
	after entry.LedgerID // the last one of the page that was looked at last
}

const (
	// pageSize is how many records a worker looks at at a time.
	pageSize = 1000
	// maxSteps bounds what one job does before it lets go: others may wait.
	maxSteps = 1000
	// releasePatience bounds giving a claim back when the process ends.
	releasePatience = time.Second
)

// round looks for ledgers that nobody is at, and begins as many jobs as there is room for.
func (w *worker) round(ctx context.Context) error {
	w.mu.Lock()
	room := w.cfg.Parallel - len(w.busy)
	w.mu.Unlock()
	if room <= 0 {
		return nil
	}
	page, err := w.env.Meta.ListRepairs(ctx, w.after, pageSize)
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	w.after = 0
	if n := len(page.Repairs); n == pageSize {
		w.after = page.Repairs[n-1].Ledger
	}
	due := w.due(page)
	if len(due) == 0 {
		return nil
	}
	grant, err := w.env.Session.Wait(ctx)
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	for _, rec := range due {
		if room == 0 {
			break
		}
		claimed, err := w.env.Meta.ClaimRepair(ctx, rec.Ledger, w.cfg.Worker, grant.ID)
		if err != nil {
			return err //nolint:wrapcheck // likewise
		}
		if claimed {
			room--
			w.start(ctx, grant, rec)
		}
	}
	return nil
}

// due lists what may be taken up, the most urgent first: what cannot be read, then what is nearest to that, then what is to be
// emptied; of each what has failed least often, so that what is stuck does not hold up the rest. Workers that look at the same time
// begin at different places.
func (w *worker) due(page meta.RepairList) []meta.Repair {
	now := w.sched.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []meta.Repair
	for _, rec := range page.Repairs {
		if page.Claims[rec.Ledger] == "" && !w.busy[rec.Ledger] && !now.Before(rec.Retry) {
			all = append(all, rec)
		}
	}
	if len(all) == 0 {
		return nil
	}
	turn := sched.N(w.sched, len(all))
	all = slices.Concat(all[turn:], all[:turn])
	urgency := func(r meta.Repair) int {
		switch {
		case r.Counts.Unavailable > 0:
			return 0
		case r.Counts.BelowAckQuorum > 0:
			return 1
		case r.Counts.BelowWriteQuorum > 0, r.Causes&^(meta.CauseDecommission|meta.CauseMisplaced) != 0:
			return 2
		}
		return 3
	}
	slices.SortStableFunc(all, func(a, b meta.Repair) int {
		return cmp.Or(cmp.Compare(urgency(a), urgency(b)), cmp.Compare(a.Failures, b.Failures))
	})
	return all
}

// start begins a job for a ledger that is claimed under the grant.
func (w *worker) start(ctx context.Context, grant *lease.Grant, rec meta.Repair) {
	w.mu.Lock()
	w.busy[rec.Ledger] = true
	w.mu.Unlock()
	w.jobs.Go(func() {
		// Without its lease another worker takes the ledger.
		life, cancel := context.WithCancel(ctx)
		watch := sched.NewGroup(w.sched)
		watch.Go(func() {
			_, _ = w.sched.Wait(life, sched.Channels{grant.Lost()})
			cancel()
		})
		begin := w.sched.Now()
		err := w.mend(life, rec)
		if err != nil && life.Err() == nil {
			w.log.Warn("repair of a ledger was broken off; it is taken up again", "ledger", rec.Ledger, "error", err)
		}
		cancel()
		watch.Wait()
		w.metrics.jobSeconds.Observe(w.sched.Now().Sub(begin).Seconds())
		giving, done := w.sched.WithTimeout(context.WithoutCancel(ctx), releasePatience)
		_ = w.env.Meta.ReleaseRepair(giving, rec.Ledger, grant.ID) // the lease ends it, too
		done()
		w.mu.Lock()
		delete(w.busy, rec.Ledger)
		w.mu.Unlock()
		nudge(w.workKick)
	})
}

// mend does what there is to do for one ledger, step by step. An error is about the metadata: what became of the step is found out by
// whoever takes the ledger up next.
func (w *worker) mend(ctx context.Context, rec meta.Repair) error {
	job := NewJob(rec.Causes, w.sched.Now().Sub(rec.Since) < w.cfg.LeaveWithin, w.sched.Uint64())
	known := map[holder]*Holding{}
	for range maxSteps {
		fresh, err := w.env.Meta.GetRepair(ctx, rec.Ledger)
		switch {
		case errors.Is(err, meta.ErrNotFound):
			return nil
		case err != nil:
			return err //nolint:wrapcheck // it says what failed
		}
		rec = fresh
		l, err := w.env.Meta.GetLedger(ctx, rec.Ledger)
		if errors.Is(err, meta.ErrNotFound) {
			return w.env.Meta.EndRepair(ctx, rec) //nolint:wrapcheck // likewise
		}
		if err != nil {
			return err //nolint:wrapcheck // likewise
		}
		view, err := w.look(ctx)
		if err != nil {
			return err
		}
		s := w.survey(ctx, l, view, known)
		if ctx.Err() != nil {
			return ctx.Err() //nolint:wrapcheck // as a context says it
		}
		p := job.Next(s)
		if p.Kind == StepDone {
			err := w.env.Meta.EndRepair(ctx, rec)
			if errors.Is(err, meta.ErrConflict) { // something was found meanwhile
				clear(known)
				continue
			}
			if err == nil {
				w.metrics.mended.Inc()
				w.log.Info("ledger is as it should be", "ledger", rec.Ledger, "causes", rec.Causes.String(),
					"copied_entries", rec.CopiedEntries, "copied_bytes", rec.CopiedBytes)
			}
			return err //nolint:wrapcheck // likewise
		}
		if rec, err = w.tell(ctx, rec, s.Assess(), p); err != nil || p.Kind == StepStuck {
			return err
		}
		if err := w.take(ctx, job, s, p, &rec, known); err != nil {
			return err
		}
	}
	return nil
}

// tell brings the record up to date with what was found and is being done.
func (w *worker) tell(ctx context.Context, rec meta.Repair, f Findings, p Step) (meta.Repair, error) {
	next := rec
	next.Counts, next.Storages, next.Worker, next.Doing = f.Counts, f.Storages, w.cfg.Worker, p.Why
	if p.Kind == StepStuck {
		next.Doing, next.Stuck = "", p.Why
		next.Failures++
		next.Retry = w.sched.Now().Add(sched.Doubled(w.cfg.RetryFirst, int(next.Failures)-1, w.cfg.RetryMost))
		if rec.Stuck != next.Stuck {
			w.log.Warn("ledger cannot be repaired now", "ledger", rec.Ledger, "causes", rec.Causes.String(), "reason", p.Why)
		}
	}
	next, err := w.env.Meta.UpdateRepair(ctx, next)
	if errors.Is(err, meta.ErrConflict) || errors.Is(err, meta.ErrNotFound) {
		return rec, nil // something was found meanwhile: the next round tells that, too
	}
	return next, err //nolint:wrapcheck // it says what failed
}

// take takes a step. What does not concern the metadata is a failure of the step, which the job goes on from.
func (w *worker) take(ctx context.Context, job *Job, s *Survey, p Step, rec *meta.Repair, known map[holder]*Holding) error {
	l := s.Ledger
	var err error
	switch p.Kind {
	case StepDrop:
		_, err = w.env.Meta.DropIntent(ctx, l.ID, p.Storage, p.Fragment.First)
	case StepSwap:
		err = w.swap(ctx, l, p, rec)
	case StepFill:
		h := s.Holding(p.Fragment.First, p.Storage)
		err = w.copy(ctx, Copying{Ledger: l, Fragment: p.Fragment, Slot: p.Slot, To: p.Storage, Skip: h.Has}, p, rec)
		delete(known, holder{p.Fragment.First, p.Storage})
		if err == nil {
			err = w.proved(ctx, l, p, p.Storage)
		}
	case StepSettle:
		if err = w.env.Control.EndLimbo(ctx, p.Storage, l.ID); err == nil {
			clear(known)
		}
	case StepRelease:
		if err = w.env.Owners.Release(ctx, l); err == nil {
			err = w.released(ctx, l.ID)
		}
	case StepDone, StepStuck:
	}
	if err == nil {
		return nil
	}
	if ctx.Err() != nil || errors.Is(err, meta.ErrUnavailable) || errors.Is(err, meta.ErrUnknownOutcome) {
		return err
	}
	w.metrics.stepsFailed.Inc()
	w.log.Debug("a step of a repair failed", "ledger", l.ID, "step", p.Why, "error", err)
	var missing *ledger.MissingError
	job.Failed(p, fmt.Sprintf("%s: %v", p.Why, err), !errors.As(err, &missing))
	return nil
}

// swap makes copies under an intent, has them proved, and swaps.
func (w *worker) swap(ctx context.Context, l meta.Ledger, p Step, rec *meta.Repair) error {
	bytes := l.Length
	if l.State != meta.LedgerClosed {
		bytes = 1 << 30 // nobody has counted
	}
	rate := w.budget.rate()
	if p.Rate > 0 {
		rate = min(rate, p.Rate)
	}
	deadline := w.sched.Now().Add(w.cfg.IntentFor + 4*time.Duration(float64(bytes)/float64(rate)*float64(time.Second))).Truncate(time.Millisecond)
	l, err := w.env.Meta.AddIntent(ctx, l.ID, meta.ReplicaIntent{Target: p.Target.UUID, Fragment: p.Fragment.First, Deadline: deadline})
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	if err := w.copy(ctx, Copying{Ledger: l, Fragment: p.Fragment, Slot: p.Slot, To: p.Target.UUID}, p, rec); err != nil {
		return err
	}
	if err := w.proved(ctx, l, p, p.Target.UUID); err != nil {
		return err
	}
	_, err = w.env.Meta.SwapReplica(ctx, l.ID, p.Fragment.Fragment, p.Storage, p.Target, deadline)
	return err //nolint:wrapcheck // likewise
}

// copy makes copies within the budget, and notes how many.
func (w *worker) copy(ctx context.Context, x Copying, p Step, rec *meta.Repair) error {
	var own *pace
	if p.Rate > 0 {
		own = &pace{sched: w.sched, rate: func() int64 { return p.Rate }}
	}
	c := Copier{Ledger: w.env.Ledger, Pace: func(ctx context.Context, n int) error {
		if own != nil {
			if err := own.take(ctx, n); err != nil {
				return err
			}
		}
		return w.budget.take(ctx, n)
	}}
	sum, err := c.Copy(ctx, x)
	w.metrics.copiedEntries.Add(float64(sum.Entries))
	w.metrics.copiedBytes.Add(float64(sum.Bytes))
	next := *rec
	next.CopiedEntries, next.CopiedBytes = next.CopiedEntries+sum.Entries, next.CopiedBytes+sum.Bytes
	if err == nil {
		next.Stuck, next.Failures = "", 0
	}
	if next, updateErr := w.env.Meta.UpdateRepair(ctx, next); updateErr == nil { // it is for people
		*rec = next
	}
	return err
}

// NotProvedError says that a bookie does not list an entry that it has acknowledged a copy of.
type NotProvedError struct {
	Storage entry.StorageUUID
	Entry   entry.EntryID
}

// Error says which.
func (e *NotProvedError) Error() string {
	return fmt.Sprintf("storage %s took a copy of entry %d and does not list it", e.Storage, e.Entry)
}

// proved has a bookie list all that it is to have.
func (w *worker) proved(ctx context.Context, l meta.Ledger, p Step, u entry.StorageUUID) error {
	if p.Fragment.Last < p.Fragment.First {
		return nil
	}
	h := w.ask(ctx, l.ID, p.Fragment, u)
	if h.Err != "" {
		return errors.New(h.Err)
	}
	for e := p.Fragment.First; e <= p.Fragment.Last; e++ {
		if has(l.Replication, p.Slot, e) && !h.Has(e) {
			return &NotProvedError{Storage: u, Entry: e}
		}
	}
	return nil
}

// released checks that a ledger is closed that its owner was asked for.
func (w *worker) released(ctx context.Context, id entry.LedgerID) error {
	l, err := w.env.Meta.GetLedger(ctx, id)
	if err == nil && (l.State == meta.LedgerOpen || l.State == meta.LedgerInRecovery) {
		return fmt.Errorf("its owner has not closed it: it is %s", l.State)
	}
	return err //nolint:wrapcheck // it says what failed
}
