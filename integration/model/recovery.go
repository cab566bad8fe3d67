package model

import (
	"fmt"
	"reflect"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// recovery is one attempt to recover the ledger, from its T4 to its T5.
type recovery struct {
	cfg  *Config
	core *ledger.RecoveryCore
	m    meta.Ledger
	// fences are the slots whose answer is awaited, reads those of entries not found yet, adds the write-backs without an
	// answer: entry, slot, bookie.
	fences [maxBookies]bool
	reads  map[[3]int]bool
	adds   map[[3]int]bool
	needs  bool
	end    *ledger.RecoveryEnd
	over   bool
}

type recoveryEvent struct {
	m  *meta.Ledger // starts it
	do func(r *recovery)
}

func startRecoveryMachine(cfg *Config) func(recoveryEvent) *recovery {
	return func(e recoveryEvent) *recovery {
		r := &recovery{cfg: cfg, m: *e.m, reads: map[[3]int]bool{}, adds: map[[3]int]bool{}}
		r.core = ledger.NewRecoveryCore(cfg.ledgerConfig(), r.m, now)
		r.carryOut(&sent{})
		return r
	}
}

func (r *recovery) step(e recoveryEvent) (out sent) {
	defer func() {
		if p := recover(); p != nil {
			out.broken = fmt.Sprintf("assertion: a recovery panics: %v", p)
		}
	}()
	e.do(r)
	r.carryOut(&out)
	return out
}

func (r *recovery) carryOut(out *sent) {
	rd := r.core.Ready()
	rd.Fence.Each(func(i int) { r.fences[i] = true })
	for _, q := range rd.Reads {
		q.Slots.Each(func(i int) { r.reads[[3]int{int(q.Entry), i, 0}] = true })
	}
	for _, s := range rd.Writes {
		s.Slots.Each(func(i int) {
			b := bookieOf(s.Ensemble[i].UUID)
			r.adds[[3]int{int(s.Entry), i, b}] = true
			out.to[b] |= 1 << s.Entry
		})
	}
	if len(rd.Reads) > 0 { // the round is over; what is late of it says nothing more
		r.fences = [maxBookies]bool{}
	}
	for a := range r.adds {
		if a[0] < r.writtenBack() {
			delete(r.adds, a) // enough others have it
		}
	}
	r.needs = rd.NeedCandidates
	if rd.Abort != nil {
		r.over = true
	}
	if rd.Finish != nil {
		e := *rd.Finish
		r.end = &e
	}
	r.core.Done()
	if r.over || r.end != nil {
		r.fences, r.reads, r.adds, r.needs = [maxBookies]bool{}, nil, nil, false
	}
}

// writtenBack is the first entry that is not on enough bookies yet.
func (r *recovery) writtenBack() int {
	return int(reflect.ValueOf(r.core).Elem().FieldByName("wcur").Int())
}

// spent reports whether a field says nothing of what comes, since the core is past it: answers to the fence once they cover the
// ensemble, denials of an entry once it was found.
func spent(v reflect.Value, name string) bool {
	switch name {
	case "RecoveryCore.fenced", "RecoveryCore.maxLAC":
		return v.FieldByName("phase").Uint() != 0
	case "recoveredEntry.negative", "recoveredEntry.unknown", "recoveredEntry.covered":
		return v.FieldByName("found").Bool()
	}
	return false
}

func (r *recovery) print(f *fingerprint) {
	switch {
	case r.over:
		f.int(0)
		return
	case r.end != nil:
		f.int(1)
		f.deep(reflect.ValueOf(r.m), passing)
		f.int(int64(r.end.Last))
		f.deep(reflect.ValueOf(r.end.Tail), nil)
		return
	}
	f.int(2)
	f.deep(reflect.ValueOf(r.core), passing)
	f.deep(reflect.ValueOf(r.fences), nil)
	f.set(r.reads)
	f.set(r.adds)
	f.deep(reflect.ValueOf(r.needs), nil)
}

// The events of a recovery.

func recoveryStart(m meta.Ledger) recoveryEvent { return recoveryEvent{m: &m} }

func fenceEvent(slot int, lac int, code bookiewire.Code) func() recoveryEvent {
	return func() recoveryEvent {
		return recoveryEvent{do: func(r *recovery) {
			r.fences[slot] = false
			r.core.FenceDone(slot, entry.EntryID(lac), code)
		}}
	}
}

func readEvent(e, slot int, code bookiewire.Code) func() recoveryEvent {
	return func() recoveryEvent {
		return recoveryEvent{do: func(r *recovery) {
			delete(r.reads, [3]int{e, slot, 0})
			var body []byte
			if code == bookiewire.OK {
				body = bodyOf(e)
				for i := range maxBookies { // found is found
					delete(r.reads, [3]int{e, i, 0})
				}
			}
			r.core.ReadDone(entry.EntryID(e), slot, code, entry.Checksum(theLedger, entry.EntryID(e), body), body)
		}}
	}
}

// nothingEvent has every slot deny an entry that never was, but for those in unknown.
func nothingEvent(e int, unknown uint64) func() recoveryEvent {
	return func() recoveryEvent {
		return recoveryEvent{do: func(r *recovery) {
			for slot := range r.core.Fragment().Slots {
				if q := [3]int{e, slot, 0}; r.reads[q] {
					delete(r.reads, q)
					code := bookiewire.NoEntry
					if unknown>>slot&1 != 0 {
						code = bookiewire.Unknown
					}
					r.core.ReadDone(entry.EntryID(e), slot, code, 0, nil)
				}
			}
		}}
	}
}

func writeBackEvent(e, slot, b int, code bookiewire.Code) func() recoveryEvent {
	return func() recoveryEvent {
		return recoveryEvent{do: func(r *recovery) {
			delete(r.adds, [3]int{e, slot, b})
			r.core.AddDone(entry.EntryID(e), slot, uuidOf(b), code)
		}}
	}
}

func recoveryCandidates(gone uint32) func() recoveryEvent {
	return func() recoveryEvent {
		return recoveryEvent{do: func(r *recovery) { r.core.Candidates(r.cfg.candidates(gone)) }}
	}
}

// recoveryOver is the end of an attempt, by its T5 or otherwise.
func recoveryOver() recoveryEvent {
	return recoveryEvent{do: func(r *recovery) { r.over = true }}
}
