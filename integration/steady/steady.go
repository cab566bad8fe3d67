// Package steady publishes at an even pace and measures how long each message took, from the moment when it was due: a broker
// that answers late does not slow the pace down, and so does not hide what others would have waited for.
//
//	result, err := steady.Publish(ctx, producers, steady.Config{Rate: 2000, For: 20 * time.Second, Size: 1024})
//	fmt.Println(result.Latencies.Percentile(0.99), result.Failed)
package steady

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/pkg/client"
)

// Config says what to publish. All of it is required.
type Config struct {
	// Rate is messages a second, of all producers together, which take turns.
	Rate float64
	// For is how long.
	For time.Duration
	// Size of a message in bytes.
	Size int
	// Patience bounds a message's life.
	Patience time.Duration
}

// Result is what came out.
type Result struct {
	// Latencies of messages that were acknowledged, from when they were due.
	Latencies figures.Sample
	// Sent and Failed count messages; Example is one failure.
	Sent, Failed int
	Example      error
	// Took is the time from the first due to the last outcome.
	Took time.Duration
}

// Rate is what was acknowledged a second.
func (r *Result) Rate() float64 { return float64(r.Sent-r.Failed) / r.Took.Seconds() }

// tick is how often what falls due is looked for: often enough to count as even beside a disk's milliseconds.
const tick = time.Millisecond

// Publish publishes until cfg.For has passed, then waits for every outcome. A message that fails is counted; the error is ctx's.
func Publish(ctx context.Context, producers []*client.Producer, cfg Config) (*Result, error) {
	var (
		out    Result
		mu     sync.Mutex
		settle sync.WaitGroup
		value  = make([]byte, cfg.Size)
		began  = time.Now()
		total  = int(cfg.Rate * cfg.For.Seconds())
		ticks  = time.NewTicker(tick)
	)
	defer ticks.Stop()
	life, cancel := context.WithCancel(ctx)
	defer cancel()
	for out.Sent < total && ctx.Err() == nil {
		for ; out.Sent < total; out.Sent++ {
			due := began.Add(time.Duration(float64(out.Sent) / cfg.Rate * float64(time.Second)))
			if time.Now().Before(due) {
				break
			}
			p := producers[out.Sent%len(producers)]
			settle.Go(func() {
				ctx, end := context.WithDeadline(life, due.Add(cfg.Patience))
				defer end()
				_, err := p.Publish(ctx, &client.Message{Value: value})
				took := time.Since(due)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					out.Failed++
					out.Example = err
					return
				}
				out.Latencies.Add(took)
			})
		}
		select {
		case <-ticks.C:
		case <-ctx.Done():
		}
	}
	settle.Wait()
	out.Took = time.Since(began)
	if err := ctx.Err(); err != nil {
		return &out, fmt.Errorf("publish steadily: %w", err)
	}
	return &out, nil
}
