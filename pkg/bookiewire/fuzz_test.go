package bookiewire

import (
	"bytes"
	"reflect"
	"testing"
)

func FuzzHello(f *testing.F) {
	good, _ := AppendHello(nil, Hello{MinVersion: 1, MaxVersion: 1, Use: UseAdds, BookieID: "b1"})
	f.Add(good)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ReadHello(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := AppendHello(nil, h)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ReadHello(bytes.NewReader(again)); err != nil || got != h {
			t.Fatalf("%+v became %+v, %v", h, got, err)
		}
	})
}

func FuzzWelcome(f *testing.F) {
	good, _ := AppendWelcome(nil, Welcome{Version: 1, BookieID: "b1", Detail: "d"})
	f.Add(good)
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := ReadWelcome(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := AppendWelcome(nil, w)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ReadWelcome(bytes.NewReader(again)); err != nil || got != w {
			t.Fatalf("%+v became %+v, %v", w, got, err)
		}
	})
}

// FuzzFrame feeds one frame to the decoder of its kind, with the checksum made good, so that the fuzzer gets
// behind it.
func FuzzFrame(f *testing.F) {
	for _, fill := range frames() {
		f.Add(encoded(f, fill))
	}
	f.Add(encoded(f, func(e *Encoder) { e.Add(1, testAdd(1, []byte("body"))) }))
	f.Add(encoded(f, func(e *Encoder) { e.ReadReply(1, ReadReply{Entries: []ReadEntry{{Body: []byte("b")}}}) }))
	f.Fuzz(func(t *testing.T, b []byte) {
		frame, err := ParseFrame(b)
		if err != nil {
			return
		}
		_, _ = decodeAny(frame)
		n := len(b)
		switch frame.Kind {
		case KindAdd:
			n = min(n, HeaderSize+addFixed)
		case KindReadReply:
			if n >= HeaderSize+readReplyFixed {
				count := int(b[HeaderSize+8])<<24 | int(b[HeaderSize+9])<<16 | int(b[HeaderSize+10])<<8 | int(b[HeaderSize+11])
				if count > MaxReadEntries {
					return
				}
				n = min(n, HeaderSize+readReplyFixed+count*readEntrySize)
			}
		default:
		}
		seal(b[:n])
		v, err := decodeAny(frame)
		if err != nil {
			return
		}
		// What decodes must survive a second trip.
		if r, ok := v.(ReadReply); ok {
			again, err := ParseFrame(encoded(t, func(e *Encoder) { e.ReadReply(frame.Seq, r) }))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := again.ReadReply(); err != nil || !reflect.DeepEqual(got, r) {
				t.Fatalf("%v became %v, %v", r, got, err)
			}
		}
	})
}

// FuzzReader feeds arbitrary bytes as a stream.
func FuzzReader(f *testing.F) {
	f.Add(encoded(f, func(e *Encoder) {
		e.Ping(1)
		e.Add(2, testAdd(1, bytes.Repeat([]byte("x"), 600)))
		e.AddAck(1, 2)
	}), uint16(64))
	f.Fuzz(func(t *testing.T, b []byte, slab uint16) {
		r := NewReader(bytes.NewReader(b), int(slab))
		total := 0
		for {
			frame, err := r.Next()
			if err != nil {
				break
			}
			total += frame.Size()
			_, _ = decodeAny(frame)
		}
		if total > len(b) {
			t.Fatalf("%d bytes of frames out of %d", total, len(b))
		}
		if r.cur != nil && len(r.cur.buf) > 2*len(b)+int(slab)+2*HeaderSize {
			t.Fatalf("%d bytes of memory for %d of input", len(r.cur.buf), len(b))
		}
	})
}
