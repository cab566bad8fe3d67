package ledgerstore

import (
	"cmp"
	"slices"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

// Event is what a [Core] steps on.
type Event interface{ event() }

// Add stores one entry. It is the store's, body included, until Done.
type Add struct {
	bookiewire.Add
	// Generation is what Admission returned; it counts only if the ledger is unknown.
	Generation uint64
	// Done is called once, from the store's completion goroutine, in the order of acceptance: nil after the entry
	// is on disk, or a *bookiewire.Error. It must not block.
	Done func(error)

	item item
}

// Fence raises a ledger's term.
type Fence struct {
	bookiewire.Fence
	Done func(bookiewire.FenceReply, error)
}

// LAC makes a LAC known.
type LAC struct {
	bookiewire.WriteLAC
	Done func(error)
}

// Limbo puts a ledger in limbo and fences it, or ends its limbo.
type Limbo struct {
	Ledger entry.LedgerID
	Clear  bool
	Done   func(error)
}

// Delete buries a ledger, unless it has another mark by now.
type Delete struct {
	Ledger entry.LedgerID
	// Mark is what [Store.Mark] said before it was decided that the ledger may go.
	Mark uint64
	// At is the time in Unix milliseconds, if its entries are to stay in the trash; otherwise 0.
	At   int64
	Done func(error)
}

// Carry writes again each control record that is in force and stands in one of the segments, so that they can go.
type Carry struct {
	Segments []uint64
	// Obsolete are the tombstones in them that nothing is left for; they are not written again.
	Obsolete map[entry.LedgerID]bool
	Done     func(error)
}

// Check is the question whether an entry is stored already, and is the same.
type Check struct {
	Add *Add
	// ledger is whose the places are, where it may be: not those of one that was deleted and came anew meanwhile.
	ledger *ledger
	places []candidate
	upto   uint64
}

// Checked answers a Check.
type Checked struct {
	Check *Check
	// Found: the entry is stored. Same: with this body.
	Found, Same bool
	// Err: it cannot be told.
	Err error
}

// Prepared is the outcome of Ready.Prepare.
type Prepared struct {
	Segment *Segment
	Err     error
}

// Written is the outcome of Ready.Append. An error that is ENOSPC refuses the batch; any other stops the store.
type Written struct {
	Batch *Batch
	// Locations of the batch's records; read during the step only.
	Locations []segment.Location
	// End of the segment behind the batch.
	End int64
	Err error
}

// Synced is the outcome of one of Ready.Syncs. An error stops the store.
type Synced struct {
	Batch *Batch
	// Skipped: it was left to a later sync, by policy.
	Skipped bool
	Err     error
}

// Sealed is the outcome of one of Ready.Seals. An error stops the store.
type Sealed struct {
	Segment *Segment
	Err     error
}

// Replaced says that compaction has replaced segments, durably.
type Replaced struct {
	// Old are gone from the manifest.
	Old []*Segment
	// New holds what was copied; nil if nothing was.
	New *Segment
	// Obsolete are the tombstones that went with them.
	Obsolete map[entry.LedgerID]bool
	// Runs describe New.
	Runs []segment.LedgerInfo
	Done func(error)
}

// Space tells how full the disk is. It is repeated as long as the store lives: each ends what a refused write began.
type Space struct{ State State }

// Broken stops the store: something beside the log, that it stands on, has failed.
type Broken struct{ Err error }

// quit says that nothing more will be asked.
type quit struct{}

func (*Broken) event()   {}
func (*quit) event()     {}
func (*Add) event()      {}
func (*Fence) event()    {}
func (*LAC) event()      {}
func (*Limbo) event()    {}
func (*Delete) event()   {}
func (*Carry) event()    {}
func (*Checked) event()  {}
func (*Prepared) event() {}
func (*Written) event()  {}
func (*Synced) event()   {}
func (*Sealed) event()   {}
func (*Replaced) event() {}
func (*Space) event()    {}

func (a *Add) asItem() *item {
	a.item = item{
		add:    a,
		urgent: a.Recovery || a.Urgent,
		rec: segment.Record{
			Kind: segment.KindEntry, Ledger: a.Ledger, Entry: a.Entry, LAC: a.LAC, Term: a.Term,
			Nonce: a.Nonce, Checksum: a.Checksum, Body: a.Body,
		},
	}
	return &a.item
}

var (
	errFull       = &bookiewire.Error{Code: bookiewire.ReadOnly, Detail: "disk is full"}
	errNoFiles    = &bookiewire.Error{Code: bookiewire.ReadOnly, Detail: "no file descriptors for another segment"}
	errReadOnly   = &bookiewire.Error{Code: bookiewire.ReadOnly, Detail: "no new ledgers: disk is filling up"}
	errOverloaded = &bookiewire.Error{Code: bookiewire.Overloaded, Detail: "too many bytes are on their way to the disk"}
	errStale      = &bookiewire.Error{Code: bookiewire.NotAdmitted, Detail: "admission is outdated"}
	errDeleted    = &bookiewire.Error{Code: bookiewire.NotAdmitted, Detail: "ledger was deleted here"}
	errDiffers    = &bookiewire.Error{Code: bookiewire.BadRequest, Detail: "entry is stored with other bytes"}
	errTerm       = &bookiewire.Error{Code: bookiewire.BadRequest, Detail: "a term without the recovery flag"}
	errLimbo      = &bookiewire.Error{Code: bookiewire.Unknown, Detail: "records of the ledger may have been lost here"}
	errUnsealed   = &bookiewire.Error{Code: bookiewire.Unknown, Detail: "the entry here cannot be read, and its segment is being sealed"}
	errNoLedger   = &bookiewire.Error{Code: bookiewire.NoLedger}
	errNoEntry    = &bookiewire.Error{Code: bookiewire.NoEntry}
)

// fencedBy is the refusal of what is older than the ledger's term.
func fencedBy(l *ledger) error {
	return &bookiewire.Error{Code: bookiewire.Fenced, Term: l.acceptedTerm}
}

// refuse answers it with err, behind what the refusal stands on if that is not durable yet.
func (c *Core) refuse(it *item, err error, standsOnDisk bool) {
	if standsOnDisk {
		c.reply(it, err)
		return
	}
	it.err = err
	c.behind(it)
}

// stepAdd decides about an add. upto is the newest segment whose footer has been asked for the entry.
func (c *Core) stepAdd(a *Add, upto uint64) {
	it := a.asItem()
	l := c.table.lookup(a.Ledger)
	switch {
	case a.Term != 0 && !a.Recovery:
		c.reply(it, errTerm)
		return
	case l != nil && l.deleting:
		c.reply(it, errDeleted)
		return
	case l == nil:
		if err := c.admitUnknown(a); err != nil {
			c.reply(it, err)
			return
		}
	case a.Recovery && a.Term < l.acceptedTerm, !a.Recovery && (l.acceptedTerm > 0 || l.acceptedLimbo):
		c.refuse(it, fencedBy(l), l.acceptedTerm == l.term)
		return
	default:
		if a.Recovery {
			c.table.touch(l)
		}
		if c.duplicate(it, l, upto) {
			return
		}
	}
	if err := c.room(it, l == nil); err != nil {
		c.reply(it, err)
		return
	}
	if l == nil {
		l = c.table.create(a.Ledger)
	}
	if a.Term > l.acceptedTerm { // a recovery that began elsewhere
		c.raiseTerm(l, a.Term, &item{})
	}
	it.ledger = l
	if l.pending == nil {
		l.pending = map[entry.EntryID]*item{}
	}
	l.pending[a.Entry] = it
	c.enqueue(it)
}

// room decides whether the disk, and memory, have room for an add.
func (c *Core) room(it *item, newLedger bool) error {
	switch state := c.State(); {
	case it.urgent && c.exhausted:
		return c.short()
	case !it.urgent && state == Full:
		return errFull
	case !it.urgent && newLedger && state == ReadOnly:
		return errReadOnly
	case !it.add.Recovery && c.pendingBytes > 0 && c.pendingBytes+int64(len(it.add.Body)) > c.pendingLimit:
		return errOverloaded
	}
	return nil
}

// admitUnknown decides whether an add may make its ledger known here.
func (c *Core) admitUnknown(a *Add) error {
	_, buried := c.table.tomb(a.Ledger)
	switch {
	case a.Generation != c.table.generation(a.Ledger).Load():
		return errStale
	case buried && !a.Recovery:
		return errDeleted
	case c.table.lossAll.Load() && !a.Recovery:
		return errLimbo
	}
	return nil
}

// duplicate reports whether it is taken care of because the entry is here, or may be.
func (c *Core) duplicate(it *item, l *ledger, upto uint64) bool {
	if first := l.pending[it.rec.Entry]; first != nil {
		if !sameBody(first, it) {
			c.refuse(it, errDiffers, false)
			return true
		}
		first.urgent = first.urgent || it.urgent // a recovery counts on it now
		if it.rec.Term > l.term {
			c.behindTerm(it, l)
			it.after, first.after = first.after, it
			return true
		}
		first.hard = first.hard || it.add.Recovery
		it.next, first.next = first.next, it
		return true
	}
	c.found = l.find(it.rec.Entry, c.found[:0])
	if it.add.Recovery && len(c.found) > 0 && c.table.isDamaged(l.id, it.rec.Entry) {
		return c.mend(it, l)
	}
	ask := false
	newest := upto
	for _, f := range c.found {
		ask = ask || !f.footer || f.seg.seq > upto
		newest = max(newest, f.seg.seq)
	}
	if ask {
		c.checking++
		c.ready.Checks = append(c.ready.Checks, &Check{Add: it.add, ledger: l, places: append([]candidate(nil), c.found...), upto: newest})
	}
	return ask
}

// mend lets a repair store anew an entry whose copy here cannot be read, in another segment: readers take the newest copy. As long
// as the segment of the old one is not sealed, that is put off, and the segment comes to its end.
func (c *Core) mend(it *item, l *ledger) (done bool) {
	for _, f := range c.found {
		if f.footer {
			continue
		}
		if f.seg == c.active && !c.mustRoll {
			c.mustRoll = true
			c.enqueue(&item{ledger: l, vouches: true, rec: segment.Record{Kind: segment.KindLAC, Ledger: l.id, LAC: l.lac}})
		}
		c.reply(it, errUnsealed)
		return true
	}
	return false
}

func (c *Core) stepChecked(ev *Checked) {
	a := ev.Check.Add
	c.checking--
	switch {
	case ev.Err != nil:
		c.reply(a.asItem(), &bookiewire.Error{Code: bookiewire.Unknown, Detail: ev.Err.Error()})
	case !ev.Found:
		c.stepAdd(a, ev.Check.upto)
	default:
		// The answer stands on a durable copy, unless the ledger was fenced or deleted meanwhile.
		it, l := a.asItem(), c.table.lookup(a.Ledger)
		switch {
		case l != ev.Check.ledger || l.deleting:
			c.reply(it, errDeleted)
		case a.Recovery && a.Term < l.acceptedTerm, !a.Recovery && (l.acceptedTerm > 0 || l.acceptedLimbo):
			c.refuse(it, fencedBy(l), l.acceptedTerm == l.term)
		case !ev.Same:
			c.reply(it, errDiffers)
		case a.Term > l.term:
			c.behindTerm(it, l)
		default:
			c.reply(it, nil)
		}
	}
}

// behindTerm answers a duplicate of a recovery whose term is not on the disk yet: it began elsewhere, or its fence is on
// the way. As with a first copy its term counts here from now on, durably before the answer; otherwise an older recovery
// could still write after it.
func (c *Core) behindTerm(it *item, l *ledger) {
	if it.rec.Term > l.acceptedTerm {
		c.raiseTerm(l, it.rec.Term, &item{})
	}
	c.behind(it)
}

// raiseTerm accepts a term above the ledger's. Whoever was admitted to the ledger before must be so again.
func (c *Core) raiseTerm(l *ledger, term entry.Term, it *item) {
	l.acceptedTerm = term
	c.table.generation(l.id).Add(1)
	it.ledger = l
	it.rec = segment.Record{Kind: segment.KindFence, Ledger: l.id, Term: term}
	c.enqueue(it)
}

func (c *Core) stepFence(f *Fence) {
	it := &item{fenced: f.Done}
	l := c.table.lookup(f.Ledger)
	switch {
	case l != nil && l.deleting:
		l.deferred = append(l.deferred, f)
	case l != nil && f.Term < l.acceptedTerm:
		c.refuse(it, fencedBy(l), l.acceptedTerm == l.term)
	case l != nil && f.Term == l.acceptedTerm:
		it.ledger = l
		c.behind(it)
	default:
		if l == nil {
			l = c.table.create(f.Ledger)
		}
		c.raiseTerm(l, f.Term, it)
	}
}

func (c *Core) stepLAC(w *LAC) {
	it := &item{done: w.Done}
	l := c.table.lookup(w.Ledger)
	switch {
	case l == nil || l.deleting:
		c.reply(it, errNoLedger)
	case w.LAC <= l.lac:
		c.reply(it, nil)
	default:
		it.ledger = l
		it.rec = segment.Record{Kind: segment.KindLAC, Ledger: l.id, LAC: w.LAC, Nonce: w.Nonce}
		c.enqueue(it)
	}
}

func (c *Core) stepLimbo(ev *Limbo) {
	it := &item{done: ev.Done}
	l := c.table.lookup(ev.Ledger)
	switch {
	case l != nil && l.deleting:
		l.deferred = append(l.deferred, ev)
		return
	case ev.Clear && l == nil:
		c.reply(it, nil)
		return
	case l == nil:
		l = c.table.create(ev.Ledger)
	}
	if l.acceptedLimbo == !ev.Clear {
		c.behind(it)
		return
	}
	if !ev.Clear && l.acceptedTerm == 0 && l.id != everyLedger {
		c.raiseTerm(l, 1, &item{}) // stays when the limbo ends
	}
	l.acceptedLimbo = !ev.Clear
	c.table.generation(l.id).Add(1)
	kind := segment.KindLimbo
	if ev.Clear {
		kind = segment.KindLimboCleared
	}
	it.ledger = l
	it.rec = segment.Record{Kind: kind, Ledger: l.id}
	c.enqueue(it)
}

func (c *Core) stepDelete(ev *Delete) {
	it := &item{done: ev.Done}
	l := c.table.lookup(ev.Ledger)
	if l != nil && !l.deleting && l.mark.Load() != ev.Mark {
		c.reply(it, ErrMarked)
		return
	}
	c.table.generation(ev.Ledger).Add(1)
	switch {
	case l == nil:
		c.behind(it)
	case l.deleting:
		l.deferred = append(l.deferred, ev)
	default:
		sh := c.table.shard(l.id)
		sh.mu.Lock()
		l.deleting = true
		sh.mu.Unlock()
		it.ledger = l
		it.rec = segment.Record{Kind: segment.KindTombstone, Ledger: l.id, Entry: entry.EntryID(ev.At)}
		c.enqueue(it)
	}
}

// stepCarry writes again what stands in segments that are to go. What is on its way to the disk already has been
// superseded, and needs no carrying.
func (c *Core) stepCarry(ev *Carry) {
	going := map[uint64]bool{}
	for _, seq := range ev.Segments {
		going[seq] = true
	}
	var items []*item
	carry := func(l *ledger, rec segment.Record) {
		rec.Ledger = l.id
		items = append(items, &item{ledger: l, rec: rec})
	}
	for _, l := range c.table.snapshot() {
		if l.deleting {
			continue
		}
		if going[l.termIn] && l.acceptedTerm == l.term {
			carry(l, segment.Record{Kind: segment.KindFence, Term: l.term})
		}
		if going[l.limboIn] && l.acceptedLimbo == l.limbo {
			kind := segment.KindLimboCleared
			if l.limbo {
				kind = segment.KindLimbo
			}
			carry(l, segment.Record{Kind: kind})
		}
		if going[l.lacIn] {
			carry(l, segment.Record{Kind: segment.KindLAC, LAC: l.lac})
		}
	}
	for id, t := range c.table.tombSnapshot() {
		switch {
		case !going[t.in] || ev.Obsolete[id]:
		default:
			items = append(items, &item{rec: segment.Record{
				Kind: segment.KindTombstone, Ledger: id, Entry: entry.EntryID(t.deleted),
				Nonce: t.at.seq, Term: entry.Term(t.at.offset),
			}})
		}
	}
	slices.SortFunc(items, func(a, b *item) int { // so that what is written depends on what was asked for alone
		return cmp.Or(cmp.Compare(a.rec.Ledger, b.rec.Ledger), cmp.Compare(a.rec.Kind, b.rec.Kind))
	})
	for _, it := range items {
		c.enqueue(it)
	}
	c.behind(&item{done: ev.Done})
}

// stepReplaced moves what the table knows from the old segments to the new one.
func (c *Core) stepReplaced(ev *Replaced) {
	old := map[*Segment]bool{}
	for _, s := range ev.Old {
		old[s] = true
	}
	fresh := map[entry.LedgerID]segment.LedgerInfo{}
	for _, in := range ev.Runs {
		fresh[in.Ledger] = in
	}
	for _, l := range c.table.snapshot() {
		if !slices.ContainsFunc(l.runs, func(r *run) bool { return old[r.seg] }) {
			continue
		}
		sh := c.table.shard(l.id)
		sh.mu.Lock()
		kept := make([]*run, 0, len(l.runs))
		for _, r := range l.runs {
			if !old[r.seg] {
				kept = append(kept, r)
			}
		}
		l.runs = kept
		if in, ok := fresh[l.id]; ok && ev.New != nil {
			l.addRun(&run{seg: ev.New, first: in.First, last: in.Last, count: in.Entries, bytes: in.Bytes})
			ev.New.live.Add(in.Bytes)
		}
		sh.mu.Unlock()
	}
	for id, t := range c.table.tombSnapshot() { // those that were deleted meanwhile
		if !slices.ContainsFunc(t.runs, func(r *run) bool { return old[r.seg] }) {
			continue
		}
		sh := c.table.shard(id)
		sh.mu.Lock()
		t.runs = slices.DeleteFunc(slices.Clone(t.runs), func(r *run) bool { return old[r.seg] })
		if in, ok := fresh[id]; ok && ev.New != nil {
			t.runs = append(t.runs, &run{seg: ev.New, first: in.First, last: in.Last, count: in.Entries, bytes: in.Bytes})
			ev.New.trash.Add(in.Bytes)
		}
		sh.tombs[id] = t
		sh.mu.Unlock()
	}
	for id := range ev.Obsolete {
		// Not before the old segments are gone: until then the tombstone keeps the dead in them dead.
		if t, ok := c.table.tomb(id); ok && slices.ContainsFunc(ev.Old, func(s *Segment) bool { return s.seq == t.in }) {
			c.table.dropTomb(id)
		}
	}
	c.reply(&item{done: ev.Done}, nil)
}
