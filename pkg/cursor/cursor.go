package cursor

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Generation numbers the moves of a subscription: each [Cursor.Seek] starts the next one. Acknowledgements
// carry the generation under which their messages were delivered.
type Generation uint32

// Ticket stands for "everything that is applied by now". It is redeemed once [Cursor.Durable] has reached it.
type Ticket uint64

// Meta is what a subscription is, apart from where it stands.
type Meta struct {
	UUID    entry.UUID
	Name    string       // at most MaxName bytes
	Initial entry.Offset // where it started
	Created int64        // Unix milliseconds, ≥ 0
}

// MaxName is the longest name of a subscription, in bytes.
const MaxName = 4096

// RetryReason says why a message is to be delivered again.
type RetryReason uint8

// The reasons of a retry.
const (
	RetryNacked       RetryReason = iota + 1 // the consumer gave it back
	RetryConsumerGone                        // its consumer left without acknowledging
)

// Retry is what is remembered of an unacknowledged message that is to be delivered again. NotBefore is a time of the clock of
// the process that has the cursor. What is written is how long that is from then on, and whoever loads it waits as long by
// its own clock: no two clocks are compared, of which one may be wrong by any amount.
type Retry struct {
	Count     uint32 // deliveries before the next one
	NotBefore int64  // Unix milliseconds, ≥ 0; 0 is at once
	KeyHash   uint32 // murmur3_32 of its key; 0 when it has none or it does not matter
	Reason    RetryReason
}

// Refusals of acknowledgements. Nothing was changed.
var (
	// ErrStaleGeneration refuses what belongs to deliveries from before a seek.
	ErrStaleGeneration = errors.New("the subscription was moved since the message was delivered")
	// ErrBeyondEnd refuses offsets that the topic has not reached.
	ErrBeyondEnd = errors.New("offset is beyond the end of the topic")
	// ErrDeleted is returned by Load for a subscription whose deletion had begun; see [Purge].
	ErrDeleted = errors.New("subscription is deleted")
)

// Cursor is one subscription's acknowledgement state.
//
// Below the floor everything is acknowledged. Above it, acknowledged offsets lie in pages of 65,536 offsets,
// each as runs or as a bitmap, so that memory follows the pattern of acknowledgement and has no cap: 30
// million holes of one message each take some 8 MiB. The page is also the unit of persistence: a change is
// written as a delta of its page, and once deltas have cost as much as the page, as the page anew, which
// supersedes them. So the cost of an acknowledgement does not grow with the number of holes, and what has to
// be read on loading is at most about twice what is held.
//
// The rejected alternative is Pulsar's: a sorted map of individually deleted ranges, written as one value.
// Each write costs all holes, so that a cap on the persisted ones becomes necessary, and with it the silent
// redelivery of what was acknowledged.
//
// Records name the generation in their keys, and the state record that raises floor or generation comes
// before the deletion of what it makes superfluous. So any prefix of a batch's records is a valid state, and
// a batch may be spread over several state-log entries.
type Cursor struct {
	meta       Meta
	generation Generation
	floor      entry.Offset
	pages      map[uint64]*page
	above      uint64 // acknowledged offsets above the floor
	retries    RangeMap[Retry]

	metaDirty  bool
	stateDirty bool
	dirty      []uint64 // pages with pending changes; may name some that are gone
	garbage    []pageKeys
	stale      []Record // deletions of records that loading found superseded

	taken    uint64 // sequence of the last batch
	inFlight []inFlight
	durable  uint64 // sequence of the last confirmed batch
	solid    entry.Offset
}

type inFlight struct {
	seq   uint64
	floor entry.Offset
}

// page is the state of pageSize offsets.
type page struct {
	acked pageSet
	// pend are acknowledged indices that no record has yet, pendRetry such whose retry changed. whole asks for
	// the page to be written anew instead.
	pend, pendRetry []run
	whole, dirty    bool

	pageKeys
	snapBytes, deltaBytes int
}

// pageKeys says which records of a page are in the log: its snapshot, and deltas from snapSeq+1 to seq.
type pageKeys struct {
	generation   Generation
	number       uint64
	hasSnap      bool
	snapSeq, seq uint64
}

