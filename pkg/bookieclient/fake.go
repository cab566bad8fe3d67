package bookieclient

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Op is the kind of a request, as rules of a [Fake] see it.
type Op uint8

// The requests.
const (
	OpAdd Op = iota
	OpRead
	OpFence
	OpWriteLAC
	OpWaitLAC
)

// Stage is where on its way a request can be held or failed.
type Stage uint8

// The stages of a request's life, in order.
const (
	// AtRequest: it has not reached the bookie.
	AtRequest Stage = iota
	// AtAdmission: an Add for a ledger that the bookie does not know has passed the metadata read, and is
	// not stored yet.
	AtAdmission
	// AtReply: it has been carried out (and, if that succeeded, is durable), the answer is on its way.
	AtReply
)

// Call describes a request at a [Stage].
type Call struct {
	// From is the client that sent it, see [Fake.From]; "" for the Fake itself.
	From  string
	To    entry.StorageUUID
	Op    Op
	Stage Stage

	Ledger entry.LedgerID
	// Entry is the entry of an Add, the first of a Read, otherwise NoEntry.
	Entry entry.EntryID
	Term  entry.Term
	// Recovery is the flag of an Add or a Read.
	Recovery bool
	// LAC is what an Add or a WriteLAC carries.
	LAC entry.EntryID
	// Err is the answer on its way, at AtReply: nil or a *bookiewire.Error.
	Err error
}

// Fate is what becomes of a request at a stage. The zero Fate lets it go on.
type Fate struct {
	// Hold keeps it until it is released, failed or its bookie crashes.
	Hold bool
	// Err answers it with this error, at once. At AtReply what was done stays done.
	Err *bookiewire.Error
}

// The usual fates beside Answer.
var (
	Deliver = Fate{}
	Hold    = Fate{Hold: true}
	// Lose breaks the connection under the request: the caller hears Disconnected.
	Lose = Fate{Err: &bookiewire.Error{Code: bookiewire.Disconnected, Detail: "lost by the script"}}
)

// Answer is the fate of a request that is answered with a code and not carried out (or, at AtReply, was).
func Answer(code bookiewire.Code) Fate {
	return Fate{Err: &bookiewire.Error{Code: code, Detail: "answered by the script"}}
}

// Rule decides a request's fate. It is called once per request and stage, without locks, and must not block.
type Rule func(Call) Fate

// Admission stands for a bookie's metadata read, made when an Add concerns a ledger that it does not know.
// nil admits. It is called without locks and must not block.
type Admission func(to entry.StorageUUID, a *bookiewire.Add) error

// FakeOption configures a [Fake].
type FakeOption func(*Fake)

// Manual makes a Fake that does nothing by itself: each [Fake.Step] carries out one event. With it and one
// goroutine a test is a pure function of its script. The blocking calls WriteLAC and WaitLAC need another
// goroutine that steps.
func Manual() FakeOption { return func(f *Fake) { f.manual = true } }

// WithAdmission sets the metadata read. Without it every Add is admitted.
func WithAdmission(a Admission) FakeOption { return func(f *Fake) { f.admission = a } }

// Fake is a set of bookies in memory, behind the methods of [Client]. Terms, fences, admission and the
// three classes of answers are those of a real bookie; only disks and sockets are missing. Everything it does
// happens in one sequence of events (first in, first out), either on one goroutine of its own, or under
// [Fake.Step]. Tests script it by rules, by holding syncs, and by crashing bookies.
//
// A mock per test was rejected: each would have its own, slightly wrong, idea of a fence.
type Fake struct {
	manual    bool
	admission Admission

	mu     sync.Mutex
	nodes  map[entry.StorageUUID]*fakeBookie
	rules  []*Rule
	queue  []func()
	held   []*HeldCall
	calls  []*call // not yet answered, in order of arrival
	log    []Call
	busy   bool
	closed bool
	// changed is closed and replaced after each event: what AwaitHeld and Idle wait on.
	changed chan struct{}

	wake chan struct{}
	done chan struct{}
	late *sched.Group // answers to requests made after Close, and while it waits
}

