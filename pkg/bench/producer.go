package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// producer publishes to one topic in a goroutine of its own: when the schedule says so, or whenever it has a message that is
// not in flight.
type producer struct {
	run    *run
	index  uint64
	driver Producer

	pool    *pool
	key     func() string
	due     chan struct{} // capacity 1: from the pacer, there may be something due
	latency *recorderShard
	acked   tally
	filler  *rand.ChaCha8

	sent    atomic.Uint64 // handed to the driver
	settled atomic.Uint64 // have an outcome
	failed  atomic.Uint64
}

// grace is how long after the end what was due before it is still sent, as long as there is room: the producer may have been
// woken late.
const grace = 100 * time.Millisecond

func newProducer(r *run, index int) *producer {
	p := &producer{
		run: r, index: uint64(index), due: make(chan struct{}, 1), latency: r.published.shard(index),
		key: keyPicker(r.scenario, r.keys, uint64(index)),
	}
	var seed [32]byte
	header{run: r.id, producer: uint32(index)}.put(seed[:])
	p.filler = rand.NewChaCha8(seed)
	p.pool = newPool(r.scenario.InFlight, p.newMessage)
	return p
}

// newMessage makes a message whose body does not compress: a broker or a disk that squeezes zeros would look fast.
func (p *producer) newMessage() *Message {
	m := &Message{Value: make([]byte, p.run.scenario.Size)}
	_, _ = p.filler.Read(m.Value) // never fails
	return m
}

// publish runs until the run stops publishing.
func (p *producer) publish(living context.Context) {
	r := p.run
	for n := uint64(0); ; n++ {
		due := int64(0)
		if r.schedule.exists() {
			due = r.schedule.due(p.index, n)
			if !p.waitUntil(due) {
				return
			}
		}
		m := p.take()
		if m == nil {
			return
		}
		if !r.schedule.exists() {
			if r.stopAt.Load() != 0 {
				return
			}
			due = r.clock.now()
		}
		m.Key = p.key()
		m.stamp(header{run: r.id, producer: uint32(p.index), number: n, due: due})
		if m.away.Swap(true) {
			panic("bench: a message was published twice at once")
		}
		p.sent.Store(n + 1)
		p.driver.Publish(living, m)
	}
}

// waitUntil waits until a message is due, and reports false if that is not before the end.
func (p *producer) waitUntil(due int64) bool {
	r := p.run
	for {
		if stopAt := r.stopAt.Load(); stopAt != 0 {
			return due < stopAt && r.clock.now() < stopAt+int64(grace)
		}
		if due <= r.clock.now() {
			return true
		}
		select {
		case <-p.due:
		case <-r.stopped:
		}
	}
}

// take waits for a message that is not in flight. It returns nil at the end.
func (p *producer) take() *Message {
	for {
		if m := p.pool.take(); m != nil {
			return m
		}
		if p.run.stopAt.Load() != 0 {
			return nil
		}
		select {
		case <-p.pool.room:
		case <-p.run.stopped:
		}
	}
}

// done takes a message's outcome.
func (p *producer) done(m *Message, err error) {
	now := p.run.clock.now()
	if !m.away.Swap(false) {
		panic(fmt.Sprintf("bench: driver %s gave a message a second outcome", p.run.driver.Name()))
	}
	if err != nil {
		p.run.failures.add(err)
		p.failed.Add(1)
	} else {
		p.acked.add(m.number)
		p.latency.record(now, m.header.due)
	}
	p.pool.put(m)
	p.settled.Add(1)
}

// restPeriod is how long the pacer sleeps at least. To be woken takes as much of a CPU as to publish dozens of messages; beyond
// five thousand a second they are published a few at a time instead, late by a tenth of a millisecond in the mean.
const restPeriod = 200 * time.Microsecond

// pace wakes producers when their messages are due, until ctx ends. One goroutine does it for all: a timer each would be
// ten thousand for ten thousand topics.
func (r *run) pace(ctx context.Context, sleeper *sleeper) error {
	stop := context.AfterFunc(ctx, sleeper.close)
	defer stop()
	woken := r.clock.now() - int64(restPeriod)
	for next := uint64(0); ; {
		now := r.clock.now()
		if due := r.schedule.dueOf(next); max(due, woken+int64(restPeriod)) > now {
			if err := sleeper.sleep(time.Duration(max(due, woken+int64(restPeriod)) - now)); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
			now = r.clock.now()
			woken = now
			r.lateness.record(now, due)
		} else if ctx.Err() != nil {
			return nil
		}
		for upTo, all := max(next+1, r.schedule.upTo(now)), 0; next < upTo; next++ {
			if all++; all > len(r.producers) {
				next = upTo // each has been woken
				break
			}
			select {
			case r.producers[next%r.schedule.producers].due <- struct{}{}:
			default: // it has not looked yet
			}
		}
	}
}
