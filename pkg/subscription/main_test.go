package subscription_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/chain/chaintest"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/subscription"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// etcd is shared by all tests; each uses a cluster of its own.
var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

var check = chaintest.Check

// owner is whose state the topic's is.
const owner = "the topic"

// served is a bundle with one topic at its owner.
type served struct {
	t     *testing.T
	log   *statelog.Log
	topic *topic.Topic
	b     *subscription.Bundle
	set   *subscription.Set
	work  sync.WaitGroup
	over  atomic.Bool // nothing more is run beside a call

	mu    sync.Mutex
	state chan struct{} // what waits for the state log waits for this; nil: it is open
}

// clock is a scheduler whose clock is wrong.
type clock struct {
	sched.Scheduler
	by time.Duration
}

func (c clock) Now() time.Time { return c.Scheduler.Now().Add(c.by) }

// serve takes the bundle over.
func serve(t *testing.T, f *chaintest.Cluster) *served {
	t.Helper()
	return serveBy(t, f, 0)
}

// serveBy takes the bundle over with a clock that is wrong.
func serveBy(t *testing.T, f *chaintest.Cluster, by time.Duration) *served {
	t.Helper()
	s := &served{t: t}
	guard := f.Takeover()
	var err error
	s.log, err = statelog.Open(t.Context(), statelog.Env{Chain: f.Env()}, guard, chaintest.Bundle, statelog.Config{})
	check(t, err)
	life, end := context.WithCancel(context.WithoutCancel(t.Context()))
	s.b = subscription.NewBundle(subscription.Env{State: s.open, Life: life, Go: func(f func()) bool {
		if s.over.Load() {
			return false
		}
		s.work.Go(f)
		return true
	}, Sched: clock{sched.Real, by}})
	s.topic, err = topic.Open(t.Context(), topic.Env{Chain: f.Env()}, guard, chaintest.LogID, topic.Config{Snapshots: s.b.Snapshots(owner)})
	check(t, err)
	t.Cleanup(func() {
		s.set.Drop()
		end()
		s.topic.Shutdown()
		s.log.Shutdown()
		s.work.Wait()
	})
	s.serveTopic()
	return s
}

// serveTopic begins to serve the topic, as if it was opened again.
func (s *served) serveTopic() {
	s.set = s.b.NewSet(subscription.Config{
		Name: "orders", Owner: owner, Topic: s.topic, Gone: func() error { return errGone },
		Core: func(k subscription.Type) dispatch.Core {
			if k == subscription.Shared {
				return dispatch.NewShared(dispatch.DefaultConfig(true))
			}
			return dispatch.NewExclusive(dispatch.DefaultConfig(false))
		},
	})
}

var errGone = errors.New("served elsewhere")

func (s *served) open(ctx context.Context) (*statelog.Log, error) {
	s.mu.Lock()
	hold := s.state
	s.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.log, nil
}

// hold keeps the state log from whoever asks for it, until release.
func (s *served) hold() (release func()) {
	hold := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = hold
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.state = nil
		close(hold)
	}
}

// again has the topic closed and opened again.
func (s *served) again() {
	s.set.Close(s.t.Context())
	s.b.Forget(s.set)
	s.serveTopic()
}

// publish stores messages.
func (s *served) publish(n int) {
	s.t.Helper()
	p, err := s.topic.OpenProducer(s.t.Context(), "p", 0, false)
	check(s.t, err)
	defer p.Close()
	for i := range n {
		payload := frame.AppendMessage(nil, &frame.Message{Sequence: uint64(i), Value: []byte("x")})
		built := frame.Append(nil, &frame.Header{Producer: "p", Sequence: uint64(i), PublishTime: 5, Count: 1}, payload)
		parsed, err := frame.Parse(built, frame.DefaultLimits())
		check(s.t, err)
		done := make(chan error, 1)
		check(s.t, p.Append(s.t.Context(), topic.Batch{
			Frame: built, Parsed: &parsed, Level: ledger.AckQuorum, Done: func(_ topic.Receipt, err error) { done <- err },
		}))
		check(s.t, <-done)
	}
}

func (s *served) ensure(name string) *subscription.Subscription {
	s.t.Helper()
	sub, _, err := s.set.Ensure(s.t.Context(), name, at(0))
	check(s.t, err)
	return sub
}

func at(o entry.Offset) func(context.Context) (entry.Offset, error) {
	return func(context.Context) (entry.Offset, error) { return o, nil }
}

// stream is a consumer's way out.
type stream struct {
	mu      sync.Mutex
	got     []entry.Offset
	stopped error
	changed chan struct{} // capacity 1
}

func newStream() *stream { return &stream{changed: make(chan struct{}, 1)} }

func (s *stream) Send(ds []dispatch.Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		s.got = append(s.got, d.Offset)
	}
	s.nudge()
}

func (s *stream) Active(bool) {}

func (s *stream) Stop(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = why
	s.nudge()
}

// why says with what word it was stopped.
func (s *stream) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopped
}

func (s *stream) nudge() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// await waits until n messages have come, and returns their offsets.
func (s *stream) await(t *testing.T, n int) []entry.Offset {
	t.Helper()
	for {
		s.mu.Lock()
		got := s.got
		s.mu.Unlock()
		if len(got) >= n {
			return got
		}
		select {
		case <-s.changed:
		case <-t.Context().Done():
			t.Fatal("the test ends")
		}
	}
}

// ack acknowledges one message, and waits.
func ack(t *testing.T, c *subscription.Consumer, o entry.Offset) {
	t.Helper()
	done := make(chan error, 1)
	check(t, c.Ack([]cursor.Range{{First: o, End: o + 1}}, 0, func(err error) { done <- err }))
	check(t, <-done)
}
