package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// CloseFunc runs the transaction that closes a ledger at last (T3), alone or together with what opens the next one. It
// keeps trying until its outcome is definite or ctx ends. Its error tells which:
//   - nil: applied, and the result is the closed record.
//   - *meta.LedgerStateError, meta.ErrEpoch, meta.ErrNotFound: the ledger is no longer the writer's, which withdraws.
//   - meta.ErrConflict, ErrUnavailable, ErrRetired, ErrInvalid, ErrLedgerOrder, ErrExists: certainly not applied; the
//     writer goes on as if nothing had happened.
//   - anything else: outcome unknown; the writer withdraws.
type CloseFunc func(ctx context.Context, last entry.EntryID, length int64) (meta.Ledger, error)

// Writer appends to one ledger. It is the runner of a [WriterCore]: it queues events, and while there are any, one
// goroutine feeds them to the core in batches, carries out what the core wants, and calls back. So state has one
// owner, callbacks come in order and never under a lock, many acknowledgements cost one wake-up, and an idle ledger
// costs no goroutine and no timer.
//
// Callbacks (the done of appends, the hooks of [Env]) run on that goroutine: they must be short, may call Append, and
// must not call CloseWith or Shutdown, which wait for it.
type Writer struct {
	env    Env
	ctx    context.Context //nolint:containedctx // bounds the transactions of the writer's life, ended by Shutdown
	cancel context.CancelFunc

	runInbox func() // run, bound once

	mu         sync.Mutex
	quiet      chan struct{} // closed when nothing runs any more, if somebody waits
	inbox      []event
	spare      []event
	running    bool
	background int
	dead       bool // the core is over: answers of bookies no longer matter
	closing    *closeCall

	core *WriterCore // owned by the running goroutine

	lac, confirmedLength atomic.Int64
	last, appendedLength atomic.Int64
	record               atomic.Pointer[meta.Ledger]
	failure              atomic.Pointer[error]
	deadline             atomic.Int64 // Unix nanoseconds of the next tick wanted; 0: none
	tickQueued           atomic.Bool
	degraded             atomic.Bool
	wantsRoll            atomic.Bool
	roll, broken         chan struct{}
}

// closeCall is one CloseWith under way; others wait for it.
type closeCall struct {
	proposed chan struct{} // closed when there is a proposal
	proposal CloseProposal
	finished chan struct{}
	ledger   meta.Ledger
	err      error
}

type eventKind uint8

const (
	evAppend eventKind = iota
	evAnswer
	evTick
	evCall
)

type event struct {
	kind  eventKind
	level AckLevel
	code  bookiewire.Code
	slot  int32
	entry entry.EntryID
	uuid  entry.StorageUUID
	body  []byte
	done  func(entry.EntryID, error)
	call  func(*WriterCore)
	after chan struct{} // closed once the event's consequences are carried out
}

// NewWriter returns the writer of a ledger that has just been opened (T1) with a nonce of the caller's. env needs
// Bookies, Metadata, Candidates and Ticker. Every writer must be closed with success, or shut down.
func NewWriter(env Env, l meta.Ledger) *Writer {
	if env.Bookies == nil || env.Metadata == nil || env.Candidates == nil || env.Ticker == nil {
		panic("ledger: a writer needs bookies, metadata, candidates and a ticker")
	}
	env = env.withDefaults()
	if env.Config.Seed == 0 {
		env.Config.Seed = env.Sched.Uint64()
	}
	w := &Writer{env: env, roll: make(chan struct{}), broken: make(chan struct{})}
	w.core = newWriterCore(&w.env.Config, l, env.Sched.Now())
	w.runInbox = w.run
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.lac.Store(int64(w.core.LAC()))
	w.last.Store(int64(w.core.LAC()))
	w.record.Store(&l)
	return w
}

// Append adds an entry. It never blocks: the caller bounds what is in flight, by [Config.Released]. body is the
// writer's from now on, and must not be changed any more even when it has been released.
//
// done is called exactly once, never from within Append. Among appends of one level it is called in entry order; a
// weaker level may overtake a stronger one. Its error is nil or an *[AppendError].
func (w *Writer) Append(body []byte, level AckLevel, done func(id entry.EntryID, err error)) {
	w.post(event{kind: evAppend, body: body, level: level, done: done})
}

// Confirmed returns the LAC: readers may see entries up to it.
func (w *Writer) Confirmed() entry.EntryID { return entry.EntryID(w.lac.Load()) }

