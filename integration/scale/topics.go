package scale

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
)

// hands is how many topics are made, opened or closed at once.
const hands = 64

// each does something for each of n things, as many at once as there are hands.
func each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range hands {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n || ctx.Err() != nil {
					return ctx.Err()
				}
				if err := do(ctx, i); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// topics are some with a producer and a subscription each, which is read along.
type topics struct {
	names     []string
	producers []*client.Producer
	consumers []*client.Consumer
	reading   sync.WaitGroup
	received  atomic.Int64
}

// open makes topics by using them, and begins to read.
func open(ctx context.Context, k *client.Client, name string, n int) (*topics, error) {
	t := &topics{names: make([]string, n), producers: make([]*client.Producer, n), consumers: make([]*client.Consumer, n)}
	err := each(ctx, n, func(ctx context.Context, i int) (err error) {
		t.names[i] = fmt.Sprintf("public/default/%s-%d", name, i)
		if t.consumers[i], err = k.Subscribe(ctx, t.names[i], "s", client.WithStart(client.Earliest())); err != nil {
			return err
		}
		t.producers[i], err = k.Producer(ctx, t.names[i])
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make %d topics: %w", n, err), t.close(ctx))
	}
	for _, s := range t.consumers {
		t.reading.Go(func() {
			for d, err := range s.Messages(ctx) {
				if err == nil {
					t.received.Add(1)
					d.AckAsync()
				}
			}
		})
	}
	return t, nil
}

// close lets producers and subscriptions go.
func (t *topics) close(ctx context.Context) error {
	err := each(ctx, len(t.names), func(ctx context.Context, i int) (err error) {
		if p := t.producers[i]; p != nil {
			err = p.Close(ctx)
		}
		if s := t.consumers[i]; s != nil {
			err = errors.Join(err, s.Close(ctx))
		}
		return err
	})
	t.reading.Wait()
	return err
}

// drained waits until so many messages were received.
func (t *topics) drained(ctx context.Context, n int64) error {
	for t.received.Load() < n {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for message %d, of which %d came: %w", n, t.received.Load(), ctx.Err())
		case <-time.After(pollInterval):
		}
	}
	return nil
}

// create makes topics that nobody uses, from the given number on, until there are n or ctx ends; it returns how many there are.
func create(ctx context.Context, k *client.Client, from, n int) (int, error) {
	var made atomic.Int64
	err := each(ctx, n-from, func(ctx context.Context, i int) error {
		name := fmt.Sprintf("public/default/idle-%d", from+i)
		_, err := k.Admin().CreateTopic(ctx, &brokerv1.CreateTopicRequest{Topic: name})
		if err == nil {
			made.Add(1)
		}
		return err
	})
	if ctx.Err() != nil {
		err = nil // the time is up, which is told
	}
	return from + int(made.Load()), err
}
