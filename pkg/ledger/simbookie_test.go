package ledger_test

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// simDisk is what a bookie knows of the ledger: as its memory has it, or as its disk would after a crash.
type simDisk struct {
	known bool // the ledger exists here, entries or not
	term  entry.Term
	lac   entry.EntryID
	has   map[entry.EntryID][]byte
}

// simBookie is a bookie: one log, of which a crash leaves a prefix of what was not synced. An answer leaves when all that
// was written before it is synced, whatever the answer is.
type simBookie struct {
	uuid     entry.StorageUUID
	up       bool
	stopped  bool
	full     bool // takes only recovery's writes, and is no candidate
	packed   bool // takes no entries at all
	draining bool
	queue    []func() // while stopped

	mem, disk simDisk
	unsynced  []func(*simDisk)
	waiting   []func() // answers, each with what must be synced before it
	needs     []int    // how many of unsynced
	syncing   bool
	life      int

	// What it has answered, which must hold for ever: invariants 8, 9 and 10.
	denied   map[entry.EntryID]bool
	acked    map[entry.EntryID]bool
	promised entry.Term
}

func newSimBookie(u entry.StorageUUID) *simBookie {
	return &simBookie{
		uuid: u, up: true,
		mem:    simDisk{lac: entry.NoEntry, has: map[entry.EntryID][]byte{}},
		disk:   simDisk{lac: entry.NoEntry, has: map[entry.EntryID][]byte{}},
		denied: map[entry.EntryID]bool{}, acked: map[entry.EntryID]bool{},
	}
}

// write appends a record to the log.
func (b *simBookie) write(f func(*simDisk)) {
	f(&b.mem)
	b.unsynced = append(b.unsynced, f)
}

// sync answers what waits, after a while, and goes on as long as something does.
func (s *sim) sync(b *simBookie) {
	if b.syncing || len(b.waiting) == 0 {
		return
	}
	b.syncing = true
	life, n := b.life, len(b.unsynced)
	took := time.Duration(0)
	if n > 0 {
		took = s.delay() / 2
	}
	s.after(took, func() {
		if b.life != life {
			return
		}
		for _, f := range b.unsynced[:n] {
			f(&b.disk)
		}
		b.unsynced = b.unsynced[n:]
		b.syncing = false
		var ready []func()
		for i := range b.needs {
			b.needs[i] = max(0, b.needs[i]-n)
		}
		for len(b.needs) > 0 && b.needs[0] == 0 {
			ready = append(ready, b.waiting[0])
			b.waiting, b.needs = b.waiting[1:], b.needs[1:]
		}
		for _, f := range ready {
			f()
		}
		s.sync(b)
	})
}

// crash ends the process: what was not synced survives up to somewhere, since the system may have written it.
func (s *sim) crash(b *simBookie) {
	b.up = false
	b.life++
	keep := 0
	switch n := len(b.unsynced); s.rng.IntN(3) {
	case 0:
		keep = n
	case 1:
		keep = s.rng.IntN(n + 1)
	}
	for _, f := range b.unsynced[:keep] {
		f(&b.disk)
	}
	if n := len(b.unsynced) - keep; n > 0 {
		s.lostWrites += n
	}
	b.mem = b.disk
	b.mem.has = maps.Clone(b.disk.has)
	b.unsynced, b.waiting, b.needs, b.syncing = nil, nil, nil, false
	if b.disk.term < b.promised {
		s.failf("I9: %s has term %d after a crash, and had answered with %d", s.name(b.uuid), b.disk.term, b.promised)
	}
	for e := range b.acked {
		if b.disk.has[e] == nil {
			s.failf("I10: %s has lost e%d, which it had acknowledged", s.name(b.uuid), e)
		}
	}
}

// request carries a request to a bookie and its answer back. at runs at the bookie and returns what runs there when the answer
// leaves, which returns what runs at the caller; lost is what the caller hears when the connection breaks, the request
// carried out or not.
func (s *sim) request(u entry.StorageUUID, at func(*simBookie) func() func(), lost func()) {
	b := s.bookie(u)
	loss := 0
	if !s.healed {
		loss = s.rng.IntN(60)
	}
	if loss == 1 { // on the way there
		s.after(s.delay()+20*time.Millisecond, lost)
		return
	}
	s.after(s.delay(), func() {
		arrive := func() {
			if !b.up {
				s.after(s.delay(), lost)
				return
			}
			leave := at(b)
			life := b.life
			answered := false
			b.needs = append(b.needs, len(b.unsynced))
			b.waiting = append(b.waiting, func() {
				answered = true
				reply := leave()
				if loss == 2 { // on the way back
					reply = lost
				}
				s.after(s.delay(), reply)
			})
			s.sync(b)
			// The connection breaks with the process.
			s.watch(func() bool { return answered }, func() bool { return b.life != life }, lost)
		}
		if b.stopped {
			b.queue = append(b.queue, arrive)
			return
		}
		arrive()
	})
}

// watch calls f a moment after broken, unless over comes first.
func (s *sim) watch(over, broken func() bool, f func()) {
	s.after(3*time.Millisecond, func() {
		switch {
		case over():
		case broken():
			f()
		default:
			s.watch(over, broken, f)
		}
	})
}

// admits is the metadata read of a bookie that does not know the ledger, on a writer's add.
func (s *sim) admits(b *simBookie) bool {
	f := s.record.Fragments[len(s.record.Fragments)-1]
	return s.record.State == meta.LedgerOpen && slices.ContainsFunc(f.Slots, func(x meta.Slot) bool { return x.UUID == b.uuid })
}