// Length returns the bytes of the bodies up to Confirmed.
func (w *Writer) Length() int64 { return w.confirmedLength.Load() }

// Appended returns the last entry that was given an id, and the bytes of all bodies up to it. Appends that were not
// taken up yet are not included.
func (w *Writer) Appended() (last entry.EntryID, length int64) {
	return entry.EntryID(w.last.Load()), w.appendedLength.Load()
}

// Ledger returns the ledger's record as last acknowledged.
func (w *Writer) Ledger() meta.Ledger {
	l := *w.record.Load()
	l.Fragments = slices.Clone(l.Fragments)
	return l
}

// Broken returns a channel that is closed when the writer has withdrawn: it appends nothing any more, and the ledger
// is for a recovery to close. [Writer.Err] says why.
func (w *Writer) Broken() <-chan struct{} { return w.broken }

// Err returns why the writer withdrew: ErrFenced, ErrTakenOver, ErrShutdown or meta.ErrUnknownOutcome, wrapped. Nil while
// it has not.
func (w *Writer) Err() error {
	if e := w.failure.Load(); e != nil {
		return *e
	}
	return nil
}

// RollWanted returns a channel that is closed when the ledger should be closed and another opened: no quorum of bookies
// is possible with the bookies there are, or the ledger has too many fragments.
func (w *Writer) RollWanted() <-chan struct{} { return w.roll }

// WantsRoll reports whether RollWanted is closed.
func (w *Writer) WantsRoll() bool { return w.wantsRoll.Load() }

// Degraded reports that entries are confirmed, if at all, without some bookie of the ensemble.
func (w *Writer) Degraded() bool { return w.degraded.Load() }

// CandidatesChanged tells the writer to look at the candidates: a bookie of its ensemble may be draining or read-only.
// The owner calls it for each of its writers, idle ones too, when the bookies' registrations change.
func (w *Writer) CandidatesChanged() {
	w.post(event{kind: evCall, call: func(c *WriterCore) { c.Candidates(w.env.Candidates()) }})
}

// CloseWith closes the ledger at its LAC with the transaction fn. Appends in flight get up to [Config.DrainTimeout]
// to be confirmed, later ones are kept back. Then nothing is confirmed until fn has returned. If it was applied, appends above
// the last entry end NotWritten; their bodies are the caller's again. All dones were called when CloseWith returns.
// A second call waits for the first, and returns the same if that closed the ledger. If ctx ends while appends drain, the
// writer goes on.
func (w *Writer) CloseWith(ctx context.Context, fn CloseFunc) (meta.Ledger, error) {
	call := &closeCall{proposed: make(chan struct{}), finished: make(chan struct{})}
	for {
		w.mu.Lock()
		earlier := w.closing
		if earlier == nil {
			w.closing = call
		}
		w.mu.Unlock()
		if earlier == nil {
			break
		}
		if _, err := w.env.Sched.Wait(ctx, sched.Channels{earlier.finished}); err != nil {
			return meta.Ledger{}, fmt.Errorf("close ledger %d: %w", w.record.Load().ID, err)
		}
		if earlier.err == nil {
			return earlier.ledger, nil
		}
	}
	call.ledger, call.err = w.close(ctx, call, fn)
	if call.err != nil {
		w.mu.Lock()
		w.closing = nil
		w.mu.Unlock()
	}
	close(call.finished)
	return call.ledger, call.err
}

func (w *Writer) close(ctx context.Context, call *closeCall, fn CloseFunc) (meta.Ledger, error) {
	id := w.record.Load().ID
	w.do(func(c *WriterCore) { c.RequestClose(w.env.Sched.Now().Add(w.env.Config.DrainTimeout)) })
	const proposed, broken = 0, 1
	switch i, ended := w.env.Sched.Wait(ctx, sched.Channels{proposed: call.proposed, broken: w.broken}); i {
	case proposed:
	case broken:
		return meta.Ledger{}, fmt.Errorf("close ledger %d: %w", id, w.Err())
	default:
		var canceled bool
		w.do(func(c *WriterCore) { canceled = c.CancelClose() })
		if !canceled {
			w.do(func(c *WriterCore) { c.CloseDone(NotApplied, meta.Ledger{}, nil) })
		}
		return meta.Ledger{}, fmt.Errorf("close ledger %d: %w", id, ended)
	}
	p := call.proposal
	l, err := fn(ctx, p.Last, p.Length)
	result := CloseResult(err)
	var state *meta.LedgerStateError
	if errors.As(err, &state) && state.Current.State >= meta.LedgerClosed && state.Current.Term == w.record.Load().Term &&
		state.Current.Nonce == w.record.Load().Nonce && state.Current.Last == p.Last {
		// No recovery ever raised the term, so it was an earlier try of fn that closed it.
		l, err, result = state.Current, nil, Applied
	}
	w.do(func(c *WriterCore) { c.CloseDone(result, l, err) })
	if err != nil {
		return meta.Ledger{}, fmt.Errorf("close ledger %d: %w", id, err)
	}
	if e := w.Err(); e != nil {
		// Shut down while the transaction was under way: it was applied all the same, and appends are unknown.
		return l, fmt.Errorf("close ledger %d: %w", id, e)
	}
	return l, nil
}

