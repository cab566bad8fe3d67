//go:build linux && !noroot

package chart

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// launcher starts programs on hosts, in root directories, as users, from one thread that lives until it is closed: the kernel's promise to
// end a child with its parent is tied to the thread that started it, and does not outlive a change of user by the child itself,
// which is why no other program can do this in between.
type launcher struct {
	requests chan func()
	done     chan struct{}
}

func newLauncher() *launcher {
	l := &launcher{requests: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		runtime.LockOSThread() // and never unlocked: the thread ends on some host
		for f := range l.requests {
			f()
		}
	}()
	return l
}

// start starts a command at the host that enter leads to, a command of package hosts.
func (l *launcher) start(cmd *exec.Cmd, enter []string) error {
	reply := make(chan error)
	l.requests <- func() {
		reply <- func() error {
			ns, err := os.Open(strings.TrimPrefix(enter[1], "--net="))
			if err != nil {
				return fmt.Errorf("open host: %w", err)
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("enter host: %w", err)
			}
			cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
			return cmd.Start()
		}()
	}
	return <-reply
}

// close ends the thread, and what it has started and nobody has ended.
func (l *launcher) close() {
	close(l.requests)
	<-l.done
}
