package sim

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/statelog"
)

// states is the kind of topics that are nothing but a bundle's state log.
//
// What is checked: calls are stored as a whole, and in their order. So what a log holds after a takeover is what it held before,
// and on top a beginning of the calls that were taken in since, without those that were told not to be stored: all that were
// told to be, and perhaps some that were told nothing. What the log is asked for meanwhile lies between what is confirmed
// and what was taken in.
type states struct {
	w      *world
	config statelog.Config
	owners [stateOwners]stateOwner
	// newest is the session of the highest epoch whose log was opened last.
	newest *stateSession
}

const (
	stateOwners = 4
	stateKeys   = 6 // of each kind
)

// stateOwner is what is known of an owner's state.
type stateOwner struct {
	name string
	// state is what it was when the session since began, with the session's first applied calls.
	state   map[string][]byte
	since   *stateSession // nil: of before the first one
	applied int
}

// stateSession is a log as long as it is open at a broker. Of its calls, the first least are in the log, and none from most on.
type stateSession struct {
	epoch entry.Epoch
	calls []*stateCall
	least int
	most  int
}

// stateCall is one call: several records of one owner, or its deletion.
type stateCall struct {
	session *stateSession
	index   int
	owner   int
	number  uint64
	records []statelog.Record
	all     bool // everything of the owner is deleted
	outcome outcome
}

func newStates(w *world) *states {
	k := &states{w: w, config: statelog.Config{
		Replication: w.replication, FloorBytes: 128 << 10 << w.rng.IntN(3), RollAge: w.limits.Age,
		MaxPendingBytes: []int64{0, 0, 32 << 10}[w.rng.IntN(3)],
	}}
	for i := range k.owners {
		k.owners[i] = stateOwner{name: fmt.Sprintf("o%d", i), state: map[string][]byte{}}
	}
	return k
}

// stateRun is a state log at its owner.
type stateRun struct {
	b       *broker
	k       *states
	topic   *topic
	log     *statelog.Log
	session *stateSession
	loaded  [stateOwners]bool
	loading bool
	asking  int // clients that wait for their calls to be taken in
}

// maxAsking keeps a log that takes nothing in for long from being asked by ever more clients: each costs all that happens.
const maxAsking = 24

func (k *states) open(ctx context.Context, b *broker, tp *topic, guard meta.Guard) (service, error) {
	return k.openLog(ctx, b, tp, guard)
}

func (k *states) openLog(ctx context.Context, b *broker, tp *topic, guard meta.Guard) (*stateRun, error) {
	b.provokeReads()
	log, err := statelog.Open(ctx, statelog.Env{Chain: b.chainEnv(guard)}, guard, tp.bundle, k.config)
	if err != nil {
		return nil, err
	}
	r := &stateRun{b: b, k: k, topic: tp, log: log, session: &stateSession{epoch: guard.Epoch, most: -1}}
	if k.newest != nil && k.newest.epoch > guard.Epoch {
		return r, nil // it only does not know yet that it is over
	}
	if s := k.newest; s != nil && s.most < 0 {
		s.most = len(s.calls)
	}
	k.newest = r.session
	k.w.trace(b.name, topicSubject(tp), "opened state log %d with epoch %d", tp.index, guard.Epoch)
	r.load()
	return r, nil
}

func (r *stateRun) lost() <-chan struct{} { return r.log.Lost() }

func (r *stateRun) shutdown() { r.log.Shutdown() }

func (r *stateRun) work() {
	w := r.k.w
	if r.session != r.k.newest || r.asking >= maxAsking {
		return
	}
	r.asking++
	r.b.sched.Go(func() {
		defer func() { r.asking-- }()
		ctx, cancel := r.b.sched.WithTimeout(context.Background(), openPatience)
		defer cancel()
		for range 1 + w.rng.IntN(4) {
			if i := w.rng.IntN(stateOwners); r.loaded[i] {
				r.call(ctx, i, nil)
			}
		}
		if w.chance(20) || r.loaded != [stateOwners]bool{true, true, true, true} {
			r.load()
		}
	})
}

