package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Options say what is run. The zero value of a field lets the seed decide, where it says so.
type Options struct {
	Seed uint64
	// Faulty is how long faults are injected; 0: 20 simulated seconds.
	Faulty time.Duration
	// Loss is that one request to etcd, or reply, in so many is lost; 0: the seed decides; -1: none.
	Loss int
	// Faults are the kinds of faults that may happen; empty: the seed picks some.
	Faults []Fault
	// Record keeps the whole trace, for the story of a failure. Whole tells all of it, not only what touches the subject.
	Record, Whole bool
}

// Failure is a violated invariant.
type Failure struct {
	Options   Options
	Invariant string
	Detail    string
	// Story are the lines of the trace that touch the ledger, entry or append concerned.
	Story []string
	// Shape is the cluster that the seed made.
	Shape string
}

// Error prints everything that is needed to look into it.
func (f *Failure) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "invariant %s is violated: %s\nseed %d, %s, faults %v\nreplay: go test ./integration/sim -run 'Seed/%d' -v\n",
		f.Invariant, f.Detail, f.Options.Seed, f.Shape, f.Options.Faults, f.Options.Seed)
	for _, l := range f.Story {
		b.WriteString(l)
		b.WriteByte('\n')
	}
	return b.String()
}

// Result is what a run was like.
type Result struct {
	// Sum is of the whole trace.
	Sum [32]byte
	// Simulated is how long it took in simulated time; Events how many there were.
	Simulated time.Duration
	Events    int
	// Appends by outcome: pending, stored, not written, unknown.
	Appends [4]int
	// Closed ledgers, Boots of bookies, Checked entries after boots, Served entries to tail readers.
	Closed, Boots, Checked, Served int
	// Trimmed ledgers, and Compactions of bookies.
	Trimmed, Compactions int
	Shape                string
}

const clusterName = "sim"

var clusterUUID = entry.UUID{0x5e, 0xed}

// topic is one chain under one bundle.
type topic struct {
	index  int
	bundle meta.BundleID
	chain  meta.ChainID
}

// world is one cluster under one seed.
type world struct {
	*kernel
	opt     Options
	healed  bool
	ending  bool // no more work is given
	failure *Failure

	replication  meta.Replication
	limits       chain.Limits
	drainTimeout time.Duration
	negativeWait time.Duration
	faults       []Fault
	levels       []ledger.AckLevel
	pace         time.Duration

	etcd    *etcd
	net     *network
	brokers []*broker
	bookies []*bookieProcess
	topics  []*topic
	names   map[entry.StorageUUID]string
	disks   int
	harmed  int // disks that were wiped, or are rotten
	checker *meta.Store
	ghost   *ghost
	numbers uint64
	tally   [4]int
	closes  int
	cluster entry.UUID // its record's
	// compactions that did something, and ledgers deleted from topics.
	compactions, trims int
	served             int
	probed             map[int]bool
}

var shapes = []meta.Replication{
	{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2},
	{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2},
	{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2},
	{Ensemble: 4, WriteQuorum: 3, AckQuorum: 2},
	{Ensemble: 5, WriteQuorum: 3, AckQuorum: 2},
	{Ensemble: 3, WriteQuorum: 2, AckQuorum: 2},
	{Ensemble: 2, WriteQuorum: 2, AckQuorum: 2},
	{Ensemble: 2, WriteQuorum: 2, AckQuorum: 1},
	{Ensemble: 4, WriteQuorum: 4, AckQuorum: 2, MinZones: 2},
	{Ensemble: 4, WriteQuorum: 4, AckQuorum: 3, MinZones: 2},
	{Ensemble: 3, WriteQuorum: 3, AckQuorum: 3},
	{Ensemble: 1, WriteQuorum: 1, AckQuorum: 1},
}

