// Package command is the tool that a person types: noun–verb commands over a cluster's brokers, and the few
// that work on this machine (standalone, demo, segment dump).
//
// main does no more than
//
//	os.Exit(command.Main(ctx, version, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
//
// Data goes to stdout, progress and errors to stderr. Every command that lists or describes takes
// -o table|wide|json|jsonl|yaml|name; JSON carries a version and does not change within it. Exit codes stand in
// exit.go and docs/cli.md.
package command
