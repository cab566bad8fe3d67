package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// chainRun runs a chain.Core as chain.Chain does, for one owner of one topic.
type chainRun struct {
	b     *broker
	topic *topic
	guard meta.Guard
	id    meta.ChainID
	core  *chain.Core
	rec   meta.Chain
	stale bool
	cur   *writer
	// prepared is for the next ledger of a roll; opened is in metadata, until its writer is made.
	prepared, opened *meta.Ledger
	busy             bool // a transaction on the record is under way
	over             bool
}

const (
	openPatience  = 10 * time.Second
	closePatience = 2 * time.Second
)

var errLost = errors.New("sim: chain is lost")

// An entry's body: its number, its first offset, its span and its time, and something to fill it.
const bodyHeader = 32

func makeBody(number uint64, base entry.Offset, span uint32, at int64, size int) []byte {
	b := make([]byte, bodyHeader, bodyHeader+size)
	binary.BigEndian.PutUint64(b, number)
	binary.BigEndian.PutUint64(b[8:], uint64(base))
	binary.BigEndian.PutUint64(b[16:], uint64(span))
	binary.BigEndian.PutUint64(b[24:], uint64(at))
	for i := range size {
		b = append(b, byte(number)+byte(i))
	}
	return b
}

type bodyParts struct {
	number uint64
	base   entry.Offset
	span   uint32
	time   int64
}

func parseBody(b []byte) (bodyParts, bool) {
	if len(b) < bodyHeader {
		return bodyParts{}, false
	}
	return bodyParts{
		number: binary.BigEndian.Uint64(b), base: entry.Offset(binary.BigEndian.Uint64(b[8:])),
		span: uint32(binary.BigEndian.Uint64(b[16:])), time: int64(binary.BigEndian.Uint64(b[24:])),
	}, true
}

func describe(b []byte) (entry.Offset, int64, error) {
	p, ok := parseBody(b)
	if !ok {
		return 0, 0, errors.New("sim: body is too short")
	}
	return p.base + entry.Offset(p.span), p.time, nil
}

// openChain shuts the former owner out: it recovers and closes the ledger that may be open.
func (b *broker) openChain(t *task, tp *topic, guard meta.Guard) (*chainRun, error) {
	c := &chainRun{b: b, topic: tp, guard: guard, id: tp.chain}
	ctx := t.context(0, func() bool { return b.owned[tp.index] != guard.Epoch })
	for attempt := 0; ; attempt++ {
		rec, err := b.meta.GetChain(ctx, c.id)
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
		adopted, err := c.recover(ctx, t, rec.Runs[n-1])
		if err != nil {
			return nil, err
		}
		if !adopted {
			break
		}
	}
	c.core = chain.NewCore(b.w.limits, c.rec.NextOffset)
	return c, nil
}

// append hands an entry in.
func (c *chainRun) append(a *producerAppend) {
	if c.core.Phase() == chain.PhaseFailed {
		c.core.Step(chain.Event{Kind: chain.EventResumed})
	}
	it := &chain.Item{Span: a.span, Time: c.b.w.clock().UnixMilli()}
	a.base, a.ownerEpoch = c.core.NextOffset(), c.guard.Epoch
	body := makeBody(a.number, a.base, a.span, it.Time, a.size)
	it.Size = len(body)
	it.Load = chain.Append{Body: body, Span: a.span, Time: it.Time, Level: a.level, Tag: a}
	c.step(chain.Event{Kind: chain.EventAppended, Item: it, Now: c.b.w.clock()})
}

func (c *chainRun) step(ev chain.Event) {
	for _, a := range slices.Clone(c.core.Step(ev)) {
		c.carryOut(a)
	}
}

