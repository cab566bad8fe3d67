package bookieclient

import (
	"context"
	"slices"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// HeldCall is a request that a rule holds.
type HeldCall struct {
	Call
	f      *Fake
	c      *call
	resume func()
}

// Release lets the request go on. A second time, or after it was answered, it does nothing.
func (h *HeldCall) Release() {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	i := slices.Index(h.f.held, h)
	if i < 0 {
		return
	}
	h.f.held = slices.Delete(h.f.held, i, i+1)
	h.f.push(h.resume)
}

// Fail answers the request with code. At AtReply what was done stays done.
func (h *HeldCall) Fail(code bookiewire.Code) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if slices.Contains(h.f.held, h) {
		h.f.answer(h.c, nil, &bookiewire.Error{Code: code, Detail: "answered by the script"})
	}
}

// Rule adds a rule and returns what removes it. The newest rule whose fate is not Deliver wins.
func (f *Fake) Rule(r Rule) (remove func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := &r
	f.rules = append(f.rules, p)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if i := slices.Index(f.rules, p); i >= 0 {
			f.rules = slices.Delete(slices.Clone(f.rules), i, i+1)
		}
	}
}

// Hold holds every op at a stage to one of the bookies (all of them if none is named). release removes the
// rule and lets what it held go on, in order of arrival.
func (f *Fake) Hold(stage Stage, op Op, to ...entry.StorageUUID) (release func()) {
	match := func(c Call) bool {
		return c.Stage == stage && c.Op == op && (len(to) == 0 || slices.Contains(to, c.To))
	}
	remove := f.Rule(func(c Call) Fate {
		if match(c) {
			return Hold
		}
		return Deliver
	})
	return func() {
		remove()
		for _, h := range f.Held() {
			if match(h.Call) {
				h.Release()
			}
		}
	}
}

// Fail answers the next n requests of kind op that reach a bookie with code, without carrying them out; n < 0
// means all of them until remove is called.
func (f *Fake) Fail(to entry.StorageUUID, op Op, code bookiewire.Code, n int) (remove func()) {
	return f.Rule(func(c Call) Fate {
		if c.Stage != AtRequest || c.Op != op || c.To != to || n == 0 {
			return Deliver
		}
		n-- // rules run on the one goroutine that carries out events
		return Answer(code)
	})
}

// Held lists what rules hold now, in order of arrival at the hold.
func (f *Fake) Held() []*HeldCall {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.held)
}

// AwaitHeld waits until at least n requests are held, and returns all that are.
func (f *Fake) AwaitHeld(ctx context.Context, n int) ([]*HeldCall, error) {
	var held []*HeldCall
	err := f.await(ctx, func() bool {
		held = slices.Clone(f.held)
		return len(held) >= n
	})
	return held, err
}

// Idle waits until no event is left: every request is answered, held, or waits for a sync or a LAC.
func (f *Fake) Idle(ctx context.Context) error {
	return f.await(ctx, func() bool { return len(f.queue) == 0 && !f.busy })
}

