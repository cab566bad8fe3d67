//go:build race

package ledger_test

// The race detector slows the simulation down tenfold, and finds nothing in code without goroutines.
func init() { defaultSeeds = 100 }
