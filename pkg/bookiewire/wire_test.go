package bookiewire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

func uuid(b byte) entry.UUID { return entry.UUID{0: b, 15: b} }

func testAdd(e entry.EntryID, body []byte) *Add {
	return &Add{
		Ledger: 0x0102, Entry: e, Term: 3, Recovery: true, Urgent: e%2 == 1, Nonce: 0xabcdef, LAC: e - 1,
		Checksum: entry.Checksum(0x0102, e, body), Body: body,
	}
}

func encoded(tb testing.TB, fill func(*Encoder)) []byte {
	tb.Helper()
	var e Encoder
	fill(&e)
	size := e.Size()
	var out bytes.Buffer
	if _, err := e.WriteTo(&out); err != nil {
		tb.Fatal(err)
	}
	if out.Len() != size {
		tb.Fatalf("wrote %d bytes, Size said %d", out.Len(), size)
	}
	return out.Bytes()
}

func TestHandshakeRoundTrip(t *testing.T) {
	t.Parallel()
	h := Hello{MinVersion: 1, MaxVersion: 3, Use: UseRequests, Cluster: uuid(1), Storage: uuid(2), BookieID: "bookie-1"}
	b, err := AppendHello(nil, h)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadHello(iotest.OneByteReader(bytes.NewReader(b)))
	if err != nil || got != h {
		t.Fatalf("got %+v, %v", got, err)
	}
	w := Welcome{Version: 1, Cluster: uuid(1), Storage: uuid(2), MaxBody: MaxBody, BookieID: "bookie-1", Detail: "well"}
	if b, err = AppendWelcome(nil, w); err != nil {
		t.Fatal(err)
	}
	gotW, err := ReadWelcome(bytes.NewReader(b))
	if err != nil || gotW != w {
		t.Fatalf("got %+v, %v", gotW, err)
	}
	if _, err := AppendHello(nil, Hello{BookieID: strings.Repeat("x", 256)}); err == nil {
		t.Fatal("an overlong bookie id was encoded")
	}
}

// Every flipped bit and every truncation of a handshake or a frame is noticed.
func TestDamageIsNoticed(t *testing.T) {
	t.Parallel()
	hello, err := AppendHello(nil, Hello{MinVersion: 1, MaxVersion: 1, Use: UseAdds, BookieID: "b"})
	if err != nil {
		t.Fatal(err)
	}
	welcome, err := AppendWelcome(nil, Welcome{Version: 1, BookieID: "b", Detail: "d"})
	if err != nil {
		t.Fatal(err)
	}
	decoders := map[string]struct {
		good   []byte
		decode func([]byte) error
	}{
		"hello":   {hello, func(b []byte) error { _, err := ReadHello(bytes.NewReader(b)); return err }},
		"welcome": {welcome, func(b []byte) error { _, err := ReadWelcome(bytes.NewReader(b)); return err }},
	}
	for name, fill := range frames() {
		decoders[name] = struct {
			good   []byte
			decode func([]byte) error
		}{encoded(t, fill), decodeOne}
	}
	for name, d := range decoders {
		if err := d.decode(d.good); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i := range d.good {
			if d.decode(d.good[:i]) == nil {
				t.Fatalf("%s: cut at %d of %d is accepted", name, i, len(d.good))
			}
			for bit := range 8 {
				bad := bytes.Clone(d.good)
				bad[i] ^= 1 << bit
				if d.decode(bad) == nil {
					t.Fatalf("%s: flipped bit %d of byte %d is accepted", name, bit, i)
				}
			}
		}
	}
}

// frames has one of each kind, without bodies: those have checksums of their own.
func frames() map[string]func(*Encoder) {
	return map[string]func(*Encoder){
		"add":    func(e *Encoder) { e.Add(9, testAdd(5, nil)) },
		"addAck": func(e *Encoder) { e.AddAck(0, 12) },
		"failed": func(e *Encoder) { e.Failed(9, &Error{Code: Fenced, Term: 4, Detail: "newer term"}) },
		"read": func(e *Encoder) {
			e.Read(1, Read{Ledger: 1, First: 2, Stride: 1, MaxEntries: 1, Recovery: true, Term: 1})
		},
		"readReply":     func(e *Encoder) { e.ReadReply(1, ReadReply{LAC: 4, Entries: []ReadEntry{{Entry: 2}, {Entry: 3}}}) },
		"fence":         func(e *Encoder) { e.Fence(2, Fence{Ledger: 1, Term: 9}) },
		"fenceReply":    func(e *Encoder) { e.FenceReply(2, FenceReply{LAC: -1}) },
		"writeLAC":      func(e *Encoder) { e.WriteLAC(3, WriteLAC{Ledger: 1, Nonce: 2, LAC: 3}) },
		"writeLACReply": func(e *Encoder) { e.WriteLACReply(3) },
		"waitLAC":       func(e *Encoder) { e.WaitLAC(4, WaitLAC{Ledger: 1, After: -1, Timeout: time.Second}) },
		"waitLACReply":  func(e *Encoder) { e.WaitLACReply(4, WaitLACReply{LAC: 7}) },
		"ping":          func(e *Encoder) { e.Ping(5) },
		"pong":          func(e *Encoder) { e.Pong(5) },
	}
}