// NewFake returns a Fake with a running, empty, writable bookie for each identity.
func NewFake(bookies []entry.StorageUUID, options ...FakeOption) *Fake {
	f := &Fake{
		nodes:   make(map[entry.StorageUUID]*fakeBookie),
		changed: make(chan struct{}),
		wake:    make(chan struct{}, 1),
		done:    make(chan struct{}),
		late:    sched.NewGroup(sched.Real),
	}
	for _, option := range options {
		option(f)
	}
	for _, b := range bookies {
		f.AddBookie(b)
	}
	if f.manual {
		close(f.done)
	} else {
		go f.run()
	}
	return f
}

// FakeUUID is the storage identity that tests give bookie n.
func FakeUUID(n int) entry.StorageUUID {
	return entry.StorageUUID{0: 0xb0, 14: byte(n >> 8), 15: byte(n)}
}

// FakeUUIDs are the identities of bookies 0 … n-1.
func FakeUUIDs(n int) []entry.StorageUUID {
	ids := make([]entry.StorageUUID, n)
	for i := range ids {
		ids[i] = FakeUUID(i)
	}
	return ids
}

// call is one request under way. It is answered exactly once.
type call struct {
	Call
	add     *bookiewire.Add
	read    bookiewire.Read
	fence   bookiewire.Fence
	lac     bookiewire.WriteLAC
	wait    bookiewire.WaitLAC
	gen     uint64
	finish  func(reply any, err error)
	stop    func() bool
	claimed bool // its answer is in the queue
}

// Add stores an entry. See the package's promises.
func (f *Fake) Add(to entry.StorageUUID, a *bookiewire.Add, done func(error)) {
	f.From("").Add(to, a, done)
}

// Read reads entries. When ctx ends first, done hears Disconnected.
func (f *Fake) Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error)) {
	f.From("").Read(ctx, to, r, done)
}

// Fence raises a ledger's term. When ctx ends first, done hears Disconnected.
func (f *Fake) Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
	f.From("").Fence(ctx, to, r, done)
}

// WriteLAC makes a LAC known.
func (f *Fake) WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error {
	return f.From("").WriteLAC(ctx, to, r)
}

// WaitLAC waits for a LAC above r.After, or r.Timeout.
func (f *Fake) WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	return f.From("").WaitLAC(ctx, to, r)
}

// From returns a client of the same bookies whose requests carry a name, so that rules can tell one broker's
// from another's.
func (f *Fake) From(name string) *FakeClient { return &FakeClient{f: f, name: name} }

// FakeClient is one client of a [Fake].
type FakeClient struct {
	f    *Fake
	name string
}

// Add stores an entry.
func (c *FakeClient) Add(to entry.StorageUUID, a *bookiewire.Add, done func(error)) {
	c.f.submit(context.Background(), &call{
		Call: Call{From: c.name, To: to, Op: OpAdd, Ledger: a.Ledger, Entry: a.Entry, Term: a.Term, Recovery: a.Recovery, LAC: a.LAC},
		add:  a,
		finish: func(_ any, err error) {
			done(err)
		},
	})
}

// Read reads entries.
func (c *FakeClient) Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error)) {
	c.f.submit(ctx, &call{
		Call: Call{From: c.name, To: to, Op: OpRead, Ledger: r.Ledger, Entry: r.First, Term: r.Term, Recovery: r.Recovery, LAC: entry.NoEntry},
		read: r,
		finish: func(reply any, err error) {
			rr, _ := reply.(bookiewire.ReadReply)
			done(rr, err)
		},
	})
}

// Fence raises a ledger's term.
func (c *FakeClient) Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
	c.f.submit(ctx, &call{
		Call:  Call{From: c.name, To: to, Op: OpFence, Ledger: r.Ledger, Entry: entry.NoEntry, Term: r.Term, LAC: entry.NoEntry},
		fence: r,
		finish: func(reply any, err error) {
			fr, _ := reply.(bookiewire.FenceReply)
			done(fr, err)
		},
	})
}

