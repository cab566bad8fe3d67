package failover

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/integration/steady"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

const (
	rate        = 500 // messages a second
	size        = 512 // bytes of one
	interval    = time.Second / rate
	between     = 100 // messages that flow before a strike, and after its end
	latencyTime = 8 * time.Second
	linesTold   = 60
	stretches   = 30 // of time in which nothing happens, at most
	// onTopic is how many strikes one topic takes: each that another broker takes over from leaves a ledger more of the topic and of its
	// bundle's state log, which the next one reads from end to end.
	onTopic = 10
	// around the worst gap, what is told.
	around = 30 * time.Millisecond
)

// result is what came out of one kind.
type result struct {
	kind kind
	// publish and deliver are the gaps of all strikes.
	publish, deliver figures.Sample
	// steps are what the gaps of publishing were spent on, in order, where another broker takes over.
	steps []named
	// moments are the gaps of publishing by when they began.
	moments []named
	// worst is the strike with the longest gap of publishing.
	worst strike
	// delivered and stored are the judge's verdicts on what was read along, and read again at the end.
	delivered, stored workload.Report
	failures          []error
	err               error
	took              time.Duration
	latency99         time.Duration // of publishing, where nothing happens
}

// named is a sample with a name.
type named struct {
	name  string
	times figures.Sample
}

// into adds a time to the sample of that name, which it makes.
func into(all []named, name string, d time.Duration) []named {
	i := 0
	for i < len(all) && all[i].name != name {
		i++
	}
	if i == len(all) {
		all = append(all, named{name: name})
	}
	all[i].times.Add(d)
	return all
}

// strike is one.
type strike struct {
	number           int
	victim           string
	publish, deliver time.Duration
	began            time.Duration // of the gap of publishing, after the strike
	returned         time.Duration // of the process, likewise
	parts            []part
	late, sync       time.Duration // the machine's, during the gap
	lines            []string
}

// failed counts publishes that failed.
func (r *result) failed() uint64 {
	return r.delivered.Refused + r.delivered.Unknown + r.delivered.Unsettled
}

// wrong says what broke a promise: whatever it was that failed, was lost, stored twice, out of order, or never ended.
func (r *result) wrong() error {
	err := errors.Join(r.err, r.delivered.Err(), r.stored.Err())
	if n := r.failed(); n > 0 {
		err = errors.Join(err, fmt.Errorf("%d publishes failed", n), errors.Join(r.failures...))
	}
	if r.stored.StoredTwice > 0 || r.delivered.StoredTwice > 0 {
		err = errors.Join(err, errors.New("messages are stored twice"))
	}
	return err
}

// add takes one strike in.
func (r *result) add(k strike) {
	r.publish.Add(k.publish)
	r.deliver.Add(k.deliver)
	for _, p := range k.parts {
		r.steps = into(r.steps, p.name, p.took)
	}
	if k.victim != "" {
		r.moments = into(r.moments, k.moment(), k.publish)
	}
	if k.publish >= r.worst.publish {
		r.worst = k
	}
}

// atOnce is how soon after an event a gap begins that is laid to it: the timer's and the log's error, and a message or two.
const atOnce = 20 * time.Millisecond

// moment says when the gap of publishing began.
func (k *strike) moment() string {
	switch {
	case k.began < atOnce:
		return "at the strike"
	case k.began < k.returned-atOnce:
		return "while it is away"
	}
	return "when it is back"
}

// deal strikes so often in one way, on topic after topic. What is wrong is in the result.
func (s *site) deal(k kind, strikes int, told func(string, ...any)) *result {
	out := &result{kind: k}
	began := time.Now()
	defer func() { out.took = time.Since(began) }()
	if k.choose == nil {
		strikes = min(strikes, stretches)
		if out.latency99, out.err = s.latency(); out.err != nil {
			return out
		}
	}
	for n := 0; n < strikes && out.err == nil; n += onTopic {
		out.err = s.dealOn(fmt.Sprintf("%s/%s-%d", keeping, k.name, n), k, n, min(n+onTopic, strikes), out, told)
	}
	return out
}

