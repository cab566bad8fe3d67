//go:build linux

package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
)

// keeping is a namespace whose topics keep what everybody has read, so that it can be read again.
const keeping = "public/keeping"

// load is one workload at work.
type load interface {
	// topic is the one that faults are aimed at.
	topic() string
	// progress counts what has been achieved.
	progress() uint64
	// watch begins to measure how long publishing stands still.
	watch() func() time.Duration
	// stop ends the workload, and finish waits for its end and tells what came out. An error is something that hangs, or
	// that no fault may bring about.
	stop()
	finish(ctx context.Context) (outcome, error)
}

// outcome is what a workload has seen: what was delivered, and what is stored where that was read again.
type outcome struct {
	delivered, stored workload.Report
	delay             time.Duration
	notes             []string
}

func (o outcome) err() error { return errors.Join(o.delivered.Err(), o.stored.Err()) }

// cells are both readings as one line: what was sent is the same, and what is wrong is wrong in either.
func (o outcome) report() workload.Report {
	r := o.delivered
	r.StoredTwice = max(r.StoredTwice, o.stored.StoredTwice)
	for _, v := range o.stored.Violations {
		if r.Count(v.Kind) == 0 {
			r.Violations = append(r.Violations, v)
		}
	}
	return r
}

// kinds are the workloads, by the names that the matrix gives them.
var kinds = []struct {
	name, title string
	begin       func(*site) (load, error)
}{
	{"W1", "publish and read", publishAndRead},
	{"W2", "dedup retry", dedupRetry},
	{"W5", "retention and GC", retention},
	{"W6", "topic churn and seek", churn},
}

// single is a load of one run.
type single struct {
	run    *workload.Run
	name   string
	reread bool
	also   func(ctx context.Context) (outcome, error) // what else is to be judged
}

func (l *single) topic() string { return l.name }

func (l *single) progress() uint64 {
	_, acked, received := l.run.Counts()
	return min(acked, received)
}

func (l *single) watch() func() time.Duration { return l.run.Watch().Stop }
func (l *single) stop()                       { l.run.StopProducing() }

func (l *single) finish(ctx context.Context) (out outcome, err error) {
	out.delivered, err = l.run.Wait(ctx)
	out.delay = l.run.Delay()
	if err == nil && l.reread {
		out.stored, err = l.run.Reread(ctx)
	}
	if l.also != nil {
		also, alsoErr := l.also(ctx)
		err = errors.Join(err, alsoErr)
		out.stored, out.notes = also.stored, also.notes
	}
	for _, f := range l.run.Failures() {
		var e *client.Error
		if !errors.As(f, &e) || !e.Retryable && !client.OutcomeUnknown(f) {
			err = errors.Join(err, fmt.Errorf("a client was told what no fault may bring about: %w", f))
		}
	}
	return out, err
}

func (s *site) run(cfg workload.Config) (*workload.Run, error) {
	cfg.Subscription = "along"
	cfg.Timeout = patience
	return workload.Start(s.ctx, s.client, cfg)
}

func publishAndRead(s *site) (load, error) {
	l := &single{name: keeping + "/published", reread: true}
	var err error
	l.run, err = s.run(workload.Config{Topic: l.name, Rate: 300, Size: 1024})
	return l, err
}

func dedupRetry(s *site) (load, error) {
	l := &single{name: keeping + "/retried", reread: true}
	var err error
	l.run, err = s.run(workload.Config{Topic: l.name, Rate: 300, Size: 512, Producers: 2, Dedup: true, Attempt: 3 * time.Second})
	return l, err
}

