// Package client is Penstock's Go SDK: producers, consumers and readers over the brokers' gRPC API.
//
//	c, err := client.Connect(ctx, "penstock://127.0.0.1:7650")
//	if err != nil {
//		return err
//	}
//	defer c.Close(ctx)
//
//	p, err := c.Producer(ctx, "orders")
//	…
//	id, err := p.Publish(ctx, &client.Message{Key: "4711", Value: body})
//
//	s, err := c.Subscribe(ctx, "orders", "billing", client.WithStart(client.Earliest()))
//	…
//	for d, err := range s.Messages(ctx) {
//		if err != nil {
//			return err
//		}
//		if err := d.Ack(ctx); err != nil { // returns once the broker has it durable
//			return err
//		}
//	}
//
// Contexts bound lives. The context of Publish bounds the message's whole life, retries and reconnects included:
// when it ends, the message was certainly not sent (CodeTimeout), or it was sent and not confirmed
// ([OutcomeUnknown]). Nothing is dropped in silence, and nothing waits longer than its context.
//
// Reconnecting is the client's business. A stream that breaks, or whose topic moves, is opened again at the
// topic's owner: producers send what is unanswered again, in order, with the same sequence ids; consumers
// take up their subscription and send acknowledgements that are not durable yet again. Loops over Messages go
// on. Only what retrying cannot mend ends a producer or a consumer: its topic was deleted (CodeNotFound), a permission
// was lost, a newer producer of the same name came. A new producer creates the topic again, where topics create themselves.
//
// Delivery is at least once: a message whose acknowledgement is not durable when a consumer goes away is
// delivered again. Publishing is at least once as well; with [WithDedup] the broker stores each sequence id of a
// producer name once, so that retries of this client, and of an application that gives its messages sequence ids
// of its own, leave one copy.
//
// Memory is bounded by [WithMaxPending] for producers and by [WithPrefetch] for consumers, in messages and bytes.
package client
