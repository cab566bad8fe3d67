package bookieclient

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

var _ bookies = (*Client)(nil)

var cluster = entry.UUID{1}

// peerEnd is the bookie's end of a connection, played by the test.
type peerEnd struct {
	t    *testing.T
	conn net.Conn
	r    *bookiewire.Reader
	use  bookiewire.Use
}

func (p *peerEnd) next() bookiewire.Frame {
	p.t.Helper()
	f, err := p.r.Next()
	if err != nil {
		p.t.Errorf("bookie's end: %v", err)
	}
	return f
}

func (p *peerEnd) nextAdd() (uint64, bookiewire.Add) {
	p.t.Helper()
	f := p.next()
	var a bookiewire.Add
	if err := f.Add(&a); err != nil {
		p.t.Errorf("bookie's end: %v", err)
	}
	return f.Seq, a
}

func (p *peerEnd) send(fill func(*bookiewire.Encoder)) {
	p.t.Helper()
	var e bookiewire.Encoder
	fill(&e)
	if _, err := e.WriteTo(p.conn); err != nil {
		p.t.Errorf("bookie's end: %v", err)
	}
}

// dialer hands the bookie's ends of pipes to the test.
type dialer struct {
	t     *testing.T
	ends  chan net.Conn
	dials atomic.Int32
	fail  atomic.Bool
}

func newDialer(t *testing.T) *dialer { //nolint:thelper // it reports nothing itself
	return &dialer{t: t, ends: make(chan net.Conn, 16)}
}

func (d *dialer) dial(ctx context.Context, _ string) (net.Conn, error) {
	d.dials.Add(1)
	if d.fail.Load() {
		return nil, errors.New("refused")
	}
	here, there := net.Pipe()
	select {
	case d.ends <- there:
		return here, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// accept shakes hands as bookie b.
func (d *dialer) accept(b entry.StorageUUID) *peerEnd {
	d.t.Helper()
	conn := <-d.ends
	h, err := bookiewire.ReadHello(conn)
	if err != nil {
		d.t.Errorf("hello: %v", err)
	}
	w, err := bookiewire.AppendWelcome(nil, bookiewire.Welcome{Version: 1, Cluster: cluster, Storage: b, MaxBody: bookiewire.MaxBody})
	if err != nil {
		d.t.Errorf("welcome: %v", err)
	}
	if _, err := conn.Write(w); err != nil {
		d.t.Errorf("welcome: %v", err)
	}
	return &peerEnd{t: d.t, conn: conn, r: bookiewire.NewReader(conn, 4096), use: h.Use}
}

func known(entry.StorageUUID) (string, bool) { return "bookie:7651", true }

func newClient(d *dialer, cfg Config) *Client {
	cfg.Cluster = cluster
	cfg.Dial = d.dial
	return New(cfg, known, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
}

// recorder notes answers in order.
type recorder struct {
	mu  sync.Mutex
	got []string
}

func (r *recorder) note(name string) func(error) {
	return func(err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.got = append(r.got, name+":"+code(err).String())
	}
}

func (r *recorder) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := fmt.Sprint(r.got)
	r.got = nil
	return s
}

func (r *recorder) expect(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	if got := r.take(); got != fmt.Sprint(want) {
		t.Fatalf("answers\n got %s\nwant %s", got, want)
	}
}

func TestClientAcknowledgesRangesAndFailures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		var r recorder
		b := FakeUUID(1)
		for i := range 6 {
			c.Add(b, makeAdd(entry.EntryID(i), "body"), r.note(strconv.Itoa(i)))
		}
		p := d.accept(b)
		if p.use != bookiewire.UseAdds {
			t.Fatalf("use %d", p.use)
		}
		for i := range 6 {
			seq, a := p.nextAdd()
			if seq != uint64(i)+1 || a.Entry != entry.EntryID(i) || string(a.Body) != "body" || a.Checksum != makeAdd(a.Entry, "body").Checksum {
				t.Fatalf("add %d: seq %d, %+v", i, seq, a)
			}
		}
		r.expect(t)
		p.send(func(e *bookiewire.Encoder) {
			e.Failed(2, &bookiewire.Error{Code: bookiewire.Fenced, Term: 4})
			e.AddAck(1, 4)
		})
		r.expect(t, "1:Fenced", "0:OK", "2:OK", "3:OK")
		p.send(func(e *bookiewire.Encoder) { e.AddAck(5, 5) })
		r.expect(t, "4:OK")
		// What is in flight when the connection breaks fails once; a next add connects again.
		_ = p.conn.Close()
		r.expect(t, "5:Disconnected")
		c.Add(b, makeAdd(6, "body"), r.note("6"))
		p = d.accept(b)
		if seq, _ := p.nextAdd(); seq != 1 {
			t.Fatalf("numbers of a new connection start at %d", seq)
		}
		p.send(func(e *bookiewire.Encoder) { e.AddAck(1, 1) })
		r.expect(t, "6:OK")
	})
}

