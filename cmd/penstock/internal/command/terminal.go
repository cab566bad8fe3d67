package command

import (
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