func newWorld(opt Options) *world {
	k := newKernel(opt.Seed)
	k.record = opt.Record
	if opt.Faulty == 0 {
		opt.Faulty = 20 * time.Second
	}
	if opt.Loss == 0 {
		opt.Loss = []int{0, 0, 200, 60, 20}[k.rng.IntN(5)]
	}
	w := &world{
		kernel: k, opt: opt, replication: pick(k, shapes), names: map[entry.StorageUUID]string{}, probed: map[int]bool{},
		limits: chain.Limits{
			Bytes: int64(1<<10) << k.rng.IntN(8), Entries: int64(4) << k.rng.IntN(8), Age: time.Duration(1+k.rng.IntN(30)) * time.Second,
		},
		negativeWait: []time.Duration{time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond}[k.rng.IntN(3)],
		drainTimeout: time.Duration(k.rng.IntN(1000)) * time.Millisecond,
		pace:         time.Duration(5+k.rng.IntN(60)) * time.Millisecond,
	}
	w.faults = opt.Faults
	if len(w.faults) == 0 {
		w.faults = pickFaults(k)
	}
	w.opt.Faults = w.faults
	w.levels = [][]ledger.AckLevel{
		{ledger.AckQuorum},
		{ledger.AckQuorum, ledger.AckQuorum, ledger.AckAll},
		{ledger.AckQuorum, ledger.AckOne, ledger.AckNone, ledger.AckAll},
	}[k.rng.IntN(3)]
	w.ghost = newGhost(w)
	w.etcd = &etcd{kernel: k, model: etcdmodel.New(), loss: max(w.opt.Loss, 0), changed: w.changed}
	w.net = &network{w: w, blocked: map[way]bool{}, stalled: map[way][]func(){}}
	w.checker = meta.NewOver(direct{model: w.etcd.model}, func(context.Context, time.Duration) {
		panic("sim: a request that cannot fail is sent again")
	}, clusterName, nil)
	info, err := w.checker.EnsureCluster(context.Background())
	if err != nil {
		panic(err)
	}
	w.cluster = info.UUID
	for i := range 1 + k.rng.IntN(2) {
		w.topics = append(w.topics, &topic{
			index: i, bundle: meta.BundleID(fmt.Sprintf("public/default/%d", i)), chain: meta.DataChain(entry.UUID{0x70, byte(i + 1)}, 0),
		})
	}
	for i := range w.replication.Ensemble + 1 + k.rng.IntN(3) {
		b := &bookieProcess{process: process{k: k, name: fmt.Sprintf("k%d", i)}, w: w, index: i, zone: string(rune('a' + i%2)), slow: []int{20, 60, 300}[k.rng.IntN(3)]}
		b.etcd = &etcdClient{e: w.etcd, p: &b.process}
		b.meta = meta.NewOver(b.etcd, b.sleep, clusterName, nil)
		w.bookies = append(w.bookies, b)
		w.newDisk(b)
		b.boot()
	}
	for i := range 2 + k.rng.IntN(2) {
		b := &broker{process: process{k: k, name: fmt.Sprintf("b%d", i)}, w: w, index: i}
		b.etcd = &etcdClient{e: w.etcd, p: &b.process, actor: b}
		b.meta = meta.NewOver(b.etcd, b.sleep, clusterName, nil)
		w.brokers = append(w.brokers, b)
		b.boot()
	}
	return w
}

// newDisk gives a bookie an empty disk with an identity of its own.
func (w *world) newDisk(b *bookieProcess) {
	w.disks++
	var u entry.StorageUUID
	binary.BigEndian.PutUint64(u[:], uint64(w.disks))
	b.uuid = u
	w.names[u] = b.name
	if w.disks > len(w.bookies) {
		w.names[u] = fmt.Sprintf("%s#%d", b.name, w.disks)
	}
	b.rotten, b.fresh = false, true
	b.mem = vfs.NewMem()
	b.mem.SetCapacity(diskSize)
	b.disk = vfs.NewFaulty(b.mem)
}

func (w *world) bookieOf(u entry.StorageUUID) *bookieProcess {
	for _, b := range w.bookies {
		if b.uuid == u {
			return b
		}
	}
	return nil
}

func (w *world) ledgerConfig() ledger.Config {
	return ledger.Config{Seed: w.opt.Seed | 1, MaxFragments: 6, RecoveryWindow: 8, StragglerBytes: 64 << 10, NegativeWait: w.negativeWait}
}

func (w *world) shape() string {
	r := w.replication
	return fmt.Sprintf("%d/%d/%d zones %d, %d bookies, %d brokers, %d topics, rolls at %d bytes, %d entries, %v",
		r.Ensemble, r.WriteQuorum, r.AckQuorum, r.MinZones, len(w.bookies), len(w.brokers), len(w.topics), w.limits.Bytes, w.limits.Entries, w.limits.Age)
}

// fail notes the first violation; the run ends with it.
func (w *world) fail(invariant string, s subject, format string, args ...any) {
	if w.failure != nil {
		return
	}
	w.failure = &Failure{Options: w.opt, Invariant: invariant, Detail: fmt.Sprintf(format, args...), Shape: w.shape()}
	if !w.record {
		return
	}
	for _, l := range w.story {
		if w.opt.Whole || l.touches(s) {
			w.failure.Story = append(w.failure.Story, fmt.Sprintf("%12.6f %-4s %s", l.at.Seconds(), l.who, l.what))
		}
	}
}

