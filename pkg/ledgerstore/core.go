package ledgerstore

import (
	"bytes"
	"errors"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

const (
	// groupBytes is where a group ends: a larger one reaches the disk no faster.
	groupBytes = 1 << 20
	// maxInFlight is how many groups are being synced at once.
	maxInFlight = 3
	// maxUnsealed bounds the segments that a restart has to scan: the active one, the next one, and those being
	// sealed.
	maxUnsealed = 4
)

// Core is the commit pipeline of a store, and the only writer of its table of ledgers: a state machine without
// goroutines, clock or files. Step takes an event; Ready returns what is to be done about all events since the last
// one. Whoever drives it does so from one goroutine and feeds back Written, Synced, Prepared, Sealed and Checked.
//
//	accepted ──► queue ──► group: Append ──► Written ──► Sync ──► Synced, and all before it ──► table, Replies
//
// An add that is accepted is in the queue or in a group until it is durable; its effect on the table and its reply
// come together, in the order of acceptance. So a fence drains what was accepted before it by taking its place in
// the queue, and a reply that depends on something not durable yet rides behind it as a barrier: an item without
// a record.
//
// A group is cut whenever nothing is being written and fewer than three groups are being synced: a lone entry goes
// at once, and while syncs are busy the queue makes the next group. Waiting for company by a timer was rejected:
// it costs every lone entry the wait, and under load the syncs themselves are the timer.
//
// Syncs overlap, yet a group counts only when its own sync and all before it have succeeded.
type Core struct {
	table        *table
	pendingLimit int64

	queue        []*item // accepted, not yet in a group
	pendingBytes int64   // of bodies in the queue and in groups
	groups       []*Batch
	writing      bool // the last group is being written
	free         []*Batch

	previous, active, next *Segment
	prepareAsked           bool
	unsealed               int
	mustRoll               bool // the active segment refused a write for want of space
	noNext                 bool // there is no space for an ordinary next segment
	noFiles                bool // it is file descriptors that there are none of
	exhausted              bool // nor for one from the reserve: what is left of the active one is for control records
	stalled                bool // and that is used up too: they wait for space
	keep                   int64

	lazy bool // batches that nothing of rests on the disk may be answered unsynced

	deferred []Event  // came for ledgers that are deleted by now
	trash    []buried // oldest first

	state    State // what the disk's usage says
	quitting bool  // the store is being closed
	checking int   // Checks without an answer
	spaceOut bool  // a write was refused for want of space since the last Space event
	failed   error

	ready Ready
	found []candidate // scratch
}

// NewCore starts a pipeline that appends to active, with an empty table.
func NewCore(active *Segment, pendingLimit int64) *Core {
	return newCore(newTable(1), active, pendingLimit, 1, 0)
}

// keep is how many bytes of a segment entries leave to control records while there is no other segment to go on in.
func newCore(t *table, active *Segment, pendingLimit int64, unsealed int, keep int64) *Core {
	return &Core{table: t, active: active, pendingLimit: pendingLimit, unsealed: unsealed, keep: keep}
}

// Ready is what is to be done. The slices are the caller's.
type Ready struct {
	// Append, if not nil, is to be written to its segment; then Step(Written).
	Append *Batch
	// Syncs are to be synced, concurrently; then Step(Synced) for each.
	Syncs []*Batch
	// Checks are adds of entries that may be stored already; then Step(Checked) for each.
	Checks []*Check
	// Prepare asks for the segment after the active one; then Step(Prepared). An error that is ENOSPC, or a want of file descriptors, is followed
	// by Reserve when something urgent needs the segment: it may be taken from the reserve. If that has none either,
	// entries are refused, urgent ones too, and control records go on as long as the active segment has room.
	Prepare, Reserve bool
	// Seals are complete and durable and want their footers; then Step(Sealed) for each.
	Seals []*Segment
	// Replies are to be called in order.
	Replies []Reply
	// Fatal, if not nil, says why the store has stopped.
	Fatal error
}

// Batch is a group on its way to the disk.
type Batch struct {
	Segment *Segment
	// Records are to be written as one batch.
	Records []segment.Record
	// DurableUpto is for the batch's header.
	DurableUpto int64
	// PreviousDurable is how much of the segment before is durable.
	PreviousDurable int64

	items  []*item // with the barriers between them
	synced bool
	hard   bool // to be synced in any case; not changed while it is being synced
	full   bool // to be synced because as many records as may are not; of the lazy sync
	end    int64
}

// Reply is the outcome of one request.
type Reply struct {
	item *item
	err  error
}

// Do calls the request's Done, and those of its duplicates.
func (r Reply) Do() {
	for it := r.item; it != nil; {
		next := it.next // Done may free the item for reuse
		it.next = nil
		switch {
		case it.add != nil:
			it.add.Done(r.err)
		case it.fenced != nil:
			it.fenced(bookiewire.FenceReply{LAC: it.lac}, r.err)
		case it.done != nil:
			it.done(r.err)
		}
		it = next
	}
}

// item is one place in the order of the log: a record, or a barrier (Kind 0).
type item struct {
	rec    segment.Record
	ledger *ledger
	urgent bool // of an add: not refused for want of space while there is a reserve. Other records never are.
	// vouches: the record says nothing new, its batch does.
	vouches bool
	// hard: its answer promises that it is on the disk, whatever the policy is.
	hard bool
	err  error // the answer is known and rides here for order's sake
	next *item // duplicates that wait for this one
	// after is, of a first copy, the last of those duplicates that wait in the queue for a term as well, and of them the one
	// before: they are refused with it.
	after *item
	// location is where the record was written.
	location segment.Location
	lac      entry.EntryID

	// Who is told; all nil for a record that nobody waits for.
	add    *Add
	fenced func(bookiewire.FenceReply, error)
	done   func(error)
}

// Step takes an event.
func (c *Core) Step(ev Event) {
	if c.failed != nil {
		c.stepFailed(ev)
		return
	}
	switch ev := ev.(type) {
	case *Add:
		c.stepAdd(ev, 0)
	case *Fence:
		c.stepFence(ev)
	case *LAC:
		c.stepLAC(ev)
	case *Limbo:
		c.stepLimbo(ev)
	case *Delete:
		c.stepDelete(ev)
	case *Carry:
		c.stepCarry(ev)
	case *Checked:
		c.stepChecked(ev)
	case *Prepared:
		c.stepPrepared(ev)
	case *Written:
		c.stepWritten(ev)
	case *Synced:
		c.stepSynced(ev)
	case *Sealed:
		c.stepSealed(ev)
	case *Replaced:
		c.stepReplaced(ev)
	case *Space:
		c.state = ev.State
		c.spaceOut, c.noNext, c.noFiles, c.exhausted, c.stalled = false, false, false, false, false
		c.vouch()
	case *Expire:
		c.stepExpire(ev)
	case *Broken:
		c.fail(ev.Err)
	case *quit:
		c.quitting = true
	}
	c.pump()
	if c.quitting && c.stalled && c.failed == nil {
		c.fail(errors.New("closed while waiting for space"))
		c.ready.Fatal = nil
	}
}

// Idle reports whether everything accepted is answered, so that a store may stop.
func (c *Core) Idle() bool {
	return c.checking == 0 && (c.failed != nil || len(c.queue) == 0 && len(c.groups) == 0)
}

// Ready returns what is to be done about the events since the last call.
func (c *Core) Ready() Ready {
	r := c.ready
	c.ready = Ready{}
	return r
}

// State is what the store takes now.
func (c *Core) State() State {
	if c.spaceOut {
		return Full
	}
	return c.state
}

// Ledger tells what is durable of a ledger.
func (c *Core) Ledger(id entry.LedgerID) (LedgerInfo, bool) {
	l := c.table.lookup(id)
	if l == nil || !l.durable {
		return LedgerInfo{}, false
	}
	return l.info(), true
}

// Admission is [Store.Admission].
func (c *Core) Admission(id entry.LedgerID) (known bool, generation uint64) {
	l := c.table.lookup(id)
	return l != nil && !l.deleting, c.table.generation(id).Load()
}

// Mark is [Store.Mark].
func (c *Core) Mark(id entry.LedgerID) uint64 { return c.table.mark(id) }

// Holds reports whether an entry is durable in a segment that is not sealed yet, and, if it is in the range of
// sealed ones, that their footers are to be asked.
func (c *Core) Holds(id entry.LedgerID, e entry.EntryID) (unsealed, askFooters bool) {
	l := c.table.lookup(id)
	if l == nil {
		return false, false
	}
	c.found = l.find(e, c.found[:0])
	for _, f := range c.found {
		unsealed = unsealed || !f.footer
		askFooters = askFooters || f.footer
	}
	return unsealed, askFooters
}

// PendingBytes are the bytes of bodies accepted and not yet durable.
func (c *Core) PendingBytes() int64 { return c.pendingBytes }

func (c *Core) reply(it *item, err error) {
	c.ready.Replies = append(c.ready.Replies, Reply{item: it, err: err})
}

// enqueue accepts it.
func (c *Core) enqueue(it *item) {
	if l := it.ledger; l != nil && it.rec.Kind != 0 {
		l.queued++
	}
	c.pendingBytes += int64(len(it.rec.Body))
	c.queue = append(c.queue, it)
}

// behind lets it take effect once everything accepted so far is durable.
func (c *Core) behind(it *item) {
	it.rec.Kind = 0
	it.rec.Body = nil
	switch {
	case len(c.queue) > 0:
		c.queue = append(c.queue, it)
	case len(c.groups) > 0:
		last := c.groups[len(c.groups)-1]
		last.items = append(last.items, it)
	default:
		c.finish(it)
	}
}

// finish answers an item whose time has come.
func (c *Core) finish(it *item) {
	if it.ledger != nil {
		it.lac = it.ledger.lac
	}
	c.reply(it, it.err)
}

// fail stops the store: what was accepted may or may not be on disk.
func (c *Core) fail(err error) {
	c.failed = err
	c.ready.Fatal = err
	c.ready.Append = nil
	for _, b := range c.groups {
		for _, it := range b.items {
			c.reply(it, c.unknown())
		}
	}
	for _, it := range c.queue {
		c.reply(it, c.unknown())
	}
	c.groups, c.queue, c.pendingBytes = nil, nil, 0
	for _, l := range c.table.snapshot() {
		c.deferred = append(c.deferred, l.deferred...)
		l.deferred = nil
	}
	for _, ev := range c.deferred {
		c.stepFailed(ev)
	}
	c.deferred = nil
}

func (c *Core) unknown() error {
	return &bookiewire.Error{Code: bookiewire.Unknown, Detail: "the store has stopped: " + c.failed.Error()}
}

func (c *Core) stepFailed(ev Event) {
	if _, ok := ev.(*Checked); ok {
		c.checking--
	}
	if it := requestOf(ev); it != nil {
		c.reply(it, c.unknown())
	}
}

// requestOf returns who waits for the event's answer.
func requestOf(ev Event) *item {
	switch ev := ev.(type) {
	case *Add:
		return ev.asItem()
	case *Checked:
		return ev.Check.Add.asItem()
	case *Fence:
		return &item{fenced: ev.Done}
	case *LAC:
		return &item{done: ev.Done}
	case *Limbo:
		return &item{done: ev.Done}
	case *Delete:
		return &item{done: ev.Done}
	case *Carry:
		return &item{done: ev.Done}
	case *Replaced:
		return &item{done: ev.Done}
	}
	return nil
}

func sameBody(a, b *item) bool {
	return a.rec.Checksum == b.rec.Checksum && bytes.Equal(a.rec.Body, b.rec.Body)
}