// await waits for a condition that is evaluated under the lock after each event.
func (f *Fake) await(ctx context.Context, holds func() bool) error {
	for {
		f.mu.Lock()
		ok, changed := holds(), f.changed
		f.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Calls lists what passed so far: each request once per stage it reached.
func (f *Fake) Calls() []Call {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

// AddBookie adds a running, empty bookie; one of that identity is replaced.
func (f *Fake) AddBookie(b entry.StorageUUID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.disconnect(b, "bookie replaced")
	f.nodes[b] = newFakeBookie()
}

// Crash stops a bookie as kill -9 and a power cut would: requests under way are disconnected, what was not
// synced is gone, durable state stays for [Fake.Restart].
func (f *Fake) Crash(b entry.StorageUUID) {
	f.onNode(b, func(n *fakeBookie) {
		n.up = false
		n.crash()
		f.disconnect(b, "bookie crashed")
	})
}

// Restart starts a crashed bookie with what was durable.
func (f *Fake) Restart(b entry.StorageUUID) { f.onNode(b, func(n *fakeBookie) { n.up = true }) }

// Disconnect breaks the connections to a bookie once: requests under way hear Disconnected, the bookie carries
// on, and what reached it stays done.
func (f *Fake) Disconnect(b entry.StorageUUID) {
	f.onNode(b, func(*fakeBookie) { f.disconnect(b, "connection reset") })
}

// Wipe loses everything of a bookie, durable or not, and keeps its identity: what must never happen.
func (f *Fake) Wipe(b entry.StorageUUID) {
	f.onNode(b, func(n *fakeBookie) {
		up, mode, hold := n.up, n.mode, n.holdSync
		f.disconnect(b, "bookie wiped")
		*n = *newFakeBookie()
		n.up, n.mode, n.holdSync = up, mode, hold
	})
}

// HoldSync stops a bookie's disk from syncing: adds and fences are taken in and not answered, until
// [Fake.Sync], or are lost by [Fake.Crash].
func (f *Fake) HoldSync(b entry.StorageUUID) { f.onNode(b, func(n *fakeBookie) { n.holdSync = true }) }

// Sync makes everything taken in so far durable, answers it, and ends HoldSync.
func (f *Fake) Sync(b entry.StorageUUID) {
	f.onNode(b, func(n *fakeBookie) {
		n.holdSync = false
		n.sync()
	})
}

// Mode is what a bookie takes.
type Mode uint8

// The modes, see bookiewire.ReadOnly.
const (
	ModeWritable Mode = iota
	// ModeReadOnly: no new ledgers but recovery's and urgent ones.
	ModeReadOnly
	// ModeFull: no adds but recovery's and urgent ones.
	ModeFull
	// ModeExhausted: no adds at all, the reserve is used up.
	ModeExhausted
)

// SetMode sets what a bookie takes.
func (f *Fake) SetMode(b entry.StorageUUID, m Mode) {
	f.onNode(b, func(n *fakeBookie) { n.mode = m })
}

// SetLimbo marks a ledger on a bookie as possibly incomplete and fences it: negatives become Unknown.
func (f *Fake) SetLimbo(b entry.StorageUUID, l entry.LedgerID) {
	f.onNode(b, func(n *fakeBookie) { n.setLimbo(l) })
}

// ClearLimbo ends limbo, as after a repair. The ledger stays fenced.
func (f *Fake) ClearLimbo(b entry.StorageUUID, l entry.LedgerID) {
	f.onNode(b, func(n *fakeBookie) {
		if led := n.ledgers[l]; led != nil {
			led.limbo = false
		}
	})
}

// Corrupt damages a stored entry: reading it answers Unknown.
func (f *Fake) Corrupt(b entry.StorageUUID, l entry.LedgerID, e entry.EntryID) {
	f.onNode(b, func(n *fakeBookie) {
		if led := n.ledgers[l]; led != nil && led.entries[e] != nil {
			led.entries[e].corrupt = true
		}
	})
}

// Mend undoes Corrupt.
func (f *Fake) Mend(b entry.StorageUUID, l entry.LedgerID, e entry.EntryID) {
	f.onNode(b, func(n *fakeBookie) {
		if led := n.ledgers[l]; led != nil && led.entries[e] != nil {
			led.entries[e].corrupt = false
		}
	})
}

// Delete removes a ledger as garbage collection does: an Add admitted before is refused.
func (f *Fake) Delete(b entry.StorageUUID, l entry.LedgerID) {
	f.onNode(b, func(n *fakeBookie) {
		delete(n.ledgers, l)
		n.generation[l]++
	})
}

// Entries lists the entries of a ledger that are durable on a bookie, ascending.
func (f *Fake) Entries(b entry.StorageUUID, l entry.LedgerID) []entry.EntryID {
	var ids []entry.EntryID
	f.onNode(b, func(n *fakeBookie) {
		if led := n.ledgers[l]; led != nil {
			for id, e := range led.entries {
				if e.durable {
					ids = append(ids, id)
				}
			}
		}
	})
	slices.Sort(ids)
	return ids
}

// Body is a copy of a durable entry's body on a bookie, nil if it has none.
func (f *Fake) Body(b entry.StorageUUID, l entry.LedgerID, e entry.EntryID) []byte {
	var body []byte
	f.onNode(b, func(n *fakeBookie) {
		if led := n.ledgers[l]; led != nil && led.entries[e] != nil && led.entries[e].durable {
			body = append([]byte{}, led.entries[e].body...)
		}
	})
	return body
}

// Term is the durable term of a ledger on a bookie.
func (f *Fake) Term(b entry.StorageUUID, l entry.LedgerID) entry.Term {
	var t entry.Term
	f.onNode(b, func(n *fakeBookie) {
		if led := n.ledgers[l]; led != nil {
			t = led.durableTerm
		}
	})
	return t
}

// LAC is the highest LAC a bookie has durably seen for a ledger, NoEntry if none.
func (f *Fake) LAC(b entry.StorageUUID, l entry.LedgerID) entry.EntryID {
	lac := entry.NoEntry
	f.onNode(b, func(n *fakeBookie) { lac = n.lacOf(l) })
	return lac
}

// onNode runs fn on a bookie, under the lock. An identity that the Fake does not have is a mistake of the test.
func (f *Fake) onNode(b entry.StorageUUID, fn func(*fakeBookie)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.nodes[b]
	if n == nil {
		panic("bookieclient: the fake has no bookie " + b.String())
	}
	fn(n)
}

// disconnect answers everything under way to b. f.mu is held.
func (f *Fake) disconnect(b entry.StorageUUID, why string) {
	for _, c := range slices.Clone(f.calls) {
		if c.To == b {
			f.answer(c, nil, disconnected(why))
		}
	}
}