func TestClientRefusesAnswersToWhatWasNotSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, fill := range []func(*bookiewire.Encoder){
			func(e *bookiewire.Encoder) { e.AddAck(1, 2) },
			func(e *bookiewire.Encoder) { e.AddAck(0, 1) },
			func(e *bookiewire.Encoder) { e.FenceReply(1, bookiewire.FenceReply{}) },
		} {
			d := newDialer(t)
			c := newClient(d, Config{})
			var r recorder
			c.Add(FakeUUID(1), makeAdd(0, "x"), r.note("0"))
			p := d.accept(FakeUUID(1))
			p.nextAdd()
			p.send(fill)
			r.expect(t, "0:Disconnected")
			c.Close()
		}
	})
}

func TestClientRequestsAreAnsweredInAnyOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		var entries []bookiewire.ReadEntry
		c.Read(t.Context(), b, bookiewire.Read{Ledger: 1, First: 2, Stride: 1, MaxEntries: 2, MaxBytes: 1 << 20}, func(reply bookiewire.ReadReply, err error) {
			entries = reply.Entries
			r.note(fmt.Sprintf("read lac %d", reply.LAC))(err)
		})
		go func() {
			reply, err := c.WaitLAC(t.Context(), b, bookiewire.WaitLAC{Ledger: 1, After: 5, Timeout: time.Second})
			r.note(fmt.Sprintf("wait lac %d", reply.LAC))(err)
		}()
		synctest.Wait()
		go func() { r.note("lac")(c.WriteLAC(t.Context(), b, bookiewire.WriteLAC{Ledger: 1, LAC: 3})) }()
		p := d.accept(b)
		if p.use != bookiewire.UseRequests {
			t.Fatalf("use %d", p.use)
		}
		read, wait, lac := p.next().Own(), p.next().Own(), p.next().Own()
		if rd, err := read.Read(); err != nil || rd.First != 2 {
			t.Fatalf("%+v %v", rd, err)
		}
		big := bytes.Repeat([]byte("z"), 100_000)
		p.send(func(e *bookiewire.Encoder) {
			e.WriteLACReply(lac.Seq)
			e.WaitLACReply(wait.Seq, bookiewire.WaitLACReply{LAC: 7})
		})
		synctest.Wait()
		p.send(func(e *bookiewire.Encoder) {
			e.ReadReply(read.Seq, bookiewire.ReadReply{LAC: 9, Entries: []bookiewire.ReadEntry{{Entry: 2, Body: big}, {Entry: 3, Body: []byte("s")}}})
			e.Pong(0)
		})
		synctest.Wait()
		if got := r.take(); got != "[lac:OK wait lac 7:OK read lac 9:OK]" && got != "[wait lac 7:OK lac:OK read lac 9:OK]" {
			t.Fatal(got)
		}
		if len(entries) != 2 || !bytes.Equal(entries[0].Body, big) || string(entries[1].Body) != "s" {
			t.Fatal("entries differ")
		}
	})
}

func TestClientCancelsOneRequestAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		ctx, cancel := context.WithCancel(t.Context())
		c.Fence(ctx, b, bookiewire.Fence{Ledger: 1, Term: 1}, func(_ bookiewire.FenceReply, err error) { r.note("cancelled")(err) })
		c.Fence(t.Context(), b, bookiewire.Fence{Ledger: 2, Term: 1}, func(_ bookiewire.FenceReply, err error) { r.note("kept")(err) })
		p := d.accept(b)
		one, two := p.next().Seq, p.next().Seq
		cancel()
		r.expect(t, "cancelled:Disconnected")
		p.send(func(e *bookiewire.Encoder) {
			e.FenceReply(one, bookiewire.FenceReply{})
			e.FenceReply(two, bookiewire.FenceReply{})
		})
		r.expect(t, "kept:OK")
		c.Fence(ctx, b, bookiewire.Fence{Ledger: 1, Term: 1}, func(_ bookiewire.FenceReply, err error) { r.note("late")(err) })
		r.expect(t, "late:Disconnected")
	})
}

func TestClientNoticesSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		c.Add(b, makeAdd(0, "x"), r.note("0"))
		p := d.accept(b)
		p.nextAdd()
		start := time.Now()
		pings := 0
		for {
			f, err := p.r.Next()
			if err != nil {
				break
			}
			if f.Kind == bookiewire.KindPing {
				pings++
			}
		}
		r.expect(t, "0:Disconnected")
		if took := time.Since(start); pings == 0 || took < 5*time.Second || took > 8*time.Second {
			t.Fatalf("%d pings, given up after %v", pings, took)
		}
		// A bookie that is alive and merely slow gets its time, but not forever.
		time.Sleep(time.Second)
		c.Add(b, makeAdd(0, "x"), r.note("slow"))
		p = d.accept(b)
		p.nextAdd()
		start = time.Now()
		for {
			f, err := p.r.Next()
			if err != nil {
				break
			}
			seq := f.Seq
			p.send(func(e *bookiewire.Encoder) { e.Pong(seq) })
		}
		r.expect(t, "slow:Disconnected")
		if took := time.Since(start); took < 10*time.Second || took > 12*time.Second {
			t.Fatalf("given up after %v", took)
		}
	})
}

// A bookie that stands still does not take what is sent to it either, and is noticed all the same.
func TestClientNoticesSilenceWhileItWrites(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		b := FakeUUID(1)
		answer := make(chan error, 1)
		start := time.Now()
		c.Add(b, makeAdd(0, "x"), func(err error) { answer <- err })
		d.accept(b) // and reads nothing any more
		if err := <-answer; code(err) != bookiewire.Disconnected {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 5*time.Second || took > 8*time.Second {
			t.Fatalf("given up after %v", took)
		}
	})
}

// A long answer that is on its way is no silence.
func TestClientWaitsForAnAnswerThatComesSlowly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		b := FakeUUID(1)
		got := make(chan error, 1)
		c.Read(t.Context(), b, bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1}, func(_ bookiewire.ReadReply, err error) { got <- err })
		p := d.accept(b)
		f := p.next()
		var e bookiewire.Encoder
		e.ReadReply(f.Seq, bookiewire.ReadReply{Entries: []bookiewire.ReadEntry{{Body: make([]byte, 80)}}})
		var reply bytes.Buffer
		if _, err := e.WriteTo(&reply); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, p.conn) }() // pings, should there be any
		for reply.Len() > 0 {
			time.Sleep(9 * time.Second / 128)
			if _, err := p.conn.Write(reply.Next(1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-got; err != nil {
			t.Fatal(err)
		}
	})
}

func TestClientLateRequestFailsAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		go func() { r.note("write")(c.WriteLAC(t.Context(), b, bookiewire.WriteLAC{Ledger: 1})) }()
		synctest.Wait()
		go func() {
			_, err := c.WaitLAC(t.Context(), b, bookiewire.WaitLAC{Ledger: 1, Timeout: 20 * time.Second})
			r.note("wait")(err)
		}()
		p := d.accept(b)
		p.next()
		wait := p.next().Seq
		go func() {
			for {
				f, err := p.r.Next()
				if err != nil {
					return
				}
				if f.Kind == bookiewire.KindPing {
					p.send(func(e *bookiewire.Encoder) { e.Pong(f.Seq) })
				}
			}
		}()
		time.Sleep(12 * time.Second)
		r.expect(t, "write:Disconnected")
		p.send(func(e *bookiewire.Encoder) { e.WaitLACReply(wait, bookiewire.WaitLACReply{LAC: 1}) })
		r.expect(t, "wait:OK")
	})
}

// Fences and the reads of recoveries have a connection of their own: what ordinary requests wait for does not hold them up.
// One that is given up tells how far it came.
func TestRecoveriesPassOrdinaryRequests(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{MaxRequests: 1})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		c.Read(t.Context(), b, bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1}, func(_ bookiewire.ReadReply, err error) { r.note("read")(err) })
		ordinary := d.accept(b)
		ordinary.next() // and nothing comes of it
		c.Fence(t.Context(), b, bookiewire.Fence{Ledger: 1, Term: 1}, func(_ bookiewire.FenceReply, err error) { r.note("fence")(err) })
		p := d.accept(b)
		fence := p.next().Seq
		p.send(func(e *bookiewire.Encoder) { e.FenceReply(fence, bookiewire.FenceReply{}) })
		r.expect(t, "fence:OK")
		ctx, cancel := context.WithCancel(t.Context())
		why := make(chan error, 1)
		c.Read(ctx, b, bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1, Recovery: true, Term: 1}, func(_ bookiewire.ReadReply, err error) { why <- err })
		p.next()
		cancel()
		if err := <-why; !strings.Contains(err.Error(), "not answered; link: connected to") {
			t.Errorf("a request that is given up: %v", err)
		}
	})
}

