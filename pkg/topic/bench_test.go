package topic_test

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// instant is bookies that store nothing and answer at once, from one goroutine: what is measured is this side.
type instant struct {
	ledger.Bookies
	mu    sync.Mutex
	ready sync.Cond
	queue []func(error)
	spare []func(error)
	over  bool
	done  chan struct{}
}

func newInstant() *instant {
	i := &instant{done: make(chan struct{})}
	i.ready.L = &i.mu
	go i.run()
	return i
}

func (i *instant) run() {
	defer close(i.done)
	for {
		i.mu.Lock()
		for len(i.queue) == 0 && !i.over {
			i.ready.Wait()
		}
		batch := i.queue
		i.queue, i.spare = i.spare[:0], batch
		over := i.over
		i.mu.Unlock()
		for _, done := range batch {
			done(nil)
		}
		if over && len(batch) == 0 {
			return
		}
	}
}

func (i *instant) Add(_ entry.StorageUUID, _ *bookiewire.Add, done func(error)) {
	i.mu.Lock()
	i.queue = append(i.queue, done)
	i.mu.Unlock()
	i.ready.Signal()
}

func (i *instant) WriteLAC(context.Context, entry.StorageUUID, bookiewire.WriteLAC) error { return nil }

func (i *instant) close() {
	i.mu.Lock()
	i.over = true
	i.mu.Unlock()
	i.ready.Signal()
	<-i.done
}

// BenchmarkAppend is one batch of 1 KiB through topic, chain and ledger writer, to three bookies that answer at once.
func BenchmarkAppend(b *testing.B) {
	for _, dedup := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "dedup"}[dedup], func(b *testing.B) {
			f := newCluster(b, 3)
			bookies := newInstant()
			defer bookies.close()
			env := topic.Env{Chain: f.Env(), Cache: topic.NewCache(16 << 20), Budget: budget.New(8 << 20)}
			env.Chain.Ledger.Bookies = bookies
			tp, err := topic.Open(b.Context(), env, f.Takeover(), logID, topic.Config{OpenNow: true})
			check(b, err)
			defer tp.Shutdown()
			p := producer(b, tp, "p", dedup)
			bt := batch(b, "p", 0, 1)
			frameBytes := make([]byte, 1024)
			copy(frameBytes, bt.Frame)
			bt.Frame = frameBytes
			parsed := *bt.Parsed
			bt.Parsed = &parsed
			var wg sync.WaitGroup
			bt.Done = func(_ topic.Receipt, err error) {
				if err != nil {
					panic(err)
				}
				wg.Done()
			}
			b.SetBytes(1024)
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				parsed.Sequence, parsed.HighestSequence = uint64(i), uint64(i)
				wg.Add(1)
				if err := p.Append(b.Context(), bt); err != nil {
					b.Fatal(err)
				}
			}
			wg.Wait()
		})
	}
}

// BenchmarkTailRead is reading one cached entry of 1 KiB, in reads of 64 KiB.
func BenchmarkTailRead(b *testing.B) {
	f := newCluster(b, 3)
	tp := f.open(f.Takeover(), topic.NewCache(64<<20), topic.Config{OpenNow: true})
	p := producer(b, tp, "p", false)
	bt := batch(b, "p", 0, 1)
	big := make([]byte, 1024)
	copy(big, bt.Frame)
	bt.Frame = big
	const entries = 1024
	for range entries {
		check(b, send(b, p, bt).wait(b).err)
	}
	b.SetBytes(1024)
	b.ReportAllocs()
	b.ResetTimer()
	r := tp.NewReader(0)
	for n := 0; n < b.N; {
		es, status, err := r.TryNext(64 << 10)
		if err != nil || status == topic.NeedsRead {
			b.Fatal(status, err)
		}
		if status == topic.AtEnd {
			r.Seek(0)
		}
		n += len(es)
	}
}

// An idle topic takes little memory and no goroutine. With an open ledger, in which something was stored, a good third of
// it is the ledger's writer; a topic that nothing was published to since it was opened has none.
func TestIdleTopicsAreSmall(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's shadow memory would be measured")
	}
	f := newCluster(t, 3)
	bookies := newInstant()
	defer bookies.close()
	guard := f.Takeover()
	env := topic.Env{Chain: f.Env(), Cache: topic.NewCache(1), Budget: budget.New(8 << 20)}
	env.Chain.Ledger.Bookies = bookies
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	const topics = 400
	for i, c := range []struct {
		name    string
		publish bool
		limit   int64
	}{{"without a ledger", false, 3 << 10}, {"with an open ledger", true, 6 << 10}} {
		all := make([]*topic.Topic, topics)
		goroutines := runtime.NumGoroutine()
		for j := range all {
			tp, err := topic.Open(t.Context(), env, guard, meta.DataChain(entry.UUID{15: byte(i)}, j), topic.Config{OpenNow: c.publish})
			check(t, err)
			if c.publish {
				p := producer(t, tp, "p", false)
				check(t, send(t, p, batch(t, "p", 0, 1)).wait(t).err)
				p.Close()
			}
			all[j] = tp
		}
		eventually(t, "goroutines to end", func() bool { return runtime.NumGoroutine() <= goroutines+10 })
		// What goes when they go is theirs; the rest is etcd's, which runs in this process.
		with := heap()
		for j, tp := range all {
			tp.Shutdown()
			all[j] = nil
		}
		each := int64(with-heap()) / topics
		t.Logf("%s: %d bytes a topic", c.name, each)
		if each > c.limit {
			t.Errorf("an idle topic %s takes %d bytes", c.name, each)
		}
	}
}