// maxOffset bounds offsets, so that the end of a page is one too. A topic does not get there.
const maxOffset entry.Offset = 1 << 62

const (
	// maxPending is the number of separate changes of a page beyond which it is written anew.
	maxPending = 1024
	// minDeltaBytes is what deltas of a page may cost before its size is looked at.
	minDeltaBytes = 1024
	// maxDeltas bounds the records that loading a page has to merge.
	maxDeltas = 128
)

// New makes the cursor of a new subscription that starts at meta.Initial. Its records are pending.
func New(meta Meta) (*Cursor, error) {
	if err := meta.validate(); err != nil {
		return nil, fmt.Errorf("create cursor: %w", err)
	}
	return &Cursor{
		meta: meta, floor: meta.Initial, solid: meta.Initial, pages: map[uint64]*page{},
		metaDirty: true, stateDirty: true,
	}, nil
}

func (m Meta) validate() error {
	switch {
	case m.UUID.IsZero():
		return errors.New("subscription without UUID")
	case m.Name == "" || len(m.Name) > MaxName:
		return fmt.Errorf("subscription's name has %d bytes, want 1 to %d", len(m.Name), MaxName)
	case m.Initial > maxOffset:
		return fmt.Errorf("initial offset %d is above %d", uint64(m.Initial), uint64(maxOffset))
	case m.Created < 0:
		return fmt.Errorf("creation time %d is negative", m.Created)
	}
	return nil
}

// Meta returns what the subscription is.
func (c *Cursor) Meta() Meta { return c.meta }

// Generation returns the current generation.
func (c *Cursor) Generation() Generation { return c.generation }

// Floor returns the lowest offset that is not acknowledged, durable or not.
func (c *Cursor) Floor() entry.Offset { return c.floor }

// TrimFloor returns the offset below which the subscription needs nothing any more, whatever happens: the
// lowest of the durable floor, the floors on their way to the log, and the applied one.
func (c *Cursor) TrimFloor() entry.Offset {
	floor := min(c.solid, c.floor)
	for _, f := range c.inFlight {
		floor = min(floor, f.floor)
	}
	return floor
}

// Backlog returns the number of unacknowledged offsets below end, the topic's next offset.
func (c *Cursor) Backlog(end entry.Offset) uint64 {
	if end <= c.floor {
		return 0
	}
	if all := uint64(end - c.floor); all > c.above {
		return all - c.above
	}
	return 0
}

// Holes returns the number of acknowledged ranges above the floor. It looks at every page.
func (c *Cursor) Holes() uint64 {
	n := uint64(0)
	for number, p := range c.pages {
		n += uint64(p.acked.countRuns())
		if next := c.pages[number+1]; next != nil && p.acked.nextClear(pageMask) == pageSize && next.acked.nextSet(0) == 0 {
			n-- // one range over two pages
		}
	}
	if p := c.pages[uint64(c.floor)>>pageBits]; p != nil && uint64(c.floor)&pageMask != 0 {
		n-- // what lies below the floor
	}
	return n
}

// Pages returns the number of pages held.
func (c *Cursor) Pages() int { return len(c.pages) }

// Acked reports whether o is acknowledged.
func (c *Cursor) Acked(o entry.Offset) bool {
	if o < c.floor {
		return true
	}
	p := c.pages[uint64(o)>>pageBits]
	i := int(o & pageMask)
	return p != nil && p.acked.nextSet(i) == i
}

// NextUnacked returns the lowest unacknowledged offset ≥ o.
func (c *Cursor) NextUnacked(o entry.Offset) entry.Offset {
	o = max(o, c.floor)
	for {
		p := c.pages[uint64(o)>>pageBits]
		if p == nil {
			return o
		}
		i := p.acked.nextClear(int(o & pageMask))
		o = o&^pageMask + entry.Offset(i)
		if i < pageSize {
			return o
		}
	}
}