// decodeOne decodes one frame of any kind.
func decodeOne(b []byte) error {
	f, err := ParseFrame(b)
	if err != nil {
		return err
	}
	_, err = decodeAny(f)
	return err
}

func decodeAny(f Frame) (any, error) {
	switch f.Kind {
	case KindAdd:
		var a Add
		err := f.Add(&a)
		return a, err
	case KindAddAck:
		first, last, err := f.AddAck()
		return [2]uint64{first, last}, err
	case KindFailed:
		return f.Failed()
	case KindRead:
		return f.Read()
	case KindReadReply:
		return f.ReadReply()
	case KindFence:
		return f.Fence()
	case KindFenceReply:
		return f.FenceReply()
	case KindWriteLAC:
		return f.WriteLAC()
	case KindWaitLAC:
		return f.WaitLAC()
	case KindWaitLACReply:
		return f.WaitLACReply()
	case KindWriteLACReply, KindPing, KindPong:
		return f.Seq, f.Empty()
	}
	return nil, errors.New("unknown kind")
}

func TestFramesRoundTripInOneStream(t *testing.T) {
	t.Parallel()
	small, large, huge := []byte("small"), bytes.Repeat([]byte("L"), 3000), bytes.Repeat([]byte("H"), 100_000)
	reply := ReadReply{LAC: 8, Entries: []ReadEntry{{Entry: 1, Checksum: 2, Body: large}, {Entry: 3, Checksum: 4, Body: small}}}
	stream := encoded(t, func(e *Encoder) {
		e.Add(1, testAdd(0, small))
		e.Add(2, testAdd(1, large))
		e.Add(3, testAdd(2, huge))
		e.Add(4, testAdd(3, nil))
		e.AddAck(1, 4)
		e.Failed(5, &Error{Code: NotAdmitted, Detail: "no"})
		e.ReadReply(6, reply)
		e.WaitLAC(7, WaitLAC{Ledger: 9, After: 4, Timeout: 1500 * time.Millisecond})
		e.Read(8, Read{Ledger: 3, First: 4, Stride: 5, MaxEntries: 6, MaxBytes: 7, Term: 8})
		e.Pong(9)
	})
	want := []any{
		*testAdd(0, small), *testAdd(1, large), *testAdd(2, huge), *testAdd(3, []byte{}),
		[2]uint64{1, 4},
		&Error{Code: NotAdmitted, Detail: "no"}, reply,
		WaitLAC{Ledger: 9, After: 4, Timeout: 1500 * time.Millisecond},
		Read{Ledger: 3, First: 4, Stride: 5, MaxEntries: 6, MaxBytes: 7, Term: 8},
		uint64(9),
	}
	for name, in := range map[string]io.Reader{
		"whole": bytes.NewReader(stream), "bytewise": iotest.OneByteReader(bytes.NewReader(stream)), "halves": iotest.HalfReader(bytes.NewReader(stream)),
	} {
		for _, slabSize := range []int{64, 4096, 1 << 20} {
			r := NewReader(in, slabSize)
			if s, ok := in.(io.Seeker); ok {
				if _, err := s.Seek(0, io.SeekStart); err != nil {
					t.Fatal(err)
				}
			} else if slabSize > 64 {
				continue
			}
			var got []any
			var kept []Retained
			for {
				f, err := r.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatalf("%s/%d: %v", name, slabSize, err)
				}
				v, err := decodeAny(f)
				if err != nil {
					t.Fatalf("%s/%d: %v", name, slabSize, err)
				}
				got = append(got, v)
				kept = append(kept, f.Retain())
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("%s/%d:\n got %.200v\nwant %.200v", name, slabSize, got, want)
			}
			for _, k := range kept {
				k.Release()
			}
		}
	}
}

