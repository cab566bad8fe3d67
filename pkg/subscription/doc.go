// Package subscription keeps the subscriptions of a topic: their cursors, whose changes go to the bundle's state log in groups, and
// their dispatch, which exists once a consumer has come.
//
//	b := subscription.NewBundle(subscription.Env{State: …, Life: …, Go: …})
//	t, err := topic.Open(…, topic.Config{Snapshots: b.Snapshots(owner)})
//	set := b.NewSet(subscription.Config{Topic: t, Owner: owner, …})
//	sub, created, err := set.Ensure(ctx, "billing", start)             // durable
//	c, err := sub.Attach(stream, subscription.Shared, dispatch.Consumer{Name: "c1"})
//	c.Permits(1000)                                                    // and deliveries come to stream.Send
//	err = c.Ack(ranges, 0, func(err error) { … })                      // nil once durable
//	c.Close()
//	earliest, freed, err := set.Trim(ctx, policy)                      // what no subscription needs any more
//	set.Close(ctx)                                                     // what was acknowledged is durable
//	b.Forget(set)                                                      // the topic may be opened again
//
// # What is durable
//
// A cursor's changes are written in the order in which they were made, one group at a time: what comes meanwhile makes the next group.
// Whoever waits for a change is told once its group, and so everything before it, is durable. Trimming goes by durable state alone, and
// is refused while any subscription of the topic cannot be read.
//
// What a topic's subscriptions were writing when it ceased to be served here goes on being written, as long as the bundle is served. Its
// subscriptions are read again only after that: who reads earlier misses what is on its way, and writes over it.
//
// # Damage
//
// A subscription whose state is damaged is refused, and nothing is reset by it; the topic's other ones go on.
package subscription
