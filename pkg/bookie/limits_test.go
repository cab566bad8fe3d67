package bookie

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// pipes is a listener whose connections buffer nothing.
type pipes struct {
	conns chan net.Conn
	ended chan struct{}
	once  sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), ended: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.ended:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.ended) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// dial connects and shakes hands.
func (p *pipes) dial(t *testing.T, use bookiewire.Use) net.Conn {
	t.Helper()
	mine, theirs := net.Pipe()
	p.conns <- theirs
	b, err := bookiewire.AppendHello(nil, bookiewire.Hello{MinVersion: 1, MaxVersion: 1, Use: use, Cluster: me.Cluster, Storage: me.Storage})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mine.Write(b); err != nil {
		t.Fatal(err)
	}
	if w, err := bookiewire.ReadWelcome(mine); err != nil || w.Code != bookiewire.OK {
		t.Fatalf("%+v %v", w, err)
	}
	return mine
}

// servePipes runs a server in a bubble; the function it returns ends it.
func servePipes(t *testing.T, cfg ServerConfig, store Storage, ledgers Ledgers) (*Server, *pipes, func()) {
	t.Helper()
	s, l := NewServer(cfg, me, store, ledgers, quiet(), nil), newPipes()
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	return s, l, func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s.Shutdown(ctx)
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// scriptedStore does as it is told; a ledger up to 99 is known to it.
type scriptedStore struct {
	Storage
	add   func(*ledgerstore.Add)
	fence func(bookiewire.Fence, func(bookiewire.FenceReply, error))
	read  func(context.Context, bookiewire.Read) (bookiewire.ReadReply, error)
}

func (s *scriptedStore) Admission(l entry.LedgerID) (bool, uint64) { return l < 100, 0 }
func (s *scriptedStore) Add(a *ledgerstore.Add)                    { s.add(a) }
func (s *scriptedStore) Fence(f bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
	s.fence(f, done)
}

func (s *scriptedStore) Read(ctx context.Context, r bookiewire.Read) (bookiewire.ReadReply, error) {
	return s.read(ctx, r)
}

func (s *scriptedStore) WaitLAC(ctx context.Context, _ bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	<-ctx.Done()
	return bookiewire.WaitLACReply{}, ctx.Err()
}

// ledgersFunc reads records.
type ledgersFunc func(ctx context.Context, id entry.LedgerID) (meta.Ledger, error)

func (f ledgersFunc) GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
	return f(ctx, id)
}

