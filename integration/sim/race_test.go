//go:build race

package sim_test

func init() { shortSet = 10 }
