package repair

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Runner repairs: it audits, if it is this process's turn, and works. See the package's comment.
type Runner struct {
	cfg     Config
	env     Env
	sched   sched.Scheduler
	log     *slog.Logger
	metrics *metrics
	budget  *pace

	auditKick, workKick chan struct{} // tokens: look now

	mu    sync.Mutex
	busy  map[entry.LedgerID]bool // worked on here
	hints map[entry.LedgerID]*hinted
	view  *View
}

// New makes a runner, which does nothing before Run.
func New(cfg Config, env Env) *Runner {
	r := &Runner{
		cfg: cfg.withDefaults(), env: env, sched: sched.OrReal(env.Sched), log: env.Log,
		auditKick: make(chan struct{}, 1), workKick: make(chan struct{}, 1),
		busy: map[entry.LedgerID]bool{}, hints: map[entry.LedgerID]*hinted{},
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.env.Ledger.Sched = r.sched
	r.metrics = newMetrics(env.Registerer)
	r.budget = &pace{sched: r.sched, rate: func() int64 { return max(r.cfg.BytesPerSecond/r.workers(), 1) }}
	return r
}

// workers is how many processes work, this one included.
func (r *Runner) workers() int64 { return int64(max(len(r.env.Topology.Brokers()), 1)) }

// Run repairs until ctx ends.
func (r *Runner) Run(ctx context.Context) {
	g := sched.NewGroup(r.sched)
	g.Go(func() { r.loop(ctx, "audit", r.auditKick, r.cfg.ScanEvery, r.newAuditor().round) })
	g.Go(func() { r.loop(ctx, "flush hints", nil, r.cfg.ScanEvery, r.flushHints) })
	w := &worker{Runner: r, jobs: sched.NewGroup(r.sched)}
	g.Go(func() {
		r.loop(ctx, "work", r.workKick, r.cfg.PollEvery, w.round)
		w.jobs.Wait()
	})
	g.Wait()
}

// loop goes round until ctx ends. What fails is told when it changes.
func (r *Runner) loop(ctx context.Context, what string, kick <-chan struct{}, every time.Duration, round func(context.Context) error) {
	failing := ""
	for ctx.Err() == nil {
		err := round(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && failing != err.Error():
			failing = err.Error()
			r.log.Warn("repair cannot go on, trying again", "what", what, "error", err)
		case err == nil && failing != "":
			failing = ""
			r.log.Info("repair goes on", "what", what)
		}
		passed, stop := sched.After(r.sched, every)
		_, _ = r.sched.Wait(ctx, sched.Channels{passed, kick})
		stop()
	}
}

func nudge(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// viewFresh is how old a view of the cluster may be that decides about a ledger.
const viewFresh = time.Second

// look returns the cluster as it is, or was a moment ago.
func (r *Runner) look(ctx context.Context) (View, error) {
	now := r.sched.Now()
	r.mu.Lock()
	v := r.view
	r.mu.Unlock()
	if v != nil && now.Sub(v.Now) < viewFresh {
		return *v, nil
	}
	return r.lookAnew(ctx)
}

func (r *Runner) lookAnew(ctx context.Context) (View, error) {
	now := r.sched.Now()
	cookies, err := r.env.Meta.ListCookies(ctx)
	if err != nil {
		return View{}, err //nolint:wrapcheck // it says what failed
	}
	census, err := r.env.Meta.GetRepairCensus(ctx)
	if err != nil {
		return View{}, err //nolint:wrapcheck // likewise
	}
	v := NewView(now, cookies, census.Absent, r.env.Topology, int(r.workers()))
	r.setView(&v)
	return v, nil
}

func (r *Runner) setView(v *View) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.view = v
}

// askTimeout bounds one question to a bookie.
const askTimeout = 10 * time.Second

// survey asks the members of a ledger what they have. Words that known has are not asked for again.
func (r *Runner) survey(ctx context.Context, l meta.Ledger, v View, known map[holder]*Holding) *Survey {
	s := NewSurvey(l, v)
	for _, f := range s.ToAsk() {
		for _, at := range f.Slots {
			if v.lost(at.UUID) || !v.Bookies[at.UUID].Live {
				continue
			}
			h := known[holder{f.First, at.UUID}]
			if h == nil {
				h = r.ask(ctx, l.ID, f, at.UUID)
				if known != nil && h.Err == "" {
					known[holder{f.First, at.UUID}] = h
				}
			}
			s.Add(f.First, at.UUID, h)
		}
	}
	return s
}

// ask asks one bookie about one fragment.
func (r *Runner) ask(ctx context.Context, l entry.LedgerID, f Stretch, u entry.StorageUUID) *Holding {
	h := &Holding{First: f.First}
	for first := f.First; first <= f.Last; first += bookieclient.MaxListed {
		asking, cancel := r.sched.WithTimeout(ctx, askTimeout)
		part, err := r.env.Control.ListEntries(asking, u, l, first, min(f.Last, first+bookieclient.MaxListed-1))
		cancel()
		if err != nil {
			return &Holding{First: f.First, Err: err.Error()}
		}
		h.Bits = append(h.Bits, part.Bits...)
		h.Limbo = h.Limbo || part.Limbo
	}
	return h
}

// hinted is a ledger of which a writer has left copies to repair.
type hinted struct {
	first    entry.EntryID // of the newest fragment concerned
	since    time.Time
	lookedAt time.Time
}

// maxHints bounds the ledgers whose hints are kept; the comparison of all ledgers finds the others.
const maxHints = 100_000

// Hint tells of copies that a writer or a recovery no longer tries to make. It does not block.
func (r *Runner) Hint(h ledger.Hint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.hints[h.Ledger]
	if k == nil {
		if len(r.hints) >= maxHints {
			return
		}
		k = &hinted{since: r.sched.Now()}
		r.hints[h.Ledger] = k
	}
	k.first = max(k.first, h.Fragment)
}

// hintAgain is the pause between two looks at a ledger whose open fragment lacks copies.
const hintAgain = 30 * time.Second

// flushHints notes the ledgers that were hinted at: those whose fragments are settled, and those whose open fragment has lacked
// copies for as long as a bookie may be away.
func (r *Runner) flushHints(ctx context.Context) error {
	now := r.sched.Now()
	due := map[entry.LedgerID]hinted{}
	r.mu.Lock()
	for id, k := range r.hints {
		if now.Sub(k.lookedAt) >= min(hintAgain, r.cfg.Delay) || k.lookedAt.IsZero() {
			k.lookedAt = now
			due[id] = *k
		}
	}
	r.mu.Unlock()
	for id, k := range due {
		l, err := r.env.Meta.GetLedger(ctx, id)
		if err != nil && !errors.Is(err, meta.ErrNotFound) {
			return err //nolint:wrapcheck // it says what failed
		}
		why := meta.CauseHint
		switch {
		case err != nil || l.State == meta.LedgerDeleting:
			r.forgetHint(id, k)
			continue
		case l.State == meta.LedgerClosed || k.first < l.Fragments[len(l.Fragments)-1].First:
		case now.Sub(k.since) < r.cfg.Delay:
			continue
		default:
			why |= meta.CauseOpen
		}
		if err := r.env.Meta.NoteRepair(ctx, meta.Repair{Ledger: id, Causes: why, Since: k.since}); err != nil {
			return err //nolint:wrapcheck // likewise
		}
		r.forgetHint(id, k)
		nudge(r.workKick)
	}
	return nil
}

// forgetHint forgets a hint, unless there was another since.
func (r *Runner) forgetHint(id entry.LedgerID, seen hinted) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k := r.hints[id]; k != nil && k.first == seen.first {
		delete(r.hints, id)
	}
}