func stuckLedgers(ctx context.Context, _ entry.LedgerID) (meta.Ledger, error) {
	<-ctx.Done()
	return meta.Ledger{}, meta.ErrUnavailable
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// An add that waits for its metadata holds its own bytes, not the slab that it came in.
//
//nolint:paralleltest // it measures the heap
func TestWaitingAddsHoldTheirOwnBytes(t *testing.T) {
	cfg := ServerConfig{MetadataTimeout: time.Hour} // on a slow machine as well, they wait
	s := NewServer(cfg, me, &scriptedStore{add: func(a *ledgerstore.Add) { a.Done(nil) }}, ledgersFunc(stuckLedgers), quiet(), nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	c := (&rig{t: t, addr: l.Addr().String()}).shakeHands(bookiewire.UseAdds)
	before := heap()
	frames := bookiewire.NewReader(c, 4096)
	quick := string(make([]byte, 60<<10))
	var e bookiewire.Encoder
	seq := uint64(0)
	for i := range 400 {
		seq++
		e.Add(seq, makeAdd(entry.LedgerID(100+i), 0, "waits"))
		for range 4 {
			seq++
			e.Add(seq, makeAdd(1, entry.EntryID(seq), quick))
		}
		if _, err := e.WriteTo(c); err != nil {
			t.Fatal(err)
		}
		for acked := uint64(0); acked < seq; {
			f, err := frames.Next()
			if err != nil {
				t.Fatal(err)
			}
			if _, acked, err = f.AddAck(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if used := s.adds.Used(); used < 400*addOverhead || used > 400*2*addOverhead {
		t.Errorf("%d bytes are charged", used)
	}
	if after := heap(); after > before+30<<20 {
		t.Errorf("%d MiB are held for 400 small adds that wait", (after-before)>>20)
	}
	_ = c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.Shutdown(ctx)
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// A peer that does not read acknowledgements is not read any further once many ranges of them wait.
func TestUntoldAcknowledgementsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var withheld []*ledgerstore.Add
		taken := 0
		store := &scriptedStore{add: func(a *ledgerstore.Add) {
			if taken++; taken%2 == 0 {
				withheld = append(withheld, a) // so that no two ranges meet
				return
			}
			a.Done(nil)
		}}
		_, l, stop := servePipes(t, ServerConfig{WriteTimeout: time.Hour}, store, ledgersFunc(stuckLedgers))
		c := l.dial(t, bookiewire.UseAdds)
		const adds = 10_000
		go func() {
			var e bookiewire.Encoder
			for seq := range uint64(adds) {
				e.Add(seq+1, makeAdd(1, entry.EntryID(seq), "x"))
			}
			_, _ = e.WriteTo(c)
		}()
		synctest.Wait()
		if taken > 4*maxUntold { // those that wait, every second one, and those that are being written
			t.Errorf("%d adds were taken from a peer that reads nothing", taken)
		}
		told := make(chan struct{})
		go func() {
			defer close(told)
			frames := bookiewire.NewReader(c, 4096)
			for answered := uint64(0); answered < adds; {
				f, err := frames.Next()
				if err != nil {
					t.Error(err)
					return
				}
				first, last, err := f.AddAck()
				if err != nil {
					t.Error(err)
					return
				}
				answered += last - first + 1
			}
		}()
		synctest.Wait()
		if taken != adds {
			t.Errorf("%d adds were taken when it reads", taken)
		}
		for _, a := range withheld {
			a.Done(nil)
		}
		<-told
		_ = c.Close()
		stop()
	})
}

// Large frames are charged while they arrive, and one that stalls is not waited for.
func TestFramesThatArriveAreChargedAndMustEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{add: func(a *ledgerstore.Add) { a.Done(nil) }}
		s, l, stop := servePipes(t, ServerConfig{FrameBytes: 4 << 20, FrameTimeout: 10 * time.Second}, store, ledgersFunc(stuckLedgers))
		var e bookiewire.Encoder
		e.Add(1, makeAdd(1, 0, string(make([]byte, 3<<20))))
		large := bytesOf(t, &e)
		stalled := l.dial(t, bookiewire.UseAdds)
		_, _ = stalled.Write(large[:1<<20])
		inHeader := l.dial(t, bookiewire.UseRequests)
		_, _ = inHeader.Write(large[:5])
		idle := l.dial(t, bookiewire.UseRequests)
		other := l.dial(t, bookiewire.UseAdds)
		written := make(chan struct{})
		begun := time.Now()
		go func() {
			defer close(written)
			if _, err := other.Write(large); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		if used := s.frames.Used(); used != int64(len(large)) {
			t.Errorf("%d bytes are charged for frames that arrive", used)
		}
		<-written
		f, err := bookiewire.NewReader(other, 4096).Next()
		if err != nil {
			t.Fatal(err)
		}
		if _, last, err := f.AddAck(); err != nil || last != 1 {
			t.Fatalf("%d %v", last, err)
		}
		if waited := time.Since(begun); waited != 10*time.Second {
			t.Errorf("waited %v for the one that stalled", waited)
		}
		expectEnd(t, "stalled in a body", stalled)
		expectEnd(t, "stalled in a header", inHeader)
		time.Sleep(time.Minute)
		e.Ping(9)
		if _, err := e.WriteTo(idle); err != nil {
			t.Fatal(err)
		}
		if f, err := bookiewire.NewReader(idle, 4096).Next(); err != nil || f.Kind != bookiewire.KindPong {
			t.Fatalf("idle connection: %+v %v", f, err)
		}
		synctest.Wait()
		if used := s.frames.Used(); used != 0 {
			t.Errorf("%d bytes are still charged", used)
		}
		for _, c := range []net.Conn{stalled, inHeader, idle, other} {
			_ = c.Close()
		}
		stop()
	})
}

// Answers that nobody reads are bounded though their sizes are known only when they are there, and do not take what
// others need.
func TestUnreadAnswersAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const size = 4 << 20
		var reads atomic.Int64
		body := make([]byte, size)
		gate := make(chan struct{})
		store := &scriptedStore{read: func(context.Context, bookiewire.Read) (bookiewire.ReadReply, error) {
			<-gate
			reads.Add(1)
			return bookiewire.ReadReply{Entries: []bookiewire.ReadEntry{{Body: body}}}, nil
		}}
		cfg := ServerConfig{ReadBytes: 64 << 20, MaxReads: 2, WriteTimeout: time.Hour}
		s, l, stop := servePipes(t, cfg, store, ledgersFunc(stuckLedgers))
		ask := func(c net.Conn, n int) {
			var e bookiewire.Encoder
			for i := range n {
				e.Read(uint64(i+1), bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1, MaxBytes: 1})
			}
			if _, err := e.WriteTo(c); err != nil {
				t.Error(err)
			}
		}
		deaf := l.dial(t, bookiewire.UseRequests)
		ask(deaf, 100)
		synctest.Wait() // all that are guessed to fit are on their way
		close(gate)
		synctest.Wait()
		// A quarter of the budget, and as much as was under way when that turned out to be exceeded; one is being written.
		if n := reads.Load(); n > 4+int64(cfg.MaxReads)+1 {
			t.Errorf("%d answers of 4 MiB are held for a peer that does not read", n)
		}
		if used := s.reads.bytes.Used(); used > 32<<20 {
			t.Errorf("%d bytes of 64 MiB are used", used)
		}
		other := l.dial(t, bookiewire.UseRequests)
		ask(other, 1)
		if f, err := bookiewire.NewReader(other, 4096).Next(); err != nil || f.Kind != bookiewire.KindReadReply {
			t.Errorf("another peer: %+v %v", f, err)
		}
		_ = deaf.Close()
		_ = other.Close()
		synctest.Wait()
		if s.reads.bytes.Used() != 0 || s.requests.Load() != 0 {
			t.Errorf("%d bytes, %d requests are still charged", s.reads.bytes.Used(), s.requests.Load())
		}
		stop()
	})
}

func TestRequestsOfAllConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{read: func(ctx context.Context, _ bookiewire.Read) (bookiewire.ReadReply, error) {
			<-ctx.Done()
			return bookiewire.ReadReply{}, ctx.Err()
		}}
		_, l, stop := servePipes(t, ServerConfig{MaxAllRequests: 3, MaxWaits: 3}, store, ledgersFunc(stuckLedgers))
		for what, encode := range map[string]func(*bookiewire.Encoder, uint64){
			"reads": func(e *bookiewire.Encoder, seq uint64) {
				e.Read(seq, bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1})
			},
			"waits": func(e *bookiewire.Encoder, seq uint64) {
				e.WaitLAC(seq, bookiewire.WaitLAC{Ledger: 1, Timeout: time.Hour})
			},
		} {
			var all []net.Conn
			for i := range 2 {
				c := l.dial(t, bookiewire.UseRequests)
				all = append(all, c)
				var e bookiewire.Encoder
				for seq := range 2 {
					encode(&e, uint64(seq+1))
				}
				if _, err := e.WriteTo(c); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if i == 0 {
					continue
				}
				f, err := bookiewire.NewReader(c, 4096).Next()
				if err != nil {
					t.Fatal(err)
				}
				if failure, err := f.Failed(); err != nil || failure.Code != bookiewire.Overloaded || f.Seq != 2 {
					t.Errorf("%s: the fourth is answered %v to %d, %v", what, failure, f.Seq, err)
				}
			}
			for _, c := range all {
				_ = c.Close()
			}
			synctest.Wait()
		}
		stop()
	})
}

