// Package broker serves topics to clients: it owns bundles, opens their topics on first use, carries batches from
// producers to the log and entries from the log to consumers, and answers lookups and administration.
//
//	b, err := broker.New(cfg, deps)       // deps: metadata, watch cache, lease, bookies
//	b.Register(grpcServer)                // PubSub, Lookup, Admin
//	go b.Run(ctx)                         // owns, pings, keeps house until ctx ends
//	…
//	err = b.Drain(ctx)                    // hands every bundle over and tells clients where to go
//
// # What happens to a batch
//
// publish.go receives it, frame.Parse checks it, topic.Producer.Append stores it; the receipt leaves by the stream's
// sender. consume.go takes permits and acknowledgements; dispatch decides what goes where; its deliveries leave by
// the stream's sender. Nothing of a message is copied or decoded on its way but the envelope.
//
// # What belongs to what
//
// A [Broker] has bundles, from ownership's Serve to its Stop. A bundle has a state log, opened at once so that the
// former owner's acknowledgements end, and topics, opened on first use. A topic has producers, which are streams, and
// subscriptions, which are loaded from the state log on first use. Everything under a bundle ends with it: its
// streams are told where to go, then its topics are closed or dropped.
//
// Errors get their wire codes in status.go, and nowhere else.
package broker
