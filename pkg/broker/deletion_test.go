package broker

import (
	"context"
	"errors"
	"log/slog"
	"testing"
)

func TestADeletionThatHangsDoesNotHoldUpOthers(t *testing.T) {
	t.Parallel()
	d := deletions{
		b: &Broker{log: slog.New(slog.DiscardHandler)}, room: make(chan struct{}, 2), ended: make(chan struct{}, 1), underWay: map[string]bool{},
	}
	ctx, cancel := context.WithCancel(t.Context())
	hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	d.try(ctx, "topic a", hang)
	for range 10 {
		d.try(ctx, "topic a", func(context.Context) error { t.Error("begun twice"); return nil })
		done := make(chan struct{})
		d.try(ctx, "topic b", func(context.Context) error { close(done); return nil })
		<-done
		for free := false; !free; { // its place is free a moment later
			d.mu.Lock()
			_, busy := d.underWay["topic b"]
			free = !busy
			d.mu.Unlock()
		}
	}
	d.try(ctx, "topic c", func(context.Context) error { return errors.New("no luck") })
	<-d.ended
	cancel()
	d.work.Wait()
	<-d.ended // topic a was passed over
}