// A bookie that stops asks nobody any more about adds that wait: they were not stored.
func TestShutdownEndsAdmissions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		ledgers := func(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
			asked.Add(1)
			return stuckLedgers(ctx, id)
		}
		s, l, stop := servePipes(t, ServerConfig{MaxAdmissions: 1, MetadataTimeout: time.Hour}, &scriptedStore{}, ledgersFunc(ledgers))
		c := l.dial(t, bookiewire.UseAdds)
		go func() {
			var e bookiewire.Encoder
			for seq := range uint64(50) {
				e.Add(seq+1, makeAdd(entry.LedgerID(100+seq), 0, "x"))
			}
			_, _ = e.WriteTo(c)
		}()
		synctest.Wait()
		down := make(chan struct{})
		go func() {
			defer close(down)
			s.Shutdown(t.Context())
		}()
		frames := bookiewire.NewReader(c, 4096)
		for range 50 {
			f, err := frames.Next()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Failed(); err != nil {
				t.Fatal(err)
			}
		}
		<-down
		if n := asked.Load(); n != 1 {
			t.Errorf("asked %d times", n)
		}
		_ = c.Close()
		stop()
	})
}

// However many unknown ledgers are written to, etcd is asked about a few at a time, and each add has an answer.
func TestAdmissionReadsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var now, most, asked atomic.Int64
		ledgers := func(ctx context.Context, _ entry.LedgerID) (meta.Ledger, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			if asked.Add(1) <= 20 { // then etcd goes away
				time.Sleep(time.Millisecond)
				return meta.Ledger{}, meta.ErrNotFound
			}
			<-ctx.Done()
			return meta.Ledger{}, meta.ErrUnavailable
		}
		s, l, stop := servePipes(t, ServerConfig{MaxAdmissions: 4}, &scriptedStore{}, ledgersFunc(ledgers))
		c := l.dial(t, bookiewire.UseAdds)
		begun := time.Now()
		const adds = 500
		go func() {
			var e bookiewire.Encoder
			for seq := range uint64(adds) {
				e.Add(seq+1, makeAdd(entry.LedgerID(100+seq), 0, "x"))
			}
			_, _ = e.WriteTo(c)
		}()
		frames := bookiewire.NewReader(c, 4096)
		answers := make(map[bookiewire.Code]int)
		for range adds {
			f, err := frames.Next()
			if err != nil {
				t.Fatal(err)
			}
			failure, err := f.Failed()
			if err != nil {
				t.Fatal(err)
			}
			answers[failure.Code]++
		}
		if answers[bookiewire.NotAdmitted] != 20 || answers[bookiewire.Unknown] != adds-20 {
			t.Errorf("answers %v", answers)
		}
		if most.Load() != 4 {
			t.Errorf("%d reads at once", most.Load())
		}
		if took := time.Since(begun); took > 2*s.cfg.MetadataTimeout {
			t.Errorf("the last one waited %v while etcd was away", took)
		}
		_ = c.Close()
		stop()
		if len(s.admitted.waiting) != 0 || s.admitted.readers != 0 {
			t.Errorf("left: %d ledgers, %d readers", len(s.admitted.waiting), s.admitted.readers)
		}
	})
}

// Brokers that stand still, having asked for more than they read, hold what ordinary traffic may have. Another one fences,
// reads what it recovers and adds all the same, and at once.
func TestFrozenPeersHoldUpNoRecovery(t *testing.T) {
	t.Parallel()
	for _, most := range []int{50, 10_000} { // requests at work: the number or the bytes are used up first
		t.Run(strconv.Itoa(most), func(t *testing.T) { t.Parallel(); frozenPeers(t, most) })
	}
}

