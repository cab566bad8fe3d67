package ledger

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// Reasons for which a recovery attempt is given up. The ledger stays in recovery, and another attempt may succeed.
var (
	// ErrHigherTerm: another recovery has started since.
	ErrHigherTerm = errors.New("another recovery with a higher term is under way")
	// ErrUndecided: too few bookies answered to say whether an entry exists.
	ErrUndecided = errors.New("too few bookies answered")
	// ErrWriteBack: an entry could not be written back to enough bookies.
	ErrWriteBack = errors.New("too few bookies took an entry back")
)

// RecoveryCore finds and mends the end of a ledger whose writer is gone, without the effects: a deterministic state
// machine for one attempt, from the raised term on (T4) to the proposal of the end (T5).
//
// It fences the last fragment until every write set is covered, and starts from the highest LAC found there, or the
// fragment's start. Then entry by entry, in order: one good copy means that the entry exists, and it is written
// back; only explicit denials by a set that covers the write set mean that it never counted, and end the ledger. No answer,
// a bad checksum or a bookie in doubt mean nothing. Every read fences too, so a bookie that denied an entry can never
// acknowledge it later; the fence round alone would not do, and the reads alone would (it stays for the LAC).
//
// Reads go to the ensemble as it was when the term was raised. A bookie that fails a write-back is replaced in a local
// copy, which becomes public with the close only: had it been published earlier, a second attempt would
// read from bookies that never had the entries. A replacement must take what it was chosen for, or the attempt fails:
// an entry acknowledged by all its bookies must not end in a fragment with fewer copies. The LAC sent along is frozen at the start, so no
// reader sees an entry before it is certain to stay.
//
// The rejected alternative counts answers ("Qw-Qa+1 of them"): with zones that blocks when a zone is down, though the
// surviving zone can decide.
type RecoveryCore struct {
	cfg Config
	m   meta.Ledger
	f   meta.Fragment // read from; as at T4
	q   *quorum.Quorum
	now time.Time

	phase    recoveryPhase
	fenced   quorum.Set
	unfenced quorum.Set // asked, and certain not to answer well
	deadline time.Time  // of the fence round
	maxLAC   entry.EntryID
	base     entry.EntryID

	// wcur ≤ cur ≤ next: entries before wcur are written back, before cur they exist, before next they were asked for.
	wcur, cur, next entry.EntryID
	window          int
	entries         []*recoveredEntry // wcur … next-1
	unread          int               // of entries: asked for and not found yet
	held, biggest   int64             // bytes of the bodies in entries, and of the biggest found so far
	end             entry.EntryID     // with ended
	ended           bool

	ensemble []meta.Slot // written to
	tail     []meta.Fragment
	replaced quorum.Set // slots of ensemble that are not f's
	failed   quorum.Set // slots that failed a write-back, for hints
	used     []entry.StorageUUID

	candidates     []Candidate
	haveCandidates bool

	stats Stats
	ready RecoveryReady
}

// recoveryBytes bounds the bytes that a recovery holds and reads ahead; two entries it always does.
const recoveryBytes = 32 << 20

type recoveryPhase uint8

const (
	fencing recoveryPhase = iota
	reading
	finishing
	aborted
)

type recoveredEntry struct {
	id                entry.EntryID
	negative, unknown quorum.Set
	readBy            time.Time
	covered           time.Time // when the negatives first covered the write set
	found             bool
	body              []byte
	checksum          uint32
	acks, asked, bad  quorum.Set // of the write-back; asked includes answered
	writeBy           time.Time
}

// RecoveryRead asks for one entry from some slots of the fragment read from.
type RecoveryRead struct {
	Entry entry.EntryID
	Slots quorum.Set
}

// RecoveryReady is what a recovery core wants done. Valid until the next event.
type RecoveryReady struct {
	// Fence asks the slots of [RecoveryCore.Fragment] to store the term.
	Fence quorum.Set
	// Reads are fencing reads of the same slots.
	Reads []RecoveryRead
	// Writes are write-backs with LAC [RecoveryCore.Base].
	Writes         []Send
	NeedCandidates bool
	// Finish asks to close the ledger; it is set once, after which the core wants nothing more.
	Finish *RecoveryEnd
	// Abort ends the attempt.
	Abort error
}

// RecoveryEnd is the end of a ledger, as its recovery found it.
type RecoveryEnd struct {
	Last entry.EntryID
	// Tail replaces the record's fragments from Tail[0].First on; empty when no bookie was replaced.
	Tail []meta.Fragment
	// ReadLength is the bytes of the bodies above the LAC that the recovery started from.
	ReadLength int64
	Hints      []Hint
}

