package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// AskLAC is an upper bound of [Reader.Read]: it bounds the read by the highest LAC that bookies know of.
const AskLAC = entry.NoEntry - 1

const (
	// maxReadEntries limits the entries of one read.
	maxReadEntries = 1 << 16
	// longPoll is how long a bookie may hold a wait for its LAC.
	longPoll = 10 * time.Second
	// pollFirst is how soon the record is looked at again after it has changed; the pause doubles up to longPoll, or up
	// to pollRecovery during a recovery.
	pollFirst    = 250 * time.Millisecond
	pollRecovery = 2 * time.Second
	// avoidReads is how long a bookie that failed a read is asked last.
	avoidReads = 2 * time.Second
)

// MissingError says that an entry which must exist was not had from any of its bookies. It is never the end of a ledger.
type MissingError struct {
	Ledger entry.LedgerID
	Entry  entry.EntryID
	// Negative bookies deny having the entry; Unknown ones did not answer or could not tell. With Unknown > 0 a later try may succeed.
	Negative, Unknown int
	// Err is the last failure, or what was wrong with the record.
	Err error
}

// Error says which entry, and what its bookies answered.
func (e *MissingError) Error() string {
	return fmt.Sprintf("read entry %d of ledger %d: %d bookies deny it, %d could not tell: %v", e.Entry, e.Ledger, e.Negative, e.Unknown, e.Err)
}

// Unwrap returns the last failure.
func (e *MissingError) Unwrap() error { return e.Err }

// Reader reads the entries of one ledger, open or closed. It is safe for concurrent use, holds no goroutine between calls, and
// follows the ledger's record: repair moves copies of closed ledgers too.
type Reader struct {
	env Env

	mu     sync.Mutex
	ledger meta.Ledger
	lac    entry.EntryID // highest ever seen
	shaky  map[entry.StorageUUID]time.Time
}

// NewReader returns a reader of the ledger with the given record, which may be old. env needs Bookies and Metadata.
func NewReader(env Env, l meta.Ledger) *Reader {
	r := &Reader{env: env.withDefaults(), lac: entry.NoEntry}
	r.learn(l)
	return r
}

func (r *Reader) learn(l meta.Ledger) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.Rev < r.ledger.Rev {
		return
	}
	r.ledger = l
	if l.State >= meta.LedgerClosed {
		r.lac = max(r.lac, l.Last)
	}
}

func (r *Reader) raise(lac entry.EntryID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lac = max(r.lac, lac)
}

func (r *Reader) record() (meta.Ledger, entry.EntryID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ledger, r.lac
}

// Ledger returns the record as the reader last saw it.
func (r *Reader) Ledger() meta.Ledger {
	l, _ := r.record()
	l.Fragments = slices.Clone(l.Fragments)
	return l
}

// LAC returns the highest LAC that the reader has seen; the last entry, once it has seen the ledger closed.
func (r *Reader) LAC() entry.EntryID {
	_, lac := r.record()
	return lac
}

