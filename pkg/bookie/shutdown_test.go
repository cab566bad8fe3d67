package bookie

import (
	"context"
	"sync"
	"testing"
	"time"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// A bookie that is stopped while adds, reads and waits come in ends, answers each exactly once, and has what it
// acknowledged when it is back.
func TestShutdownUnderLoadLosesNothing(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	dir := t.TempDir()
	b := w.start(w.config(dir), vfs.OS())
	u := b.Storage()
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return ok })
	client, l := w.client(), w.open(u)
	if c := addTo(client, u, makeAdd(l.ID, 0, "x")); c != bookiewire.OK {
		t.Fatal(c)
	}

	var mu sync.Mutex
	acked := make(map[entry.EntryID]bool)
	var answers sync.WaitGroup
	window := make(chan struct{}, 256)
	over := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for e := entry.EntryID(1); ; e++ {
			select {
			case window <- struct{}{}:
			case <-over:
				return
			}
			answers.Add(1)
			client.Add(u, makeAdd(l.ID, e, "x"), func(err error) {
				if err == nil {
					mu.Lock()
					acked[e] = true
					if len(acked) == 1000 {
						close(over)
					}
					mu.Unlock()
				}
				<-window
				answers.Done()
			})
			if e%16 == 0 {
				answers.Add(2)
				client.Read(t.Context(), u, bookiewire.Read{Ledger: l.ID, Stride: 1, MaxEntries: 100, MaxBytes: 1 << 20}, func(bookiewire.ReadReply, error) { answers.Done() })
				go func() {
					defer answers.Done()
					_, _ = client.WaitLAC(t.Context(), u, bookiewire.WaitLAC{Ledger: l.ID, After: 1 << 40, Timeout: time.Minute})
				}()
			}
		}
	}()
	<-over
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	w.check(b.Shutdown(ctx))
	w.check(ctx.Err())
	<-stopped
	answers.Wait()

	again := w.start(w.config(dir), vfs.OS())
	w.await(u, func(i meta.BookieInfo, _ bool) bool { return i.Data == again.DataAddr() })
	back := w.client()
	for e := range acked {
		if body, c := readFrom(t, back, u, l.ID, e); body != "x" {
			t.Fatalf("entry %d was acknowledged, and is %s", e, c)
		}
	}
}

// A control call that takes long does not keep the bookie from ending, and does not outlive its store.
func TestShutdownEndsControlCalls(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	b := w.start(w.config("data"), vfs.NewMem())
	w.check(b.collector.busy.Take(t.Context(), sched.Real)) // the call waits for its turn
	answer := make(chan error, 1)
	control := w.control(b)
	_, err := control.Info(t.Context(), &bookiev1.InfoRequest{})
	w.check(err)
	go func() {
		_, err := control.CollectGarbage(t.Context(), &bookiev1.CollectGarbageRequest{})
		answer <- err
	}()
	w.check(b.Shutdown(t.Context()))
	if err := <-answer; err == nil {
		t.Fatal("the call says that it was done")
	}
}