// retention publishes to a topic that lets go of what all have read, and has a second subscription that reads in bursts, so
// that trimming has something to wait for.
func retention(s *site) (load, error) {
	const pause, burst = 4 * time.Second, 800
	l := &single{name: "public/default/trimmed"}
	slow, err := s.client.Subscribe(s.ctx, l.name, "slow", client.WithStart(client.Earliest()))
	if err != nil {
		return nil, err
	}
	if l.run, err = s.run(workload.Config{Topic: l.name, Rate: 200, Size: 4096, Dedup: true}); err != nil {
		return nil, err
	}
	type result struct {
		report workload.Report
		err    error
	}
	followed := make(chan result, 1)
	hurry := make(chan struct{}) // the end has come: no more pauses
	go func() {
		n := 0
		r, err := l.run.Follow(s.ctx, func(ctx context.Context) (*client.Delivery, error) {
			if n++; n%burst == 0 {
				select {
				case <-ctx.Done():
				case <-hurry:
				case <-time.After(pause):
				}
			}
			d, err := slow.Receive(ctx)
			if err == nil {
				d.AckAsync()
			}
			return d, err
		})
		followed <- result{r, err}
	}()
	l.also = func(ctx context.Context) (out outcome, err error) {
		close(hurry)
		select {
		case r := <-followed:
			out.stored, err = r.report, r.err
		case <-ctx.Done():
			return out, fmt.Errorf("read slowly to the end: %w", ctx.Err())
		}
		err = errors.Join(err, slow.Close(ctx))
		if t, describeErr := s.client.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: l.name}); describeErr == nil {
			out.notes = append(out.notes, fmt.Sprintf("trimmed up to offset %d of %d", t.GetEarliestOffset(), t.GetNextOffset()))
		}
		return out, err
	}
	return l, nil
}

// churning makes, uses, seeks in and deletes topics, a few names over and over.
type churning struct {
	site *site
	done chan struct{}
	end  context.CancelFunc
	over chan struct{} // closed when no more rounds are to begin
	once sync.Once

	mu      sync.Mutex
	rounds  uint64
	current *workload.Run
	watches []*churnWatch
	sum     outcome
	err     error
}

type churnWatch struct {
	watch   *workload.Watch
	longest time.Duration
}

func churn(s *site) (load, error) {
	ctx, end := context.WithCancel(s.ctx)
	l := &churning{site: s, done: make(chan struct{}), over: make(chan struct{}), end: end}
	go func() {
		defer close(l.done)
		for n := 0; ; n++ {
			select {
			case <-l.over:
				return
			case <-ctx.Done():
				return
			default:
			}
			round, cancel := context.WithTimeout(ctx, 2*patience)
			err := l.round(round, fmt.Sprintf("%s/churned-%d", keeping, n%3))
			cancel()
			if err != nil {
				l.mu.Lock()
				l.err = fmt.Errorf("round %d of topic churn: %w", n, err)
				l.mu.Unlock()
				return
			}
		}
	}()
	return l, nil
}

// topic is none that lasts: faults are aimed at others.
func (l *churning) topic() string { return "" }

func (l *churning) progress() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.rounds << 20
	if l.current != nil {
		_, acked, received := l.current.Counts()
		n += acked + received
	}
	if l.err != nil { // it is told at the end, and nobody needs to wait for it
		return l.site.progressOf(n)
	}
	return n
}

// progressOf makes progress of what has ended.
func (s *site) progressOf(n uint64) uint64 { return n + uint64(time.Now().UnixMilli()) }

func (l *churning) watch() func() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := &churnWatch{}
	if l.current != nil {
		w.watch = l.current.Watch()
	}
	l.watches = append(l.watches, w)
	return func() time.Duration {
		l.mu.Lock()
		defer l.mu.Unlock()
		if w.watch != nil {
			w.longest = max(w.longest, w.watch.Stop())
		}
		return w.longest
	}
}

func (l *churning) stop() { l.once.Do(func() { close(l.over) }) }

func (l *churning) finish(ctx context.Context) (outcome, error) {
	l.stop()
	select {
	case <-l.done:
	case <-ctx.Done():
		l.end()
		<-l.done
	}
	l.end()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sum.notes = append(l.sum.notes, fmt.Sprintf("%d topics were made, sought in and deleted", l.rounds))
	return l.sum, l.err
}