func (c *chainRun) carryOut(a chain.Action) {
	b := c.b
	switch a.Kind {
	case chain.ActionUse:
		c.cur = nil
		if a.Ledger != 0 {
			c.cur = newWriter(c, *c.opened)
			c.opened = nil
			b.w.trace(b.name, ledgerSubject(a.Ledger), "topic %d epoch %d goes on in ledger %d", c.topic.index, c.guard.Epoch, a.Ledger)
		}
	case chain.ActionSend:
		it, w := a.Item, c.cur
		b.w.trace(b.name, subject{ledger: uint64(w.core.Ledger().ID), entry: int64(it.Entry), number: tagOf(it).number},
			"append %d as %d:%d", tagOf(it).number, w.core.Ledger().ID, it.Entry)
		w.append(it.Load.Body, it.Load.Level, func(id entry.EntryID, err error) { c.onDone(w, it, id, err) })
	case chain.ActionOpenNext:
		b.spawn(c.openNext)
	case chain.ActionPrepare:
		b.spawn(func(t *task) { c.prepare(t, a.Delay) })
	case chain.ActionCloseCurrent:
		cur := c.cur
		b.spawn(func(t *task) { c.closeCurrent(t, cur, a.Next, a.Delay) })
	case chain.ActionShow:
		b.w.ghost.shown(c, a.Position)
	case chain.ActionFinish:
		b.w.ghost.finished(c, tagOf(a.Item), a.Position, a.Outcome)
	case chain.ActionForget:
	case chain.ActionStop:
		c.over = true
		b.w.trace(b.name, subject{topic: c.topic.index + 1}, "topic %d epoch %d lost: %v", c.topic.index, c.guard.Epoch, a.Err != nil)
		b.onChainLost(c)
	case chain.ActionEnd:
		c.over = true
	}
}

func tagOf(it *chain.Item) *producerAppend {
	a, ok := it.Load.Tag.(*producerAppend)
	if !ok {
		panic("sim: an item without its append")
	}
	return a
}

func (c *chainRun) onDone(w *writer, it *chain.Item, id entry.EntryID, err error) {
	ev := chain.Event{Kind: chain.EventCompleted, Item: it, Outcome: chain.Stored, Err: err}
	if err != nil {
		ev.Outcome = chain.Unknown
		var failed *ledger.AppendError
		if errors.As(err, &failed) && failed.Outcome == ledger.NotWritten {
			ev.Outcome = chain.NotWritten
		}
	}
	if c.cur != w {
		panic("sim: a writer completed an append after its ledger was drained")
	}
	if err == nil && id != it.Entry {
		panic(fmt.Sprintf("sim: entry %d was expected to be %d", id, it.Entry))
	}
	c.step(ev)
	if ev.Outcome == chain.Unknown && w.core.Phase() == ledger.Withdrawn {
		c.step(chain.Event{Kind: chain.EventWithdrawn, Err: errLost})
	}
}

func (c *chainRun) onConfirmed(w *writer, lac entry.EntryID) {
	if c.cur == w {
		c.step(chain.Event{Kind: chain.EventConfirmed, Entry: lac})
	}
}

func (c *chainRun) onRollWanted(w *writer) {
	if c.cur == w {
		c.step(chain.Event{Kind: chain.EventRollWanted})
	}
}

func (c *chainRun) onBroken(w *writer, err error) {
	if c.cur == w {
		c.step(chain.Event{Kind: chain.EventWithdrawn, Err: fmt.Errorf("%w: %w", errLost, err)})
	}
}

// shutdown drops the chain without closing its ledger.
func (c *chainRun) shutdown() {
	c.over = true
	if c.core == nil {
		return
	}
	c.step(chain.Event{Kind: chain.EventWithdrawn, Err: chain.ErrClosed})
	if w := c.cur; w != nil {
		w.post(func(c *ledger.WriterCore) { c.Withdraw(ledger.ErrShutdown) })
	}
}

func (c *chainRun) place(ctx context.Context, above entry.LedgerID) (meta.Ledger, error) {
	b, r := c.b, c.b.w.replication
	var slots []meta.Slot
	var err error
	for ; r.Ensemble >= r.WriteQuorum; r.Ensemble-- {
		slots, err = ledger.Place(ledger.PlaceRequest{
			Replication: r, Candidates: b.candidates(), Rand: rand.New(rand.NewPCG(b.w.rng.Uint64(), 1)), //nolint:gosec // seeded on purpose
		})
		if err == nil {
			break
		}
	}
	if err != nil {
		return meta.Ledger{}, &chain.NotEnoughBookiesError{Replication: b.w.replication, Err: err}
	}
	id, err := b.nextLedger(ctx, above)
	if err != nil {
		return meta.Ledger{}, err
	}
	return meta.Ledger{
		ID: id, State: meta.LedgerOpen, Nonce: b.w.rng.Uint64() | 1, Replication: r, Last: entry.NoEntry, Chain: c.id,
		Fragments: []meta.Fragment{{First: 0, Slots: slots}},
	}, nil
}

