//go:build linux && !noroot

package hosts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A wire carries; it delays, loses and repeats, which connections survive, and resets, which they do not.
func TestWire(t *testing.T) {
	t.Parallel()
	n := New(t)
	w := n.Wire("far", 1)
	host, _ := n.Place("far")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var l net.Listener
	err := within("/run/netns/"+n.space("far"), func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	defer serving.Wait()
	defer l.Close()
	echo := func(c net.Conn, text string) error {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		if _, err := io.WriteString(c, text); err != nil {
			return err
		}
		back := make([]byte, len(text))
		if _, err := io.ReadFull(c, back); err != nil {
			return err
		}
		if string(back) != text {
			return fmt.Errorf("%q comes back as %q", text, back)
		}
		return nil
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	large := strings.Repeat("penstock ", 20_000)
	if err := echo(c, large); err != nil {
		t.Fatal(err)
	}
	const delay = 50 * time.Millisecond
	w.Set(Trouble{Delay: delay, Jitter: delay})
	began := time.Now()
	if err := echo(c, "slowly"); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d < 2*delay {
		t.Errorf("there and back in %v", d)
	}
	w.Set(Trouble{Loss: 0.2, Repeat: 0.2})
	if err := echo(c, large); err != nil {
		t.Fatal(err)
	}
	w.Set(Trouble{Reset: true})
	if err := echo(c, "never"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("not reset: %v", err)
	}
	w.Set(Trouble{})
	again, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := echo(again, large); err != nil {
		t.Fatal(err)
	}
}
