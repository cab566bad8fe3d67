//go:build linux && !noroot

package faults

// rooted says whether cells that need root are run.
const rooted = true
