package sim

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/ledger"
	product "github.com/penstock-mq/penstock/pkg/topic"
)

// overload is more work than there is room for, which a seed in four has, drawn from a stream of its own: publishers with
// bursts of many times what brokers may hold, consumers that keep what they get to themselves for seconds, a bookie whose disk is slow
// all the time, and bookies that take little at once.
type overload struct {
	rng     *rand.Rand // nil: there is none
	pending int64      // of a bookie's store: more than some entries of a state log, since what does not fit waits for its turn outside
	memory  int64      // of a bundle's topics at a broker
	slow    int        // bookie
	bursts  int        // once in so many ticks of a producer
}

func (w *world) addOverload() {
	own := rand.New(rand.NewPCG(w.opt.Seed, 0x6f7665726c6f6164)) //nolint:gosec // seeded on purpose
	if own.IntN(4) != 0 {
		return
	}
	w.overload = overload{
		rng: own, pending: int64(256<<10) << own.IntN(2), memory: int64(1<<10) << pick(&kernel{rng: own}, []int{0, 1, 2, 3, 9, 10}),
		slow: own.IntN(16), bursts: 10 + own.IntN(100),
	}
}

// slowSync is how long a sync takes on a disk that is slow all the time; 0: this one is not.
func (b *bookieProcess) slowSync() time.Duration {
	o := &b.w.overload
	if o.rng == nil || b.index != o.slow || b.w.healed {
		return 0
	}
	return 20*time.Millisecond + time.Duration(o.rng.Int64N(int64(100*time.Millisecond)))
}

// burst has a producer send far more than there is room for, at once.
func (p *producer) burst() {
	o := &p.m.w.overload
	if o.rng == nil || p.m.healing || o.rng.IntN(o.bursts) != 0 {
		return
	}
	n := 20 + o.rng.IntN(60)
	p.m.w.trace(p.name, p.subject(), "sends %d batches at once", n)
	for range n {
		p.publish(o.rng.IntN(3 << 10))
	}
}

// retriable reports whether an error that a publisher is told is of a kind that says what to do. That it ends with its
// connection is one.
func retriable(err error) bool {
	var failed *ledger.AppendError
	if errors.As(err, &failed) {
		return true
	}
	for _, kind := range []error{
		product.ErrClosed, product.ErrProducerFenced, product.ErrProducerReplaced, product.ErrSequenceGap, product.ErrSequenceOverlap,
		product.ErrCopiesUnknown, product.ErrUnavailable, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// refused holds the refusal of a batch against that.
func (st *servedTopic) refused(b *sendBatch, err error) {
	if !retriable(err) {
		st.t.m.w.fail("I15", st.t.about(b.messages[0]), "%s refuses a batch of %s with an error of no kind: %v", st.s.b.name, st.t.name, err)
	}
}

// bytesHeld is what a bundle's topics hold at a broker, by the product's account and by that of whoever sent it.
type bytesHeld struct {
	publish, reads *budget.Budget
	cache          *product.Cache
	taken, told    int   // batches
	inFlight       int64 // bytes of batches that were taken and not told of
	largest        int64 // of a batch, with what a broker adds to it
	frame          int64 // of a frame read, at the most
}

// envelopeRoom is what a broker adds to a batch, at the most.
const envelopeRoom = 256

// takes notes a batch that is handed to a topic. It returns what to call when that took it, and when it told what became of it.
func (h *bytesHeld) takes(s *servedBundle, b *sendBatch) (taken, told func()) {
	n := int64(len(b.frame))
	h.largest = max(h.largest, n+envelopeRoom)
	over, counted := false, false
	return func() {
			h.taken++
			if !over {
				counted = true
				h.inFlight += n
				// Bytes may be given back a moment before the answer that goes with them is told.
				s.m.w.within(s, "batches that were not answered", h.inFlight, 2*max(h.publish.Capacity(), h.largest))
			}
		}, func() {
			h.told++
			if over = true; counted {
				h.inFlight -= n
			}
		}
}

func (w *world) within(s *servedBundle, what string, is, may int64) {
	if is > may {
		w.fail("I14", topicSubject(s.m.tp), "%s holds %d bytes of %s, %d are allowed", s.b.name, is, what, may)
	}
}

// measure looks whether a bundle holds what it may.
func (s *servedBundle) measure() {
	w, h := s.m.w, &s.held
	w.within(s, "batches on their way to bookies", h.publish.Used(), max(h.publish.Capacity(), h.largest))
	w.within(s, "entries in its cache", h.cache.Used(), h.cache.Capacity())
	// Each reader may have been given one entry that is larger than what it asked for.
	w.within(s, "entries for consumers", h.reads.Used(), h.reads.Capacity()+int64(len(s.m.subscribers))*h.frame)
}

// ended looks whether a bundle that is not served any more has answered all that it took, and holds nothing.
func (s *servedBundle) ended() {
	w, h := s.m.w, &s.held
	if h.taken != h.told {
		w.fail("I15", topicSubject(s.m.tp), "%s took %d batches, and told what became of %d", s.b.name, h.taken, h.told)
	}
	w.within(s, "entries for consumers, though it serves none,", h.reads.Used(), 0)
}

// measureAll looks what a broker's bundles hold.
func (b *broker) measureAll() {
	for _, m := range b.w.messagings {
		if s := m.at[b]; s != nil && s.life == b.life && !s.over {
			s.measure()
		}
	}
}

// measureStore looks whether a bookie's store holds what it may: what recoveries send is never refused, nor what comes alone.
func (b *bookieProcess) measureStore() {
	if o := &b.w.overload; o.rng != nil && b.store != nil && b.store.PendingBytes() > max(o.pending, b.largest)+b.recovered {
		b.w.fail("I14", subject{}, "%s holds %d bytes that are on their way to its disk, %d are allowed", b.name, b.store.PendingBytes(), o.pending)
	}
}

// answerWithin is how long an add may wait for the metadata: for its turn, and for etcd.
const answerWithin = 12 * time.Second

// answerAll sees each bookie answer each add.
func (w *world) answerAll() {
	var silent *bookieProcess
	answered := func() bool {
		i := slices.IndexFunc(w.bookies, func(b *bookieProcess) bool { return b.serving() && b.arrived != b.answered })
		if i < 0 {
			return true
		}
		silent = w.bookies[i]
		return false
	}
	if answered() {
		return
	}
	w.run(w.now+answerWithin, func() bool { return w.failed() || answered() })
	if !answered() {
		w.fail("I15", subject{}, "%s was sent %d adds, and has answered %d", silent.name, silent.arrived, silent.answered)
	}
}

// permit gives a consumer's server more to send.
func (r *consuming) permit(n uint32) {
	r.granted += uint64(n)
	r.consumer.Permits(n)
}

// mostInBatch is how many messages a batch has at the most. A batch comes whole, however few are permitted.
const mostInBatch = 3

// sent counts what a consumer was sent, of which it keeps no more than it has permitted.
func (r *consuming) sent(n uint64) {
	r.received += n
	if r.received > r.granted+mostInBatch-1 {
		r.st.t.m.w.fail("I14", r.st.t.subject(), "%s was sent %d messages of %s, and has permitted %d", r.from.name, r.received, r.st.t.name, r.granted)
	}
}
