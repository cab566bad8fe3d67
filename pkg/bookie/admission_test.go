package bookie

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

func TestAdmitTable(t *testing.T) {
	t.Parallel()
	other := entry.UUID{9}
	writer, recovery := makeAdd(1, 0, ""), recoveryAdd(1, 0, 3, "")
	stranger := makeAdd(1, 0, "")
	stranger.Nonce++
	with := func(l meta.Ledger, change func(*meta.Ledger)) meta.Ledger {
		change(&l)
		return l
	}
	open := openLedger(1, other, me.Storage)
	inRecovery := with(open, func(l *meta.Ledger) { l.State, l.Term = meta.LedgerInRecovery, 3 })
	moved := with(open, func(l *meta.Ledger) {
		l.Fragments = append(l.Fragments, meta.Fragment{First: 5, Slots: []meta.Slot{{UUID: other}}})
	})
	closed := with(open, func(l *meta.Ledger) { l.State = meta.LedgerClosed })
	elsewhere := with(closed, func(l *meta.Ledger) { l.Fragments = []meta.Fragment{{Slots: []meta.Slot{{UUID: other}}}} })
	beyond := recoveryAdd(1, 1, 3, "")
	intended := with(elsewhere, func(l *meta.Ledger) { l.Pending = []meta.ReplicaIntent{{Target: me.Storage}} })
	for name, c := range map[string]struct {
		l    meta.Ledger
		a    *bookiewire.Add
		want bool
	}{
		"writer of an open ledger here":      {open, writer, true},
		"writer with another nonce":          {open, stranger, false},
		"writer of a ledger elsewhere":       {openLedger(1, other), writer, false},
		"writer after the fragment moved on": {moved, writer, false},
		"writer while in recovery":           {inRecovery, writer, false},
		"writer after close":                 {closed, writer, false},
		"recovery of that term":              {inRecovery, recovery, true},
		"recovery as yet unpublished here":   {with(inRecovery, func(l *meta.Ledger) { l.Fragments = nil }), recovery, true},
		"recovery of an older term":          {with(inRecovery, func(l *meta.Ledger) { l.Term = 4 }), recovery, false},
		"recovery of an open ledger":         {open, recovery, false},
		"recovery after close":               {elsewhere, recovery, false},
		"repair of a copy that is missing":   {closed, recovery, true},
		"repair of what is not in it":        {closed, beyond, false},
		"repair of a settled fragment":       {moved, recovery, true},
		"repair of the open fragment":        {moved, recoveryAdd(1, 5, 3, ""), false},
		"repair of a copy, then deletion":    {with(closed, func(l *meta.Ledger) { l.State = meta.LedgerDeleting }), recovery, false},
		"repair to here":                     {intended, recovery, true},
		"repair to elsewhere":                {with(elsewhere, func(l *meta.Ledger) { l.Pending = []meta.ReplicaIntent{{Target: other}} }), recovery, false},
		"repair of a deleted ledger":         {with(intended, func(l *meta.Ledger) { l.State = meta.LedgerDeleting }), recovery, false},
	} {
		if err := Admit(c.l, me.Storage, c.a); (err == nil) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAdmissionReadsOncePerLedgerAndAfterTheAdd(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	r.want("no such ledger", r.add(makeAdd(5, 0, "x")), bookiewire.NotAdmitted)
	stranger := makeAdd(1, 0, "x")
	stranger.Nonce++
	r.want("other nonce", r.add(stranger), bookiewire.NotAdmitted)
	r.want("recovery of an open ledger", r.add(recoveryAdd(1, 0, 1, "x")), bookiewire.NotAdmitted)
	r.want("writer", r.add(makeAdd(1, 0, "x")), bookiewire.OK)
	reads := valueOf(r.server.metrics.admissionReads)
	for i := range 10 {
		r.want("writer", r.add(makeAdd(1, entry.EntryID(1+i), "x")), bookiewire.OK)
	}
	if valueOf(r.server.metrics.admissionReads) != reads {
		t.Fatal("a known ledger's metadata were read")
	}
	r.records.mu.Lock()
	r.records.err = meta.ErrUnavailable
	r.records.mu.Unlock()
	r.records.set(openLedger(2, me.Storage))
	r.want("etcd away", r.add(makeAdd(2, 0, "x")), bookiewire.Unknown)
	r.want("etcd away, known ledger", r.add(makeAdd(1, 20, "x")), bookiewire.OK)
}

// While one ledger waits for metadata, others go on, on the same connection.
func TestAdmissionHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	r.want("known", r.add(makeAdd(1, 0, "x")), bookiewire.OK)
	r.records.set(openLedger(2, me.Storage))
	gate := make(chan struct{})
	r.records.mu.Lock()
	r.records.before = func() { <-gate }
	r.records.mu.Unlock()
	held := make(chan error, 3)
	for i := range 3 {
		r.client.Add(me.Storage, makeAdd(2, entry.EntryID(i), "x"), func(err error) { held <- err })
	}
	r.want("known meanwhile", r.add(makeAdd(1, 1, "x")), bookiewire.OK)
	close(gate)
	for range 3 {
		if err := <-held; err != nil {
			t.Fatal(err)
		}
	}
}

// B32: the ledger is fenced, deleted and collected while a zombie's add is being admitted by metadata read before.
// The add is refused, and it stays refused when it comes again, restart included.
func TestB32DeletedLedgerIsNotRecreated(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	entered, gate := make(chan struct{}, 8), make(chan struct{})
	deleted := meta.Ledger{ID: 1, State: meta.LedgerDeleting}
	r.records.mu.Lock()
	r.records.before = func() {
		entered <- struct{}{}
		<-gate
	}
	r.records.mu.Unlock()
	zombie := make(chan error, 1)
	r.client.Add(me.Storage, makeAdd(1, 0, "x"), func(err error) { zombie <- err })
	<-entered
	r.want("fence", r.fence(1, 1), bookiewire.OK)
	if err := r.store.DeleteLedger(t.Context(), 1, r.store.Mark(1)); err != nil {
		t.Fatal(err)
	}
	// The read that is under way answers what was true when it began, later ones what is true now.
	r.records.mu.Lock()
	r.records.before = func() { r.records.set(deleted) }
	r.records.mu.Unlock()
	close(gate)
	if err := <-zombie; code(err) != bookiewire.NotAdmitted && code(err) != bookiewire.Fenced {
		t.Fatalf("zombie's add: %v", err)
	}
	if _, known := r.store.Ledger(1); known {
		t.Fatal("the ledger was created again")
	}
	r.records.set(deleted)
	r.want("again", r.add(makeAdd(1, 1, "x")), bookiewire.NotAdmitted)
	r.stop()
	r.start(ServerConfig{})
	r.want("after a restart", r.add(makeAdd(1, 2, "x")), bookiewire.NotAdmitted)
}

// B1, B2 at one bookie: a fence comes, and is answered, while the metadata for a writer's first add are being read, which
// still say that the ledger is open. The add is refused, before and after a restart.
func TestFenceOvertakesAnAdmission(t *testing.T) {
	t.Parallel()
	for name, fence := range map[string]func(r *rig) bookiewire.Code{
		"fence": func(r *rig) bookiewire.Code { return r.fence(1, 1) },
		"recovery read": func(r *rig) bookiewire.Code {
			_, c := r.read(bookiewire.Read{Ledger: 1, First: 0, Stride: 1, MaxEntries: 1, Recovery: true, Term: 1})
			return c
		},
	} {
		r := newRig(t, ServerConfig{})
		entered, gate := make(chan struct{}, 8), make(chan struct{})
		r.records.mu.Lock()
		r.records.before = func() {
			entered <- struct{}{}
			<-gate
		}
		r.records.mu.Unlock()
		writer := make(chan error, 1)
		r.client.Add(me.Storage, makeAdd(1, 0, "x"), func(err error) { writer <- err })
		<-entered
		if c := fence(r); c != bookiewire.OK && c != bookiewire.NoEntry {
			t.Fatalf("%s: %s", name, c)
		}
		close(gate) // OPEN it says, with the nonce and this bookie
		if err := <-writer; code(err) != bookiewire.Fenced {
			t.Errorf("%s: the writer's add: %v", name, err)
		}
		r.stop()
		r.start(ServerConfig{})
		r.want(name+", after a restart", r.add(makeAdd(1, 0, "x")), bookiewire.Fenced)
		_, c := r.read(bookiewire.Read{Ledger: 1, First: 0, Stride: 1, MaxEntries: 1, Recovery: true, Term: 1})
		r.want(name+", what recovery reads", c, bookiewire.NoEntry)
	}
}
