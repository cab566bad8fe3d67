package ledgerstore

import (
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// everyLedger stands for all ledgers in a limbo record: it could not be told whose records were lost. It is the
// highest id that can be written, the last of the last restore generation, and is never given to a ledger.
const everyLedger entry.LedgerID = 1<<63 - 1

const (
	tableShards     = 64
	generationCount = 4096
)

// table is what the store knows of each ledger. The core alone writes; anybody reads, under a shard's lock, which is
// never held over I/O or a callback.
//
// Memory: a ledger's state is small; of its entries only those in unsealed segments are held one by one (16 bytes
// each), of each sealed segment the range alone. Holding all locations was rejected: a disk has more entries than
// memory has room, and the footers on the disk already are that index.
type table struct {
	shards [tableShards]shard
	// generations count fences and deletions. They are shared by the ledgers that hash to the same one, so that
	// they need no memory per unknown ledger; a neighbour's fence costs an admission one more metadata read.
	generations [generationCount]atomic.Uint64
	// lossAll mirrors everyLedger's limbo.
	lossAll atomic.Bool
	// marks is the newest mark that a ledger was given. The core's own.
	marks uint64
}

type shard struct {
	mu      sync.RWMutex
	ledgers map[entry.LedgerID]*ledger
	tombs   map[entry.LedgerID]tomb
	// waits are channels closed when the ledger's LAC grows or the ledger goes; kept while somebody waits.
	waits map[entry.LedgerID]*lacWait
}

type lacWait struct {
	grown   chan struct{}
	waiters int
}

// logPlace is a position in the log.
type logPlace struct {
	seq    uint64
	offset int64
}

func (p logPlace) after(q logPlace) bool {
	return p.seq > q.seq || p.seq == q.seq && p.offset > q.offset
}

// tomb says that all records of a ledger before at are dead.
type tomb struct {
	at logPlace
	// in is the segment that holds the newest record that says so.
	in uint64
	// deleted is when, in Unix milliseconds; 0 if it does not matter. runs are what is in the trash of the ledger.
	deleted int64
	runs    []*run
}

// ledger is the state of one ledger.
type ledger struct {
	id entry.LedgerID

	// What is durable. Written by the core under the shard's lock.

	durable bool // something of the ledger is on disk; until then readers do not see it
	term    entry.Term
	limbo   bool
	lac     entry.EntryID
	runs    []*run // by segment sequence
	// unreadable is what is stored and was found unreadable. Readers and scrubs write it, too.
	unreadable unreadable
	// termIn, limboIn and lacIn are the segments that hold the record that term, limbo and lac stand on; 0: none.
	termIn, limboIn, lacIn uint64

	// What is accepted and on its way to the disk. The core's own, except that deleting and the ledger's
	// presence in its shard change under the lock.

	acceptedTerm  entry.Term
	acceptedLimbo bool
	pending       map[entry.EntryID]*item
	queued        int // items of the ledger that are not durable yet
	deleting      bool
	deferred      []Event // came while deleting; handled after it

	// mark is another one after each add of a recovery or a repair, copies of what is here included, and before it is
	// answered: somebody may count on what is here then. The core writes it, anybody reads.
	mark atomic.Uint64
}

// run is what one segment holds of one ledger.
type run struct {
	seg         *Segment
	first, last entry.EntryID
	count       int64
	bytes       int64
	// slots are sorted by entry, while the segment is unsealed; then nil, and the footer has them.
	slots []slot
}

type slot struct {
	entry  entry.EntryID
	offset uint32
	length uint32
}

func newTable(firstGeneration uint64) *table {
	t := &table{}
	for i := range t.shards {
		t.shards[i].ledgers = map[entry.LedgerID]*ledger{}
		t.shards[i].tombs = map[entry.LedgerID]tomb{}
		t.shards[i].waits = map[entry.LedgerID]*lacWait{}
	}
	for i := range t.generations {
		t.generations[i].Store(firstGeneration)
	}
	return t
}

func hashLedger(id entry.LedgerID) uint64 { return uint64(id) * 0x9e3779b97f4a7c15 >> 20 }

func (t *table) shard(id entry.LedgerID) *shard { return &t.shards[hashLedger(id)%tableShards] }

func (t *table) generation(id entry.LedgerID) *atomic.Uint64 {
	return &t.generations[hashLedger(id)%generationCount]
}

// lookup is for the core, which needs no lock to read what it alone writes.
func (t *table) lookup(id entry.LedgerID) *ledger { return t.shard(id).ledgers[id] }

func (t *table) tomb(id entry.LedgerID) (tomb, bool) {
	m, ok := t.shard(id).tombs[id]
	return m, ok
}

func (t *table) create(id entry.LedgerID) *ledger {
	l := &ledger{id: id, lac: entry.NoEntry}
	t.touch(l)
	s := t.shard(id)
	s.mu.Lock()
	s.ledgers[id] = l
	s.mu.Unlock()
	return l
}

// touch gives the ledger a mark that none has had.
func (t *table) touch(l *ledger) {
	t.marks++
	l.mark.Store(t.marks)
}

func (t *table) mark(id entry.LedgerID) uint64 {
	s := t.shard(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	if l := s.ledgers[id]; l != nil {
		return l.mark.Load()
	}
	return 0
}

// forget drops a ledger of which nothing became durable.
func (t *table) forget(l *ledger) {
	s := t.shard(l.id)
	s.mu.Lock()
	delete(s.ledgers, l.id)
	s.mu.Unlock()
}

// snapshot returns the ledgers as they are now, in no order.
func (t *table) snapshot() []*ledger {
	var all []*ledger
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.RLock()
		for _, l := range s.ledgers {
			all = append(all, l)
		}
		s.mu.RUnlock()
	}
	return all
}

// count counts the ledgers that are stored here and that f holds for; it is called under the shard's lock.
func (t *table) count(f func(*ledger) bool) int {
	n := 0
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.RLock()
		for id, l := range s.ledgers {
			if l.durable && id != everyLedger && f(l) {
				n++
			}
		}
		s.mu.RUnlock()
	}
	return n
}

