package brokertest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// A bookie goes and does not come back. In the end no ledger names it any more, be it open or closed, a topic's or a state log's, used or
// idle, of an owner who lives or of one who died; and everything is there.
func TestEveryLedgerLeavesALostBookie(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cluster := brokertest.Start(t, brokertest.WithBookies(4), brokertest.WithBrokers(2), brokertest.WithBrokerConfig(broker.Config{
		RollBytes: 4 << 10, Repair: repair.Config{
			Delay: -1, ScanEvery: 50 * time.Millisecond, PollEvery: 50 * time.Millisecond, RetryFirst: 20 * time.Millisecond, RetryMost: 200 * time.Millisecond,
		},
	}))
	k := cluster.Client()
	const topics, each = 8, 60
	for i := range topics {
		name := fmt.Sprint("orders", i)
		p := producer(t, k, name)
		fill(t, p, each)
		s, err := k.Subscribe(ctx, name, "sub", client.WithStart(client.Earliest()))
		if err != nil {
			t.Fatal(err)
		}
		d, err := s.Receive(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Ack(ctx); err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 { // the others stay
			if err := s.Close(ctx); err != nil {
				t.Fatal(err)
			}
			if err := p.Close(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	bookies, err := k.Admin().ListBookies(ctx, &brokerv1.ListBookiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	gone := ""
	for _, b := range bookies.GetBookies() {
		if b.GetId() == "bookie-0" {
			gone = b.GetStorageUuid()
		}
	}
	on := func() (open, all int) {
		found, err := k.Admin().ListLedgers(ctx, &brokerv1.ListLedgersRequest{Bookie: gone})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range found.GetLedgers() {
			if l.GetState() == "OPEN" {
				open++
			}
		}
		return open, len(found.GetLedgers())
	}
	eventually(t, func() bool { // rolls may be under way
		open, all := on()
		if ctx.Err() != nil {
			t.Fatalf("%d ledgers are on the bookie that is to be lost, %d of them open: the test proves nothing", all, open)
		}
		return open > 0 && open < all
	})
	cluster.KillBroker(cluster.BrokerURLs()[1])
	for i := range topics { // who takes over opens ledgers, to which nothing is appended
		if _, err := k.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: fmt.Sprint("orders", i)}); err != nil {
			t.Fatal(err)
		}
	}
	cluster.StopBookie(0)
	for {
		if _, all := on(); all == 0 {
			break
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			list, err := k.Admin().ListUnderReplicated(t.Context(), &brokerv1.ListUnderReplicatedRequest{Bookie: gone})
			t.Fatalf("ledgers name the lost bookie still: %v, %v", list, err)
		}
	}
	for i := range topics {
		r, err := k.Reader(ctx, fmt.Sprint("orders", i), client.Earliest())
		if err != nil {
			t.Fatal(err)
		}
		for n := range each {
			if _, err := r.Receive(ctx); err != nil {
				t.Fatalf("message %d of topic %d: %v", n, i, err)
			}
		}
		if err := r.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
}
