package chain

import "time"

// Running returns the number of the chain's goroutines.
func (c *Chain) Running() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running
}

// Rolling tells whether a roll is under way.
func (c *Chain) Rolling() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.preparing || c.core.phase == PhaseClosing || c.core.phase == PhaseDraining
}

// RollPause is how long a roll waits that follows so many fruitless ledgers.
func RollPause(fruitless int) time.Duration { return rollPause(fruitless) }