// transact runs one transaction on the chain's record at a time.
func (c *chainRun) transact(ctx context.Context, t *task, fn func(rec meta.Chain) (meta.Chain, error)) error {
	for c.busy {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		t.sleep(5 * time.Millisecond)
	}
	c.busy = true
	defer func() { c.busy = false }()
	rec := c.rec
	if c.stale {
		now, err := c.b.meta.GetChain(ctx, c.id)
		if err != nil {
			return fmt.Errorf("read chain: %w", err)
		}
		if now.LastLedger != rec.LastLedger {
			return fmt.Errorf("chain has ledger %d, not opened here: %w", now.LastLedger, meta.ErrEpoch)
		}
		rec = now
	}
	after, err := fn(rec)
	if err != nil {
		var state *meta.LedgerStateError
		c.stale = c.stale || errors.Is(err, meta.ErrUnknownOutcome) || errors.Is(err, meta.ErrConflict) ||
			errors.Is(err, meta.ErrNotFound) || errors.As(err, &state)
		return err
	}
	c.rec, c.stale = after, false
	return nil
}

func (c *chainRun) ended() bool { return c.over }

func (c *chainRun) openNext(t *task) {
	w := c.b.w
	patience := t.context(w.now+openPatience, c.ended)
	var opened meta.Ledger
	err := c.transact(patience, t, func(rec meta.Chain) (meta.Chain, error) {
		for {
			l, err := c.place(patience, rec.LastLedger)
			if err != nil {
				return rec, err
			}
			var after meta.Chain
			after, opened, err = c.openTxn(patience, t, rec, l, nil)
			if !errors.Is(err, meta.ErrRetired) && !errors.Is(err, meta.ErrLedgerOrder) {
				return after, err
			}
			if patience.Err() != nil {
				return rec, err
			}
		}
	})
	switch {
	case err == nil && c.core.Phase() == chain.PhaseOpening:
		c.opened = &opened
		c.step(chain.Event{Kind: chain.EventOpened, Ledger: opened.ID, Now: w.clock()})
	case c.core.Phase() != chain.PhaseOpening:
	case retriable(err):
		c.step(chain.Event{Kind: chain.EventOpenFailed, Err: err})
	default:
		c.step(chain.Event{Kind: chain.EventWithdrawn, Err: fmt.Errorf("%w: %w", errLost, err)})
	}
}

func retriable(err error) bool {
	var few *chain.NotEnoughBookiesError
	return errors.As(err, &few) || errors.Is(err, meta.ErrUnavailable) ||
		errors.Is(err, meta.ErrRetired) || errors.Is(err, meta.ErrConflict) ||
		errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, meta.ErrUnknownOutcome)
}