// call changes something of an owner. then is told the outcome, and may be nil.
func (r *stateRun) call(ctx context.Context, owner int, then func(outcome)) {
	w := r.k.w
	w.numbers++
	c := &stateCall{session: r.session, owner: owner, number: w.numbers}
	name := r.k.owners[owner].name
	done := func(err error) {
		c.outcome = outcomeOf(err)
		w.trace(r.b.name, c.subject(r.topic), "call %d of %s: outcome %d", c.number, name, c.outcome)
		r.k.finished(r.topic, c)
		if then != nil {
			then(c.outcome)
		}
	}
	var err error
	if c.all = then == nil && w.chance(60); c.all {
		err = r.log.DeleteOwner(ctx, name, done)
	} else {
		for range 1 + w.rng.IntN(3) {
			rec := statelog.Record{Owner: name, Kind: uint8(w.rng.IntN(2)), Key: []byte{byte(w.rng.IntN(stateKeys))}, Delete: w.chance(6)}
			if !rec.Delete {
				rec.Value = stateValue(c.number, r.size())
			}
			c.records = append(c.records, rec)
		}
		err = r.log.Append(ctx, c.records, done)
	}
	if err != nil {
		return // nothing was taken in
	}
	// Nothing else runs between the taking in and this.
	c.index = len(c.session.calls)
	c.session.calls = append(c.session.calls, c)
	w.trace(r.b.name, c.subject(r.topic), "call %d of %s: %d records, all: %v", c.number, name, len(c.records), c.all)
}

func (c *stateCall) subject(tp *topic) subject { return subject{topic: tp.index + 1, number: c.number} }

// size draws how large a value is: most are small, and kept by the log's index.
func (r *stateRun) size() int {
	w := r.k.w
	switch n := w.rng.IntN(1000); {
	case n < 2:
		return w.rng.IntN(300 << 10)
	case n < 100:
		return w.rng.IntN(16 << 10)
	case n < 400:
		return w.rng.IntN(2 << 10)
	}
	return w.rng.IntN(200)
}

func stateValue(number uint64, size int) []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 8+size), number)
	for i := range size {
		b = append(b, byte(number)+byte(i))
	}
	return b
}

// finished is the log's word on a call.
func (k *states) finished(tp *topic, c *stateCall) {
	s := c.session
	switch c.outcome {
	case stored:
		if s.most >= 0 && c.index >= s.most {
			k.w.fail("I7", c.subject(tp), "call %d is confirmed, and another owner does not have it", c.number)
		}
		s.least = max(s.least, c.index+1)
	case notWritten:
		if c.index < s.least {
			k.w.fail("19", c.subject(tp), "call %d is told not to be stored, and it, or a later one, is", c.number)
		}
	case pending, unknown:
	}
}

// load has everything read that the log holds, in a task, and checked.
func (r *stateRun) load() {
	if r.loading {
		return
	}
	r.loading = true
	r.b.sched.Go(func() {
		defer func() { r.loading = false }()
		ctx, cancel := r.b.sched.WithTimeout(context.Background(), openPatience)
		defer cancel()
		for i := range stateOwners {
			if err := r.loadOwner(ctx, i); err != nil {
				return
			}
		}
	})
}

func (r *stateRun) loadOwner(ctx context.Context, i int) error {
	w, o := r.k.w, &r.k.owners[i]
	least := r.session.least
	records, err := r.log.Load(ctx, o.name)
	if r.session != r.k.newest {
		return context.Canceled // it may be told what was true once
	}
	if err != nil {
		var damaged *statelog.DamagedError
		if errors.As(err, &damaged) {
			w.fail("I10", topicSubject(r.topic), "the state of %s is damaged: %v", o.name, err)
		}
		w.trace(r.b.name, topicSubject(r.topic), "loads %s: fails", o.name)
		return err
	}
	got := map[string][]byte{}
	for _, rec := range records {
		got[stateKey(&rec)] = rec.Value
	}
	w.trace(r.b.name, topicSubject(r.topic), "loads %s: %d records", o.name, len(got))
	r.k.loaded(r, i, least, got)
	r.loaded[i] = true
	return nil
}

func stateKey(rec *statelog.Record) string { return string(rec.Kind) + string(rec.Key) }

// loaded checks what a session was told that an owner's state is. When it asked, least of its calls were confirmed.
func (k *states) loaded(r *stateRun, i, least int, got map[string][]byte) {
	o := &k.owners[i]
	s := o.since
	low, high := 0, 0
	if s != nil {
		low, high = s.least, s.most
		if s == r.session {
			low, high = least, len(s.calls)
		}
	}
	// How many of the session's calls explain it?
	at := maps.Clone(o.state)
	first, last := -1, -1
	for n := o.applied; ; n++ {
		if n >= low && sameState(at, got) {
			if first < 0 {
				first = n
			}
			last = n
		}
		if n >= high {
			break
		}
		s.calls[n].applyTo(at, i)
	}
	if first < 0 {
		sub, what := k.difference(r.topic, i, low, high, got)
		k.w.fail("I7", sub, "%s", what)
		return
	}
	if s != nil {
		s.least = max(s.least, first)
		if s != r.session {
			s.most = last
		}
	}
	if s != r.session {
		o.state, o.since, o.applied = got, r.session, 0
		return
	}
	for ; o.applied < first; o.applied++ {
		s.calls[o.applied].applyTo(o.state, i)
	}
}