// addEntry files an entry that has become durable.
func (l *ledger) addEntry(seg *Segment, id entry.EntryID, offset int64, length uint32) {
	var r *run
	if n := len(l.runs); n > 0 && l.runs[n-1].seg == seg {
		r = l.runs[n-1]
	} else {
		r = &run{seg: seg, first: id, last: id}
		l.addRun(r)
		seg.holders = append(seg.holders, l)
	}
	r.first, r.last = min(r.first, id), max(r.last, id)
	s := slot{entry: id, offset: uint32(offset), length: length}
	if n := len(r.slots); n == 0 || r.slots[n-1].entry < id {
		r.slots = append(r.slots, s)
	} else {
		i, found := slices.BinarySearchFunc(r.slots, id, compareSlot)
		if found {
			return // a copy of what is here already
		}
		r.slots = slices.Insert(r.slots, i, s)
	}
	r.count++
	r.bytes += int64(length)
	seg.live.Add(int64(length))
}

func compareSlot(s slot, id entry.EntryID) int {
	switch {
	case s.entry < id:
		return -1
	case s.entry > id:
		return 1
	}
	return 0
}

func (l *ledger) addRun(r *run) {
	i := sort.Search(len(l.runs), func(i int) bool { return l.runs[i].seg.seq >= r.seg.seq })
	l.runs = slices.Insert(l.runs, i, r)
}

// candidate is a place where an entry is, or (footer) may be.
type candidate struct {
	seg  *Segment
	slot slot
	// footer: the segment is sealed and its range covers the entry; its footer knows.
	footer bool
	// count is how many entries of the ledger the segment has, if footer.
	count int64
	// uncached: it is to be read from the disk, whatever is in memory.
	uncached bool
}

// find collects where id may be, surest first: a candidate that is no footer is certain and the only one.
func (l *ledger) find(id entry.EntryID, into []candidate) []candidate {
	for i := len(l.runs) - 1; i >= 0; i-- {
		r := l.runs[i]
		if id < r.first || id > r.last {
			continue
		}
		if r.slots == nil {
			into = append(into, candidate{seg: r.seg, footer: true, count: r.count})
			continue
		}
		if at, found := slices.BinarySearchFunc(r.slots, id, compareSlot); found {
			return append(into[:0], candidate{seg: r.seg, slot: r.slots[at]})
		}
	}
	return into
}

func (l *ledger) info() LedgerInfo {
	in := LedgerInfo{
		Ledger: l.id, Term: l.term, LAC: l.lac, Limbo: l.limbo,
		First: entry.NoEntry, Last: entry.NoEntry,
	}
	for _, r := range l.runs {
		if in.First == entry.NoEntry || r.first < in.First {
			in.First = r.first
		}
		in.Last = max(in.Last, r.last)
		in.Entries += r.count
		in.Bytes += r.bytes
	}
	return in
}

// raiseLAC is called under the shard's lock.
func (s *shard) raiseLAC(l *ledger, lac entry.EntryID, in uint64) {
	if lac <= l.lac {
		return
	}
	l.lac, l.lacIn = lac, in
	s.wake(l.id)
}

func (s *shard) wake(id entry.LedgerID) {
	if w := s.waits[id]; w != nil {
		close(w.grown)
		delete(s.waits, id)
	}
}

// lacOrWait returns the LAC if it is above after, and otherwise a channel that is closed when it has grown; leave
// must be called then.
func (t *table) lacOrWait(id entry.LedgerID, after entry.EntryID) (lac entry.EntryID, grown chan struct{}) {
	s := t.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	lac = entry.NoEntry
	if l := s.ledgers[id]; l != nil && l.durable {
		lac = l.lac
	}
	if lac > after {
		return lac, nil
	}
	w := s.waits[id]
	if w == nil {
		w = &lacWait{grown: make(chan struct{})}
		s.waits[id] = w
	}
	w.waiters++
	return lac, w.grown
}

func (t *table) leave(id entry.LedgerID, grown chan struct{}) {
	s := t.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.waits[id]
	if w == nil || w.grown != grown {
		return // woken and gone
	}
	if w.waiters--; w.waiters == 0 {
		delete(s.waits, id)
	}
}

func (t *table) tombSnapshot() map[entry.LedgerID]tomb {
	all := map[entry.LedgerID]tomb{}
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.RLock()
		for id, m := range s.tombs {
			all[id] = m
		}
		s.mu.RUnlock()
	}
	return all
}

func (t *table) dropTomb(id entry.LedgerID) {
	s := t.shard(id)
	s.mu.Lock()
	delete(s.tombs, id)
	s.mu.Unlock()
}