// Read returns entries from first on, in order without gaps: at least one if first ≤ upTo, further ones as long as
// they fit maxBytes and come from the same fragment. upTo is a bound that the caller knows to be confirmed, or [AskLAC]. No
// entries and no error mean that first lies above it. The caller owns the bodies; their checksums were verified.
// The error is a *[MissingError] when no bookie gave first, meta.ErrNotFound when the ledger is being deleted, or that of ctx.
func (r *Reader) Read(ctx context.Context, first, upTo entry.EntryID, maxBytes int) ([]Entry, error) {
	if first < 0 {
		return nil, fmt.Errorf("read entry %d: entries start at 0", first)
	}
	l, lac := r.record()
	if l.State == meta.LedgerDeleting {
		return nil, deleted(l.ID)
	}
	if upTo == AskLAC {
		if upTo = lac; first > lac && l.State < meta.LedgerClosed {
			upTo = r.askLAC(ctx, first)
		}
	}
	if l.State >= meta.LedgerClosed {
		upTo = min(upTo, l.Last)
	}
	if first > upTo {
		return nil, ctx.Err()
	}
	f, end := fragmentWithEnd(l.Fragments, first)
	entries, miss := r.readRange(ctx, l, f, first, min(upTo, end), maxBytes)
	if miss == nil {
		return entries, nil
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	// The record may be old: the writer has changed the ensemble, or repair has moved the copies.
	fresh, err := r.refresh(ctx)
	if err != nil {
		miss.Err = errors.Join(miss.Err, err)
		return nil, miss
	}
	if fresh.State == meta.LedgerDeleting {
		// What the bookies say of it is no loss, and a tombstone has no fragments to ask.
		return nil, deleted(l.ID)
	}
	if fresh.State >= meta.LedgerClosed && first > fresh.Last {
		miss.Err = fmt.Errorf("the ledger is closed and ends at entry %d", fresh.Last)
		return nil, miss
	}
	f2, end := fragmentWithEnd(fresh.Fragments, first)
	if sameFragment(f, f2) && miss.Unknown == 0 {
		return nil, miss
	}
	if entries, miss = r.readRange(ctx, fresh, f2, first, min(upTo, end), maxBytes); miss != nil {
		return nil, miss
	}
	return entries, nil
}

func deleted(l entry.LedgerID) error {
	return fmt.Errorf("read ledger %d: it was deleted: %w", l, meta.ErrNotFound)
}

func fragmentWithEnd(fragments []meta.Fragment, e entry.EntryID) (meta.Fragment, entry.EntryID) {
	for i := len(fragments) - 1; i >= 0; i-- {
		if fragments[i].First <= e {
			if i+1 < len(fragments) {
				return fragments[i], fragments[i+1].First - 1
			}
			return fragments[i], 1<<63 - 1
		}
	}
	return fragments[0], 1<<63 - 1
}

func (r *Reader) refresh(ctx context.Context) (meta.Ledger, error) {
	ctx, cancel := r.env.Sched.WithTimeout(ctx, r.env.Config.RequestTimeout)
	defer cancel()
	l, err := r.env.Metadata.GetLedger(ctx, r.Ledger().ID)
	if err != nil {
		return l, fmt.Errorf("refresh ledger: %w", err)
	}
	r.learn(l)
	return l, nil
}

// stripe is one residue class of a range: entries that lie on the same slots.
type stripe struct {
	first    entry.EntryID
	replicas []int // slots, in the order to ask
	asked    int   // of replicas
	pending  int
	askedAt  time.Time
	got      []bookiewire.ReadEntry
	done     bool
	missing  MissingError
}

type stripeReply struct {
	stripe int
	uuid   entry.StorageUUID
	reply  bookiewire.ReadReply
	err    error
}

// mailbox takes replies for one reader.
type mailbox struct {
	mu   sync.Mutex
	in   []stripeReply
	come chan struct{} // has a token when in is not empty
}

func (m *mailbox) put(r stripeReply) {
	m.mu.Lock()
	m.in = append(m.in, r)
	m.mu.Unlock()
	select {
	case m.come <- struct{}{}:
	default:
	}
}

func (m *mailbox) take() []stripeReply {
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.in
	m.in = nil
	return in
}

// readRange reads first … to, all within fragment f. With striping, each residue class of entries is read from a bookie
// that has all of it, at the same time, and the results are woven together.
func (r *Reader) readRange(ctx context.Context, l meta.Ledger, f meta.Fragment, first, to entry.EntryID, maxBytes int) ([]Entry, *MissingError) {
	ctx, cancel := r.env.Sched.WithTimeout(ctx, r.env.Config.RequestTimeout)
	defer cancel()
	n := 1
	if l.WriteQuorum < l.Ensemble {
		n = int(min(entry.EntryID(l.Ensemble), to-first+1))
	}
	stride := 1
	if n > 1 || l.WriteQuorum < l.Ensemble {
		stride = l.Ensemble
	}
	replies := mailbox{come: make(chan struct{}, 1)}
	stripes := make([]stripe, n)
	ask := func(i int) {
		s := &stripes[i]
		uuid := f.Slots[s.replicas[s.asked]].UUID
		s.asked++
		s.pending++
		s.askedAt = r.env.Sched.Now()
		q := bookiewire.Read{
			Ledger: l.ID, First: s.first, Stride: uint32(stride),
			MaxEntries: uint32(min((to-s.first)/entry.EntryID(stride)+1, maxReadEntries)),
			MaxBytes:   uint32(max(1, min(maxBytes/n, 1<<30))),
		}
		r.env.Bookies.Read(ctx, uuid, q, func(reply bookiewire.ReadReply, err error) {
			replies.put(stripeReply{i, uuid, reply, err})
		})
	}
	q := quorumOf(l.Replication, f.Slots)
	for i := range stripes {
		s := &stripes[i]
		s.first = first + entry.EntryID(i)
		q.WriteSet(s.first).Each(func(slot int) { s.replicas = append(s.replicas, slot) })
		r.order(s.replicas, f, l.ID)
		ask(i)
	}
	speculate, stop := sched.After(r.env.Sched, r.env.Config.SpeculateAfter)
	defer func() { stop() }()
	for left := n; left > 0; {
		const come, late = 0, 1
		switch i, ended := r.env.Sched.Wait(ctx, sched.Channels{come: replies.come, late: speculate}); i {
		case come:
			for _, m := range replies.take() {
				s := &stripes[m.stripe]
				s.pending--
				if s.done {
					continue
				}
				if s.take(l.ID, stride, m.reply, m.err); s.got != nil {
					s.done = true
					left--
					continue
				}
				r.shake(m.uuid, m.err)
				if s.asked < len(s.replicas) {
					ask(m.stripe)
				} else if s.pending == 0 {
					s.done = true
					left--
				}
			}
		case late:
			speculate, stop = sched.After(r.env.Sched, r.env.Config.SpeculateAfter)
			now := r.env.Sched.Now()
			for i := range stripes {
				if s := &stripes[i]; !s.done && s.asked < len(s.replicas) && now.Sub(s.askedAt) >= r.env.Config.SpeculateAfter {
					if r.env.Metrics != nil {
						r.env.Metrics.speculative.Inc()
					}
					ask(i)
				}
			}
		default:
			for i := range stripes {
				if s := &stripes[i]; !s.done {
					s.missing.Unknown += s.pending
					s.missing.Err = ended
				}
			}
			left = 0
		}
	}
	if stripes[0].got == nil {
		miss := stripes[0].missing
		miss.Ledger, miss.Entry = l.ID, first
		return nil, &miss
	}
	return weave(stripes, first, to), nil
}

// take judges a reply: the run of entries with good checksums from the first one on, or what its absence means.
func (s *stripe) take(l entry.LedgerID, stride int, reply bookiewire.ReadReply, err error) {
	if err == nil {
		want := s.first
		for i, e := range reply.Entries {
			if e.Entry != want || entry.Checksum(l, e.Entry, e.Body) != e.Checksum {
				reply.Entries = reply.Entries[:i]
				break
			}
			want += entry.EntryID(stride)
		}
		if len(reply.Entries) > 0 {
			s.got = reply.Entries
			return
		}
		err = &bookiewire.Error{Code: bookiewire.BadChecksum, Detail: "entry was read damaged"}
	}
	s.missing.Err = err
	switch codeOf(err) {
	case bookiewire.NoEntry, bookiewire.NoLedger:
		s.missing.Negative++
	default:
		s.missing.Unknown++
	}
}

// weave joins the stripes as long as there is no gap.
func weave(stripes []stripe, first, to entry.EntryID) []Entry {
	total := 0
	for i := range stripes {
		total += len(stripes[i].got)
	}
	entries := make([]Entry, 0, total)
	for e := first; e <= to; e++ {
		i := int(e - first)
		s := &stripes[i%len(stripes)]
		if i/len(stripes) >= len(s.got) {
			break
		}
		got := s.got[i/len(stripes)]
		entries = append(entries, Entry{ID: got.Entry, Body: got.Body})
	}
	return entries
}

// order sorts the slots to ask: those that failed lately come last, and different ledgers start at different slots.
func (r *Reader) order(slots []int, f meta.Fragment, l entry.LedgerID) {
	turn := int(uint64(l) % uint64(len(slots)))
	rotated := slices.Concat(slots[turn:], slots[:turn])
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.env.Sched.Now()
	slices.SortStableFunc(rotated, func(a, b int) int {
		sa, sb := now.Before(r.shaky[f.Slots[a].UUID]), now.Before(r.shaky[f.Slots[b].UUID])
		switch {
		case sa == sb:
			return 0
		case sb:
			return -1
		}
		return 1
	})
	copy(slots, rotated)
}

// shake remembers that a bookie could not answer a read.
func (r *Reader) shake(u entry.StorageUUID, err error) {
	if c := codeOf(err); c == bookiewire.NoEntry || c == bookiewire.NoLedger {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shaky == nil {
		r.shaky = map[entry.StorageUUID]time.Time{}
	}
	r.shaky[u] = r.env.Sched.Now().Add(avoidReads)
}

// askLAC asks the bookies of the last fragment for their LAC and returns the highest seen. One that is at wanted is
// enough: a bookie that hangs holds nobody up then.
func (r *Reader) askLAC(ctx context.Context, wanted entry.EntryID) entry.EntryID {
	ctx, cancel := r.env.Sched.WithTimeout(ctx, r.env.Config.RequestTimeout)
	defer cancel()
	l, _ := r.record()
	all := sched.NewGroup(r.env.Sched)
	for _, s := range last(l.Fragments).Slots {
		all.Go(func() {
			reply, err := r.env.Bookies.WaitLAC(ctx, s.UUID, bookiewire.WaitLAC{Ledger: l.ID, After: entry.NoEntry})
			if err != nil {
				return
			}
			if r.raise(reply.LAC); reply.LAC >= wanted {
				cancel()
			}
		})
	}
	all.Wait()
	return r.LAC()
}

// WaitLAC waits until the LAC is above after, or the ledger is closed, and returns it; the last entry, when closed. A
// ledger that is fenced or being recovered is not closed: the wait goes on. The error is that of ctx, or meta.ErrNotFound
// when the ledger is gone or being deleted.
func (r *Reader) WaitLAC(ctx context.Context, after entry.EntryID) (lac entry.EntryID, closed bool, err error) {
	pause := pollFirst
	for {
		l, lac := r.record()
		if l.State == meta.LedgerDeleting {
			return lac, false, deleted(l.ID)
		}
		if l.State == meta.LedgerClosed {
			return l.Last, true, nil
		}
		if lac > after {
			return lac, false, nil
		}
		if ctx.Err() != nil {
			return lac, false, ctx.Err()
		}
		if r.pollLAC(ctx, l, after, pause) {
			continue
		}
		// The last entry's own LAC is on no bookie, and a writer may have moved on to others: the record tells.
		fresh, err := r.refresh(ctx)
		switch {
		case errors.Is(err, meta.ErrNotFound):
			return lac, false, err
		case err != nil:
			// The metadata store is away; bookies are still asked.
			pause = min(2*pause, longPoll)
		case fresh.State != l.State || !sameFragment(last(fresh.Fragments), last(l.Fragments)):
			pause = pollFirst
		case fresh.State == meta.LedgerInRecovery:
			pause = min(2*pause, pollRecovery) // the end is near
		default:
			pause = min(2*pause, longPoll)
		}
	}
}

// pollLAC waits at all bookies of the last fragment, at most for the given time; true once the LAC is above after.
func (r *Reader) pollLAC(ctx context.Context, l meta.Ledger, after entry.EntryID, atMost time.Duration) bool {
	ctx, cancel := r.env.Sched.WithTimeout(ctx, atMost)
	defer cancel()
	all := sched.NewGroup(r.env.Sched)
	for _, s := range last(l.Fragments).Slots {
		all.Go(func() {
			for pause := 50 * time.Millisecond; ctx.Err() == nil; pause = min(2*pause, time.Second) {
				reply, err := r.env.Bookies.WaitLAC(ctx, s.UUID, bookiewire.WaitLAC{Ledger: l.ID, After: after, Timeout: longPoll})
				if err == nil && reply.LAC > after {
					r.raise(reply.LAC)
					cancel()
					return
				}
				// A bookie that fails, or answers without having waited, is not asked again at once.
				_ = sched.Sleep(ctx, r.env.Sched, pause)
			}
		})
	}
	all.Wait()
	return r.LAC() > after
}