// CloseResult is what the error of a [CloseFunc] says of its transaction.
func CloseResult(err error) TxnResult {
	var state *meta.LedgerStateError
	switch {
	case err == nil:
		return Applied
	case errors.Is(err, meta.ErrUnknownOutcome):
		return NoOutcome
	case errors.As(err, &state), errors.Is(err, meta.ErrEpoch), errors.Is(err, meta.ErrNotFound):
		return Lost
	case errors.Is(err, meta.ErrConflict), errors.Is(err, meta.ErrUnavailable), errors.Is(err, meta.ErrRetired),
		errors.Is(err, meta.ErrInvalid), errors.Is(err, meta.ErrLedgerOrder), errors.Is(err, meta.ErrExists):
		return NotApplied
	}
	return NoOutcome
}

// Shutdown withdraws: it leaves the ledger as it is, for a recovery to close. Pending appends end with outcome Unknown. It
// returns once every done was called and no goroutine of the writer is left. After a successful CloseWith it only
// waits for the latter.
func (w *Writer) Shutdown() {
	w.cancel()
	w.do(func(c *WriterCore) { c.Withdraw(ErrShutdown) })
	w.mu.Lock()
	for w.running || w.background > 0 {
		if w.quiet == nil {
			w.quiet = make(chan struct{})
		}
		quiet := w.quiet
		w.mu.Unlock()
		sched.Until(w.env.Sched, quiet)
		w.mu.Lock()
	}
	w.mu.Unlock()
}

// calm tells who waits that something has stopped running. mu is held.
func (w *Writer) calm() {
	if w.quiet != nil && !w.running && w.background == 0 {
		close(w.quiet)
		w.quiet = nil
	}
}

// do runs f on the writer's goroutine and returns once its consequences are carried out.
func (w *Writer) do(f func(*WriterCore)) {
	after := make(chan struct{})
	w.post(event{kind: evCall, call: f, after: after})
	sched.Until(w.env.Sched, after)
}

// post queues an event and starts the goroutine unless it runs.
func (w *Writer) post(ev event) {
	w.mu.Lock()
	if w.dead && ev.kind == evAnswer {
		w.mu.Unlock()
		return
	}
	w.inbox = append(w.inbox, ev)
	start := !w.running
	w.running = true
	w.mu.Unlock()
	if start {
		w.env.Sched.Go(w.runInbox)
	}
}

// inBackground runs f on a goroutine that Shutdown waits for.
func (w *Writer) inBackground(f func()) {
	w.mu.Lock()
	w.background++
	w.mu.Unlock()
	w.env.Sched.Go(func() {
		f()
		w.mu.Lock() // not deferred: an assertion that fails under mu would wait here instead of stopping the process
		w.background--
		w.calm()
		w.mu.Unlock()
	})
}

func (w *Writer) tick(now time.Time) bool {
	d := w.deadline.Load()
	if d == 0 {
		return false
	}
	if now.UnixNano() >= d && !w.tickQueued.Swap(true) {
		w.post(event{kind: evTick})
	}
	return true
}

// run feeds the core as long as there are events.
func (w *Writer) run() {
	var batch []event
	for {
		w.mu.Lock()
		if batch != nil {
			w.spare = batch[:0]
		}
		if len(w.inbox) == 0 {
			if w.core.Deadline().IsZero() && w.core.Idle() {
				w.inbox, w.spare = nil, nil
				w.core.Shrink()
			}
			w.running = false
			w.calm()
			w.mu.Unlock()
			return
		}
		batch, w.inbox, w.spare = w.inbox, w.spare, nil
		w.mu.Unlock()

		w.core.Now(w.env.Sched.Now())
		w.core.SetMayAckEarly(w.env.MayAckEarly == nil || w.env.MayAckEarly())
		for i := range batch {
			w.step(&batch[i])
		}
		w.carryOut()
		for i := range batch {
			if batch[i].after != nil {
				close(batch[i].after)
			}
		}
		clear(batch)
	}
}

