package statelog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Log is a bundle's state log at its owner. It is safe for concurrent use.
//
// A call's records join the entry being gathered. An entry leaves at once while few are under way, so a lone
// acknowledgement is not kept waiting; under load it fills while others are written, which makes the groups. The index
// changes when entries are confirmed, in their order: it never knows what is not stored.
type Log struct {
	env     Env
	cfg     Config
	c       *chain.Chain
	pending *budget.Budget

	ctx    context.Context //nolint:containedctx // ends with the log; rewriting lasts longer than the call that starts it
	cancel context.CancelFunc
	s      sched.Scheduler
	g      *sched.Group

	mu sync.Mutex
	state
	next      entry.Offset // number of the next entry
	gathering *batch
	queue     []*batch // full, not yet handed to the chain
	inFlight  int
	failing   bool
	err       error
	unstored  int64     // bytes of records on their way there
	before    []uint64  // owners of the entry that was handed to the chain last
	rebuild   *rebuild  // under way; nil: none is
	rewriting bool      // a goroutine rewrites
	stuck     bool      // … and met damage; until something is superseded
	notBefore time.Time // … or failed otherwise; until then
	patient   bool      // appends wait for a log that is being shortened
	room      chan struct{}
	lostFired bool
}

// batch is an entry in the making, then under way.
type batch struct {
	body   []byte
	count  uint32
	owners []uint64 // hashes
	held   []pendingKey
	dones  []func(error)
	user   int64 // bytes charged to pending
}

// maxInFlight is how many entries are under way before calls are gathered; flushBytes, how much is gathered at most.
const (
	maxInFlight = 2
	flushBytes  = 256 << 10
)

// Open takes a bundle's state log over: it shuts the former owner out, recovers and replays. Errors are chain.Open's; a
// *[FormatError] when an entry is of a newer version. The log is created if it does not exist.
func Open(ctx context.Context, env Env, guard meta.Guard, bundle meta.BundleID, cfg Config) (*Log, error) {
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	s := sched.OrReal(env.Chain.Sched)
	if env.Now == nil {
		env.Now = s.Now
	}
	cfg = cfg.withDefaults()
	l := &Log{env: env, cfg: cfg, s: s, g: sched.NewGroup(s), state: newState(), patient: true}
	l.pending = budget.NewWaiting(cfg.MaxPendingBytes, func(ctx context.Context, ready <-chan struct{}) error {
		_, err := s.Wait(ctx, sched.Channels{ready})
		return err //nolint:wrapcheck // as a context says it
	})
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	var err error
	l.c, err = chain.Open(ctx, env.Chain, guard, meta.StateChain(bundle), chain.Config{
		Replication: cfg.Replication, RollBytes: l.rollBytes(), RollAge: cfg.RollAge, Urgent: true, Describe: describe,
		OnConfirmed: l.onConfirmed, OnLost: l.onLost,
	})
	if err != nil {
		l.cancel()
		return nil, fmt.Errorf("open state log of %s: %w", bundle, err)
	}
	l.next = l.c.NextOffset()
	replayed, began := newState(), s.Now()
	if err := l.replay(ctx, &replayed); err != nil {
		l.Shutdown()
		return nil, fmt.Errorf("replay state log of %s: %w", bundle, err)
	}
	env.Metrics.replayed(s.Now().Sub(began))
	l.mu.Lock()
	l.state, l.before = replayed, replayed.last
	l.c.SetRollBytes(l.rollBytes())
	l.maybeRewrite()
	l.mu.Unlock()
	return l, nil
}

// Append stores records, and calls done once they are durable, or have failed: with a *ledger.AppendError, whose outcome
// tells whether they may be stored all the same. Calls are stored, and done, in their order. Append waits, as long as ctx
// lasts, while too much is under way; an error of its own means that nothing was taken in. The records are copied. done
// must not block.
func (l *Log) Append(ctx context.Context, records []Record, done func(error)) error {
	size := int64(0)
	for i := range records {
		r := &records[i]
		if r.Owner == "" || len(r.Owner) > MaxOwner || len(r.Key) > MaxKey || len(r.Value) > MaxValue {
			return fmt.Errorf("append record of owner %.80q, key of %d and value of %d bytes: %w", r.Owner, len(r.Key), len(r.Value), ErrTooLarge)
		}
		size += int64(encodedSize(r.Owner, r.Key, r.Value))
	}
	return l.append(ctx, size, done, func(yield func(op, uint8, string, []byte, []byte)) {
		for i := range records {
			r := &records[i]
			if r.Delete {
				yield(opDelete, r.Kind, r.Owner, r.Key, nil)
			} else {
				yield(opPut, r.Kind, r.Owner, r.Key, r.Value)
			}
		}
	})
}

