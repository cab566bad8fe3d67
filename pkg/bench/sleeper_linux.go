package bench

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sleeper sleeps to within some tens of microseconds. The runtime's own timers are rounded up to a millisecond when nothing
// else goes on, which would be more than many a broker takes; a timer of the kernel's wakes the poller when it is due.
type sleeper struct {
	timer *os.File
	raw   syscall.RawConn
	set   func(fd uintptr) // sets the timer to spec
	spec  unix.ItimerSpec
	err   error
}

func newSleeper() (*sleeper, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make timer: %w", err)
	}
	s := &sleeper{timer: os.NewFile(uintptr(fd), "timer")}
	s.set = func(fd uintptr) { s.err = unix.TimerfdSettime(int(fd), 0, &s.spec, nil) }
	if s.raw, err = s.timer.SyscallConn(); err != nil {
		s.close()
		return nil, fmt.Errorf("make timer: %w", err)
	}
	return s, nil
}

// sleep returns after d, which is above 0, or earlier with an error once the sleeper is closed. One goroutine sleeps.
func (s *sleeper) sleep(d time.Duration) error {
	s.spec.Value = unix.NsecToTimespec(int64(d))
	if err := errors.Join(s.raw.Control(s.set), s.err); err != nil {
		return fmt.Errorf("set timer: %w", err)
	}
	var expirations [8]byte
	if _, err := s.timer.Read(expirations[:]); err != nil {
		return fmt.Errorf("wait for timer: %w", err)
	}
	return nil
}

// close ends a sleep.
func (s *sleeper) close() { _ = s.timer.Close() }
