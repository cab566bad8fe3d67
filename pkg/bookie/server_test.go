package bookie

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

var me = Identity{Cluster: entry.UUID{0xc1}, Storage: entry.UUID{0x51}, ID: "bookie-1"}

const nonce = 42

// records are ledgers' metadata in memory.
type records struct {
	mu  sync.Mutex
	all map[entry.LedgerID]meta.Ledger
	err error
	// before, if set, runs in each read before it looks.
	before func()
}

func (r *records) GetLedger(_ context.Context, id entry.LedgerID) (meta.Ledger, error) {
	r.mu.Lock()
	before := r.before
	r.mu.Unlock()
	if before != nil {
		before()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return meta.Ledger{}, r.err
	}
	l, ok := r.all[id]
	if !ok {
		return meta.Ledger{}, fmt.Errorf("get ledger %d: %w", id, meta.ErrNotFound)
	}
	return l, nil
}

func (r *records) set(l meta.Ledger) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[l.ID] = l
}

func openLedger(id entry.LedgerID, on ...entry.StorageUUID) meta.Ledger {
	l := meta.Ledger{ID: id, State: meta.LedgerOpen, Nonce: nonce, Fragments: []meta.Fragment{{}}}
	for _, u := range on {
		l.Fragments[0].Slots = append(l.Fragments[0].Slots, meta.Slot{UUID: u})
	}
	return l
}