func TestClientBacksOffAndFailsFastMeanwhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		d.fail.Store(true)
		c := newClient(d, Config{BackoffMin: time.Second, BackoffMax: 4 * time.Second})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		for range 100 {
			c.Add(b, makeAdd(0, "x"), r.note("a"))
			r.expect(t, "a:Disconnected")
			time.Sleep(100 * time.Millisecond)
		}
		// 10 s: pauses of at most 1, 2, 4, 4 s, of which at least half is waited for.
		if n := d.dials.Load(); n < 3 || n > 8 {
			t.Fatalf("%d attempts in 10 s", n)
		}
		d.fail.Store(false)
		time.Sleep(5 * time.Second)
		c.Add(b, makeAdd(0, "x"), r.note("back"))
		p := d.accept(b)
		seq, _ := p.nextAdd()
		p.send(func(e *bookiewire.Encoder) { e.AddAck(seq, seq) })
		r.expect(t, "back:OK")
	})
}

// A bookie that stays out of reach is told of now and then, not once and not each time.
func TestClientRepeatsWhyABookieIsOutOfReach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		d.fail.Store(true)
		var log bytes.Buffer
		c := New(Config{Cluster: cluster, Dial: d.dial}, known, slog.New(slog.NewTextHandler(&log, nil)), nil)
		var r recorder
		for range 65 {
			c.Fence(t.Context(), FakeUUID(1), bookiewire.Fence{Ledger: 1, Term: 1}, func(_ bookiewire.FenceReply, err error) { r.note("f")(err) })
			r.expect(t, "f:Disconnected")
			time.Sleep(time.Second)
		}
		c.Close()
		if n := strings.Count(log.String(), "refused"); n != 3 {
			t.Errorf("told %d times in 65 s:\n%s", n, log.String())
		}
	})
}

func TestClientRefusesWrongIdentity(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		defer c.Close()
		var r recorder
		c.Add(FakeUUID(1), makeAdd(0, "x"), r.note("other storage"))
		d.accept(FakeUUID(2))
		r.expect(t, "other storage:Unknown")
		time.Sleep(time.Second)
		c.Add(FakeUUID(1), makeAdd(0, "x"), r.note("refused"))
		conn := <-d.ends
		if _, err := bookiewire.ReadHello(conn); err != nil {
			t.Fatal(err)
		}
		w, err := bookiewire.AppendWelcome(nil, bookiewire.Welcome{Code: bookiewire.Unknown, Detail: "not me"})
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(w)
		r.expect(t, "refused:Unknown")
		time.Sleep(time.Second)
		c.Add(FakeUUID(1), makeAdd(0, "x"), r.note("garbage"))
		conn = <-d.ends
		go func() { _, _ = io.Copy(io.Discard, conn) }()
		_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
		_ = conn.Close()
		r.expect(t, "garbage:Disconnected")
	})
}

func TestClientIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{MaxPending: 2 * (4 + overhead), MaxRequests: 1})
		defer c.Close()
		b := FakeUUID(1)
		var r recorder
		for i := range 3 {
			c.Add(b, makeAdd(entry.EntryID(i), "body"), r.note(strconv.Itoa(i)))
		}
		r.expect(t, "2:Overloaded")
		p := d.accept(b)
		p.nextAdd()
		p.nextAdd()
		p.send(func(e *bookiewire.Encoder) { e.AddAck(1, 1) })
		r.expect(t, "0:OK")
		c.Add(b, makeAdd(3, "body"), r.note("3"))
		p.nextAdd()
		p.send(func(e *bookiewire.Encoder) { e.AddAck(2, 3) })
		r.expect(t, "1:OK", "3:OK")
		c.Add(b, &bookiewire.Add{Body: make([]byte, bookiewire.MaxBody+1)}, r.note("huge"))
		r.expect(t, "huge:BadRequest")
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 2 {
			c.Fence(ctx, b, bookiewire.Fence{Ledger: 1, Term: 1}, func(_ bookiewire.FenceReply, err error) { r.note(fmt.Sprint("f", i))(err) })
		}
		r.expect(t, "f1:Overloaded")
		cancel()
		r.expect(t, "f0:Disconnected")
	})
}

