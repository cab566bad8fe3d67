package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// FinishFunc runs the transaction that closes a recovered ledger (T5), alone or together with what opens the next one:
// meta.Closing with Recovery set, m as Ledger, and last, length and tail. It keeps trying until its outcome is definite or ctx
// ends, and returns meta's errors. It may be called again after an unknown outcome or another attempt.
type FinishFunc func(ctx context.Context, m meta.Ledger, last entry.EntryID, length int64, tail []meta.Fragment) (meta.Ledger, error)

// RecoverOptions are the options of [Recover].
type RecoverOptions struct {
	// Finish closes the ledger. Required.
	Finish FinishFunc
	// MaxLength, when above 0, bounds an estimated length: no ledger of the caller's grows beyond it by much.
	MaxLength int64
}

// Stats tells what a recovery did.
type Stats struct {
	// EntriesRead and BytesRead count the entries found above the LAC.
	EntriesRead int
	BytesRead   int64
	// EntriesRewritten and BytesRewritten count those written back, each once.
	EntriesRewritten int
	BytesRewritten   int64
	// Replaced counts bookies replaced for the write-back.
	Replaced int
	// Attempts counts terms raised.
	Attempts int
	// LengthExact is false when the length of what lies below the LAC was estimated from samples: a recovery reads
	// only what lies above.
	LengthExact bool
	// Adopted: the ledger was found closed, and Finish was not applied, or its applying was not seen.
	Adopted bool
}

// Recover closes the ledger after its writer: it raises the term, fences, finds the end, and has Finish close it. If
// another recovery closes it first, its result is adopted. Attempts that cannot decide, for want of bookies or because of another recovery,
// are repeated with back-off until ctx ends (or [Config.RecoveryAttempts] is reached); then the error wraps
// ErrUndecided, ErrWriteBack or ErrHigherTerm. Errors of Finish that are none of a ledger's state are returned as they
// are, wrapped. env needs Bookies, Metadata and Candidates.
func Recover(ctx context.Context, env Env, id entry.LedgerID, opts RecoverOptions) (meta.Ledger, Stats, error) {
	env = env.withDefaults()
	start := env.Sched.Now()
	r := &recovery{env: env, id: id, finish: opts.Finish, maxLength: opts.MaxLength}
	l, err := r.run(ctx)
	if m := env.Metrics; m != nil {
		result := "closed"
		switch {
		case err != nil:
			result = "failed"
		case r.stats.Adopted:
			result = "adopted"
		}
		m.recoveries.WithLabelValues(result).Inc()
		m.recoverySeconds.Observe(env.Sched.Now().Sub(start).Seconds())
		m.recoveredBytes.Add(float64(r.stats.BytesRewritten))
	}
	if err != nil {
		return meta.Ledger{}, r.stats, fmt.Errorf("recover ledger %d: %w", id, err)
	}
	if env.Log != nil {
		env.Log.Info("ledger is recovered", "ledger", l.ID, "term", l.Term, "last", l.Last, "rewritten_bytes", r.stats.BytesRewritten,
			"adopted", r.stats.Adopted, "took", env.Sched.Now().Sub(start))
	}
	return l, r.stats, nil
}

// recovery repeats attempts until one closes the ledger.
type recovery struct {
	env       Env
	id        entry.LedgerID
	finish    FinishFunc
	maxLength int64
	stats     Stats
	conflicts int
}

// conflictLimit bounds the attempts that end in a conflict of Finish's own: its arguments will not become right.
const conflictLimit = 3

func (r *recovery) run(ctx context.Context) (meta.Ledger, error) {
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		l, err := r.attempt(ctx)
		if err == nil || !retryable(err) {
			return l, err
		}
		if errors.Is(err, meta.ErrConflict) {
			if r.conflicts++; r.conflicts >= conflictLimit {
				return l, err
			}
		}
		if n := r.env.Config.RecoveryAttempts; n > 0 && r.stats.Attempts >= n {
			return l, err
		}
		if r.env.Log != nil {
			r.env.Log.Warn("ledger recovery starts over", "ledger", r.id, "attempt", r.stats.Attempts, "error", err)
		}
		if errors.Is(err, ErrHigherTerm) {
			// Raising the term again would only defeat the other: give it time to close the ledger.
			if l, ok := r.awaitClosed(ctx, pause+time.Second); ok {
				return l, nil
			}
		}
		if ended := sched.Sleep(ctx, r.env.Sched, pause/2+sched.N(r.env.Sched, pause)); ended != nil {
			return l, fmt.Errorf("%w (%w)", err, ended)
		}
	}
}

func retryable(err error) bool {
	return errors.Is(err, ErrHigherTerm) || errors.Is(err, ErrUndecided) || errors.Is(err, ErrWriteBack) ||
		errors.Is(err, meta.ErrConflict) || errors.Is(err, meta.ErrRetired)
}