// NewRecoveryCore returns the core of a recovery of m, which is IN_RECOVERY with the caller's own term.
func NewRecoveryCore(cfg Config, m meta.Ledger, now time.Time) *RecoveryCore {
	if m.State != meta.LedgerInRecovery || m.Term == 0 {
		panic("ledger: a recovery needs a ledger with its own term")
	}
	f := last(m.Fragments)
	c := &RecoveryCore{
		cfg: cfg.withDefaults(), m: m, f: f, q: quorumOf(m.Replication, f.Slots), now: now,
		maxLAC: entry.NoEntry, base: entry.NoEntry, window: 2, ensemble: f.Slots,
	}
	c.deadline = now.Add(c.cfg.RequestTimeout)
	c.ready.Fence = quorum.All(len(f.Slots))
	return c
}

// Ledger returns the record that is recovered.
func (c *RecoveryCore) Ledger() meta.Ledger { return c.m }

// Fragment returns the fragment that fences and reads go to.
func (c *RecoveryCore) Fragment() meta.Fragment { return c.f }

// slots returns the bookies that this attempt has to do with: those read from, and those written to instead.
func (c *RecoveryCore) slots() []meta.Slot {
	all := slices.Clone(c.f.Slots)
	for i, s := range c.ensemble {
		if s.UUID != c.f.Slots[i].UUID {
			all = append(all, s)
		}
	}
	return all
}

// Base returns the LAC that the recovery started from, and sends along: frozen.
func (c *RecoveryCore) Base() entry.EntryID { return c.base }

// Stats returns what was done so far.
func (c *RecoveryCore) Stats() Stats { return c.stats }

// Ready returns what is to be done since the last Done.
func (c *RecoveryCore) Ready() *RecoveryReady { return &c.ready }

// Done ends the use of the last Ready.
func (c *RecoveryCore) Done() { c.ready = RecoveryReady{} }

func (c *RecoveryCore) over() bool { return c.phase == finishing || c.phase == aborted }

func (c *RecoveryCore) fail(err error) {
	c.phase = aborted
	c.ready = RecoveryReady{Abort: err}
}

// Now sets the time for the events that follow. It never goes back.
func (c *RecoveryCore) Now(now time.Time) { c.now = now }

// Tick is the event of time passing.
func (c *RecoveryCore) Tick(now time.Time) {
	c.now = now
	c.advance()
}

// Candidates is the event of the list asked for by [RecoveryReady].
func (c *RecoveryCore) Candidates(list []Candidate) {
	c.candidates, c.haveCandidates = list, true
	c.advance()
}

// FenceDone is the event of a slot's answer to the fence; code OK with its LAC.
func (c *RecoveryCore) FenceDone(slot int, lac entry.EntryID, code bookiewire.Code) {
	if c.over() {
		return
	}
	switch code {
	case bookiewire.OK:
		c.fenced |= 1 << slot
		if c.phase == fencing {
			c.maxLAC = max(c.maxLAC, lac)
		}
	case bookiewire.Fenced:
		c.fail(ErrHigherTerm)
		return
	default:
		c.unfenced |= 1 << slot
	}
	c.advance()
}

// ReadDone is the event of a slot's answer to a fencing read of e: with code OK, the checksum and body stored.
func (c *RecoveryCore) ReadDone(e entry.EntryID, slot int, code bookiewire.Code, checksum uint32, body []byte) {
	if c.over() {
		return
	}
	if code == bookiewire.Fenced {
		c.fail(ErrHigherTerm)
		return
	}
	r := c.entry(e)
	if r == nil {
		return
	}
	switch {
	case code == bookiewire.OK && checksum == entry.Checksum(c.m.ID, e, body):
		if !r.found {
			r.found, r.body, r.checksum = true, body, checksum
			c.unread--
			c.held += int64(len(body))
			c.biggest = max(c.biggest, int64(len(body)))
		}
	case code == bookiewire.NoEntry, code == bookiewire.NoLedger:
		r.negative |= 1 << slot
	default:
		r.unknown |= 1 << slot
	}
	c.advance()
}