// Missing appends to dst what of r is not acknowledged, in order, joined.
func (c *Cursor) Missing(dst []Range, r Range) []Range {
	own := len(dst) // ranges before it are not ours to join
	for o := c.NextUnacked(r.First); o < r.End; o = c.NextUnacked(o) {
		end := o&^pageMask + pageSize
		if p := c.pages[uint64(o)>>pageBits]; p != nil {
			end = o&^pageMask + entry.Offset(p.acked.nextSet(int(o&pageMask)))
		}
		end = min(end, r.End)
		if n := len(dst); n > own && dst[n-1].End == o {
			dst[n-1].End = end
		} else {
			dst = append(dst, Range{First: o, End: end})
		}
		o = end
	}
	return dst
}

// Ack acknowledges ranges that were delivered under g. end is the topic's next offset: a range beyond it is
// refused whole with [ErrBeyondEnd], a g that is over with [ErrStaleGeneration]. What is acknowledged
// already stays so.
func (c *Cursor) Ack(g Generation, end entry.Offset, ranges ...Range) (Ticket, error) {
	if g != c.generation {
		return 0, ErrStaleGeneration
	}
	for _, r := range ranges {
		if r.End > min(end, maxOffset) {
			return 0, fmt.Errorf("acknowledge %v of a topic that ends at %d: %w", r, uint64(end), ErrBeyondEnd)
		}
	}
	for _, r := range ranges {
		c.ack(r)
	}
	return c.Ticket(), nil
}

// AckCumulative acknowledges everything below upTo, like [Cursor.Ack]. Expiry and eviction are this too.
func (c *Cursor) AckCumulative(g Generation, end, upTo entry.Offset) (Ticket, error) {
	return c.Ack(g, end, Range{First: 0, End: upTo})
}

func (c *Cursor) ack(r Range) {
	r.First = max(r.First, c.floor)
	if r.Empty() {
		return
	}
	if c.retries.Len() > 0 {
		c.retries.Erase(r)
	}
	if r.First == c.floor {
		c.raise(r.End)
		return
	}
	for o := r.First; o < r.End; {
		number := uint64(o) >> pageBits
		first := int(o & pageMask)
		last := pageMask
		if uint64(r.End-1)>>pageBits == number {
			last = int((r.End - 1) & pageMask)
		}
		p := c.page(number)
		if added := p.acked.add(first, last); added > 0 {
			c.above += uint64(added)
			if !p.whole {
				p.pend, _ = addRun(p.pend, first, last)
			}
			c.changed(p)
		}
		o += entry.Offset(last - first + 1)
	}
}

// page returns the page of a number, and makes it if need be.
func (c *Cursor) page(number uint64) *page {
	p := c.pages[number]
	if p == nil {
		p = &page{pageKeys: pageKeys{generation: c.generation, number: number}}
		c.pages[number] = p
		if number == uint64(c.floor)>>pageBits {
			p.fill(c.floor)
		}
	}
	return p
}

// fill sets what lies below the floor in the floor's own page, so that it is one run.
func (p *page) fill(floor entry.Offset) {
	if i := int(floor & pageMask); i > 0 {
		p.acked.add(0, i-1)
	}
}

func (c *Cursor) changed(p *page) {
	if !p.dirty {
		p.dirty = true
		c.dirty = append(c.dirty, p.number)
	}
	if len(p.pend)+len(p.pendRetry) > maxPending {
		p.whole, p.pend, p.pendRetry = true, nil, nil
	}
}

// raise lifts the floor to at least to, and over what is acknowledged from there on.
func (c *Cursor) raise(to entry.Offset) {
	old := c.floor
	c.floor = to // so that NextUnacked starts there
	c.floor = c.NextUnacked(to)
	c.stateDirty = true
	firstPage, floorPage := uint64(old)>>pageBits, uint64(c.floor)>>pageBits
	if passed := floorPage - firstPage; passed < uint64(len(c.pages)) {
		for number := firstPage; number < floorPage; number++ {
			if p := c.pages[number]; p != nil {
				c.dropPage(p, old)
			}
		}
	} else {
		var numbers []uint64
		for number := range c.pages {
			if number < floorPage {
				numbers = append(numbers, number)
			}
		}
		slices.Sort(numbers) // records must not depend on the order of a map
		for _, number := range numbers {
			c.dropPage(c.pages[number], old)
		}
	}
	if p := c.pages[floorPage]; p != nil {
		before := p.acked.n
		if floorPage == firstPage {
			before -= int(old & pageMask)
		}
		p.fill(c.floor)
		c.above -= uint64(before - (p.acked.n - int(c.floor&pageMask)))
		if p.acked.n == int(c.floor&pageMask) && !p.inLog() && c.retries.Len() == 0 {
			delete(c.pages, floorPage) // it says no more than the floor
		}
	}
}

