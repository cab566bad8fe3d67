package sim

import (
	"errors"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// writer runs a ledger.WriterCore as ledger.Writer does: events wait in an inbox, are taken in batches, and what the core
// wants is carried out in the order of its Ready.
type writer struct {
	c      *chainRun
	core   *ledger.WriterCore
	inbox  []func(*ledger.WriterCore)
	awake  bool
	tickAt time.Duration
	ended  bool // withdrawn or closed, and told so
	rolled bool // the wish for a roll was passed on
	// closing is told the proposal of a close, and of the end if there will be none.
	closing func(p ledger.CloseProposal, err error)
	// frozen is the LAC at a proposal's start, while its outcome is out.
	frozen    entry.EntryID
	isFrozen  bool
	confirmed entry.EntryID
}

func newWriter(c *chainRun, l meta.Ledger) *writer {
	b := c.b
	w := &writer{c: c, core: ledger.NewWriterCore(b.w.ledgerConfig(), l, b.w.clock()), confirmed: entry.NoEntry}
	return w
}

// post queues an event. What it leads to happens in an event of its own.
func (w *writer) post(ev func(*ledger.WriterCore)) {
	w.inbox = append(w.inbox, ev)
	if w.awake {
		return
	}
	w.awake = true
	w.c.b.after(0, w.run)
}

func (w *writer) run() {
	b := w.c.b
	w.awake = false
	batch := w.inbox
	w.inbox = nil
	w.core.Now(b.w.clock())
	w.core.SetMayAckEarly(b.leaseHolds())
	for _, ev := range batch {
		ev(w.core)
	}
	w.carryOut()
}

func (w *writer) append(body []byte, level ledger.AckLevel, done func(entry.EntryID, error)) {
	w.post(func(c *ledger.WriterCore) { c.Append(body, level, done) })
}

func (w *writer) carryOut() {
	c, b := w.core, w.c.b
	rd := c.Ready()
	for rd.NeedCandidates {
		rd.NeedCandidates = false
		c.Candidates(b.candidates())
		rd = c.Ready()
	}
	l := c.Ledger()
	if w.isFrozen && (rd.Confirmed || c.LAC() != w.frozen) {
		b.w.fail("12", ledgerSubject(l.ID), "LAC of ledger %d grows from %d to %d while a proposal is out", l.ID, w.frozen, c.LAC())
	}
	for i := range rd.Sends {
		w.send(&rd.Sends[i], l, rd.LAC)
	}
	if rd.WriteLAC != 0 {
		slots := l.Fragments[len(l.Fragments)-1].Slots
		rd.WriteLAC.Each(func(i int) {
			b.request(slots[i].UUID, &request{
				limit: requestLimit,
				serve: func(k *bookieProcess, reply func(func())) {
					k.writeLAC(bookiewire.WriteLAC{Ledger: l.ID, Nonce: l.Nonce, LAC: rd.LAC}, func(error) { reply(func() {}) })
				},
				fail: func(*bookiewire.Error) {},
			})
		})
	}
	if rd.Verify {
		b.spawn(func(t *task) {
			got, err := b.meta.GetLedger(t.context(b.w.now+requestLimit, w.over), l.ID)
			w.post(func(c *ledger.WriterCore) { c.Verified(got, err) })
		})
	}
	if rd.Change != nil {
		change := *rd.Change
		b.w.trace(b.name, ledgerSubject(l.ID), "proposes ensemble of %d at %d: %s", l.ID, c.LAC(), b.w.fragments(change.Fragments))
		w.freeze()
		b.spawn(func(t *task) { w.changeEnsemble(t, change) })
	}
	if rd.Close != nil {
		p := *rd.Close
		b.w.trace(b.name, ledgerSubject(l.ID), "proposes end of %d: %d", l.ID, p.Last)
		w.freeze()
		w.closing(p, nil)
	}
	if rd.Confirmed {
		b.w.ghost.confirmed(w.c, l, w.confirmed+1, rd.LAC)
		w.confirmed = rd.LAC
		w.c.onConfirmed(w, rd.LAC)
	}
	for _, k := range rd.Completions {
		if !k.Dropped && k.Done != nil { // the chain keeps what is dropped
			k.Done(k.Entry, k.Err)
		}
	}
	c.Done()
	if c.WantsRoll() && !w.rolled {
		w.rolled = true
		w.c.onRollWanted(w)
	}
	if err := c.Err(); err != nil && !w.ended {
		w.ended = true
		b.w.trace(b.name, ledgerSubject(l.ID), "writer of %d withdraws at %d: %v", l.ID, c.LAC(), err)
		if w.closing != nil {
			w.closing(ledger.CloseProposal{}, err)
		}
		w.c.onBroken(w, err)
	}
	w.schedule()
}

func (w *writer) over() bool {
	return w.core.Phase() == ledger.Withdrawn || w.core.Phase() == ledger.Closed
}

func (w *writer) freeze() { w.isFrozen, w.frozen = true, w.core.LAC() }

func (w *writer) schedule() {
	d := w.core.Deadline()
	if d.IsZero() {
		return
	}
	at := max(d.Sub(began), w.c.b.w.now+time.Millisecond)
	if w.tickAt > w.c.b.w.now && w.tickAt <= at {
		return
	}
	w.tickAt = at
	w.c.b.after(at-w.c.b.w.now, func() {
		if w.tickAt == at {
			w.tickAt = 0
			w.post(func(c *ledger.WriterCore) { c.Tick(w.c.b.w.clock()) })
		}
	})
}

// requestLimit is how long ledgers wait for an answer.
const requestLimit = 2 * time.Second

func (w *writer) send(s *ledger.Send, l meta.Ledger, lac entry.EntryID) {
	b := w.c.b
	a := bookiewire.Add{Ledger: l.ID, Entry: s.Entry, Nonce: l.Nonce, LAC: lac, Checksum: s.Checksum, Body: s.Body}
	b.w.ghost.sent(&a)
	id := s.Entry
	s.Slots.Each(func(i int) {
		uuid := s.Ensemble[i].UUID
		answered := func(err error) {
			code := codeOf(err)
			w.post(func(c *ledger.WriterCore) {
				if code == bookiewire.OK {
					c.Ack(id, i, uuid)
				} else {
					c.Fail(id, i, uuid, code)
				}
			})
		}
		b.link(uuid, true).ask(&request{
			serve: func(k *bookieProcess, reply func(func())) {
				k.add(a, func(err error) { reply(func() { answered(err) }) })
			},
			fail: func(err *bookiewire.Error) { answered(err) },
		})
	})
}

// changeEnsemble runs T2 until its outcome is definite.
func (w *writer) changeEnsemble(t *task, change ledger.Change) {
	b := w.c.b
	ctx := t.context(0, w.over)
	result, l, err := ledger.ResolveChange(ctx, b.meta.Owned(w.c.guard), change, func(d time.Duration) bool {
		t.sleep(d)
		return ctx.Err() == nil
	})
	w.post(func(c *ledger.WriterCore) {
		b.w.trace(b.name, ledgerSubject(change.Ledger.ID), "ensemble change of %d: result %d, %v", change.Ledger.ID, result, err != nil)
		w.isFrozen = false
		c.ChangeDone(result, l, err)
	})
}

// closeWith closes the ledger with txn, as ledger.Writer.CloseWith does.
func (w *writer) closeWith(t *task, txn func(last entry.EntryID, length int64) (meta.Ledger, error)) (meta.Ledger, error) {
	b := w.c.b
	var p ledger.CloseProposal
	var broken error
	t.await(func(wake func()) {
		once := false
		w.closing = func(q ledger.CloseProposal, err error) {
			if !once {
				once = true
				p, broken = q, err
				b.after(0, wake)
			}
		}
		if w.over() {
			w.closing(p, ledger.ErrShutdown)
			return
		}
		w.post(func(c *ledger.WriterCore) { c.RequestClose(b.w.clock().Add(b.w.drainTimeout)) })
	})
	if broken != nil {
		return meta.Ledger{}, broken
	}
	seen := w.core.Ledger()
	l, err := txn(p.Last, p.Length)
	result := ledger.CloseResult(err)
	var state *meta.LedgerStateError
	if errors.As(err, &state) && state.Current.State >= meta.LedgerClosed && state.Current.Term == seen.Term &&
		state.Current.Nonce == seen.Nonce && state.Current.Last == p.Last {
		l, err, result = state.Current, nil, ledger.Applied
	}
	t.await(func(wake func()) {
		w.post(func(c *ledger.WriterCore) {
			w.isFrozen = false
			w.closing = nil
			c.CloseDone(result, l, err)
			b.after(0, wake) // once the consequences are carried out
		})
	})
	if err == nil {
		err = w.core.Err()
	}
	return l, err
}