// DeleteOwner deletes all records of an owner.
func (l *Log) DeleteOwner(ctx context.Context, owner string, done func(error)) error {
	if owner == "" || len(owner) > MaxOwner {
		return fmt.Errorf("delete owner %.80q: %w", owner, ErrTooLarge)
	}
	return l.append(ctx, int64(encodedSize(owner, nil, nil)), done, func(yield func(op, uint8, string, []byte, []byte)) {
		yield(opDeleteOwner, 0, owner, nil, nil)
	})
}

func (l *Log) append(ctx context.Context, size int64, done func(error), records func(func(op, uint8, string, []byte, []byte))) error {
	if err := l.pending.Acquire(ctx, size); err != nil {
		return fmt.Errorf("append to state log: wait for room: %w", err)
	}
	l.mu.Lock()
	err := l.awaitRoom(ctx, size)
	if err == nil {
		err = l.err
	}
	if err != nil {
		l.mu.Unlock()
		l.pending.Release(size)
		return fmt.Errorf("append to state log: %w", err)
	}
	// What fits into one entry stays in one entry. What does not has entries of its own, which go to the chain together,
	// and so fail together from the first one that does.
	split := size > MaxEntry
	if g := l.gathering; g != nil && (split || int64(len(g.body))+size > MaxEntry) {
		l.full()
	}
	records(func(o op, kind uint8, owner string, key, value []byte) {
		if g := l.gathering; g != nil && len(g.body)+encodedSize(owner, key, value) > headerSize+MaxEntry {
			l.full()
		}
		g := l.gather()
		g.body = appendRecord(g.body, o, kind, owner, key, value)
		g.count++
		g.owners = append(g.owners, hashOf(owner))
		k := pendingKey{owner: owner}
		if o != opDeleteOwner {
			k.name = itemName(kind, key)
		}
		g.held = append(g.held, k)
		l.index.hold(k.owner, k.name)
	})
	l.unstored += size
	g := l.gather()
	g.dones = append(g.dones, done)
	g.user += size
	if split || len(g.body) >= flushBytes {
		l.full()
	}
	l.flush()
	l.mu.Unlock()
	return nil
}

// gather returns the entry being gathered. mu is held, here and below.
func (l *Log) gather() *batch {
	if l.gathering == nil {
		l.gathering = &batch{body: appendHeader(make([]byte, 0, 512))}
	}
	return l.gathering
}

// full ends the entry being gathered.
func (l *Log) full() {
	if l.gathering != nil {
		l.queue = append(l.queue, l.gathering)
		l.gathering = nil
	}
}

// flush hands entries to the chain: the full ones, and the one being gathered if few are under way.
func (l *Log) flush() {
	if l.failing {
		return
	}
	if l.gathering != nil && len(l.queue) == 0 && l.inFlight < maxInFlight {
		l.full()
	}
	for _, b := range l.queue {
		l.send(b)
	}
	l.queue = l.queue[:0]
	if cap(l.queue) > 64 {
		l.queue = nil
	}
}

func (l *Log) send(b *batch) {
	now := l.env.Now().UnixMilli()
	if l.next > 0 {
		size := len(b.body)
		b.body = appendBefore(b.body, l.before)
		b.count++
		l.unstored += int64(len(b.body) - size)
	}
	b.owners = compact(b.owners)
	l.before = b.owners
	putHeader(b.body, header{seq: l.next, time: now, count: b.count})
	l.next++
	l.inFlight++
	l.c.Append(chain.Append{
		Body: b.body, Span: 1, Time: now, Tag: b,
		Done: func(_ entry.Position, err error) { l.finish(b, err) },
	})
}

