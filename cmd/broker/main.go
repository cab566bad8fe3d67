// Command broker runs one serving broker. It holds no data: it may be started, stopped and killed at any time.
//
// Settings come from flags, the environment (PENSTOCK_…) or a YAML file (--config), in that order. It exits with 0 after
// SIGINT or SIGTERM, once its bundles are handed over; 1 if it failed; 2 for a setting that is wrong or a port that is
// taken; 5 if another process has its id.
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
