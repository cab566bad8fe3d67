package bookieclient

import (
	"bytes"
	"slices"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// answerFunc takes a bookie's answer: a reply, or an error.
type answerFunc func(reply any, err *bookiewire.Error)

// fakeBookie is one bookie's state and rules, without goroutines, locks or time: what is taken in waits in
// unsynced until sync, which makes it durable and answers in order.
type fakeBookie struct {
	up       bool
	mode     Mode
	holdSync bool
	ledgers  map[entry.LedgerID]*fakeLedger
	// generation grows with each fence and deletion of a ledger, known or not: an admission that began before
	// is void.
	generation map[entry.LedgerID]uint64
	unsynced   []func()
	waiting    []lacWait
}

type fakeLedger struct {
	term, durableTerm entry.Term
	lac, durableLAC   entry.EntryID
	nonce             uint64
	limbo             bool
	// durable: the ledger survives a crash.
	durable bool
	entries map[entry.EntryID]*fakeEntry
}

type fakeEntry struct {
	body     []byte
	checksum uint32
	durable  bool
	corrupt  bool
}

type lacWait struct {
	c    *call
	then answerFunc
}

func newFakeBookie() *fakeBookie {
	return &fakeBookie{
		up:         true,
		ledgers:    make(map[entry.LedgerID]*fakeLedger),
		generation: make(map[entry.LedgerID]uint64),
	}
}

func newFakeLedger() *fakeLedger {
	return &fakeLedger{lac: entry.NoEntry, durableLAC: entry.NoEntry, entries: make(map[entry.EntryID]*fakeEntry)}
}

func (n *fakeBookie) knows(l entry.LedgerID) bool { return n.ledgers[l] != nil }

func (n *fakeBookie) lacOf(l entry.LedgerID) entry.EntryID {
	if led := n.ledgers[l]; led != nil {
		return led.durableLAC
	}
	return entry.NoEntry
}

func refuse(code bookiewire.Code, detail string) *bookiewire.Error {
	return &bookiewire.Error{Code: code, Detail: detail}
}

func fencedBy(t entry.Term) *bookiewire.Error {
	return &bookiewire.Error{Code: bookiewire.Fenced, Term: t}
}

// add takes an entry in. gen is the ledger's generation when the admission of an unknown ledger began.
func (n *fakeBookie) add(a *bookiewire.Add, gen uint64, then answerFunc) {
	if entry.Checksum(a.Ledger, a.Entry, a.Body) != a.Checksum {
		then(nil, refuse(bookiewire.BadChecksum, "body does not match"))
		return
	}
	led := n.ledgers[a.Ledger]
	if led == nil && gen != n.generation[a.Ledger] {
		then(nil, refuse(bookiewire.NotAdmitted, "fenced or deleted since admission"))
		return
	}
	if led != nil && (a.Term < led.term || !a.Recovery && led.term > 0) {
		then(nil, fencedBy(led.term))
		return
	}
	switch duplicate := led != nil && led.entries[a.Entry] != nil; {
	case duplicate && !bytes.Equal(led.entries[a.Entry].body, a.Body):
		then(nil, refuse(bookiewire.BadRequest, "entry exists with another body"))
		return
	case duplicate:
	case n.mode == ModeExhausted, !a.Recovery && !a.Urgent && (n.mode == ModeFull || n.mode == ModeReadOnly && led == nil):
		then(nil, refuse(bookiewire.ReadOnly, "disk is filling up"))
		return
	default:
		if led == nil {
			led = newFakeLedger()
			led.nonce = a.Nonce
			n.ledgers[a.Ledger] = led
		}
		led.entries[a.Entry] = &fakeEntry{body: bytes.Clone(a.Body), checksum: a.Checksum}
		led.lac = max(led.lac, a.LAC)
	}
	if a.Recovery {
		n.raise(a.Ledger, led, a.Term)
	}
	stored, lac, term := led.entries[a.Entry], led.lac, led.term
	n.unsynced = append(n.unsynced, func() {
		led.durable = true
		stored.durable = true
		n.learn(a.Ledger, led, lac, term)
		then(nil, nil)
	})
}

// raise lifts a ledger's term and voids the admissions under way.
func (n *fakeBookie) raise(l entry.LedgerID, led *fakeLedger, t entry.Term) {
	if t > led.term {
		led.term = t
		n.generation[l]++
	}
}

// fence raises the term at once, and answers when it and every add taken in before is durable.
func (n *fakeBookie) fence(r bookiewire.Fence, then answerFunc) {
	led := n.ledgers[r.Ledger]
	if led != nil && r.Term < led.term {
		then(nil, fencedBy(led.term))
		return
	}
	if led == nil {
		led = newFakeLedger()
		n.ledgers[r.Ledger] = led
	}
	n.raise(r.Ledger, led, r.Term)
	lac := led.lac
	n.unsynced = append(n.unsynced, func() {
		led.durable = true
		n.learn(r.Ledger, led, lac, r.Term)
		then(bookiewire.FenceReply{LAC: led.durableLAC}, nil)
	})
}

func (n *fakeBookie) read(r bookiewire.Read, then answerFunc) {
	if !r.Recovery {
		then(n.lookup(r))
		return
	}
	// The fence comes first, durably, and the answer after it, also a negative one.
	n.fence(bookiewire.Fence{Ledger: r.Ledger, Term: r.Term}, func(_ any, err *bookiewire.Error) {
		if err != nil {
			then(nil, err)
			return
		}
		then(n.lookup(r))
	})
}

// lookup answers from what is durable.
func (n *fakeBookie) lookup(r bookiewire.Read) (any, *bookiewire.Error) {
	led := n.ledgers[r.Ledger]
	if led == nil || !led.durable {
		return nil, refuse(bookiewire.NoLedger, "")
	}
	reply := bookiewire.ReadReply{LAC: led.durableLAC}
	size := 0
	for id := r.First; uint32(len(reply.Entries)) < max(r.MaxEntries, 1); id += entry.EntryID(max(r.Stride, 1)) {
		e := led.entries[id]
		present := e != nil && e.durable
		if !present || e.corrupt || len(reply.Entries) > 0 && size+len(e.body) > int(r.MaxBytes) {
			if len(reply.Entries) > 0 {
				break
			}
			switch {
			case present:
				return nil, refuse(bookiewire.Unknown, "checksum of the stored entry is wrong")
			case led.limbo:
				return nil, refuse(bookiewire.Unknown, "ledger is in limbo")
			}
			return nil, refuse(bookiewire.NoEntry, "")
		}
		size += len(e.body)
		reply.Entries = append(reply.Entries, bookiewire.ReadEntry{Entry: id, Checksum: e.checksum, Body: bytes.Clone(e.body)})
	}
	return reply, nil
}

func (n *fakeBookie) writeLAC(r bookiewire.WriteLAC, then answerFunc) {
	led := n.ledgers[r.Ledger]
	switch {
	case led == nil:
		then(nil, refuse(bookiewire.NoLedger, ""))
	case led.nonce != 0 && led.nonce != r.Nonce:
		then(nil, refuse(bookiewire.NotAdmitted, "nonce of another writer"))
	default:
		led.lac = max(led.lac, r.LAC)
		lac := led.lac
		n.unsynced = append(n.unsynced, func() {
			n.learn(r.Ledger, led, lac, 0)
			then(nil, nil)
		})
	}
}

func (n *fakeBookie) waitLAC(c *call, then answerFunc) {
	// An unknown ledger is waited for as well: its first entry may be on its way.
	if lac := n.lacOf(c.Ledger); lac > c.wait.After {
		then(bookiewire.WaitLACReply{LAC: lac}, nil)
		return
	}
	n.waiting = append(n.waiting, lacWait{c: c, then: then})
}

// forget drops the wait of c.
func (n *fakeBookie) forget(c *call) {
	n.waiting = slices.DeleteFunc(n.waiting, func(w lacWait) bool { return w.c == c })
}

// learn makes a LAC and a term durable and wakes the waits that are satisfied.
func (n *fakeBookie) learn(l entry.LedgerID, led *fakeLedger, lac entry.EntryID, t entry.Term) {
	led.durableTerm = max(led.durableTerm, t)
	led.durableLAC = max(led.durableLAC, lac)
	n.waiting = slices.DeleteFunc(n.waiting, func(w lacWait) bool {
		if w.c.Ledger != l || led.durableLAC <= w.c.wait.After {
			return false
		}
		w.then(bookiewire.WaitLACReply{LAC: led.durableLAC}, nil)
		return true
	})
}

// sync makes what was taken in durable and answers it, in order.
func (n *fakeBookie) sync() {
	unsynced := n.unsynced
	n.unsynced = nil
	for _, durable := range unsynced {
		durable()
	}
}

// crash forgets what is not durable.
func (n *fakeBookie) crash() {
	n.unsynced = nil
	n.waiting = nil
	n.generation = make(map[entry.LedgerID]uint64)
	for id, led := range n.ledgers {
		if !led.durable {
			delete(n.ledgers, id)
			continue
		}
		led.term, led.lac = led.durableTerm, led.durableLAC
		for e, stored := range led.entries {
			if !stored.durable {
				delete(led.entries, e)
			}
		}
	}
}

func (n *fakeBookie) setLimbo(l entry.LedgerID) {
	led := n.ledgers[l]
	if led == nil {
		led = newFakeLedger()
		n.ledgers[l] = led
	}
	led.limbo, led.durable = true, true
	// Fenced for the writer, open for every recovery: the lowest term there is.
	n.raise(l, led, 1)
	led.durableTerm = max(led.durableTerm, led.term)
}