//nolint:paralleltest // it counts allocations
func TestReaderReusesReleasedSlabs(t *testing.T) {
	one := encoded(t, func(e *Encoder) { e.Add(1, testAdd(0, bytes.Repeat([]byte("x"), 900))) })
	r := NewReader(bytes.NewReader(bytes.Repeat(one, 2000)), 8192)
	var held []Retained
	n := 0
	allocs := testing.AllocsPerRun(1500, func() {
		f, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		n++
		var a Add
		if err := f.Add(&a); err != nil {
			t.Fatal(err)
		}
		if len(held) < 8 {
			held = append(held, f.Retain())
			return
		}
		// The oldest goes as the newest comes, as adds do when they are synced in order.
		held[n%8].Release()
		held[n%8] = f.Retain()
	})
	if allocs >= 1 {
		t.Fatalf("%v allocations a frame", allocs)
	}
}

func TestReaderRefusesBeforeAllocating(t *testing.T) {
	t.Parallel()
	for name, header := range map[string][]byte{
		"too large":       {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, byte(KindAdd), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"unknown kind":    {0, 0, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"control too big": {0, 1, 0, 0, 0, 0, 0, 0, byte(KindPing), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		if _, err := NewReader(bytes.NewReader(header), 64).Next(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A header that claims 6 MB, and then little or nothing: at most twice as much memory as came.
	claim := []byte{0, 0x5f, 0, 0, 0, 0, 0, 0, byte(KindAdd), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	for _, came := range []int{0, 4096, 100_000} {
		r := NewReader(bytes.NewReader(append(bytes.Clone(claim), make([]byte, came)...)), 4096)
		if _, err := r.Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
		if limit := 2 * (came + 4096); len(r.cur.buf) > limit {
			t.Fatalf("allocated %d bytes on a claim and %d bytes", len(r.cur.buf), came)
		}
	}
}

// drip returns one byte more at each read up to step, then the rest at once.
type drip struct {
	b    []byte
	step int
}

func (d *drip) Read(b []byte) (int, error) {
	n := len(d.b)
	if d.step > 0 {
		n, d.step = 1, d.step-1
	}
	n = copy(b, d.b[:n])
	d.b = d.b[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func TestReaderTellsOfFramesThatHaveBegun(t *testing.T) {
	t.Parallel()
	small := encoded(t, func(e *Encoder) { e.Ping(1) })
	large := encoded(t, func(e *Encoder) { e.Add(1, testAdd(0, make([]byte, 100_000))) })
	for name, c := range map[string]struct {
		r    io.Reader
		want []int
	}{
		"whole":                {bytes.NewReader(append(bytes.Clone(small), small...)), nil},
		"in its header":        {&drip{b: small, step: 1}, []int{0}},
		"in its body":          {&drip{b: encoded(t, func(e *Encoder) { e.AddAck(1, 2) }), step: HeaderSize}, []int{0}},
		"larger than a slab":   {bytes.NewReader(large), []int{len(large)}},
		"large, in its header": {&drip{b: large, step: 3}, []int{0, len(large)}},
	} {
		var got []int
		r := NewReader(c.r, 8192)
		r.Begun = func(own int) error {
			got = append(got, own)
			return nil
		}
		var err error
		for err == nil {
			_, err = r.Next()
		}
		if !errors.Is(err, io.EOF) || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	refused := errors.New("refused")
	r := NewReader(bytes.NewReader(large), 8192)
	r.Begun = func(int) error { return refused }
	if _, err := r.Next(); !errors.Is(err, refused) || len(r.cur.buf) > 8192 {
		t.Errorf("%v, with %d bytes", err, len(r.cur.buf))
	}
	r = NewReader(bytes.NewReader(large[:HeaderSize]), 8192)
	r.Kinds = []Kind{KindPing, KindRead}
	if _, err := r.Next(); !errors.Is(err, ErrMalformed) {
		t.Errorf("a kind that may not come: %v", err)
	}
}

// A stream with little traffic keeps little memory; one that fills it gets more.
func TestReaderBeginsSmall(t *testing.T) {
	t.Parallel()
	ping := encoded(t, func(e *Encoder) { e.Ping(1) })
	idle := NewReader(&drip{b: bytes.Repeat(ping, 1000), step: 20_000}, 256<<10)
	busy := NewReader(bytes.NewReader(bytes.Repeat(ping, 1000)), 256<<10)
	for range 1000 {
		for _, r := range []*Reader{idle, busy} {
			if _, err := r.Next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(idle.cur.buf) != firstSlab || len(busy.cur.buf) != 256<<10 {
		t.Fatalf("%d and %d bytes", len(idle.cur.buf), len(busy.cur.buf))
	}
}

func TestLargeBodiesAreNotCopied(t *testing.T) {
	t.Parallel()
	body := bytes.Repeat([]byte("x"), copyBelow)
	var e Encoder
	e.Add(1, testAdd(0, body))
	e.flush()
	if len(e.vec) != 2 || &e.vec[1][0] != &body[0] {
		t.Fatal("the body was copied")
	}
	clear(body)
	e.Reset()
	if e.Size() != 0 || len(e.buf) != 0 {
		t.Fatal("reset kept something")
	}
}

func TestAsErrorKeepsTheCode(t *testing.T) {
	t.Parallel()
	if x := AsError(&Error{Code: Fenced, Term: 3}); x.Code != Fenced || x.Term != 3 {
		t.Fatal(x)
	}
	if x := AsError(io.EOF); x.Code != Unknown || x.Detail != "EOF" {
		t.Fatal(x)
	}
}

func TestCodesHaveNames(t *testing.T) {
	t.Parallel()
	for c := OK; c <= BadRequest; c++ {
		if strings.HasPrefix(c.String(), "Code(") {
			t.Errorf("code %d has no name", c)
		}
		if c.Negative() != (c == NoEntry || c == NoLedger) {
			t.Errorf("%s: negative is %t", c, c.Negative())
		}
	}
	if Code(77).String() != "Code(77)" {
		t.Fatal(Code(77).String())
	}
}

// noting notes the slabs that a reader reads into.
type noting struct {
	from io.Reader
	r    *Reader
	into []*slab
}

func (n *noting) Read(b []byte) (int, error) {
	if !slices.Contains(n.into, n.r.cur) {
		n.into = append(n.into, n.r.cur)
	}
	return n.from.Read(b)
}

// A large frame gets its memory once where the reader may trust its header, and step by step beyond that.
func TestMemoryAtOnce(t *testing.T) {
	t.Parallel()
	large := encoded(t, func(e *Encoder) { e.Add(1, testAdd(0, make([]byte, 100_000))) })
	for _, c := range []struct{ atOnce, slabs int }{{len(large), 2}, {len(large) - 1, 3}, {0, 6}} {
		n := &noting{from: &drip{b: large, step: 1000}}
		r := NewReader(n, 8192)
		n.r, r.AtOnce = r, c.atOnce
		f, err := r.Next()
		if err != nil || f.Size() != len(large) {
			t.Fatal(err)
		}
		if len(n.into) != c.slabs {
			t.Errorf("%d bytes at once: read into %d pieces of memory, want %d", c.atOnce, len(n.into), c.slabs)
		}
	}
}

func BenchmarkEncodeAdd(b *testing.B) {
	for name, size := range map[string]int{"100B": 100, "1KiB": 1 << 10, "64KiB": 64 << 10} {
		b.Run(name, func(b *testing.B) {
			a := testAdd(1, bytes.Repeat([]byte("x"), size))
			var e Encoder
			b.ReportAllocs()
			b.SetBytes(int64(size))
			for i := range b.N {
				e.Add(uint64(i), a)
				if e.Size() > 256<<10 {
					e.Reset()
				}
			}
		})
	}
}

func BenchmarkDecodeAdd(b *testing.B) {
	for name, size := range map[string]int{"100B": 100, "1KiB": 1 << 10, "64KiB": 64 << 10} {
		b.Run(name, func(b *testing.B) {
			one := encoded(b, func(e *Encoder) { e.Add(1, testAdd(1, bytes.Repeat([]byte("x"), size))) })
			r := NewReader(&repeat{b: one}, 256<<10)
			b.ReportAllocs()
			b.SetBytes(int64(size))
			var a Add
			for range b.N {
				f, err := r.Next()
				if err != nil {
					b.Fatal(err)
				}
				if err := f.Add(&a); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// repeat is the stream of the same bytes over and over.
type repeat struct {
	b   []byte
	off int
}

func (r *repeat) Read(p []byte) (n int, err error) {
	for n < len(p) {
		k := copy(p[n:], r.b[r.off:])
		n += k
		r.off = (r.off + k) % len(r.b)
	}
	return n, nil
}

// BenchmarkTCP moves adds of 1 KiB through a loopback connection, coalesced as a client does.
func BenchmarkTCP(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		defer c.Close()
		r := NewReader(c, 256<<10)
		var a Add
		for range b.N {
			f, err := r.Next()
			if err == nil {
				err = f.Add(&a)
			}
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	a := testAdd(1, bytes.Repeat([]byte("x"), 1024))
	var e Encoder
	b.ReportAllocs()
	b.SetBytes(1024)
	for i := range b.N {
		e.Add(uint64(i), a)
		if e.Size() > 256<<10 || i == b.N-1 {
			if _, err := e.WriteTo(c); err != nil {
				b.Fatal(err)
			}
		}
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}
