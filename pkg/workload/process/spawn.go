package process

import (
	"os/exec"
	"runtime"
	"sync"
)

// spawner starts processes from one thread. The kernel's promise to end a child with its parent is tied to the thread
// that started it, so that thread must live as long as the children.
type spawner struct {
	requests  chan spawnRequest
	done      chan struct{}
	closeOnce sync.Once
	waiting   sync.WaitGroup // one for each process not yet waited for
}

type spawnRequest struct {
	cmd   *exec.Cmd
	reply chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan spawnRequest), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for r := range s.requests {
			endWithParent(r.cmd)
			r.reply <- r.cmd.Start()
		}
	}()
	return s
}

func (s *spawner) start(cmd *exec.Cmd) error {
	reply := make(chan error, 1)
	s.requests <- spawnRequest{cmd, reply}
	return <-reply
}

// close waits for the processes, which must have been told to end, and ends the thread.
func (s *spawner) close() {
	s.closeOnce.Do(func() {
		s.waiting.Wait()
		close(s.requests)
		<-s.done
	})
}
