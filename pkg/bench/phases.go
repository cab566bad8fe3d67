package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// The names of phases, in points of the series and in results.
const (
	phaseWarmUp  = "warm-up"
	PhaseSteady  = "steady"
	PhaseBuild   = "build"    // a backlog is published, and not consumed
	PhaseCatchUp = "catch-up" // it is consumed
	phaseDrain   = "drain"
)

// poll is how often the end of something that only counters tell is looked for.
const poll = 5 * time.Millisecond

// measure runs the load from the first message to the last, and fills the result. Its error says why it ended early.
func (r *run) measure(ctx context.Context) error {
	r.observer.start()
	if r.scenario.Backlog == 0 {
		r.startReading(ctx)
	}
	err := r.startPublishing(ctx)
	if err == nil {
		err = r.phases(ctx)
	}
	if err == nil {
		r.observer.enter(phaseDrain)
	}
	r.stopPublishing()
	lasting := context.WithoutCancel(ctx)
	err = errors.Join(err, r.settle(lasting), r.receiveRest(lasting))
	r.stopReading()
	r.observer.stop()
	r.observer.report(&r.result)
	r.verify()
	return err
}

// phases waits while the load runs, and marks where a phase begins and ends.
func (r *run) phases(ctx context.Context) error {
	if r.scenario.WarmUp > 0 {
		if err := r.wait(ctx, r.scenario.WarmUp); err != nil {
			return err
		}
	}
	if r.scenario.Backlog == 0 {
		r.observer.open(ctx, PhaseSteady)
		err := r.wait(ctx, r.scenario.Duration)
		r.observer.end(ctx, r.clock.now())
		return err
	}
	target := r.published.events() + uint64(r.scenario.Backlog)
	r.observer.open(ctx, PhaseBuild)
	err := r.until(ctx, r.broken, func() bool { return r.published.events() >= target })
	r.observer.end(ctx, r.clock.now())
	if err != nil {
		return err
	}
	if !r.scenario.Live {
		r.stopPublishing()
		if err := r.settle(ctx); err != nil {
			return err
		}
	}
	for i, p := range r.producers {
		r.backlog[i] = p.sent.Load()
	}
	r.observer.open(ctx, PhaseCatchUp)
	r.startReading(ctx)
	err = r.until(ctx, r.broken, func() bool { return r.unsettled(r.backlog) == 0 && r.caughtUp(r.backlog) })
	end := r.clock.now()
	if last := r.backlogAt.Load(); err == nil && last != 0 {
		end = last // until looks only now and then
	}
	r.observer.end(ctx, end)
	return err
}

// wait returns after d, or earlier with the reason why.
func (r *run) wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case err := <-r.broken:
		return err
	}
}

// until waits until done says so, or nothing has moved for as long as patience allows. broken is r.broken, or nil where a
// consumer that cannot go on changes nothing.
func (r *run) until(ctx context.Context, broken <-chan error, done func() bool) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	moved, since := r.moves(), time.Now()
	for !done() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-broken:
			return err
		}
		if now := r.moves(); now != moved {
			moved, since = now, time.Now()
		}
		if time.Since(since) > r.options.Patience {
			return fmt.Errorf("nothing was acknowledged or received for %v: %w", r.options.Patience, context.DeadlineExceeded)
		}
	}
	return nil
}

// moves changes whenever a message has an outcome or is received.
func (r *run) moves() (n uint64) {
	for _, p := range r.producers {
		n += p.settled.Load()
	}
	return n + r.received.events() + r.strays.duplicates.Load() + r.strays.foreign.Load()
}

func (r *run) fail(err error) {
	if err == nil {
		return
	}
	select {
	case r.broken <- err:
	default: // the first says enough
	}
}

func (r *run) startPublishing(ctx context.Context) error {
	var living context.Context // longer than Run's own
	living, r.die = context.WithCancelCause(context.WithoutCancel(ctx))
	r.schedule = schedule{start: r.clock.now(), producers: uint64(len(r.producers))}
	if r.scenario.Rate > 0 {
		r.schedule.interval = float64(time.Second) / r.scenario.Rate
		sleeper, err := newSleeper()
		if err != nil {
			return err
		}
		var pacing context.Context
		pacing, r.endPacing = context.WithCancel(living)
		r.working.Go(func() { r.fail(r.pace(pacing, sleeper)) })
	}
	for _, p := range r.producers {
		r.working.Go(func() { p.publish(living) })
	}
	return nil
}

