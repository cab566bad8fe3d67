package brokertest_test

import (
	"context"
	"fmt"
	"os"

	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/standalone"
)

// A whole cluster in this process: publish, consume, acknowledge, and read again from the start.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "penstock-example-")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	cluster, err := standalone.Start(ctx, standalone.Config{Dir: dir, SegmentSize: 16 << 20}, nil) // in a test: brokertest.Start(t)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cluster.Close(ctx)

	c, err := client.Connect(ctx, cluster.URL())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close(ctx)
	p, err := c.Producer(ctx, "orders")
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, what := range []string{"espresso", "tea"} {
		id, err := p.Publish(ctx, &client.Message{Value: []byte(what)})
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("stored", what, "as offset", id.Offset)
	}
	kitchen, err := c.Subscribe(ctx, "orders", "kitchen", client.WithStart(client.Earliest()))
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 2 {
		d, err := kitchen.Receive(ctx)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("make", string(d.Value))
		if err := d.Ack(ctx); err != nil {
			fmt.Println(err)
			return
		}
	}
	r, err := c.Reader(ctx, "orders", client.AtOffset(1))
	if err != nil {
		fmt.Println(err)
		return
	}
	d, err := r.Receive(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("read", string(d.Value))
	// Output:
	// stored espresso as offset 0
	// stored tea as offset 1
	// make espresso
	// make tea
	// read tea
}
