package brokertest_test

import (
	"bytes"
	"testing"

	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// BenchmarkPublish is the whole way: SDK, gRPC, broker, three bookies with fdatasync before each acknowledgement at two
// of three, and back; all in this process.
func BenchmarkPublish(b *testing.B) {
	for name, options := range map[string][]client.ProducerOption{
		"1KiB-batched":   nil,
		"1KiB-unbatched": {client.WithoutBatching()},
	} {
		b.Run(name, func(b *testing.B) {
			p, message := benchProducer(b, options...)
			b.SetBytes(int64(len(message.Value)))
			b.ReportAllocs()
			receipts := make(chan *client.Receipt, 10_000)
			done := make(chan error, 1)
			go func() {
				var failed error
				for r := range receipts {
					if _, err := r.Wait(b.Context()); err != nil {
						failed = err
					}
				}
				done <- failed
			}()
			for b.Loop() {
				receipts <- p.PublishAsync(b.Context(), message)
			}
			close(receipts)
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		})
	}
	b.Run("1KiB-one-in-flight", func(b *testing.B) {
		p, message := benchProducer(b)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := p.Publish(b.Context(), message); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func benchProducer(b *testing.B, options ...client.ProducerOption) (*client.Producer, *client.Message) {
	b.Helper()
	k := brokertest.Start(b, brokertest.WithBookies(3)).Client()
	p, err := k.Producer(b.Context(), "bench", options...)
	if err != nil {
		b.Fatal(err)
	}
	return p, &client.Message{Value: bytes.Repeat([]byte("x"), 1024)}
}