// dropPage forgets a page below the floor; old is the floor as it was while the page counted.
func (c *Cursor) dropPage(p *page, old entry.Offset) {
	n := p.acked.n
	if p.number == uint64(old)>>pageBits {
		n -= int(old & pageMask)
	}
	c.above -= uint64(n)
	delete(c.pages, p.number)
	if p.inLog() {
		c.garbage = append(c.garbage, p.pageKeys)
	}
}

func (k pageKeys) inLog() bool { return k.hasSnap || k.seq > k.snapSeq }

// SetRetry remembers for what of r is unacknowledged that it is to be delivered again. Refusals are as for
// [Cursor.Ack].
func (c *Cursor) SetRetry(g Generation, end entry.Offset, r Range, retry Retry) (Ticket, error) {
	if g != c.generation {
		return 0, ErrStaleGeneration
	}
	if r.End > min(end, maxOffset) {
		return 0, fmt.Errorf("set retry of %v of a topic that ends at %d: %w", r, uint64(end), ErrBeyondEnd)
	}
	retry.NotBefore = max(retry.NotBefore, 0)
	for _, m := range c.Missing(nil, r) {
		c.retries.Set(m, retry)
		for o := m.First; o < m.End; {
			number := uint64(o) >> pageBits
			part := m.Intersect(Range{First: o, End: o&^pageMask + pageSize})
			p := c.page(number)
			if !p.whole {
				p.pendRetry, _ = addRun(p.pendRetry, int(part.First&pageMask), int((part.End-1)&pageMask))
			}
			c.changed(p)
			o = part.End
		}
	}
	return c.Ticket(), nil
}

// Retry returns what is remembered of o, if it is to be delivered again.
func (c *Cursor) Retry(o entry.Offset) (Retry, bool) { return c.retries.Get(o) }

// Retries is every range that is to be delivered again, in order. The caller must not change it.
func (c *Cursor) Retries() *RangeMap[Retry] { return &c.retries }

// Seek moves the subscription: everything below to is acknowledged, nothing from there on. What was delivered
// before belongs to an older generation from now on.
func (c *Cursor) Seek(to entry.Offset) Ticket {
	for _, number := range slices.Sorted(maps.Keys(c.pages)) {
		if p := c.pages[number]; p.inLog() {
			c.garbage = append(c.garbage, p.pageKeys)
		}
	}
	c.generation++
	c.floor, c.above, c.stateDirty = min(to, maxOffset), 0, true
	c.pages, c.dirty = map[uint64]*page{}, nil
	c.retries.Clear()
	return c.Ticket()
}

// Ticket returns the ticket for what is applied by now.
func (c *Cursor) Ticket() Ticket {
	if c.Pending() {
		return Ticket(c.taken + 1)
	}
	return Ticket(c.taken)
}

// Durable returns the highest ticket that can be redeemed.
func (c *Cursor) Durable() Ticket { return Ticket(c.durable) }

// Pending reports whether something is applied that no batch has.
func (c *Cursor) Pending() bool {
	return c.metaDirty || c.stateDirty || len(c.dirty) > 0 || len(c.garbage) > 0 || len(c.stale) > 0
}

// Batch is the records of everything that was pending.
type Batch struct {
	Seq     uint64
	Records []Record // in the order in which they must reach the log
}

// Split cuts the batch's records into consecutive groups of at most maxBytes each (a single larger record is
// a group of its own). Each group may be an entry of the log.
func (b Batch) Split(maxBytes int) [][]Record {
	if len(b.Records) == 0 {
		return nil
	}
	var groups [][]Record
	first, size := 0, 0
	for i, r := range b.Records {
		if n := r.Size(); size+n > maxBytes && i > first {
			groups = append(groups, b.Records[first:i])
			first, size = i, n
		} else {
			size += n
		}
	}
	return append(groups, b.Records[first:])
}

