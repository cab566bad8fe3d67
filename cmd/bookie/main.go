// Command bookie runs one storage node: one data directory on one disk.
//
// Settings come from flags, the environment (PENSTOCK_…) or a YAML file (--config), in that order. It exits with 0 after
// SIGINT or SIGTERM, 1 if it failed, 2 for a setting that is wrong or a port that is taken, and 5 if the data
// directory is not what it should be, with what to do.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
