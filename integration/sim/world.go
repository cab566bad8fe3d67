package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/integration/sim/etcdmodel"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
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
	// Brief leaves the story out, for which the seed is run a second time otherwise.
	Brief bool
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

// Commit is the source that runs, for failures to name. A program that was built to be kept has it from the linker: -ldflags
// "-X github.com/penstock-mq/penstock/integration/sim.Commit=…".
var Commit = ""

// Error prints everything that is needed to look into it.
func (f *Failure) Error() string {
	var b strings.Builder
	o := f.Options
	fmt.Fprintf(&b, "invariant %s is violated: %s\nseed %d, commit %s\n%v of faults %v, one request to etcd in %d is lost\n%s\n",
		f.Invariant, f.Detail, o.Seed, Commit, o.Faulty, o.Faults, o.Loss, f.Shape)
	fmt.Fprintf(&b, "replay: go test ./integration/sim -v -run 'Seed/%d$' -minutes %v\n", o.Seed, o.Faulty.Minutes())
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
	// Deleted ledgers, by bookies from their disks, and Deletions of topics.
	Deleted, Deletions int
	// Swaps are slots that repairs gave to other disks.
	Swaps int
	Shape string
}

const clusterName = "sim"

var clusterUUID = entry.UUID{0x5e, 0xed}

// world is one cluster under one seed.
type world struct {
	*kernel
	opt        Options
	healed     bool
	ending     bool             // no more work is given
	copied     *etcdmodel.Model // of etcd, some time ago
	restored   bool             // etcd was, from the copy: nothing holds any more but I11 and the pace
	restoredAt time.Duration
	strain     strain // then
	failure    *Failure

	replication  meta.Replication
	limits       chain.Limits
	drainTimeout time.Duration
	negativeWait time.Duration
	trash        time.Duration // how long deleted ledgers stay on the disks
	faults       []Fault
	levels       []ledger.AckLevel
	pace         time.Duration
	trims        bool // topics delete their oldest ledgers
	calm         bool // little happens at the moment

	etcd       *etcd
	net        *network
	brokers    []*broker
	bookies    []*bookieProcess
	repairers  []*repairer
	topics     []*topic
	names      map[entry.StorageUUID]string
	disks      int
	harmed     int // disks that were wiped, or are rotten
	checker    *meta.Store
	ghost      *ghost
	numbers    uint64
	tally      [4]int
	closes     int
	cluster    entry.UUID // its record's
	overload   overload
	messagings []*messaging
	disksToo   diskMischief
	scarce     time.Duration // until then too few bookies take new ledgers
	// compactions that did something, and ledgers deleted from topics.
	compactions, trimmed int
	deleted              int // ledgers from disks
	deletions            int // of topics
	served               int
	probed, closed       map[int]bool    // by topic, in the end
	closing              map[int]service // what is being closed then
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
		kernel: k, opt: opt, replication: pick(k, shapes), names: map[entry.StorageUUID]string{}, probed: map[int]bool{}, closed: map[int]bool{}, closing: map[int]service{},
		limits: chain.Limits{
			Bytes: int64(1<<10) << k.rng.IntN(8), Entries: int64(4) << k.rng.IntN(8), Age: time.Duration(1+k.rng.IntN(30)) * time.Second,
		},
		negativeWait: []time.Duration{time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond}[k.rng.IntN(3)],
		drainTimeout: time.Duration(k.rng.IntN(1000)) * time.Millisecond,
		pace:         time.Duration(5+k.rng.IntN(60)) * time.Millisecond,
	}
	w.trash = []time.Duration{-1, time.Second, 5 * time.Second, time.Hour}[k.rng.IntN(4)]
	w.faults = opt.Faults
	if len(w.faults) == 0 {
		w.faults = pickFaults(k)
	}
	w.opt.Faults = w.faults
	w.addDiskFaults()
	w.addOverload()
	w.levels = [][]ledger.AckLevel{
		{ledger.AckQuorum},
		{ledger.AckQuorum, ledger.AckQuorum, ledger.AckAll},
		{ledger.AckQuorum, ledger.AckOne, ledger.AckNone, ledger.AckAll},
	}[k.rng.IntN(3)]
	w.ghost = newGhost(w)
	w.etcd = &etcd{kernel: k, model: etcdmodel.New(), keep: []int64{10, 30, 100, 1000}[k.rng.IntN(4)], loss: max(w.opt.Loss, 0), changed: w.changed}
	w.net = &network{w: w, blocked: map[way]bool{}, stalled: map[way][]func(){}}
	w.checker = meta.NewOver(direct{e: w.etcd}, operator{sched.Real, k}, clusterName, nil)
	info, err := w.checker.EnsureCluster(context.Background())
	if err != nil {
		panic(err)
	}
	w.cluster = info.UUID
	w.trims = k.chance(2)
	messages := k.chance(2)
	for range 1 + k.rng.IntN(2) {
		if messages {
			newMessaging(w)
			messages = k.chance(3)
		} else {
			w.addTopic(&chains{w}, meta.DataChain(entry.UUID{0x70, byte(len(w.topics) + 1)}, 0))
		}
	}
	if k.chance(2) {
		w.addTopic(newStates(w), meta.StateChain(w.bundleOf(len(w.topics))))
	}
	for i := range w.replication.Ensemble + 1 + k.rng.IntN(3) {
		b := &bookieProcess{process: process{k: k, name: fmt.Sprintf("k%d", i)}, w: w, index: i, zone: string(rune('a' + i%2)), slow: []int{20, 60, 300}[k.rng.IntN(3)]}
		b.etcd = &etcdClient{e: w.etcd, p: &b.process}
		w.bookies = append(w.bookies, b)
		w.newDisk(b)
		b.boot()
	}
	for i := range 2 + k.rng.IntN(2) {
		b := &broker{process: process{k: k, name: fmt.Sprintf("b%d", i)}, w: w, index: i}
		b.etcd = &etcdClient{e: w.etcd, p: &b.process, actor: b}
		if messages := len(w.messagings) > 0; messages {
			b.measure = b.measureAll
		}
		w.brokers = append(w.brokers, b)
		b.boot()
	}
	w.addRepairers()
	return w
}

