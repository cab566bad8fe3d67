package topic_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/chain/chaintest"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// etcd is shared by all tests; each uses a cluster of its own.
var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

const (
	bundle = chaintest.Bundle
	logID  = chaintest.LogID
)

var (
	check      = chaintest.Check
	eventually = chaintest.Eventually
)

// cluster has the budget of the topics of a process.
type cluster struct {
	*chaintest.Cluster
	t      testing.TB
	budget *budget.Budget
}

func newCluster(tb testing.TB, bookies int) *cluster {
	tb.Helper()
	return &cluster{Cluster: chaintest.New(tb, etcd.Client(), bookies), t: tb, budget: budget.New(1 << 20)}
}

// memStore is a snapshot store in memory.
type memStore struct {
	mu      sync.Mutex
	records map[string][]byte
	saves   int
	fail    error
	cut     int                  // of a failing save, how many records are kept
	hook    func(save int) error // if set, is asked first, without the lock
}

func newMemStore() *memStore { return &memStore{records: map[string][]byte{}} }

func (s *memStore) Load(context.Context) ([]topic.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []topic.Record
	for k, v := range s.records {
		out = append(out, topic.Record{Key: []byte(k), Value: v})
	}
	return out, nil
}

func (s *memStore) Save(_ context.Context, records []topic.Record) error {
	s.mu.Lock()
	s.saves++
	hook, n := s.hook, s.saves
	s.mu.Unlock()
	if hook != nil {
		if err := hook(n); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		records = records[:min(s.cut, len(records))]
	}
	for _, r := range records {
		if r.Delete {
			delete(s.records, string(r.Key))
		} else {
			s.records[string(r.Key)] = r.Value
		}
	}
	return s.fail
}

// set has saves fail, of which so many records are kept; or not any more.
func (s *memStore) set(fail error, cut int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail, s.cut = fail, cut
}

// open opens the topic for the present owner.
func (f *cluster) open(guard meta.Guard, cache *topic.Cache, cfg topic.Config) *topic.Topic {
	f.t.Helper()
	tp, err := topic.Open(f.t.Context(), topic.Env{Chain: f.Env(), Cache: cache, Budget: f.budget}, guard, logID, cfg)
	check(f.t, err)
	f.t.Cleanup(tp.Shutdown)
	return tp
}

// batch is a frame of n messages from sequence first on, whose values are the producer's name and the sequence.
func batch(tb testing.TB, producer string, first uint64, n int) topic.Batch {
	tb.Helper()
	var payload []byte
	for i := range n {
		payload = frame.AppendMessage(payload, &frame.Message{
			Sequence: first + uint64(i), Value: fmt.Appendf(nil, "%s/%d", producer, first+uint64(i)),
		})
	}
	b := frame.Append(nil, &frame.Header{Producer: producer, Sequence: first, PublishTime: 5, Count: n}, payload)
	parsed, err := frame.Parse(b, frame.DefaultLimits())
	check(tb, err)
	return topic.Batch{Frame: b, Parsed: &parsed}
}

// clock is the real scheduler with a clock that the test moves.
type clock struct {
	sched.Scheduler
	now time.Time
}

func newClock(millis int64) *clock { return &clock{sched.Real, time.UnixMilli(millis)} }

func (c *clock) Now() time.Time { return c.now }

func (c *clock) Add(d time.Duration) { c.now = c.now.Add(d) }

// sent is what became of a batch.
type sent struct {
	topic.Receipt
	err  error
	done chan struct{}
}

func (s *sent) wait(tb testing.TB) *sent {
	tb.Helper()
	select {
	case <-s.done:
	case <-time.After(2 * time.Minute):
		tb.Fatal("a batch is never done")
	}
	return s
}

// send appends a batch and returns at once.
func send(tb testing.TB, p *topic.Producer, b topic.Batch) *sent {
	tb.Helper()
	s, err := trySend(tb, p, b)
	check(tb, err)
	return s
}

func trySend(tb testing.TB, p *topic.Producer, b topic.Batch) (*sent, error) {
	tb.Helper()
	s := &sent{done: make(chan struct{})}
	b.Done = func(r topic.Receipt, err error) {
		s.Receipt, s.err = r, err
		close(s.done)
	}
	return s, p.Append(tb.Context(), b)
}

func producer(tb testing.TB, tp *topic.Topic, name string, dedup bool) *topic.Producer {
	tb.Helper()
	p, err := tp.OpenProducer(tb.Context(), name, 0, dedup)
	check(tb, err)
	return p
}

// values reads all messages from an offset on, and checks that offsets are contiguous.
func values(tb testing.TB, tp *topic.Topic, from entry.Offset) []string {
	tb.Helper()
	r := tp.NewReader(from)
	next := from
	var out []string
	for {
		end := tp.Next() // more may come meanwhile
		es, err := r.Read(tb.Context(), 1<<62, 500)
		check(tb, err)
		if len(es) == 0 {
			if next < end {
				tb.Fatalf("read up to offset %d of %d", next, end)
			}
			return out
		}
		for _, e := range es {
			if e.Envelope.Base > next {
				tb.Fatalf("entry %v has offset %d, expected %d", e.Position, e.Envelope.Base, next)
			}
			f, err := frame.Parse(e.Frame, frame.DefaultLimits())
			check(tb, err)
			i := e.Envelope.Base
			for m, err := range f.Messages(f.Payload) {
				check(tb, err)
				if i >= next {
					out = append(out, string(m.Value))
				}
				i++
			}
			next = e.Envelope.Base + entry.Offset(e.Envelope.Span)
		}
	}
}

// openFresh opens the topic for a new owner.
func (f *cluster) openFresh(store topic.SnapshotStore) *topic.Topic {
	f.t.Helper()
	return f.open(f.Takeover(), nil, topic.Config{Snapshots: store})
}