func (w *Writer) step(ev *event) {
	switch ev.kind {
	case evAppend:
		w.core.Append(ev.body, ev.level, ev.done)
	case evAnswer:
		if ev.code == bookiewire.OK {
			w.core.Ack(ev.entry, int(ev.slot), ev.uuid)
		} else {
			w.core.Fail(ev.entry, int(ev.slot), ev.uuid, ev.code)
		}
	case evTick:
		w.tickQueued.Store(false)
		w.core.Tick(w.env.Sched.Now())
	case evCall:
		ev.call(w.core)
	}
}

// carryOut does what the core wants: first what others wait for, then the callbacks.
func (w *Writer) carryOut() {
	c, m := w.core, w.env.Metrics
	rd := c.Ready()
	for rd.NeedCandidates {
		rd.NeedCandidates = false
		c.Candidates(w.env.Candidates())
		rd = c.Ready()
	}
	nonce := c.Ledger().Nonce
	for i := range rd.Sends {
		w.send(&rd.Sends[i], rd.LAC, nonce)
	}
	if rd.WriteLAC != 0 {
		w.writeLAC(rd.WriteLAC, rd.LAC, c.ensemble())
	}
	if rd.Verify {
		w.inBackground(w.verify)
	}
	if rd.Change != nil {
		change := *rd.Change
		w.inBackground(func() { w.changeEnsemble(change) })
	}
	w.publish()
	if rd.Close != nil {
		w.mu.Lock()
		call := w.closing
		w.mu.Unlock()
		call.proposal = *rd.Close
		close(call.proposed)
	}
	if rd.Confirmed && w.env.OnConfirmed != nil {
		w.env.OnConfirmed(rd.LAC)
	}
	for i := range rd.Completions {
		w.complete(&rd.Completions[i])
	}
	if rd.Released > 0 && w.env.Config.Released != nil {
		w.env.Config.Released(rd.Released)
	}
	for _, h := range rd.Hints {
		if w.env.OnHint != nil {
			w.env.OnHint(h)
		}
	}
	if m != nil {
		m.hints.Add(float64(len(rd.Hints)))
		m.suspects.Add(float64(rd.Suspects))
		if rd.Stalled {
			m.stalls.Inc()
		}
	}
	c.Done()
	w.announce()
	w.schedule()
}

func (w *Writer) complete(k *Completion) {
	if !k.Dropped {
		if k.Done != nil {
			k.Done(k.Entry, k.Err)
		}
		return
	}
	if w.env.Metrics != nil {
		w.env.Metrics.dropped.Inc()
	}
	if w.env.OnDropped != nil {
		w.env.OnDropped(k.Entry, k.Body)
	}
}

// publish makes the core's state visible to other goroutines.
func (w *Writer) publish() {
	c := w.core
	confirmed, appended := c.Length()
	w.env.Metrics.confirm(int64(c.LAC())-w.lac.Swap(int64(c.LAC())), confirmed-w.confirmedLength.Swap(confirmed))
	w.appendedLength.Store(appended)
	w.last.Store(int64(c.track.Next() - 1))
	w.degraded.Store(c.Degraded())
	if l := c.Ledger(); l.Rev != w.record.Load().Rev || l.State != w.record.Load().State {
		w.record.Store(&l)
	}
}

// announce closes the channels that others wait for, once the callbacks were called.
func (w *Writer) announce() {
	c := w.core
	if c.WantsRoll() && !w.wantsRoll.Swap(true) {
		close(w.roll)
	}
	w.mu.Lock()
	first := c.over() && !w.dead
	w.dead = c.over()
	w.mu.Unlock()
	err := c.Err()
	if !first || err == nil {
		return
	}
	w.failure.Store(&err)
	w.cancel()
	if w.env.Metrics != nil {
		w.env.Metrics.withdrawals.Inc()
	}
	if w.env.Log != nil && !errors.Is(err, ErrShutdown) {
		w.env.Log.Warn("ledger writer withdrew", "ledger", c.Ledger().ID, "lac", c.LAC(), "error", err)
	}
	close(w.broken)
}

// schedule asks the ticker for the core's next deadline.
func (w *Writer) schedule() {
	var at int64
	if d := w.core.Deadline(); !d.IsZero() {
		at = d.UnixNano()
	}
	if w.deadline.Swap(at) == 0 && at != 0 {
		w.env.Ticker.add(w.env.Sched, w)
	}
}
