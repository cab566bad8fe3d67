// Package hosts gives each process of a cluster a host of its own: a network namespace on a bridge, where this program has
// an address too. Between any two of them one direction can be made to swallow what is sent, and a host can be put on a
// [Wire] of this program, which loses, delays, repeats and resets. It needs root, and ip and nsenter.
package hosts