// awaitClosed polls the record until it is closed or patience has run out.
func (r *recovery) awaitClosed(ctx context.Context, patience time.Duration) (meta.Ledger, bool) {
	for until := r.env.Sched.Now().Add(patience); r.env.Sched.Now().Before(until); {
		if l, err := r.env.Metadata.GetLedger(ctx, r.id); err == nil && l.State == meta.LedgerClosed {
			r.stats.Adopted = true
			return l, true
		}
		if sched.Sleep(ctx, r.env.Sched, 20*time.Millisecond) != nil {
			break
		}
	}
	return meta.Ledger{}, false
}

// attempt is one raised term.
func (r *recovery) attempt(ctx context.Context) (meta.Ledger, error) {
	m, err := r.env.Metadata.StartRecovery(ctx, r.id)
	if err != nil {
		return m, fmt.Errorf("raise term: %w", err)
	}
	switch m.State {
	case meta.LedgerClosed:
		r.stats.Adopted = true
		return m, nil
	case meta.LedgerInRecovery:
	case meta.LedgerOpen, meta.LedgerDeleting:
		return m, &meta.LedgerStateError{Op: "recover", Current: m}
	}
	r.stats.Attempts++
	core := NewRecoveryCore(r.env.Config, m, r.env.Sched.Now())
	end, err := newRecoveryRun(r.env, core).run(ctx)
	s := core.Stats()
	r.stats.EntriesRead += s.EntriesRead
	r.stats.BytesRead += s.BytesRead
	r.stats.EntriesRewritten += s.EntriesRewritten
	r.stats.BytesRewritten += s.BytesRewritten
	r.stats.Replaced += s.Replaced
	if err != nil {
		return m, err
	}
	if r.env.OnHint != nil {
		for _, h := range end.Hints {
			r.env.OnHint(h)
		}
	}
	length := end.ReadLength + r.lengthBelow(ctx, m, core.Base(), end)
	return r.close(ctx, m, end, length)
}

// lengthBelow estimates the bytes of the entries up to base, which the recovery did not read: their mean size from a
// few samples, or from what was read above. Only retention by size and quotas go by a closed ledger's length; to know it
// exactly, a takeover would have to read all of it.
func (r *recovery) lengthBelow(ctx context.Context, m meta.Ledger, base entry.EntryID, end *RecoveryEnd) int64 {
	r.stats.LengthExact = base < 0
	if base < 0 {
		return 0
	}
	ctx, cancel := r.env.Sched.WithTimeout(ctx, r.env.Config.RequestTimeout/4)
	defer cancel()
	reader := NewReader(r.env, m)
	var mu sync.Mutex
	sum, count := end.ReadLength, int64(end.Last-base)
	all := sched.NewGroup(r.env.Sched)
	for _, e := range sampleEntries(base) {
		all.Go(func() {
			got, err := reader.Read(ctx, e, e, 1)
			if err != nil || len(got) == 0 {
				return
			}
			mu.Lock()
			sum, count = sum+int64(len(got[0].Body)), count+1
			mu.Unlock()
		})
	}
	all.Wait()
	if count == 0 {
		return 0
	}
	length := int64(float64(sum) / float64(count) * float64(base+1))
	if r.maxLength > 0 {
		length = min(length, r.maxLength)
	}
	return length
}

// sampleEntries picks up to eight distinct entries of 0 … base.
func sampleEntries(base entry.EntryID) []entry.EntryID {
	var s []entry.EntryID
	for i := range entry.EntryID(8) {
		if e := base * i / 7; len(s) == 0 || s[len(s)-1] != e {
			s = append(s, e)
		}
	}
	return s
}

// close runs Finish to a definite outcome.
func (r *recovery) close(ctx context.Context, m meta.Ledger, end *RecoveryEnd, length int64) (meta.Ledger, error) {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		l, err := r.finish(ctx, m, end.Last, length, end.Tail)
		if err == nil {
			return l, nil
		}
		var state *meta.LedgerStateError
		switch {
		case errors.As(err, &state):
			l = state.Current
		case errors.Is(err, meta.ErrUnknownOutcome):
			if sched.Sleep(ctx, r.env.Sched, pause) != nil {
				return l, fmt.Errorf("close: %w", err)
			}
			var readErr error
			if l, readErr = r.env.Metadata.GetLedger(ctx, r.id); readErr != nil {
				return l, fmt.Errorf("close: %w (%w)", err, readErr)
			}
		default:
			return l, fmt.Errorf("close: %w", err)
		}
		switch {
		case l.State == meta.LedgerClosed:
			r.stats.Adopted = true
			return l, nil
		case l.State == meta.LedgerDeleting:
			return l, fmt.Errorf("close: %w", err)
		case l.Term != m.Term:
			return l, fmt.Errorf("close: %w", ErrHigherTerm)
		case state != nil:
			return l, fmt.Errorf("close: %w: %w", meta.ErrConflict, err)
		}
	}
}

