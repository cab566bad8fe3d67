//go:build linux && !noroot

package integration

import (
	"bytes"
	"context"
	"encoding/binary"
	"path/filepath"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Messages fill all disks. What is acknowledged then is confirmed, and stays so over the death of the topic's owner and of
// all bookies. Consuming alone makes the cluster writable again: what everybody has read is trimmed and deleted.
func TestFullDisksAreEmptiedByConsuming(t *testing.T) {
	t.Parallel()
	var dirs []string
	for range 3 {
		dirs = append(dirs, smallDisk(t, "64"))
	}
	w := settle(t, process.Config{
		BookieDir:  func(i int) string { return filepath.Join(dirs[i], "data") },
		BookieArgs: []string{"--segment-mib", "2", "--low-watermark", "0.8", "--high-watermark", "0.85", "--gc-interval", "1s"},
		BrokerArgs: []string{"--housekeeping-interval", "100ms", "--roll-mib", "8"},
	})
	all := func(state string) bool {
		n := 0
		for _, s := range w.states() {
			if s == state {
				n++
			}
		}
		return n == 3
	}
	_, err := w.client.Admin().CreateTopic(w.ctx, &brokerv1.CreateTopicRequest{Topic: topic})
	w.check(err)
	_, err = w.client.Admin().CreateSubscription(w.ctx, &brokerv1.CreateSubscriptionRequest{
		Topic: topic, Subscription: "s", Start: client.Earliest().Start(),
	})
	w.check(err)

	stored := w.fillWith(topic, func() bool { return all("FULL") })
	w.until("all bookies are full", func() bool { return all("FULL") })
	w.Logf("%d messages fill the disks", stored)

	const some = 50 // too few for anything to be trimmed
	next := uint64(0)
	consume := func(n uint64) {
		t.Helper()
		s, err := w.client.Subscribe(w.ctx, topic, "s")
		w.check(err)
		for range n {
			d, err := s.Receive(w.ctx)
			w.check(err)
			if got := binary.BigEndian.Uint64(d.Value); got != next {
				t.Fatalf("message %d is delivered, want %d", got, next)
			}
			next++
			if err := d.Ack(w.ctx); err != nil {
				t.Fatalf("message %d is not acknowledged while the disks are full: %v", next-1, err)
			}
		}
		w.check(s.Close(w.ctx))
	}
	consume(some)
	if !all("FULL") {
		t.Fatalf("bookies are %v", w.states())
	}
	w.killOwner(topic)
	consume(some) // the next owner opens its log on full disks
	for _, p := range w.c.Bookies {
		w.check(p.Kill())
	}
	w.check(w.ownerOf(topic).Kill())
	for _, p := range w.c.Bookies {
		w.check(p.Start(w.ctx))
	}
	for _, p := range w.c.Brokers {
		if !p.Running() {
			w.check(p.Start(w.ctx))
		}
	}
	w.until("all bookies know that they are full", func() bool { return all("FULL") })
	consume(some)
	if !all("FULL") {
		t.Fatalf("bookies are %v: the disks were not full all the time", w.states())
	}

	consume(stored - next)
	for w.subscription(topic, "s").GetBacklog() > 0 { // what was not acknowledged may be stored
		consume(1)
	}
	w.until("all bookies are writable", func() bool { return all("WRITABLE") })
	w.check(w.publish(topic, 1000))
}

// fillWith publishes numbered messages of 64 KiB until no more is acknowledged, since all bookies are full, and returns how
// many were.
func (w *town) fillWith(topic string, full func() bool) (n uint64) {
	w.Helper()
	p, err := w.client.Producer(w.ctx, topic, client.WithoutBatching())
	w.check(err)
	for {
		body := bytes.Repeat([]byte{byte(n)}, 64<<10)
		binary.BigEndian.PutUint64(body, n)
		ctx, cancel := context.WithCancel(w.ctx)
		receipt := p.PublishAsync(ctx, &client.Message{Value: body})
		for stuck := time.Duration(0); stuck < 2*time.Second; { // a slow machine does not make them full
			select {
			case <-receipt.Done():
				stuck = time.Hour
			case <-time.After(100 * time.Millisecond):
				if full() {
					stuck += 100 * time.Millisecond
				}
			}
		}
		cancel()
		if _, err := receipt.Wait(w.ctx); err != nil {
			w.Logf("publishing ends: %v", err)
			break
		}
		n++
	}
	ctx, cancel := context.WithTimeout(w.ctx, time.Second)
	defer cancel()
	_ = p.Close(ctx) // its last message is not acknowledged
	return n
}