// touches reports whether a line belongs to the story of s: it is about the same thing, or about everything.
func (l storyLine) touches(s subject) bool {
	switch {
	case l.subject == subject{}:
		return true
	case s.number != 0 && l.number == s.number, s.topic != 0 && l.topic == s.topic && l.ledger == 0:
		return true
	case s.ledger != 0 && l.ledger == s.ledger:
		return s.entry == entryAny || l.entry == entryAny || l.entry == s.entry
	}
	return false
}

func (w *world) failed() bool { return w.failure != nil }

// Run runs one seed: faults for a while, then everything is healed, and what was promised must hold.
func Run(opt Options) (res Result, failure error) {
	w := newWorld(opt)
	w.playAndEnd()
	res = Result{
		Simulated: w.now, Events: w.steps, Appends: w.tally, Closed: w.closes, Boots: w.ghost.boots, Checked: w.ghost.checked,
		Served: w.served, Shape: w.shape(), Trimmed: w.trims, Compactions: w.compactions,
	}
	copy(res.Sum[:], w.sum.Sum(nil))
	if w.failure == nil {
		return res, nil
	}
	if !opt.Record { // once more, for the story
		opt.Record = true
		_, again := Run(opt)
		return res, again
	}
	return res, w.failure
}

// playAndEnd plays. An assertion that fails in the product is a failure like others.
func (w *world) playAndEnd() {
	defer func() {
		if r := recover(); r != nil {
			w.fail("assertion", subject{}, "%v", r)
			if w.record {
				stack := debug.Stack()
				if w.panicked != nil {
					stack = w.panicked
				}
				w.failure.Story = append(w.failure.Story, string(stack))
			}
			return // whose state it was must not be touched any more
		}
		for _, b := range w.brokers {
			b.kill()
		}
		for _, b := range w.bookies {
			b.kill()
		}
		for _, idle := range w.workers {
			idle.stop()
		}
	}()
	w.play()
}

func (w *world) play() {
	w.after(0, w.etcd.tick)
	for _, tp := range w.topics {
		w.after(w.between(0, 500*time.Millisecond), func() { pick(w.kernel, w.brokers).take(tp) })
		w.after(w.pace, func() { w.produce(tp) })
		w.after(w.between(500*time.Millisecond, 2*time.Second), func() { w.oversee(tp) })
		if w.chance(2) {
			w.after(w.between(time.Second, 4*time.Second), func() { w.trim(tp) })
		}
	}
	w.after(300*time.Millisecond, w.tailRead)
	w.after(w.between(0, time.Second), w.mischief)
	w.run(w.opt.Faulty, w.failed)
	if w.failed() {
		return
	}
	w.heal()
	w.finale()
}

// produce appends at every broker that believes it serves the topic.
func (w *world) produce(tp *topic) {
	if w.ending {
		return
	}
	w.after(w.between(w.pace/2, 2*w.pace), func() { w.produce(tp) })
	if w.chance(40) { // a pause, for what happens to the idle
		return
	}
	for _, b := range w.brokers {
		c := b.chains[tp.index]
		if c == nil || c.over || !b.up || b.paused {
			continue
		}
		for range 1 + w.rng.IntN(4) {
			w.append(c, pick(w.kernel, w.levels), nil)
		}
		if w.chance(60) {
			c.step(chain.Event{Kind: chain.EventRollWanted})
		}
	}
}

// trim deletes the oldest ledgers of a topic, at whoever believes to own it.
func (w *world) trim(tp *topic) {
	if w.ending {
		return
	}
	w.after(w.between(200*time.Millisecond, 4*time.Second), func() { w.trim(tp) })
	for _, b := range w.brokers {
		c := b.chains[tp.index]
		if c == nil || c.over || !b.up || b.paused || len(c.rec.Runs) < 3 {
			continue
		}
		n := 1 + w.rng.IntN(len(c.rec.Runs)-2)
		b.spawn(func(t *task) { c.trim(t, n) })
	}
}

func (w *world) append(c *chainRun, level ledger.AckLevel, then func(outcome)) {
	w.numbers++
	a := &producerAppend{
		number: w.numbers, topic: c.topic, level: level, size: w.rng.IntN(200), span: uint32(1 + w.rng.IntN(3)),
		by: c.b, life: c.b.life, then: then,
	}
	w.ghost.appends[a.number] = a
	w.ghost.order = append(w.ghost.order, a)
	w.tally[pending]++
	c.append(a)
}

