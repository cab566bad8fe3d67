// Command penstock is the one tool a person types: a standalone cluster, messages in and out, and the administration
// of a cluster.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/penstock-mq/penstock/cmd/penstock/internal/command"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // who signals again does not want to wait
	code := command.Main(ctx, version, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
