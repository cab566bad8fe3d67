package chain

import (
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Phase says what a chain's end is doing.
type Phase uint8

// The phases of a chain.
const (
	// PhaseIdle: no ledger is open; the next append opens one.
	PhaseIdle Phase = iota
	// PhaseOpening: a ledger is being opened; appends queue.
	PhaseOpening
	// PhaseOpen: appends go to the open ledger.
	PhaseOpen
	// PhaseClosing: the open ledger is frozen and being closed; appends queue.
	PhaseClosing
	// PhaseDraining: the ledger is closed, its last completions are awaited; appends queue.
	PhaseDraining
	// PhaseFailed: a ledger could not be opened; every append is refused until [EventResumed].
	PhaseFailed
	// PhaseLost: the ownership is gone. Final.
	PhaseLost
	// PhaseClosed: closed on request. Final.
	PhaseClosed
)

// String returns the phase's name as scripts and logs print it.
func (p Phase) String() string {
	return [...]string{"idle", "opening", "open", "closing", "draining", "failed", "lost", "closed"}[p]
}

// Outcome is what became of one append.
type Outcome uint8

// The outcomes.
const (
	// Stored: the ack level was met.
	Stored Outcome = iota
	// NotWritten: definitely not readable, now or later, at the place it was tried.
	NotWritten
	// Unknown: it may be stored, or not.
	Unknown
)

// Item is one append on its way. The caller of the core sets Span, Time and Size, hands it over with
// [EventAppended], and may reuse it after the action that says Done.
type Item struct {
	// Span is the number of offsets it takes; at least 1. Time is its broker time, Unix milliseconds. Size is
	// the length of its body.
	Span uint32
	Time int64
	Size int

	// Offset and Entry are where it went; Entry changes if it has to move to the next ledger.
	Offset entry.Offset
	Entry  entry.EntryID

	// Load is the runner's.
	Load Append

	sent      bool // handed to the current writer
	completed bool // that writer called done
	failed    bool // … with NotWritten
	finished  bool // ActionFinish was returned for it
	shown     bool // ActionShow was returned for it
	next      *Item

	by *current                   // the runner's: whose writer has it
	cb func(entry.EntryID, error) // the runner's: onDone, bound once
}

// EventKind says what happened.
type EventKind uint8

// The events.
const (
	// EventAppended: Item comes in at time Now.
	EventAppended EventKind = iota
	// EventOpened: Ledger was opened at time Now.
	EventOpened
	// EventOpenFailed: no ledger was opened, because of Err; that is certain.
	EventOpenFailed
	// EventRollWanted: the writer asks for another ledger.
	EventRollWanted
	// EventPrepared: all that a roll needs is at hand.
	EventPrepared
	// EventLedgerClosed: the open ledger is closed at Entry; Ledger was opened in the same transaction, or is 0.
	EventLedgerClosed
	// EventCloseFailed: the open ledger was not closed, that is certain, and takes appends again.
	EventCloseFailed
	// EventCompleted: the writer called done for Item, with Outcome and Err.
	EventCompleted
	// EventConfirmed: the writer's LAC is Entry.
	EventConfirmed
	// EventWithdrawn: the ownership, or the ledger, is lost, because of Err.
	EventWithdrawn
	// EventRetired: the open ledger is to be closed, and no other opened before something is appended.
	EventRetired
	// EventResumed: the caller has seen every failure and takes up again.
	EventResumed
	// EventCloseAsked: the caller wants the chain closed.
	EventCloseAsked
)

// Event is one thing that happened.
type Event struct {
	Kind    EventKind
	Item    *Item
	Now     time.Time
	Ledger  entry.LedgerID
	Entry   entry.EntryID
	Outcome Outcome
	Err     error
}

// ActionKind says what to do.
type ActionKind uint8

// The actions. They are to be carried out in the order returned.
const (
	// ActionSend: append Item to the open ledger's writer.
	ActionSend ActionKind = iota
	// ActionUse: Ledger's writer is the current one from now on; 0: there is none. Moved entries of the one
	// before are sent again.
	ActionUse
	// ActionOpenNext: open a ledger; report EventOpened, EventOpenFailed or EventWithdrawn.
	ActionOpenNext
	// ActionPrepare: get ready to roll, for as long as it takes; report EventPrepared, or nothing if the chain ended.
	ActionPrepare
	// ActionCloseCurrent: close the open ledger, and open the next in the same transaction if Next; report
	// EventLedgerClosed or EventWithdrawn.
	ActionCloseCurrent
	// ActionShow: Item is confirmed; readers may see it.
	ActionShow
	// ActionFinish: tell Item's owner its outcome.
	ActionFinish
	// ActionForget: Item is done with, and may be reused.
	ActionForget
	// ActionStop: the chain is lost, because of Err; told once.
	ActionStop
	// ActionEnd: the chain is closed as asked; told once.
	ActionEnd
)

// Action is one thing to do.
type Action struct {
	Kind     ActionKind
	Item     *Item
	Position entry.Position
	Ledger   entry.LedgerID
	Moved    int
	Outcome  Outcome
	Next     bool
	// Delay: try again after a pause; with ActionPrepare and ActionCloseCurrent.
	Delay bool
	// Fruitless counts the ledgers in a row before the open one that ended with nothing in them; with ActionPrepare. The
	// more, the longer the pause before the next is opened, see rollPause.
	Fruitless int
	// Held: no writer has given Item's bytes back, or will; with ActionForget.
	Held bool
	Err  error
}

// Limits say when a chain rolls to a new ledger. One of which nothing is confirmed never does.
type Limits struct {
	Bytes   int64
	Entries int64
	Age     time.Duration
}

// Core decides where appends go: the roll and queue logic of a chain, without goroutines, clock or I/O.
//
// It keeps every append from the moment it comes in until it is both confirmed and told to its owner. That is
// what lets a roll be invisible: when a ledger is closed below what was sent to it, the entries above its end
// are definitely not stored there, and the core sends them to the next ledger in their old order, under their
// old offsets, before anything that came later.
//
// Rejected: to let the ledger's writer report NotWritten to the caller, and have the caller try again. Then
// offsets, which are fixed when an append comes in, would have to be given back and re-assigned at each roll, and
// a producer without dedup would be told of failures that are none.
type Core struct {
	limits Limits
	phase  Phase

	ledger    entry.LedgerID
	opened    time.Time
	bytes     int64         // sent to the open ledger
	sent      int64         // entries sent to the open ledger
	done      int64         // entries the open ledger's writer completed
	lac       entry.EntryID // of the open ledger
	last      entry.EntryID // of the closed ledger, while draining
	pending   entry.LedgerID
	preparing bool
	fruitless int  // ledgers in a row that were closed with nothing in them
	closing   bool // the caller asked for the end
	err       error

	next entry.Offset // of the next append
	// end and maxTime are of the entries popped from the open ledger, which are all confirmed.
	end     entry.Offset
	maxTime int64

	head, tail *Item // all that is not forgotten, in order
	unsent     *Item // the first that no open ledger has; everything after it is unsent too
	count      int

	out []Action
}

// NewCore starts a chain whose next append takes offset next.
func NewCore(limits Limits, next entry.Offset) *Core {
	return &Core{limits: limits, next: next, lac: entry.NoEntry, last: entry.NoEntry}
}

// Phase returns what the chain is doing.
func (c *Core) Phase() Phase { return c.phase }

// NextOffset returns the offset that the next append takes.
func (c *Core) NextOffset() entry.Offset { return c.next }

// Err returns why the chain is failed or lost.
func (c *Core) Err() error { return c.err }

// Pending returns the number of appends not forgotten.
func (c *Core) Pending() int { return c.count }

// OpenBytes returns the bytes and entries sent to the open ledger, and when it was opened.
func (c *Core) OpenBytes() (bytes, entries int64, opened time.Time) { return c.bytes, c.sent, c.opened }

// SetLimits changes when the chain rolls, from the next append on.
func (c *Core) SetLimits(l Limits) { c.limits = l }

// EndAt returns the offset after entry last of the open ledger and the newest time up to it. last must be at
// or above every confirmed entry.
func (c *Core) EndAt(last entry.EntryID) (entry.Offset, int64) {
	end, newest := c.end, c.maxTime
	for it := c.head; it != nil && it != c.unsent && it.Entry <= last; it = it.next {
		end = it.Offset + entry.Offset(it.Span)
		newest = max(newest, it.Time)
	}
	return end, newest
}

// Step takes one event in and returns what to do. The slice is the core's, until the next call.
func (c *Core) Step(ev Event) []Action {
	c.out = c.out[:0]
	if c.count == 0 && cap(c.out) > 4 {
		c.out = nil // an idle chain is small
	}
	switch ev.Kind {
	case EventAppended:
		c.append(ev)
	case EventOpened:
		c.must(PhaseOpening)
		c.start(ev.Ledger, ev.Now, 0)
	case EventOpenFailed:
		c.must(PhaseOpening)
		c.refuse(ev.Err)
	case EventRollWanted:
		c.roll()
	case EventPrepared:
		c.prepared()
	case EventLedgerClosed:
		c.ledgerClosed(ev)
	case EventCloseFailed:
		c.closeFailed()
	case EventCompleted:
		c.completed(ev)
	case EventConfirmed:
		c.confirmed(ev.Entry)
	case EventWithdrawn:
		c.withdraw(ev.Err)
	case EventRetired:
		if c.phase == PhaseOpen && !c.closing && c.lac != entry.NoEntry {
			c.preparing = false
			c.closeNow()
		}
	case EventResumed:
		if c.phase == PhaseFailed && c.count == 0 {
			c.phase, c.err = PhaseIdle, nil
		}
	case EventCloseAsked:
		c.closeAsked()
	}
	return c.out
}

func (c *Core) must(p Phase) {
	if c.phase != p {
		panic(fmt.Sprintf("chain: event of phase %v in phase %v", p, c.phase))
	}
}

func (c *Core) emit(a Action) { c.out = append(c.out, a) }

func (c *Core) append(ev Event) {
	it := ev.Item
	it.Offset, it.Entry = c.next, entry.NoEntry
	it.sent, it.completed, it.failed, it.finished, it.shown, it.next = false, false, false, false, false, nil
	if c.tail == nil {
		c.head = it
	} else {
		c.tail.next = it
	}
	c.tail = it
	c.count++
	if c.unsent == nil {
		c.unsent = it
	}
	c.next += entry.Offset(it.Span)
	switch c.phase {
	case PhaseIdle:
		c.phase = PhaseOpening
		c.emit(Action{Kind: ActionOpenNext})
	case PhaseOpen:
		c.send()
		// While nothing is confirmed another ledger would only be sent the same again, and be full at once.
		if c.lac != entry.NoEntry && c.sent > 1 && (c.bytes >= c.limits.Bytes || c.sent >= c.limits.Entries ||
			ev.Now.Sub(c.opened) >= c.limits.Age) {
			c.roll()
		}
	case PhaseFailed, PhaseLost, PhaseClosed:
		c.unwind()
	case PhaseOpening, PhaseClosing, PhaseDraining:
	}
}

// start begins a new open ledger and sends what waits.
func (c *Core) start(l entry.LedgerID, now time.Time, moved int) {
	c.emit(Action{Kind: ActionUse, Ledger: l, Moved: moved})
	c.phase, c.ledger, c.opened = PhaseOpen, l, now
	c.bytes, c.sent, c.done, c.lac, c.last, c.pending, c.preparing = 0, 0, 0, entry.NoEntry, entry.NoEntry, 0, false
	c.end, c.maxTime = c.next, 0
	if c.head != nil {
		c.end = c.head.Offset
	}
	c.send()
	if c.closing {
		c.closeNow()
	}
}

// send hands everything unsent to the open ledger.
func (c *Core) send() {
	for it := c.unsent; it != nil; it = it.next {
		it.Entry = entry.EntryID(c.sent)
		it.sent = true
		c.sent++
		c.bytes += int64(it.Size)
		c.emit(Action{Kind: ActionSend, Item: it})
	}
	c.unsent = nil
}

func (c *Core) roll() {
	if c.phase != PhaseOpen || c.preparing || c.closing || c.sent == 0 {
		return
	}
	c.preparing = true
	c.emit(Action{Kind: ActionPrepare, Fruitless: c.fruitless})
}

func (c *Core) prepared() {
	if c.phase != PhaseOpen || !c.preparing {
		return // ended meanwhile
	}
	c.phase = PhaseClosing
	c.emit(Action{Kind: ActionCloseCurrent, Next: true})
}

func (c *Core) closeAsked() {
	if c.closing {
		return
	}
	c.closing = true
	switch c.phase {
	case PhaseOpen:
		c.closeNow()
	case PhaseIdle, PhaseFailed:
		c.finishClose()
	case PhaseOpening, PhaseClosing, PhaseDraining, PhaseLost, PhaseClosed:
	}
}

func (c *Core) closeNow() {
	c.phase = PhaseClosing
	c.emit(Action{Kind: ActionCloseCurrent})
}

// closeFailed lets the old ledger take appends for longer: a roll's limits are soft.
func (c *Core) closeFailed() {
	if c.phase == PhaseLost {
		return
	}
	c.must(PhaseClosing)
	if c.closing {
		c.emit(Action{Kind: ActionCloseCurrent, Delay: true})
		return
	}
	c.phase = PhaseOpen
	c.send()
	if c.preparing { // else it was to be retired: whoever wants that asks again
		c.emit(Action{Kind: ActionPrepare, Delay: true})
	}
}

func (c *Core) ledgerClosed(ev Event) {
	if c.phase == PhaseLost {
		return
	}
	c.must(PhaseClosing)
	c.phase, c.last, c.pending, c.opened = PhaseDraining, ev.Entry, ev.Ledger, ev.Now
	if c.fruitless++; ev.Entry != entry.NoEntry {
		c.fruitless = 0
	}
	c.confirmed(ev.Entry)
	c.drained()
}

// drained goes on once the closed ledger's writer has completed everything.
func (c *Core) drained() {
	if c.phase != PhaseDraining || c.done < c.sent {
		return
	}
	for c.head != nil && c.head.sent && c.head.Entry <= c.last {
		c.pop()
	}
	moved := 0
	for it := c.head; it != nil; it = it.next {
		if it.sent {
			moved++
		}
		it.sent, it.completed, it.failed, it.Entry = false, false, false, entry.NoEntry
	}
	c.unsent = c.head
	if c.pending == 0 {
		c.bytes, c.sent, c.done, c.lac, c.preparing = 0, 0, 0, entry.NoEntry, false
		c.emit(Action{Kind: ActionUse, Moved: moved})
	}
	switch {
	case c.pending != 0:
		c.start(c.pending, c.opened, moved)
	case c.closing:
		c.phase = PhaseIdle
		c.finishClose()
	case c.head != nil:
		c.phase = PhaseOpening
		c.emit(Action{Kind: ActionOpenNext})
	default:
		c.phase = PhaseIdle
	}
}

func (c *Core) finishClose() {
	c.phase, c.err = PhaseClosed, ErrClosed
	c.unwind()
	c.emit(Action{Kind: ActionEnd})
}

func (c *Core) refuse(err error) {
	c.phase, c.err = PhaseFailed, err
	c.unwind()
	if c.closing {
		c.finishClose()
	}
}

func (c *Core) withdraw(err error) {
	if c.phase == PhaseLost || c.phase == PhaseClosed {
		return
	}
	c.phase, c.err = PhaseLost, err
	c.emit(Action{Kind: ActionStop, Err: err})
	c.unwind()
}

// completed notes that the writer is done with an entry. Weaker ack levels may overtake stronger ones.
func (c *Core) completed(ev Event) {
	it := ev.Item
	if !it.sent || it.completed {
		panic("chain: the writer completed what it was not sent, or twice")
	}
	it.completed = true
	c.done++
	switch ev.Outcome {
	case Stored:
		c.finish(it, Stored, nil)
	case NotWritten:
		it.failed = true
	case Unknown:
		c.finish(it, Unknown, ev.Err)
	}
	switch c.phase {
	case PhaseLost, PhaseFailed, PhaseClosed:
		c.unwind()
	case PhaseDraining:
		c.drained()
	case PhaseIdle, PhaseOpening, PhaseOpen, PhaseClosing:
		c.sweep()
	}
}

func (c *Core) finish(it *Item, o Outcome, err error) {
	if it.finished {
		return
	}
	it.finished = true
	c.emit(Action{
		Kind: ActionFinish, Item: it, Outcome: o, Err: err,
		Position: entry.Position{Ledger: c.ledger, Entry: it.Entry},
	})
}

// confirmed shows what lies at or below lac.
func (c *Core) confirmed(lac entry.EntryID) {
	if lac <= c.lac {
		return
	}
	c.lac, c.fruitless = lac, 0
	for it := c.head; it != nil && it.sent && it.Entry <= lac; it = it.next {
		if !it.shown {
			it.shown = true
			c.emit(Action{Kind: ActionShow, Item: it, Position: entry.Position{Ledger: c.ledger, Entry: it.Entry}})
		}
	}
	c.sweep()
}

// sweep forgets what is shown and finished, from the head on.
func (c *Core) sweep() {
	for c.head != nil && c.head.shown && c.head.finished && c.head.completed {
		c.pop()
	}
}

func (c *Core) pop() {
	it := c.head
	c.end = it.Offset + entry.Offset(it.Span)
	c.maxTime = max(c.maxTime, it.Time)
	c.drop()
}

func (c *Core) drop() {
	it := c.head
	if c.unsent == it {
		c.unsent = it.next
	}
	c.head = it.next
	if c.head == nil {
		c.tail = nil
	}
	c.count--
	c.emit(Action{Kind: ActionForget, Item: it, Held: !it.sent || it.failed})
}

// unwind finishes what will go nowhere, in order, behind what a writer has yet to complete. Offsets taken by
// what is definitely not stored are given back when nothing of it is left.
func (c *Core) unwind() {
	for c.head != nil {
		it := c.head
		if it.sent && !it.completed {
			return
		}
		if !it.finished {
			c.finish(it, NotWritten, c.err)
		}
		if !it.sent && c.phase == PhaseFailed {
			c.next = min(c.next, it.Offset)
		}
		c.drop()
	}
}