// openTxn runs T1, with T3 if closing is given, to a definite outcome.
//
//nolint:contextcheck // patience bounds the first attempt alone
func (c *chainRun) openTxn(patience context.Context, t *task, rec meta.Chain, l meta.Ledger, closing *meta.Closing) (meta.Chain, meta.Ledger, error) {
	md, life := c.b.meta, t.context(0, c.ended)
	after, opened, err := md.OpenLedger(patience, c.guard, rec, l, closing)
	if err == nil || !errors.Is(err, meta.ErrUnknownOutcome) {
		return after, opened, err
	}
	applied := func() (bool, error) {
		got, err := md.GetLedger(life, l.ID)
		if errors.Is(err, meta.ErrNotFound) || err == nil && got.Nonce != l.Nonce {
			return false, nil
		}
		if err == nil && got.State != meta.LedgerOpen {
			err = &meta.LedgerStateError{Op: "open ledger", Current: got}
		}
		if err == nil {
			opened = got
			after, err = md.GetChain(life, c.id)
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
		after, opened, err = md.OpenLedger(life, c.guard, rec, l, closing)
		if err == nil {
			return after, opened, nil
		}
		if life.Err() != nil {
			return rec, l, err
		}
		if !errors.Is(err, meta.ErrUnknownOutcome) {
			if done, readErr = applied(); done {
				return after, opened, nil
			}
			if readErr != nil {
				return rec, l, fmt.Errorf("%w: %w", meta.ErrUnknownOutcome, readErr)
			}
			return rec, l, err
		}
	}
}

func (c *chainRun) prepare(t *task, delay bool) {
	w := c.b.w
	for pause := 50 * time.Millisecond; !c.over; {
		if delay {
			t.sleep(w.between(pause/2, pause))
			pause = min(2*pause, 2*time.Second)
			if c.over {
				return
			}
		}
		delay = true
		attempt := t.context(w.now+closePatience, c.ended)
		next, err := c.place(attempt, c.rec.LastLedger)
		if err == nil {
			_, err = c.b.meta.GetChain(attempt, c.id)
		}
		if err != nil {
			continue
		}
		if !c.over {
			c.prepared = &next
			c.step(chain.Event{Kind: chain.EventPrepared})
		}
		return
	}
}

func (c *chainRun) closeCurrent(t *task, cur *writer, withNext, delay bool) {
	w := c.b.w
	if delay {
		t.sleep(w.between(100*time.Millisecond, 200*time.Millisecond))
		if c.over {
			return
		}
	}
	var opened meta.Ledger
	closed, err := cur.closeWith(t, func(last entry.EntryID, length int64) (meta.Ledger, error) {
		closed := cur.core.Ledger()
		life := t.context(0, c.ended)
		err := c.transact(life, t, func(rec meta.Chain) (meta.Chain, error) {
			next := c.prepared
			end, newest := c.core.EndAt(last)
			closing := meta.Closing{Ledger: closed, Last: last, Length: length, End: end, MaxTime: newest}
			if withNext {
				after, l, err := c.openTxn(t.context(w.now+closePatience, c.ended), t, rec, *next, &closing) //nolint:contextcheck // the task's
				if err == nil {
					opened = l
					closed.State, closed.Last, closed.Length = meta.LedgerClosed, last, length
				}
				return after, err
			}
			after, l, err := c.b.meta.CloseLedger(life, c.guard, rec, closing)
			if err == nil {
				closed = l
			}
			return after, err
		})
		return closed, err
	})
	switch {
	case c.over:
	case err == nil:
		c.opened, c.prepared = &opened, nil
		w.trace(c.b.name, ledgerSubject(closed.ID), "closed %d at %d, next %d", closed.ID, closed.Last, opened.ID)
		c.step(chain.Event{Kind: chain.EventLedgerClosed, Entry: closed.Last, Ledger: opened.ID, Now: w.clock()})
	case cur.core.Err() != nil:
		c.step(chain.Event{Kind: chain.EventWithdrawn, Err: fmt.Errorf("%w: %w", errLost, err)})
	default:
		c.step(chain.Event{Kind: chain.EventCloseFailed})
	}
}

// trim deletes the n oldest closed ledgers.
func (c *chainRun) trim(t *task, n int) {
	w := c.b.w
	for range n {
		if c.over || len(c.rec.Runs) == 0 || !c.rec.Runs[0].Closed {
			return
		}
		ctx := t.context(w.now+openPatience, c.ended)
		err := c.transact(ctx, t, func(rec meta.Chain) (meta.Chain, error) {
			if len(rec.Runs) == 0 || !rec.Runs[0].Closed {
				return rec, nil
			}
			return c.b.meta.DeleteLedger(ctx, c.guard, rec, rec.Runs[0].Ledger)
		})
		if err != nil {
			return
		}
		w.trims++
	}
}

// recover closes the ledger of run, as ledger.Recover does: attempts are repeated until one closes it. adopted tells that
// somebody else closed it.
func (c *chainRun) recover(ctx context.Context, t *task, run meta.Run) (adopted bool, err error) {
	b, w := c.b, c.b.w
	owned := b.meta.Owned(c.guard)
	conflicts := 0
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		adopted, err := c.attempt(ctx, t, owned, run)
		if err == nil {
			return adopted, nil
		}
		w.trace(b.name, ledgerSubject(run.Ledger), "recovery of %d is given up", run.Ledger)
		retry := errors.Is(err, ledger.ErrHigherTerm) || errors.Is(err, ledger.ErrUndecided) || errors.Is(err, ledger.ErrWriteBack) ||
			errors.Is(err, meta.ErrConflict) || errors.Is(err, meta.ErrRetired)
		if !retry {
			return false, err
		}
		if errors.Is(err, meta.ErrConflict) {
			if conflicts++; conflicts >= 3 {
				return false, err
			}
		}
		if errors.Is(err, ledger.ErrHigherTerm) {
			for until := w.now + pause + time.Second; w.now < until; {
				if l, err := b.meta.GetLedger(ctx, run.Ledger); err == nil && l.State == meta.LedgerClosed {
					return true, nil
				}
				t.sleep(20 * time.Millisecond)
			}
		}
		t.sleep(w.between(pause/2, pause*3/2))
		if ctx.Err() != nil {
			return false, fmt.Errorf("%w (%w)", err, ctx.Err())
		}
	}
}

