package command

import (
	"context"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// isTerminal reports whether a person types at r.
func isTerminal(r io.Reader) bool {
	f, ok := r.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// interruptible reads from in until ctx ends. A read that waits for a person or a pipe cannot be called off: it is left
// behind, and ends with what it waits for or with the process.
type interruptible struct {
	ctx  context.Context //nolint:containedctx // io.Reader has no place for it
	in   io.Reader
	rest []byte
	err  error
}

const readSize = 64 << 10

func (r *interruptible) Read(p []byte) (int, error) {
	if len(r.rest) == 0 && r.err == nil {
		type chunk struct {
			data []byte
			err  error
		}
		got := make(chan chunk, 1)
		go func() {
			buf := make([]byte, readSize)
			n, err := r.in.Read(buf)
			got <- chunk{buf[:n], err}
		}()
		select {
		case <-r.ctx.Done():
			r.err = context.Cause(r.ctx)
		case c := <-got:
			r.rest, r.err = c.data, c.err
		}
	}
	n := copy(p, r.rest)
	if r.rest = r.rest[n:]; n > 0 {
		return n, nil
	}
	return 0, r.err
}
