// Package jetstreamdriver puts a [bench] workload on NATS JetStream, and starts the servers for it.
//
//	servers, err := jetstreamdriver.StartServers(ctx, jetstreamdriver.ServersConfig{Programs: "bin", Dir: dir, SyncAlways: true})
//	if err != nil {
//		return err
//	}
//	defer servers.Close()
//	driver, err := jetstreamdriver.Open(ctx, jetstreamdriver.URLs(servers), 3, "sync=always")
//	…
//
// A topic is a stream of file storage. Wherever JetStream leaves a choice, the driver takes what is best for it, so that a
// comparison errs in its favour:
//
//   - Producers and consumers connect to the server that leads their stream or consumer, which saves a hop.
//   - Messages that may share a request (Batching.Messages above 1) go by fast ingest, of servers from 2.14 on: one
//     acknowledgement for many messages, in order. Otherwise each is a PublishAsync of its own, as the client's
//     documentation has it.
//   - A subscription's only consumer acknowledges cumulatively (AckAll), now and then; several share one with an
//     acknowledgement for each message, as JetStream demands.
//
// Fast ingest is spoken here and not by the extension library of the client's makers, whose publisher waits for
// acknowledgements inside of Add and tells them only with the next call: too late for latencies.
package jetstreamdriver
