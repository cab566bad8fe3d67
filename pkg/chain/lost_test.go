package chain_test

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/chain"
)

// Whoever wakes by Lost asks why: that is told before.
func TestOnLostIsToldBeforeLostIsClosed(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	var c *chain.Chain
	told := 0
	c, err := chain.Open(t.Context(), f.Env(), f.Takeover(), logID, chain.Config{Describe: describe, OnLost: func(error) {
		told++
		select {
		case <-c.Lost():
			t.Error("Lost is closed before OnLost was called")
		default:
		}
	}})
	check(t, err)
	c.Shutdown()
	if <-c.Lost(); told != 1 {
		t.Errorf("told %d times", told)
	}
}
