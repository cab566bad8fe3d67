//go:build race

package ledgerstore

// The race detector slows the sweeps down tenfold. They do the same thing hundreds of times.
func init() { sweepStep = 7 }