func TestClientCloseAnswersEverything(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDialer(t)
		c := newClient(d, Config{})
		var r recorder
		c.Add(FakeUUID(1), makeAdd(0, "x"), r.note("in flight"))
		p := d.accept(FakeUUID(1))
		p.nextAdd()
		synctest.Wait()
		c.Close()
		c.Add(FakeUUID(1), makeAdd(0, "x"), r.note("after"))
		c.Read(t.Context(), FakeUUID(3), bookiewire.Read{}, func(_ bookiewire.ReadReply, err error) { r.note("read")(err) })
		synctest.Wait()
		got := r.take()
		if got != "[in flight:Disconnected after:Disconnected read:Disconnected]" && got != "[in flight:Disconnected read:Disconnected after:Disconnected]" {
			t.Fatal(got)
		}
	})
}

// A body is not touched any more when its add is done, whatever happened to the connection: the race detector
// watches the writes below.
func TestClientLeavesBodiesAloneAfterDone(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.Close()
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				// Takes a bit, then breaks the connection.
				defer conn.Close()
				if _, err := bookiewire.ReadHello(conn); err != nil {
					return
				}
				w, _ := bookiewire.AppendWelcome(nil, bookiewire.Welcome{Version: 1, Cluster: cluster, Storage: FakeUUID(1)})
				_, _ = conn.Write(w)
				_, _ = io.CopyN(io.Discard, conn, 300_000)
			})
		}
	})
	c := New(Config{Cluster: cluster, BackoffMin: time.Millisecond, BackoffMax: time.Millisecond},
		func(entry.StorageUUID) (string, bool) { return l.Addr().String(), true }, slog.New(slog.DiscardHandler), nil)
	defer c.Close()
	var pending sync.WaitGroup
	for i := range 200 {
		a := makeAdd(entry.EntryID(i), string(make([]byte, 40_000)))
		pending.Add(1)
		c.Add(FakeUUID(1), a, func(error) {
			clear(a.Body)
			pending.Done()
		})
	}
	pending.Wait()
}

func BenchmarkClientAdd(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		if _, err := bookiewire.ReadHello(conn); err != nil {
			return
		}
		w, _ := bookiewire.AppendWelcome(nil, bookiewire.Welcome{Version: 1, Cluster: cluster, Storage: FakeUUID(1)})
		_, _ = conn.Write(w)
		r := bookiewire.NewReader(conn, 256<<10)
		var e bookiewire.Encoder
		first := uint64(1)
		for {
			f, err := r.Next()
			if err != nil {
				return
			}
			if !r.Buffered() {
				e.AddAck(first, f.Seq)
				first = f.Seq + 1
				if _, err := e.WriteTo(conn); err != nil {
					return
				}
			}
		}
	}()
	c := New(Config{Cluster: cluster}, func(entry.StorageUUID) (string, bool) { return l.Addr().String(), true }, slog.New(slog.DiscardHandler), nil)
	defer c.Close()
	a := makeAdd(0, string(make([]byte, 1024)))
	window := make(chan struct{}, 4096)
	done := func(err error) {
		if err != nil {
			b.Error(err)
		}
		<-window
	}
	b.ReportAllocs()
	b.SetBytes(1024)
	for b.Loop() {
		window <- struct{}{}
		c.Add(FakeUUID(1), a, done)
	}
	for range cap(window) {
		window <- struct{}{}
	}
}

// Whoever still makes requests, or gives them up, while the client is closed is answered; by the time that Close returns, if
// the request was made before.
func TestRequestsMeetClose(t *testing.T) {
	t.Parallel()
	for range 200 {
		d := newDialer(t)
		clients := map[string]interface {
			Add(to entry.StorageUUID, a *bookiewire.Add, done func(error))
			Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error))
			Close()
		}{"client": newClient(d, Config{}), "fake": NewFake(FakeUUIDs(3))}
		for name, c := range clients {
			var all sync.WaitGroup
			ctx, cancel := context.WithCancel(t.Context())
			var before atomic.Int64
			for range 3 {
				before.Add(1)
				c.Fence(ctx, FakeUUID(1), bookiewire.Fence{Ledger: 1, Term: 1}, func(bookiewire.FenceReply, error) { before.Add(-1) })
			}
			all.Go(cancel)
			for range 4 {
				answered := make(chan struct{})
				all.Go(func() {
					c.Add(FakeUUID(1), makeAdd(0, "x"), func(error) { close(answered) })
					<-answered
				})
			}
			all.Go(func() {
				c.Close()
				if n := before.Load(); n != 0 {
					t.Errorf("%s: %d requests are not answered", name, n)
				}
			})
			all.Wait()
		}
	}
}