// onConfirmed applies what is stored to the index.
func (l *Log) onConfirmed(entries []chain.ConfirmedEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range entries {
		e := &entries[i]
		b, ok := e.Tag.(*batch)
		if !ok {
			panic("statelog: a foreign entry was confirmed")
		}
		if l.rebuild != nil {
			l.rebuild.missed = append(l.rebuild.missed, chain.Entry{Position: e.Position, Body: e.Body})
		}
		if err := l.applyEntry(&l.state, chain.Entry{Position: e.Position, Body: e.Body}); err != nil {
			panic(fmt.Sprintf("statelog: own entry does not parse: %v", err))
		}
		l.last = b.owners
		l.env.Metrics.stored(len(b.held))
		l.letGo(b)
	}
	l.c.SetRollBytes(l.rollBytes())
	l.maybeRewrite()
}

// letGo ends what a batch holds back.
func (l *Log) letGo(b *batch) {
	for _, k := range b.held {
		l.index.release(k.owner, k.name)
	}
	if len(b.held) > 0 {
		l.stuck = false
	}
	b.held = nil
}

func (l *Log) finish(b *batch, err error) {
	l.mu.Lock()
	l.inFlight--
	l.unstored -= int64(len(b.body) - headerSize)
	l.letGo(b)
	l.wakeWaiters()
	if err != nil && l.err == nil {
		l.failing = true
	}
	if l.failing && l.inFlight == 0 {
		if next, ok := l.c.Resume(); ok {
			l.next, l.failing, l.before = next, false, l.last
		}
	}
	var orphans []*batch
	lost := l.err
	if lost != nil && l.lostFired {
		orphans = l.takeAll()
	} else {
		l.flush()
	}
	l.mu.Unlock()
	l.tell(b, err)
	for _, o := range orphans { // whatever became of b
		l.tell(o, notWritten(lost))
	}
}

func (l *Log) tell(b *batch, err error) {
	if b.user > 0 {
		l.pending.Release(b.user)
	}
	for _, done := range b.dones {
		done(err)
	}
}

// takeAll takes what the chain never got.
func (l *Log) takeAll() []*batch {
	l.full()
	all := l.queue
	l.queue = nil
	for _, b := range all {
		l.unstored -= int64(len(b.body) - headerSize)
		l.letGo(b)
	}
	return all
}

// onLost is told before what fails of it is done.
func (l *Log) onLost(err error) {
	if errors.Is(err, chain.ErrClosed) {
		err = ErrClosed
	}
	l.mu.Lock()
	if l.err == nil || errors.Is(l.err, ErrClosed) {
		l.err = err
	}
	l.lostFired = true
	l.wakeWaiters()
	var orphans []*batch
	if l.inFlight == 0 {
		orphans = l.takeAll()
	}
	l.mu.Unlock()
	l.cancel()
	for _, o := range orphans {
		l.tell(o, notWritten(err))
	}
}

// Load returns the live records of an owner, by kind and key. Values are read from the log as needed; they are the
// caller's. It sees what is stored, not what is under way. A *[DamagedError] refuses this owner's state, whole; an
// *[UnreadableError] does for as long as no bookie can give an entry that holds some of it.
func (l *Log) Load(ctx context.Context, owner string) ([]Record, error) {
	for {
		g, err := l.closeGap(ctx, hashOf(owner))
		if err == nil && g != nil {
			err = g.refuse(owner)
		}
		if err != nil {
			return nil, fmt.Errorf("load state of %s: %w", owner, err)
		}
		l.mu.Lock()
		if l.doubt != nil {
			err := l.doubt
			l.mu.Unlock()
			return nil, fmt.Errorf("load state of %s: %w", owner, err)
		}
		var items []rewrite
		if o := l.index.owners[owner]; o != nil {
			items = make([]rewrite, 0, len(o.items))
			for _, it := range o.items {
				items = append(items, rewrite{it: it, at: it.at, inline: it.inline, bad: it.bad})
			}
		}
		l.mu.Unlock()
		err = l.values(ctx, items)
		if errors.Is(err, chain.ErrTrimmed) {
			continue // rewritten meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("load state of %s: %w", owner, err)
		}
		out := make([]Record, len(items))
		for i := range items {
			r := &items[i]
			if r.bad != nil {
				kind, key := r.it.name[0], []byte(r.it.name[1:])
				return nil, &DamagedError{Owner: owner, Kind: kind, Key: key, Position: r.at, Err: r.bad}
			}
			out[i] = Record{Owner: owner, Kind: r.it.name[0], Key: []byte(r.it.name[1:]), Value: r.value}
		}
		slices.SortFunc(out, func(a, b Record) int {
			if a.Kind != b.Kind {
				return int(a.Kind) - int(b.Kind)
			}
			return slices.Compare(a.Key, b.Key)
		})
		return out, nil
	}
}

