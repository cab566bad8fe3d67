package process

import (
	"os/exec"
	"syscall"
)

// endWithParent has the kernel kill the child when this program dies, and keeps a Ctrl-C in the terminal from it.
func endWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