// oversee gives a topic whose owner does not serve it to somebody, and at times one whose owner does.
func (w *world) oversee(tp *topic) {
	if w.ending {
		return
	}
	w.after(w.between(200*time.Millisecond, 2*time.Second), func() { w.oversee(tp) })
	serving := slices.ContainsFunc(w.brokers, func(b *broker) bool {
		return b.up && !b.paused && !b.etcd.cut && b.chains[tp.index] != nil && b.leaseHolds()
	})
	opening := slices.ContainsFunc(w.brokers, func(b *broker) bool {
		return b.up && !b.paused && !b.etcd.cut && b.owned[tp.index] != 0
	})
	if serving && !w.chance(12) || opening && !serving && !w.chance(4) {
		return
	}
	b := pick(w.kernel, w.brokers)
	if b.up && !b.paused {
		b.take(tp)
	}
}

// tailRead is a reader elsewhere: it hears of a LAC from any bookie and reads up to it.
func (w *world) tailRead() {
	w.after(w.between(20*time.Millisecond, 200*time.Millisecond), w.tailRead)
	b := pick(w.kernel, w.brokers)
	if !b.up || b.paused || len(w.ghost.ledgers) == 0 {
		return
	}
	tp := pick(w.kernel, w.topics)
	rec, err := w.checker.GetChain(context.Background(), tp.chain)
	if err != nil || len(rec.Runs) == 0 {
		return
	}
	id := rec.Runs[len(rec.Runs)-1].Ledger
	if w.chance(4) {
		id = pick(w.kernel, rec.Runs).Ledger
	}
	l, err := w.checker.GetLedger(context.Background(), id)
	if err != nil {
		return
	}
	b.spawn(func(t *task) { b.tailReadLedger(t, l) })
}

func (w *world) heal() {
	w.healed, w.etcd.healed = true, true
	w.trace("sim", subject{}, "healed")
	w.healFaults()
}

// finale checks that everything comes back: each topic is taken, its ledgers recovered, an append acknowledged; then
// what was promised is looked for on the disks.
func (w *world) finale() {
	began := w.now
	for _, tp := range w.topics {
		w.after(0, func() { w.probe(tp) })
	}
	done := func() bool { return w.failed() || len(w.probed) == len(w.topics) }
	w.run(began+healWithin, done)
	if w.failed() {
		return
	}
	for _, tp := range w.topics {
		if !w.probed[tp.index] {
			w.fail("I16", subject{topic: tp.index + 1}, "topic %d takes no append within %v after everything was healed", tp.index, healWithin)
			return
		}
	}
	w.trace("sim", subject{}, "every topic is served after %v", w.now-began)
	// The chains are closed in good order.
	w.ending = true
	for _, tp := range w.topics {
		c := w.serving(tp)
		if c == nil {
			continue
		}
		c.step(chain.Event{Kind: chain.EventCloseAsked})
	}
	closed := func() bool {
		if w.failed() {
			return true
		}
		for _, tp := range w.topics {
			rec, err := w.checker.GetChain(context.Background(), tp.chain)
			if err != nil || len(rec.Runs) == 0 || !rec.Runs[len(rec.Runs)-1].Closed {
				return false
			}
		}
		return true
	}
	w.run(w.now+healWithin, closed)
	if !closed() {
		w.fail("I16", subject{}, "a chain is not closed within %v", healWithin)
	}
	w.run(w.now+2*time.Second, w.failed) // what is under way comes to its end
	if w.failed() {
		return
	}
	for _, tp := range w.topics {
		w.checkTopic(tp)
	}
}

const healWithin = 30 * time.Second

func (w *world) serving(tp *topic) *chainRun {
	owner, err := w.checker.GetOwner(context.Background(), tp.bundle)
	if err != nil {
		return nil
	}
	for _, b := range w.brokers {
		if c := b.chains[tp.index]; c != nil && c.guard.Epoch == owner.Epoch && !c.over && b.up {
			return c
		}
	}
	return nil
}

// probe appends to a topic until that works.
func (w *world) probe(tp *topic) {
	if w.probed[tp.index] {
		return
	}
	w.after(2*time.Second, func() { w.probe(tp) })
	c := w.serving(tp)
	if c == nil {
		opening := slices.ContainsFunc(w.brokers, func(b *broker) bool { return b.up && b.owned[tp.index] != 0 && b.leaseHolds() })
		if !opening || w.chance(4) {
			pick(w.kernel, w.brokers).take(tp)
		}
		return
	}
	w.append(c, ledger.AckQuorum, func(o outcome) {
		if o == stored {
			w.probed[tp.index] = true
		}
	})
}