// dealOn deals some of the strikes on one topic, from first on and before end.
func (s *site) dealOn(topic string, k kind, first, end int, out *result, told func(string, ...any)) (err error) {
	s.topic = topic
	s.run, err = workload.Start(s.ctx, s.client, workload.Config{
		Topic: topic, Subscription: "along", Rate: rate, Size: size, Dedup: true, Timeout: patience,
	})
	if err != nil {
		return err
	}
	for n := first; n < end; n++ {
		one, strikeErr := s.strike(k)
		if strikeErr != nil {
			err = fmt.Errorf("strike %d: %w", n+1, strikeErr)
			break
		}
		one.number = n + 1
		out.add(one)
		told("%s %d: publish gap %v, delivery gap %v (%s)", k.name, n+1, one.publish, one.deliver, one.victim)
	}
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	s.run.StopProducing()
	delivered, endErr := s.run.Wait(ctx)
	out.delivered.Add(delivered)
	if endErr == nil {
		var stored workload.Report
		stored, endErr = s.run.Reread(ctx)
		out.stored.Add(stored)
	}
	out.failures = append(out.failures, s.run.Failures()...)
	return errors.Join(err, endErr)
}

// latency is the p99 of publishing, from when a message is due, where nothing happens.
func (s *site) latency() (time.Duration, error) {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	p, err := s.client.Producer(ctx, keeping+"/latency")
	if err != nil {
		return 0, err
	}
	r, err := steady.Publish(ctx, []*client.Producer{p}, steady.Config{Rate: rate, For: latencyTime, Size: size, Patience: patience})
	if err = errors.Join(err, r.Example, p.Close(ctx)); err != nil {
		return 0, fmt.Errorf("measure how long publishing takes: %w", err)
	}
	return r.Latencies.Percentile(0.99), nil
}

// strike strikes once, a cluster that is whole, and returns when it is again.
func (s *site) strike(k kind) (out strike, err error) {
	if err := errors.Join(s.whole(), s.flows(between)); err != nil {
		return out, err
	}
	var victim *process.Process
	if k.choose != nil {
		if victim, err = k.choose(s); err != nil {
			return out, err
		}
		out.victim = victim.Name
	}
	s.events.begin(s.c.All())
	s.probes.begin()
	publish, deliver := s.run.Watch(), s.run.WatchDeliveries()
	struck := time.Now()
	s.events.note(struck, "here", k.what+" "+out.victim)
	returned, err := s.befall(k, victim)
	if err != nil {
		return out, err
	}
	out.publish, out.deliver = publish.Stop()-interval, deliver.Stop()-interval
	from, d := publish.Longest()
	until := from.Add(d)
	out.began, out.returned = from.Sub(struck), returned.Sub(struck)
	out.late, out.sync = s.probes.worst(from, until)
	s.events.note(from, "here", "the longest gap of publishing begins")
	s.events.note(until, "here", "the longest gap of publishing ends")
	marks := s.events.end()
	since := from.Add(-around)
	if k.takesOver {
		out.parts = parts(takeover(victim.Name, s.bundle), afterTakeover, marks, struck, until)
		since = struck.Add(-time.Millisecond)
	}
	out.lines = tell(marks, struck, since, until.Add(around), linesTold)
	if k.renewed {
		ctx, cancel := context.WithTimeout(s.ctx, patience)
		defer cancel()
		err = errors.Join(victim.Terminate(ctx), victim.Start(ctx))
	}
	return out, err
}

// befall is the strike itself, until the cluster is whole again and messages flow. It returns when the process came back.
func (s *site) befall(k kind, victim *process.Process) (returned time.Time, err error) {
	strike, back := victim.Kill, victim.Launch
	if k.stops {
		strike, back = victim.Pause, victim.Resume
	}
	if victim != nil {
		if err := strike(); err != nil {
			return returned, err
		}
	}
	if err := s.flows(between); err != nil {
		return returned, err
	}
	if k.until != nil {
		if err := k.until(s, victim); err != nil {
			return returned, err
		}
	}
	returned = time.Now()
	if victim != nil {
		s.events.note(returned, "here", victim.Name+" comes back")
		if err := back(); err != nil {
			return returned, err
		}
	}
	return returned, errors.Join(s.whole(), s.flows(between))
}