// stopPublishing has producers end with what is due now. A second call does nothing.
func (r *run) stopPublishing() {
	if !r.stopAt.CompareAndSwap(0, max(1, r.clock.now())) {
		return
	}
	close(r.stopped)
	if r.endPacing != nil {
		r.endPacing()
	}
}

// settle waits until producers have ended and every message has its outcome. What makes no progress is given up, and has
// an outcome by that.
func (r *run) settle(ctx context.Context) error {
	ended := make(chan struct{})
	go func() {
		r.working.Wait()
		close(ended)
	}()
	settled := func() bool {
		select {
		case <-ended:
			return r.unsettled(nil) == 0
		default:
			return false
		}
	}
	err := r.until(ctx, nil, settled)
	if err == nil {
		return nil
	}
	r.die(fmt.Errorf("given up: %w", err))
	<-ended
	return errors.Join(fmt.Errorf("wait for outcomes: %w", err), r.until(ctx, nil, settled))
}

// unsettled counts messages without an outcome; of each producer's first ones, if limits are given.
func (r *run) unsettled(limits []uint64) (n uint64) {
	for i, p := range r.producers {
		limit := p.sent.Load()
		if limits != nil {
			limit = limits[i]
		}
		if settled := p.settled.Load(); settled < limit {
			n += limit - settled
		}
	}
	return n
}

// missing counts acknowledged messages that a subscription has not received; of each producer's first ones, if limits are
// given.
func (r *run) missing(limits []uint64) (n uint64) {
	for i, p := range r.producers {
		limit := p.sent.Load()
		if limits != nil {
			limit = limits[i]
		}
		for s := range r.delivered {
			n += p.acked.missingFrom(&r.delivered[s][i], limit)
		}
	}
	return n
}

// caughtUp tells whether nothing is missing. While too little was received for that, it costs nothing to find out.
func (r *run) caughtUp(limits []uint64) bool {
	least := uint64(0)
	for i, p := range r.producers {
		acked := p.acked.size()
		if limits != nil {
			acked = min(acked, limits[i]-min(limits[i], p.failed.Load()))
		}
		least += acked * uint64(len(r.delivered))
	}
	return r.received.events() >= least && r.missing(limits) == 0
}

func (r *run) startReading(ctx context.Context) {
	ctx, r.endReads = context.WithCancel(context.WithoutCancel(ctx))
	for _, c := range r.consumers {
		r.reading.Go(func() {
			if err := c.consume(ctx); err != nil {
				r.deaf.Store(true)
				r.fail(err)
			}
		})
	}
}

// receiveRest waits until everything acknowledged was received. That something never comes is no error of the run: the
// result says it.
func (r *run) receiveRest(ctx context.Context) error {
	if r.endReads == nil {
		return nil
	}
	err := r.until(ctx, r.broken, func() bool { return r.deaf.Load() || r.caughtUp(nil) })
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

func (r *run) stopReading() {
	if r.endReads != nil {
		r.endReads()
		r.reading.Wait()
	}
}

// verify compares what was acknowledged with what was received.
func (r *run) verify() {
	v := &r.result.Verified
	for i, p := range r.producers {
		sent, acked, failed := p.sent.Load(), p.acked.size(), p.failed.Load()
		v.Sent += sent
		v.Acknowledged += acked
		v.Failed += failed
		v.Unsettled += sent - acked - failed
		if r.schedule.exists() {
			if due := r.schedule.dueBefore(uint64(i), r.stopAt.Load()); due > sent {
				v.Unsent += due - sent
			}
		}
	}
	if r.endReads != nil {
		v.Expected = v.Acknowledged * uint64(len(r.delivered))
		v.Missing = r.missing(nil)
	}
	v.Received = r.received.events()
	v.Duplicates, v.Foreign = r.strays.duplicates.Load(), r.strays.foreign.Load()
	r.result.Failures = r.failures.list()
	r.result.Lateness = Summarize(r.lateness.interval)
	if r.result.Lateness != nil {
		r.result.Lateness.Distribution = nil
	}
}