// AddDone is the event of the answer to a write-back of e by the identity that was in slot when it was sent.
func (c *RecoveryCore) AddDone(e entry.EntryID, slot int, uuid entry.StorageUUID, code bookiewire.Code) {
	if c.over() {
		return
	}
	if code == bookiewire.Fenced {
		c.fail(ErrHigherTerm)
		return
	}
	r := c.entry(e)
	if c.ensemble[slot].UUID != uuid {
		return
	}
	if code != bookiewire.OK {
		c.failed |= 1 << slot
		if r != nil {
			r.bad |= 1 << slot
		}
	} else if r != nil {
		r.acks |= 1 << slot
		r.bad &^= 1 << slot
	}
	c.advance()
}

// entry returns the state of e, or nil when it is written back already or was never asked for.
func (c *RecoveryCore) entry(e entry.EntryID) *recoveredEntry {
	if e < c.wcur || e >= c.next || c.phase == fencing {
		return nil
	}
	return c.entries[e-c.wcur]
}

// advance takes every step that the answers so far allow.
func (c *RecoveryCore) advance() {
	if c.phase == fencing {
		c.advanceFence()
	}
	if c.phase != reading {
		return
	}
	c.advanceReads()
	if c.phase != reading {
		return
	}
	c.advanceWrites()
	if c.phase != reading {
		return
	}
	if c.ended && c.wcur > c.end {
		c.finish()
		return
	}
	for !c.ended && c.next < c.cur+entry.EntryID(c.window) && c.next < c.wcur+2*entry.EntryID(c.cfg.RecoveryWindow) && c.hasRoom() {
		r := &recoveredEntry{id: c.next, readBy: c.now.Add(c.cfg.RequestTimeout)}
		c.entries = append(c.entries, r)
		c.next++
		c.unread++
		c.ready.Reads = append(c.ready.Reads, RecoveryRead{Entry: r.id, Slots: c.q.WriteSet(r.id)})
	}
}

// hasRoom reports whether one more entry may be read ahead, if it is as big as the biggest so far: all bookies of its write
// set send it.
func (c *RecoveryCore) hasRoom() bool {
	ahead := int64(c.unread+1) * int64(c.m.WriteQuorum) * c.biggest
	return len(c.entries) < 2 || c.held+ahead <= recoveryBytes
}

func (c *RecoveryCore) advanceFence() {
	all := quorum.All(len(c.f.Slots))
	switch {
	case c.q.FenceCovers(c.fenced):
		// The fragment before may have ended at First-1 without this one's bookies having heard of any LAC.
		c.base = max(c.f.First-1, c.maxLAC)
		c.wcur, c.cur, c.next = c.base+1, c.base+1, c.base+1
		c.phase = reading
	case (c.fenced | c.unfenced) == all, !c.now.Before(c.deadline):
		c.fail(fmt.Errorf("fence ledger %d: %w", c.m.ID, ErrUndecided))
	}
}

// advanceReads decides entries in order: they exist, or the ledger ends before them.
func (c *RecoveryCore) advanceReads() {
	for c.cur < c.next && !c.ended {
		r := c.entries[c.cur-c.wcur]
		ws := c.q.WriteSet(r.id)
		answered := r.negative | r.unknown
		switch {
		case r.found:
			c.stats.EntriesRead++
			c.stats.BytesRead += int64(len(r.body))
			r.writeBy = c.now.Add(c.cfg.RequestTimeout)
			c.write(r)
			c.cur++
			c.window = min(2*c.window, c.cfg.RecoveryWindow)
			continue
		case c.q.Covers(ws, r.negative):
			if r.covered.IsZero() {
				r.covered = c.now
			}
			// Absence is decided. A copy that counted for AckOne alone may still be on its way, so others are
			// heard too, for a while.
			if answered == ws || !c.now.Before(r.covered.Add(c.cfg.NegativeWait)) {
				c.end, c.ended = c.cur-1, true
			}
		case answered == ws, !c.now.Before(r.readBy):
			c.fail(fmt.Errorf("read entry %d of ledger %d: %w", r.id, c.m.ID, ErrUndecided))
		}
		return
	}
}

// write sends r to the slots of its write set that were not asked yet.
func (c *RecoveryCore) write(r *recoveredEntry) {
	to := c.q.WriteSet(r.id) &^ r.asked
	if to == 0 {
		return
	}
	r.asked |= to
	c.ready.Writes = append(c.ready.Writes, Send{Entry: r.id, Checksum: r.checksum, Body: r.body, Slots: to, Ensemble: c.ensemble})
}