// values fills in the values of records, reading each entry that holds some once. What is damaged is marked.
func (l *Log) values(ctx context.Context, items []rewrite) error {
	slices.SortFunc(items, func(a, b rewrite) int { return a.at.Compare(b.at) })
	for i := 0; i < len(items); {
		if items[i].inline != nil || items[i].bad != nil {
			items[i].value = slices.Clone(items[i].inline)
			i++
			continue
		}
		at := items[i].at
		at.Batch = 0
		got, _, err := l.c.Read(ctx, at, 1)
		if err != nil {
			return err //nolint:wrapcheck // the caller does
		}
		if len(got) == 0 || got[0].Position != at {
			return fmt.Errorf("entry %v: %w", at, chain.ErrTrimmed)
		}
		first := i
		for i < len(items) && items[i].at.Ledger == at.Ledger && items[i].at.Entry == at.Entry {
			i++
		}
		group := items[first:i]
		err = eachRecord(got[0].Body, func(n int32, r *stored) error {
			for len(group) > 0 && group[0].at.Batch == n {
				group[0].value, group[0].bad = r.value, r.bad
				group = group[1:]
			}
			return nil
		})
		for j := range group {
			group[j].bad = err
			if err == nil {
				group[j].bad = errNoRecord
			}
		}
	}
	return nil
}

var errNoRecord = errors.New("the entry does not have the record")

// Unreadable returns an *[UnreadableError] if some of an owner's state lies in an entry that could not be read so far. It does not
// try again.
func (l *Log) Unreadable(owner string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if g, missing := l.gaps[hashOf(owner)]; missing {
		return g.refuse(owner)
	}
	return nil
}

// Owners returns the owners that have live records, sorted.
func (l *Log) Owners() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.index.Owners()
}

// Size returns the bytes of all entries in the log, and those of live records.
func (l *Log) Size() (total, live int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	live, _ = l.index.Live()
	return l.total, live
}

// Chain returns the log's ledgers, for describing them.
func (l *Log) Chain() *chain.Chain { return l.c }

// Lost is closed when the ownership is lost, or the log shut down. Err says why.
func (l *Log) Lost() <-chan struct{} { return l.c.Lost() }

// Err returns why the log takes no more records; nil when all is well.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Close stores what was appended and closes the log's ledger, so that the next owner has nothing to recover. If ctx ends
// first, the log is shut down all the same.
func (l *Log) Close(ctx context.Context) error {
	l.mu.Lock()
	if l.err == nil {
		l.err = ErrClosed
	}
	l.full()
	l.flush()
	l.wakeWaiters()
	l.mu.Unlock()
	l.cancel()
	l.g.Wait()
	err := l.c.Close(ctx)
	l.Shutdown()
	if err != nil && !errors.Is(err, chain.ErrClosed) {
		return fmt.Errorf("close state log: %w", err)
	}
	return nil
}

// Shutdown drops the log. It returns once everything under way was told its outcome.
func (l *Log) Shutdown() {
	l.mu.Lock()
	if l.err == nil {
		l.err = ErrClosed
	}
	l.wakeWaiters()
	l.mu.Unlock()
	l.cancel()
	l.c.Shutdown()
	l.g.Wait()
	l.mu.Lock()
	orphans := l.takeAll()
	l.mu.Unlock()
	for _, o := range orphans {
		l.tell(o, notWritten(ErrClosed))
	}
}
