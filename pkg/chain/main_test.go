package chain_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/chain/chaintest"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
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

// cluster has a metadata store with a valve.
type cluster struct {
	*chaintest.Cluster
	t    testing.TB
	meta *faultyMeta
}

func newCluster(tb testing.TB, bookies int) *cluster {
	tb.Helper()
	f := &cluster{Cluster: chaintest.New(tb, etcd.Client(), bookies), t: tb}
	f.meta = &faultyMeta{Metadata: f.Store}
	f.Meta = f.meta
	return f
}

// faultyMeta is the metadata store with a valve.
type faultyMeta struct {
	chain.Metadata
	mu     sync.Mutex
	fail   error              // of every call
	before func(string) error // each transaction: an error is its answer, and it is not applied
	after  func(string) error
	// late: an OpenLedger has an unknown outcome and is applied only when the next one comes.
	late    bool
	delayed func()
}

// delay tells whether this call is to be put off, and carries out one that was.
func (m *faultyMeta) delay(call func()) bool {
	m.mu.Lock()
	before := m.delayed
	m.delayed = nil
	put := m.late && before == nil
	if put {
		m.delayed = call
	}
	m.mu.Unlock()
	if before != nil {
		before()
	}
	return put
}

func (m *faultyMeta) set(fail error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = fail
}

func (m *faultyMeta) hooks(before, after func(string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before, m.after = before, after
}

func (m *faultyMeta) enter(op string) (func(string) error, error) {
	m.mu.Lock()
	fail, before, after := m.fail, m.before, m.after
	m.mu.Unlock()
	if before != nil && fail == nil {
		fail = before(op)
	}
	return after, fail
}

func (m *faultyMeta) GetChain(ctx context.Context, id meta.ChainID) (meta.Chain, error) {
	if _, err := m.enter("get chain"); err != nil {
		return meta.Chain{}, err
	}
	return m.Metadata.GetChain(ctx, id)
}

func (m *faultyMeta) OpenLedger(ctx context.Context, g meta.Guard, c meta.Chain, l meta.Ledger, closing *meta.Closing) (meta.Chain, meta.Ledger, error) {
	after, err := m.enter("open")
	if err != nil {
		return meta.Chain{}, meta.Ledger{}, err
	}
	if m.delay(func() { _, _, _ = m.Metadata.OpenLedger(context.WithoutCancel(ctx), g, c, l, closing) }) {
		return meta.Chain{}, meta.Ledger{}, meta.ErrUnknownOutcome
	}
	c, l, err = m.Metadata.OpenLedger(ctx, g, c, l, closing)
	if after != nil && err == nil {
		err = after("open")
	}
	return c, l, err
}

func (m *faultyMeta) DeleteLedger(ctx context.Context, g meta.Guard, c meta.Chain, id entry.LedgerID) (meta.Chain, error) {
	after, err := m.enter("delete")
	if err != nil {
		return meta.Chain{}, err
	}
	c, err = m.Metadata.DeleteLedger(ctx, g, c, id)
	if after != nil && err == nil {
		err = after("delete")
	}
	return c, err
}

func (m *faultyMeta) CloseLedger(ctx context.Context, g meta.Guard, c meta.Chain, closing meta.Closing) (meta.Chain, meta.Ledger, error) {
	if _, err := m.enter("close"); err != nil {
		return meta.Chain{}, meta.Ledger{}, err
	}
	return m.Metadata.CloseLedger(ctx, g, c, closing)
}

// body of a test's entry: offset after it, time, number.
func body(end entry.Offset, number uint64) []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(end))
	b = binary.BigEndian.AppendUint64(b, number)
	return append(b, make([]byte, 48)...)
}

func number(b []byte) uint64 { return binary.BigEndian.Uint64(b[8:]) }

func describe(b []byte) (entry.Offset, int64, error) {
	if len(b) < 16 {
		return 0, 0, errors.New("short")
	}
	return entry.Offset(binary.BigEndian.Uint64(b)), int64(number(b)), nil
}

// log is a chain under test with a record of what it told.
type log struct {
	t testing.TB
	*chain.Chain

	mu        sync.Mutex
	next      entry.Offset
	number    uint64
	acked     []uint64 // in order
	failed    map[uint64]error
	confirmed []uint64
	released  int
	appended  int
	changed   chan struct{}
	wg        sync.WaitGroup
}

func (f *cluster) open(guard meta.Guard, cfg chain.Config) *log {
	f.t.Helper()
	l, err := f.tryOpen(guard, cfg)
	check(f.t, err)
	return l
}

func (f *cluster) tryOpen(guard meta.Guard, cfg chain.Config) (*log, error) {
	l := &log{t: f.t, failed: map[uint64]error{}, changed: make(chan struct{})}
	cfg.Describe = describe
	cfg.Released = func(n int) {
		l.mu.Lock()
		l.released += n
		l.mu.Unlock()
	}
	cfg.OnConfirmed = func(es []chain.ConfirmedEntry) {
		l.mu.Lock()
		for _, e := range es {
			l.confirmed = append(l.confirmed, number(e.Body))
		}
		l.mu.Unlock()
	}
	c, err := chain.Open(f.t.Context(), f.Env(), guard, logID, cfg)
	if err != nil {
		return nil, err
	}
	l.Chain = c
	l.next = c.NextOffset()
	f.t.Cleanup(c.Shutdown)
	return l, nil
}

// append appends one entry of two messages.
func (l *log) append(level ledger.AckLevel) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.number++
	n := l.number
	l.next += 2
	b := body(l.next, n)
	l.appended += len(b)
	l.wg.Add(1)
	l.Append(chain.Append{Body: b, Span: 2, Time: int64(n), Level: level, Done: func(_ entry.Position, err error) {
		defer l.wg.Done()
		l.mu.Lock()
		defer l.mu.Unlock()
		if err == nil {
			l.acked = append(l.acked, n)
		} else {
			l.failed[n] = err
		}
		close(l.changed)
		l.changed = make(chan struct{})
	}})
}

// await waits until cond holds, which is asked after each append that is done.
func (l *log) await(what string, cond func() bool) {
	l.t.Helper()
	timeout := time.After(2 * time.Minute)
	for {
		l.mu.Lock()
		ok, changed := cond(), l.changed
		l.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			l.t.Fatalf("waited in vain for %s", what)
		}
	}
}

func (l *log) ackedNumbers() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]uint64(nil), l.acked...)
}

// readAll reads everything, and checks that offsets are contiguous.
func (l *log) readAll() []uint64 {
	l.t.Helper()
	var out []uint64
	var at entry.Position
	first := true
	var end entry.Offset
	for {
		es, next, err := l.Read(l.t.Context(), at, 300)
		check(l.t, err)
		if len(es) == 0 {
			return out
		}
		for _, e := range es {
			after, _, err := describe(e.Body)
			check(l.t, err)
			if !first && after != end+2 {
				l.t.Fatalf("entry %v ends at offset %d, the one before at %d", e.Position, after, end)
			}
			first, end = false, after
			out = append(out, number(e.Body))
		}
		at = next
	}
}

// one appends an entry, waits for it, and for the roll that it may have set off.
func (l *log) one() {
	l.t.Helper()
	l.append(ledger.AckQuorum)
	l.wg.Wait()
	eventually(l.t, "the roll", func() bool { return !l.Rolling() })
}

// accounted checks that every byte appended is given back, once.
func (l *log) accounted() {
	l.t.Helper()
	l.Shutdown()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released != l.appended {
		l.t.Fatalf("%d of %d bytes released", l.released, l.appended)
	}
}