func (w *world) bundleOf(topic int) meta.BundleID {
	return meta.BundleID(fmt.Sprintf("public/default/%d", topic))
}

func (w *world) addTopic(k kind, chain meta.ChainID) {
	n := len(w.topics)
	w.topics = append(w.topics, &topic{index: n, bundle: w.bundleOf(n), chain: chain, kind: k})
}

// newDisk gives a bookie an empty disk with an identity of its own.
func (w *world) newDisk(b *bookieProcess) {
	w.disks++
	var u entry.StorageUUID
	binary.BigEndian.PutUint64(u[:], uint64(w.disks))
	b.uuid = u
	w.names[u] = b.name
	if w.disks > len(w.bookies) {
		w.names[u] = fmt.Sprintf("%s-%d", b.name, w.disks)
	}
	b.id = w.names[u]
	if !w.claims() { // else it does so itself
		if err := w.checker.CreateCookie(context.Background(), meta.Cookie{ID: b.id, UUID: u}); err != nil {
			panic(err)
		}
	}
	b.rotten, b.fresh = false, true
	b.full, b.readOnly, b.noFiles, b.refused, b.frozen, b.errors = false, false, false, nil, nil, nil
	b.exchanged, b.began = exchange{}, false
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
	if w.failure != nil || w.restored && invariant != "I11" && invariant != "pace" && invariant != "assertion" {
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
		Served: w.served, Shape: w.shape(), Trimmed: w.trimmed, Deleted: w.deleted, Deletions: w.deletions, Compactions: w.compactions, Swaps: w.ghost.swaps,
	}
	copy(res.Sum[:], w.sum.Sum(nil))
	if w.failure == nil {
		return res, nil
	}
	if !opt.Record && !opt.Brief { // once more, for the story
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
		for _, r := range w.repairers {
			r.kill()
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
		w.after(w.between(0, 500*time.Millisecond), func() { w.lookUp(tp) })
		w.after(w.pace, func() { w.produce(tp) })
	}
	w.after(300*time.Millisecond, w.tailRead)
	w.after(w.between(0, time.Second), w.mischief)
	w.after(0, w.harmDisks)
	w.after(w.between(0, 3*time.Second), w.unrest)
	w.after(w.between(w.opt.Faulty/4, w.opt.Faulty), func() { w.copied = w.etcd.model.Clone() })
	if w.opt.Faulty > time.Minute && !w.chance(50) {
		w.after(w.between(0, 20*time.Second), w.weather)
	}
	w.run(w.opt.Faulty, w.failed)
	if w.failed() {
		return
	}
	w.heal()
	w.finale()
}

// produce gives work to every broker that believes it serves the topic.
func (w *world) produce(tp *topic) {
	if w.ending {
		return
	}
	pause := w.between(w.pace/2, 2*w.pace)
	pause = calmer(w, pause, 80)
	w.after(pause, func() { w.produce(tp) })
	if w.chance(40) { // a pause, for what happens to the idle
		return
	}
	for _, b := range w.brokers {
		if s := b.serving(tp); s != nil && !b.paused {
			b.do(s.work)
		}
	}
}

// weather makes some stretches of a long run calm: little work, few faults.
func (w *world) weather() {
	if w.healed {
		return
	}
	w.calm = !w.calm
	span := w.between(time.Second, 8*time.Second)
	if w.calm {
		span = w.between(5*time.Second, 60*time.Second)
	}
	w.after(span, w.weather)
}

// calmer multiplies a pause, or the number of things of which one is special, while it is calm.
func calmer[T int | time.Duration](w *world, n, times T) T {
	if w.calm {
		return n * times
	}
	return n
}

// tailRead is a reader elsewhere.
func (w *world) tailRead() {
	pause := w.between(20*time.Millisecond, 200*time.Millisecond)
	pause = calmer(w, pause, 20)
	w.after(pause, w.tailRead)
	b := pick(w.kernel, w.brokers)
	if !b.up || b.paused || w.restored {
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
	g := w.ghost.ledger(id)
	l := g.record
	if w.chance(4) {
		l = g.first // an old record
	}
	if l.State != meta.LedgerDeleting {
		b.sched.Go(func() { b.tailRead(l) })
	}
}

func (w *world) heal() {
	w.healed, w.etcd.healed, w.calm = true, true, false
	w.trace("sim", subject{}, "healed")
	w.healFaults()
}
