package workload

import (
	"context"
	"errors"
	"time"

	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/client"
)

const (
	attemptWindow = 64  // messages under way
	attemptLength = 500 // messages until a producer is replaced without a reason
	attemptAgain  = 8   // settled messages that the next producer publishes again
	attemptPause  = 50 * time.Millisecond
)

// attempts publishes with one producer after the other. What is in doubt stays so until one of them is told of it, or the
// message's life ends.
func (r *Run) attempts(ctx context.Context, number uint32, limiter *rate.Limiter) {
	a := &attempting{run: r, number: number, name: r.names[number], limiter: limiter}
	for ctx.Err() == nil && !a.over() {
		a.attempt(ctx)
	}
	for a.settled < a.sent { // nobody waits for them any more
		a.settle(Unknown, Receipt{})
	}
}

// attempting is one producer's course.
type attempting struct {
	run     *Run
	number  uint32
	name    string
	limiter *rate.Limiter

	sent    uint64      // messages below are sent
	settled uint64      // messages below have their outcome
	born    []time.Time // of each message in between
}

// over tells whether everything has its outcome and no more is to come.
func (a *attempting) over() bool {
	if a.settled < a.sent {
		return false
	}
	return a.run.producing.Err() != nil || a.run.cfg.Messages > 0 && a.settled >= a.run.cfg.Messages
}

// settle tells the outcome of the oldest message that has none.
func (a *attempting) settle(o Outcome, where Receipt) {
	t := a.tag(a.settled)
	a.settled++
	a.born = a.born[1:]
	a.run.mu.Lock()
	defer a.run.mu.Unlock()
	if o == Acknowledged {
		a.run.acknowledged(t, where)
		return
	}
	a.run.book.Settle(t, o, where)
	a.run.failedAt = time.Now()
}

// attempt publishes with one producer, until it fails or has published enough.
func (a *attempting) attempt(ctx context.Context) {
	opening, cancel := context.WithTimeout(ctx, a.run.cfg.Attempt)
	p, err := a.run.producer(opening, a.name)
	cancel()
	if err != nil {
		a.failed(ctx, err)
		return
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.run.cfg.Attempt)
		defer cancel()
		_ = p.Close(closing) // what it could say was said by the receipts
	}()
	first := a.settled - min(a.settled, attemptAgain)
	under := make([]*client.Receipt, 0, attemptWindow)
	life, end := context.WithCancel(ctx)
	defer end() // whatever of it has no outcome
	next := first
	for a.settled < first+attemptLength || len(under) > 0 {
		for len(under) < attemptWindow && next < first+attemptLength+attemptAgain && a.has(ctx, next, len(under) == 0) {
			m := &client.Message{Value: AppendBody(nil, a.tag(next), a.run.cfg.Size), SequenceID: next + 1}
			under = append(under, p.PublishAsync(life, m))
			next++
		}
		if len(under) == 0 {
			return
		}
		if err := a.await(ctx, next-uint64(len(under)), under[0]); err != nil {
			a.failed(ctx, err)
			return
		}
		under = under[1:]
	}
}

func (a *attempting) tag(n uint64) Tag {
	return Tag{Run: a.run.book.run, Producer: a.number, Number: n}
}

// has tells whether there is a message n to publish, and makes the next one when it is due; when idle it waits until then.
func (a *attempting) has(ctx context.Context, n uint64, idle bool) bool {
	if n < a.sent {
		return true
	}
	if a.run.cfg.Messages > 0 && n >= a.run.cfg.Messages || a.run.producing.Err() != nil {
		return false
	}
	if idle {
		if a.limiter.Wait(a.run.producing) != nil { //nolint:contextcheck // it is ctx's child
			return false
		}
	} else if !a.limiter.Allow() {
		return false
	}
	a.run.mu.Lock()
	a.run.book.Send(a.number)
	a.run.mu.Unlock()
	a.sent++
	a.born = append(a.born, time.Now())
	return ctx.Err() == nil
}

// await waits for the outcome of message n, and notes it if it has none yet.
func (a *attempting) await(ctx context.Context, n uint64, receipt *client.Receipt) error {
	waiting, cancel := context.WithTimeout(ctx, a.run.cfg.Attempt)
	defer cancel()
	id, err := receipt.Wait(waiting)
	if err == nil && n == a.settled {
		a.settle(Acknowledged, Receipt{Partition: id.Partition, Offset: id.Offset, Known: !receipt.Duplicate()})
	}
	return err //nolint:wrapcheck // it says what was published where
}

// failed gives up what has been in doubt for too long, and pauses before the next attempt.
func (a *attempting) failed(ctx context.Context, err error) {
	var e *client.Error
	// A producer that was given up before it was let in may be let in after its successor, and fences that.
	if !errors.As(err, &e) || !e.Retryable && e.Code != client.CodeFenced {
		a.run.mu.Lock()
		if len(a.run.failures) < maxExamples && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
			a.run.failures = append(a.run.failures, err)
		}
		a.run.mu.Unlock()
	}
	for len(a.born) > 0 && time.Since(a.born[0]) > a.run.cfg.Timeout {
		a.settle(Unknown, Receipt{})
	}
	select {
	case <-ctx.Done():
	case <-time.After(attemptPause):
	}
}
