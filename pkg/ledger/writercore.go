package ledger

import (
	"errors"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// Errors of writers, found in [AppendError] and returned by [Writer.Err].
var (
	// ErrFenced: a bookie knows of a newer term: another owner is recovering the ledger.
	ErrFenced = errors.New("ledger is fenced by a newer owner")
	// ErrTakenOver: the ledger's record is no longer open for this writer.
	ErrTakenOver = errors.New("ledger is no longer open for its writer")
	// ErrClosed: the ledger was closed, and the entry is not part of it.
	ErrClosed = errors.New("ledger is closed")
	// ErrShutdown: the writer was shut down.
	ErrShutdown = errors.New("writer is shut down")
	// ErrHandedToRepair: not all copies of an entry appended with AckAll were made by this writer.
	ErrHandedToRepair = errors.New("missing copies were left to repair")
)

// Phase is where a writer stands.
type Phase uint8

// The phases. Only Active confirms entries: in Changing and Closing the LAC is frozen, from the proposal of the
// transaction to its definite outcome, since the transaction names a first or last entry computed from it.
const (
	Active Phase = iota
	Changing
	Closing
	Closed
	Withdrawn
)

// String returns the phase's name.
func (p Phase) String() string {
	return [...]string{"active", "changing", "closing", "closed", "withdrawn"}[p]
}

// WriterCore is a ledger's writer without its effects: a deterministic state machine.
//
// Its rules, each the answer to a lost entry in some system:
//   - An entry counts once valid acknowledgements for it and for all before it are in. Acknowledgements count only
//     from the identity that is in the slot now, and those of a replaced slot are forgotten.
//   - Nothing is sent to, or counted against, a new ensemble before its transaction is acknowledged. From the
//     proposal to the definite outcome nothing is confirmed: the new fragment starts at LAC+1, so an entry
//     confirmed meanwhile by the old bookies would be looked for on the new ones.
//   - For an append that waits for all copies the new fragment starts at that append, if it and what follows it are
//     confirmed without the replaced bookies: then its last copy is made in the new fragment.
//   - After a change each entry is looked at by itself: what its write set now lacks is sent. Comparing ensembles
//     misses entries when a bookie left and came back.
//   - A fence, or a record that is not open any more, ends the writer: what is pending has an unknown outcome.
//     Only a successful close makes "not written" a fact.
//   - Entries that are confirmed with fewer than Qw copies keep their bytes until the copies are made or are
//     handed to repair with a hint; the bytes a slow bookie may hold back are bounded.
//
// The rejected alternative is a lock around shared state with callbacks from every request: each of the bugs
// above was in such code, and none of it can be replayed.
//
// Events are the methods, and [WriterCore.Ready] returns what to do. Time comes in by [WriterCore.Now].
type WriterCore struct {
	cfg    *Config
	ledger meta.Ledger // as last acknowledged; Fragments are never changed in place
	now    time.Time

	phase Phase
	err   error // why withdrawn
	// sealed: a close was asked for; entries are accepted but not sent until it fails or proves them unwritten.
	sealed        bool
	drainDeadline time.Time
	mayAckEarly   bool

	first   entry.EntryID // of the last fragment
	slots   []slotState
	track   *quorum.Tracker
	pending []pendingEntry // ring, entry e at e & (len-1), parallel to track
	allQ    []entry.EntryID
	sentTo  entry.EntryID // entries above have never been sent
	// oneScan is the last entry looked at for an early report; unreportedNone counts entries appended with AckNone
	// that wait for their confirmation, and with them all later ones, so that reports of one level keep their order.
	oneScan        entry.EntryID
	unreportedNone int
	// confirmedLength counts the bodies ≤ LAC, appendedLength all.
	confirmedLength, appendedLength int64

	change changeState

	lacSent  entry.EntryID // highest LAC that bookies were told
	lastSend time.Time

	ready Ready
}

type slotState struct {
	uuid     entry.StorageUUID
	inflight int   // adds without an answer
	unacked  int64 // bytes of entries that this slot has not acknowledged, given up ones excepted
	// progress is when the slot last answered, or when it was last idle.
	progress time.Time
	suspect  bool
	soft     bool // suspect for being overloaded: not a reason to change at once
	since    time.Time
	retryAt  time.Time
	probes   int  // of a suspect: how many entries it may have in flight
	leaving  bool // registered as read-only or draining
	refuses  bool // said so itself, ahead of its registration
}

type pendingEntry struct {
	body     []byte
	size     int
	checksum uint32
	level    AckLevel
	done     func(entry.EntryID, error)
	inflight quorum.Set
	lost     quorum.Set // copies given up; only of confirmed entries
	reported bool       // done was handed out
	released bool
}

// entryOverhead is what an entry costs beside its body while a straggler holds it back.
const entryOverhead = 160

// Send is one entry to be sent to some slots of an ensemble.
type Send struct {
	Entry    entry.EntryID
	Checksum uint32
	Body     []byte
	Slots    quorum.Set
	Ensemble []meta.Slot // immutable
}

// Completion is an append that is done. Done may be nil.
type Completion struct {
	Entry entry.EntryID
	Done  func(entry.EntryID, error)
	Err   error
	// Dropped: Done was called before, and the entry turned out not to be written. Body is its body.
	Dropped bool
	Body    []byte
}

// Change is a proposed ensemble change (T2).
type Change struct {
	Ledger    meta.Ledger // the record it applies to
	Fragments []meta.Fragment
}

// CloseProposal is a proposed close (T3).
type CloseProposal struct {
	Last   entry.EntryID
	Length int64
}

// Ready is what a core wants done, in the order of the fields. It is valid until the next event.
type Ready struct {
	// Sends are adds, all with LAC piggybacked.
	Sends []Send
	LAC   entry.EntryID
	// WriteLAC asks for an explicit write of LAC to the given slots of the last fragment.
	WriteLAC quorum.Set
	// NeedCandidates asks for [WriterCore.Candidates].
	NeedCandidates bool
	// Verify asks for a linearizable read of the record, answered by [WriterCore.Verified].
	Verify bool
	// Change and Close ask for a transaction, answered by [WriterCore.ChangeDone] or [WriterCore.CloseDone].
	Change *Change
	Close  *CloseProposal
	// Confirmed: the LAC has grown.
	Confirmed   bool
	Completions []Completion
	// Released bytes of bodies are no longer held.
	Released int
	Hints    []Hint
	// Suspects counts slots that became suspect.
	Suspects int
	// Stalled: appends have just lost their last possible quorum.
	Stalled bool
}

// NewWriterCore returns the core of the writer of a ledger that has just been opened: it is OPEN, its nonce is the
// caller's, and nothing was written to it.
func NewWriterCore(cfg Config, l meta.Ledger, now time.Time) *WriterCore {
	cfg = cfg.withDefaults()
	return newWriterCore(&cfg, l, now)
}

// newWriterCore shares cfg, complete with defaults.
func newWriterCore(cfg *Config, l meta.Ledger, now time.Time) *WriterCore {
	c := &WriterCore{cfg: cfg, ledger: l, now: now, mayAckEarly: true, sentTo: entry.NoEntry, lacSent: entry.NoEntry}
	if len(l.Fragments) != 1 || l.State != meta.LedgerOpen {
		panic("ledger: a writer needs a new open ledger with one fragment")
	}
	c.first = l.Fragments[0].First
	c.oneScan = c.first - 1
	c.slots = newSlots(l.Fragments[0].Slots)
	c.track = quorum.NewTracker(quorumOf(l.Replication, l.Fragments[0].Slots), c.first-1)
	return c
}

func newSlots(slots []meta.Slot) []slotState {
	s := make([]slotState, len(slots))
	for i := range slots {
		s[i].uuid = slots[i].UUID
	}
	return s
}

// quorumOf returns the arithmetic of an ensemble; it panics on a record that breaks the rules of replication.
func quorumOf(r meta.Replication, slots []meta.Slot) *quorum.Quorum {
	zones := make([]string, len(slots))
	for i, s := range slots {
		zones[i] = s.Zone
	}
	if len(slots) != r.Ensemble {
		panic("ledger: a fragment's slots are not its ledger's ensemble")
	}
	return quorum.MustNew(quorum.Config{
		Ensemble: r.Ensemble, WriteQuorum: r.WriteQuorum, AckQuorum: r.AckQuorum, MinZones: r.MinZones,
	}, zones)
}

// Phase returns where the writer stands.
func (c *WriterCore) Phase() Phase { return c.phase }

// Err returns why the writer withdrew; nil while it has not.
func (c *WriterCore) Err() error { return c.err }

// LAC returns the last confirmed entry.
func (c *WriterCore) LAC() entry.EntryID { return c.track.LAC() }

// Ledger returns the record as last acknowledged. Its slices are shared: read only.
func (c *WriterCore) Ledger() meta.Ledger { return c.ledger }

// Length returns the bytes of the bodies up to the LAC, and of all appended.
func (c *WriterCore) Length() (confirmed, appended int64) { return c.confirmedLength, c.appendedLength }

// WantsRoll reports that the ledger should be closed and another one opened: it has no possible quorum of bookies,
// or too many fragments.
func (c *WriterCore) WantsRoll() bool { return c.change.wantsRoll }

// Degraded reports that some bookie of the ensemble is suspect.
func (c *WriterCore) Degraded() bool { return c.suspects() != 0 }

// Idle reports that every entry is confirmed with all its copies (or without the hope of them).
func (c *WriterCore) Idle() bool { return c.track.Tail() == c.track.Next() }

// Now sets the time for the events that follow. It never goes back.
func (c *WriterCore) Now(now time.Time) { c.now = now }

// SetMayAckEarly says whether entries may be reported below their quorum from now on.
func (c *WriterCore) SetMayAckEarly(ok bool) { c.mayAckEarly = ok }

func (c *WriterCore) over() bool { return c.phase == Closed || c.phase == Withdrawn }

func (c *WriterCore) at(e entry.EntryID) *pendingEntry { return &c.pending[int(e)&(len(c.pending)-1)] }

func (c *WriterCore) ensemble() []meta.Slot {
	return c.ledger.Fragments[len(c.ledger.Fragments)-1].Slots
}

// Append is the event of a new entry. Every append is completed exactly once.
func (c *WriterCore) Append(body []byte, level AckLevel, done func(entry.EntryID, error)) {
	if c.over() {
		err := c.err
		if err == nil {
			err = ErrClosed
		}
		c.ready.Completions = append(c.ready.Completions, Completion{
			Entry: entry.NoEntry, Done: done,
			Err: &AppendError{Ledger: c.ledger.ID, Entry: entry.NoEntry, Outcome: NotWritten, Err: err},
		})
		return
	}
	if n := int(c.track.Next() - c.track.Tail()); n == len(c.pending) {
		c.growPending()
	}
	e := c.track.Append()
	p := c.at(e)
	*p = pendingEntry{
		body: body, size: len(body), checksum: entry.Checksum(c.ledger.ID, e, body), level: level, done: done,
	}
	c.appendedLength += int64(len(body))
	c.track.Quorum().WriteSet(e).Each(func(i int) { c.slots[i].unacked += int64(p.size + entryOverhead) })
	if level == AckAll {
		c.allQ = append(c.allQ, e)
	}
	if level == AckNone {
		if c.mayAckEarly && !c.sealed && c.unreportedNone == 0 {
			c.report(e, p, nil)
		} else {
			c.unreportedNone++
		}
	}
	if c.sealed {
		return
	}
	c.send(e)
	c.evaluate()
}

func (c *WriterCore) growPending() {
	bigger := make([]pendingEntry, max(8, 2*len(c.pending)))
	for e := c.track.Tail(); e < c.track.Next(); e++ {
		bigger[int(e)&(len(bigger)-1)] = *c.at(e)
	}
	c.pending = bigger
}

// maxProbes bounds what a suspect slot has in flight, in entries.
const maxProbes = 64

// send sends e to every slot that lacks it, is not asked already and is not suspect. A suspect slot that has nothing
// in flight gets one entry now and then, to see whether it is back, and more and more while it answers: with a long
// backlog every slot may be suspect, and the entries are to get away all the same, as fast as the bookies take them.
func (c *WriterCore) send(e entry.EntryID) {
	p := c.at(e)
	want := c.track.Missing(e) &^ p.inflight &^ p.lost
	var to quorum.Set
	want.Each(func(i int) {
		s := &c.slots[i]
		if s.suspect {
			if s.inflight >= s.probes || s.probes == 1 && c.now.Before(s.retryAt) {
				return
			}
			s.retryAt = c.now.Add(c.cfg.RetryAfter)
		}
		if s.inflight == 0 {
			s.progress = c.now
		}
		s.inflight++
		to |= 1 << i
	})
	c.sentTo = max(c.sentTo, e)
	if to == 0 {
		return
	}
	p.inflight |= to
	c.lastSend = c.now
	c.ready.Sends = append(c.ready.Sends, Send{Entry: e, Checksum: p.checksum, Body: p.body, Slots: to, Ensemble: c.ensemble()})
	to.Each(func(i int) {
		if s := &c.slots[i]; !s.suspect && s.unacked > c.cfg.StragglerBytes {
			c.suspectSlot(i, true)
		}
	})
}

// sendMissing sends what slot i lacks, oldest first.
func (c *WriterCore) sendMissing(i int) {
	for e := c.track.Tail(); e <= c.sentTo; e++ {
		// A send may make another slot a straggler, and that drop entries further on.
		if s := &c.slots[i]; s.suspect && s.inflight >= s.probes {
			return
		}
		if c.track.Tracked(e) && c.track.Missing(e).Has(i) && !c.at(e).inflight.Has(i) && !c.at(e).lost.Has(i) {
			c.send(e)
		}
	}
}

// Ack is the event of a durable copy of e at the identity uuid, which was in slot when the entry was sent.
func (c *WriterCore) Ack(e entry.EntryID, slot int, uuid entry.StorageUUID) {
	if c.over() || c.slots[slot].uuid != uuid {
		return
	}
	s := &c.slots[slot]
	s.progress = c.now
	s.refuses = false
	news := false
	if c.track.Tracked(e) {
		p := c.at(e)
		if p.inflight.Has(slot) {
			p.inflight &^= 1 << slot
			s.inflight--
		}
		// A copy that was given up does not count any more. It may come from an identity that has left the slot and
		// come back since: then the entry's own fragment names another one.
		if news = !p.lost.Has(slot) && c.track.Ack(e, slot); news {
			s.unacked -= int64(p.size + entryOverhead)
		}
	}
	if s.suspect {
		s.probes = min(s.probes+1, maxProbes)
		if s.unacked <= c.cfg.StragglerBytes/2 {
			s.suspect, s.soft = false, false
		}
		if c.phase != Closing && (!s.suspect || s.inflight <= s.probes/2) {
			c.sendMissing(slot)
		}
	}
	switch {
	case !news:
	case e <= c.track.LAC():
		c.settle(e)
		c.completeAll()
	default:
		c.confirm()
	}
	c.evaluate()
}

// Fail is the event of an add that will not be acknowledged. term is the stored one, with code Fenced.
func (c *WriterCore) Fail(e entry.EntryID, slot int, uuid entry.StorageUUID, code bookiewire.Code) {
	if c.over() {
		return
	}
	if code == bookiewire.Fenced {
		// Whichever slot says so: a term is raised in the metadata before it is at any bookie. While a close is
		// out, its outcome says the same, and decides more.
		if c.phase != Closing {
			c.withdraw(ErrFenced)
		}
		return
	}
	if c.slots[slot].uuid != uuid {
		return
	}
	s := &c.slots[slot]
	if c.track.Tracked(e) {
		if p := c.at(e); p.inflight.Has(slot) {
			p.inflight &^= 1 << slot
			s.inflight--
		}
	}
	if code == bookiewire.ReadOnly {
		s.refuses = true
	}
	if code == bookiewire.NotAdmitted {
		c.change.verify = true
	}
	c.suspectSlot(slot, code == bookiewire.Overloaded)
	s.retryAt, s.probes = c.now.Add(c.cfg.RetryAfter), 1
	c.evaluate()
}

// Ready returns what is to be done since the last call. The result, and the slices in it, are valid until the next
// event.
func (c *WriterCore) Ready() *Ready {
	c.ready.LAC = c.track.LAC()
	if c.lacSent < c.ready.LAC {
		// What a suspect bookie is told may reach nobody.
		suspects := c.suspects()
		if slices.ContainsFunc(c.ready.Sends, func(s Send) bool { return s.Slots&^suspects != 0 }) {
			c.lacSent = c.ready.LAC
		}
	}
	return &c.ready
}

// Done ends the use of the last Ready.
func (c *WriterCore) Done() {
	clear(c.ready.Sends)
	clear(c.ready.Completions)
	c.ready = Ready{Sends: c.ready.Sends[:0], Completions: c.ready.Completions[:0], Hints: c.ready.Hints[:0]}
}

// Shrink gives back the memory that an idle writer does not need.
func (c *WriterCore) Shrink() {
	if c.Idle() {
		c.pending, c.allQ = nil, nil
		c.track.Shrink()
		c.ready = Ready{}
	}
}
