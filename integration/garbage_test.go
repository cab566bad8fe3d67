package integration

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Whatever comes in at any port, under load: the connection ends, memory stays bounded, and nobody else notices.
func TestGarbageOnAnyPort(t *testing.T) {
	t.Parallel()
	const (
		patience   = 2 * time.Minute // until a port gives up on a peer that says nothing sensible
		moreMemory = 200 << 20
	)
	w := settle(t, process.Config{})
	run := w.load(nil)
	w.more(run, 500)
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	huge := binary.BigEndian.AppendUint32(nil, 1<<31)
	preface := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	inputs := map[string][]byte{
		"noise":                    noise,
		"zeros":                    make([]byte, 64<<10),
		"ones":                     bytes.Repeat([]byte{0xff}, 64<<10),
		"a huge length":            append(huge, noise[:100]...),
		"HTTP/1":                   []byte("GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
		"HTTP/1 without end":       append([]byte("GET / HTTP/1.1\r\nX: "), bytes.Repeat([]byte{'a'}, 2<<20)...),
		"HTTP/2 and noise":         append(bytes.Clone(preface), noise[:4096]...),
		"HTTP/2 with a huge frame": append(bytes.Clone(preface), 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1),
		"half a preface":           preface[:10],
		"nothing":                  nil,
	}
	var servers []*process.Process
	servers = append(servers, w.c.Bookies...)
	servers = append(servers, w.c.Brokers...)
	before := make(map[string]float64)
	for _, p := range servers {
		before[p.Name] = w.metric(p, "process_resident_memory_bytes")
	}
	attacks := 0
	done := make(chan error)
	for _, p := range servers {
		for _, addr := range []string{p.Addr, p.HTTP, p.Control} {
			if addr == "" {
				continue
			}
			for name, input := range inputs {
				attacks++
				go func() {
					err := attack(addr, input, patience)
					if err != nil {
						err = errors.Join(errors.New(name+" at "+addr+" of "+p.Name), err)
					}
					done <- err
				}()
			}
		}
	}
	for range attacks {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for _, p := range servers {
		if !p.Running() {
			t.Errorf("%s died", p.Name)
			continue
		}
		if now := w.metric(p, "process_resident_memory_bytes"); now > before[p.Name]+moreMemory {
			t.Errorf("%s grew from %.0f to %.0f bytes", p.Name, before[p.Name], now)
		}
	}
	w.more(run, 500)
	if failures := run.Failures(); len(failures) > 0 {
		t.Errorf("others noticed: %v", failures)
	}
	w.finish(run)
}

// attack sends input and half-closes; it fails if the server still holds the connection after patience.
func attack(addr string, input []byte, patience time.Duration) error {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, _ = conn.Write(input) // the server may hang up in the middle
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	}
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		return errors.New("the connection is still open")
	}
	return nil
}