// recoveryRun is the runner of a [RecoveryCore]: the caller's goroutine owns the core, callbacks leave events in a
// mailbox.
type recoveryRun struct {
	env  Env
	core *RecoveryCore
	said answers

	mu     sync.Mutex
	inbox  []func(*RecoveryCore)
	closed bool
	signal chan struct{}
}

func newRecoveryRun(env Env, core *RecoveryCore) *recoveryRun {
	return &recoveryRun{env: env, core: core, said: newAnswers(env.Sched), signal: make(chan struct{}, 1)}
}

func (r *recoveryRun) post(ev func(*RecoveryCore)) {
	r.mu.Lock()
	if !r.closed {
		r.inbox = append(r.inbox, ev)
	}
	r.mu.Unlock()
	select {
	case r.signal <- struct{}{}:
	default:
	}
}

func (r *recoveryRun) run(ctx context.Context) (*RecoveryEnd, error) {
	// Reads and fences end with the attempt; write-backs that are under way do no harm.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		r.mu.Lock()
		r.closed, r.inbox = true, nil
		r.mu.Unlock()
	}()
	const tick = 10 * time.Millisecond
	passed, stop := sched.After(r.env.Sched, tick)
	defer func() { stop() }()
	for {
		for rd := r.core.Ready(); rd.NeedCandidates; rd = r.core.Ready() {
			rd.NeedCandidates = false
			r.core.Candidates(r.env.Candidates())
		}
		rd := r.core.Ready()
		if rd.Abort != nil {
			cancel()                                             // whoever has not answered says now how far the request came
			return nil, r.said.explain(rd.Abort, r.core.slots()) //nolint:contextcheck // it has ended, and the wait is short
		}
		if rd.Finish != nil {
			return rd.Finish, nil
		}
		r.carryOut(ctx, rd)
		r.core.Done()
		i, err := r.env.Sched.Wait(ctx, sched.Channels{r.signal, passed})
		if err != nil {
			return nil, err
		}
		if i == 1 {
			passed, stop = sched.After(r.env.Sched, tick)
			r.core.Tick(r.env.Sched.Now())
			continue
		}
		r.mu.Lock()
		batch := r.inbox
		r.inbox = nil
		r.mu.Unlock()
		r.core.Now(r.env.Sched.Now())
		for _, ev := range batch {
			ev(r.core)
		}
	}
}

func (r *recoveryRun) carryOut(ctx context.Context, rd *RecoveryReady) {
	m, f := r.core.Ledger(), r.core.Fragment()
	rd.Fence.Each(func(i int) {
		uuid := f.Slots[i].UUID
		r.said.ask(uuid)
		r.env.Bookies.Fence(ctx, uuid, bookiewire.Fence{Ledger: m.ID, Term: m.Term}, func(reply bookiewire.FenceReply, err error) {
			r.said.note(uuid, "fence", err)
			r.post(func(c *RecoveryCore) { c.FenceDone(i, reply.LAC, codeOf(err)) })
		})
	})
	for _, read := range rd.Reads {
		q := bookiewire.Read{Ledger: m.ID, First: read.Entry, Stride: 1, MaxEntries: 1, MaxBytes: 1, Recovery: true, Term: m.Term}
		read.Slots.Each(func(i int) {
			uuid := f.Slots[i].UUID
			r.said.ask(uuid)
			r.env.Bookies.Read(ctx, uuid, q, func(reply bookiewire.ReadReply, err error) {
				r.said.note(uuid, "read", err)
				r.post(func(c *RecoveryCore) {
					code := codeOf(err)
					if code != bookiewire.OK {
						c.ReadDone(read.Entry, i, code, 0, nil)
						return
					}
					if len(reply.Entries) != 1 || reply.Entries[0].Entry != read.Entry {
						c.ReadDone(read.Entry, i, bookiewire.Unknown, 0, nil)
						return
					}
					c.ReadDone(read.Entry, i, code, reply.Entries[0].Checksum, reply.Entries[0].Body)
				})
			})
		})
	}
	for _, s := range rd.Writes {
		add := &bookiewire.Add{
			Ledger: m.ID, Entry: s.Entry, Term: m.Term, Recovery: true, Nonce: m.Nonce, LAC: r.core.Base(),
			Checksum: s.Checksum, Body: s.Body,
		}
		s.Slots.Each(func(i int) {
			uuid := s.Ensemble[i].UUID
			r.said.ask(uuid)
			r.env.Bookies.Add(uuid, add, func(err error) {
				r.said.note(uuid, "write back", err)
				r.post(func(c *RecoveryCore) { c.AddDone(s.Entry, i, uuid, codeOf(err)) })
			})
		})
	}
}
