package brokertest_test

import (
	"bytes"
	"testing"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/dispatch"
)

// What waits for a consumer that does not read is bounded in bytes, however many permits it gave, and whatever the size
// of messages was when it gave them.
func TestASlowConsumerHoldsLittleMemory(t *testing.T) {
	t.Parallel()
	const small, large, size = 5000, 60, 1 << 20
	cluster := brokertest.Start(t)
	k := cluster.Client()
	p := producer(t, k, "orders", client.WithoutBatching(), client.WithProducerName("p"), client.WithDedup()) // each message once, also on a machine that stalls
	publish(t, p, 0, small)
	stream, answer := consuming(t, dial(t, cluster.URL()), &brokerv1.Subscribe{Topic: "orders", Subscription: "s", Start: earliest()})
	if answer.GetSubscribed() == nil {
		t.Fatal(answer)
	}
	if err := stream.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Permits{Permits: &brokerv1.Permits{Messages: 1 << 30}}}); err != nil {
		t.Fatal(err)
	}
	received := uint64(0)
	receive := func(upTo uint64) {
		t.Helper()
		for received < upTo {
			answer, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			received += uint64(len(answer.GetDeliver().GetEntries()))
		}
	}
	receive(small)
	for range large {
		if _, err := p.Publish(t.Context(), &client.Message{Value: bytes.Repeat([]byte("x"), size)}); err != nil {
			t.Fatal(err)
		}
	}
	var d *brokerv1.DescribeSubscriptionResponse
	eventually(t, func() bool {
		var err error
		d, err = k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
		if err != nil {
			t.Fatal(err)
		}
		return d.GetWaitingReason() == string(dispatch.ReasonNoPermits) || d.GetSubscription().GetUnacked() == small+large
	})
	if waiting := d.GetSubscription().GetUnacked() - small; waiting > 30 {
		t.Errorf("%d messages of %d bytes wait for a consumer that does not read", waiting, size)
	}
	receive(small + large) // none is forgotten
}
