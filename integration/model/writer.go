package model

import (
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// now is the time, always.
var now = time.Unix(1_000_000, 0)

// never is a duration that does not pass, atOnce one that has passed already.
const (
	never  = 1000 * time.Hour
	atOnce = -time.Nanosecond
)

// ledgerConfig is that of writers and recoveries: what waits for time either never happens or at once.
func (c *Config) ledgerConfig() ledger.Config {
	k := ledger.Config{
		SuspectAfter: never, DelayedChange: atOnce, RetryAfter: atOnce, StallTimeout: never, IdleLAC: never, DrainTimeout: never,
		HandOverAfter: never, RequestTimeout: never, NegativeWait: atOnce, RecoveryWindow: 1, Seed: c.Seed + 1,
	}
	if c.OnlyNeeded {
		k.DelayedChange = never
	}
	if c.Patient {
		k.NegativeWait = never
	}
	if c.Pipelined {
		k.RecoveryWindow = 64
	}
	return k
}

func (c *Config) candidates(gone uint32) []ledger.Candidate {
	var all []ledger.Candidate
	for b := range c.Bookies {
		if gone>>b&1 == 0 {
			all = append(all, ledger.Candidate{UUID: uuidOf(b), Zone: c.zone(b), FreeBytes: 1 << 30, Writable: true})
		}
	}
	return all
}

func bodyOf(e int) []byte { return []byte{byte('a' + e)} }

// writer is the ledger's writer.
type writer struct {
	cfg  *Config
	core *ledger.WriterCore
	// told is what each append was told: '-' nothing, '+' success, '?' unknown outcome, 'x' not written.
	told [maxEntries]byte
	// verifying: a read of the record was asked for. change and end are proposals without an outcome.
	verifying bool
	change    *ledger.Change
	end       *ledger.CloseProposal
	needs     bool // candidates
}

// writerEvent is one call of the core.
type writerEvent struct {
	name string
	do   func(w *writer)
}

// sent is what an event has a machine send: a set of entries for each bookie, and what broke in it.
type sent struct {
	to     [maxBookies]uint8
	broken string
}

func startWriter(cfg *Config, l meta.Ledger) func(writerEvent) *writer {
	return func(writerEvent) *writer {
		l.LastOp, l.Rev = 1, 1
		w := &writer{cfg: cfg, core: ledger.NewWriterCore(cfg.ledgerConfig(), l, now)}
		for i := range w.told {
			w.told[i] = '-'
		}
		return w
	}
}

func (w *writer) step(e writerEvent) (out sent) {
	defer func() {
		if r := recover(); r != nil {
			out.broken = fmt.Sprintf("assertion: the writer panics: %v", r)
		}
	}()
	lac := w.core.LAC()
	frozen := w.change != nil || w.end != nil
	e.do(w)
	if frozen && (w.change != nil || w.end != nil) && w.core.LAC() != lac {
		out.broken = "12: the LAC grows while a proposal is out"
	}
	w.carryOut(&out)
	return out
}

// carryOut does what a runner does.
func (w *writer) carryOut(out *sent) {
	rd := w.core.Ready()
	for _, s := range rd.Sends {
		s.Slots.Each(func(i int) { out.to[bookieOf(s.Ensemble[i].UUID)] |= 1 << s.Entry })
	}
	w.verifying = w.verifying || rd.Verify
	w.needs = rd.NeedCandidates
	if rd.Change != nil {
		c := *rd.Change
		w.change = &c
	}
	if rd.Close != nil {
		c := *rd.Close
		w.end = &c
	}
	for _, k := range rd.Completions {
		w.complete(k, out)
	}
	w.core.Done()
	if w.over() {
		w.verifying, w.needs, w.change, w.end = false, false, nil, nil
	}
}

func (w *writer) complete(k ledger.Completion, out *sent) {
	what := byte('+')
	var failed *ledger.AppendError
	switch {
	case k.Dropped:
		what = 'x'
		if w.told[k.Entry] != '+' {
			out.broken = "19: an append is dropped that was not told to have succeeded"
		}
		w.told[k.Entry] = what
		return
	case errors.As(k.Err, &failed) && failed.Outcome == ledger.NotWritten:
		what = 'x'
	case k.Err != nil:
		what = '?'
	}
	if w.told[k.Entry] != '-' {
		out.broken = fmt.Sprintf("19: append %d is told a second outcome", k.Entry)
	}
	w.told[k.Entry] = what
}

func (w *writer) over() bool {
	return w.core.Phase() == ledger.Closed || w.core.Phase() == ledger.Withdrawn
}

// passing names fields of the cores that say nothing of what comes.
var passing = map[string]bool{
	"WriterCore.cfg": true, "WriterCore.now": true, "WriterCore.ready": true, "WriterCore.lacSent": true, "WriterCore.lastSend": true,
	"WriterCore.err": true, "Tracker.q": true, "slotState.progress": true,
	"RecoveryCore.cfg": true, "RecoveryCore.now": true, "RecoveryCore.ready": true, "RecoveryCore.stats": true, "RecoveryCore.q": true,
	"RecoveryCore.deadline": true, "RecoveryCore.candidates": true, "RecoveryCore.failed": true,
	"RecoveryCore.biggest": true, "RecoveryCore.unfenced": true,
	"recoveredEntry.body": true, "Ledger.Length": true, "Candidate.Host": true,
}

func (w *writer) print(f *fingerprint) {
	f.Write(w.told[:])
	f.int(int64(w.core.LAC()))
	if w.over() {
		f.int(int64(w.core.Phase()))
		return
	}
	f.deep(reflect.ValueOf(w.core), passing)
	f.deep(reflect.ValueOf([]bool{w.verifying, w.needs, w.end != nil}), nil)
}

// The events of a writer.

func appendAll(levels []ledger.AckLevel) writerEvent {
	return writerEvent{"appends", func(w *writer) {
		for e, level := range levels {
			w.core.Append(bodyOf(e), level, nil)
		}
	}}
}

func (w *writer) slotOf(b int) int {
	f := w.core.Ledger().Fragments
	for i, s := range f[len(f)-1].Slots {
		if bookieOf(s.UUID) == b {
			return i
		}
	}
	return 0 // dropped, for the identity is another one's
}

func ackEvent(e, b int) func() writerEvent {
	return func() writerEvent {
		return writerEvent{"ack", func(w *writer) { w.core.Ack(entry.EntryID(e), w.slotOf(b), uuidOf(b)) }}
	}
}

func failEvent(e, b int, code bookiewire.Code) func() writerEvent {
	return func() writerEvent {
		return writerEvent{"fail", func(w *writer) { w.core.Fail(entry.EntryID(e), w.slotOf(b), uuidOf(b), code) }}
	}
}

func candidatesEvent(gone uint32) func() writerEvent {
	return func() writerEvent {
		return writerEvent{"candidates", func(w *writer) { w.core.Candidates(w.cfg.candidates(gone)) }}
	}
}

func verifiedEvent(l meta.Ledger) func() writerEvent {
	return func() writerEvent {
		return writerEvent{"verified", func(w *writer) {
			w.verifying = false
			w.core.Verified(l, nil)
		}}
	}
}

func requestClose() writerEvent {
	return writerEvent{"close", func(w *writer) { w.core.RequestClose(now) }}
}

func withdrawEvent() writerEvent {
	return writerEvent{"withdraw", func(w *writer) { w.core.Withdraw(ledger.ErrShutdown) }}
}

// outcomeEvent is the answer to the proposal that is out.
func outcomeEvent(o outcome) func() writerEvent {
	return func() writerEvent {
		return writerEvent{"outcome", func(w *writer) {
			o := o
			if o.result == ledger.Applied {
				o.l.LastOp, o.l.Rev = 1, 1
			}
			if w.change != nil {
				w.change = nil
				w.core.ChangeDone(o.result, o.l, o.err)
				return
			}
			w.end = nil
			w.core.CloseDone(o.result, o.l, o.err)
		}}
	}
}