// WriteLAC makes a LAC known.
func (c *FakeClient) WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error {
	answer := make(chan error, 1)
	c.f.submit(ctx, &call{
		Call:   Call{From: c.name, To: to, Op: OpWriteLAC, Ledger: r.Ledger, Entry: entry.NoEntry, LAC: r.LAC},
		lac:    r,
		finish: func(_ any, err error) { answer <- err },
	})
	return <-answer
}

// WaitLAC waits for a LAC.
func (c *FakeClient) WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	type result struct {
		reply bookiewire.WaitLACReply
		err   error
	}
	answer := make(chan result, 1)
	k := &call{
		Call: Call{From: c.name, To: to, Op: OpWaitLAC, Ledger: r.Ledger, Entry: entry.NoEntry, LAC: entry.NoEntry},
		wait: r,
		finish: func(reply any, err error) {
			wr, _ := reply.(bookiewire.WaitLACReply)
			answer <- result{wr, err}
		},
	}
	c.f.submit(ctx, k)
	timer := time.NewTimer(r.Timeout)
	defer timer.Stop()
	select {
	case a := <-answer:
		return a.reply, a.err
	case <-timer.C:
	}
	c.f.mu.Lock()
	c.f.push(func() { c.f.expireWait(k) })
	c.f.mu.Unlock()
	a := <-answer
	return a.reply, a.err
}

// submit takes a request in. f answers it exactly once, from an event.
func (f *Fake) submit(ctx context.Context, c *call) {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		// The runner may be gone, so the answer gets a goroutine: done is never called inline.
		f.late.Go(func() { c.finish(nil, disconnected("client is closed")) })
		return
	}
	f.calls = append(f.calls, c)
	f.push(func() { f.arrive(c) })
	f.mu.Unlock()
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.answer(c, nil, disconnected(context.Cause(ctx).Error()))
		})
		f.mu.Lock()
		c.stop = stop
		f.mu.Unlock()
	}
}

func disconnected(detail string) *bookiewire.Error {
	return &bookiewire.Error{Code: bookiewire.Disconnected, Detail: detail}
}

// arrive is the first event of a request.
func (f *Fake) arrive(c *call) {
	if f.passes(c, AtRequest, nil, func() { f.execute(c) }) {
		f.execute(c)
	}
}

// passes asks the rules about c at a stage, and reports whether it goes on now. A held one goes on with resume
// when it is released.
func (f *Fake) passes(c *call, stage Stage, answer *bookiewire.Error, resume func()) bool {
	f.mu.Lock()
	if c.claimed {
		f.mu.Unlock()
		return false
	}
	c.Stage = stage
	c.Err = nil
	if answer != nil {
		c.Err = answer
	}
	f.log = append(f.log, c.Call)
	rules := slices.Clone(f.rules)
	seen := c.Call
	f.mu.Unlock()
	for i := len(rules) - 1; i >= 0; i-- {
		fate := (*rules[i])(seen)
		switch {
		case fate.Hold:
			f.mu.Lock()
			if !c.claimed {
				f.held = append(f.held, &HeldCall{Call: seen, f: f, c: c, resume: resume})
			}
			f.mu.Unlock()
			return false
		case fate.Err != nil:
			f.mu.Lock()
			f.answer(c, nil, fate.Err)
			f.mu.Unlock()
			return false
		}
	}
	return true
}

// execute hands the request to its bookie.
func (f *Fake) execute(c *call) {
	f.mu.Lock()
	node := f.nodes[c.To]
	if c.claimed {
		f.mu.Unlock()
		return
	}
	if node == nil || !node.up {
		f.answer(c, nil, disconnected("connection refused"))
		f.mu.Unlock()
		return
	}
	if c.Op == OpAdd && !node.knows(c.Ledger) {
		c.gen = node.generation[c.Ledger]
		admission := f.admission
		f.mu.Unlock()
		f.admit(c, admission)
		return
	}
	f.mu.Unlock()
	f.apply(c)
}

