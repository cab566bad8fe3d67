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
	"github.com/penstock-mq/penstock/pkg/quorum"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// flight is one entry on its way to some bookies. Flights are pooled; the callbacks are bound once per flight, so that
// an entry in steady state allocates nothing here.
type flight struct {
	w     *Writer
	add   bookiewire.Add
	refs  atomic.Int32
	calls []flightCall
}

type flightCall struct {
	f    *flight
	slot int32
	uuid entry.StorageUUID
	done func(error)
}

var flights sync.Pool

func newFlight(slots int) *flight {
	if f, ok := flights.Get().(*flight); ok && len(f.calls) >= slots {
		return f
	}
	f := &flight{calls: make([]flightCall, max(3, slots))}
	for i := range f.calls {
		f.calls[i].f = f
		f.calls[i].done = f.calls[i].answered
	}
	return f
}

func (w *Writer) send(s *Send, lac entry.EntryID, nonce uint64) {
	n := s.Slots.Len()
	f := newFlight(n)
	f.w = w
	f.add = bookiewire.Add{
		Ledger: w.core.ledger.ID, Entry: s.Entry, Urgent: w.env.Config.Urgent, Nonce: nonce, LAC: lac, Checksum: s.Checksum, Body: s.Body,
	}
	f.refs.Store(int32(n))
	i := 0
	for set := s.Slots; set != 0; set &= set - 1 {
		slot := set.First()
		call := &f.calls[i]
		call.slot, call.uuid = int32(slot), s.Ensemble[slot].UUID
		w.env.Bookies.Add(call.uuid, &f.add, call.done)
		i++
	}
}

func (k *flightCall) answered(err error) {
	f, ev := k.f, event{kind: evAnswer, slot: k.slot, uuid: k.uuid, entry: k.f.add.Entry}
	ev.code = codeOf(err)
	w := f.w
	if f.refs.Add(-1) == 0 {
		f.w, f.add = nil, bookiewire.Add{}
		flights.Put(f)
	}
	w.post(ev)
}

// codeOf returns the class of an answer; an error that is not a bookie's means that no answer came.
func codeOf(err error) bookiewire.Code {
	if err == nil {
		return bookiewire.OK
	}
	var e *bookiewire.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return bookiewire.Disconnected
}

func (w *Writer) writeLAC(to quorum.Set, lac entry.EntryID, ensemble []meta.Slot) {
	l := w.core.ledger
	to.Each(func(i int) {
		uuid := ensemble[i].UUID
		w.inBackground(func() {
			ctx, cancel := w.env.Sched.WithTimeout(w.ctx, w.env.Config.RequestTimeout)
			defer cancel()
			// A LAC that does not arrive only makes readers elsewhere see entries later.
			_ = w.env.Bookies.WriteLAC(ctx, uuid, bookiewire.WriteLAC{Ledger: l.ID, Nonce: l.Nonce, LAC: lac})
		})
	})
}

func (w *Writer) verify() {
	ctx, cancel := w.env.Sched.WithTimeout(w.ctx, w.env.Config.RequestTimeout)
	defer cancel()
	l, err := w.env.Metadata.GetLedger(ctx, w.record.Load().ID)
	w.post(event{kind: evCall, call: func(c *WriterCore) { c.Verified(l, err) }})
}

// changeEnsemble runs T2 until its outcome is definite, or the writer shut down.
func (w *Writer) changeEnsemble(change Change) {
	result, l, err := ResolveChange(w.ctx, w.env.Metadata, change, func(d time.Duration) bool {
		return sched.Sleep(w.ctx, w.env.Sched, d) == nil
	})
	if result == Applied && w.env.Metrics != nil {
		w.env.Metrics.ensembleChanges.Inc()
	}
	if w.env.Log != nil {
		w.env.Log.Info("ensemble change", "ledger", change.Ledger.ID, "term", change.Ledger.Term,
			"first", change.Fragments[len(change.Fragments)-1].First, "applied", result == Applied, "error", err)
	}
	w.post(event{kind: evCall, call: func(c *WriterCore) { c.ChangeDone(result, l, err) }})
}

// ResolveChange runs the transaction of a change until its outcome is definite, or ctx ended. pause waits between attempts;
// false when ctx ended first.
func ResolveChange(ctx context.Context, md Metadata, change Change, pause func(time.Duration) bool) (TxnResult, meta.Ledger, error) {
	seen, proposed := change.Ledger, change.Fragments
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		l, err := md.ChangeEnsemble(ctx, seen, proposed)
		var state *meta.LedgerStateError
		switch {
		case err == nil:
			return Applied, l, nil
		case errors.As(err, &state):
			l = state.Current
		case errors.Is(err, meta.ErrNotFound), errors.Is(err, meta.ErrEpoch):
			return Lost, l, err
		case errors.Is(err, meta.ErrRetired), errors.Is(err, meta.ErrInvalid):
			return NotApplied, l, err
		default:
			// Unknown, or a conflict: the record tells, once it can be read.
			if !pause(wait) {
				return NoOutcome, l, err
			}
			var readErr error
			if l, readErr = md.GetLedger(ctx, seen.ID); readErr != nil {
				continue
			}
		}
		switch {
		case l.State != meta.LedgerOpen || l.Nonce != seen.Nonce:
			return Lost, l, err
		case sameFragment(last(l.Fragments), last(proposed)):
			return Applied, l, nil
		case !sameFragment(last(l.Fragments), last(change.Ledger.Fragments)):
			return Lost, l, fmt.Errorf("change ensemble: fragments were changed by another: %w", meta.ErrConflict)
		}
		// Not applied so far. A copy of it may be on its way still: both compare the record's revision, so one of
		// them applies at most.
		seen = l
		proposed = slices.Concat(l.Fragments[:min(len(l.Fragments), len(change.Fragments)-1)], change.Fragments[len(change.Fragments)-1:])
		if !pause(wait) {
			return NoOutcome, l, err
		}
	}
}

func last(f []meta.Fragment) meta.Fragment { return f[len(f)-1] }

func sameFragment(a, b meta.Fragment) bool {
	return a.First == b.First && slices.Equal(a.Slots, b.Slots)
}