func (c *chainRun) attempt(ctx context.Context, t *task, owned *meta.Owned, run meta.Run) (adopted bool, err error) {
	b, w := c.b, c.b.w
	m, err := owned.StartRecovery(ctx, run.Ledger)
	if err != nil {
		return false, fmt.Errorf("raise term: %w", err)
	}
	switch m.State {
	case meta.LedgerClosed:
		return true, nil
	case meta.LedgerInRecovery:
	case meta.LedgerOpen, meta.LedgerDeleting:
		return false, &meta.LedgerStateError{Op: "recover", Current: m}
	}
	w.trace(b.name, ledgerSubject(m.ID), "recovers %d with term %d", m.ID, m.Term)
	w.provoke(b)
	r := &recoveryRun{b: b, core: ledger.NewRecoveryCore(w.ledgerConfig(), m, w.clock()), ended: func() bool { return ctx.Err() != nil }}
	t.await(func(wake func()) {
		r.done = wake
		r.step(func(*ledger.RecoveryCore) {})
		r.tick()
	})
	if r.err != nil {
		return false, r.err
	}
	end := r.end
	w.trace(b.name, ledgerSubject(m.ID), "recovery of %d with term %d proposes end %d", m.ID, m.Term, end.Last)
	closing, err := c.describeEnd(t, run, m, end)
	if err != nil {
		return false, err
	}
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		rec, l, err := b.meta.CloseLedger(ctx, c.guard, c.rec, closing)
		if err == nil {
			c.rec = rec
			w.trace(b.name, ledgerSubject(m.ID), "recovery of %d closed it at %d", m.ID, l.Last)
			return false, nil
		}
		var state *meta.LedgerStateError
		switch {
		case errors.As(err, &state):
			l = state.Current
		case errors.Is(err, meta.ErrUnknownOutcome):
			t.sleep(pause)
			if ctx.Err() != nil {
				return false, err
			}
			if l, err = b.meta.GetLedger(ctx, m.ID); err != nil {
				return false, err
			}
		default:
			return false, err
		}
		switch {
		case l.State == meta.LedgerClosed:
			return true, nil
		case l.State == meta.LedgerDeleting:
			return false, &meta.LedgerStateError{Op: "recover", Current: l}
		case l.Term != m.Term:
			return false, fmt.Errorf("close: %w", ledger.ErrHigherTerm)
		case state != nil:
			return false, fmt.Errorf("close: %w", meta.ErrConflict)
		}
	}
}

// describeEnd reads where a recovered ledger ends, from its last entry.
func (c *chainRun) describeEnd(t *task, run meta.Run, m meta.Ledger, end *ledger.RecoveryEnd) (meta.Closing, error) {
	closing := meta.Closing{
		Ledger: m, Last: end.Last, Length: end.ReadLength, Tail: end.Tail, End: run.First, Recovery: true, Term: m.Term,
	}
	if end.Last == entry.NoEntry {
		return closing, nil
	}
	view := m
	if len(end.Tail) > 0 {
		keep := slices.IndexFunc(m.Fragments, func(f meta.Fragment) bool { return f.First >= end.Tail[0].First })
		if keep < 0 {
			keep = len(m.Fragments)
		}
		view.Fragments = append(slices.Clone(m.Fragments[:keep]), end.Tail...)
	}
	body, err := c.b.readEntry(t, view, end.Last)
	if err != nil {
		return closing, err
	}
	closing.End, closing.MaxTime, err = describe(body)
	return closing, err
}

