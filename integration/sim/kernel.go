package sim

import (
	"crypto/sha256"
	"fmt"
	"hash"
	"math/rand/v2"
	"time"
)

// began is the moment at which simulated time begins.
var began = time.Unix(1_700_000_000, 0)

// kernel is time, chance and the order of events.
type kernel struct {
	rng   *rand.Rand
	now   time.Duration // since began
	heap  []event
	seq   uint64
	steps int

	sum      hash.Hash
	line     []byte
	running  *task     // nil: none
	workers  []*worker // idle ones
	panicked []byte    // the stack of a task that did

	// recorded lines; kept only when the run is told to.
	record bool
	story  []storyLine
}

type event struct {
	at   time.Duration
	seq  uint64
	run  func()
	p    *process // to whom it is delivered, in that life; nil: nobody
	life int
}

func newKernel(seed uint64) *kernel {
	//nolint:gosec // seeded on purpose
	return &kernel{rng: rand.New(rand.NewPCG(seed, 0x70656e73746f636b)), sum: sha256.New()}
}

// clock is the time as the product's types have it.
func (k *kernel) clock() time.Time { return began.Add(k.now) }

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

// at has f run at a time; what is due at the same time runs in the order it was asked for.
func (k *kernel) at(t time.Duration, f func()) { k.push(event{at: t, run: f}) }

func (k *kernel) after(d time.Duration, f func()) { k.at(k.now+d, f) }

func (k *kernel) push(e event) {
	k.seq++
	e.at, e.seq = max(e.at, k.now), k.seq
	k.heap = append(k.heap, e)
	h := k.heap
	i := len(h) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !e.before(&h[up]) {
			break
		}
		h[i] = h[up]
		i = up
	}
	h[i] = e
}

func (k *kernel) pop() event {
	h := k.heap
	top, n := h[0], len(h)-1
	last := h[n]
	h[n] = event{}
	h = h[:n]
	k.heap = h
	if n == 0 {
		return top
	}
	i := 0
	for {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && h[c+1].before(&h[c]) {
			c++
		}
		if !h[c].before(&last) {
			break
		}
		h[i] = h[c]
		i = c
	}
	h[i] = last
	return top
}

// run carries events out up to a time, or until stop says so.
func (k *kernel) run(until time.Duration, stop func() bool) {
	for len(k.heap) > 0 && k.heap[0].at <= until {
		e := k.pop()
		k.now = e.at
		k.steps++
		if e.p != nil {
			e.p.deliver(e.life, e.run)
		} else {
			e.run()
		}
		if stop() {
			return
		}
	}
	k.now = until
}

// chance is true once in n times on average.
func (k *kernel) chance(n int) bool { return k.rng.IntN(n) == 0 }

// between draws a duration from a to b.
func (k *kernel) between(a, b time.Duration) time.Duration {
	if b <= a {
		return a
	}
	return a + time.Duration(k.rng.Int64N(int64(b-a)+1))
}

// pick draws one of several.
func pick[T any](k *kernel, from []T) T { return from[k.rng.IntN(len(from))] }

// subject is what a line of the trace is about; the zero value is everything.
type subject struct {
	ledger uint64
	entry  int64 // entryAny: the whole ledger
	topic  int   // from 1
	number uint64
}

const entryAny = -2

type storyLine struct {
	at   time.Duration
	who  string
	what string
	subject
}

// trace adds a line to the trace, of which the run's sum is made.
func (k *kernel) trace(who string, s subject, format string, args ...any) {
	k.line = fmt.Appendf(k.line[:0], "%d %s ", k.now, who)
	k.line = fmt.Appendf(k.line, format, args...)
	k.line = append(k.line, '\n')
	_, _ = k.sum.Write(k.line)
	if k.record {
		k.story = append(k.story, storyLine{at: k.now, who: who, what: fmt.Sprintf(format, args...), subject: s})
	}
}