// rig is a server over a real store in memory, and a client.
type rig struct {
	t       *testing.T
	fs      *vfs.Mem
	store   *ledgerstore.Store
	records *records
	server  *Server
	client  *bookieclient.Client
	addr    string
	reg     *prometheus.Registry
	served  chan error
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newRig(t *testing.T, cfg ServerConfig) *rig {
	t.Helper()
	r := &rig{t: t, fs: vfs.NewMem(), records: &records{all: make(map[entry.LedgerID]meta.Ledger)}}
	r.records.set(openLedger(1, me.Storage))
	r.start(cfg)
	t.Cleanup(r.stop)
	return r
}

func (r *rig) start(cfg ServerConfig) {
	r.t.Helper()
	var err error
	r.store, err = ledgerstore.Open(r.t.Context(), ledgerstore.Config{
		Dir: "store", Cluster: me.Cluster, Storage: me.Storage, Fresh: true, SegmentSize: 1 << 20, CompactBytesPerSecond: -1,
	}, r.fs, quiet(), prometheus.NewRegistry())
	if err != nil {
		r.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.addr = l.Addr().String()
	r.reg = prometheus.NewRegistry()
	r.server = NewServer(cfg, me, r.store, r.records, quiet(), r.reg)
	r.served = make(chan error, 1)
	go func() { r.served <- r.server.Serve(l) }()
	r.client = bookieclient.New(bookieclient.Config{Cluster: me.Cluster, BackoffMin: time.Millisecond, BackoffMax: time.Millisecond},
		func(entry.StorageUUID) (string, bool) { return r.addr, true }, quiet(), nil)
}

func (r *rig) stop() {
	r.client.Close()
	r.server.Shutdown(context.Background())
	if err := <-r.served; err != nil {
		r.t.Errorf("serve: %v", err)
	}
	if err := r.store.Close(); err != nil {
		r.t.Errorf("close store: %v", err)
	}
}

func makeAdd(l entry.LedgerID, e entry.EntryID, body string) *bookiewire.Add {
	return &bookiewire.Add{
		Ledger: l, Entry: e, Nonce: nonce, LAC: e - 1, Checksum: entry.Checksum(l, e, []byte(body)), Body: []byte(body),
	}
}

func recoveryAdd(l entry.LedgerID, e entry.EntryID, t entry.Term, body string) *bookiewire.Add {
	a := makeAdd(l, e, body)
	a.Term, a.Recovery, a.Nonce = t, true, 0
	return a
}

func (r *rig) add(a *bookiewire.Add) bookiewire.Code {
	done := make(chan error, 1)
	r.client.Add(me.Storage, a, func(err error) { done <- err })
	return code(<-done)
}

func (r *rig) read(req bookiewire.Read) (bookiewire.ReadReply, bookiewire.Code) {
	type result struct {
		reply bookiewire.ReadReply
		err   error
	}
	done := make(chan result, 1)
	r.client.Read(r.t.Context(), me.Storage, req, func(reply bookiewire.ReadReply, err error) { done <- result{reply, err} })
	x := <-done
	return x.reply, code(x.err)
}

func (r *rig) fence(l entry.LedgerID, t entry.Term) bookiewire.Code {
	done := make(chan error, 1)
	r.client.Fence(r.t.Context(), me.Storage, bookiewire.Fence{Ledger: l, Term: t}, func(_ bookiewire.FenceReply, err error) { done <- err })
	return code(<-done)
}

func code(err error) bookiewire.Code {
	if err == nil {
		return bookiewire.OK
	}
	var e *bookiewire.Error
	if !errors.As(err, &e) {
		panic(err)
	}
	return e.Code
}

func (r *rig) want(what string, got, want bookiewire.Code) {
	r.t.Helper()
	if got != want {
		r.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// valueOf reads a counter or a gauge.
func valueOf(m prometheus.Metric) float64 {
	var d dto.Metric
	if err := m.Write(&d); err != nil {
		panic(err)
	}
	return d.GetCounter().GetValue() + d.GetGauge().GetValue()
}

func TestServerCarriesAllRequests(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	for i := range 20 {
		r.want("add", r.add(makeAdd(1, entry.EntryID(i), fmt.Sprint("body ", i))), bookiewire.OK)
	}
	reply, c := r.read(bookiewire.Read{Ledger: 1, First: 3, Stride: 2, MaxEntries: 4, MaxBytes: 1 << 20})
	r.want("read", c, bookiewire.OK)
	if len(reply.Entries) != 4 || reply.LAC != 18 {
		t.Fatalf("%d entries, lac %d", len(reply.Entries), reply.LAC)
	}
	for i, e := range reply.Entries {
		want := fmt.Sprint("body ", 3+2*i)
		if string(e.Body) != want || e.Checksum != entry.Checksum(1, e.Entry, e.Body) {
			t.Fatalf("entry %d: %q", e.Entry, e.Body)
		}
	}
	_, c = r.read(bookiewire.Read{Ledger: 1, First: 20, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	r.want("missing entry", c, bookiewire.NoEntry)
	_, c = r.read(bookiewire.Read{Ledger: 9, First: 0, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	r.want("missing ledger", c, bookiewire.NoLedger)
	if err := r.client.WriteLAC(t.Context(), me.Storage, bookiewire.WriteLAC{Ledger: 1, Nonce: nonce, LAC: 19}); err != nil {
		t.Fatal(err)
	}
	w, err := r.client.WaitLAC(t.Context(), me.Storage, bookiewire.WaitLAC{Ledger: 1, After: 18, Timeout: time.Minute})
	if err != nil || w.LAC != 19 {
		t.Fatalf("%+v %v", w, err)
	}
	if w, err = r.client.WaitLAC(t.Context(), me.Storage, bookiewire.WaitLAC{Ledger: 1, After: 19, Timeout: time.Millisecond}); err != nil || w.LAC != 19 {
		t.Fatalf("%+v %v", w, err)
	}
	r.want("fence", r.fence(1, 2), bookiewire.OK)
	r.want("old fence", r.fence(1, 1), bookiewire.Fenced)
	r.want("zombie", r.add(makeAdd(1, 20, "x")), bookiewire.Fenced)
	r.want("recovery", r.add(recoveryAdd(1, 20, 2, "x")), bookiewire.OK)
	if got := valueOf(r.server.metrics.adds[bookiewire.OK]); got != 21 {
		t.Fatalf("%v adds counted", got)
	}
}

func TestServerManyAddsAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{InFlightBytes: 64 << 10})
	const n = 3000
	rng := rand.New(rand.NewPCG(1, 2))
	bodies := make([][]byte, n)
	var wg sync.WaitGroup
	for i := range n {
		bodies[i] = make([]byte, rng.IntN(3000))
		for j := range bodies[i] {
			bodies[i][j] = byte(rng.Uint32())
		}
		wg.Add(1)
		r.client.Add(me.Storage, makeAdd(1, entry.EntryID(i), string(bodies[i])), func(err error) {
			if err != nil {
				t.Error(err)
			}
			wg.Done()
		})
	}
	wg.Wait()
	for next := 0; next < n; {
		reply, c := r.read(bookiewire.Read{Ledger: 1, First: entry.EntryID(next), Stride: 1, MaxEntries: 1000, MaxBytes: 500_000})
		r.want("read", c, bookiewire.OK)
		for _, e := range reply.Entries {
			if int(e.Entry) != next || string(e.Body) != string(bodies[next]) {
				t.Fatalf("entry %d differs", e.Entry)
			}
			next++
		}
	}
	if used := r.server.adds.Used(); used != 0 {
		t.Fatalf("%d bytes are still in flight", used)
	}
}

// B29: bytes damaged before the bookie got them are refused, and only they.
func TestB29ChecksumIsVerifiedOnIngress(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	bad := makeAdd(1, 0, "body")
	bad.Body = []byte("b0dy")
	r.want("damaged, ledger unknown", r.add(bad), bookiewire.BadChecksum)
	r.want("good", r.add(makeAdd(1, 0, "body")), bookiewire.OK)
	bad = makeAdd(1, 1, "body")
	bad.Entry = 2
	r.want("meant for another entry", r.add(bad), bookiewire.BadChecksum)
	_, c := r.read(bookiewire.Read{Ledger: 1, First: 2, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	r.want("read", c, bookiewire.NoEntry)
}

func (r *rig) dial() net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) shakeHands(use bookiewire.Use) net.Conn {
	r.t.Helper()
	c := r.dial()
	b, err := bookiewire.AppendHello(nil, bookiewire.Hello{MinVersion: 1, MaxVersion: 9, Use: use, Cluster: me.Cluster, Storage: me.Storage, BookieID: me.ID})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := c.Write(b); err != nil {
		r.t.Fatal(err)
	}
	w, err := bookiewire.ReadWelcome(c)
	if err != nil || w.Code != bookiewire.OK || w.Version != 1 || w.BookieID != me.ID {
		r.t.Fatalf("%+v %v", w, err)
	}
	return c
}

// expectEnd reads until the server has closed the connection.
func expectEnd(t *testing.T, what string, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		t.Errorf("%s: the connection stays open", what)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestGarbageClosesItsConnectionAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{HandshakeTimeout: time.Second})
	r.want("before", r.add(makeAdd(1, 0, "x")), bookiewire.OK)

	silent := r.dial()
	http := r.dial()
	_, _ = http.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	expectEnd(t, "http", http)
	half := r.dial()
	_, _ = half.Write([]byte("PNSTBKIE"))
	expectEnd(t, "half a hello", half)
	expectEnd(t, "silence", silent)

	frame := func(fill func(*bookiewire.Encoder)) []byte {
		var e bookiewire.Encoder
		fill(&e)
		return bytesOf(t, &e)
	}
	damaged := frame(func(e *bookiewire.Encoder) { e.Add(1, makeAdd(1, 1, "x")) })
	damaged[25]++
	huge := frame(func(e *bookiewire.Encoder) { e.Ping(1) })
	huge[0] = 0xff
	for what, c := range map[string]struct {
		use   bookiewire.Use
		bytes []byte
	}{
		"damaged add":                  {bookiewire.UseAdds, damaged},
		"huge frame":                   {bookiewire.UseRequests, huge},
		"random":                       {bookiewire.UseAdds, []byte("random bytes that are no frame at all, long enough for a header")},
		"read on a connection of adds": {bookiewire.UseAdds, frame(func(e *bookiewire.Encoder) { e.Read(1, bookiewire.Read{Stride: 1, MaxEntries: 1}) })},
		"add on one of requests":       {bookiewire.UseRequests, frame(func(e *bookiewire.Encoder) { e.Add(1, makeAdd(1, 1, "x")) })},
		"read of nothing":              {bookiewire.UseRequests, frame(func(e *bookiewire.Encoder) { e.Read(1, bookiewire.Read{}) })},
	} {
		conn := r.shakeHands(c.use)
		_, _ = conn.Write(c.bytes)
		expectEnd(t, what, conn)
	}
	r.want("after", r.add(makeAdd(1, 1, "x")), bookiewire.OK)
	if got := valueOf(r.server.metrics.malformed); got != 6 {
		t.Errorf("%v malformed connections counted", got)
	}
}

func bytesOf(t *testing.T, e *bookiewire.Encoder) []byte {
	t.Helper()
	var w writer
	if _, err := e.WriteTo(&w); err != nil {
		t.Fatal(err)
	}
	return w
}

type writer []byte

func (w *writer) Write(b []byte) (int, error) {
	*w = append(*w, b...)
	return len(b), nil
}

func TestHandshakeRefusals(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	good := bookiewire.Hello{MinVersion: 1, MaxVersion: 1, Use: bookiewire.UseAdds, Cluster: me.Cluster, Storage: me.Storage}
	for what, c := range map[string]struct {
		change func(*bookiewire.Hello)
		want   bookiewire.Code
	}{
		"cluster": {func(h *bookiewire.Hello) { h.Cluster[3]++ }, bookiewire.Unknown},
		"storage": {func(h *bookiewire.Hello) { h.Storage[3]++ }, bookiewire.Unknown},
		"name":    {func(h *bookiewire.Hello) { h.BookieID = "other" }, bookiewire.Unknown},
		"version": {func(h *bookiewire.Hello) { h.MinVersion, h.MaxVersion = 2, 3 }, bookiewire.BadRequest},
	} {
		h := good
		c.change(&h)
		b, err := bookiewire.AppendHello(nil, h)
		if err != nil {
			t.Fatal(err)
		}
		conn := r.dial()
		_, _ = conn.Write(b)
		w, err := bookiewire.ReadWelcome(conn)
		if err != nil || w.Code != c.want || w.Detail == "" {
			t.Errorf("%s: %+v %v", what, w, err)
		}
		expectEnd(t, what, conn)
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{MaxConnections: 1})
	first := r.shakeHands(bookiewire.UseAdds)
	second := r.dial()
	b, err := bookiewire.AppendHello(nil, bookiewire.Hello{MinVersion: 1, MaxVersion: 1, Use: bookiewire.UseAdds, Cluster: me.Cluster, Storage: me.Storage})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = second.Write(b)
	if w, err := bookiewire.ReadWelcome(second); err != nil || w.Code != bookiewire.Overloaded {
		t.Fatalf("%+v %v", w, err)
	}
	_ = first.Close()
}

// stuckStore takes adds and answers them when it is told.
type stuckStore struct {
	Storage
	taken chan *ledgerstore.Add
}

func (s *stuckStore) Admission(entry.LedgerID) (bool, uint64) { return true, 0 }
func (s *stuckStore) Add(a *ledgerstore.Add)                  { s.taken <- a }
func (s *stuckStore) WaitLAC(ctx context.Context, _ bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	<-ctx.Done()
	return bookiewire.WaitLACReply{}, ctx.Err()
}

func serveStuck(t *testing.T, cfg ServerConfig) (*Server, *stuckStore, *rig) {
	t.Helper()
	store := &stuckStore{taken: make(chan *ledgerstore.Add, 100)}
	s := NewServer(cfg, me, store, &records{}, quiet(), nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Shutdown(t.Context())
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return s, store, &rig{t: t, addr: l.Addr().String()}
}

// The budget of bytes in flight stops the reading: the peer feels it as back-pressure, nothing is refused.
func TestBudgetStopsTheReading(t *testing.T) {
	t.Parallel()
	s, store, r := serveStuck(t, ServerConfig{InFlightBytes: 2 * (100 + addOverhead)})
	c := r.shakeHands(bookiewire.UseAdds)
	var e bookiewire.Encoder
	for i := range 5 {
		e.Add(uint64(i+1), makeAdd(1, entry.EntryID(i), string(make([]byte, 100))))
	}
	if _, err := e.WriteTo(c); err != nil {
		t.Fatal(err)
	}
	frames := bookiewire.NewReader(c, 4096)
	var acked uint64
	for acked < 5 {
		a := <-store.taken
		if used := s.adds.Used(); used > s.adds.Capacity() {
			t.Fatalf("%d bytes in flight", used)
		}
		a.Done(nil)
		f, err := frames.Next()
		if err != nil {
			t.Fatal(err)
		}
		first, last, err := f.AddAck()
		if err != nil || first != acked+1 || last != first {
			t.Fatalf("ack of %d to %d after %d: %v", first, last, acked, err)
		}
		acked = last
	}
	if len(store.taken) != 0 {
		t.Fatal("more was taken than was sent")
	}
}

// Shutdown answers what was read, and ends waits.
func TestShutdownDrains(t *testing.T) {
	t.Parallel()
	s, store, r := serveStuck(t, ServerConfig{})
	adds, requests := r.shakeHands(bookiewire.UseAdds), r.shakeHands(bookiewire.UseRequests)
	var e bookiewire.Encoder
	e.WaitLAC(7, bookiewire.WaitLAC{Ledger: 1, Timeout: time.Minute})
	if _, err := e.WriteTo(requests); err != nil {
		t.Fatal(err)
	}
	e.Add(1, makeAdd(1, 0, "x"))
	if _, err := e.WriteTo(adds); err != nil {
		t.Fatal(err)
	}
	a := <-store.taken
	down := make(chan struct{})
	go func() {
		s.Shutdown(t.Context())
		close(down)
	}()
	expectEnd(t, "waiting connection", requests)
	a.Done(nil)
	f, err := bookiewire.NewReader(adds, 4096).Next()
	if err != nil {
		t.Fatalf("the add is not answered: %v", err)
	}
	if _, last, err := f.AddAck(); err != nil || last != 1 {
		t.Fatalf("acked up to %d, %v", last, err)
	}
	<-down
	if _, err := net.Dial("tcp", r.addr); err == nil {
		t.Fatal("still accepting")
	}
}

// A peer that never reads its answers is disconnected, and its bytes are given back.
func TestPeerThatDoesNotReadIsDisconnected(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{WriteTimeout: 50 * time.Millisecond, ReadBytes: 8 << 20})
	r.want("add", r.add(makeAdd(1, 0, string(make([]byte, 1<<20)))), bookiewire.OK)
	c := r.shakeHands(bookiewire.UseRequests)
	var e bookiewire.Encoder
	for i := range 100 {
		e.Read(uint64(i+1), bookiewire.Read{Ledger: 1, First: 0, Stride: 1, MaxEntries: 1, MaxBytes: 1 << 20})
	}
	if _, err := e.WriteTo(c); err != nil {
		t.Fatal(err)
	}
	for valueOf(r.server.metrics.slowPeers) == 0 {
		if _, code := r.read(bookiewire.Read{Ledger: 1, First: 0, Stride: 1, MaxEntries: 1, MaxBytes: 1}); code != bookiewire.OK {
			t.Fatalf("another's read: %s", code)
		}
	}
}

func BenchmarkServerAdd(b *testing.B) {
	for _, size := range []int{100, 1 << 10, 64 << 10} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			store, err := ledgerstore.Open(b.Context(), ledgerstore.Config{
				Dir: b.TempDir(), Cluster: me.Cluster, Storage: me.Storage, Fresh: true, SegmentSize: 64 << 20, LowRatio: 0.9999, HighRatio: 0.9999,
			}, vfs.OS(), quiet(), prometheus.NewRegistry())
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = store.Close() }()
			s := NewServer(ServerConfig{}, me, store, &records{all: map[entry.LedgerID]meta.Ledger{1: openLedger(1, me.Storage)}}, quiet(), nil)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			served := make(chan error, 1)
			go func() { served <- s.Serve(l) }()
			client := bookieclient.New(bookieclient.Config{Cluster: me.Cluster},
				func(entry.StorageUUID) (string, bool) { return l.Addr().String(), true }, quiet(), nil)
			defer func() {
				client.Close()
				s.Shutdown(b.Context())
				if err := <-served; err != nil {
					b.Error(err)
				}
			}()
			window := make(chan struct{}, max(64, (32<<20)/size/4))
			body := string(make([]byte, size))
			done := func(err error) {
				if err != nil {
					b.Error(err)
				}
				<-window
			}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				window <- struct{}{}
				client.Add(me.Storage, makeAdd(1, entry.EntryID(i), body), done)
			}
			for range cap(window) {
				window <- struct{}{}
			}
			b.StopTimer()
		})
	}
}
