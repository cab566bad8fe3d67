package penstockdriver

import (
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/hash"
)

// Messages go where the client would have put them.
func TestPartitions(t *testing.T) {
	t.Parallel()
	const partitions, batch = 3, 4
	p := &producer{batch: bench.Batching{Messages: batch, Delay: time.Hour}}
	var turns []int
	for range 3 * partitions * batch {
		turns = append(turns, p.route(&client.Message{}, partitions))
	}
	for i, at := range turns {
		if want := (turns[0] + i/batch) % partitions; at != want {
			t.Fatalf("messages without a key go to %v: the %dth belongs to %d", turns, i, want)
		}
	}
	for _, key := range []string{"a", "b", "customer-42"} {
		if got, want := p.route(&client.Message{Key: key}, partitions), hash.Partition([]byte(key), partitions); got != want || p.partition != want {
			t.Errorf("key %s goes to %d, want %d", key, got, want)
		}
	}
}