func (c *stateCall) applyTo(state map[string][]byte, owner int) {
	if c.owner != owner || c.outcome == notWritten {
		return
	}
	if c.all {
		clear(state)
	}
	for j := range c.records {
		if rec := &c.records[j]; rec.Delete {
			delete(state, stateKey(rec))
		} else {
			state[stateKey(rec)] = rec.Value
		}
	}
}

func sameState(a, b map[string][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for key, v := range a {
		if w, ok := b[key]; !ok || !bytes.Equal(v, w) {
			return false
		}
	}
	return true
}

// difference tells of a key in which an owner's state differs from what it must be at the least.
func (k *states) difference(tp *topic, i, low, high int, got map[string][]byte) (subject, string) {
	o := &k.owners[i]
	want := maps.Clone(o.state)
	if o.since != nil {
		for n := o.applied; n < low; n++ {
			o.since.calls[n].applyTo(want, i)
		}
	}
	of := func(m map[string][]byte, key string) uint64 {
		if v := m[key]; len(v) >= 8 {
			return binary.BigEndian.Uint64(v)
		}
		return 0
	}
	all := maps.Clone(want)
	maps.Copy(all, got)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if a, b := of(want, key), of(got, key); a != b {
			return subject{topic: tp.index + 1, number: max(a, b)}, fmt.Sprintf("key %x of %s has the value of call %d, and must have that of %d (0: none), or of one of %d later calls",
				key, o.name, b, a, high-low)
		}
	}
	return topicSubject(tp), fmt.Sprintf("state of %s differs in a value", o.name)
}

// probe has everything loaded and something stored, and waits until the log is no longer than it may be.
func (r *stateRun) probe(done func()) {
	if r.session != r.k.newest {
		return
	}
	r.load()
	if r.loaded != [stateOwners]bool{true, true, true, true} {
		return
	}
	r.b.sched.Go(func() {
		ctx, cancel := r.b.sched.WithTimeout(context.Background(), openPatience)
		defer cancel()
		r.call(ctx, r.k.w.rng.IntN(stateOwners), func(o outcome) {
			if o == stored && r.bounded() {
				done()
			}
		})
	})
}

func (r *stateRun) bounded() bool {
	total, live := r.log.Size()
	limit := max(r.k.config.FloorBytes, 4*live)
	if total > limit {
		r.k.w.trace(r.b.name, topicSubject(r.topic), "the log has %d bytes, %d are allowed", total, limit)
	}
	return total <= limit
}

// close closes the log when everything under way is done, and looks at what the next one to open it finds.
func (r *stateRun) close(ctx context.Context) error {
	w := r.k.w
	deadline := w.now + healWithin/2
	for slices.ContainsFunc(r.session.calls, func(c *stateCall) bool { return c.outcome == pending }) {
		if !w.healed { // as long as too few bookies take entries, nothing is done
			deadline = w.now + healWithin/2
		}
		if w.now > deadline {
			w.fail("I16", topicSubject(r.topic), "a call to state log %d is never done", r.topic.index)
			break
		}
		if err := sched.Sleep(ctx, r.b.sched, 50*time.Millisecond); err != nil {
			break
		}
	}
	if err := r.log.Close(ctx); err != nil {
		return err //nolint:wrapcheck // for the trace
	}
	owner, err := w.checker.GetOwner(ctx, r.topic.bundle)
	if err != nil {
		return err //nolint:wrapcheck // likewise
	}
	if owner.Epoch != r.session.epoch {
		return nil // whoever has it now looks
	}
	again, err := r.k.openLog(ctx, r.b, r.topic, meta.Guard{Bundle: r.topic.bundle, Epoch: owner.Epoch})
	if err != nil {
		return err
	}
	for i := range stateOwners {
		if err := again.loadOwner(ctx, i); err != nil {
			again.log.Shutdown()
			return err
		}
	}
	return again.log.Close(ctx) //nolint:wrapcheck // likewise
}

// check reads the entries of the log from each disk that should have them.
func (k *states) check(tp *topic) {
	w := k.w
	rec, err := w.checker.GetChain(context.Background(), tp.chain)
	if err != nil {
		w.fail("I7", topicSubject(tp), "chain of state log %d: %v", tp.index, err)
		return
	}
	for i := range k.owners {
		if o := &k.owners[i]; o.since != k.newest {
			w.fail("I7", topicSubject(tp), "the state of %s was not found again", o.name)
		}
	}
	for _, run := range rec.Runs {
		if !w.checkClosed(run) {
			return
		}
		l := w.ghost.ledger(run.Ledger).record
		if run.End-run.First != entry.Offset(l.Last+1) {
			w.fail("20", ledgerSubject(run.Ledger), "ledger %d has %d entries, its run says %d", run.Ledger, l.Last+1, run.End-run.First)
		}
		for e := entry.EntryID(0); e <= l.Last; e++ {
			if !w.onDisk(l, e) {
				return
			}
		}
	}
}
