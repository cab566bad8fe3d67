package topic

import (
	"context"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Producer is an incarnation of a producer on a topic. Its batches are stored in the order of its Append calls,
// which must follow one another.
type Producer struct {
	t     *Topic
	name  []byte
	epoch uint64
	asked uint64         // what its incarnation asked with first, if it can be told from others
	state *producerState // with deduplication
	last  int64

	// Guarded by the topic's lock.
	over   error  // why it takes no batches any more: another stream or incarnation took over
	gap    bool   // batches from gapAt on are missing
	gapAt  uint64 // until this one is sent again
	closed bool
}

// An epoch has the owner's epoch from ownerShift on, up to mostOwner, below that the number of the incarnation, and below
// GenerationShift how often that one came back. So an incarnation that a later owner lets in is above those that earlier ones
// did, of which the later one need not know: without deduplication it knows of none.
const (
	GenerationShift = 20
	ownerShift      = 40
	mostOwner       = 1<<(63-ownerShift) - 1
)

// firstNew is above all epochs: what a new incarnation asks with that can be told from others.
const firstNew = 1 << 63

// NewIncarnation returns the epoch that a new incarnation asks with. Its number is drawn by whoever asks. Requests with
// the same one are one incarnation's, of which the first got no answer, or will get it later: they do not fence each
// other, as those that ask with 0 do. 0 stays 0.
func NewIncarnation(number uint64) uint64 {
	if number == 0 {
		return 0
	}
	return number | firstNew
}

// asks is what an incarnation asked with, before it had an epoch, and the one that it got.
type asks struct{ asked, epoch uint64 }

// mostAsks is how many incarnations of a producer are recognised when they ask as new ones again.
const mostAsks = 8

// nextEpoch returns the epoch of a producer that asks an owner with one, 0 for a new incarnation, where newest was given before.
//
// An incarnation may ask with less than it was given: the answer got lost, and it comes back with what it knows. So what
// fences is a new incarnation alone, and never a producer itself.
func nextEpoch(newest, asked uint64, owner entry.Epoch) (uint64, error) {
	switch {
	case asked == 0 || asked >= firstNew:
		newest = max(newest, min(uint64(owner), mostOwner)<<ownerShift)
		return (newest>>GenerationShift + 1) << GenerationShift, nil
	case asked>>GenerationShift < newest>>GenerationShift:
		return 0, fmt.Errorf("epoch %d, the newest is %d: %w", asked, newest, ErrProducerFenced)
	}
	return max(newest, asked) + 1, nil
}

// OpenProducer lets a producer in. epoch is 0 for a new one, or of [NewIncarnation], and what [Producer.Epoch] said for one that comes back; an
// incarnation that was superseded by a new one of its name gets [ErrProducerFenced]. The epoch is above every one seen,
// and whoever held the name before takes no more batches: with [ErrProducerFenced], or with [ErrProducerReplaced] if it
// was the same incarnation. With dedup, the producer's stored sequence is known when OpenProducer returns, which may have
// to read the snapshot and the entries after it first. A new incarnation has it wait for what an older one has under way:
// that may be stored yet, and its sequences are not to be given to other messages. It is also noted in the snapshot store
// before it is let in, so that no later owner lets an older one in: that would take the sequences at which this one was told
// to go on. Without dedup, incarnations are told apart by the owner that they ask, as long as it is the owner and the newer one
// has not left.
func (t *Topic) OpenProducer(ctx context.Context, name string, epoch uint64, dedup bool) (*Producer, error) {
	if name == "" || len(name) > frame.MaxProducerName {
		return nil, fmt.Errorf("open producer: a name has 1 to %d bytes, this one %d", frame.MaxProducerName, len(name))
	}
	if dedup {
		if err := t.loadDedup(ctx); err != nil {
			return nil, err
		}
	}
	p, err := t.letIn(ctx, name, epoch, dedup)
	if err == nil {
		if err = t.note(ctx, p); err == nil {
			err = p.awaitOlder(ctx, epoch == 0 || epoch >= firstNew)
		}
		if err != nil {
			p.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open producer %q: %w", name, err)
	}
	return p, nil
}

// letIn makes the producer the one of its name.
func (t *Topic) letIn(ctx context.Context, name string, epoch uint64, dedup bool) (*Producer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return nil, t.err
	}
	newest := uint64(0)
	before := t.producers[name]
	if before != nil {
		newest = before.epoch
	}
	var state *producerState
	if t.dd != nil {
		if state = t.dd.producers[name]; state != nil {
			newest = max(newest, state.epoch)
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err //nolint:wrapcheck // the caller does; nobody waits for it: it must not replace one that is used
	}
	asked := epoch
	if asked >= firstNew {
		// A request of the same incarnation may have come before.
		if before != nil && before.asked == asked {
			epoch = before.epoch
		} else if state != nil {
			for _, a := range state.asks {
				if a.asked == asked {
					epoch = a.epoch
				}
			}
		}
	}
	if epoch == 0 || epoch >= firstNew {
		newest = max(newest, t.left)
	}
	next, err := nextEpoch(newest, epoch, t.owner)
	if err != nil {
		return nil, err
	}
	p := &Producer{t: t, name: []byte(name), epoch: next, last: -1}
	if asked >= firstNew {
		p.asked = asked
	} else if before != nil && before.epoch>>GenerationShift == next>>GenerationShift {
		p.asked = before.asked
	}
	if before != nil {
		before.over = ErrProducerFenced
		if before.epoch>>GenerationShift == next>>GenerationShift {
			before.over = ErrProducerReplaced
		}
		before.leave()
	}
	if dedup {
		p.state = t.dd.get(name)
		p.state.open++
		p.state.epoch = p.epoch
		if asked >= firstNew && epoch == asked {
			if len(p.state.asks) == mostAsks {
				p.state.asks = slices.Delete(p.state.asks, 0, 1)
			}
			p.state.asks = append(p.state.asks, asks{asked, next})
		}
		p.state.lastTime = max(p.state.lastTime, t.env.Sched.Now().UnixMilli())
		if t.cfg.Snapshots != nil && !p.state.noted() {
			t.dd.toNote[p.state] = struct{}{}
		}
	}
	if t.producers == nil {
		t.producers = map[string]*Producer{}
	}
	t.producers[name] = p
	return p, nil
}

// awaitOlder returns once nothing is under way of older incarnations than p, if it is a new one, and notes what is stored then.
func (p *Producer) awaitOlder(ctx context.Context, fresh bool) error {
	if p.state == nil {
		return nil
	}
	for {
		drain, err := p.drained(fresh)
		if drain == nil && err == nil {
			return nil
		}
		if err == nil {
			_, err = p.t.env.Sched.Wait(ctx, sched.Channels{drain, p.t.c.Lost()})
		}
		if err != nil {
			return err //nolint:wrapcheck // the caller does
		}
	}
}

// drained returns what is closed once nothing is under way, or nil and notes what is stored, if nothing is or none of it
// matters.
func (p *Producer) drained(matters bool) (<-chan struct{}, error) {
	t, s := p.t, p.state
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.err != nil:
		return nil, t.err
	case p.over != nil:
		return nil, p.over
	case matters && len(s.inflight()) > 0:
		if s.drain == nil {
			s.drain = make(chan struct{})
		}
		return s.drain, nil
	}
	if s.any {
		p.last = int64(s.stored.id)
		if s.stored.chunk != whole {
			p.last-- // an unfinished large message is to be sent again; its stored chunks are duplicates
		}
	}
	return nil, nil
}

// Epoch returns the incarnation's epoch, to be given when the producer comes back.
func (p *Producer) Epoch() uint64 { return p.epoch }

// LastSequence returns the highest sequence id stored for the producer when it was opened; -1 if none, or without
// deduplication.
func (p *Producer) LastSequence() int64 { return p.last }

// Close lets the producer go. Batches under way are done all the same.
func (p *Producer) Close() {
	t := p.t
	t.mu.Lock()
	defer t.mu.Unlock()
	p.leave()
	if t.producers[string(p.name)] == p {
		// Without deduplication nothing else tells a new incarnation of the name from this one, should it come back.
		if last := (min(uint64(t.owner), mostOwner)+1)<<ownerShift - 2<<GenerationShift; p.state == nil {
			t.left = max(t.left, min(p.epoch, last))
		}
		delete(t.producers, string(p.name))
		if len(t.producers) == 0 {
			t.producers = nil
		}
	}
}

func (p *Producer) leave() {
	if s := p.state; !p.closed && s != nil {
		s.open--
		if s.idle() && !s.any && !s.saved {
			p.t.dd.forget(s) // there is nothing to remember of it
		}
	}
	p.closed = true
}

// missing notes that a batch was refused or failed: later ones must not overtake it. The topic's lock is held.
func (p *Producer) missing(first uint64) {
	if !p.gap || first < p.gapAt {
		p.gap, p.gapAt = true, first
	}
}

// Append stores a batch. It waits for bytes of the budget as long as ctx lasts: that is the back-pressure of slow
// bookies. An error means that the batch was not taken in, and Done is not called; a *[chain.NotEnoughBookiesError]
// may be inside. Once taken in, Done tells what became of it.
func (p *Producer) Append(ctx context.Context, b Batch) error {
	t := p.t
	env := frame.EnvelopeOf(b.Parsed)
	env.Producer, env.ProducerEpoch = p.name, p.epoch
	if p.state != nil {
		env.Flags |= frame.FlagDedup
	}
	body := make([]byte, 0, envelopeRoom+len(p.name)+len(b.Frame))
	body = frame.AppendEnvelope(body, &env)
	body = append(body, b.Frame...)
	if err := t.take(ctx, len(body)); err != nil {
		t.mu.Lock()
		p.missing(env.FirstSeq)
		t.mu.Unlock()
		return fmt.Errorf("append batch: wait for budget: %w", err)
	}
	taken, err := p.append(&env, body, b)
	if !taken {
		t.released(len(body))
	}
	return err
}

// envelopeRoom is what an envelope takes beside the producer's name, at most.
const envelopeRoom = 44 + 30 + 14 + 11

func (t *Topic) take(ctx context.Context, n int) error {
	if err := t.pending.Acquire(ctx, int64(n)); err != nil {
		return err //nolint:wrapcheck // the caller does
	}
	if t.env.Budget == nil {
		return nil
	}
	if err := t.env.Budget.Acquire(ctx, int64(n)); err != nil {
		t.pending.Release(int64(n))
		return err //nolint:wrapcheck // the caller does
	}
	return nil
}

// append decides about a batch and hands it to the chain. It reports whether the chain has the body.
func (p *Producer) append(env *frame.Envelope, body []byte, b Batch) (taken bool, err error) {
	t := p.t
	last := sequenceOf(env.LastSeq, env.Chunk, env.Chunks)
	t.mu.Lock()
	switch {
	case t.err != nil:
		err = t.err
	case p.over != nil:
		err = p.over
	case p.closed:
		err = ErrProducerFenced
	case t.failing != nil:
		err = fmt.Errorf("%w: %w", ErrUnavailable, t.failing)
	case p.gap && env.FirstSeq > p.gapAt:
		err = ErrSequenceGap
	}
	if err != nil {
		p.missing(env.FirstSeq)
		t.mu.Unlock()
		return false, fmt.Errorf("append batch of sequences %d to %d: %w", env.FirstSeq, env.LastSeq, err)
	}
	gap := p.gap
	if env.LastSeq >= p.gapAt {
		p.gap = false
	}
	if p.state != nil {
		switch v, f := p.state.judge(env.FirstSeq, last); v {
		case verdictStore:
		case verdictStored:
			if b.Level == ledger.AckAll {
				p.duplicateAtAll(env, last, b)
				return false, nil
			}
			t.mu.Unlock()
			t.env.Metrics.duplicate()
			b.Done(Receipt{FirstSeq: env.FirstSeq, LastSeq: env.LastSeq, Duplicate: true}, nil)
			return false, nil
		case verdictInFlight:
			if b.Level == ledger.AckAll && f.level != ledger.AckAll {
				p.duplicateAtAll(env, last, b)
				return false, nil
			}
			f.waiters = append(f.waiters, waiter{p, env.FirstSeq, env.LastSeq, b.Done})
			t.mu.Unlock()
			t.env.Metrics.duplicate()
			return false, nil
		case verdictOverlap:
			p.gap = gap
			p.missing(p.state.beyond()) // what of it is new
			t.mu.Unlock()
			return false, fmt.Errorf("append batch of sequences %d to %d: %w", env.FirstSeq, env.LastSeq, ErrSequenceOverlap)
		}
	}
	env.Base = t.next
	env.BrokerTime = max(t.env.Sched.Now().UnixMilli(), t.lastTime)
	t.lastTime = env.BrokerTime
	frame.AppendEnvelope(body[:0], env) // the same length: what differs is of fixed size
	t.next += entry.Offset(env.Span)
	t.appended += int64(len(body))
	t.outstanding++
	w := getPending()
	w.t, w.producer, w.state = t, p, p.state
	w.first, w.lastSeq, w.last, w.epoch = env.FirstSeq, env.LastSeq, last, p.epoch
	w.offset, w.done, w.level = env.Base, b.Done, b.Level
	if p.state != nil {
		p.state.enter(w)
	}
	t.c.Append(chain.Append{Body: body, Span: env.Span, Time: env.BrokerTime, Level: b.Level, Tag: w, Done: w.chained})
	t.mu.Unlock()
	t.env.Metrics.appended(len(body), int(env.Span))
	return true, nil
}

// duplicateAtAll answers a duplicate that is to be on all disks before it counts. The topic's lock is held, and given up.
func (p *Producer) duplicateAtAll(env *frame.Envelope, last sequence, b Batch) {
	t := p.t
	f, full := p.state.copies(env.FirstSeq, last)
	if f != nil {
		f.waiters = append(f.waiters, waiter{p, env.FirstSeq, env.LastSeq, b.Done})
	}
	t.mu.Unlock()
	t.env.Metrics.duplicate()
	switch {
	case f != nil:
	case full:
		b.Done(Receipt{FirstSeq: env.FirstSeq, LastSeq: env.LastSeq, Duplicate: true}, nil)
	default:
		b.Done(Receipt{FirstSeq: env.FirstSeq, LastSeq: env.LastSeq}, &ledger.AppendError{
			Entry: entry.NoEntry, Outcome: ledger.Unknown, Err: ErrCopiesUnknown,
		})
	}
}
