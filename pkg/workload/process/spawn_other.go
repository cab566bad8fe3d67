//go:build !linux

package process

import (
	"os/exec"
	"syscall"
)

// endWithParent keeps a Ctrl-C in the terminal from the child. This system cannot end it with its parent.
func endWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}