func frozenPeers(t *testing.T, most int) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		body := make([]byte, 1<<20)
		store := &scriptedStore{
			read: func(context.Context, bookiewire.Read) (bookiewire.ReadReply, error) {
				return bookiewire.ReadReply{Entries: []bookiewire.ReadEntry{{Body: body}}}, nil
			},
			fence: func(_ bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
				go done(bookiewire.FenceReply{LAC: 7}, nil)
			},
			add: func(a *ledgerstore.Add) { go a.Done(nil) },
		}
		const frozen, each = 6, 50
		s, l, stop := servePipes(t, ServerConfig{
			ReadBytes: 16 << 20, MaxReads: 4, MaxAllRequests: most, WriteTimeout: time.Hour,
		}, store, ledgersFunc(stuckLedgers))
		var conns []net.Conn
		send := func(use bookiewire.Use, fill func(*bookiewire.Encoder)) net.Conn {
			c := l.dial(t, use)
			conns = append(conns, c)
			var e bookiewire.Encoder
			fill(&e)
			if _, err := e.WriteTo(c); err != nil {
				t.Error(err)
			}
			return c
		}
		for range frozen {
			send(bookiewire.UseRequests, func(e *bookiewire.Encoder) {
				for i := range each {
					e.Read(uint64(i+1), bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1, MaxBytes: 1 << 20})
				}
			})
		}
		synctest.Wait()
		for what, c := range map[string]net.Conn{
			"fence": send(bookiewire.UseRequests, func(e *bookiewire.Encoder) { e.Fence(1, bookiewire.Fence{Ledger: 2, Term: 1}) }),
			"read of a recovery": send(bookiewire.UseRequests, func(e *bookiewire.Encoder) {
				e.Read(1, bookiewire.Read{Ledger: 2, Stride: 1, MaxEntries: 1, MaxBytes: 1, Recovery: true, Term: 1})
			}),
			"add": send(bookiewire.UseAdds, func(e *bookiewire.Encoder) { e.Add(1, makeAdd(2, 0, "x")) }),
		} {
			if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				t.Fatal(err)
			}
			if f, err := bookiewire.NewReader(c, 4096).Next(); err != nil || f.Kind == bookiewire.KindFailed {
				t.Errorf("%s: %v %v", what, f.Kind, err)
			}
		}
		for _, c := range conns {
			_ = c.Close()
		}
		synctest.Wait()
		if s.reads.bytes.Used() != 0 || s.recovery.bytes.Used() != 0 || s.requests.Load() != 0 || s.adds.Used() != 0 {
			t.Errorf("something is still charged: %d %d bytes, %d requests, %d bytes of adds",
				s.reads.bytes.Used(), s.recovery.bytes.Used(), s.requests.Load(), s.adds.Used())
		}
		stop()
	})
}

// Whoever expects another bookie here is refused, and the log says why: from outside it looks like a bookie that is away.
func TestARefusedPeerIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer // written before the refusing connection ends
		s, l := NewServer(ServerConfig{}, me, &scriptedStore{}, ledgersFunc(stuckLedgers), slog.New(slog.NewTextHandler(&log, nil)), nil), newPipes()
		served := make(chan error, 1)
		go func() { served <- s.Serve(l) }()
		mine, theirs := net.Pipe()
		l.conns <- theirs
		b, err := bookiewire.AppendHello(nil, bookiewire.Hello{MinVersion: 1, MaxVersion: 1, Use: bookiewire.UseRequests, Cluster: entry.UUID{7}, Storage: me.Storage})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := mine.Write(b); err != nil {
			t.Fatal(err)
		}
		if w, err := bookiewire.ReadWelcome(mine); err != nil || w.Code != bookiewire.Unknown {
			t.Fatalf("%+v %v", w, err)
		}
		synctest.Wait()
		if text := log.String(); !strings.Contains(text, "level=WARN") || !strings.Contains(text, "this is cluster") {
			t.Errorf("the log says %q", text)
		}
		_ = mine.Close()
		s.Shutdown(t.Context())
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}
