package ledger_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// memBookies are three bookies that keep nothing: a goroutine each answers what has come, in batches, as a connection does.
type memBookies struct {
	mu   sync.Mutex
	wake sync.Cond
	dead bool
	in   map[entry.StorageUUID]*[]func(error)
	wg   sync.WaitGroup
}

func newMemBookies(ids []entry.StorageUUID) *memBookies {
	m := &memBookies{in: map[entry.StorageUUID]*[]func(error){}}
	m.wake.L = &m.mu
	for _, u := range ids {
		q := new([]func(error))
		m.in[u] = q
		m.wg.Go(func() { m.serve(q) })
	}
	return m
}

func (m *memBookies) serve(q *[]func(error)) {
	var batch []func(error)
	for {
		m.mu.Lock()
		for len(*q) == 0 && !m.dead {
			m.wake.Wait()
		}
		if m.dead {
			m.mu.Unlock()
			return
		}
		batch, *q = *q, batch[:0]
		m.mu.Unlock()
		for _, done := range batch {
			done(nil)
		}
	}
}

func (m *memBookies) close() {
	m.mu.Lock()
	m.dead = true
	m.wake.Broadcast()
	m.mu.Unlock()
	m.wg.Wait()
}

func (m *memBookies) Add(to entry.StorageUUID, _ *bookiewire.Add, done func(error)) {
	m.mu.Lock()
	q := m.in[to]
	*q = append(*q, done)
	m.wake.Broadcast()
	m.mu.Unlock()
}

func (m *memBookies) Read(context.Context, entry.StorageUUID, bookiewire.Read, func(bookiewire.ReadReply, error)) {
	panic("not used")
}

func (m *memBookies) Fence(context.Context, entry.StorageUUID, bookiewire.Fence, func(bookiewire.FenceReply, error)) {
	panic("not used")
}

func (m *memBookies) WriteLAC(context.Context, entry.StorageUUID, bookiewire.WriteLAC) error {
	return nil
}

func (m *memBookies) WaitLAC(context.Context, entry.StorageUUID, bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	panic("not used")
}

// BenchmarkWriter appends 1 KiB entries to a ledger on three bookies in this process, with the given number in flight. Its
// figure is the cost of the writer itself, checksum included.
func BenchmarkWriter(b *testing.B) {
	for _, window := range []int{1, 64, 1024} {
		b.Run(fmt.Sprint("inflight=", window), func(b *testing.B) {
			w := newWorld(b, 3)
			mem := newMemBookies(w.ids)
			defer mem.close()
			w.env.Bookies = mem
			w.env.Config.Released = nil
			w.env.Config.SuspectAfter = time.Minute
			wr := ledger.NewWriter(w.env, w.open(1, 3, 3, 2))
			defer wr.Shutdown()
			body := make([]byte, 1024)
			slots := make(chan struct{}, window)
			done := func(_ entry.EntryID, err error) {
				if err != nil {
					b.Error(err)
				}
				<-slots
			}
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				slots <- struct{}{}
				wr.Append(body, ledger.AckQuorum, done)
			}
			for range window {
				slots <- struct{}{}
			}
		})
	}
}

// BenchmarkWriterCore is the state machine alone: append, three acknowledgements, completion.
func BenchmarkWriterCore(b *testing.B) {
	w := newWorld(b, 3)
	l := w.open(1, 3, 3, 2)
	c := ledger.NewWriterCore(w.env.Config, l, time.Now())
	body := make([]byte, 100)
	done := func(entry.EntryID, error) {}
	slots := l.Fragments[0].Slots
	b.ReportAllocs()
	var e entry.EntryID
	for b.Loop() {
		c.Append(body, ledger.AckQuorum, done)
		for i := range slots {
			c.Ack(e, i, slots[i].UUID)
		}
		c.Ready()
		c.Done()
		e++
	}
}

// BenchmarkIdleWriter reports what a writer that has nothing to do holds.
func BenchmarkIdleWriter(b *testing.B) {
	w := newWorld(b, 3)
	w.fake.Close() // not used
	l := w.open(1, 3, 3, 2)
	writers := make([]*ledger.Writer, 0, b.N)
	b.ReportAllocs()
	for range b.N {
		writers = append(writers, ledger.NewWriter(w.env, l))
	}
	b.StopTimer()
	for _, wr := range writers {
		wr.Shutdown()
	}
}

var _ ledger.Metadata = (*meta.Store)(nil)