// advanceWrites counts write-backs in order, and replaces bookies where a quorum is out of reach.
func (c *RecoveryCore) advanceWrites() {
	for c.wcur < c.cur {
		r := c.entries[0]
		ws := c.q.WriteSet(r.id)
		if (r.acks&ws).Len() < c.m.AckQuorum || ws&c.replaced&^r.acks != 0 {
			break
		}
		c.stats.EntriesRewritten++
		c.stats.BytesRewritten += int64(len(r.body))
		c.held -= int64(len(r.body))
		c.entries[0] = nil
		c.entries = c.entries[1:]
		c.wcur++
	}
	var bad quorum.Set
	for i := range int(c.cur - c.wcur) {
		r := c.entries[i]
		ws := c.q.WriteSet(r.id)
		if !c.now.Before(r.writeBy) {
			r.bad |= ws &^ r.acks
			c.failed |= ws &^ r.acks
		}
		if r.bad&c.replaced != 0 {
			c.fail(fmt.Errorf("write entry %d of ledger %d to a replacement: %w", r.id, c.m.ID, ErrWriteBack))
			return
		}
		if (ws &^ r.bad).Len() < c.m.AckQuorum {
			bad |= r.bad & ws
		}
	}
	if bad != 0 {
		c.replace(bad)
	}
}

// replace swaps bad slots in the local ensemble, from the first entry that is not written back.
func (c *RecoveryCore) replace(bad quorum.Set) {
	if !c.haveCandidates {
		c.ready.NeedCandidates = true
		return
	}
	c.haveCandidates = false
	for _, s := range c.ensemble {
		if !slices.Contains(c.used, s.UUID) {
			c.used = append(c.used, s.UUID)
		}
	}
	slots, err := c.place(c.ensemble, bad)
	if err != nil {
		// Not all of them can be replaced, and need not be: as few copies as count are enough.
		all := bad
		bad, slots = 0, c.ensemble
		all.Each(func(i int) {
			if s, err := c.place(slots, 1<<i); err == nil {
				slots, bad = s, bad|1<<i
			}
		})
	}
	if bad == 0 {
		c.fail(fmt.Errorf("write back to ledger %d: %w: %w", c.m.ID, ErrWriteBack, err))
		return
	}
	if n := len(c.tail); n > 0 && c.tail[n-1].First == c.wcur {
		c.tail = c.tail[:n-1]
	}
	c.tail = append(slices.Clip(c.tail), meta.Fragment{First: c.wcur, Slots: slots})
	c.ensemble = slots
	c.replaced |= bad
	c.stats.Replaced += bad.Len()
	for i := range int(c.cur - c.wcur) {
		r := c.entries[i]
		r.acks &^= bad
		r.asked &^= bad
		r.bad &^= bad
		r.writeBy = c.now.Add(c.cfg.RequestTimeout)
		c.write(r)
	}
}

// place returns the ensemble with the open slots filled anew.
func (c *RecoveryCore) place(ensemble []meta.Slot, open quorum.Set) ([]meta.Slot, error) {
	req := PlaceRequest{
		Replication: c.m.Replication, Candidates: c.candidates, Exclude: c.used, Keep: slices.Clone(ensemble),
		Rand: rand.New(rand.NewPCG(c.cfg.Seed, uint64(c.m.ID)<<8|uint64(c.m.Term&0xff))), //nolint:gosec // spreads load, guards nothing
	}
	open.Each(func(i int) { req.Keep[i] = meta.Slot{} })
	slots, err := Place(req)
	if err != nil {
		// Nobody is told of an acknowledgement here, so copies in fewer zones do until repair has spread them.
		req.Replication.MinZones = 0
		slots, err = Place(req)
	}
	return slots, err
}

func (c *RecoveryCore) finish() {
	c.phase = finishing
	end := &RecoveryEnd{Last: c.end, Tail: c.tail, ReadLength: c.stats.BytesRead}
	end.Hints = c.hints()
	c.ready.Finish = end
}

// hints names the copies that failed and were not replaced.
func (c *RecoveryCore) hints() []Hint {
	fragments := []meta.Fragment{c.f}
	if len(c.tail) > 0 && c.tail[0].First == c.f.First {
		fragments = nil
	}
	fragments = append(fragments, c.tail...)
	var hints []Hint
	for n, f := range fragments {
		from, to := max(f.First, c.base+1), c.end
		if n+1 < len(fragments) {
			to = fragments[n+1].First - 1
		}
		if from > to {
			continue
		}
		c.failed.Each(func(i int) {
			if f.Slots[i].UUID == c.f.Slots[i].UUID {
				hints = append(hints, Hint{Ledger: c.m.ID, Fragment: f.First, Slot: i, UUID: f.Slots[i].UUID, First: from, Last: to})
			}
		})
	}
	return hints
}