// recoveryRun runs a ledger.RecoveryCore.
type recoveryRun struct {
	b     *broker
	core  *ledger.RecoveryCore
	ended func() bool
	done  func()
	end   *ledger.RecoveryEnd
	err   error
}

func (r *recoveryRun) over() bool { return r.done == nil }

func (r *recoveryRun) finish() {
	done := r.done
	r.done = nil
	r.b.after(0, done)
}

func (r *recoveryRun) tick() {
	r.b.after(10*time.Millisecond, func() {
		switch {
		case r.over():
		case r.ended():
			r.err = context.Canceled
			r.finish()
		default:
			r.step(func(c *ledger.RecoveryCore) { c.Tick(r.b.w.clock()) })
			r.tick()
		}
	})
}

func (r *recoveryRun) step(ev func(*ledger.RecoveryCore)) {
	if r.over() {
		return
	}
	c, b := r.core, r.b
	c.Now(b.w.clock())
	ev(c)
	for rd := c.Ready(); rd.NeedCandidates; rd = c.Ready() {
		rd.NeedCandidates = false
		c.Candidates(b.candidates())
	}
	rd := *c.Ready()
	c.Done()
	switch {
	case rd.Abort != nil:
		r.err = rd.Abort
		r.finish()
		return
	case rd.Finish != nil:
		r.end = rd.Finish
		r.finish()
		return
	}
	m, f := c.Ledger(), c.Fragment()
	rd.Fence.Each(func(i int) {
		b.request(f.Slots[i].UUID, &request{
			limit: requestLimit * 2,
			serve: func(k *bookieProcess, reply func(func())) {
				k.fence(bookiewire.Fence{Ledger: m.ID, Term: m.Term}, func(got bookiewire.FenceReply, err error) {
					reply(func() { r.step(func(c *ledger.RecoveryCore) { c.FenceDone(i, got.LAC, codeOf(err)) }) })
				})
			},
			fail: func(e *bookiewire.Error) { r.step(func(c *ledger.RecoveryCore) { c.FenceDone(i, 0, e.Code) }) },
		})
	})
	for _, read := range rd.Reads {
		q := bookiewire.Read{Ledger: m.ID, First: read.Entry, Stride: 1, MaxEntries: 1, MaxBytes: 1, Recovery: true, Term: m.Term}
		read.Slots.Each(func(i int) {
			b.request(f.Slots[i].UUID, &request{
				limit: requestLimit * 2,
				serve: func(k *bookieProcess, reply func(func())) {
					k.read(q, func(got bookiewire.ReadReply, err error) { reply(func() { r.readDone(q.First, i, got, err) }) })
				},
				fail: func(e *bookiewire.Error) { r.readDone(q.First, i, bookiewire.ReadReply{}, e) },
			})
		})
	}
	for _, s := range rd.Writes {
		a := bookiewire.Add{
			Ledger: m.ID, Entry: s.Entry, Term: m.Term, Recovery: true, Nonce: m.Nonce, LAC: c.Base(), Checksum: s.Checksum, Body: s.Body,
		}
		b.w.ghost.sent(&a)
		s.Slots.Each(func(i int) {
			uuid := s.Ensemble[i].UUID
			done := func(err error) {
				r.step(func(c *ledger.RecoveryCore) { c.AddDone(a.Entry, i, uuid, codeOf(err)) })
			}
			b.link(uuid, true).ask(&request{
				serve: func(k *bookieProcess, reply func(func())) { k.add(a, func(err error) { reply(func() { done(err) }) }) },
				fail:  func(e *bookiewire.Error) { done(e) },
			})
		})
	}
}

func (r *recoveryRun) readDone(e entry.EntryID, slot int, got bookiewire.ReadReply, err error) {
	r.step(func(c *ledger.RecoveryCore) {
		switch code := codeOf(err); {
		case code != bookiewire.OK:
			c.ReadDone(e, slot, code, 0, nil)
		case len(got.Entries) != 1 || got.Entries[0].Entry != e:
			c.ReadDone(e, slot, bookiewire.Unknown, 0, nil)
		default:
			c.ReadDone(e, slot, code, got.Entries[0].Checksum, got.Entries[0].Body)
		}
	})
}