func (b *simBookie) add(a bookiewire.Add, admitted bool) bookiewire.Code {
	switch d := &b.mem; {
	case a.Term < d.term || (!a.Recovery && d.term > 0):
		return bookiewire.Fenced
	case !a.Recovery && b.full, b.packed:
		return bookiewire.ReadOnly
	case !a.Recovery && !d.known && !admitted:
		return bookiewire.NotAdmitted
	}
	b.write(func(d *simDisk) {
		d.known, d.term, d.lac = true, max(d.term, a.Term), max(d.lac, a.LAC)
		d.has[a.Entry] = a.Body
	})
	return bookiewire.OK
}

// fence is what a fence and a fencing read do first.
func (b *simBookie) fence(t entry.Term) bool {
	if t < b.mem.term {
		return false
	}
	if t > b.mem.term || !b.mem.known {
		b.write(func(d *simDisk) { d.known, d.term = true, max(d.term, t) })
	}
	return true
}

// acknowledges, denies and promises note what a bookie answers.
func (s *sim) acknowledges(b *simBookie, e entry.EntryID) {
	if b.denied[e] {
		s.failf("I8: bookie %s acknowledges e%d after denying it", s.name(b.uuid), e)
	}
	if b.disk.has[e] == nil {
		s.failf("I10: bookie %s acknowledges e%d, which is not on its disk", s.name(b.uuid), e)
	}
	b.acked[e] = true
}

func (s *sim) promises(b *simBookie, t entry.Term) {
	if b.disk.term < t {
		s.failf("I10: bookie %s answers with term %d, and its disk has %d", s.name(b.uuid), t, b.disk.term)
	}
	b.promised = max(b.promised, t)
}

func (s *sim) candidates() []ledger.Candidate {
	var list []ledger.Candidate
	for i, b := range s.bookies {
		// The registration of a bookie that is down stays for a while: it may be chosen in vain.
		if b.up || s.rng.IntN(4) == 0 {
			list = append(list, ledger.Candidate{
				UUID: b.uuid, Host: strconv.Itoa(i), Zone: s.zones[b.uuid], FreeBytes: 1 << 30, Writable: !b.full, Draining: b.draining,
			})
		}
	}
	return list
}

// mischief happens to a bookie, or to all of a zone, for a while.
func (s *sim) mischief() {
	b := s.bookies[s.rng.IntN(len(s.bookies))]
	span := time.Duration(10+s.rng.IntN(200)) * time.Millisecond
	if s.mood == flapping {
		span = time.Duration(2+s.rng.IntN(40)) * time.Millisecond
	}
	hit := []*simBookie{b}
	if s.rng.IntN(6) == 0 {
		hit = slices.DeleteFunc(slices.Clone(s.bookies), func(x *simBookie) bool { return s.zones[x.uuid] != s.zones[b.uuid] })
	}
	kind := s.rng.IntN(7)
	if s.mood == recoveries && s.rng.IntN(2) == 0 {
		kind = 5
	}
	switch kind {
	case 0, 1, 2:
		for _, b := range hit {
			s.logf("%s: down", s.name(b.uuid))
			s.crash(b)
			s.after(span, func() { b.up = true })
		}
	case 3, 4:
		for _, b := range hit {
			s.logf("%s: stopped", s.name(b.uuid))
			b.stopped = true
			s.after(span, b.resume)
		}
	case 5:
		for _, b := range hit {
			s.logf("%s: packed", s.name(b.uuid))
			b.packed = true
			s.after(span, func() { b.packed = false })
		}
	default:
		full := s.rng.IntN(2) == 0
		s.logf("%s: full %t, else draining", s.name(b.uuid), full)
		b.full, b.draining = full, !full
		s.stepWriter(func(c *ledger.WriterCore) { c.Candidates(s.candidates()) })
		s.after(span, func() {
			b.full, b.draining = false, false
			s.stepWriter(func(c *ledger.WriterCore) { c.Candidates(s.candidates()) })
		})
	}
}

func (b *simBookie) resume() {
	b.stopped = false
	queue := b.queue
	b.queue = nil
	for _, f := range queue {
		f()
	}
}

// tailRead is a reader elsewhere that asks a bookie for its LAC: what it may see must stay (invariant 4).
func (s *sim) tailRead() {
	b := s.bookies[s.rng.IntN(len(s.bookies))]
	s.exposed = max(s.exposed, b.mem.lac)
}

func (s *sim) copies(e entry.EntryID) int {
	n := 0
	for _, b := range s.bookies {
		if b.disk.has[e] != nil {
			n++
		}
	}
	return n
}

// holders returns the slots of e's write set, in the fragment that metadata names, whose bookies have it on disk.
func (s *sim) holders(e entry.EntryID) (quorum.Set, *quorum.Quorum) {
	f := ledger.FragmentOf(s.record.Fragments, e)
	zones := make([]string, len(f.Slots))
	for i := range f.Slots {
		zones[i] = f.Slots[i].Zone
	}
	q := quorum.MustNew(quorum.Config{Ensemble: s.r.Ensemble, WriteQuorum: s.r.WriteQuorum, AckQuorum: s.r.AckQuorum, MinZones: s.r.MinZones}, zones)
	var have quorum.Set
	q.WriteSet(e).Each(func(i int) {
		if s.bookie(f.Slots[i].UUID).disk.has[e] != nil {
			have |= 1 << i
		}
	})
	return have, q
}