// Take returns the records of all pending changes; ok is false when there are none. Batches must reach the
// log in the order of Take, and be confirmed in it; several may be under way. now is the time in Unix milliseconds.
func (c *Cursor) Take(now int64) (b Batch, ok bool) {
	if !c.Pending() {
		return Batch{}, false
	}
	c.taken++
	b.Seq = c.taken
	if c.metaDirty {
		b.Records = append(b.Records, c.metaRecord(false))
		c.metaDirty = false
	}
	if c.stateDirty {
		b.Records = append(b.Records, c.stateRecord())
		c.stateDirty = false
	}
	b.Records = append(b.Records, c.stale...)
	c.stale = nil
	for _, k := range c.garbage {
		b.Records = k.deletions(b.Records, c.meta.UUID)
	}
	c.garbage = nil
	slices.Sort(c.dirty)
	for _, number := range c.dirty {
		if p := c.pages[number]; p != nil && p.dirty {
			b.Records = c.pageRecords(b.Records, p, now)
		}
	}
	c.dirty = c.dirty[:0]
	c.inFlight = append(c.inFlight, inFlight{seq: c.taken, floor: c.floor})
	return b, true
}

// pageRecords appends the records of a page's pending changes.
func (c *Cursor) pageRecords(dst []Record, p *page, now int64) []Record {
	p.dirty = false
	if !p.whole {
		if p.number == uint64(c.floor)>>pageBits {
			p.pend = cutRuns(p.pend, int(c.floor&pageMask))
			p.pendRetry = cutRuns(p.pendRetry, int(c.floor&pageMask))
		}
		if len(p.pend)+len(p.pendRetry) == 0 {
			return dst // the floor says it all
		}
		if p.deltaBytes < max(minDeltaBytes, p.snapBytes) && p.seq-p.snapSeq < maxDeltas {
			p.seq++
			r := c.deltaRecord(p, now)
			p.deltaBytes += r.Size()
			p.pend, p.pendRetry = p.pend[:0], p.pendRetry[:0]
			return append(dst, r)
		}
	}
	old := p.pageKeys
	old.hasSnap = false // it is overwritten
	p.acked.shrink()
	p.hasSnap, p.snapSeq = true, p.seq
	r := c.pageRecord(p, now)
	p.snapBytes, p.deltaBytes = r.Size(), 0
	p.whole, p.pend, p.pendRetry = false, nil, nil
	return old.deletions(append(dst, r), c.meta.UUID)
}

// cutRuns returns what of runs is at or above floor.
func cutRuns(runs []run, floor int) []run {
	for len(runs) > 0 && int(runs[0].last) < floor {
		runs = runs[1:]
	}
	if len(runs) > 0 && int(runs[0].first) < floor {
		runs[0].first = uint16(floor)
	}
	return runs
}

// Confirm says that the batch seq, and so every earlier one, is durable.
func (c *Cursor) Confirm(seq uint64) {
	if seq > c.taken {
		panic(fmt.Sprintf("cursor: batch %d is confirmed, but only %d were taken", seq, c.taken))
	}
	i, _ := slices.BinarySearchFunc(c.inFlight, seq+1, func(f inFlight, seq uint64) int { return cmp.Compare(f.seq, seq) })
	if i == 0 {
		return
	}
	c.solid, c.durable = c.inFlight[i-1].floor, c.inFlight[i-1].seq
	c.inFlight = slices.Delete(c.inFlight, 0, i)
}

// Delete returns the records that forget the subscription, in the order in which they must reach the log. The
// cursor must not be used afterwards. When only the first of them get there, [Load] returns [ErrDeleted] and
// [Purge] finishes the work.
func (c *Cursor) Delete() []Record {
	records := []Record{c.metaRecord(true)}
	records = append(records, c.stale...)
	for _, k := range c.garbage {
		records = k.deletions(records, c.meta.UUID)
	}
	for _, number := range slices.Sorted(maps.Keys(c.pages)) {
		records = c.pages[number].deletions(records, c.meta.UUID)
	}
	return append(records,
		Record{Kind: KindState, Key: c.meta.UUID[:], Delete: true},
		Record{Kind: KindSubscription, Key: c.meta.UUID[:], Delete: true})
}