// begin notes the run that publishes now.
func (l *churning) begin(run *workload.Run) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.watches {
		if w.watch != nil {
			w.longest = max(w.longest, w.watch.Stop())
		}
		if w.watch = nil; run != nil {
			w.watch = run.Watch()
		}
	}
	l.current = run
}

const (
	churnMessages = 300
	churnRate     = 600
	churnSeek     = churnMessages / 2
)

func (l *churning) round(ctx context.Context, topic string) (err error) {
	k := l.site.client
	run, err := workload.Start(ctx, k, workload.Config{
		Topic: topic, Subscription: "along", Messages: churnMessages, Rate: churnRate, Size: 256, Dedup: true, Timeout: patience,
	})
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	l.begin(run)
	delivered, err := run.Wait(ctx)
	l.begin(nil)
	l.add(outcome{delivered: delivered, delay: run.Delay()})
	if err != nil {
		return fmt.Errorf("%w: %w", err, errors.Join(run.Failures()...))
	}
	s, err := k.Subscribe(ctx, topic, "seeking", client.WithStart(client.Earliest()))
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	for i, begin := range []func() error{
		func() error { return nil },
		func() error { return s.Seek(ctx, client.Earliest()) },
	} {
		if err := retry(ctx, begin); err != nil {
			return errors.Join(fmt.Errorf("seek: %w", err), s.Close(ctx))
		}
		stored, err := run.Follow(ctx, func(ctx context.Context) (*client.Delivery, error) {
			d, err := s.Receive(ctx)
			if err == nil {
				d.AckAsync()
			}
			return d, err
		})
		l.addStored(stored)
		if err != nil {
			return errors.Join(fmt.Errorf("read for the %d. time: %w", i+1, err), s.Close(ctx))
		}
	}
	if err := retry(ctx, func() error { return s.Seek(ctx, client.AtOffset(churnSeek)) }); err != nil {
		return errors.Join(fmt.Errorf("seek: %w", err), s.Close(ctx))
	}
	d, err := s.Receive(ctx)
	if err == nil && d.ID.Offset != churnSeek {
		err = fmt.Errorf("after a seek to offset %d comes offset %d", churnSeek, d.ID.Offset)
	}
	if err := errors.Join(err, s.Close(ctx)); err != nil {
		return fmt.Errorf("seek: %w", err)
	}
	err = retry(ctx, func() error {
		_, err := k.Admin().DeleteTopic(ctx, &brokerv1.DeleteTopicRequest{Topic: topic, Force: true})
		var e *client.Error
		if errors.As(err, &e) && e.Code == client.CodeNotFound {
			return nil // by an attempt whose answer was lost
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	l.mu.Lock()
	l.rounds++
	l.mu.Unlock()
	return nil
}

// retry tries again what failed for now, or in an unknown way, until ctx ends.
func retry(ctx context.Context, try func() error) error {
	for {
		err := try()
		var e *client.Error
		if err == nil || ctx.Err() != nil || !errors.As(err, &e) || !e.Retryable && !client.OutcomeUnknown(err) {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pollInterval):
		}
	}
}

func (l *churning) add(o outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sum.delay = max(l.sum.delay, o.delay)
	l.sum.delivered.Add(o.delivered)
}

func (l *churning) addStored(r workload.Report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sum.stored.Add(r)
}

// makeNamespaces makes what the workloads need, before anything happens.
func (s *site) makeNamespaces() error {
	return retry(s.ctx, func() error {
		_, err := s.client.Admin().CreateNamespace(s.ctx, &brokerv1.CreateNamespaceRequest{
			Namespace: keeping, Policies: &brokerv1.Policies{RetentionTime: durationpb.New(365 * 24 * time.Hour)},
		})
		return err
	})
}
