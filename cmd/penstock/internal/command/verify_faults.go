package command

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// faultEnd is how long a fault's command may take once it was told to end.
const faultEnd = 5 * time.Second

// faultRunner runs the commands that break something, in turn.
type faultRunner struct {
	ran    int
	failed map[string]error // by command; nil once it has succeeded
}

func (r *faultRunner) run(ctx context.Context, v *verification) {
	if len(v.flags.faults) == 0 {
		return
	}
	r.failed = make(map[string]error)
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(v.flags.every):
		}
		command := v.flags.faults[n%len(v.flags.faults)]
		began := time.Now()
		err := runFault(ctx, v, command)
		if ctx.Err() != nil && err != nil {
			v.say("fault was cut short by the end: %s", command)
			return
		}
		r.ran++
		previous, again := r.failed[command]
		if err == nil || !again || previous != nil {
			r.failed[command] = err
		}
		said := fmt.Sprintf("done in %.1fs", time.Since(began).Seconds())
		if err != nil {
			said = err.Error()
		}
		v.say("fault %d: %s: %s", r.ran, command, said)
	}
}

// runFault runs one command; what it prints goes to people.
func runFault(ctx context.Context, v *verification, command string) error {
	cmd := exec.CommandContext(ctx, "sh", "-c", command) //nolint:gosec // that is what it is for
	cmd.Stdout, cmd.Stderr = v.app.err, v.app.err
	cmd.WaitDelay = faultEnd
	endGroup(cmd)
	return cmd.Run() //nolint:wrapcheck // it is told beside the command
}

// err tells of commands that never succeeded: what they were to break may not have been broken.
func (r *faultRunner) err() error {
	var never []string
	for command, err := range r.failed {
		if err != nil {
			never = append(never, fmt.Sprintf("%q: %v", command, err))
		}
	}
	if len(never) == 0 {
		return nil
	}
	return fmt.Errorf("everything was as promised, but these faults never succeeded: %s", strings.Join(never, "; "))
}
