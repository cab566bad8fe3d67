package client_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/penstock-mq/penstock/pkg/client"
)

// Examples connect to a cluster that `penstock standalone` runs; the ones that print are run in package brokertest.

func ExampleClient_Producer() {
	ctx := context.Background()
	c, err := client.Connect(ctx, "penstock://127.0.0.1:7650")
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(ctx)

	// With a name and deduplication, a message that is published again after a crash is stored once.
	p, err := c.Producer(ctx, "orders", client.WithProducerName("till-7"), client.WithDedup(), client.WithCompression(client.Zstd))
	if err != nil {
		log.Fatal(err)
	}
	id, err := p.Publish(ctx, &client.Message{Key: "customer-42", Value: []byte("one espresso")})
	if client.OutcomeUnknown(err) {
		log.Fatal("stored or not: publish it again with the same sequence id")
	} else if err != nil {
		log.Fatal(err)
	}
	fmt.Println("stored at", id)
}

func ExampleProducer_PublishAsync() {
	ctx := context.Background()
	c, err := client.Connect(ctx, "penstock://127.0.0.1:7650")
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(ctx)
	p, err := c.Producer(ctx, "orders")
	if err != nil {
		log.Fatal(err)
	}
	for i := range 1000 {
		r := p.PublishAsync(ctx, &client.Message{Value: fmt.Appendf(nil, "order %d", i)}) // waits only for credit
		go func() {
			if _, err := r.Wait(ctx); err != nil {
				log.Print(err)
			}
		}()
	}
	if err := p.Flush(ctx); err != nil {
		log.Fatal(err)
	}
}

func ExampleConsumer_Messages() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Connect(ctx, "penstock://127.0.0.1:7650")
	if err != nil {
		log.Print(err)
		return
	}
	defer c.Close(ctx)
	orders, err := c.Subscribe(ctx, "orders", "kitchen", client.WithType(client.Shared), client.WithStart(client.Earliest()))
	if err != nil {
		log.Print(err)
		return
	}
	for d, err := range orders.Messages(ctx) { // goes on through failovers; ends with the context
		if err != nil {
			log.Print(err)
			return
		}
		if len(d.Value) == 0 {
			d.Nack(10 * time.Second) // again, later
			continue
		}
		if err := d.Ack(ctx); err != nil { // returns once the broker has it durable
			log.Print(err)
			return
		}
	}
}