// admit makes the metadata read of an Add for an unknown ledger, outside the lock: a fence may overtake it.
func (f *Fake) admit(c *call, admission Admission) {
	if admission != nil {
		if err := admission(c.To, c.add); err != nil {
			f.reply(c, nil, &bookiewire.Error{Code: bookiewire.NotAdmitted, Detail: err.Error()})
			return
		}
	}
	if f.passes(c, AtAdmission, nil, func() { f.apply(c) }) {
		f.apply(c)
	}
}

// apply changes the bookie's state. What must be durable first is answered by the sync.
func (f *Fake) apply(c *call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	node := f.nodes[c.To]
	if c.claimed {
		return
	}
	if node == nil || !node.up {
		f.answer(c, nil, disconnected("connection reset"))
		return
	}
	then := func(reply any, err *bookiewire.Error) { f.push(func() { f.reply(c, reply, err) }) }
	switch c.Op {
	case OpAdd:
		node.add(c.add, c.gen, then)
	case OpRead:
		node.read(c.read, then)
	case OpFence:
		node.fence(c.fence, then)
	case OpWriteLAC:
		node.writeLAC(c.lac, then)
	case OpWaitLAC:
		node.waitLAC(c, then)
	}
	if !node.holdSync {
		node.sync()
	}
}

// reply is the event of an answer leaving the bookie.
func (f *Fake) reply(c *call, reply any, err *bookiewire.Error) {
	finish := func() {
		f.mu.Lock()
		f.answer(c, reply, err)
		f.mu.Unlock()
	}
	if f.passes(c, AtReply, err, finish) {
		finish()
	}
}

// answer claims c and queues its callback. f.mu is held.
func (f *Fake) answer(c *call, reply any, err *bookiewire.Error) {
	if c.claimed {
		return
	}
	c.claimed = true
	f.calls = slices.DeleteFunc(f.calls, func(o *call) bool { return o == c })
	f.held = slices.DeleteFunc(f.held, func(h *HeldCall) bool { return h.c == c })
	f.push(func() {
		f.mu.Lock()
		stop := c.stop
		f.mu.Unlock()
		if stop != nil {
			stop()
		}
		if err != nil {
			c.finish(nil, err)
			return
		}
		c.finish(reply, nil)
	})
}

func (f *Fake) expireWait(c *call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	node := f.nodes[c.To]
	if c.claimed || node == nil {
		return
	}
	// A request that the script holds has no answer yet; its timeout passes all the same.
	f.answer(c, bookiewire.WaitLACReply{LAC: node.lacOf(c.Ledger)}, nil)
	node.forget(c)
}

// push appends an event. f.mu is held.
func (f *Fake) push(event func()) {
	f.queue = append(f.queue, event)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// run carries events out until the Fake is closed and nothing is left.
func (f *Fake) run() {
	defer close(f.done)
	for {
		if f.Step() {
			continue
		}
		f.mu.Lock()
		over := f.closed && len(f.queue) == 0
		f.mu.Unlock()
		if over {
			return
		}
		<-f.wake
	}
}

// Step carries out one event, which may call one done, and reports whether there was one. Only the script of
// a [Manual] Fake calls it.
func (f *Fake) Step() bool {
	f.mu.Lock()
	if len(f.queue) == 0 {
		f.mu.Unlock()
		return false
	}
	event := f.queue[0]
	f.queue[0] = nil
	f.queue = f.queue[1:]
	f.busy = true
	f.mu.Unlock()
	event()
	f.mu.Lock()
	f.busy = false
	close(f.changed)
	f.changed = make(chan struct{})
	f.mu.Unlock()
	return true
}

// Close answers everything pending with Disconnected and waits until all is called. A Manual one carries out
// what is queued.
func (f *Fake) Close() {
	f.mu.Lock()
	f.closed = true
	for _, c := range slices.Clone(f.calls) {
		f.answer(c, nil, disconnected("client is closed"))
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
	f.mu.Unlock()
	if f.manual {
		for f.Step() {
		}
	}
	<-f.done
	f.late.Wait()
}
