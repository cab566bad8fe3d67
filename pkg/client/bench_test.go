package client_test

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/client"
)

// BenchmarkPublish is a producer against the fake cluster over loopback: the client's own cost, with gRPC and the
// fake's parsing and storing on the other side.
func BenchmarkPublish(b *testing.B) {
	for _, k := range []client.Compression{client.NoCompression, client.LZ4, client.Zstd} {
		b.Run(k.String(), func(b *testing.B) {
			cl := newCluster(b, 1)
			cl.forget = true
			c, err := client.Connect(b.Context(), cl.urls())
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := c.Close(b.Context()); err != nil {
					b.Error(err)
				}
			}()
			p, err := c.Producer(b.Context(), "orders", client.WithCompression(k))
			if err != nil {
				b.Fatal(err)
			}
			value := make([]byte, 1024)
			for i := range value {
				value[i] = "abcdefghijklmnop{}:,\"0123456789"[i*i%31]
			}
			b.SetBytes(1024)
			b.ReportAllocs()
			for b.Loop() {
				p.PublishAsync(b.Context(), &client.Message{Value: value})
			}
			if err := p.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkConsume reads batches of 64 × 1 KiB back.
func BenchmarkConsume(b *testing.B) {
	cl := newCluster(b, 1)
	c, err := client.Connect(b.Context(), cl.urls())
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := c.Close(b.Context()); err != nil {
			b.Error(err)
		}
	}()
	p, err := c.Producer(b.Context(), "orders", client.WithBatching(client.Batching{MaxMessages: 64}))
	if err != nil {
		b.Fatal(err)
	}
	for range 6400 {
		p.PublishAsync(b.Context(), &client.Message{Value: make([]byte, 1024)})
	}
	if err := p.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(1024)
	b.ReportAllocs()
	var reader *client.Reader
	for n := 0; b.Loop(); n++ {
		if n%6400 == 0 {
			b.StopTimer()
			if reader != nil {
				_ = reader.Close(b.Context())
			}
			r, err := c.Reader(b.Context(), "orders", client.Earliest())
			if err != nil {
				b.Fatal(err)
			}
			reader = r
			b.StartTimer()
		}
		if _, err := reader.Receive(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