// checkTopic reads a topic from its first entry to its last, from each disk that should have it.
func (w *world) checkTopic(tp *topic) {
	rec, err := w.checker.GetChain(context.Background(), tp.chain)
	if err != nil {
		w.fail("I1", subject{topic: tp.index + 1}, "chain of topic %d: %v", tp.index, err)
		return
	}
	seen := map[uint64]entry.Position{}
	newest := map[entry.Epoch]uint64{}
	var offset entry.Offset
	if len(rec.Runs) > 0 {
		offset = rec.Runs[0].First
	}
	for _, run := range rec.Runs {
		l := w.ghost.ledger(run.Ledger).record
		if !run.Closed || l.State != meta.LedgerClosed {
			w.fail("I16", ledgerSubject(run.Ledger), "ledger %d is %s in the end", run.Ledger, l.State)
			return
		}
		for e := entry.EntryID(0); e <= l.Last; e++ {
			s := entrySubject(run.Ledger, e)
			body := w.ghost.bodies[entryKey{run.Ledger, e}]
			p, ok := parseBody(body)
			if !ok {
				w.fail("I4", s, "%d:%d is part of its ledger and was never written", run.Ledger, e)
				return
			}
			a := w.ghost.appends[p.number]
			s.number = p.number
			switch {
			case a == nil || a.topic != tp:
				w.fail("I4", s, "%d:%d has append %d, which is not of topic %d", run.Ledger, e, p.number, tp.index)
				return
			case a.outcome == notWritten:
				w.fail("19", s, "append %d is %d:%d, and was told not to be written", p.number, run.Ledger, e)
				return
			case p.base != offset:
				w.fail("20", s, "append %d at %d:%d says offset %d, before it lie %d", p.number, run.Ledger, e, p.base, offset)
				return
			}
			if at, twice := seen[p.number]; twice {
				w.fail("I3", s, "append %d is at %v and at %d:%d", p.number, at, run.Ledger, e)
				return
			}
			seen[p.number] = entry.Position{Ledger: run.Ledger, Entry: e}
			if p.number < newest[a.ownerEpoch] {
				w.fail("20", s, "append %d comes after %d of the same owner", p.number, newest[a.ownerEpoch])
				return
			}
			newest[a.ownerEpoch] = p.number
			offset += entry.Offset(p.span)
			if !w.onDisk(l, e, body) {
				return
			}
		}
		if run.End != offset {
			w.fail("20", ledgerSubject(run.Ledger), "run of ledger %d ends at offset %d, its entries at %d", run.Ledger, run.End, offset)
			return
		}
	}
	for _, a := range w.ghost.order {
		if a.topic != tp || a.outcome != stored || a.level == ledger.AckNone || a.level == ledger.AckOne {
			continue
		}
		if w.ghost.ledger(a.position.Ledger).record.State == meta.LedgerDeleting {
			continue // trimmed
		}
		at, ok := seen[a.number]
		s := subject{ledger: uint64(a.position.Ledger), entry: int64(a.position.Entry), number: a.number, topic: tp.index + 1}
		switch {
		case !ok:
			w.fail("I1", s, "append %d (%s) was acknowledged at %d:%d, and is lost", a.number, a.level, a.position.Ledger, a.position.Entry)
			return
		case at.Ledger != a.position.Ledger || at.Entry != a.position.Entry:
			w.fail("I1", s, "append %d was acknowledged at %d:%d, and is at %d:%d", a.number, a.position.Ledger, a.position.Entry, at.Ledger, at.Entry)
			return
		}
	}
}

// onDisk reads an entry from each disk of its write set: at least as many as must have it do, but for those that are gone.
func (w *world) onDisk(l meta.Ledger, e entry.EntryID, body []byte) bool {
	f := ledger.FragmentOf(l.Fragments, e)
	copies, gone := 0, 0
	quorumOf(l.Replication, f.Slots).WriteSet(e).Each(func(i int) {
		b := w.bookieOf(f.Slots[i].UUID)
		switch {
		case b == nil:
			gone++
		case b.has(l.ID, e, body):
			copies++
		case b.rotten:
			gone++
		}
	})
	if copies < l.AckQuorum-min(gone, w.harmed) || copies == 0 {
		w.fail("I1", entrySubject(l.ID, e), "%d:%d lies on %d disks of %s, %d are gone", l.ID, e, copies, w.fragments([]meta.Fragment{f}), gone)
		return false
	}
	return true
}
